"""Attention in a ring of devices, each of which has a part of the sequence."""
