"""Stands in for the project's `flows` where only the start of Prefect is looked at: as many processes, no Prefect."""
