"""Checkpoints: writing, checking and reading them, and other models' weights."""
