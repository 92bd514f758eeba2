"""Which plans are alike, so that one of them is compiled, and the plainest is told."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from meshwright.trainers.planning.search.found.finding import Finder, Found, Point
from meshwright.trainers.startup.messages import told_bar

# Costs that differ by less, and plans that differ in less of what is in memory.
_NEAR = 0.004
_SMALL = 0.02
# The mean error of propagation's times, see docs/reference/planning/search.md.
_ERROR = 0.034
# Plans among which kinds are looked for, over those that are wanted.
_LOOKED_AT = 4


def plainest(finder: Finder, found: Found) -> Found:
    """The same program by a plan without the names that do not matter to it."""
    for number, mask in enumerate(found.point.masks):
        if mask:
            masks = list(found.point.masks)
            masks[number] = 0
            other = finder.look_up(dataclasses.replace(found.point, masks=tuple(masks)))
            if other is not None and other.priced.same(found.priced):
                found = other
    return found


def all_plainest(finder: Finder, plans: Sequence[Found]) -> list[Found]:
    """`plainest` of each, with a bar: each is propagated again without each name."""
    made = []
    with told_bar(len(plans), "simplifying plans") as bar:
        for found in plans:
            made.append(plainest(finder, found))
            bar.update()
    return made


def distinct(finder: Finder, most: int) -> list[Found]:
    """The best that was propagated; of plans that are alike one.

    Alike are plans of the same cost that split alike what fills the memory, or whose
    mesh axes of one size change places. What costs the same and splits large tensors
    otherwise is no other program to propagation, but may be one to the compiler: among
    those that its error does not tell from the best, one of each such kind comes first.
    """
    shares = [_shares(finder, step) for step in range(len(finder.steps))]
    kept: list[Found] = []
    for found in finder.ranked():
        if len(kept) == _LOOKED_AT * most:
            break
        mine = shares[found.point.step]
        same_step = (plan for plan in kept if plan.point.step == found.point.step)
        if not any(
            _costs_alike(finder, found, other) and _splits_alike(mine, found, other)
            for other in same_step
        ):
            kept.append(found)
    first: list[Found] = []
    for found in kept:
        if finder.cost(found) > (1 + _ERROR) * finder.cost(kept[0]):
            break
        mine = shares[found.point.step]
        if not any(_splits_alike(mine, found, other) for other in first):
            first.append(found)
    return [*first, *(found for found in kept if found not in first)][:most]


def _shares(finder: Finder, step: int) -> list[float]:
    """For each name the share of the bytes in memory that it may split."""
    held = finder.steps[step].held
    total = sum(one.bytes for one in held)
    shares = [0.0] * len(finder.steps[step].names)
    for one in held:
        for name in itertools.chain(*(one.dims or ())):
            shares[int(name[1:])] += one.bytes / total
    return shares


def _costs_alike(finder: Finder, one: Found, other: Found) -> bool:
    pairs = (
        (finder.cost(one), finder.cost(other)),
        (one.priced.memory, other.priced.memory),
    )
    return all(math.isclose(*pair, rel_tol=_NEAR) for pair in pairs)


def _splits_alike(shares: list[float], one: Found, other: Found) -> bool:
    """Whether both split alike what fills the memory, on one mesh."""
    if one.point.shape != other.point.shape:
        return False
    return any(
        sum(
            share
            for share, mask, its in zip(shares, masks, other.point.masks, strict=True)
            if mask != its
        )
        < _SMALL
        for masks in _mirrored(one.point)
    )


def _mirrored(point: Point) -> Iterator[tuple[int, ...]]:
    """The masks, and those with mesh axes of one size exchanged."""
    for order in itertools.permutations(range(len(point.shape))):
        if all(point.shape[i] == point.shape[j] for i, j in enumerate(order)):
            yield tuple(
                sum(1 << j for i, j in enumerate(order) if mask >> i & 1)
                for mask in point.masks
            )
