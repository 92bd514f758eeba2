"""StableHLO for the collectives of manual regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stablehlo.stable_hlo import Placeholder, tensor_type
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.xla_form import axis_groups

_DEVICE_TO_DEVICE = 1
_COMBINE = {
    "add": stablehlo.AddOp,
    "maximum": stablehlo.MaxOp,
    "minimum": stablehlo.MinOp,
}


def build_collective(
    placeholder: Placeholder, operands: Sequence, result_type: ir.Type, mesh: DeviceMesh
):
    """The collective that a placeholder stands for, at the current insertion point.

    Groups hold devices of the entire program, numbered by their index in `mesh`; the
    devices of a group have the same coordinate along every other axis.
    """
    return _BUILDERS[placeholder.kind](placeholder, operands, result_type, mesh)


def _all_reduce(placeholder, operands, result_type, mesh):
    op = stablehlo.AllReduceOp(
        [result_type],
        list(operands),
        replica_groups=_groups(placeholder, mesh),
        **_channel(),
    )
    _fill_reduction(op, result_type, placeholder.config["reduction"])
    return op


def _all_gather(placeholder, operands, result_type, mesh):
    return stablehlo.AllGatherOp(
        [result_type],
        list(operands),
        all_gather_dim=_integer(placeholder.config["dim"]),
        replica_groups=_groups(placeholder, mesh),
        **_channel(),
    )


def _reduce_scatter(placeholder, operands, result_type, mesh):
    op = stablehlo.ReduceScatterOp(
        result_type,
        operands[0],
        scatter_dimension=_integer(placeholder.config["dim"]),
        replica_groups=_groups(placeholder, mesh),
        **_channel(),
    )
    _fill_reduction(op, result_type, "add")
    return op


def _all_to_all(placeholder, operands, result_type, mesh):
    return stablehlo.AllToAllOp(
        list(operands),
        split_dimension=_integer(placeholder.config["split_dim"]),
        concat_dimension=_integer(placeholder.config["concat_dim"]),
        split_count=_integer(mesh.axes_size(placeholder.axes)),
        replica_groups=_groups(placeholder, mesh),
        channel_handle=_channel()["channel_handle"],
    )


def _collective_permute(placeholder, operands, result_type, mesh):
    groups = axis_groups(mesh, placeholder.axes)
    pairs = [
        (group[source], group[target])
        for group in groups
        for source, target in placeholder.config["pairs"]
    ]
    array = np.array(pairs, np.int64).reshape(-1, 2)
    return stablehlo.CollectivePermuteOp(
        operands[0],
        source_target_pairs=ir.DenseIntElementsAttr.get(array),
        channel_handle=_channel()["channel_handle"],
    )


_BUILDERS: dict[str, Callable] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "collective_permute": _collective_permute,
}


def build_axis_index(
    axes: Sequence[str],
    mesh: DeviceMesh,
    finish: Callable[[ir.Value], ir.Value] = lambda constant: constant,
):
    """The device's index along `axes`, int32: digits of its number in the program.

    `finish` makes constants part of a region.
    """

    def constant(number: int):
        array = np.array(number, np.uint32)
        unsigned = ir.IntegerType.get_unsigned(32)
        attribute = ir.DenseElementsAttr.get(array, type=unsigned)
        return finish(stablehlo.ConstantOp(attribute).result)

    device = stablehlo.PartitionIdOp().result
    index = constant(0)
    for axis in axes:
        digit = stablehlo.DivOp(device, constant(mesh.stride(axis))).result
        size = constant(mesh.axis_size(axis))
        digit = stablehlo.RemOp(digit, size).result
        index = stablehlo.AddOp(stablehlo.MulOp(index, size).result, digit).result
    signed = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
    return stablehlo.ConvertOp(signed, index).result


def _groups(placeholder: Placeholder, mesh: DeviceMesh) -> ir.Attribute:
    groups = np.array(axis_groups(mesh, placeholder.axes), np.int64)
    return ir.DenseIntElementsAttr.get(groups)


def _channel() -> dict[str, ir.Attribute]:
    return {
        "channel_handle": stablehlo.ChannelHandle.get(1, _DEVICE_TO_DEVICE),
        "use_global_device_ids": ir.UnitAttr.get(),
    }


def _integer(number: int) -> ir.Attribute:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)


def _fill_reduction(op, like: ir.Type, reduction: str) -> None:
    scalar = tensor_type(like, [])
    block = op.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        combined = _COMBINE[reduction](*block.arguments)
        stablehlo.ReturnOp([combined.result])
