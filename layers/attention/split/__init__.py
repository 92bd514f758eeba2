"""Attention where a plan splits the sequence: in a ring, or by heads."""
