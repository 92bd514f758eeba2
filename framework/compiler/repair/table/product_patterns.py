"""Layouts of products, and of convolutions that are products, that XLA gets wrong."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from meshwright.framework.compiler.repair.op_layout import FactorKind, OpLayout
from meshwright.framework.compiler.repair.table.patterns import is_in_order


def regrouped_axes(layout: OpLayout) -> bool:
    """A product whose tensors group axes otherwise for the same dim.

    - X splits a dim in a tensor, Y and X in another (`[X]`, `[Y.X]`); or different axes
      do, and it is a batch dim, or one of them is of a group for another dim (`[X.Y,Z]`
      by `[Z,Y]`, scattered to `[X.Y,Z]`).
    - Several axes split a dim of the result, otherwise than an operand's, while some
      axis splits one dim here and another there (`[X,Z]` by `[X,_]` to `[Z.Y,X]`).
    - Several axes split a dim in another order than the mesh's, not in all tensors that
      have it, while some axis splits one dim here and another there (`[_,Y]` by `[Y,_]`
      to `[Z.X,Y]`); or one of these axes does.
    - Operands split one dim that is summed over alike, and each another one (`[Y,Z,_]`
      by `[Y,_,Z]`): of a shard XLA adds up what its devices hold, whichever it is.
    - Some of its tensors are over another mesh, so that nothing is known of them.
    """
    if None in layout.shardings:
        return not layout.is_replaced
    part = layout.mesh.part
    return (
        _sums_apart(layout)
        or any(
            one[: len(other)] != other[: len(one)]
            and (
                {part(axis).axis for axis in one} & {part(axis).axis for axis in other}
                or _is_batch(layout, factor)
                or _is_of_group(layout, {*one, *other}, factor)
            )
            for factor in range(len(layout.kinds))
            for one, other in itertools.combinations(layout.groups(factor), 2)
        )
        or any(
            _regroups_result(layout, factor) or _is_out_of_order(layout, factor)
            for factor in range(len(layout.kinds))
        )
    )


def _sums_apart(layout: OpLayout) -> bool:
    """Whether operands agree on one of the summed dims that they split, not on all."""
    pairs = _summed(layout)
    alike = any(lhs and lhs == rhs for lhs, rhs in pairs)
    apart = [(bool(lhs), bool(rhs)) for lhs, rhs in pairs if lhs != rhs]
    return alike and any(lhs for lhs, _ in apart) and any(rhs for _, rhs in apart)


def _summed(layout: OpLayout) -> list[tuple[tuple[str, ...], ...]]:
    """The axes by which operands split each dim that is summed over."""
    return [
        tuple(operand.axes(operand.dim_of(factor)) for operand in layout.operands)
        for factor, kind in enumerate(layout.kinds)
        if kind is FactorKind.REDUCED
    ]


def _is_out_of_order(layout: OpLayout, factor: int) -> bool:
    """Whether axes split a factor in another order than the mesh's, and may do harm."""
    part, groups = layout.mesh.part, layout.groups(factor)
    factors = layout.by_axis(layout.tensors)
    shared = {axis for axis, of in factors.items() if len(of) > 1}
    for axes in groups:
        if not is_in_order(layout.mesh, axes):
            own = {part(axis).axis for axis in axes}
            return bool(shared if len(groups) > 1 else shared & own)
    return False


def _is_of_group(layout: OpLayout, axes: Iterable[str], factor: int) -> bool:
    """Whether one of these axes splits another dim, together with others."""
    part = layout.mesh.part
    names = {part(axis).axis for axis in axes}
    return any(
        len(group) > 1 and not names.isdisjoint(part(axis).axis for axis in group)
        for other in range(len(layout.kinds))
        if other != factor
        for group in layout.groups(other)
    )


def _regroups_result(layout: OpLayout, factor: int) -> bool:
    """Whether several axes split a dim of the result, and an operand's otherwise.

    And an axis splits different dims. Axes that split a dim which both operands are
    summed over may split another of the result, to which the sum is scattered, unless
    that is a batch dim.
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

    A dim of it is split by several axes, or a batch dim not alike by all its tensors,
    or several dims are summed over, of which not all are split alike.
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
