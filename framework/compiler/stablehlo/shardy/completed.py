"""A module with the sharding that propagation gives each value."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.constraints import untype_annotations
from meshwright.framework.compiler.stablehlo.rewrites.workarounds import (
    Stage,
    work_around,
)
from meshwright.framework.compiler.stablehlo.shardy.op_rules import OpRules
from meshwright.framework.compiler.stablehlo.shardy.propagation import (
    Propagated,
    manual_axes,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    NUMBER,
    WHILE,
    Blame,
    walk,
)
from meshwright.framework.compiler.stablehlo.written import write_borders, write_for
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding


@dataclasses.dataclass(frozen=True, eq=False)
class CompletedModule:
    """A module that is still for either partitioner, with its tensors' shardings.

    Args:
      mesh: the device mesh.
      main: the module's entry function.
      shardings: by value; values that are not in it are replicated, or in a manual
        region.
      arguments: by number what propagation gives each argument of `main`; None if that
        is over another mesh.
    """

    mesh: DeviceMesh
    main: ir.Operation
    shardings: dict[ir.Value, Sharding | None]
    arguments: tuple[Sharding | None, ...]

    @functools.cached_property
    def rules(self) -> OpRules:
        """The rules of the module's ops."""
        return OpRules(self.main.parent.operation)

    def axes(self, value: ir.Value) -> frozenset[str]:
        """The mesh axes that split a value; all of them if its sharding is unknown."""
        if value not in self.shardings:
            return frozenset()
        sharding = self.shardings[value]
        if sharding is None:
            return frozenset(self.mesh.axis_names)
        used = [axis for axes in sharding.dims for axis in axes] + [*sharding.manual]
        return frozenset(self.mesh.part(axis).axis for axis in used)

    def dim_axes(self, value: ir.Value, dim: int) -> frozenset[str]:
        """The mesh axes that split a dim of a value, as far as is known."""
        sharding = self.shardings.get(value)
        if sharding is None:
            return frozenset()
        return frozenset(self.mesh.part(axis).axis for axis in sharding.dims[dim])

    def sharding(self, value: ir.Value) -> Sharding:
        """The sharding of a value on the mesh."""
        sharding = self.shardings.get(value)
        if sharding is None:
            return Sharding.replicated(self.mesh, ir.RankedTensorType(value.type).rank)
        return sharding


def complete(
    blame: Blame,
    module: ir.Operation,
    mesh: DeviceMesh,
    *,
    in_shardings: Sequence[Sharding | None],
    out_shardings: Sequence[Sharding | None],
) -> CompletedModule:
    """Completes a module by Shardy's propagation, whichever partitioner follows.

    Propagation runs on a copy that is written for Shardy; numbers relate its ops to
    those of the module, which stays as it is.

    Raises:
      LoweringError: an annotation or a manual region cannot be honoured on `mesh`; or
        Shardy cannot complete the module.
    """
    ops = [op for op in walk(module) if len(op.results)]
    integer = ir.IntegerType.get_signless(32)
    for number, op in enumerate(ops):
        op.attributes[NUMBER] = ir.IntegerAttr.get(integer, number)
    copy = module.clone()
    for op in ops:
        del op.attributes[NUMBER]
    write_for_shardy(blame, copy, mesh, in_shardings, out_shardings)
    propagated = Propagated(blame, copy, mesh)
    by_number = _by_number(propagated)
    main = ir.SymbolTable(module)["main"].operation
    arguments = main.regions[0].blocks[0].arguments
    shardings = dict(zip(arguments, in_shardings, strict=True))
    shardings.update(_of_results(ops, by_number))
    copied = ir.SymbolTable(copy)["main"].operation.regions[0].blocks[0].arguments
    return CompletedModule(
        mesh, main, shardings, tuple(map(propagated.sharding, copied))
    )


def write_for_shardy(
    blame: Blame,
    copy: ir.Operation,
    mesh: DeviceMesh,
    in_shardings: Sequence[Sharding | None],
    out_shardings: Sequence[Sharding | None],
) -> None:
    """Writes a copy of a module so that Shardy can complete it; see `complete`."""
    untype_annotations(blame, copy, mesh)
    work_around(Stage.SPLITTABLE, copy)
    write_for(blame, copy, mesh, Partitioner.SHARDY)
    write_borders(copy, mesh, in_shardings, out_shardings)


def _by_number(propagated: Propagated) -> dict[int, list[Sharding | None]]:
    return {
        ir.IntegerAttr(op.attributes[NUMBER]).value: [
            propagated.sharding(result, manual_axes(op)) for result in op.results
        ]
        for op in walk(propagated.module)
        if NUMBER in op.attributes and not manual_axes(op)
    }


def _of_results(ops, by_number) -> Iterator[tuple[ir.Value, Sharding | None]]:
    for number, op in enumerate(ops):
        if number in by_number:
            yield from zip(op.results, by_number[number], strict=True)
        if op.name == WHILE and number in by_number:
            for region in op.regions:
                arguments = region.blocks[0].arguments
                yield from zip(arguments, by_number[number], strict=True)
