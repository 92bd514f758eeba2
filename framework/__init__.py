"""Meshwright's framework: TF programs on any mesh that XLA can compile for."""

from meshwright.framework.compiler.explaining.explain import (
    Explanation,
    explain,
)
from meshwright.framework.compiler.explaining.explain_difference import (
    explain_difference,
)
from meshwright.framework.compiler.explaining.what_if import what_if
from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.program import (
    Program,
    compile_program,
    trace_program,
)
from meshwright.framework.compiler.sharding_types.checker import (
    ShardingTypeError,
)
from meshwright.framework.compiler.sharding_types.explain_types import (
    TypedProgram,
    check_types,
    explain_types,
)
from meshwright.framework.compiler.weight_update_sharding.decide import (
    WeightUpdateSharding,
)
from meshwright.framework.compiler.weight_update_sharding.shard import (
    UpdateSharding,
)
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.framework.functions import keras
from meshwright.framework.functions.function import MeshFunction, function
from meshwright.framework.modeling.initializers import (
    Constant,
    FanIn,
    Normal,
)
from meshwright.framework.modeling.layer import (
    Context,
    Layer,
    Mode,
    WeightSpec,
)
from meshwright.framework.modeling.optimizers import schedules
from meshwright.framework.modeling.optimizers.adafactor import Adafactor
from meshwright.framework.modeling.optimizers.ema import ExponentialMovingAverage
from meshwright.framework.modeling.optimizers.lars import LARS
from meshwright.framework.modeling.optimizers.muon import Muon
from meshwright.framework.modeling.optimizers.optimizer import (
    SGD,
    Adam,
    Optimizer,
    WeightUpdate,
    slot_spec,
)
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding import collectives
from meshwright.framework.sharding.annotations import (
    mesh_split,
    replicate,
    shard,
    split,
    unreduced_gradients,
)
from meshwright.framework.sharding.manual import (
    auto_to_manual,
    manual_partition,
    manual_to_auto,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.types import reshard
from meshwright.framework.showing.page import explain_page
from meshwright.framework.showing.shards import visualize

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
    "MeshFunction",
    "Mode",
    "Muon",
    "NestedMap",
    "Normal",
    "Optimizer",
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
    "WeightUpdate",
    "WeightUpdateSharding",
    "auto_to_manual",
    "check_types",
    "collectives",
    "compile_program",
    "explain",
    "explain_difference",
    "explain_page",
    "explain_types",
    "function",
    "keras",
    "manual_partition",
    "manual_to_auto",
    "mesh_split",
    "replicate",
    "reshard",
    "schedules",
    "set_platform",
    "shard",
    "slot_spec",
    "split",
    "trace_program",
    "unreduced_gradients",
    "visualize",
    "what_if",
]
