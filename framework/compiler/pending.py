"""Carries pending sums through a program, from where they are made to where they end.

Typed annotations (`mesh_split` with unreduced axes, `reshard`) say where a sum is
pending. From there on all that is linear in it is computed part by part, through loops,
up to the `reshard` that adds the parts up; whatever else reads it is refused. Where an
annotation says that a tensor is unreduced, it is made so: back through linear ops to
those that sum over a dim that the axes split ("Replicate forwards, partial backwards").
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
from jax.extend.mlir import ir

from meshwright.framework.compiler.conv_rewrite import shape_of
from meshwright.framework.compiler.jax_bridge import bytecode
from meshwright.framework.compiler.lower import LoweredFunction, LoweringError
from meshwright.framework.compiler.partial_sums import is_zero, sum_of
from meshwright.framework.compiler.pending_begins import sum_in_parts
from meshwright.framework.compiler.pending_ends import (
    added_up,
    annotated,
    convert_parts,
    zeros,
)
from meshwright.framework.compiler.pending_ops import choices, part_by_part
from meshwright.framework.compiler.stable_hlo import (
    WHILE,
    Blame,
    Placeholder,
    after,
    end_of,
    is_annotation,
    location_of,
    placeholder_of,
    tensor_type,
)
from meshwright.framework.compiler.weight_update_sharding.clusters import dtype_of
from meshwright.framework.compiler.weight_update_sharding.completed import (
    CompletedModule,
    completed_module,
)
from meshwright.framework.sharding.annotations import TYPED, Pending
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.placeholders import PREFIX
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.types import RESHARD

Axes = tuple[str, ...]
_RETURN = "stablehlo.return"


def has_types(lowered: LoweredFunction) -> bool:
    """Whether a function has typed annotations."""
    return any(f"{PREFIX}{kind}".encode() in lowered.hlo for kind in (TYPED, RESHARD))


def carry_pending(
    lowered: LoweredFunction,
    mesh: DeviceMesh,
    *,
    in_shardings: Sequence[Sharding | None],
    out_shardings: Sequence[Sharding | None],
    devices: Sequence[jax.Device] | None = None,
) -> LoweredFunction:
    """The function with its typed annotations written out, for either partitioner.

    Args:
      lowered: the function.
      mesh: what it is to be compiled for.
      in_shardings, out_shardings: of the leaves of its arguments and its result.
      devices: those of a topology, or None.

    Raises:
      LoweringError: a pending sum meets an op that is not linear in it, or leaves the
        program; or no sum is pending where an annotation says so.
    """
    if not has_types(lowered):
        return lowered
    with completed_module(
        lowered,
        mesh,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        devices=devices,
    ) as completed:
        _Carrying(completed, Blame(lowered.name, lowered.sources)).run()
        return dataclasses.replace(lowered, rewritten=bytecode(completed.module))


@dataclasses.dataclass(frozen=True, eq=False)
class _Parts:
    """A pending sum: `value` has a leading dim for each of `axes`."""

    axes: Axes
    value: ir.Value


class _Carrying:
    def __init__(self, completed: CompletedModule, blame: Blame):
        self.completed = completed
        self.mesh = completed.mesh
        self.blame = blame
        # What took the place of values that are pending wherever they are read.
        self.pending: dict[ir.Value, _Parts] = {}
        # Parts of values that others read whole.
        self.asked: dict[tuple[ir.Value, Axes], ir.Value] = {}
        self.replaced: list[ir.Operation] = []
        # Ops change their hash when they are changed, values do not.
        self.done: set[ir.Value] = set()
        # Arguments of loops' bodies: changed; with an end that is; to be read anew.
        self.carried: set[ir.Value] = set()
        self.ended: set[ir.Value] = set()
        self.again: set[ir.Value] = set()

    def run(self) -> None:
        self.visit(self.completed.main.regions[0].blocks[0])
        for op in reversed(self.replaced):
            op.erase()

    def visit(self, block) -> None:
        """Goes over a block's ops, those that are done already left out."""
        for op in [op.operation for op in block.operations]:
            found = placeholder_of(op)
            if any(result in self.done for result in op.results):
                continue
            if found is not None and found.kind in (TYPED, RESHARD):
                self.typed(op, found)
            elif op.name == WHILE:
                self.loop(op)
            else:
                self.plain(op)

    def plain(self, op) -> None:
        held = {i for i, v in enumerate(op.operands) if v in self.pending}
        for region in op.regions if not held else ():
            for block in region.blocks:
                self.visit(block)
        if not held or (op.name == _RETURN and op.parent.operation.name == WHILE):
            return
        first = op.operands[min(held)]
        if op.name in ("func.return", _RETURN):
            raise self.error(op, first, "leaves the program or a branch")
        if is_annotation(op):
            raise self.error(op, first, "is annotated as if it were none")
        for numbers in choices(op):
            if held <= set(numbers):
                self.replace(op, self.pending[first].axes, numbers)
                return
        raise self.error(op, first, "is read by what is not linear in it")

    def replace(self, op, axes: Axes, numbers: Sequence[int]) -> None:
        for value in (op.operands[i] for i in numbers):
            if value not in self.pending and not self.can_part(value, axes):
                raise self.mixed(op, value, axes)
        parts = {i: self.parts(op.operands[i], axes, op) for i in numbers}
        with ir.InsertionPoint(op), op.location:
            value = part_by_part(op, self.lead(axes), parts)
            self.hold(op, axes, self.led(value, axes))

    def hold(self, op, axes: Axes, parts: ir.Value) -> None:
        """Takes down what took the place of an op's result."""
        self.pending[op.results[0]] = _Parts(axes, parts)
        self.retire(op)

    def retire(self, op) -> None:
        """Has an op erased in the end, whose result nobody reads any more."""
        self.replaced.append(op)
        self.done.add(op.results[0])

    def led(self, parts: ir.Value, axes: Axes) -> ir.Value:
        """Annotates a tensor's leading dims; its own are left to completion."""
        own = range(len(axes), len(shape_of(parts)))
        leading = tuple((axis,) for axis in axes)
        sharding = Sharding(self.mesh, (*leading, *[()] * len(own)))
        sharding = sharding.opened(tuple(own), but=axes)
        value = annotated(parts, sharding)
        self.done.add(value)
        return value

    def lead(self, axes: Axes) -> tuple[int, ...]:
        return tuple(self.mesh.axis_size(axis) for axis in axes)

    def typed(self, op, found: Placeholder) -> None:
        """An annotation, or a conversion of what is annotated."""
        after_ = Sharding.parse(self.mesh, found.config["sharding"])
        before = after_
        value = op.operands[0]
        if found.kind == RESHARD:
            before = self.before(value, found)
        elif found.config["otherwise"] == Pending.REDUCED.value:
            before = after_ = self.possible(value, after_)
        if value in self.pending and not before.unreduced:
            raise self.error(op, value, "is annotated as if it were none")
        parts = value
        if before.unreduced:
            parts = self.parts(value, before.unreduced, op)
        with ir.InsertionPoint(op), op.location:
            new = convert_parts(parts, before, after_)
            if after_.unreduced:
                self.hold(op, after_.unreduced, new)
                return
        # What reads it may be a sum over a dim that is split from here on.
        self.completed.shardings[new] = after_.untyped()
        op.results[0].replace_all_uses_with(new)
        self.retire(op)

    def possible(self, value: ir.Value, wanted: Sharding) -> Sharding:
        """What is wanted, unreduced along as many of its axes as can be."""
        if value in self.pending:
            return dataclasses.replace(wanted, unreduced=self.pending[value].axes)
        for count in range(len(wanted.unreduced), 0, -1):
            for axes in itertools.combinations(wanted.unreduced, count):
                if self.can_part(value, axes):
                    return dataclasses.replace(wanted, unreduced=axes)
        return wanted.untyped()

    def before(self, value: ir.Value, found: Placeholder) -> Sharding:
        """What is converted; by what is known of it, if it is not annotated."""
        if found.config["before"]:
            return Sharding.parse(self.mesh, found.config["before"])
        axes = self.pending[value].axes if value in self.pending else ()
        dims = self.completed.sharding(value).dims
        free = [tuple(axis for axis in own if axis not in axes) for own in dims]
        return Sharding(self.mesh, tuple(free), unreduced=axes)

    def parts(self, value: ir.Value, axes: Axes, op) -> ir.Value:
        """A value with leading dims, for an op that wants it pending along axes."""
        found = self.pending.get(value)
        if found is not None and found.axes != axes:
            wanted = f"meets one that is pending along {', '.join(axes)}"
            raise self.error(op, value, wanted)
        if found is not None:
            return found.value
        if (value, axes) not in self.asked:
            if not self.can_part(value, axes):
                raise self.nothing_pending(op, value, axes)
            if isinstance(value.owner, ir.Block) and not is_zero(value):
                holder = value.owner.owner.operation
                self.carry(holder, ir.BlockArgument(value).arg_number, axes)
                self.again.add(value)  # What had read it before is to read its parts.
                return self.pending[value].value
            with after(value), location_of(value):
                self.asked[value, axes] = self.led(self.made(value, axes), axes)
        return self.asked[value, axes]

    def can_part(self, value: ir.Value, axes: Axes) -> bool:
        """Whether a value is a sum over these axes, or linear in such."""
        return _Search(self, axes).can_part(value)

    def choice(self, op, axes: Axes) -> Sequence[int] | None:
        """Operands that can all be had in parts, and in which the op is linear."""
        return _Search(self, axes).choice(op)

    def made(self, value: ir.Value, axes: Axes) -> ir.Value:
        """A value in parts, at the insertion point, where it can be."""
        lead = self.lead(axes)
        if is_zero(value):
            return zeros(tensor_type(value.type, (*lead, *shape_of(value))))
        op = value.owner.operation
        if op.name == WHILE:
            return self.loop_in_parts(op, ir.OpResult(value).result_number, axes)
        found = sum_of(self.completed, op, axes)
        if found is not None:
            return sum_in_parts(self.completed, found)
        numbers = self.choice(op, axes)
        parts = {i: self.parts(op.operands[i], axes, op) for i in numbers}
        return part_by_part(op, lead, parts)

    def loop(self, op) -> None:
        """Carries through a loop what enters or ends it pending, to a fixed point."""
        body = op.regions[1].blocks[0]
        for number, value in enumerate(op.operands):
            if value in self.pending:
                self.carry(op, number, self.pending[value].axes)
        self.visit(body)
        ends = list(end_of(body).operands)
        new = [
            (number, self.pending[value].axes)
            for number, value in enumerate(ends)
            if value in self.pending and body.arguments[number] not in self.carried
        ]
        for number, axes in new:
            self.carry(op, number, axes)
        if new or self.again.intersection(body.arguments):
            self.again.difference_update(body.arguments)
            self.loop(op)
        else:
            self.end(op)

    def carry(self, op, number: int, axes: Axes) -> ir.Value:
        """Gives what a loop carries leading dims; its result in parts."""
        parts = self.parts(op.operands[number], axes, op)
        condition, body = (region.blocks[0] for region in op.regions)
        if list(condition.arguments[number].uses):
            what = type_text(body.arguments[number], axes)
            raise self.blame.error(
                op,
                f"would carry {what}, a sum that is pending along {', '.join(axes)}, "
                "and it decides how long a loop runs: add it up before, by reshard",
            )
        op.operands[number] = parts
        own, result = body.arguments[number], op.results[number]
        for value in (condition.arguments[number], own, result):
            value.set_type(parts.type)
        self.carried.add(own)
        with ir.InsertionPoint.at_block_begin(body), op.location:
            self.pending[own] = _Parts(axes, self.led(own, axes))
        with ir.InsertionPoint.after(op), op.location:
            self.pending[result] = _Parts(axes, self.led(result, axes))
        return self.pending[result].value

    def loop_in_parts(self, op, number: int, axes: Axes) -> ir.Value:
        """The result of a loop in parts, of which others had read the sum."""
        result = op.results[number]
        parts = self.carry(op, number, axes)
        del self.pending[result]
        keeps = parts.owner.operation
        with ir.InsertionPoint.after(keeps), op.location:
            whole = added_up(parts, list(range(len(axes))))
        result.replace_all_uses_except(whole, keeps)
        self.loop(op)
        return parts

    def end(self, op) -> None:
        body = op.regions[1].blocks[0]
        ends = end_of(body)
        for number, own in enumerate(body.arguments):
            if own in self.carried and own not in self.ended:
                self.ended.add(own)
                axes = self.pending[own].axes
                ends.operands[number] = self.parts(ends.operands[number], axes, op)

    def error(self, op, value: ir.Value, what: str) -> LoweringError:
        axes = self.pending[value].axes
        if op.name == "func.return":
            op = value.owner.operation
        return self.blame.error(
            op,
            f"has to do with {type_text(value, axes)}, a sum that is pending along "
            f"{', '.join(axes)}, and it {what}: add it up before, by reshard",
        )

    def mixed(self, op, value: ir.Value, axes: Axes) -> LoweringError:
        return self.blame.error(
            op,
            f"takes {type_text(value, axes)}, a sum that is pending along "
            f"{', '.join(axes)}, together with {type_text(value, ())}, which is whole: "
            "reshard one of them to the type of the other",
        )

    def nothing_pending(self, op, value: ir.Value, axes: Axes) -> LoweringError:
        named = ", ".join(axes)
        return self.blame.error(
            op,
            f"wants {type_text(value, axes)}, but it is not linear in sums over dims "
            f"that {named} splits evenly, so nothing is pending: to make an unreduced "
            "tensor of a replicated one annotate it as replicated and reshard it",
        )


class _Search:
    """Looks back for sums over some axes.

    Args:
      carrying: what is pending so far.
      axes: the axes.
    """

    def __init__(self, carrying: _Carrying, axes: Axes):
        self.completed = carrying.completed
        self.pending = carrying.pending
        self.axes = axes
        # What loops carry is taken to be in parts until something speaks against it.
        self.found: dict[ir.Value, bool] = {}

    def can_part(self, value: ir.Value) -> bool:
        if value in self.pending:
            return self.pending[value].axes == self.axes
        if value not in self.found:
            self.found[value] = True
            self.found[value] = is_zero(value) or self._is_sum(value)
        return self.found[value]

    def _is_sum(self, value: ir.Value) -> bool:
        if isinstance(value.owner, ir.Block):
            holder = value.owner.owner.operation
            number = ir.BlockArgument(value).arg_number
            is_loop = holder.name == WHILE
            in_body = is_loop and value.owner == holder.regions[1].blocks[0]
            return in_body and self._is_carried(holder, number)
        op = value.owner.operation
        if op.name == WHILE:
            return self._is_carried(op, ir.OpResult(value).result_number)
        summed = sum_of(self.completed, op, self.axes)
        return summed is not None or self.choice(op) is not None

    def _is_carried(self, loop, number: int) -> bool:
        condition, body = (region.blocks[0] for region in loop.regions)
        ends = end_of(body).operands[number]
        decides = list(condition.arguments[number].uses)
        return (
            not decides and self.can_part(loop.operands[number]) and self.can_part(ends)
        )

    def choice(self, op) -> Sequence[int] | None:
        for numbers in choices(op):
            operands = [op.operands[i] for i in numbers]
            if not all(map(is_zero, operands)) and all(map(self.can_part, operands)):
                return numbers
        return None


def type_text(value: ir.Value, axes: Axes) -> str:
    """`f32[4, 8]{U:tp}`."""
    sizes = ", ".join(map(str, shape_of(value)))
    pending = f"{{U:{','.join(axes)}}}" if axes else ""
    return f"{dtype_of(value)}[{sizes}]{pending}"
