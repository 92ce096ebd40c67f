"""Runs: the grid of them, their folders, and what carries them out."""
