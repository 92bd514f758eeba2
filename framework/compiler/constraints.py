"""Annotations, as the two partitioners read them."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import sdy

from meshwright.framework.compiler.lower import LoweringError
from meshwright.framework.compiler.stable_hlo import call_target, walk, where
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

_BORDERS = ("arg_attrs", "res_attrs")
_UNSPECIFIED = re.compile(r"unspecified_dims=\[(?P<dims>[\d,]*)\]")


def refuse_foreign(name: str, module: ir.Module) -> None:
    """Refuses what TF's own functions say of shardings and this project says otherwise.

    Their annotations are attributes of ops by default. TF2XLA puts them on all that an
    op becomes, of whatever shape, and XLA heeds them under GSPMD alone. Their manual
    regions are GSPMD's too.

    Raises:
      LoweringError: there is one.
    """
    for op in walk(module.operation):
        borders = [op.attributes[k] for k in _BORDERS if k in op.attributes]
        of_op = call_target(op) is None and "mhlo.sharding" in op.attributes
        if of_op or "mhlo.sharding" in str(borders):
            holder = f"op {where(op)!r}" if of_op else "an argument"
            raise LoweringError(
                f"{name}: {holder} carries its sharding as an attribute, which would "
                "be dropped: annotate by mesh_split, or pass TF's own functions "
                "use_sharding_op=True"
            )
        if (call_target(op) or "").startswith("SPMD"):
            raise LoweringError(
                f"{name}: op {where(op)!r} is TF's own {call_target(op)}, which Shardy "
                "does not know: use auto_to_manual and manual_to_auto"
            )


def rewrite_annotations(
    name: str, module: ir.Module, mesh: DeviceMesh, *, shardy: bool
) -> None:
    """Makes all annotations outside of manual regions ready for a partitioner.

    Raises:
      LoweringError: one cannot be honoured on `mesh`; see `rewrite_annotation`.
    """
    for op in list(walk(module.operation)):
        # Those of regions are ready.
        if call_target(op) == "Sharding" and "manual" not in _text(op):
            rewrite_annotation(name, op, mesh, shardy=shardy)


def _text(op) -> str:
    return ir.StringAttr(op.attributes["mhlo.sharding"]).value


def rewrite_annotation(
    name: str, op, mesh: DeviceMesh, *, shardy: bool, manual: tuple[str, ...] = ()
) -> ir.Value:
    """Rewrites a `@Sharding` custom call, or keeps it in the program's device numbers.

    Args:
      name: the program's, for messages.
      op: the custom call.
      mesh: the program's mesh.
      shardy: to an `sdy.sharding_constraint`; else the call stays, for GSPMD.
      manual: the manual axes of the region that it is in.

    Returns:
      The annotated tensor.

    Raises:
      LoweringError: the annotation cannot be honoured on `mesh`.
    """
    sharding = _annotation(name, op, mesh)
    clash = [a for axes in sharding.dims for a in axes if mesh.part(a).axis in manual]
    if clash:
        raise LoweringError(
            f"{name}: op {where(op)!r} splits a tensor by mesh axis {clash[0]!r}, "
            "which is manual there: in a manual region annotate by the other axes"
        )
    operand, result = op.operands[0], op.results[0]
    if mesh.size > 1 and not shardy:
        in_region = dataclasses.replace(sharding, manual=manual)
        text = logical(in_region, mesh).to_hlo()
        op.attributes["mhlo.sharding"] = ir.StringAttr.get(text)
        return result
    if mesh.size > 1:
        attribute = ir.Attribute.parse(f"#sdy.sharding{sdy_text(sharding, mesh)}")
        with ir.InsertionPoint(op), op.location:
            operand = sdy.ShardingConstraintOp(operand, attribute).result
    result.replace_all_uses_with(operand)
    op.erase()
    return operand


def _annotation(name: str, op, mesh: DeviceMesh) -> Sharding:
    text = _text(op)
    rank = ir.RankedTensorType(op.operands[0].type).rank
    try:
        sharding = Sharding.from_hlo(mesh, text, rank)
    except ValueError as e:
        raise LoweringError(
            f"{name}: the annotation of op {where(op)!r} would be dropped: {e}"
        ) from None
    config = ir.StringAttr(op.attributes["backend_config"]).value
    if match := _UNSPECIFIED.search(config):
        dims = tuple(int(dim) for dim in match["dims"].split(",") if dim)
        sharding = dataclasses.replace(sharding, unspecified=dims)
    return sharding


def logical(sharding: Sharding, mesh: DeviceMesh) -> Sharding:
    """`sharding` with devices numbered by their place in `mesh`, as programs do."""
    places = np.argsort(mesh.ids.flatten())[
        np.searchsorted(np.sort(mesh.ids.flat), sharding.mesh.ids.flatten())
    ]
    own = sharding.mesh
    numbered = DeviceMesh(own.axis_names, own.shape, tuple(int(p) for p in places))
    return dataclasses.replace(sharding, mesh=numbered)


def sdy_text(sharding: Sharding, mesh: DeviceMesh) -> str:
    """`<mesh<["X"=2, "Y"=4]>, [{"X"}, {}]>`, in a program for `mesh`.

    Another device order than the program's is part of the mesh in it.
    """
    numbered = logical(sharding, mesh).mesh
    sizes = zip(numbered.axis_names, numbered.shape, strict=True)
    axes = ", ".join(f'"{axis}"={size}' for axis, size in sizes)
    order = ""
    if numbered.device_ids is not None:
        order = f", device_ids=[{', '.join(map(str, numbered.device_ids))}]"
    return f"<mesh<[{axes}]{order}>, {sharding.to_sdy()}>"
