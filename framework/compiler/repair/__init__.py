"""Layouts of programs that XLA partitions correctly."""
