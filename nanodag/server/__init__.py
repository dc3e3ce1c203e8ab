"""Prefect's server: started, found, ended and asked; its login."""
