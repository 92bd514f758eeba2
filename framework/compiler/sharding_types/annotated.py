"""What annotations make of a tensor's type, and what they may not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.mlir import ir

from meshwright.framework.compiler.sharding_types.tensor_type import (
    SUM,
    IllTypedError,
    TensorType,
    overlap,
)
from meshwright.framework.sharding.sharding import Sharding

IsSum = Callable[[Any, Sequence[str]], bool]
"""Of an op and axes."""


def annotated(value: ir.Value, before: Any, asked: Sharding) -> TensorType:
    """After `mesh_split` without partial sums, which adds up what nobody decided.

    Args:
      value: the annotated tensor.
      before: the type of what it annotates, or anything else if that is not known.
      asked: what it says; dims that it leaves open keep what they have.

    Raises:
      IllTypedError: it would drop what is unreduced or reduced.
    """
    if not isinstance(before, TensorType):
        return TensorType.said(value, asked)
    said = TensorType.said(value, _closed(before, asked), before.names)
    _check_kept(before, said)
    return said


def _check_kept(before: TensorType, said: TensorType) -> None:
    """Refuses an annotation that drops what only `reshard` may."""
    lost = [axis for axis in before.unreduced if axis not in said.unreduced]
    if lost:
        raise IllTypedError(
            f"it would drop the sum unreduced along {', '.join(lost)}",
            f"reshard says where it is added up: reshard it to {said.sharding}",
        )
    lost = [axis for axis in before.reduced if axis not in said.reduced]
    if lost:
        raise IllTypedError(
            f"it would drop that its gradient is unreduced along {', '.join(lost)}",
            f"reshard says where that is added up: reshard it to {said.sharding}",
        )


def _closed(before: TensorType, asked: Sharding) -> Sharding:
    """`asked`, its open dims as they are."""
    mesh, taken = asked.mesh, [axis for axes in asked.dims for axis in axes]
    dims = list(asked.dims)
    for dim in asked.unspecified:
        own = before.dims[dim]
        count = len(dims[dim])
        added = [(axis, other) for axis in own[count:] for other in taken]
        if own[:count] == dims[dim] and not any(overlap(mesh, *p) for p in added):
            dims[dim] = own
    return dataclasses.replace(asked, dims=tuple(dims), unspecified=())


def typed(
    value: ir.Value,
    before: Any,
    asked: Sharding,
    *,
    or_reduced: bool = False,
    sums: IsSum | None = None,
) -> TensorType:
    """After `mesh_split` with unreduced or reduced axes.

    Args:
      value, before, asked: as of `annotated`.
      or_reduced: whether it says so only of the axes along which a sum is unreduced.
      sums: what tells whether an op can leave its sum along axes uncombined, evenly.

    Raises:
      IllTypedError: no sum is unreduced along such an axis, or one is that it does not
        name, or that cannot be left so; what it calls reduced is split there.
    """
    said = TensorType.said(value, asked, getattr(before, "names", ()))
    if not isinstance(before, TensorType) or before.zero:
        return said
    _check_kept(before, said)
    along = [one.axis for one in before.uncombined if one.kind == SUM]
    missing = [axis for axis in said.unreduced if axis not in along]
    if missing and not or_reduced:
        raise IllTypedError(
            f"no sum is unreduced along {', '.join(missing)}, so it is not unreduced",
            "reshard converts a replicated tensor to an unreduced one, "
            f"{before.sharding} to {asked}",
        )
    for axis in said.reduced:
        if before.splits(axis):
            raise IllTypedError(
                f"{axis} splits it, so it is not reduced along {axis}",
                f"reshard converts it, {before.sharding} to {asked}",
            )
    if sums is not None and not or_reduced:
        _check_left(before, said, sums)
    uncombined = tuple(one for one in said.uncombined if one.axis not in missing)
    return dataclasses.replace(said, uncombined=uncombined)


def _check_left(before: TensorType, said: TensorType, sums: IsSum) -> None:
    """Refuses sums that no device has a part of by itself."""
    new = [one for one in before.undecided if one.axis in said.unreduced]
    named = ", ".join(one.axis for one in new)
    left = tuple(axis for axis in said.unreduced if axis in before.unreduced)
    plain = dataclasses.replace(said.sharding, unreduced=left)
    if new and left:
        raise IllTypedError(
            f"the sum along {named} is one of sums unreduced along {', '.join(left)}",
            f"mesh_split it to {plain}, which adds it up along {named}",
        )
    for op in dict.fromkeys(op for one in new for op in one.origins):
        if not sums(op, [one.axis for one in new]):
            raise IllTypedError(
                f"it is not a sum over dims that {named} splits evenly, or a "
                "convolution's on a mesh of several axes",
                f"mesh_split it to {plain}, which adds it up",
            )


def resharded(
    value: ir.Value, before: Any, expected: Sharding | None, asked: Sharding
) -> TensorType:
    """After `reshard`, which converts what it was annotated as, if it was, or anything.

    Raises:
      IllTypedError: it is something else by now.
    """
    known = isinstance(before, TensorType) and not before.free
    if expected is not None and known:
        want = TensorType.said(value, _closed(before, expected))
        # What was to be unreduced may have been added up already.
        uncombined = set(before.uncombined) <= set(want.uncombined)
        if (before.dims, before.reduced) != (want.dims, want.reduced) or not uncombined:
            raise IllTypedError(
                f"it converts from {expected}, which this is not",
                f"mesh_split it to {expected} before",
            )
    return TensorType.said(value, asked, getattr(before, "names", ()))


def check_given(
    value: ir.Value, before: TensorType, asked: Sharding | None
) -> TensorType:
    """A result of the program, `asked` to lie so, or None: as it is.

    Raises:
      IllTypedError: something is unreduced that nobody asked for; as annotations.
    """
    if asked is not None and asked.is_typed:
        return typed(value, before, asked)
    if asked is not None:
        return annotated(value, before, asked)
    if before.unreduced:
        axes = ", ".join(before.unreduced)
        raise IllTypedError(
            f"its sum is unreduced along {axes}, and a program's results are whole",
            f"reshard it to {before.sharding.untyped()}, or say so in out_shardings",
        )
    if before.undecided:
        one = before.undecided[0]
        raise IllTypedError(
            f"where the {one.kind} along {one.axis} is to lie is ambiguous",
            f"mesh_split it to {before.sharding}, or give its out_shardings",
        )
    return before
