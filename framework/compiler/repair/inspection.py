"""The layouts of a program's guarded operations, before it is compiled.

Shardings are known only after propagation. For Shardy its propagation alone is run, in
this process, which takes a fraction of a second; for GSPMD, whose propagation runs only
in a compilation, the program is compiled once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from jax.extend.mlir import ir

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
from meshwright.framework.compiler.stablehlo.shardy.op_rules import add_rules
from meshwright.framework.compiler.stablehlo.shardy.propagation import (
    Propagated,
    manual_axes,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    FRONTEND_ATTRIBUTES,
    shape_of,
    walk,
)
from meshwright.framework.compiler.xla.completion import completed_by_gspmd
from meshwright.framework.compiler.xla.mesh_program import MeshProgram

TAG = "meshwright_op"
"""XLA's frontend attribute that identifies operations."""
# These read, or stand for, the result of another instruction.
_NO_OPERATION = ("get-tuple-element", "bitcast", "copy")
# XLA may rewrite products and slices as these, with other shapes, and merge reshapes.
_STILL_AT_RISK = ("dot", "slice")


def number(ops: Iterable[ir.Operation]) -> None:
    """Gives operations numbers that stay with them to the partitioner.

    The numbers are XLA's frontend attributes, which an HLO module's text shows.

    Args:
      ops: operations of a module that is not for a mesh yet.
    """
    for place, op in enumerate(ops):
        text = ir.StringAttr.get(str(place))
        attributes = {}
        if FRONTEND_ATTRIBUTES in op.attributes:
            attributes = {
                named.name: named.attr
                for named in ir.DictAttr(op.attributes[FRONTEND_ATTRIBUTES])
            }
        op.attributes[FRONTEND_ATTRIBUTES] = ir.DictAttr.get({**attributes, TAG: text})


def numbered(module: ir.Operation) -> dict[int, ir.Operation]:
    """The operations that have numbers, by number."""
    ops = {number_of(op): op for op in walk(module)}
    ops.pop(None, None)
    return ops


def number_of(op) -> int | None:
    """The number of an operation, None if it has none."""
    if FRONTEND_ATTRIBUTES not in op.attributes:
        return None
    attributes = ir.DictAttr(op.attributes[FRONTEND_ATTRIBUTES])
    return int(ir.StringAttr(attributes[TAG]).value) if TAG in attributes else None


def drop_numbers(module: ir.Operation) -> None:
    """Removes the numbers again."""
    for op in walk(module):
        if number_of(op) is not None:
            left = {
                named.name: named.attr
                for named in ir.DictAttr(op.attributes[FRONTEND_ATTRIBUTES])
                if named.name != TAG
            }
            if left:
                op.attributes[FRONTEND_ATTRIBUTES] = ir.DictAttr.get(left)
            else:
                del op.attributes[FRONTEND_ATTRIBUTES]


def by_shardy(completed: Propagated) -> Iterator[tuple[int, OpLayout]]:
    """The numbered operations of a module that Shardy completed, and their layouts."""
    add_rules(completed.module)
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
      program: the program made of the module.
      module: written for GSPMD; Shardy's rules, which relate dims, are added to it.
    """
    add_rules(module)
    ops = numbered(module)
    gspmd = completed_by_gspmd(program)
    completed, seen, changed = gspmd.completed, set(), set()
    for instruction in completed.instructions:
        if instruction.opcode in _NO_OPERATION or not (
            instruction.tag in ops or instruction.opcode == "convolution"
        ):
            continue
        operands = completed.operands(instruction)
        results = gspmd.results_of(instruction)
        shapes = [*(o.shape for o in operands), *(shape for shape, _ in results)]
        texts = [gspmd.sharding(o) for o in operands] + [text for _, text in results]
        shardings = [None if isinstance(text, str) else text for text in texts]
        for op, known in _originals(program, ops, instruction, shapes, shardings):
            seen.add(number_of(op))
            manual = next((s.manual for s in known if s), ())
            yield number_of(op), layout_of(op, program.mesh, known, manual)
        if instruction.opcode in _STILL_AT_RISK or (
            instruction.opcode == "reshape" and _is_shrunk_unevenly(shapes, shardings)
        ):
            changed.add(instruction.tag)
    for place, op in ops.items():
        # XLA has changed the op, and nothing is known of it. A convolution that XLA
        # made instead was examined above.
        if place not in seen and op.name != CONVOLUTION:
            count = len(op.operands) + len(op.results)
            layout = layout_of(op, program.mesh, [None] * count)
            yield place, dataclasses.replace(layout, is_replaced=place not in changed)


def _is_shrunk_unevenly(shapes: list[tuple[int, ...]], shardings: Shardings) -> bool:
    """Whether XLA gets a reshape wrong that it made of several."""
    pairs = zip(shapes, shardings, strict=True)
    tensors = (
        Tensor(shape, (None,) * len(shape), sharding, 1) for shape, sharding in pairs
    )
    return is_shrunk_unevenly(*tensors)


def _originals(
    program: MeshProgram,
    ops: Mapping[int, ir.Operation],
    instruction: Instruction,
    shapes: list[tuple[int, ...]],
    shardings: Shardings,
) -> Iterable[tuple[ir.Operation, Shardings]]:
    """The operation that an instruction was; several, if it may be any of them."""
    op = ops.get(instruction.tag)
    if op is not None and shapes == list(map(shape_of, (*op.operands, *op.results))):
        return [(op, shardings)]
    if op is not None and op.name in PRODUCTS and instruction.opcode == "dot":
        before = reshaped(op, shapes, shardings)
        return [(op, before)] if before else []
    if instruction.opcode != "convolution":
        return []
    convolutions = [op for op in ops.values() if op.name == CONVOLUTION]
    alike = list(originals(convolutions, instruction.op_name, shapes, shardings))
    if not alike:
        _check_adds_nothing(program, convolutions, instruction, shardings)
    return alike


def _check_adds_nothing(
    program: MeshProgram, ops: list, instruction: Instruction, shardings: Shardings
) -> None:
    """Refuses a convolution that XLA made unless it is right under any sharding.

    It is right if an operand is unsharded: there is nothing to add up.
    """
    known = None not in shardings
    is_unsharded = known and any(max(s.splits(), default=1) == 1 for s in shardings[:2])
    if not is_unsharded or any(convolution_of(op).groups > 1 for op in ops):
        raise LoweringError(
            f"{program.name}: XLA made a convolution {instruction.op_name!r} of shape "
            f"{list(instruction.shape)} before GSPMD completed it, like none in the "
            "program, so whether it comes out right is not known; use "
            "Partitioner.SHARDY"
        )
