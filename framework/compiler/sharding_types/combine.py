"""The rules that all ops share, once it is said how their dims correspond.

A sum's parts may go through an op that is linear in them, and no other; of a product
one factor may be unreduced, of a sum all terms are or none. Each device computes on its
own shards: what several operands say of a dim has to agree, where a whole one is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from meshwright.framework.compiler.partial.linear import why_not
from meshwright.framework.compiler.sharding_types.tensor_type import (
    SUM,
    IllTypedError,
    TensorType,
    Uncombined,
    overlap,
)

Labels = tuple[int | None, ...]
Axes = Mapping[int, tuple[str, ...]]
"""By label the axes that split the dims so labelled."""

_ORDINALS = ("first", "second", "third", "fourth")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpDims:
    """How dims of an op's operands and results correspond.

    Args:
      operands: for each operand a label for each dim. Dims of one label are split
        alike. One that no result has is combined; None is for what the op needs whole.
      results: the same for the results; None: it comes out whole.
      moves: whether it does no more than move elements.
      kinds: by label how the op combines what it has along it, if not by a sum.
      linear_in: sets of operands in which it is linear together; see `choices`.
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
        return [any(number in one for one in self.linear_in) for number in count]

    @property
    def alike(self) -> bool:
        """Whether it is linear in several together, as a sum is, not as a product."""
        return any(len(one) > 1 for one in self.linear_in)

    def combined(self, labels: Labels) -> list[int]:
        """Those of an operand's labels that no result has."""
        kept = {label for result in self.results for label in result}
        return [one for one in labels if one is not None and one not in kept]

    def all_combined(self) -> list[int]:
        """The labels that no result has."""
        found = [one for labels in self.operands for one in self.combined(labels)]
        return list(dict.fromkeys(found))


def combine(op, rule: OpDims, types: Sequence[TensorType]) -> list[TensorType]:
    """The types of an op's results.

    Raises:
      IllTypedError: devices could not compute it each on what it holds.
    """
    axes = _axes(rule, types)
    for type_, linear in zip(types, rule.linear, strict=True):
        _check_linear(op, type_, linear, rule)
    uncombined = (_of_terms if rule.alike else _of_factors)(op, rule, types, axes)
    reduced = tuple(_reduced(rule, types, axes, uncombined))
    names = _names(rule, types)
    free = all(type_.free for type_ in types)
    zero = free and _is_zero(rule, types)
    mesh = types[0].mesh
    found = []
    for labels, value in zip(rule.results, op.results, strict=True):
        one = TensorType.of(
            value,
            mesh,
            [axes.get(label, ()) for label in labels],
            uncombined=tuple(uncombined),
            names=tuple(names.get(label) for label in labels),
            free=free,
            zero=zero,
        )
        kept = reduced if one.is_float else ()
        found.append(dataclasses.replace(one, reduced=kept))
    return found


def _axes(rule: OpDims, types: Sequence[TensorType]) -> Axes:
    """What splits the dims of each label, in all operands alike or only in some."""
    found: dict[int, tuple[str, ...]] = {}
    first: dict[int, TensorType] = {}
    for labels, type_ in zip(rule.operands, types, strict=True):
        for dim, label in enumerate(labels):
            own = type_.dims[dim]
            if label is None and own:
                raise IllTypedError(
                    f"it needs dim {dim} of {type_} whole, which "
                    f"{', '.join(own)} {'split' if own[1:] else 'splits'}",
                    f"mesh_split it to {_without_split(type_, dim)} before",
                )
            had = found.get(label, ())
            if label is None or own == had or not own:
                continue
            if not _cuts(type_, dim, had, own):
                other = first[label]
                raise IllTypedError(
                    f"they are split by {'.'.join(had)} and {'.'.join(own)} in one dim",
                    f"mesh_split one to lie as the other: {other.sharding.untyped()} "
                    f"or {type_.sharding.untyped()}",
                )
            if len(own) > len(had):
                found[label], first[label] = own, type_
    return found


def _cuts(type_: TensorType, dim: int, had: Sequence[str], own: Sequence[str]) -> bool:
    """Whether the shards of one are cut from those of the other, of the same device."""
    short, long = sorted((had, own), key=len)
    even = type_.shape[dim] % type_.mesh.axes_size(long) == 0
    return long[: len(short)] == short and (not short or even)


def _without_split(type_: TensorType, dim: int) -> str:
    """The sharding with a dim unsplit, as one would annotate it."""
    dims = [() if i == dim else axes for i, axes in enumerate(type_.dims)]
    return type_.said_text(dims)


def _check_linear(op, type_: TensorType, linear: bool, rule: OpDims) -> None:
    for one in type_.uncombined:
        if linear and (one.kind == SUM or rule.moves):
            continue
        raise IllTypedError(
            f"it is not linear in {_part(one)}{why_not(op)}",
            f"{how_to_combine(type_, one)} before",
        )


def _part(one: Uncombined) -> str:
    if one.kind == SUM:
        return f"a sum unreduced along {one.axis}"
    return f"what is to be combined along {one.axis} ({one.kind})"


def how_to_combine(type_: TensorType, one: Uncombined, what: str = "it") -> str:
    """How a program has what is unreduced in a tensor combined."""
    left = tuple(axis for axis in type_.unreduced if axis != one.axis)
    text = dataclasses.replace(type_.sharding, unreduced=left)
    return f"{'reshard' if one.decided else 'mesh_split'} {what} to {text}"


def _combined(op, rule: OpDims, labels: Sequence[int], axes: Axes) -> list[Uncombined]:
    """What is unreduced after labels are combined that axes split."""
    return [
        Uncombined(axis=axis, kind=rule.kinds.get(label, SUM), origins=(op,))
        for label in labels
        for axis in axes.get(label, ())
    ]


def _of_factors(
    op, rule: OpDims, types: Sequence[TensorType], axes: Axes
) -> list[Uncombined]:
    found: list[Uncombined] = []
    for type_ in types:
        for one in type_.uncombined:
            if any(overlap(type_.mesh, one.axis, had.axis) for had in found):
                raise IllTypedError(
                    f"a product of sums unreduced along {one.axis} is not the sum of "
                    "products",
                    f"{how_to_combine(type_, one)} before",
                )
            if one.decided and any(had.decided for had in found):
                raise IllTypedError(
                    f"it is a product of two partial sums, one along {one.axis}: of a "
                    "product one factor may be unreduced",
                    f"{how_to_combine(type_, one)} before",
                )
        found += type_.uncombined
    return found + _combined(op, rule, rule.all_combined(), axes)


def _of_terms(
    op, rule: OpDims, types: Sequence[TensorType], axes: Axes
) -> list[Uncombined]:
    """Of terms, slices and branches: along each axis all are unreduced, or none is."""
    terms = [
        (number, type_, [*type_.uncombined, *_combined(op, rule, own, axes)])
        for number, (type_, own, linear) in enumerate(
            zip(types, map(rule.combined, rule.operands), rule.linear, strict=True)
        )
        if linear and not type_.zero
    ]
    found: dict[str, Uncombined] = {}
    for _, type_, uncombined in terms:
        _check_apart(type_, uncombined)
        for one in uncombined:
            had = found.get(one.axis)
            if had is not None and had.kind != one.kind:
                raise IllTypedError(
                    f"a partial {had.kind} and a partial {one.kind} along {one.axis}",
                    f"{how_to_combine(type_, one)} before",
                )
            origins = dict.fromkeys((*(had.origins if had else ()), *one.origins))
            told = one if had is None or one.decided else had
            found[one.axis] = dataclasses.replace(told, origins=tuple(origins))
    for one in found.values():
        without = [t for t in terms if all(one.axis != p.axis for p in t[2])]
        if without:
            _refuse_terms(one, [t for t in terms if t not in without], without[0])
    return list(found.values())


def _check_apart(type_: TensorType, uncombined: Sequence[Uncombined]) -> None:
    for i, one in enumerate(uncombined):
        if any(overlap(type_.mesh, one.axis, p.axis) for p in uncombined[:i]):
            raise IllTypedError(
                f"it sums what is unreduced along {one.axis} already",
                f"{how_to_combine(type_, one)} before",
            )


def _refuse_terms(one: Uncombined, have: Sequence, lacks: tuple) -> None:
    (number, type_, _), (other_number, other, _) = have[0], lacks
    kind = "a partial sum" if one.kind == SUM else f"a partial {one.kind}"
    split = other.splits(one.axis)
    what = "a split tensor" if split else "a replicated tensor"
    what = "a constant other than zero" if other.free else what
    remedy = how_to_combine(type_, one, _nth(number))
    is_whole = one.axis in type_.mesh.axis_names
    if not (split or other.free) and one.kind == SUM and is_whole:
        wanted = dataclasses.replace(
            other.sharding,
            unreduced=(*other.unreduced, one.axis),
            reduced=tuple(axis for axis in other.reduced if axis != one.axis),
        )
        remedy += f", or {_nth(other_number)} to {wanted}"
    raise IllTypedError(f"{kind} along {one.axis} and {what}", remedy)


def _nth(number: int) -> str:
    known = number < len(_ORDINALS)
    return f"the {_ORDINALS[number]}" if known else f"operand {number}"


def _reduced(
    rule: OpDims,
    types: Sequence[TensorType],
    axes: Axes,
    uncombined: Sequence[Uncombined],
) -> Iterator[str]:
    """The axes along which the results are reduced as operands are."""
    given = {axis: type_ for type_ in types for axis in type_.reduced}
    for axis, type_ in given.items():
        mesh = type_.mesh
        for other in types:
            _check_against_reduced(type_, other, axis)
        for one, labels in zip(types, rule.operands, strict=True):
            for label in rule.combined(labels) if axis in one.reduced else ():
                if any(overlap(mesh, axis, split) for split in axes.get(label, ())):
                    raise IllTypedError(
                        f"it sums over a dim that {axis} splits in one operand, along "
                        "which another is reduced: its gradient would be split, not "
                        "unreduced",
                        f"mesh_split both alike, or {_plain(one, axis)}",
                    )
        used = [
            *(p.axis for p in uncombined),
            *(a for own in axes.values() for a in own),
        ]
        if not any(overlap(mesh, axis, one) for one in used):
            yield axis


def _check_against_reduced(type_: TensorType, other: TensorType, axis: str) -> None:
    """Refuses what is replicated: of it and a reduced tensor one gradient is wrong."""
    told = axis in other.reduced or other.splits(axis) or other.pending_along(axis)
    if told or other.free or not other.is_float:
        return
    wanted = dataclasses.replace(other.sharding, reduced=(*other.reduced, axis))
    raise IllTypedError(
        f"one is reduced along {axis} and the other, {other}, replicated: its gradient "
        "would be unreduced, its type says replicated",
        f"reshard it to {wanted} (mesh_split an argument so), or {_plain(type_, axis)}",
    )


def _plain(type_: TensorType, axis: str) -> str:
    left = tuple(one for one in type_.reduced if one != axis)
    plain = dataclasses.replace(type_.sharding, reduced=left)
    return f"reshard the reduced one to {plain}"


def _names(rule: OpDims, types: Sequence[TensorType]) -> dict[int, str]:
    found: dict[int, str] = {}
    for labels, type_ in zip(rule.operands, types, strict=True):
        for label, name in zip(labels, type_.names, strict=True):
            if label is not None and name is not None:
                found.setdefault(label, name)
    return found


def _is_zero(rule: OpDims, types: Sequence[TensorType]) -> bool:
    zeros = [t.zero for t, linear in zip(types, rule.linear, strict=True) if linear]
    return bool(zeros) and (all if rule.alike else any)(zeros)
