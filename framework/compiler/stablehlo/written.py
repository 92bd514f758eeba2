"""A module as a partitioner reads it.

Passes work on a module that is for either partitioner: annotations and manual regions
are in it as the TF program has them. In the end it is written for a single partitioner.
Shardy takes `sdy.sharding_constraint` over named mesh axes; a single annotation of
GSPMD's that is left would silently switch the entire module to GSPMD propagation. For
GSPMD they stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.constraints import (
    SHARDING_ATTRIBUTE,
    rewrite_annotations,
    sdy_attribute,
)
from meshwright.framework.compiler.stablehlo.manual.manual_regions import (
    rewrite_manual_regions,
)
from meshwright.framework.compiler.stablehlo.rewrites.workarounds import (
    Stage,
    work_around,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import Blame
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding


def write_for(
    blame: Blame, module: ir.Operation, mesh: DeviceMesh, partitioner: Partitioner
) -> None:
    """Writes annotations and manual regions for a partitioner, and keeps layouts.

    Args:
      blame: for messages.
      module: a module after the stage `SPLITTABLE`; changed in place.
      mesh: the device mesh.
      partitioner: Shardy or GSPMD.

    Raises:
      LoweringError: an annotation or a manual region cannot be honoured on `mesh`.
    """
    work_around(Stage.WRITTEN, module)
    rewrite_manual_regions(blame, module, mesh, partitioner)
    rewrite_annotations(blame, module, mesh, partitioner)
    if partitioner is Partitioner.SHARDY:
        work_around(Stage.SHARDY, module, mesh)


def write_borders(
    module: ir.Operation,
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
    main = ir.SymbolTable(module)["main"].operation
    for name, shardings in ("arg_attrs", in_shardings), ("res_attrs", out_shardings):
        given = [
            {}
            if sharding is None
            else {SHARDING_ATTRIBUTE: sdy_attribute(sharding, mesh)}
            for sharding in shardings
        ]
        if name in main.attributes:
            before = map(ir.DictAttr, ir.ArrayAttr(main.attributes[name]))
            for old, new in zip(before, given, strict=True):
                new.update({n.name: n.attr for n in old if n.name not in new})
        main.attributes[name] = ir.ArrayAttr.get([*map(ir.DictAttr.get, given)])
