"""Weights in the layout that others publish them in: safetensors and config.json."""
