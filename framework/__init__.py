"""Meshwright's framework: TF programs on any mesh that XLA can compile for."""

import os

# TF logs start-up notes on stderr, and does so while it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # It announces itself otherwise.

from meshwright.framework.compiler.explaining.explain import (  # noqa: E402
    Explanation,
    explain,
)
from meshwright.framework.compiler.lowering.lower import LoweringError  # noqa: E402
from meshwright.framework.compiler.program import (  # noqa: E402
    Partitioner,
    Program,
    compile_program,
)
from meshwright.framework.compiler.sharding_types.checker import (  # noqa: E402
    ShardingTypeError,
)
from meshwright.framework.compiler.sharding_types.explain_types import (  # noqa: E402
    TypedProgram,
    check_types,
    explain_types,
)
from meshwright.framework.compiler.weight_update_sharding.decide import (  # noqa: E402
    WeightUpdateSharding,
)
from meshwright.framework.compiler.weight_update_sharding.shard import (  # noqa: E402
    UpdateSharding,
)
from meshwright.framework.compiler.xla.platforms import set_platform  # noqa: E402
from meshwright.framework.modeling import schedules  # noqa: E402
from meshwright.framework.modeling.adafactor import Adafactor  # noqa: E402
from meshwright.framework.modeling.ema import ExponentialMovingAverage  # noqa: E402
from meshwright.framework.modeling.initializers import (  # noqa: E402
    Constant,
    FanIn,
    Normal,
)
from meshwright.framework.modeling.lars import LARS  # noqa: E402
from meshwright.framework.modeling.layer import (  # noqa: E402
    Context,
    Layer,
    Mode,
    WeightSpec,
)
from meshwright.framework.modeling.optimizers import SGD, Adam  # noqa: E402
from meshwright.framework.modeling.recompute import Recompute  # noqa: E402
from meshwright.framework.nested_map import NestedMap  # noqa: E402
from meshwright.framework.sharding import collectives  # noqa: E402
from meshwright.framework.sharding.annotations import (  # noqa: E402
    mesh_split,
    replicate,
    shard,
    split,
)
from meshwright.framework.sharding.manual import (  # noqa: E402
    auto_to_manual,
    manual_partition,
    manual_to_auto,
)
from meshwright.framework.sharding.mesh import DeviceMesh  # noqa: E402
from meshwright.framework.sharding.plan import ShardingPlan  # noqa: E402
from meshwright.framework.sharding.sharding import Sharding  # noqa: E402
from meshwright.framework.sharding.types import reshard  # noqa: E402

__all__ = [
    "Adafactor",
    "Adam",
    "Constant",
    "Context",
    "DeviceMesh",
    "Explanation",
    "ExponentialMovingAverage",
    "FanIn",
    "LARS",
    "Layer",
    "LoweringError",
    "Mode",
    "NestedMap",
    "Normal",
    "Partitioner",
    "Program",
    "Recompute",
    "SGD",
    "Sharding",
    "ShardingPlan",
    "ShardingTypeError",
    "TypedProgram",
    "UpdateSharding",
    "WeightSpec",
    "WeightUpdateSharding",
    "auto_to_manual",
    "check_types",
    "collectives",
    "compile_program",
    "explain",
    "explain_types",
    "manual_partition",
    "manual_to_auto",
    "mesh_split",
    "replicate",
    "reshard",
    "schedules",
    "set_platform",
    "shard",
    "split",
]
