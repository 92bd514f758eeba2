"""The training loop, and the parts that watch it."""
