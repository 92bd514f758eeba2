"""Where the guarded operations of a program come to lie, before it is compiled.

Shardings are known after completion only. Under Shardy its propagation alone is run, in
this process, which takes a fraction of a second; under GSPMD, whose propagation only a
compilation runs, the program is compiled once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jax.extend.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from meshwright.framework.compiler.hlo.completion import completed_by_gspmd
from meshwright.framework.compiler.hlo.hlo_text import Instruction
from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.repair.convolutions.conv_rewrite import (
    CONVOLUTION,
    convolution_of,
)
from meshwright.framework.compiler.repair.match import (
    Shardings,
    originals,
    reshaped,
)
from meshwright.framework.compiler.repair.op_layout import OpLayout, Tensor, layout_of
from meshwright.framework.compiler.repair.table.patterns import (
    PRODUCTS,
    is_shrunk_unevenly,
)
from meshwright.framework.compiler.stablehlo.propagation import Propagated, manual_axes
from meshwright.framework.compiler.stablehlo.stable_hlo import shape_of, walk
from meshwright.framework.compiler.xla.mesh_program import MeshProgram

TAG = "meshwright_op"
"""XLA's frontend attribute that tells which operation is which."""
_ATTRIBUTES = "mhlo.frontend_attributes"
# They read, or stand for, what another instruction makes.
_NO_OPERATION = ("get-tuple-element", "bitcast", "copy")
# XLA may rewrite products and slices as these, with other shapes; and merge reshapes.
_STILL_AT_RISK = ("dot", "slice")
_RULES = "builtin.module(func.func(sdy-populate-op-sharding-rules))"


def number(module: ir.Module, guarded: Callable[[Any], bool]) -> bool:
    """Gives the guarded operations numbers that stay with them to the partitioner.

    They are XLA's frontend attributes, which an HLO module's text shows.

    Args:
      module: a module that is not for a mesh yet.
      guarded: whether an operation is.

    Returns:
      Whether there are any.
    """
    found = [op for op in walk(module.operation) if guarded(op)]
    for place, op in enumerate(found):
        text = ir.StringAttr.get(str(place))
        attributes = {}
        if _ATTRIBUTES in op.attributes:
            attributes = {
                named.name: named.attr
                for named in ir.DictAttr(op.attributes[_ATTRIBUTES])
            }
        op.attributes[_ATTRIBUTES] = ir.DictAttr.get({**attributes, TAG: text})
    return bool(found)


def numbered(module) -> dict[int, ir.Operation]:
    """The operations that have numbers."""
    found = {number_of(op): op for op in walk(module.operation)}
    found.pop(None, None)
    return found


def number_of(op) -> int | None:
    """The number of an operation, None if it has none."""
    if _ATTRIBUTES not in op.attributes:
        return None
    attributes = ir.DictAttr(op.attributes[_ATTRIBUTES])
    return int(ir.StringAttr(attributes[TAG]).value) if TAG in attributes else None


def drop_numbers(module: ir.Module) -> None:
    """Takes the numbers off again."""
    for op in walk(module.operation):
        if number_of(op) is not None:
            left = {
                named.name: named.attr
                for named in ir.DictAttr(op.attributes[_ATTRIBUTES])
                if named.name != TAG
            }
            if left:
                op.attributes[_ATTRIBUTES] = ir.DictAttr.get(left)
            else:
                del op.attributes[_ATTRIBUTES]


def by_shardy(completed: Propagated) -> Iterator[tuple[int, OpLayout]]:
    """The numbered operations of a module that Shardy completed, and their layouts."""
    PassManager.parse(_RULES).run(completed.module)
    for op in walk(completed.module):
        place = number_of(op)
        if place is not None:
            manual = manual_axes(op)
            values = [*op.operands, *op.results]
            shardings = [completed.sharding(value, manual) for value in values]
            yield place, layout_of(op, completed.mesh, shardings, manual)


def by_gspmd(
    program: MeshProgram, module: ir.Operation
) -> Iterator[tuple[int, OpLayout]]:
    """The numbered operations of a program and their layouts, as GSPMD completes it.

    Args:
      program: made of the module.
      module: written for GSPMD; it is given Shardy's rules, which tell dims apart.
    """
    PassManager.parse(_RULES).run(module)
    ops = numbered(module)
    found = completed_by_gspmd(program)
    completed, seen, changed = found.completed, set(), set()
    for one in completed.instructions:
        if one.opcode in _NO_OPERATION or not (
            one.tag in ops or one.opcode == "convolution"
        ):
            continue
        operands = completed.operands(one)
        results = found.results_of(one)
        shapes = [*(o.shape for o in operands), *(shape for shape, _ in results)]
        texts = [found.sharding(o) for o in operands] + [text for _, text in results]
        shardings = [None if isinstance(text, str) else text for text in texts]
        for op, known in _originals(program, ops, one, shapes, shardings):
            seen.add(number_of(op))
            manual = next((s.manual for s in known if s), ())
            yield number_of(op), layout_of(op, program.mesh, known, manual)
        if one.opcode in _STILL_AT_RISK or (
            one.opcode == "reshape" and _is_shrunk_unevenly(shapes, shardings)
        ):
            changed.add(one.tag)
    for place, op in ops.items():
        # XLA has changed it, and nothing is known of it. A convolution that it made
        # instead was looked at above.
        if place not in seen and op.name != CONVOLUTION:
            count = len(op.operands) + len(op.results)
            layout = layout_of(op, program.mesh, [None] * count)
            yield place, dataclasses.replace(layout, is_replaced=place not in changed)


def _is_shrunk_unevenly(shapes: list[tuple[int, ...]], shardings: Shardings) -> bool:
    """Whether a reshape goes wrong that XLA made of several."""
    pairs = zip(shapes, shardings, strict=True)
    tensors = (Tensor(shape, (None,) * len(shape), how, 1) for shape, how in pairs)
    return is_shrunk_unevenly(*tensors)


def _originals(
    program: MeshProgram,
    ops: Mapping[int, ir.Operation],
    one: Instruction,
    shapes: list[tuple[int, ...]],
    shardings: Shardings,
) -> Iterable[tuple[ir.Operation, Shardings]]:
    """The operation that an instruction was, or several where none can tell."""
    op = ops.get(one.tag)
    if op is not None and shapes == list(map(shape_of, (*op.operands, *op.results))):
        return [(op, shardings)]
    if op is not None and op.name in PRODUCTS and one.opcode == "dot":
        before = reshaped(op, shapes, shardings)
        return [(op, before)] if before else []
    if one.opcode != "convolution":
        return []
    convolutions = [op for op in ops.values() if op.name == CONVOLUTION]
    alike = list(originals(convolutions, one.op_name, shapes, shardings))
    if not alike:
        _check_adds_nothing(program, convolutions, one, shardings)
    return alike


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
