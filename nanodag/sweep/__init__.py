"""Sweeps without Prefect: many values of a stage's options as one run, whose DAG shares whatever the points share.

points       a grid or list of overrides -> points -> one pipeline, in which stages that points share stand once
begin        such a pipeline as a run, and what of it the store has already
conclude     what the points came to, into the store and the run's record
results      what each point reached, as rows
sweep_page   table and plots of them
"""
