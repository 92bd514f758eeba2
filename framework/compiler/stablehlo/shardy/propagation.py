"""A module completed by Shardy's propagation alone, without compiling it.

It takes a fraction of a second and leaves a sharding on every value, for the parts of
this compiler that must know shardings before XLA does.
"""

from __future__ import annotations

import re
from typing import Any

from jax.extend.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.passmanager import PassManager

from meshwright.framework.compiler.stablehlo.constraints import SHARDING_ATTRIBUTE
from meshwright.framework.compiler.stablehlo.stable_hlo import Blame
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.compiler.xla.refusals import of_xla
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

PIPELINE = "builtin.module(inline,symbol-dce,sdy-propagation-pipeline)"
"""XLA inlines calls first; at a call an uneven dim could be split only partly."""
_QUOTED = re.compile(r'"([^"]+)"')


class Propagated:
    """A module that Shardy completed, in place; use it within the module's context.

    Args:
      blame: for messages.
      module: the module as an MLIR operation, written for Shardy, its borders too.
      mesh: the program's mesh.

    Raises:
      LoweringError: Shardy cannot complete the module.
    """

    def __init__(self, blame: Blame, module: ir.Operation, mesh: DeviceMesh):
        self.mesh, self.module = mesh, module
        run_passes(blame, module, PassManager.parse(PIPELINE))
        self._meshes = _names_of(mesh, module)
        # Thousands of values share a few shardings.
        self._read: dict[Any, Sharding | None] = {}

    def sharding(
        self, value: ir.Value, manual: tuple[str, ...] = ()
    ) -> Sharding | None:
        """The sharding of a value of the module; None if it is over another mesh.

        `manual` are the manual axes of the regions around the value.
        """
        attribute = attribute_of(value)
        if attribute is None:
            rank = ir.RankedTensorType(value.type).rank
            return Sharding(self.mesh, ((),) * rank, manual=manual)
        if (attribute, manual) not in self._read:
            self._read[attribute, manual] = self._sharding(attribute, manual)
        return self._read[attribute, manual]

    def _sharding(
        self, attribute: sdy.TensorShardingAttr, manual: tuple[str, ...]
    ) -> Sharding | None:
        name = str(attribute.mesh_or_ref).removeprefix("@").strip('"')
        if name not in self._meshes:
            return None
        completed = Sharding.from_sdy(self.mesh, str(attribute))
        # At a region's border manual axes are named, but do not split the shards.
        dims = tuple(
            tuple(axis for axis in axes if axis not in manual)
            for axes in completed.dims
        )
        return Sharding(self.mesh, dims, manual=manual)


def run_passes(blame: Blame, module: ir.Operation, passes: PassManager) -> None:
    """Runs passes of Shardy's on a module, which is verified before the first only.

    Verifying it after each of some 40 passes would take more than twice as long as the
    passes do. The verifier also looks for operands that Shardy's records of loops name
    among those of one of the loop's edges, and refuses them (jaxlib 0.10.2).

    Raises:
      LoweringError: the module is not valid, or one of the passes refuses it.
    """
    passes.enable_verifier(False)
    try:
        module.verify()
        passes.run(module)
    except ir.MLIRError as e:
        name, by = blame.program, Partitioner.SHARDY
        raise of_xla(name, e, partitioner=by, sources=blame.sources) from e


def manual_axes(op) -> tuple[str, ...]:
    """The manual axes of the regions around an operation."""
    axes: list[str] = []
    while op is not None:
        if op.name == "sdy.manual_computation":
            axes += _QUOTED.findall(str(op.attributes["manual_axes"]))
        op = op.parent and op.parent.operation
    return tuple(axes)


def _names_of(mesh: DeviceMesh, module) -> set[str]:
    """The module's names for `mesh`; another device order is another mesh."""
    names = set()
    for op in module.regions[0].blocks[0].operations:
        if op.operation.name == "sdy.mesh":
            attribute = sdy.MeshAttr(op.attributes["mesh"])
            axes = map(sdy.MeshAxisAttr, attribute.axes)
            sizes = tuple((axis.name, axis.size) for axis in axes)
            same = sizes == tuple(zip(mesh.axis_names, mesh.shape, strict=True))
            if same and not list(attribute.device_ids):
                names.add(str(op.attributes["sym_name"]).strip('"'))
    return names


def attribute_of(value: ir.Value) -> sdy.TensorShardingAttr | None:
    """The sharding of a value after propagation, None if nothing splits it."""
    owner = value.owner
    if not isinstance(owner, ir.Block):
        if owner.name in ("sdy.reshard", "sdy.sharding_constraint"):
            return sdy.TensorShardingAttr(owner.attributes["sharding"])
        return _one_of(owner, SHARDING_ATTRIBUTE, value.result_number)
    holder, number = owner.owner.operation, value.arg_number
    if holder.name == "func.func":
        if "arg_attrs" not in holder.attributes:
            return None
        attributes = ir.DictAttr(ir.ArrayAttr(holder.attributes["arg_attrs"])[number])
        return (
            sdy.TensorShardingAttr(attributes[SHARDING_ATTRIBUTE])
            if (SHARDING_ATTRIBUTE in attributes)
            else None
        )
    region = holder.name == "sdy.manual_computation"
    return _one_of(holder, "in_shardings" if region else SHARDING_ATTRIBUTE, number)


def _one_of(op, name: str, number: int) -> sdy.TensorShardingAttr | None:
    if name not in op.attributes:
        return None
    sharding = sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings[number]
    return sdy.TensorShardingAttr(sharding)
