"""What Prefect sees of the stages (tasks/stage_task.py), nights and sweeps."""
