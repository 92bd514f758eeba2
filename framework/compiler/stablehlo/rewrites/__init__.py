"""Rewrites of ops, in any layout, that avoid faults of XLA."""
