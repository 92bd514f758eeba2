"""The types of a completed program: which sums are, or may be, unreduced.

The rules and the errors are those of the check of types. But here propagation says how
dims are split, and the partitioner adds up a sum where an op needs that and no
annotation says that it is unreduced.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.sharding_types.annotated import (
    annotated,
    check_left,
    typed,
)
from meshwright.framework.compiler.sharding_types.checker import (
    Checker,
    Typed,
    Unknown,
)
from meshwright.framework.compiler.sharding_types.combine import (
    check_alike,
    common,
    makes_zero,
    unreduced_after,
)
from meshwright.framework.compiler.sharding_types.op_dims import op_dims
from meshwright.framework.compiler.sharding_types.tensor_type import (
    IllTypedError,
    PartialValue,
    TensorType,
)
from meshwright.framework.compiler.stablehlo.dataflow.carried import Carried
from meshwright.framework.compiler.stablehlo.shardy.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    Blame,
    end_of,
    placeholder_of,
    requested_sharding,
    short_name,
)
from meshwright.framework.sharding.annotations import TYPED, OnConflict
from meshwright.framework.sharding.sharding import Sharding

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """The conversion of a tensor by an annotation: the types before and after it."""

    before: Sharding
    after: Sharding


class PartialTypes(Checker):
    """The types of a module's values, by annotations, completion and op rules.

    Annotations that may be reduced instead (`OnConflict.REDUCE`) are called lenient.
    They are as unreduced as their tensors can be.

    Args:
      completed: the module, which is only read.
      blame: names ops in messages.
      reducing: lenient annotations that are reduced.

    Attributes:
      conversions: the conversions, by results of typed annotations.
      yielding: lenient annotations that led to an error, and may be reduced instead.
    """

    def __init__(
        self,
        completed: CompletedModule,
        blame: Blame,
        reducing: Collection[ir.Operation],
    ):
        super().__init__(completed.mesh, blame, completed.rules)
        self.completed = completed
        self.conversions: dict[ir.Value, Conversion] = {}
        self.yielding: set[ir.Operation] = set()
        self._reducing = reducing

    def run(self) -> None:
        """Goes over the module."""
        block = self.completed.main.regions[0].blocks[0]
        for argument in block.arguments:
            self.types[argument] = self._type(argument)
        self.visit(block)
        for value in end_of(block).operands:
            type_ = self.types[value]
            if isinstance(type_, TensorType) and type_.unreduced:
                self.given(value, None)

    def unreduced(self, value: ir.Value) -> Axes:
        """The axes along which a value is unreduced wherever it is read."""
        type_ = self.types.get(value)
        return type_.unreduced if isinstance(type_, TensorType) else ()

    def can_be(self, value: ir.Value, axes: Axes) -> bool:
        """Whether a value is, or can be made, unreduced along just these axes."""
        type_ = self.types.get(value)
        if not isinstance(type_, TensorType):
            return False
        if type_.zero or type_.unreduced:
            return type_.zero or type_.unreduced == axes
        return self._leavable(type_, axes)

    def refuse(self, op, what: str, before: Sequence[TensorType]) -> None:
        super().refuse(op, what, before)
        parts = [part for type_ in before for part in type_.partial if part.decided]
        self.yielding.update(*(part.lenient for part in parts))

    def sharding(self, value: ir.Value) -> Sharding:
        return self.completed.sharding(value)

    def combined_later(self, type_: TensorType) -> Sequence[PartialValue]:
        return type_.only_decided().partial

    def _type(
        self, value: ir.Value, partial: Sequence[PartialValue] = (), **how
    ) -> TensorType:
        dims = _without_partial(self.completed.sharding(value).dims, partial)
        return TensorType.of(value, self.mesh, dims, partial=tuple(partial), **how)

    def _leavable(self, type_: TensorType, axes: Axes) -> bool:
        if not {*axes} <= {part.axis for part in type_.partial}:
            return False
        try:
            left = dataclasses.replace(type_.sharding, unreduced=axes)
            check_left(type_, left, self.can_be_left)
        except IllTypedError:
            return False
        return True

    def annotation(self, op, before: Typed) -> TensorType:
        (value,), (result,) = op.operands, op.results
        self.conversions.pop(result, None)
        if not isinstance(before, TensorType):
            return self._type(result)
        placeholder = placeholder_of(op)
        if placeholder is None:
            if before.unreduced:
                after = requested_sharding(op, self.mesh)
                annotated(result, before, after)
                if after.unspecified:
                    raise IllTypedError(
                        "it leaves dims of a partial sum to propagation",
                        "reshard it, which says where it is added up",
                    )
                start = self._before(value, before)
                self.conversions[result] = Conversion(before=start, after=after)
            return self._type(result, free=before.free, zero=before.zero)
        after = self._requested(placeholder.config["sharding"], before)
        start, lenient = after, set()
        if placeholder.kind != TYPED:
            start = self._converted(value, before, placeholder.config["before"])
        elif placeholder.config["on_conflict"] == OnConflict.REDUCE.value:
            after = dataclasses.replace(after, unreduced=self._kept(op, before, after))
            start = self._before(value, before) if before.unreduced else after
            lenient = {op}
        else:
            typed(result, before, after, sums=self.can_be_left)
        lenient.update(*(part.lenient for part in before.partial if part.decided))
        self.conversions[result] = Conversion(before=start, after=after)
        parts = [
            PartialValue(axis=axis, decided=True, lenient=frozenset(lenient))
            for axis in after.unreduced
        ]
        return TensorType.of(result, self.mesh, after.dims, partial=tuple(parts))

    def entered(self, value: ir.Value, type_: TensorType) -> None:
        super().entered(value, type_)
        if type_.unreduced:  # Leniently: it is reduced instead.
            raise IllTypedError(
                f"a manual region takes no sum unreduced along "
                f"{', '.join(type_.unreduced)}",
                f"reshard it to {type_.sharding.untyped()}",
            )

    def _converted(self, value: ir.Value, before: TensorType, text: str) -> Sharding:
        """The sharding that `reshard` converts from."""
        if not text:
            return self._before(value, before)
        expected = self._requested(text, before)
        if before.unreduced and before.unreduced != expected.unreduced:
            raise IllTypedError(
                f"it converts from {expected}, which this is not",
                f"mesh_split it to {expected} before",
            )
        if expected.unreduced:
            typed(value, before, expected, sums=self.can_be_left)
        return expected

    def _requested(self, text: str, before: TensorType) -> Sharding:
        """The sharding of an annotation; it is gathered along axes of its gradient."""
        sharding = Sharding.parse(self.mesh, text)
        reduced = tuple(axis for axis in sharding.reduced if not before.splits(axis))
        return dataclasses.replace(sharding, reduced=reduced)

    def _before(self, value: ir.Value, type_: TensorType) -> Sharding:
        """The sharding of a tensor that is not annotated."""
        return self._type(value, type_.only_decided().partial).sharding

    def _kept(self, op, before: TensorType, requested: Sharding) -> Axes:
        """The axes along which a lenient annotation leaves its tensor unreduced."""
        axes = requested.unreduced
        if op in self._reducing:
            return ()
        if before.zero:
            return axes
        if before.unreduced:
            return tuple(axis for axis in before.unreduced if axis in axes)
        for count in range(len(axes), 0, -1):
            for some in itertools.combinations(axes, count):
                if self._leavable(before, some):
                    return some
        return ()

    def computed(self, op, before: Sequence[TensorType]) -> Sequence[TensorType]:
        if not before or short_name(op) == "optimization_barrier":
            made = super().computed(op, before)
            passed = made[0].partial if len(before) == 1 else ()
            return [
                self._type(value, passed, free=type_.free, zero=type_.zero)
                for value, type_ in zip(op.results, made, strict=True)
            ]
        rule = op_dims(op, self.rules)
        partial = unreduced_after(op, rule, before, self.can_be_left)
        free = all(type_.free for type_ in before)
        zero = free and makes_zero(rule, before)
        return [
            self._type(value, partial, free=free, zero=zero) for value in op.results
        ]

    def meet(self, types: Sequence[Typed]) -> Typed | None:
        for type_ in types:
            if isinstance(type_, Unknown):
                return type_
        bound = [type_ for type_ in types if not type_.zero]
        if not bound:
            return types[0]
        partial = common(bound)
        try:
            check_alike(
                [(i, type_, type_.partial) for i, type_ in enumerate(bound)],
                self.can_be_left,
            )
        except IllTypedError:
            return None
        made = dataclasses.replace(
            bound[0],
            dims=_without_partial(bound[0].dims, partial),
            partial=tuple(partial),
            free=all(type_.free for type_ in bound),
        )
        return types[0] if made.is_as(types[0]) else made

    def carried(self, tie: Carried, first: Typed, made: Typed | None) -> Typed:
        """Without sums that are undecided where the condition reads the tensor."""
        type_ = super().carried(tie, first, made)
        if isinstance(type_, TensorType) and tie.decides():
            return type_.only_decided()
        return type_


def _without_partial(
    dims: Sequence[Axes], partial: Sequence[PartialValue]
) -> tuple[Axes, ...]:
    """The axes that split each dim, but for those along which there are parts."""
    along = {part.axis for part in partial}
    return tuple(tuple(axis for axis in split if axis not in along) for split in dims)
