"""Forward through a program: which sums are unreduced, and what they need in parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.partial.carried import Carried, carried_of_op
from meshwright.framework.compiler.partial.linear import choices, why_not
from meshwright.framework.compiler.stablehlo.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    BRANCHES,
    WHILE,
    Blame,
    Placeholder,
    dtype_of,
    is_annotation,
    placeholder_of,
    shape_of,
)
from meshwright.framework.sharding.annotations import TYPED, OnConflict
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.types import RESHARD

Axes = tuple[str, ...]
_RETURN = "stablehlo.return"
_NONE: frozenset[ir.Value] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """The conversion of a tensor by an annotation: the types before and after it."""

    before: Sharding
    after: Sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialUse:
    """An op that reads in parts a value that is not unreduced by itself.

    Args:
      op: the op.
      value: the value.
      axes: the axes along which it is in parts.
      beside: the partial sum that the op reads too and that requires this; else None.
      lenient: annotations that led to this use and that may be reduced; see `Flow`.
    """

    op: ir.Operation
    value: ir.Value
    axes: Axes
    beside: ir.Value | None
    lenient: frozenset[ir.Value]


class RefusedError(Exception):
    """An op that no device could compute on its part of a sum.

    Args:
      error: the error to raise.
      lenient: annotations that may be reduced instead.
    """

    def __init__(self, error: LoweringError, lenient: frozenset[ir.Value]):
        super().__init__(str(error))
        self.error = error
        self.lenient = lenient


class Flow:
    """The tensors that are unreduced, from annotations to where sums are added up.

    Annotations that may be reduced instead (`OnConflict.REDUCE`) are called lenient:
    a tensor that they alone make unreduced is reduced where an op is not linear in it.

    Args:
      completed: the module, which is only read.
      blame: names ops in messages.
      decided: the axes along which lenient annotations are unreduced, so far.

    Attributes:
      unreduced: by value, the axes along which it is unreduced wherever it is read.
      operands: by unreduced result of a linear op, which operands are in parts.
      conversions: the conversions, by results of typed annotations.
      wants: the values that are needed in parts, in the order of the program.
      undecided: by result of another lenient annotation, the axes that it names.
    """

    def __init__(
        self,
        completed: CompletedModule,
        blame: Blame,
        decided: Mapping[ir.Value, Axes],
    ):
        self.unreduced: dict[ir.Value, Axes] = {}
        self.operands: dict[ir.Value, Sequence[int]] = {}
        self.conversions: dict[ir.Value, Conversion] = {}
        self.wants: dict[tuple, PartialUse] = {}
        self.undecided: dict[ir.Value, Axes] = {}
        self._completed = completed
        self._mesh = completed.mesh
        self._blame = blame
        self._decided = decided
        self._lenient: dict[ir.Value, frozenset[ir.Value]] = {}

    def run(self) -> None:
        """Goes over the module.

        Raises:
          RefusedError: a partial sum meets an op that is not linear in it, or leaves
            the program.
        """
        self._visit(self._completed.main.regions[0].blocks[0])

    def _visit(self, block) -> None:
        for op in [op.operation for op in block.operations]:
            placeholder = placeholder_of(op)
            if placeholder is not None and placeholder.kind in (TYPED, RESHARD):
                self._typed(op, placeholder)
            elif op.name in (WHILE, *BRANCHES):
                self._tied(op)
            elif op.name != _RETURN:
                self._plain(op)

    def _hold(self, value: ir.Value, axes: Axes, made_of: Iterable[ir.Value]) -> None:
        """Notes that a value is unreduced."""
        self.unreduced[value] = axes
        had = [self._lenient.get(v, _NONE) for v in (value, *made_of)]
        self._lenient[value] = _NONE.union(*had)

    def _want(self, op, value: ir.Value, axes: Axes, beside: ir.Value | None) -> None:
        lenient = self._lenient.get(beside or op.results[0], _NONE)
        self.wants[op, value, axes] = PartialUse(
            op=op, value=value, axes=axes, beside=beside, lenient=lenient
        )

    def _plain(self, op) -> None:
        held = {i for i, v in enumerate(op.operands) if v in self.unreduced}
        if not held:
            return
        first = op.operands[min(held)]
        if op.name == "func.return":
            raise self._refused(op, first, "leaves the program")
        if is_annotation(op):
            raise self._refused(op, first, "is annotated as if it were no partial sum")
        numbers = next((n for n in choices(op) if held <= set(n)), None)
        if numbers is None:
            raise self._refused(op, first, _not_linear(op, held))
        axes = self._same_axes(op, [op.operands[i] for i in held])
        for number in set(numbers) - held:
            self._want(op, op.operands[number], axes, first)
        self._hold(op.results[0], axes, [op.operands[i] for i in held])
        self.operands[op.results[0]] = numbers

    def _same_axes(self, op, values: Sequence[ir.Value]) -> Axes:
        axes = self.unreduced[values[0]]
        for value in values:
            if self.unreduced[value] != axes:
                what = f"meets a sum that is unreduced along {', '.join(axes)}"
                raise self._refused(op, value, what)
        return axes

    def _tied(self, op) -> None:
        """Goes over a loop or branches until nothing more in them becomes unreduced."""
        if op.name != WHILE and op.operands[0] in self.unreduced:
            raise self._refused(op, op.operands[0], "decides which branch is taken")
        blocks = [region.blocks[0] for region in op.regions]
        while True:
            before = [self._state(tie.result) for tie in carried_of_op(op)]
            for tie in carried_of_op(op):
                self._tie(tie)
            for block in blocks:
                self._visit(block)
            for tie in carried_of_op(op):
                self._tie(tie)
            if before == [self._state(tie.result) for tie in carried_of_op(op)]:
                break

    def _state(self, value: ir.Value) -> tuple:
        return self.unreduced.get(value), self._lenient.get(value)

    def _tie(self, tie: Carried) -> None:
        entering = tie.entering()
        held = [value for value in entering if value in self.unreduced]
        if not held:
            return
        axes = self._same_axes(tie.op, held)
        if tie.decides():
            raise RefusedError(
                self._blame.error(
                    tie.op,
                    f"would carry {type_text(tie.result, axes)}, a sum that is "
                    f"unreduced along {', '.join(axes)}, and it decides how long a "
                    "loop runs: add it up before, by reshard",
                ),
                self._lenient[held[0]],
            )
        for value in (tie.result, *tie.arguments()):
            self._hold(value, axes, held)
        for value in entering:
            if value not in held:
                self._want(tie.op, value, axes, held[0])

    def _typed(self, op, placeholder: Placeholder) -> None:
        """Handles an annotation, or a conversion of an annotated tensor."""
        (value,), (result,) = op.operands, op.results
        after = Sharding.parse(self._mesh, placeholder.config["sharding"])
        if placeholder.kind == RESHARD:
            before = self._before(value, placeholder.config["before"])
        elif placeholder.config["on_conflict"] == OnConflict.REDUCE.value:
            known = self._lenient_types(result, value, after)
            before, after = known.before, known.after
            self._lenient[result] = frozenset([result])
        else:
            before = after
        held = self.unreduced.get(value)
        if held and not before.unreduced:
            raise self._refused(op, value, "is annotated as if it were no partial sum")
        if held and held != before.unreduced:
            along = ", ".join(before.unreduced)
            raise self._refused(
                op, value, f"meets a sum that is unreduced along {along}"
            )
        if before.unreduced and not held:
            self._want(op, value, before.unreduced, None)
        self.conversions[result] = Conversion(before=before, after=after)
        self.unreduced.pop(result, None)
        if after.unreduced:
            self._hold(result, after.unreduced, [value])

    def _before(self, value: ir.Value, written: str) -> Sharding:
        """The type of a tensor before conversion; inferred, if it is not annotated."""
        if written:
            return Sharding.parse(self._mesh, written)
        axes = self.unreduced.get(value, ())
        dims = self._completed.sharding(value).dims
        free = [
            tuple(axis for axis in dim_axes if axis not in axes) for dim_axes in dims
        ]
        return Sharding(self._mesh, tuple(free), unreduced=axes)

    def _lenient_types(
        self, result: ir.Value, value: ir.Value, annotated: Sharding
    ) -> Conversion:
        """The conversion by a lenient annotation, as unreduced as possible."""
        held = self.unreduced.get(value)
        kept = self._decided.get(result)
        self.undecided.pop(result, None)
        if held and kept != ():
            kept = tuple(axis for axis in held if axis in annotated.unreduced)
        elif kept is None:
            self.undecided[result] = annotated.unreduced
        after = dataclasses.replace(annotated, unreduced=kept or ())
        before = self._before(value, "") if held else after
        return Conversion(before=before, after=after)

    def _refused(self, op, value: ir.Value, what: str) -> RefusedError:
        axes = self.unreduced[value]
        if op.name == "func.return":
            op = value.owner.operation
        error = self._blame.error(
            op,
            f"involves {type_text(value, axes)}, a sum that is unreduced along "
            f"{', '.join(axes)}, and it {what}: add it up before, by reshard",
        )
        return RefusedError(error, self._lenient[value])

    def lacks(
        self, want: PartialUse, tied: tuple[Carried, Axes] | None
    ) -> RefusedError:
        """The error for a value that cannot be made in parts.

        Args:
          want: the use of the value.
          tied: a tensor that it is made of and that is in parts along other axes, if
            that is the reason.
        """
        return RefusedError(self._lacks(want, tied), want.lenient)

    def _lacks(
        self, want: PartialUse, tied: tuple[Carried, Axes] | None
    ) -> LoweringError:
        named, wanted = ", ".join(want.axes), type_text(want.value, want.axes)
        if tied is not None:
            tie, axes = tied
            place = str(self._blame.error(tie.op, ""))
            place = place.removeprefix(f"{self._blame.program}: ")
            return self._blame.error(
                want.op,
                f"needs {wanted} of a tensor that {place}has as "
                f"{type_text(tie.result, axes)} for another op: a loop or a "
                "conditional has a tensor in parts along the same axes for all that "
                "read it; annotate these alike and reshard them",
            )
        if want.beside is None or want.op.name in (WHILE, *BRANCHES):
            return self._blame.error(
                want.op,
                f"needs {wanted}, but the tensor is not linear in sums over dims that "
                f"{named} splits evenly, so nothing is unreduced: to make a replicated "
                "tensor unreduced, annotate it as replicated and reshard it",
            )
        return self._blame.error(
            want.op,
            f"takes {type_text(want.beside, want.axes)}, a sum that is unreduced along "
            f"{named}, together with {type_text(want.value, ())}, which is no "
            "partial sum: reshard one of them to the type of the other",
        )


def _not_linear(op, held: Collection[int]) -> str:
    """The reason why an op of unreduced operands is not computed part by part."""
    if len(held) > 1 and all((number,) in choices(op) for number in held):
        return "is multiplied by another, and only one factor may be unreduced"
    return f"is read by an op that is not linear in it{why_not(op)}"


def type_text(value: ir.Value, axes: Axes) -> str:
    """`f32[4, 8]{U:tp}`."""
    sizes = ", ".join(map(str, shape_of(value)))
    unreduced = f"{{U:{','.join(axes)}}}" if axes else ""
    return f"{dtype_of(value)}[{sizes}]{unreduced}"
