"""Nightly evals without Prefect: when a night is due, which models it evaluates, what got worse, the trend page.

A night is a run of the store like any other (`runs/nightly-<when>.json`), whose record has a table `nightly`: the
scores of every model and benchmark, what they were compared with, and what was found.
"""
