"""Sweeps without Prefect: many values of a stage's options as one run, whose DAG shares whatever the points share."""
