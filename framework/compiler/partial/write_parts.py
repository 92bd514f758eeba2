"""Writes a program with partial sums in parts, as a `PartialAssignment` has them."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.partial.assignment import PartialAssignment
from meshwright.framework.compiler.partial.begins import sum_in_parts
from meshwright.framework.compiler.partial.ends import (
    add_up,
    convert_parts,
    with_leading,
)
from meshwright.framework.compiler.partial.part_by_part import part_by_part
from meshwright.framework.compiler.partial.partial_types import Axes
from meshwright.framework.compiler.stablehlo.dataflow.carried import (
    Carried,
    Use,
    carried_of_op,
)
from meshwright.framework.compiler.stablehlo.shardy.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    BRANCHES,
    WHILE,
    after,
    location_of,
    shape_of,
    tensor_type,
    zeros,
)
from meshwright.framework.compiler.stablehlo.tidy import drop_unused


def write_parts(completed: CompletedModule, plan: PartialAssignment) -> None:
    """Changes the module as the plan says."""
    writer = _Writer(completed, plan)
    writer.visit(completed.main.regions[0].blocks[0])
    for op in reversed(writer.replaced):
        op.erase()
    drop_unused(completed.main)


class _Writer:
    def __init__(self, completed: CompletedModule, plan: PartialAssignment):
        self.completed = completed
        self.mesh = completed.mesh
        self.plan = plan
        # Values with a leading dim for each axis.
        self.parts: dict[tuple[ir.Value, Axes], ir.Value] = {}
        self.replaced: list[ir.Operation] = []

    def visit(self, block) -> None:
        for op in [op.operation for op in block.operations]:
            result = op.results[0] if len(op.results) else None
            if result in self.plan.types.conversions:
                self.convert(op)
            elif op.name in (WHILE, *BRANCHES):
                self.tied(op)
            elif axes := self.plan.types.unreduced(result):
                with ir.InsertionPoint(op), op.location:
                    value = self.linear(op, self.plan.ways[result, axes].numbers, axes)
                    self.parts[result, axes] = self.led(value, axes)
                self.replaced.append(op)

    def led(self, parts: ir.Value, axes: Axes) -> ir.Value:
        """Annotates a tensor's leading dims; other dims are left to propagation."""
        return with_leading(parts, self.mesh, [(axis,) for axis in axes])

    def lead(self, axes: Axes) -> tuple[int, ...]:
        return tuple(self.mesh.axis_size(axis) for axis in axes)

    def linear(self, op, numbers, axes: Axes) -> ir.Value:
        parts = {i: self.in_parts(op.operands[i], axes) for i in numbers}
        return part_by_part(op, self.lead(axes), parts)

    def in_parts(self, value: ir.Value, axes: Axes) -> ir.Value:
        """A value with leading dims; made right after the value, unless it exists."""
        if (value, axes) not in self.parts:
            with after(value), location_of(value):
                self.parts[value, axes] = self.led(self.made(value, axes), axes)
        return self.parts[value, axes]

    def made(self, value: ir.Value, axes: Axes) -> ir.Value:
        way = self.plan.ways[value, axes]
        if way.summed is not None:
            return sum_in_parts(self.completed, way.summed)
        if way.numbers:
            return self.linear(value.owner.operation, way.numbers, axes)
        return zeros(self.type_in_parts(value, axes))

    def type_in_parts(self, value: ir.Value, axes: Axes) -> ir.Type:
        return tensor_type(value.type, (*self.lead(axes), *shape_of(value)))

    def convert(self, op) -> None:
        """Writes an annotation, or a conversion of an annotated tensor."""
        (value,), (result,) = op.operands, op.results
        known = self.plan.types.conversions[result]
        if known.before.unreduced:
            value = self.in_parts(value, known.before.unreduced)
        with ir.InsertionPoint(op), op.location:
            new = convert_parts(value, known.before, known.after)
        if known.after.unreduced:
            self.parts[result, known.after.unreduced] = new
        else:
            self.completed.shardings[new] = known.after.untyped()
            result.replace_all_uses_with(new)
        self.replaced.append(op)

    def tied(self, op) -> None:
        """Writes a loop or a conditional, some of whose tensors are in parts."""
        ties = [(tie, self.plan.axes_of(tie)) for tie in carried_of_op(op)]
        ties = [(tie, axes) for tie, axes in ties if axes]
        for tie, axes in ties:
            self.retype(tie, axes)
        for region in op.regions:
            self.visit(region.blocks[0])
        for tie, axes in ties:
            self.enter(tie.ends, axes)

    def enter(self, uses: Sequence[Use], axes: Axes) -> None:
        """Gives ops in parts what becomes a carried tensor."""
        for op, number in uses:
            op.operands[number] = self.in_parts(op.operands[number], axes)

    def retype(self, tie: Carried, axes: Axes) -> None:
        type_ = self.type_in_parts(tie.result, axes)
        if tie.is_loop:
            self.enter(tie.uses[:1], axes)
        for value in tie.values:
            value.set_type(type_)
        # What is in parts a loop's condition does not read.
        for value in tie.values[1:] if tie.is_loop else tie.values:
            with after(value), tie.op.location:
                self.open(value, axes)

    def open(self, value: ir.Value, axes: Axes) -> None:
        """Gives the readers of a carried tensor its parts, or their sum."""
        parts = self.parts[value, axes] = self.led(value, axes)
        if self.plan.types.unreduced(value):
            return
        total = add_up(parts, self.mesh, axes, axes)
        value.replace_all_uses_except(total, parts.owner.operation)
        self.parts[total, axes] = parts
        if value in self.completed.shardings:
            self.completed.shardings[total] = self.completed.shardings[value]
