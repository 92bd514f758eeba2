"""What annotations make of a tensor's type, and what they may not."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.mlir import ir

from meshwright.framework.compiler.sharding_types.tensor_type import (
    SUM,
    IllTypedError,
    TensorType,
    overlap,
)
from meshwright.framework.sharding.sharding import Sharding


def annotated(value: ir.Value, before: Any, asked: Sharding) -> TensorType:
    """After `mesh_split` without pending sums, which adds up what nobody decided.

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
            f"it would drop the sum pending along {', '.join(lost)}",
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
    value: ir.Value, before: Any, asked: Sharding, *, or_reduced: bool = False
) -> TensorType:
    """After `mesh_split` with unreduced or reduced axes.

    Args:
      value, before, asked: as of `annotated`.
      or_reduced: whether it says so only of the axes along which a sum is pending.

    Raises:
      IllTypedError: no sum is pending along such an axis, or one is that it does not
        name; what it calls reduced is split there.
    """
    said = TensorType.said(value, asked, getattr(before, "names", ()))
    if not isinstance(before, TensorType) or before.zero:
        return said
    _check_kept(before, said)
    sums = [one.axis for one in before.pending if one.kind == SUM]
    missing = [axis for axis in said.unreduced if axis not in sums]
    if missing and not or_reduced:
        raise IllTypedError(
            f"no sum is pending along {', '.join(missing)}, so it is not unreduced",
            "reshard converts a replicated tensor to an unreduced one, "
            f"{before.sharding} to {asked}",
        )
    for axis in said.reduced:
        if before.splits(axis):
            raise IllTypedError(
                f"{axis} splits it, so it is not reduced along {axis}",
                f"reshard converts it, {before.sharding} to {asked}",
            )
    pending = tuple(one for one in said.pending if one.axis not in missing)
    return dataclasses.replace(said, pending=pending)


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
        pending = set(before.pending) <= set(want.pending)
        if (before.dims, before.reduced) != (want.dims, want.reduced) or not pending:
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
      IllTypedError: something is pending that nobody asked for; as annotations.
    """
    if asked is not None and asked.is_typed:
        return typed(value, before, asked)
    if asked is not None:
        return annotated(value, before, asked)
    if before.unreduced:
        axes = ", ".join(before.unreduced)
        raise IllTypedError(
            f"its sum is pending along {axes}, and a program's results are whole",
            f"reshard it to {before.sharding.untyped()}, or say so in out_shardings",
        )
    if before.undecided:
        one = before.undecided[0]
        raise IllTypedError(
            f"where the {one.kind} along {one.axis} is to lie is ambiguous",
            f"mesh_split it to {before.sharding}, or give its out_shardings",
        )
    return before
