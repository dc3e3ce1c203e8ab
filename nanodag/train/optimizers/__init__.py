"""Optimizers, a file each: its traits in the decorator, read without torch (nanodag.registry), and how it updates."""
