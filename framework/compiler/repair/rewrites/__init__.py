"""Ops that are rewritten whatever their layout, for faults of XLA."""
