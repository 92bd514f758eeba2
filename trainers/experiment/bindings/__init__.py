"""Checks of gin's bindings against what the classes take."""
