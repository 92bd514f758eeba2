"""Infers the sharding type of each value of a module, and checks the rules.

Types flow forward, from the arguments' shardings and from annotations. `op_dims` and
`combine` have the rules of ops; annotations and control flow are here.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.sharding_types.annotated import (
    annotated,
    check_given,
    resharded,
    typed,
)
from meshwright.framework.compiler.sharding_types.combine import combine, how_to_combine
from meshwright.framework.compiler.sharding_types.op_dims import op_dims
from meshwright.framework.compiler.sharding_types.partial_sums import sum_of
from meshwright.framework.compiler.sharding_types.reshape import reshaped
from meshwright.framework.compiler.sharding_types.tensor_type import (
    IllTypedError,
    PartialValue,
    TensorType,
)
from meshwright.framework.compiler.stablehlo.dataflow.carried import (
    Carried,
    ForwardAnalysis,
)
from meshwright.framework.compiler.stablehlo.shardy.op_rules import OpRules
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    OUT_OF_MANUAL,
    Blame,
    Placeholder,
    is_annotation,
    is_constant_zero,
    op_name,
    placeholder_of,
    requested_sharding,
    shape_of,
    short_name,
)
from meshwright.framework.sharding.annotations import TYPED, OnConflict
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.placeholders import mesh_text
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.types import RESHARD

_VERBS = {
    "add": "adds",
    "concatenate": "joins",
    "convolution": "convolves",
    "divide": "divides",
    "dot": "contracts",
    "dot_general": "contracts",
    "gather": "gathers",
    "multiply": "multiplies",
    "reduce": "reduces",
    "reshape": "reshapes",
    "scatter": "scatters",
    "slice": "slices",
    "sort": "sorts",
    "subtract": "subtracts",
}
_MANY = 4


_RULE = "no sum is unreduced in a manual region, which types do not reach into"
_REMEDY = (
    "along the region's own axes add it up by all_reduce or reduce_scatter, along "
    "others leave that to the partitioner"
)


class ShardingTypeError(LoweringError):
    """The sharding types of a program do not fit; the message says where and why."""


class Unknown(enum.Enum):
    """Why a value has no type."""

    MANUAL = "each device's own, in a manual region"
    REFUSED = "what it is made of was refused"


Typed = TensorType | Unknown


class Checker(ForwardAnalysis):
    """The types of the values that it has visited, and the errors on the way.

    After an error a value is unknown, and so are values made from it up to the next
    annotation: errors are independent of each other.

    Args:
      mesh: the device mesh.
      blame: names ops in messages.
      rules: the rules of the module's ops.

    Attributes:
      types: the type of each value, in the order of the module.
      errors: the errors of each op that has some.
    """

    def __init__(self, mesh: DeviceMesh, blame: Blame, rules: OpRules):
        super().__init__()
        self.mesh = mesh
        self.blame = blame
        self.rules = rules
        self.types: dict[ir.Value, Typed] = self.facts
        self._read: dict[ir.Operation, Sequence[Typed]] = {}
        self.errors: dict[ir.Operation, list[ShardingTypeError]] = {}

    def given(self, value: ir.Value, requested: Sharding | None) -> Typed:
        """The type of a value as a result of the program, if it may be one."""
        before = self.types[value]
        if isinstance(before, Unknown):
            return before
        try:
            return check_given(value, before, requested)
        except IllTypedError as e:
            text = f"gives {before} as a result of the program: {e}"
            self.refuse(value.owner, text, [before])
            return before

    def visit_op(self, op) -> None:
        if self.errors.pop(op, None):
            self._read.pop(op, None)
        super().visit_op(op)

    def plain(self, op) -> None:
        before = [self.types[value] for value in op.operands]
        # Loops are visited until nothing changes, and little of them changes.
        if op in self._read and all(map(operator.is_, before, self._read[op])):
            return
        self._read[op] = before
        try:
            types = self.inferred(op, before)
        except IllTypedError as e:
            self._refuse(op, before, e)
            types = [Unknown.REFUSED] * len(op.results)
        for value, type_ in zip(op.results, types, strict=True):
            if not (
                isinstance(type_, TensorType) and type_.is_as(self.types.get(value))
            ):
                self.types[value] = type_

    def _refuse(self, op, before: Sequence[Typed], error: IllTypedError) -> None:
        name = short_name(op)
        types = [type_ for type_ in before if isinstance(type_, TensorType)]
        shown = [type_ for type_ in types if type_.shape or not type_.free][:_MANY]
        listed = " and ".join(map(str, shown or types)) or "a tensor"
        if placeholder_of(op) or is_annotation(op):
            self.refuse(op, f"takes {listed}: {error}", types)
        else:
            verb = _VERBS.get(name, f"computes {name} of")
            self.refuse(op, f"{verb} {listed}: {error}", types)

    def refuse(self, op, what: str, before: Sequence[TensorType]) -> None:
        made = "".join(
            f". The {part.kind} along {part.axis} is of {self.place(part.origins[0])}"
            for part in {
                p.axis: p for type_ in before for p in type_.undecided
            }.values()
            if part.origins and not self._is_of(op, part.origins[0])
        )
        if isinstance(op, ir.Block):
            error = f"{self.blame.program}: an argument {what}{made}"
        else:
            error = str(self.blame.error(op, what + made))
        self.errors.setdefault(op, []).append(ShardingTypeError(error))

    def _is_of(self, op, origin) -> bool:
        """Whether both were lowered from the same TF op."""
        return not isinstance(op, ir.Block) and op_name(op) == op_name(origin)

    def place(self, op) -> str:
        """`op 'einsum/Einsum' (mine.py:12)`."""
        text = str(self.blame.error(op, ""))
        return text.removeprefix(f"{self.blame.program}: ").strip()

    def inferred(self, op, before: Sequence[Typed]) -> Sequence[Typed]:
        placeholder = placeholder_of(op)
        if placeholder is not None and placeholder.mesh != mesh_text(self.mesh):
            raise IllTypedError(
                f"it is over the mesh ({placeholder.mesh}), and types are over "
                f"({mesh_text(self.mesh)})",
                "use the program's mesh",
            )
        if placeholder is not None and placeholder.kind == OUT_OF_MANUAL:
            return [TensorType.of(op.results[0], self.mesh, placeholder.config["dims"])]
        is_typed = placeholder is not None and placeholder.kind in (TYPED, RESHARD)
        if Unknown.MANUAL in before:
            if is_typed and _needs_partial_sum(placeholder, self.mesh):
                raise IllTypedError(_RULE, _REMEDY)
            return [Unknown.MANUAL] * len(op.results)
        if is_annotation(op) or is_typed:
            return [self.annotation(op, before[0])]
        if Unknown.REFUSED in before:
            return [Unknown.REFUSED] * len(op.results)
        if placeholder is not None:
            for value, type_ in zip(op.operands, before, strict=True):
                self.entered(value, type_)
            return [Unknown.MANUAL]
        return self.computed(op, before)

    def entered(self, value: ir.Value, type_: TensorType) -> None:
        """Refuses a tensor that cannot go into a manual region."""
        annotated(value, type_, type_.sharding.untyped())

    def annotation(self, op, before: Typed) -> TensorType:
        value = op.results[0]
        placeholder = placeholder_of(op)
        if placeholder is None:
            try:
                requested = requested_sharding(op, self.mesh)
            except ValueError as e:
                raise IllTypedError(str(e), "use the program's mesh") from None
            if requested.mesh != self.mesh:
                what = f"{requested} is over the mesh's devices in another order"
                raise IllTypedError(what, "use the program's mesh")
            return annotated(value, before, requested)
        requested = Sharding.parse(self.mesh, placeholder.config["sharding"])
        if placeholder.kind == TYPED:
            lenient = placeholder.config["on_conflict"] == OnConflict.REDUCE.value
            return typed(
                value, before, requested, or_reduced=lenient, sums=self.can_be_left
            )
        text = placeholder.config["before"]
        expected = Sharding.parse(self.mesh, text) if text else None
        return resharded(value, before, expected, requested)

    def sharding(self, value: ir.Value) -> Sharding:
        """The sharding of a value; replicated, if it has no type."""
        type_ = self.types[value]
        if isinstance(type_, TensorType):
            return type_.sharding.untyped()
        return Sharding.replicated(self.mesh, len(shape_of(value)))

    def can_be_left(self, op, axes: Sequence[str]) -> bool:
        """Whether each device of the compiled program has its own part of a sum."""
        return sum_of(self, op, axes) is not None

    def computed(self, op, before: Sequence[TensorType]) -> Sequence[TensorType]:
        name = short_name(op)
        if name == "constant":
            return [
                TensorType.of(
                    op.results[0], self.mesh, free=True, zero=is_constant_zero(op)
                )
            ]
        if name == "iota":
            return [TensorType.of(op.results[0], self.mesh, free=True)]
        if name == "optimization_barrier":
            if len(before) > 1 and any(map(self.combined_later, before)):
                raise IllTypedError(
                    "a barrier takes several tensors only without a partial sum",
                    "mesh_split or reshard them before",
                )
            return before
        if name == "reshape":
            shape = shape_of(op.results[0])
            dims, names = reshaped(before[0], shape)
            return [
                dataclasses.replace(
                    before[0], shape=shape, dims=tuple(dims), names=tuple(names)
                )
            ]
        if not before:
            return [TensorType.of(value, self.mesh) for value in op.results]
        return combine(op, op_dims(op, self.rules), before)

    def combined_later(self, type_: TensorType) -> Sequence[PartialValue]:
        """What devices have only parts of, when an op reads a tensor of this type."""
        return type_.partial

    def carried(self, tie: Carried, first: Typed, made: Typed | None) -> Typed:
        """Constants that a loop starts with take the type that its body makes."""
        if not isinstance(made, TensorType):
            return first
        return self.meet([first, made]) or first

    def after_loop(self, tie: Carried, before: Typed, after: Typed) -> Typed:
        unknown = [type_ for type_ in (before, after) if isinstance(type_, Unknown)]
        if unknown:
            return unknown[0]
        if self.meet([before, after]) is not None:
            return before
        made = tie.entering()[1].owner
        of = "" if isinstance(made, ir.Block) else f", by {self.place(made)}"
        what = (
            f"makes {after} of {before}{of}: a loop's tensor keeps its type; "
            f"mesh_split or reshard the initial value to {after.sharding}, or what the "
            f"loop makes of it to {before.sharding}"
        )
        self.refuse(tie.op, what, [after])
        return Unknown.REFUSED

    def after_branches(self, tie: Carried, given: Sequence[Typed]) -> Typed:
        joined = self.meet(given)
        if joined is not None:
            return joined
        number = ir.OpResult(tie.result).result_number
        self.refuse(
            tie.op,
            f"gives {' or '.join(map(str, given))}, its result {number}: branches "
            "of a conditional give one type; mesh_split or reshard in one of them to "
            f"{given[0].sharding}",
            given,
        )
        return Unknown.REFUSED

    def check_predicate(self, op, value: ir.Value) -> None:
        chooses = self.types[value]
        if isinstance(chooses, TensorType) and self.combined_later(chooses):
            part = self.combined_later(chooses)[0]
            self.refuse(
                op,
                f"is decided by {chooses}: devices would not agree; "
                f"{how_to_combine(chooses, part)} before",
                [chooses],
            )

    def meet(self, types: Sequence[Typed]) -> Typed | None:
        """The type that values of these types may share; None if there is none.

        A value made from constants fits any type without a partial sum, and zeros fit
        those with one too.
        """
        for type_ in types:
            if isinstance(type_, Unknown):
                return type_
        bound = [type_ for type_ in types if not (type_.free or type_.zero)]
        bound = bound or [type_ for type_ in types if not type_.free] or types
        first = dataclasses.replace(bound[0], zero=all(type_.zero for type_ in types))
        for type_ in types:
            partial = first.partial if type_.zero else type_.partial
            like = first if type_.free else type_
            if dataclasses.replace(like, partial=partial, zero=first.zero) != first:
                return None
            if type_.free and not type_.zero and first.partial:
                return None
        return first


def _needs_partial_sum(placeholder: Placeholder, mesh: DeviceMesh) -> bool:
    """Whether a typed annotation requires a partial sum."""
    if placeholder.config.get("on_conflict") == OnConflict.REDUCE.value:
        return False
    written = [placeholder.config.get("before"), placeholder.config["sharding"]]
    return any(Sharding.parse(mesh, text).unreduced for text in written if text)
