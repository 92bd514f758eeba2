"""Manual regions of a StableHLO module: which ops are in which (GSPMD 3.4).

In the TF program a region has no op of its own: `auto_to_manual` ops lead into it, ops
that depend on them are in it, `manual_to_auto` ops lead out. Here each op is classified
as automatic, in a region, or floating: made of constants only, so that it can be in
both. Each partitioner has its way to write regions: `manual_shardy`, `manual_gspmd`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.extend.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.stablehlo.manual.manual_gspmd import write_for_gspmd
from meshwright.framework.compiler.stablehlo.manual.manual_shardy import (
    write_for_shardy,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    INTO_MANUAL,
    OUT_OF_MANUAL,
    Blame,
    Placeholder,
    op_name,
    operands_of,
    placeholder_of,
    walk,
)
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.placeholders import mesh_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kind:
    """The kind of an op's results.

    Args:
      axes: the manual axes of the op's region; None if it is in no region.
      floating: made of constants and `axis_index` only.
      per_device: floating, and different on each device: of use in a region only.
    """

    axes: tuple[str, ...] | None = None
    floating: bool = False
    per_device: bool = False


_AUTO = _Kind()
_WRITERS = {
    Partitioner.SHARDY: write_for_shardy,
    Partitioner.GSPMD: write_for_gspmd,
}
_RECOMPUTE = (
    "; if TF keeps it for the gradient of a loop or branch, recompute the region "
    "(tf.recompute_grad, or in Repeat Recompute.EVERYTHING)"
)

_VECTORIZED = (
    "; tf.vectorized_map and tape.jacobian cannot hold a manual region: call "
    "tf.vectorized_map in the region's body, or give the body's tensors a batch dim"
)


def rewrite_manual_regions(
    blame: Blame, module: ir.Operation, mesh: DeviceMesh, partitioner: Partitioner
) -> None:
    """Replaces the placeholders of manual regions in `module`.

    Raises:
      LoweringError: a manual tensor meets an automatic tensor or leaves its region, a
        collective is outside of any region, or a region is over another mesh.
    """
    placeholders = [(op, placeholder_of(op)) for op in walk(module)]
    for op, placeholder in placeholders:
        if placeholder is not None and placeholder.mesh != mesh_text(mesh):
            raise blame.error(
                op,
                f"is over the mesh ({placeholder.mesh}), the program is compiled for "
                f"({mesh_text(mesh)}); a manual region needs the program's own mesh",
            )
    if any(placeholder for _, placeholder in placeholders):
        # A call may not cut a region in two.
        PassManager.parse("builtin.module(inline,symbol-dce)").run(module)
        _rewrite_blocks(_Rewriting(blame, mesh, partitioner), module)


class _Rewriting:
    """The state that the rewriting of all blocks shares."""

    def __init__(self, blame: Blame, mesh: DeviceMesh, partitioner: Partitioner):
        self.blame = blame
        self.mesh = mesh
        self.write = _WRITERS[partitioner]
        self.kinds: dict[ir.Value, _Kind] = {}

    def of(self, value: ir.Value) -> _Kind:
        return self.kinds.get(value, _AUTO)

    def is_floating(self, value: ir.Value) -> bool:
        return self.of(value).floating

    def error(self, op, what: str) -> LoweringError:
        return self.blame.error(
            op,
            f"{what}. Tensors enter a manual region by auto_to_manual and leave by "
            "manual_to_auto, over the same axes",
        )


def _rewrite_blocks(shared: _Rewriting, holder) -> None:
    for region in holder.regions:
        for block in region.blocks:
            _rewrite_block(shared, block)


def _rewrite_block(shared: _Rewriting, block) -> None:
    """Finds and rewrites the regions of a block that is itself automatic."""
    ops = [op.operation for op in block.operations]
    kinds = [_classify(shared, op) for op in ops]
    if any(kind.axes for kind in kinds):
        axes = [kind.axes for kind in kinds]
        shared.write(shared.blame, shared.mesh, ops, axes, shared.is_floating)
    for op, kind in zip(reversed(ops), reversed(kinds), strict=True):
        if kind.per_device:  # Its copies are in the regions now.
            for result in op.results:
                # A value is known by its address, which a later one may have.
                del shared.kinds[result]
            op.erase()


def _classify(shared: _Rewriting, op) -> _Kind:
    placeholder = placeholder_of(op)
    inputs = [shared.of(value) for value in operands_of(op)]
    if placeholder is None:
        kind = _plain_kind(shared, op, inputs)
    else:
        kind = _placeholder_kind(shared, op, placeholder, inputs)
    leads_out = placeholder is not None and placeholder.kind == OUT_OF_MANUAL
    for result in op.results:
        shared.kinds[result] = _AUTO if leads_out else kind
    if kind.axes is None and not kind.floating:
        _rewrite_blocks(shared, op)
    elif any(_converts(inner) for inner in walk(op)):
        raise shared.error(op, "is in a manual region and has another one inside")
    return kind


def _converts(op) -> bool:
    placeholder = placeholder_of(op)
    return placeholder is not None and placeholder.kind in (INTO_MANUAL, OUT_OF_MANUAL)


def _plain_kind(shared: _Rewriting, op, inputs: Sequence[_Kind]) -> _Kind:
    axes = {kind.axes for kind in inputs} - {None}
    per_device = any(kind.per_device for kind in inputs)
    if op.name in ("func.func", "func.return", "stablehlo.return"):
        for value in operands_of(op):
            if shared.of(value).axes or shared.of(value).per_device:
                raise shared.error(
                    value.owner.operation,
                    "is in a manual region, and goes out as a result of the program, "
                    "of a loop or of a branch" + _RECOMPUTE,
                )
        return _AUTO
    if all(kind.floating for kind in inputs):
        converts = any(_converts(inner) for inner in walk(op))
        return _AUTO if converts else _Kind(floating=True, per_device=per_device)
    if not axes and not per_device:
        return _AUTO
    if len(axes) > 1:
        raise shared.error(op, f"mixes tensors of manual axes {sorted(axes)}")
    if not axes or _AUTO in inputs:
        kept = "update_slice" in op.name or any(True for _ in walk(op))
        remedy = _RECOMPUTE if kept else ""
        remedy = _VECTORIZED if "/pfor/" in op_name(op) else remedy
        raise shared.error(
            op,
            "uses a manual tensor together with an automatic one" + remedy,
        )
    return _Kind(axes=axes.pop())


def _placeholder_kind(
    shared: _Rewriting, op, placeholder: Placeholder, inputs: Sequence[_Kind]
) -> _Kind:
    named = ", ".join(placeholder.axes)
    if placeholder.kind == INTO_MANUAL:
        if any(kind.axes or kind.per_device for kind in inputs):
            raise shared.error(
                op,
                "takes a tensor that is manual already; regions do not nest: make one "
                "region manual along the axes of both, or, if one is a fused kernel's, "
                "set the layer's kernel to Kernel.NONE",
            )
        return _Kind(axes=placeholder.axes)
    if placeholder.kind == OUT_OF_MANUAL:
        if any(kind.axes != placeholder.axes and not kind.floating for kind in inputs):
            raise shared.error(op, f"takes a tensor that is not manual along {named}")
        return _Kind(axes=placeholder.axes)
    if all(kind.floating for kind in inputs):
        return _Kind(floating=True, per_device=True)
    axes = shared.mesh.entire(placeholder.axes)
    if not all(axes <= set(kind.axes or ()) for kind in inputs):
        raise shared.error(op, f"takes a tensor that is not manual along {named}")
    return inputs[0]
