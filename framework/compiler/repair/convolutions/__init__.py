"""Convolutions, in layouts that XLA gets right."""
