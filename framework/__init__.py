"""Meshwright's framework: TF programs on any mesh that XLA can compile for."""

import os

# TF logs start-up notes on stderr, and does so while it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # It announces itself otherwise.

from meshwright.framework.compiler.jax_bridge import set_platform  # noqa: E402
from meshwright.framework.compiler.lower import LoweringError  # noqa: E402
from meshwright.framework.compiler.program import (  # noqa: E402
    Partitioner,
    Program,
    compile_program,
)
from meshwright.framework.modeling.adafactor import Adafactor  # noqa: E402
from meshwright.framework.modeling.ema import ExponentialMovingAverage  # noqa: E402
from meshwright.framework.modeling.initializers import (  # noqa: E402
    Constant,
    FanIn,
    Normal,
)
from meshwright.framework.modeling.layer import (  # noqa: E402
    Context,
    Layer,
    Mode,
    WeightSpec,
)
from meshwright.framework.modeling.optimizers import SGD, Adam  # noqa: E402
from meshwright.framework.modeling.recompute import Recompute  # noqa: E402
from meshwright.framework.nested_map import NestedMap  # noqa: E402
from meshwright.framework.sharding.annotations import (  # noqa: E402
    mesh_split,
    replicate,
)
from meshwright.framework.sharding.mesh import DeviceMesh  # noqa: E402
from meshwright.framework.sharding.plan import ShardingPlan  # noqa: E402
from meshwright.framework.sharding.sharding import Sharding  # noqa: E402

__all__ = [
    "SGD",
    "Adafactor",
    "Adam",
    "Constant",
    "Context",
    "DeviceMesh",
    "ExponentialMovingAverage",
    "FanIn",
    "Layer",
    "LoweringError",
    "Mode",
    "NestedMap",
    "Normal",
    "Partitioner",
    "Program",
    "Recompute",
    "Sharding",
    "ShardingPlan",
    "WeightSpec",
    "compile_program",
    "mesh_split",
    "replicate",
    "set_platform",
]
