"""Training: the loop, the programs around it, checkpoints, the binaries."""

import meshwright.framework  # noqa: F401 (first: it quietens TF before TF is imported)
