"""Keras models as tasks, and Keras's optimizers for any task."""
