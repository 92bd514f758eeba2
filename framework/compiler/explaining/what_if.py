"""What would differ if a tensor were split otherwise, without compiling anything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from meshwright.framework.compiler.explaining.difference import (
    Difference,
    LaidOut,
    Sent,
    SentKey,
    Side,
)
from meshwright.framework.compiler.explaining.provenance import (
    Spot,
    TensorLayout,
    Transfer,
)
from meshwright.framework.compiler.explaining.reasons import Reasons, of_state
from meshwright.framework.compiler.explaining.transfers import transfers
from meshwright.framework.compiler.explaining.why import find
from meshwright.framework.compiler.hlo.hlo_text import itemsize
from meshwright.framework.compiler.lowering.sources import Kind
from meshwright.framework.compiler.stablehlo.settle import even
from meshwright.framework.devices.links import Links
from meshwright.framework.sharding.sharding import Sharding

if TYPE_CHECKING:
    from meshwright.framework.compiler.program import Program, TracedProgram


def what_if(
    program: Program | TracedProgram,
    shardings: Mapping[str, Sequence | Sharding | None],
    *,
    topology: str | None = None,
) -> Difference:
    """What would differ if tensors were split otherwise, by propagation alone.

    Shardy completes the program again, in this process; nothing is compiled. So what is
    sent is what Shardy would write explicitly: XLA's partitioner and its later passes
    may do better or worse.

    Args:
      program: compiled, or only traced.
      shardings: by the name of a tensor (`why.find`) its new sharding: a dims
        mapping as `mesh_split` takes it, or a `Sharding`. An annotation's takes the
        place of its own; None takes an annotation away, and leaves an argument or a
        result to completion. A variable's name is that of its argument and of its
        result, and other variables that completion placed, such as its slots, are
        completed anew.
      topology: of the mesh's size, such as "v3:8x16", for estimated times.

    Returns:
      The difference, from the program as it is to the one asked for; its notes say what
      stays as it is, though it might not in a program that is so annotated, and what
      such a program stores padded, whose transfers may differ from those here.

    Raises:
      TypeError: `shardings` is no mapping, or has a key that is no name.
      ValueError: no such tensor, or several; a sharding that does not fit the tensor;
        two for one variable; an argument or a result that is stored padded, or updated
        in shards; or no such topology.
      LoweringError: Shardy cannot complete the program so.
    """
    reasons = program.reasons
    links = None if topology is None else Links(reasons.mesh, topology)
    if not isinstance(shardings, Mapping):
        raise TypeError(
            f"{reasons.name}: shardings is {shardings!r}; pass a dict from a tensor's "
            "name to its dims mapping"
        )
    changes: dict[Spot, Sharding | None] = {}
    texts, notes = [], []
    for name, asked in shardings.items():
        tensor = _only(reasons, name)
        sharding = _sharding(reasons, tensor, asked)
        for spot in _spots(reasons, tensor):
            _check_stored(reasons, tensor, spot)
            if changes.setdefault(spot, sharding) != sharding:
                raise ValueError(
                    f"{name} is asked for twice, as {changes[spot]} and as {sharding}: "
                    "the argument and the result of state have the same sharding"
                )
        texts.append(f"{name} {sharding or 'left to completion'}")
        notes += _unpadded(reasons, tensor, sharding)
    difference = compare(
        (reasons.name, reasons),
        (f"with {', '.join(texts)}", changed(reasons, changes)),
        links,
    )
    are_sharded = bool(program.updates and program.updates.sharded)
    notes += _kept(reasons, changes, are_sharded=are_sharded)
    return dataclasses.replace(difference, notes=tuple(notes))


def changed(reasons: Reasons, changes: Mapping[Spot, Sharding | None]) -> Reasons:
    """A program with other shardings.

    State that completion placed, or that `changes` leave to it, is completed anew, in
    the same form as argument and as result: as in a program that is so annotated.

    Args:
      reasons: of the program.
      changes: see `Reasons`.

    Raises:
      LoweringError: Shardy cannot complete the program so.
    """
    changes = {**reasons.changes, **changes}
    carried = {
        spot.number: sharding
        for spot, sharding in changes.items()
        if spot.kind is not Kind.INSIDE and spot.number < reasons.written.notes.carried
    }
    left = frozenset(n for n, sharding in carried.items() if sharding is None)
    left |= reasons.left - carried.keys()
    opened = {**changes, **of_state(dict.fromkeys(left))}
    completed = Reasons(reasons.written, reasons.plain, opened, frozenset())
    if not left:
        return completed
    with completed.opened():
        settled = {}
        for number in left:
            place = completed.argument_place(number)
            sharding = completed.recorded.sharding(place)
            settled[number] = even(sharding, completed.mesh, completed.shape(place))
    return Reasons(
        reasons.written, reasons.plain, {**opened, **of_state(settled)}, left
    )


def compare(
    before: tuple[str, Reasons], after: tuple[str, Reasons], links: Links | None = None
) -> Difference:
    """What differs between two programs with these names, by propagation alone."""
    lies = [{_key(t): t.sharding for t in of.tensors} for _, of in (before, after)]
    both = lies[0].keys() & lies[1].keys()
    differ = {key for key in both if str(lies[0][key]) != str(lies[1][key])}
    sides = [_side(*of, links, differ) for of in (before, after)]
    return Difference(before=sides[0], after=sides[1])


def _spots(reasons: Reasons, tensor: TensorLayout) -> list[Spot]:
    """Where a tensor is; of state both the argument and the result.

    State that is not carried is known by its path, as "0.theta.w" and "state.theta.w".
    """
    spot = reasons.spot(tensor)
    if spot.kind is Kind.INSIDE:
        return [spot]
    if spot.number < reasons.written.notes.carried:
        return [*of_state({spot.number: None})]
    path = tensor.name.partition(".")[2]
    others = [
        reasons.spot(other)
        for other in reasons.tensors
        if path and other.kind not in (Kind.INSIDE, tensor.kind)
        if other.name.partition(".")[2] == path and other.shape == tensor.shape
    ]
    return sorted([spot, *others], key=lambda of: of.kind.value)


def _check_stored(reasons: Reasons, tensor: TensorLayout, spot: Spot) -> None:
    """Refuses what annotations inside of the program lay out as its border is."""
    if spot.kind is Kind.INSIDE:
        return
    form = reasons.written.form(spot.kind, spot.number)
    if form and (form.split or not form.is_logical):
        how = f"in shards {form.border}" if form.split else f"as {form.stored_shape}"
        raise ValueError(
            f"{tensor.name} of shape {form.shape} is stored {how}, and ops of "
            f"{reasons.name} are for that: trace the program with the other sharding, "
            "and compare the two by explain_difference"
        )


def _unpadded(
    reasons: Reasons, tensor: TensorLayout, sharding: Sharding | None
) -> Iterator[str]:
    """That an argument or a result, which a program stores padded, is not here."""
    if sharding is None or reasons.spot(tensor).kind is Kind.INSIDE:
        return
    stored = sharding.padded_shape(tensor.shape)
    if stored != tensor.shape:
        yield (
            f"a program with {tensor.name} {sharding} stores it padded, "
            f"{tensor.shape} as {stored}: what that sends is not known here"
        )


def _kept(
    reasons: Reasons, changes: Mapping[Spot, Sharding | None], *, are_sharded: bool
) -> Iterator[str]:
    """What stays as it is, though it might not in a program that is so annotated."""
    borders = [t for t in reasons.tensors if t.kind is not Kind.INSIDE]
    changed = [tensor for tensor in borders if reasons.spot(tensor) in changes]
    weights = {_weight(tensor) for tensor in changed} - {()}
    given = [
        f"{tensor.kind.value} {tensor.name}"
        for tensor in borders
        if tensor not in changed and reasons.border(reasons.place(tensor)) is not None
        if any(_weight(tensor)[: len(weight)] == weight for weight in weights)
    ]
    if given:
        yield f"the given shardings stay of {', '.join(given)}"
    kept: dict[str, int] = {}
    for number, form in enumerate(reasons.written.in_forms):
        if form and form.kept_from and Spot(Kind.ARGUMENT, number) not in changes:
            kept[form.kept_from] = kept.get(form.kept_from, 0) + 1
    for program, count in kept.items():
        stay = "1 argument stays" if count == 1 else f"{count} arguments stay"
        yield (
            f"{stay} as {program} keeps {'it' if count == 1 else 'them'}: ask with "
            "None for one to have it completed anew; of a Keras model, ask the first "
            "program after mw.keras.distribute, which keeps none"
        )
    if are_sharded:
        yield (
            "weight updates stay in shards as they are: trace the program with these "
            "shardings to have them decided anew"
        )


def _weight(tensor: TensorLayout) -> tuple[str, ...]:
    """The path of a weight in the names of it and its slots: "0.slots.layer.w.m"."""
    return tuple(tensor.name.split(".")[2:])


def _only(reasons: Reasons, name: str) -> TensorLayout:
    """The tensor of a name; of state, its argument."""
    found = find(reasons, name)
    # What only prints so is asked for by its whole name.
    found = [tensor for tensor in found if tensor.name == name] or found
    if len({frozenset(_spots(reasons, tensor)) for tensor in found}) > 1:
        names = ", ".join(repr(tensor.name) for tensor in found[:6])
        raise ValueError(
            f"{reasons.name} has {len(found)} tensors {name!r}: {names}; name one"
        )
    return found[0]


def _sharding(
    reasons: Reasons, tensor: TensorLayout, asked: Sequence | Sharding | None
) -> Sharding | None:
    if asked is None or isinstance(asked, Sharding):
        sharding = asked
    else:
        sharding = Sharding.from_dims_mapping(reasons.mesh, asked)
    if sharding is not None and sharding.rank != len(tensor.shape):
        raise ValueError(
            f"{tensor.name} has {len(tensor.shape)} dims, {tensor.shape}, and the "
            f"sharding {sharding} is of {sharding.rank}"
        )
    return sharding


def _side(name: str, reasons: Reasons, links: Links | None, differ: set[str]) -> Side:
    """A program; origins are only looked for of the tensors that differ."""
    sent: dict[SentKey, list[Transfer]] = {}
    for one in transfers(reasons, links):
        sent.setdefault((one.at, " and ".join(one.kinds), one.axes), []).append(one)
    with reasons.opened():
        tensors = {
            key: _laid_out(reasons, tensor, with_origins=key in differ)
            for tensor in reasons.tensors
            for key in [_key(tensor)]
        }
    return Side(
        name=name,
        mesh=reasons.mesh,
        tensors=tensors,
        sent={key: _sum(of) for key, of in sent.items()},
        is_propagated=True,
    )


def _key(tensor: TensorLayout) -> str:
    is_inside = tensor.kind is Kind.INSIDE
    return tensor.name if is_inside else f"{tensor.kind.value} {tensor.name}"


def _laid_out(reasons: Reasons, tensor: TensorLayout, *, with_origins: bool) -> LaidOut:
    shard = tensor.sharding.shard_shape(tensor.shape)
    found = reasons.provenances(reasons.place(tensor)) if with_origins else ()
    return LaidOut(
        type=f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]",
        sharding=str(tensor.sharding),
        bytes_per_device=math.prod(shard) * itemsize(tensor.dtype),
        file=tensor.file,
        line=tensor.line,
        origins=tuple(dict.fromkeys(one.origin for one in found)),
    )


def _sum(of: Sequence[Transfer]) -> Sent:
    seconds = [one.seconds for one in of]
    origins = (o for one in of for o in (*one.before_origins, *one.after_origins))
    return Sent(
        bytes=sum(one.bytes * one.times for one in of),
        seconds=None if None in seconds else sum(seconds),
        origins=tuple(dict.fromkeys(origins)),
    )
