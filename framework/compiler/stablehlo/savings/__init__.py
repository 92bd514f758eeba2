"""Rewrites that save time or memory, and change no value beyond its rounding."""
