"""Gives convolutions of a StableHLO module layouts that XLA gets right."""

from __future__ import annotations

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.lowering.sources import program_name
from meshwright.framework.compiler.repair.convolutions.conv_layout import (
    Convolution,
    Dims,
    Layout,
    joined,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    OUT_OF_MANUAL,
    border_config,
    into_manual,
    op_name,
    placeholder_call,
    shape_of,
    tensor_type,
    with_sharding,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

CONVOLUTION = "stablehlo.convolution"

Key = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Tells convolutions apart: the op's name in the TF program; shapes of image, kernel
and result. Convolutions with the same key can have the same layout.
"""


def key_of(op) -> Key:
    """The key of an operation of a StableHLO module, lowered for a mesh or not yet."""
    shapes = map(shape_of, (*op.operands, op.results[0]))
    return program_name(op_name(op)), *shapes


def convolution_of(op) -> Convolution:
    """The attributes of a `stablehlo.convolution`."""
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    lhs, rhs = (shape_of(value) for value in op.operands)
    return Convolution(
        lhs=lhs,
        rhs=rhs,
        out=shape_of(op.results[0]),
        lhs_batch=numbers.input_batch_dimension,
        lhs_feature=numbers.input_feature_dimension,
        lhs_window=tuple(numbers.input_spatial_dimensions),
        rhs_in=numbers.kernel_input_feature_dimension,
        rhs_out=numbers.kernel_output_feature_dimension,
        rhs_window=tuple(numbers.kernel_spatial_dimensions),
        out_batch=numbers.output_batch_dimension,
        out_feature=numbers.output_feature_dimension,
        out_window=tuple(numbers.output_spatial_dimensions),
        moves=_moves(op, numbers, lhs, rhs),
        feature_groups=ir.IntegerAttr(op.attributes["feature_group_count"]).value,
        batch_groups=ir.IntegerAttr(op.attributes["batch_group_count"]).value,
    )


def _moves(op, numbers, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[bool, ...]:
    rank = len(numbers.input_spatial_dimensions)

    def listed(name: str, default: int) -> list:
        if name not in op.attributes:
            return [default] * rank
        return list(op.attributes[name])

    strides, reverse = listed("window_strides", 1), listed("window_reversal", 0)
    dilations = zip(listed("lhs_dilation", 1), listed("rhs_dilation", 1), strict=True)
    padding = [0] * (2 * rank)
    if "padding" in op.attributes:
        padding = [int(n) for n in ir.DenseIntElementsAttr(op.attributes["padding"])]
    pads = [any(padding[2 * i : 2 * i + 2]) for i in range(rank)]
    sizes = [
        (lhs[i], rhs[j])
        for i, j in zip(
            numbers.input_spatial_dimensions,
            numbers.kernel_spatial_dimensions,
            strict=True,
        )
    ]
    plain = [
        dilation == (1, 1) and not pad and not back
        for dilation, pad, back in zip(dilations, pads, reverse, strict=True)
    ]
    return tuple(
        not (ok and (image == kernel or (kernel == 1 and stride == 1)))
        for ok, (image, kernel), stride in zip(plain, sizes, strides, strict=True)
    )


def lay_out(op, mesh: DeviceMesh, layout: Layout) -> None:
    """Puts a convolution into a manual region and annotates its operands.

    It writes annotations and borders of regions as TF programs carry them, to be
    rewritten for the partitioner.
    """
    with ir.InsertionPoint(op), op.location:
        _Laid(mesh, layout).replace(op)


class _Laid:
    """Writes a convolution in its layout, before the insertion point."""

    def __init__(self, mesh: DeviceMesh, layout: Layout):
        self.mesh = mesh
        self.layout = layout

    def replace(self, op) -> None:
        layout, result = self.layout, op.results[0]
        operands = [
            self._enter(op.operands[0], layout.manual_lhs, layout.lhs),
            self._enter(op.operands[1], layout.manual_rhs, layout.rhs),
        ]
        copy = op.clone()
        for i, value in enumerate(operands):
            copy.operands[i] = value
        for name in ("feature_group_count", "batch_group_count"):
            attribute = ir.IntegerAttr(copy.attributes[name])
            if attribute.value > 1:
                copy.attributes[name] = ir.IntegerAttr.get(
                    attribute.type, layout.groups
                )
        part = Sharding(self.mesh, layout.manual_out).shard_shape(shape_of(result))
        copy.results[0].set_type(tensor_type(result.type, part))
        out = copy.results[0]
        if layout.out is not None:
            out = self._annotate(out, layout.out)
        if layout.manual:
            config = border_config(self.mesh, layout.manual, layout.manual_out)
            out = placeholder_call(OUT_OF_MANUAL, out, result.type, config)
            if layout.out is not None:
                out = self._annotate(out, joined(layout.manual_out, layout.out))
        result.replace_all_uses_with(out)
        op.erase()

    def _enter(self, value: ir.Value, manual: Dims, auto: Dims) -> ir.Value:
        if self.layout.manual:
            # GSPMD would admit a device order other than the region's.
            value = self._annotate(value, joined(manual, auto))
            value = into_manual(value, self.mesh, self.layout.manual, manual)
        return self._annotate(value, auto)

    def _annotate(self, value: ir.Value, auto: Dims) -> ir.Value:
        return with_sharding(value, Sharding(self.mesh, auto))
