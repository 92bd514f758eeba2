"""Attention by relative positions, in logits and as a layer."""
