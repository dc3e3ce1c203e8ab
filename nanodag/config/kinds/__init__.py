"""The kinds of stages, a file each."""
