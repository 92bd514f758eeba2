"""Stacks of layers: repeated, in sequence, pipelined."""
