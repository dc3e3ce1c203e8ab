"""Prefect's view of the stages (tasks/stage_task.py), nights and sweeps."""
