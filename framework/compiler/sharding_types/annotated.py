"""The types that annotations give a tensor, and the annotations that are refused."""

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
"""A predicate of an op and axes."""


def annotated(value: ir.Value, before: Any, requested: Sharding) -> TensorType:
    """The type after `mesh_split` without partial sums, which adds up undecided sums.

    Args:
      value: the annotated tensor.
      before: the type of its operand, or anything else if that is not known.
      requested: its sharding; unspecified dims keep the axes that they have.

    Raises:
      IllTypedError: the annotation would drop unreduced or reduced axes.
    """
    if not isinstance(before, TensorType):
        return TensorType.from_annotation(value, requested)
    type_ = TensorType.from_annotation(value, _closed(before, requested), before.names)
    _check_kept(before, type_)
    return dataclasses.replace(type_, zero=before.zero)


def _check_kept(before: TensorType, after: TensorType) -> None:
    """Refuses an annotation that drops axes that only `reshard` may drop."""
    lost = [
        part.axis
        for part in before.partial
        if part.decided and not part.lenient and part.axis not in after.unreduced
    ]
    if lost:
        raise IllTypedError(
            f"it would drop the sum unreduced along {', '.join(lost)}",
            f"reshard says where it is added up: reshard it to {after.sharding}",
        )
    lost = [axis for axis in before.reduced if axis not in after.reduced]
    if lost:
        raise IllTypedError(
            f"it would drop that its gradient is unreduced along {', '.join(lost)}",
            f"reshard says where that is added up: reshard it to {after.sharding}",
        )


def _closed(before: TensorType, requested: Sharding) -> Sharding:
    """`requested`, with unspecified dims split as they are before."""
    mesh, taken = requested.mesh, [axis for axes in requested.dims for axis in axes]
    dims = list(requested.dims)
    for dim in requested.unspecified:
        axes = before.dims[dim]
        count = len(dims[dim])
        added = [(axis, used) for axis in axes[count:] for used in taken]
        if axes[:count] == dims[dim] and not any(overlap(mesh, *p) for p in added):
            dims[dim] = axes
    return dataclasses.replace(requested, dims=tuple(dims), unspecified=())


def typed(
    value: ir.Value,
    before: Any,
    requested: Sharding,
    *,
    or_reduced: bool = False,
    sums: IsSum | None = None,
) -> TensorType:
    """The type after `mesh_split` with unreduced or reduced axes.

    Args:
      value, before, requested: as in `annotated`.
      or_reduced: whether to ignore unreduced axes along which no sum is unreduced.
      sums: tells whether an op can leave its sum along axes partial, split evenly.

    Raises:
      IllTypedError: no sum is unreduced along such an axis, one is along an axis that
        is not named, or cannot be left unreduced; or a reduced axis splits the tensor.
    """
    type_ = TensorType.from_annotation(value, requested, getattr(before, "names", ()))
    if not isinstance(before, TensorType) or before.zero:
        return type_
    _check_kept(before, type_)
    along = [part.axis for part in before.partial if part.kind == SUM]
    missing = [axis for axis in type_.unreduced if axis not in along]
    if missing and not or_reduced:
        raise IllTypedError(
            f"no sum is unreduced along {', '.join(missing)}, so it is not unreduced",
            "reshard converts a replicated tensor to an unreduced one, "
            f"{before.sharding} to {requested}",
        )
    for axis in type_.reduced:
        if before.splits(axis):
            raise IllTypedError(
                f"{axis} splits it, so it is not reduced along {axis}",
                f"reshard converts it, {before.sharding} to {requested}",
            )
    if sums is not None and not or_reduced:
        check_left(before, type_.sharding, sums)
    lenient = frozenset({value}) if or_reduced else frozenset()
    partial = tuple(
        dataclasses.replace(part, lenient=lenient)
        for part in type_.partial
        if part.axis not in missing
    )
    return dataclasses.replace(type_, partial=partial)


def check_left(before: TensorType, after: Sharding, sums: IsSum) -> None:
    """Refuses to leave a sum unreduced of which devices do not each have a part.

    Args:
      before: the type of the sum.
      after: the sharding to leave it in.
      sums: see `typed`.

    Raises:
      IllTypedError: some devices have no part.
    """
    new = [part for part in before.undecided if part.axis in after.unreduced]
    named = ", ".join(part.axis for part in new)
    left = tuple(axis for axis in after.unreduced if axis in before.unreduced)
    plain = dataclasses.replace(after, unreduced=left)
    if new and left:
        raise IllTypedError(
            f"the sum along {named} is one of sums unreduced along {', '.join(left)}",
            f"mesh_split it to {plain}, which adds it up along {named}",
        )
    for op in dict.fromkeys(op for part in new for op in part.origins):
        if not sums(op, [part.axis for part in new]):
            raise IllTypedError(
                f"it is not a sum over dims that {named} splits evenly, or it is a "
                "convolution's that other axes split too",
                f"mesh_split it to {plain}, which adds it up",
            )


def resharded(
    value: ir.Value, before: Any, expected: Sharding | None, requested: Sharding
) -> TensorType:
    """The type after `reshard`, which converts from the annotated type, or from any.

    Raises:
      IllTypedError: the tensor no longer has the annotated type.
    """
    known = isinstance(before, TensorType) and not before.free
    if expected is not None and known:
        want = TensorType.from_annotation(value, _closed(before, expected))
        # Sums annotated as unreduced may have been added up already.
        partial = set(before.partial) <= set(want.partial)
        if (before.dims, before.reduced) != (want.dims, want.reduced) or not partial:
            raise IllTypedError(
                f"it converts from {expected}, which this is not",
                f"mesh_split it to {expected} before",
            )
    return TensorType.from_annotation(value, requested, getattr(before, "names", ()))


def check_given(
    value: ir.Value, before: TensorType, requested: Sharding | None
) -> TensorType:
    """The type of a result of the program; if None is requested, `before` as it is.

    Raises:
      IllTypedError: a sum is unreduced without an annotation; or as for annotations.
    """
    if requested is not None and requested.is_typed:
        return typed(value, before, requested)
    if requested is not None:
        return annotated(value, before, requested)
    if before.unreduced:
        axes = ", ".join(before.unreduced)
        raise IllTypedError(
            f"its sum is unreduced along {axes}, and a program's results are complete",
            f"reshard it to {before.sharding.untyped()}, or name them in out_shardings",
        )
    if before.undecided:
        part = before.undecided[0]
        raise IllTypedError(
            f"the sharding of the {part.kind} along {part.axis} is ambiguous",
            f"mesh_split it to {before.sharding}, or give its out_shardings",
        )
    return before
