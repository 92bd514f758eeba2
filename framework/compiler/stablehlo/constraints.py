"""Annotations in the form that each partitioner reads."""

from __future__ import annotations

import dataclasses

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jaxlib.mlir.dialects import sdy

from meshwright.framework.compiler.stablehlo.stable_hlo import (
    BRANCHES,
    Blame,
    call_target,
    end_of,
    is_annotation,
    is_of_region,
    placeholder_of,
    replace_result,
    requested_sharding,
    sharding_call,
    walk,
)
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import TYPED
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.placeholders import mesh_text
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.types import RESHARD
from meshwright.framework.sharding.xla_form import logical

SHARDING_ATTRIBUTE = "sdy.sharding"
"""Shardy's attribute of an operation, for its results, or of an argument."""


def refuse_foreign(blame: Blame, module: ir.Operation) -> None:
    """Refuses TF's own way into and out of manual regions, which is GSPMD's alone.

    Raises:
      LoweringError: there is such an op.
    """
    for op in walk(module):
        if (call_target(op) or "").startswith("SPMD"):
            raise blame.error(
                op,
                f"is TF's own {call_target(op)}, which Shardy does not know: use "
                "auto_to_manual and manual_to_auto",
            )


def untype_annotations(blame: Blame, module: ir.Operation, mesh: DeviceMesh) -> None:
    """Makes typed annotations plain, for analyses that only read shardings.

    Modules to compile have none left: partial sums are written out (`partial`).

    Raises:
      LoweringError: an annotation is over another mesh.
    """
    for op in list(walk(module)):
        placeholder = placeholder_of(op)
        if placeholder is None or placeholder.kind not in (TYPED, RESHARD):
            continue
        if placeholder.mesh != mesh_text(mesh):
            raise blame.error(
                op,
                f"is annotated over the mesh ({placeholder.mesh}), the program is "
                f"compiled for ({mesh_text(mesh)}): tensors are unreduced or reduced "
                "over the program's own mesh",
            )
        text = Sharding.parse(mesh, placeholder.config["sharding"]).untyped().to_hlo()
        with ir.InsertionPoint(op), op.location:
            plain = sharding_call("Sharding", op.operands[0], op.results[0].type, text)
        replace_result(op, plain)
        op.erase()


def rewrite_annotations(
    blame: Blame, module: ir.Operation, mesh: DeviceMesh, partitioner: Partitioner
) -> None:
    """Makes all annotations outside of manual regions ready for a partitioner.

    Raises:
      LoweringError: an annotation cannot be honoured on `mesh`; see
        `rewrite_annotation`.
    """
    for op in list(walk(module)):
        if op.name in BRANCHES and mesh.size > 1:
            _free_ends(op)
        elif is_annotation(op) and not is_of_region(op):
            rewrite_annotation(blame, op, mesh, partitioner)


def _free_ends(op) -> None:
    """Puts a barrier behind annotations that are results of branches.

    XLA gives a branch's results the sharding of the conditional's, refuses a program in
    which an annotation says otherwise, and sees through reshapes that keep the shape.
    """
    for region in op.regions:
        end = end_of(region.blocks[0])
        for number, value in enumerate(end.operands):
            maker = value
            while _keeps_shape(maker):
                maker = maker.owner.operands[0]
            if not isinstance(maker.owner, ir.Block) and is_annotation(maker.owner):
                with ir.InsertionPoint(end), end.location:
                    barrier = stablehlo.OptimizationBarrierOp([value])
                end.operands[number] = barrier.results[0]


def _keeps_shape(value: ir.Value) -> bool:
    maker = value.owner
    if isinstance(maker, ir.Block) or maker.name != "stablehlo.reshape":
        return False
    return maker.operands[0].type == value.type


def rewrite_annotation(
    blame: Blame,
    op,
    mesh: DeviceMesh,
    partitioner: Partitioner,
    *,
    manual: tuple[str, ...] = (),
) -> ir.Value:
    """Rewrites a `@Sharding` custom call, or keeps it in the program's device numbers.

    Args:
      blame: for messages.
      op: the custom call.
      mesh: the program's mesh.
      partitioner: for Shardy it becomes an `sdy.sharding_constraint`; for GSPMD the
        call stays.
      manual: the manual axes of the region around the call.

    Returns:
      The annotated tensor.

    Raises:
      LoweringError: the annotation cannot be honoured on `mesh`.
    """
    try:
        sharding = requested_sharding(op, mesh)
    except ValueError as e:
        raise blame.error(op, f"has an annotation that would be dropped: {e}") from None
    clash = [a for axes in sharding.dims for a in axes if mesh.part(a).axis in manual]
    if clash:
        raise blame.error(
            op,
            f"splits a tensor by mesh axis {clash[0]!r}, which is manual there: in a "
            "manual region annotate by the other axes",
        )
    if mesh.size > 1 and partitioner is Partitioner.GSPMD:
        in_region = dataclasses.replace(sharding, manual=manual)
        text = logical(in_region, mesh).to_hlo()
        op.attributes["mhlo.sharding"] = ir.StringAttr.get(text)
        return op.results[0]
    value = op.operands[0]
    if mesh.size > 1:
        attribute = sdy_attribute(sharding, mesh)
        with ir.InsertionPoint(op), op.location:
            value = sdy.ShardingConstraintOp(value, attribute).result
    replace_result(op, value)
    op.erase()
    return value


def sdy_attribute(sharding: Sharding, mesh: DeviceMesh) -> ir.Attribute:
    """`sharding` as Shardy's attribute, in a program for `mesh`."""
    return ir.Attribute.parse(f"#sdy.sharding{sdy_text(sharding, mesh)}")


def sdy_text(sharding: Sharding, mesh: DeviceMesh) -> str:
    """`<mesh<["X"=2, "Y"=4]>, [{"X"}, {}]>`, in a program for `mesh`.

    A device order other than the program's is part of the mesh in the text.
    """
    numbered = logical(sharding, mesh).mesh
    sizes = zip(numbered.axis_names, numbered.shape, strict=True)
    axes = ", ".join(f'"{axis}"={size}' for axis, size in sizes)
    order = ""
    if numbered.device_ids is not None:
        order = f", device_ids=[{', '.join(map(str, numbered.device_ids))}]"
    return f"<mesh<[{axes}]{order}>, {sharding.to_sdy()}>"
