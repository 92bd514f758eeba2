"""Training: the loop, the programs around it, checkpoints, the mains."""

import os

# Prevents a note that TF prints while it is imported; programs run in XLA anyway.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import meshwright.framework  # noqa: F401 (first: it quietens TF before TF is imported)
