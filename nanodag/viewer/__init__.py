"""A local page to read rollouts on: `nanodag rollouts RUN`. No torch here, nothing is written."""
