"""The StableHLO module of a lowered function, on its way to a partitioner.

At first the module is for either partitioner: annotations and manual regions are in it
as the TF program has them. Then it is made ready for one partitioner. Shardy takes
`sdy.sharding_constraint` over named mesh axes; a single annotation of GSPMD's that is
left would silently switch the entire module to GSPMD propagation. For GSPMD they stay.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.lowering.errors import unknown_size
from meshwright.framework.compiler.lowering.lower import LoweredFunction
from meshwright.framework.compiler.manual.manual_regions import rewrite_manual_regions
from meshwright.framework.compiler.repair.rewrites.branches import (
    open_results_in_regions,
)
from meshwright.framework.compiler.repair.rewrites.crops import crop_images
from meshwright.framework.compiler.repair.rewrites.empties import fold_empties
from meshwright.framework.compiler.repair.rewrites.fourier import (
    keep_row_major,
    replicate_in_regions,
)
from meshwright.framework.compiler.repair.rewrites.rolls import rotate
from meshwright.framework.compiler.repair.rewrites.roundings import fold_roundings
from meshwright.framework.compiler.repair.rewrites.selections import compute_once
from meshwright.framework.compiler.repair.rewrites.slices import drop_noop_strides
from meshwright.framework.compiler.repair.rewrites.tuples import flatten_tuples
from meshwright.framework.compiler.stablehlo.constraints import (
    refuse_foreign,
    rewrite_annotations,
    sdy_attribute,
    untype_annotations,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import Blame
from meshwright.framework.compiler.xla.jax_bridge import ir_context, stable_hlo_of
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

_SHARDING = "sdy.sharding"


@contextlib.contextmanager
def neutral_module(lowered: LoweredFunction) -> Iterator[ir.Module]:
    """The StableHLO module that a function was lowered to, for either partitioner.

    Annotations and manual regions are in it as the TF program has them. The module is
    to be used within the context.
    """
    with ir_context(), ir.Location.unknown():
        text = lowered.rewritten or stable_hlo_of(lowered.hlo)
        module = ir.Module.parse(text)
        flatten_tuples(module)
        yield module


def prepare(lowered: LoweredFunction, module, mesh: DeviceMesh) -> None:
    """Rewrites what XLA cannot split, or splits badly, into equivalent operations.

    Args:
      lowered: the function that the module was made of.
      module: a neutral module; changed in place.
      mesh: the device mesh.

    Raises:
      LoweringError: the module has an op that no partitioner can split, or typed
        annotations over another mesh.
    """
    if lowered.unknown_size is not None and mesh.size > 1:
        where = lowered.sources.text(lowered.unknown_size)
        raise unknown_size(lowered.name, where, what="a tensor")
    blame = Blame(lowered.name, lowered.sources)
    refuse_foreign(blame, module)
    untype_annotations(blame, module, mesh)
    fold_empties(module)
    fold_roundings(module)
    drop_noop_strides(module)
    crop_images(module)
    rotate(module)
    compute_once(module)


def write_for(
    lowered: LoweredFunction, module, mesh: DeviceMesh, partitioner: Partitioner
) -> None:
    """Writes annotations and manual regions for a partitioner, and keeps layouts.

    Args:
      lowered: the function that the module was made of.
      module: a prepared module; changed in place.
      mesh: the device mesh.
      partitioner: Shardy or GSPMD.

    Raises:
      LoweringError: an annotation or a manual region cannot be honoured on `mesh`.
    """
    blame = Blame(lowered.name, lowered.sources)
    keep_row_major(module)  # Right after transforms, before what repairs add.
    rewrite_manual_regions(blame, module, mesh, partitioner)
    rewrite_annotations(blame, module, mesh, partitioner)
    if partitioner is Partitioner.SHARDY:
        replicate_in_regions(module, mesh)
        open_results_in_regions(module, mesh)


def write_borders(
    module,
    mesh: DeviceMesh,
    in_shardings: Sequence[Sharding | None],
    out_shardings: Sequence[Sharding | None],
) -> None:
    """Gives `main` the shardings of its arguments and results, as Shardy reads them.

    JAX does that when it lowers a program; this is for modules that are only completed.

    Args:
      module: a module written for Shardy; changed in place.
      mesh: the device mesh.
      in_shardings: for the arguments; None leaves one to propagation.
      out_shardings: for the results.
    """
    main = ir.SymbolTable(module.operation)["main"].operation
    for name, shardings in ("arg_attrs", in_shardings), ("res_attrs", out_shardings):
        given = [
            {} if sharding is None else {_SHARDING: sdy_attribute(sharding, mesh)}
            for sharding in shardings
        ]
        if name in main.attributes:
            before = map(ir.DictAttr, ir.ArrayAttr(main.attributes[name]))
            for old, new in zip(before, given, strict=True):
                new.update({n.name: n.attr for n in old if n.name not in new})
        main.attributes[name] = ir.ArrayAttr.get([*map(ir.DictAttr.get, given)])


def stable_hlo(
    lowered: LoweredFunction, mesh: DeviceMesh, partitioner: Partitioner
) -> bytes:
    """The StableHLO module of a lowered function, ready for a partitioner.

    Returns:
      MLIR bytecode.

    Raises:
      LoweringError: an annotation or a manual region cannot be honoured on `mesh`.
    """
    with neutral_module(lowered) as module:
        prepare(lowered, module, mesh)
        write_for(lowered, module, mesh, partitioner)
        return bytecode(module)


def bytecode(module) -> bytes:
    """MLIR bytecode of a module."""
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()
