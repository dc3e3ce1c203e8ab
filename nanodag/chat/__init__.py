"""Talking to a checkpoint: `python -m nanodag.chat FOLDER`, or `nanodag chat RUN [STAGE]`."""
