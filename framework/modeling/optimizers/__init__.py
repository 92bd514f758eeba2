"""Optimizers, schedules of their rates, and averages of weights."""
