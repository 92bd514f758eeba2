"""Lowers a program for a mesh so that XLA gets its convolutions right.

Where they lie is known after completion only. So a program that has convolutions is
completed beforehand: under Shardy by its propagation alone, in this process, which
takes a fraction of a second; under GSPMD, whose propagation only a compilation runs, by
one more of these. If some lie where XLA would be wrong (`conv_layout`), the program is
lowered anew with these laid out, and looked at again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jax.extend.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.passmanager import PassManager

from meshwright.framework.compiler import jax_bridge
from meshwright.framework.compiler.completion import complete
from meshwright.framework.compiler.conv_layout import Layout, layout
from meshwright.framework.compiler.conv_match import Shardings, originals
from meshwright.framework.compiler.conv_rewrite import (
    CONVOLUTION,
    Key,
    convolution_of,
    key_of,
    shape_of,
)
from meshwright.framework.compiler.hlo_text import Instruction
from meshwright.framework.compiler.jax_bridge import MeshProgram
from meshwright.framework.compiler.lower import LoweredFunction, LoweringError
from meshwright.framework.compiler.stable_hlo import Blame, walk
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

# What is laid out stays so, but others may lie otherwise after it; so many looks.
_ROUNDS = 4
_QUOTED = re.compile(r'"([^"]+)"')


def lower_for_mesh(
    lowered: LoweredFunction, mesh: DeviceMesh, **border: Any
) -> MeshProgram:
    """`jax_bridge.lower_for_mesh`, convolutions laid out so that XLA is right.

    Raises:
      LoweringError: as there; or XLA would get a convolution wrong that cannot be laid
        out, such as one in a manual region.
    """
    if mesh.size == 1 or b"convolution" not in lowered.hlo:
        return jax_bridge.lower_for_mesh(lowered, mesh, **border)
    blame = Blame(lowered.name, lowered.sources)
    layouts: dict[Key, Layout] = {}
    for _ in range(_ROUNDS):
        program = jax_bridge.lower_for_mesh(lowered, mesh, layouts=layouts, **border)
        wrong = _wrong(blame, program)
        if not wrong:
            return program
        layouts.update(wrong)
    name, *_, shape = next(iter(wrong))
    raise LoweringError(
        f"{lowered.name}: no layout was found in which XLA gets convolution {name!r} "
        f"of shape {list(shape)} right; annotate its operands and its result so that "
        "every mesh axis splits the batch or a window dim of both"
    )


def _wrong(blame: Blame, program: MeshProgram) -> dict[Key, Layout]:
    """Layouts for the convolutions that XLA would get wrong."""
    module = program.lowered.compiler_ir("stablehlo")
    found = {}
    with module.context:
        completed = _by_shardy if program.shardy else _by_gspmd
        for op, shardings in completed(program, module):
            chosen = layout(convolution_of(op), program.mesh, *shardings)
            if chosen is not None:
                _check_no_region(blame, op, shardings, chosen)
                found[key_of(op)] = chosen
    return found


def _convolutions(op) -> list:
    return [inner for inner in walk(op) if inner.name == CONVOLUTION]


def _check_no_region(blame: Blame, op, shardings: Shardings, chosen: Layout) -> None:
    manual = next((one.manual for one in shardings if one and one.manual), ())
    if manual:
        axes = " and ".join(chosen.manual) or "others"
        raise blame.error(
            op,
            f"is a convolution in a region manual along {', '.join(manual)}, whose "
            f"operands lie {' and '.join(map(str, shardings[:2]))}: XLA would count "
            f"what devices along {axes} hold alike several times. Split the batch by "
            f"{axes}, or make the region manual along {axes} too",
        )


def _by_shardy(
    program: MeshProgram, module: ir.Module
) -> Iterator[tuple[ir.Operation, Shardings]]:
    completed = module.operation.clone()
    PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(completed)
    meshes = _names_of(program.mesh, completed)
    for op in _convolutions(completed):
        values = [*op.operands, op.results[0]]
        manual = _manual_axes(op)
        yield op, [_read(program.mesh, meshes, value, manual) for value in values]


def _names_of(mesh: DeviceMesh, module) -> set[str]:
    """What the module calls `mesh`; another device order is another mesh."""
    found = set()
    for op in walk(module):
        if op.name == "sdy.mesh":
            attribute = sdy.MeshAttr(op.attributes["mesh"])
            axes = map(sdy.MeshAxisAttr, attribute.axes)
            sizes = tuple((axis.name, axis.size) for axis in axes)
            same = sizes == tuple(zip(mesh.axis_names, mesh.shape, strict=True))
            if same and not list(attribute.device_ids):
                found.add(str(op.attributes["sym_name"]).strip('"'))
    return found


def _manual_axes(op) -> tuple[str, ...]:
    """The manual axes of the regions around an operation."""
    axes: list[str] = []
    while op is not None:
        if op.name == "sdy.manual_computation":
            axes += _QUOTED.findall(str(op.attributes["manual_axes"]))
        op = op.parent and op.parent.operation
    return tuple(axes)


def _read(
    mesh: DeviceMesh, meshes: set[str], value: ir.Value, manual: tuple[str, ...]
) -> Sharding | None:
    attribute = _attribute_of(value)
    if attribute is None:
        return Sharding(mesh, ((),) * len(shape_of(value)), manual=manual)
    name = str(attribute.mesh_or_ref).removeprefix("@").strip('"')
    if name not in meshes:
        return None
    completed = Sharding.from_sdy(mesh, str(attribute))
    # At a region's border manual axes are named, and are the shards' no more.
    dims = tuple(
        tuple(axis for axis in axes if axis not in manual) for axes in completed.dims
    )
    return Sharding(mesh, dims, manual=manual)


def _attribute_of(value: ir.Value) -> sdy.TensorShardingAttr | None:
    """The sharding of a value after propagation, None if nothing splits it."""
    owner = value.owner
    if not isinstance(owner, ir.Block):
        if owner.name in ("sdy.reshard", "sdy.sharding_constraint"):
            return sdy.TensorShardingAttr(owner.attributes["sharding"])
        return _one_of(owner, "sdy.sharding", value.result_number)
    holder, number = owner.owner.operation, value.arg_number
    if holder.name == "func.func":
        if "arg_attrs" not in holder.attributes:
            return None
        own = ir.DictAttr(ir.ArrayAttr(holder.attributes["arg_attrs"])[number])
        return (
            sdy.TensorShardingAttr(own["sdy.sharding"])
            if ("sdy.sharding" in own)
            else None
        )
    region = holder.name == "sdy.manual_computation"
    return _one_of(holder, "in_shardings" if region else "sdy.sharding", number)


def _one_of(op, name: str, number: int) -> sdy.TensorShardingAttr | None:
    if name not in op.attributes:
        return None
    found = sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings[number]
    return sdy.TensorShardingAttr(found)


def _by_gspmd(
    program: MeshProgram, module: ir.Module
) -> Iterator[tuple[ir.Operation, Shardings]]:
    ops = _convolutions(module.operation)
    if not ops:
        return
    found = complete(program)
    for one in found.completed.instructions:
        if one.opcode == "convolution":
            values = [*found.completed.operands(one), one]
            shapes = [value.shape for value in values]
            read = [found.sharding(value) for value in values]
            known = [None if isinstance(s, str) else s for s in read]
            alike = list(originals(ops, one.op_name, shapes, known))
            if not alike:
                _check_adds_nothing(program, ops, one, known)
            yield from alike


def _check_adds_nothing(
    program: MeshProgram, ops: list, one: Instruction, shardings: Shardings
) -> None:
    """Refuses a convolution of XLA's own making unless it is right however it lies.

    It is if an operand is whole: there is nothing to add up.
    """
    known = None not in shardings
    whole = known and any(max(s.splits(), default=1) == 1 for s in shardings[:2])
    if not whole or any(convolution_of(op).groups > 1 for op in ops):
        raise LoweringError(
            f"{program.name}: XLA made a convolution {one.op_name!r} of shape "
            f"{list(one.shape)} before GSPMD completed it, like none in the program, "
            "so whether it comes out right is not known; use Partitioner.SHARDY"
        )
