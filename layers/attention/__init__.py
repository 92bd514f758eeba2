"""Attention, and the positions that it is told of."""
