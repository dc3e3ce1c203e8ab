"""Nightly evals without Prefect: when a night is due, which models it evaluates, what got worse, the trend page.

A night is a run of the store like any other (`runs/nightly-<when>.json`), whose record has a part `nightly`: the
scores of every model and benchmark, and what could not be evaluated. What they were compared with is in its page.
"""
