"""Sweeps without Prefect: many values of a stage's options as one run, whose DAG shares whatever the points share.

points     a grid or list of overrides -> points -> one pipeline, in which stages that points have in common stand once
results    what each point reached, as rows; page: table and plots of them
"""
