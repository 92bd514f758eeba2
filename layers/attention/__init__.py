"""Attention, and the positions of tokens."""
