"""Manual regions for GSPMD: ops stay in place, between two conversions.

Each result in a region is marked as manual. XLA ends the process at an op of a manual
subgroup without a mark, and does not propagate one through all-gathers or all-to-alls.

These and the other faults of GSPMD that this file names were seen with jaxlib 0.10.2.
What is done about one of them may go when the test beside it passes without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stablehlo.constraints import (
    rewrite_annotation,
)
from meshwright.framework.compiler.stablehlo.manual.manual_collectives import (
    build_axis_index,
    build_collective,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    BRANCHES,
    INTO_MANUAL,
    OUT_OF_MANUAL,
    WHILE,
    Blame,
    Placeholder,
    check_axes,
    copy_floating,
    is_annotation,
    placeholder_of,
    shape_of,
    sharding_call,
    tensor_type,
)
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.xla_form import logical

Axes = tuple[str, ...]
# Ops at which GSPMD ends the process where some axes are manual and others are not. One
# may go when `test_gspmd_ends_the_process_at_what_we_refuse` fails for it. For CPUs
# jaxlib 0.10.2 compiles the last two; what it does for other devices is not known.
ABORTING = (
    "stablehlo.fft",
    "stablehlo.cholesky",
    "stablehlo.triangular_solve",
    "stablehlo.batch_norm_inference",
    "stablehlo.batch_norm_training",
    "stablehlo.batch_norm_grad",
)


def write_for_gspmd(
    blame: Blame,
    mesh: DeviceMesh,
    ops: Sequence,
    axes: Sequence[Axes | None],
    is_floating: Callable[[ir.Value], bool],
) -> None:
    """Rewrites the regions of one block; for the arguments see `write_for_shardy`."""
    regions: dict[Axes, _Region] = {}
    for op, manual in zip(ops, axes, strict=True):
        if manual is not None:
            region = regions.setdefault(manual, _Region(blame, mesh, manual))
            placeholder = placeholder_of(op)
            # INTO_MANUAL takes its operand from outside.
            if placeholder is None or placeholder.kind != INTO_MANUAL:
                with ir.InsertionPoint(op):
                    copy_floating(op, is_floating, region.copies, region.finish)
            region.finish(op)


class _Region:
    """All ops of a block that are manual along the same axes."""

    def __init__(self, blame: Blame, mesh: DeviceMesh, axes: Axes):
        self.blame = blame
        self.mesh = mesh
        self.axes = axes
        self.copies: dict[ir.Value, ir.Value] = {}
        self.has_automatic_axes = mesh.axes_size(axes) < mesh.size

    def finish(self, op) -> list[ir.Value]:
        """Rewrites an op of the region and returns its final results."""
        placeholder = placeholder_of(op)
        check_axes(self.blame, op, placeholder, self.axes, self.mesh)
        if placeholder is None:
            return self._mark_op(op)
        with ir.InsertionPoint(op), op.location:
            if placeholder.kind == INTO_MANUAL:
                new = self._enter(op, placeholder.config["dims"])
            elif placeholder.kind == OUT_OF_MANUAL:
                new = self._leave(op, placeholder.config["dims"])
            elif placeholder.kind == "axis_index":
                new = self._axis_index(placeholder.axes)
            else:
                new = self._collective(op, placeholder)
        op.results[0].replace_all_uses_with(new)
        op.erase()
        return [new]

    def _mark_op(self, op) -> list[ir.Value]:
        if op.name in (WHILE, *BRANCHES):
            for region in op.regions:
                for block in region.blocks:
                    for inner in list(block.operations)[:-1]:
                        self.finish(inner.operation)
        if op.name == "stablehlo.set_dimension_size" and (
            op.operands[0].type == op.results[0].type
        ):
            # It changes nothing (TF's sort makes it), but GSPMD ends the process at it.
            # This may go when a `tf.sort` in a region compiles without.
            op.results[0].replace_all_uses_with(op.operands[0])
            value = op.operands[0]
            op.erase()
            return [value]
        self._check(op)
        if is_annotation(op):
            return [
                rewrite_annotation(
                    self.blame, op, self.mesh, Partitioner.GSPMD, manual=self.axes
                )
            ]
        if op.name == "stablehlo.bitcast_convert" and self.has_automatic_axes:
            before, after = len(shape_of(op.operands[0])), len(shape_of(op.results[0]))
            if before != after:
                # To elements of another width: GSPMD ends the process at it without a
                # mark of its own, which replicates it along automatic axes. This may go
                # when `test_elements_of_another_width_in_a_region` passes without.
                op.attributes["mhlo.sharding"] = ir.StringAttr.get(self._text(after))
        with ir.InsertionPoint.after(op), op.location:
            return [
                self._constant(r) if not op.operands else self._marked(r)
                for r in op.results
            ]

    def _check(self, op) -> None:
        arrays = all(isinstance(r.type, ir.RankedTensorType) for r in op.results)
        if self.has_automatic_axes and (op.name in ABORTING or not arrays):
            raise self.blame.error(
                op,
                f"becomes a {op.name} in a manual subgroup, which GSPMD cannot "
                "partition: use Partitioner.SHARDY, or make all axes manual",
            )

    def _marked(self, value: ir.Value) -> ir.Value:
        """`value` marked as manual, for all its uses."""
        mark = self._manual(value)
        value.replace_all_uses_except(mark, mark.owner.operation)
        return mark

    def _constant(self, value: ir.Value) -> ir.Value:
        """A constant as if it entered from outside, for all its uses.

        XLA merges equal constants inside and outside of regions, and a mark would hold
        for all of them: `test_regions_along_different_axes_may_have_equal_constants`
        would end the process.
        """
        annotation, entered = self._entered(value, "{replicated}", value.type)
        value.replace_all_uses_except(entered, annotation.owner.operation)
        return entered

    def _entered(
        self, value: ir.Value, text: str, type_: ir.Type
    ) -> tuple[ir.Value, ir.Value]:
        """`value` annotated by `text`, and a device's shard of it, of type `type_`."""
        rank = ir.RankedTensorType(value.type).rank
        dims = self._open_dims(rank)
        annotation = sharding_call("Sharding", value, value.type, text, dims)
        shard = sharding_call(
            "SPMDFullToShardShape", annotation, type_, self._text(rank), dims
        )
        return annotation, shard

    def _manual(self, value: ir.Value) -> ir.Value:
        rank = ir.RankedTensorType(value.type).rank
        return sharding_call(
            "Sharding", value, value.type, self._text(rank), self._open_dims(rank)
        )

    def _text(self, rank: int) -> str:
        sharding = Sharding(self.mesh, ((),) * rank, (), self.axes)
        return logical(sharding, self.mesh).to_hlo()

    def _open_dims(self, rank: int) -> tuple[int, ...]:
        return tuple(range(rank)) if self.has_automatic_axes else ()

    def _enter(self, op, dims: Sequence) -> ir.Value:
        # Like all annotations outside, not yet in the program's device numbers.
        text = Sharding(self.mesh, tuple(map(tuple, dims))).to_hlo()
        return self._entered(op.operands[0], text, op.results[0].type)[1]

    def _leave(self, op, dims: Sequence) -> ir.Value:
        sharding = logical(Sharding(self.mesh, tuple(map(tuple, dims))), self.mesh)
        return sharding_call(
            "SPMDShardToFullShape",
            self._manual(op.operands[0]),
            op.results[0].type,
            sharding.to_hlo(),
            self._open_dims(len(dims)),
        )

    def _axis_index(self, axes: Axes) -> ir.Value:

        def entered(constant: ir.Value) -> ir.Value:
            # See `_constant`: the mark would hold for equal ones outside too.
            outside = sharding_call("Sharding", constant, constant.type, "{replicated}")
            return sharding_call(
                "SPMDFullToShardShape", outside, constant.type, "{manual}"
            )

        index = build_axis_index(axes, self.mesh, entered)
        marked = sharding_call("Sharding", index, index.type, "{manual}")
        if not self.has_automatic_axes:
            return marked
        return sharding_call("SPMDShardToFullShape", marked, marked.type, self._text(0))

    def _collective(self, op, placeholder: Placeholder) -> ir.Value:
        if placeholder.kind == "all_to_all" and self.has_automatic_axes:
            return self._all_to_all(op, placeholder)
        return self._built(placeholder, op.operands[0], op.results[0].type)

    def _built(
        self, placeholder: Placeholder, value: ir.Value, type_: ir.Type
    ) -> ir.Value:
        new = build_collective(placeholder, [value], type_, self.mesh)
        rank = ir.RankedTensorType(type_).rank
        text = ir.StringAttr.get(self._text(rank))
        if value.type == type_ and _is_annotated(value):
            # Otherwise the partitioner would gather it along the automatic axes.
            text = value.owner.attributes["mhlo.sharding"]
        new.operation.attributes["mhlo.sharding"] = text
        return self._manual(new.results[0])

    def _all_to_all(self, op, placeholder: Placeholder) -> ir.Value:
        """Writes an all-to-all as an all-gather and a slice.

        In a subgroup GSPMD gives the parts of an all-to-all wrong shardings, as in
        `test_collectives_and_their_gradients` for exchanges.
        """
        count = self.mesh.axes_size(placeholder.axes)
        split, concat = (
            placeholder.config["split_dim"],
            placeholder.config["concat_dim"],
        )
        value, result = op.operands[0], op.results[0].type
        shape = list(ir.RankedTensorType(value.type).shape)
        shape[split : split + 1] = [count, shape[split] // count]
        concat += concat >= split
        pieces = self._manual(
            stablehlo.ReshapeOp(tensor_type(result, shape), value).result
        )
        shape[concat] *= count
        gather = Placeholder("all_gather", {**placeholder.config, "dim": concat})
        gathered = self._built(gather, pieces, tensor_type(result, shape))
        index = self._axis_index(placeholder.axes)
        zero = stablehlo.ConstantOp(ir.DenseElementsAttr.get(np.array(0, np.int32)))
        starts = [self._constant(zero.result)] * len(shape)
        starts[split] = index
        shape[split] = 1
        shard = stablehlo.DynamicSliceOp(gathered, starts, shape).result
        return self._manual(stablehlo.ReshapeOp(result, self._manual(shard)).result)


def _is_annotated(value: ir.Value) -> bool:
    """Whether an annotation made `value`, and leaves nothing open."""
    maker = value.owner
    if isinstance(maker, ir.Block) or not is_annotation(maker):
        return False
    return "unspecified" not in ir.StringAttr(maker.attributes["backend_config"]).value
