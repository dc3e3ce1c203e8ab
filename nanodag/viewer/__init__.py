"""Local pages of rollouts and of runs under way. No torch here, nothing is written."""
