"""Training: the loop, the programs around it, checkpoints, the binaries."""
