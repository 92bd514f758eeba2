"""Layouts of products, and of convolutions that are products, that XLA gets wrong."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from meshwright.framework.compiler.repair.op_layout import FactorKind, OpLayout
from meshwright.framework.compiler.repair.table.patterns import is_in_order


def regrouped_axes(layout: OpLayout) -> bool:
    """A product whose tensors group axes differently for the same dim.

    - X splits a dim in a tensor, Y and X in another (`[X]`, `[Y.X]`); or different axes
      do, and it is a batch dim, or one of them is in a group for another dim (`[X.Y,Z]`
      by `[Z,Y]`, scattered to `[X.Y,Z]`), or a part of an axis that splits it.
    - The sum is scattered to a dim of an operand of which an axis that is in a group
      for another dim splits a dim that the result does not split (`[Z,X.Y]` by
      `[Z,Y,_]`, summed along Z and scattered to `[X.Y,_,Z]`).
    - Several axes split a dim of the result, but differently in an operand, while some
      axis splits different dims in different tensors (`[X,Z]` by `[X,_]` to `[Z.Y,X]`).
    - Several axes split a dim out of the mesh's order, not in all tensors that have it,
      while some axis splits different dims in different tensors (`[_,Y]` by `[Y,_]` to
      `[Z.X,Y]`); or one of these axes does.
    - Operands split one summed dim alike, and each another summed dim (`[Y,Z,_]` by
      `[Y,_,Z]`): XLA adds up what the devices of a shard hold, whichever shard it is.
    - Some of its tensors are over another mesh, so that nothing is known of them.
    """
    if None in layout.shardings:
        return not layout.is_replaced
    part = layout.mesh.part
    return (
        _sums_apart(layout)
        or _scatters_beside_group(layout)
        or any(
            first[: len(second)] != second[: len(first)]
            and (
                {part(axis).axis for axis in first}
                & {part(axis).axis for axis in second}
                or _is_batch(layout, factor)
                or _is_of_group(layout, {*first, *second}, factor)
            )
            for factor in range(len(layout.kinds))
            for first, second in itertools.combinations(layout.groups(factor), 2)
        )
        or any(
            _regroups_result(layout, factor) or _is_out_of_order(layout, factor)
            for factor in range(len(layout.kinds))
        )
    )


def _sums_apart(layout: OpLayout) -> bool:
    """Whether operands agree on some of the summed dims that they split, not on all."""
    pairs = _summed(layout)
    alike = any(lhs and lhs == rhs for lhs, rhs in pairs)
    apart = [(bool(lhs), bool(rhs)) for lhs, rhs in pairs if lhs != rhs]
    return alike and any(lhs for lhs, _ in apart) and any(rhs for _, rhs in apart)


def _scatters_beside_group(layout: OpLayout) -> bool:
    """Whether a sum is scattered to a dim of an operand, beside one of a group."""
    result = layout.results[0]
    summed = {axis for lhs, rhs in _summed(layout) if lhs == rhs for axis in lhs}
    for operand in layout.operands:
        shared = [
            (factor, operand.axes_of(factor), result.axes_of(factor))
            for factor in range(len(layout.kinds))
            if None not in (operand.axes_of(factor), result.axes_of(factor))
        ]
        scattered = any(
            not before and summed & set(after) for _, before, after in shared
        )
        if scattered and any(
            before and not after and _is_of_group(layout, before, factor)
            for factor, before, after in shared
        ):
            return True
    return False


def _summed(layout: OpLayout) -> list[tuple[tuple[str, ...], ...]]:
    """The axes by which operands split each dim that is summed over."""
    return [
        tuple(operand.axes(operand.dim_of(factor)) for operand in layout.operands)
        for factor, kind in enumerate(layout.kinds)
        if kind is FactorKind.REDUCED
    ]


def _is_out_of_order(layout: OpLayout, factor: int) -> bool:
    """Whether axes split a factor out of the mesh's order, and may do harm."""
    part, groups = layout.mesh.part, layout.groups(factor)
    factors = layout.by_axis(layout.tensors)
    shared = {axis for axis, split in factors.items() if len(split) > 1}
    for axes in groups:
        if not is_in_order(layout.mesh, axes):
            names = {part(axis).axis for axis in axes}
            return bool(shared if len(groups) > 1 else shared & names)
    return False


def _is_of_group(layout: OpLayout, axes: Iterable[str], factor: int) -> bool:
    """Whether one of these axes splits another dim, together with others.

    A mesh axis of which these are a part is a group of its parts.
    """
    part, axes = layout.mesh.part, set(axes)
    names = {part(axis).axis for axis in axes}
    return any(
        (len(group) > 1 or not axes.issuperset(group))
        and not names.isdisjoint(part(axis).axis for axis in group)
        for other_factor in range(len(layout.kinds))
        if other_factor != factor
        for group in layout.groups(other_factor)
    )


def _regroups_result(layout: OpLayout, factor: int) -> bool:
    """Whether several axes split a dim of the result, but an operand's differently.

    An axis must also split different dims. Axes that split a dim over which both
    operands are summed may split another dim of the result, along which the sum is
    scattered, unless that is a batch dim.
    """
    result = layout.results[0]
    dim = result.dim_of(factor)
    if dim is None or len(layout.groups(factor)) == 1 or len(result.axes(dim)) < 2:
        return False
    lhs, rhs = (layout.by_axis([operand]) for operand in layout.operands)
    summed = {f for f, kind in enumerate(layout.kinds) if kind is FactorKind.REDUCED}
    scattered = {
        axis
        for axis in lhs.keys() & rhs.keys()
        if lhs[axis] == rhs[axis] and lhs[axis] <= summed
    }
    return any(
        len(factors) > 1 and (axis not in scattered or _is_batch(layout, factor))
        for axis, factors in layout.by_axis(layout.tensors).items()
    )


def may_regroup(layout: OpLayout) -> bool:
    """Whether a product is near `regrouped_axes`.

    Several axes split a dim of it, or its tensors split a batch dim differently, or
    several dims are summed over, not all of which are split alike.
    """
    summed = _summed(layout)
    if len(summed) > 1 and any(lhs != rhs for lhs, rhs in summed):
        return True
    return any(len(axes) > 1 for t in layout.tensors for axes in t.splitting()) or any(
        len(layout.groups(factor)) > 1
        for factor in range(len(layout.kinds))
        if _is_batch(layout, factor)
    )


def _is_batch(layout: OpLayout, factor: int) -> bool:
    """Whether a factor of a product is a dim of both operands and of the result."""
    return len(list(layout.places(factor))) == 3
