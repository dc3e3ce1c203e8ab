"""Sweeps without Prefect: many values of a stage's options as one run, whose DAG shares whatever the points share.

points       a grid or list of overrides -> points -> one pipeline, in which stages that points share stand once
sweep_run    such a pipeline as a run: begun, what the store has of it, its page
results      what each point reached, as rows
sweep_page   table and plots of them
"""
