"""The rules that all ops share, given how their dims correspond.

A partial sum may be the operand of an op that is linear in it, and of no other; of a
product one factor may be unreduced, of a sum all terms or none. Each device computes on
its own shards: the splits of a dim in several operands have to agree, where an
unsplit operand is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from meshwright.framework.compiler.sharding_types.annotated import IsSum, check_left
from meshwright.framework.compiler.sharding_types.linear import why_not
from meshwright.framework.compiler.sharding_types.tensor_type import (
    SUM,
    IllTypedError,
    PartialValue,
    TensorType,
    overlap,
)

Labels = tuple[int | None, ...]
Axes = Mapping[int, tuple[str, ...]]
"""By label the axes that split the dims with that label."""

HALO = "halo"
"""How elements are combined where a window reaches into the neighbours' shards."""

_ORDINALS = ("first", "second", "third", "fourth")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpDims:
    """How dims of an op's operands and results correspond.

    Args:
      operands: for each operand a label for each dim. Dims of the same label are split
        alike. A label that no result has is combined; None: the op needs the dim
        unsharded.
      results: the same for the results; None: the dim comes out unsharded.
      moves: whether the op does no more than move elements.
      kinds: by label how the op combines elements along it, if not by a sum.
      linear_in: sets of operands in which the op is linear together; see `choices`.
    """

    operands: Sequence[Labels]
    results: Sequence[Labels]
    moves: bool = False
    kinds: Mapping[int, str] = dataclasses.field(default_factory=dict)
    linear_in: Sequence[tuple[int, ...]] = ()

    @property
    def linear(self) -> list[bool]:
        """For each operand whether the op is linear in it, alone or with others."""
        count = range(len(self.operands))
        return [any(number in group for group in self.linear_in) for number in count]

    @property
    def alike(self) -> bool:
        """Whether it is linear in several operands together: a sum is, no product."""
        return any(len(group) > 1 for group in self.linear_in)

    def combined(self, labels: Labels) -> list[int]:
        """The labels of an operand that no result has."""
        kept = {label for result in self.results for label in result}
        return [i for i in labels if i is not None and i not in kept]

    def all_combined(self) -> list[int]:
        """The labels that no result has."""
        combined = [i for labels in self.operands for i in self.combined(labels)]
        return list(dict.fromkeys(combined))


def combine(op, rule: OpDims, types: Sequence[TensorType]) -> list[TensorType]:
    """The types of an op's results.

    Raises:
      IllTypedError: the devices could not compute it each on its own shards.
    """
    axes = _axes(rule, types)
    for type_, linear in zip(types, rule.linear, strict=True):
        _check_linear(op, type_, linear, rule)
    partial = (_of_terms if rule.alike else _of_factors)(op, rule, types, axes)
    reduced = tuple(_reduced(rule, types, axes, partial))
    names = _names(rule, types)
    free = all(type_.free for type_ in types)
    zero = free and makes_zero(rule, types)
    mesh = types[0].mesh
    results = []
    for labels, value in zip(rule.results, op.results, strict=True):
        result = TensorType.of(
            value,
            mesh,
            [axes.get(label, ()) for label in labels],
            partial=tuple(partial),
            names=tuple(names.get(label) for label in labels),
            free=free,
            zero=zero,
        )
        kept = reduced if result.is_float else ()
        results.append(dataclasses.replace(result, reduced=kept))
    return results


def unreduced_after(
    op, rule: OpDims, types: Sequence[TensorType], sums: IsSum
) -> list[PartialValue]:
    """What is unreduced in the results of an op of a completed program.

    Sums that no annotation decides on are added up wherever an op needs that.

    Args:
      op: the op.
      rule: its dims.
      types: of its operands.
      sums: tells whether an op can leave its sum along axes partial, split evenly.

    Raises:
      IllTypedError: the op does not go with what annotations call unreduced.
    """
    decided = [type_.only_decided() for type_ in types]
    for type_, linear in zip(decided, rule.linear, strict=True):
        _check_linear(op, type_, linear, rule)
    held = [type_ for type_ in decided if type_.partial]
    if held and not rule.alike:
        return _of_factors(op, rule, decided, {})
    numbers = [i for i, linear in enumerate(rule.linear) if linear]
    terms = [(i, types[i], types[i].partial) for i in numbers if not types[i].zero]
    if held:
        check_alike(terms, sums)
    shared = common([type_ for _, type_, _ in terms]) if rule.alike else []
    if shared:
        return shared
    others = [] if rule.alike else [p for *_, partial in terms for p in partial]
    own = _summed(op, rule, types)
    return list({part.axis: part for part in [*reversed(others), *own]}.values())


def _summed(op, rule: OpDims, types: Sequence[TensorType]) -> Iterator[PartialValue]:
    """The sums of an op over dims that are split in some of its operands."""
    combined = rule.all_combined()
    for type_, labels in zip(types, rule.operands, strict=True):
        axes = dict(zip(labels, type_.dims, strict=True))
        parts = _combined(op, rule, [i for i in combined if i in axes], axes)
        yield from (part for part in parts if part.kind == SUM)


def common(types: Sequence[TensorType]) -> list[PartialValue]:
    """What is unreduced in all of these types; if some of it is decided, only that."""
    merged = {part.axis: part for part in types[0].partial} if types else {}
    for type_ in types[1:]:
        pairs = [(merged.get(part.axis), part) for part in type_.partial]
        merged = {part.axis: had.merged(part) for had, part in pairs if had is not None}
    decided = [part for part in merged.values() if part.decided]
    return decided or list(merged.values())


def check_alike(terms: Sequence[tuple], sums: IsSum) -> None:
    """Checks that terms can all be unreduced along the axes along which some are.

    Args:
      terms: for each its number, its type, and what is partial in it.
      sums: see `unreduced_after`.
    """
    parts = {p.axis: p for _, _, partial in terms for p in partial if p.decided}
    for part in parts.values():
        without = [t for t in terms if all(part.axis != p.axis for p in t[2])]
        if without:
            _refuse_terms(part, [t for t in terms if part in t[2]], without[0])
    for _, type_, _ in terms if parts else ():
        check_left(
            type_, dataclasses.replace(type_.sharding, unreduced=(*parts,)), sums
        )


def _axes(rule: OpDims, types: Sequence[TensorType]) -> Axes:
    """The axes that split the dims of each label, in all operands or in some."""
    axes: dict[int, tuple[str, ...]] = {}
    first: dict[int, TensorType] = {}
    for labels, type_ in zip(rule.operands, types, strict=True):
        for dim, label in enumerate(labels):
            split = type_.dims[dim]
            if label is None and split:
                raise IllTypedError(
                    f"it needs dim {dim} of {type_} unsharded, which "
                    f"{', '.join(split)} {'split' if split[1:] else 'splits'}",
                    f"mesh_split it to {_without_split(type_, dim)} before",
                )
            before = axes.get(label, ())
            if label is None or split == before or not split:
                continue
            if not _cuts(type_, dim, before, split):
                first_type = first[label]
                raise IllTypedError(
                    f"they are split by {'.'.join(before)} and {'.'.join(split)} in "
                    "one dim",
                    "mesh_split one like the other: "
                    f"{first_type.sharding.untyped()} or {type_.sharding.untyped()}",
                )
            if len(split) > len(before):
                axes[label], first[label] = split, type_
    return axes


def _cuts(
    type_: TensorType, dim: int, before: Sequence[str], split: Sequence[str]
) -> bool:
    """Whether by one split a device's shard is a part of its shard by the other."""
    short, long = sorted((before, split), key=len)
    even = type_.shape[dim] % type_.mesh.axes_size(long) == 0
    return long[: len(short)] == short and (not short or even)


def _without_split(type_: TensorType, dim: int) -> str:
    """The sharding with a dim unsharded, as an annotation of it is written."""
    dims = [() if i == dim else axes for i, axes in enumerate(type_.dims)]
    return type_.sharding_text(dims)


def _check_linear(op, type_: TensorType, linear: bool, rule: OpDims) -> None:
    for part in type_.partial:
        if linear and (part.kind == SUM or rule.moves):
            continue
        raise IllTypedError(
            f"it is not linear in {_part(part)}{why_not(op)}",
            f"{how_to_combine(type_, part)} before",
        )


def _part(part: PartialValue) -> str:
    if part.kind == SUM:
        return f"a sum unreduced along {part.axis}"
    return f"partial values along {part.axis} ({part.kind})"


def how_to_combine(type_: TensorType, part: PartialValue, what: str = "it") -> str:
    """How a program combines what is unreduced in a tensor."""
    left = tuple(axis for axis in type_.unreduced if axis != part.axis)
    text = dataclasses.replace(type_.sharding, unreduced=left)
    return f"{'reshard' if part.decided else 'mesh_split'} {what} to {text}"


def _combined(
    op, rule: OpDims, labels: Sequence[int], axes: Axes
) -> list[PartialValue]:
    """What is unreduced once dims that axes split are combined, by label."""
    return [
        PartialValue(axis=axis, kind=rule.kinds.get(label, SUM), origins=(op,))
        for label in labels
        for axis in axes.get(label, ())
    ]


def _of_factors(
    op, rule: OpDims, types: Sequence[TensorType], axes: Axes
) -> list[PartialValue]:
    parts: list[PartialValue] = []
    for type_ in types:
        for part in type_.partial:
            if any(overlap(type_.mesh, part.axis, before.axis) for before in parts):
                raise IllTypedError(
                    f"a product of sums unreduced along {part.axis} is not the sum of "
                    "products",
                    f"{how_to_combine(type_, part)} before",
                )
            if part.decided and any(before.decided for before in parts):
                raise IllTypedError(
                    f"it is a product of two partial sums, one along {part.axis}: of a "
                    "product one factor may be unreduced",
                    f"{how_to_combine(type_, part)} before",
                )
        parts += type_.partial
    return parts + _combined(op, rule, rule.all_combined(), axes)


def _of_terms(
    op, rule: OpDims, types: Sequence[TensorType], axes: Axes
) -> list[PartialValue]:
    """Of terms, slices and branches: along each axis all are unreduced, or none is."""
    terms = [
        (number, type_, [*type_.partial, *_combined(op, rule, labels, axes)])
        for number, (type_, labels, linear) in enumerate(
            zip(types, map(rule.combined, rule.operands), rule.linear, strict=True)
        )
        if linear and not type_.zero
    ]
    by_axis: dict[str, PartialValue] = {}
    for _, type_, partial in terms:
        _check_apart(type_, partial)
        for part in partial:
            before = by_axis.get(part.axis)
            if before is not None and before.kind != part.kind:
                raise IllTypedError(
                    f"a partial {before.kind} and a partial {part.kind} along "
                    f"{part.axis}",
                    f"{how_to_combine(type_, part)} before",
                )
            by_axis[part.axis] = before.merged(part) if before else part
    for part in by_axis.values():
        without = [t for t in terms if all(part.axis != p.axis for p in t[2])]
        if without:
            _refuse_terms(part, [t for t in terms if t not in without], without[0])
    return list(by_axis.values())


def _check_apart(type_: TensorType, partial: Sequence[PartialValue]) -> None:
    for i, part in enumerate(partial):
        if any(overlap(type_.mesh, part.axis, p.axis) for p in partial[:i]):
            raise IllTypedError(
                f"it sums what is unreduced along {part.axis} already",
                f"{how_to_combine(type_, part)} before",
            )


def _refuse_terms(part: PartialValue, have: Sequence, lacks: tuple) -> None:
    (number, type_, _), (lacking_number, lacking, _) = have[0], lacks
    kind = "a partial sum" if part.kind == SUM else f"a partial {part.kind}"
    split = lacking.splits(part.axis)
    what = "a split tensor" if split else "a replicated tensor"
    what = "a constant other than zero" if lacking.free else what
    remedy = how_to_combine(type_, part, _nth(number))
    is_full_axis = part.axis in type_.mesh.axis_names
    if not (split or lacking.free) and part.kind == SUM and is_full_axis:
        wanted = dataclasses.replace(
            lacking.sharding,
            unreduced=(*lacking.unreduced, part.axis),
            reduced=tuple(axis for axis in lacking.reduced if axis != part.axis),
        )
        remedy += f", or {_nth(lacking_number)} to {wanted}"
    raise IllTypedError(f"{kind} along {part.axis} and {what}", remedy)


def _nth(number: int) -> str:
    known = number < len(_ORDINALS)
    return f"the {_ORDINALS[number]}" if known else f"operand {number}"


def _reduced(
    rule: OpDims,
    types: Sequence[TensorType],
    axes: Axes,
    partial: Sequence[PartialValue],
) -> Iterator[str]:
    """The axes along which the results are reduced, as operands are."""
    given = {axis: type_ for type_ in types for axis in type_.reduced}
    for axis, type_ in given.items():
        mesh = type_.mesh
        for operand in types:
            _check_against_reduced(type_, operand, axis)
        for operand, labels in zip(types, rule.operands, strict=True):
            for label in rule.combined(labels) if axis in operand.reduced else ():
                if any(overlap(mesh, axis, split) for split in axes.get(label, ())):
                    raise IllTypedError(
                        f"it sums over a dim that {axis} splits in one operand, along "
                        "which another is reduced: its gradient would be split, not "
                        "unreduced",
                        f"mesh_split both alike, or {_plain(operand, axis)}",
                    )
        used = [
            *(p.axis for p in partial),
            *(a for split in axes.values() for a in split),
        ]
        if not any(overlap(mesh, axis, a) for a in used):
            yield axis


def _check_against_reduced(reduced: TensorType, type_: TensorType, axis: str) -> None:
    """Refuses a replicated operand beside a reduced one: its gradient is unreduced."""
    declared = axis in type_.reduced or type_.splits(axis) or type_.partial_along(axis)
    if declared or type_.free or not type_.is_float:
        return
    wanted = dataclasses.replace(type_.sharding, reduced=(*type_.reduced, axis))
    raise IllTypedError(
        f"one is reduced along {axis} and the other, {type_}, replicated: its gradient "
        "would be unreduced, its type says replicated",
        f"reshard it to {wanted} (mesh_split an argument so), or "
        f"{_plain(reduced, axis)}",
    )


def _plain(type_: TensorType, axis: str) -> str:
    left = tuple(a for a in type_.reduced if a != axis)
    plain = dataclasses.replace(type_.sharding, reduced=left)
    return f"reshard the reduced one to {plain}"


def _names(rule: OpDims, types: Sequence[TensorType]) -> dict[int, str]:
    names: dict[int, str] = {}
    for labels, type_ in zip(rule.operands, types, strict=True):
        for label, name in zip(labels, type_.names, strict=True):
            if label is not None and name is not None:
                names.setdefault(label, name)
    return names


def makes_zero(rule: OpDims, types: Sequence[TensorType]) -> bool:
    """Whether an op's results are zero, as operands are in which it is linear."""
    zeros = [t.zero for t, linear in zip(types, rule.linear, strict=True) if linear]
    return bool(zeros) and (all if rule.alike else any)(zeros)
