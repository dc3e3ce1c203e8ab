"""What Prefect sees of the stages (tasks/stage.py), nights and sweeps."""
