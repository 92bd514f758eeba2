"""How cases are drawn, and which are not, because XLA gets them wrong."""

from __future__ import annotations

import dataclasses
import itertools
import math

from hypothesis import assume
from hypothesis import strategies as st

from meshwright.framework.compiler.program import Partitioner
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from tests.operators.cases import Case
from tests.operators.operators import OPERATORS


@st.composite
def shardings(
    draw, mesh: DeviceMesh, shape, *, unsplit=(), even=(), all_axes=False
) -> Sharding:
    """Each axis splits one of the dims or none; several may split one, in any order."""
    dims = {dim: [] for dim in range(len(shape))}
    for axis in draw(st.permutations(mesh.axis_names)):
        shards = {dim: mesh.axes_size([*dims[dim], axis]) for dim in dims}
        free = [
            dim
            for dim in dims
            if dim not in unsplit
            and (dim not in even or _leaves_several(shape[dim], shards[dim]))
        ]
        assume(free or not all_axes)
        chosen = draw(st.sampled_from(free if all_axes else [None, *free]))
        if chosen is not None:
            dims[chosen].append(axis)
    return Sharding(mesh, tuple(tuple(axes) for axes in dims.values()))


def _leaves_several(size: int, shards: int) -> bool:
    return size % shards == 0 and size > shards


@st.composite
def cases(draw, operator: str, mesh: DeviceMesh, partitioner: Partitioner) -> Case:
    use = draw(OPERATORS[operator])
    inputs = [(name, one.shape) for name, one in use.inputs.items()]
    results = [("result", shape) for shape in use.result_shapes]

    def any_of(tensors, free: bool):
        of = [
            shardings(
                mesh,
                shape,
                unsplit=use.unsplit.get(name, ()),
                even=range(len(shape)) if name in use.even else (),
            )
            for name, shape in tensors
        ]
        return tuple(draw(st.none() | one if free else one) for one in of)

    case = Case(
        operator=operator,
        use=use,
        mesh=mesh,
        arrives=any_of(inputs, free=False),
        annotated=any_of(inputs, free=True),
        result=any_of(results, free=True),
        leaves=any_of(results, free=False),
    )
    if use.halo and draw(st.booleans()):
        case = draw(_with_halos(case))
    assume(not _is_known_to_fail(case, partitioner))
    return case


@st.composite
def _with_halos(draw, case: Case) -> Case:
    """Batch, evenly, and window dims split, alike in x and result; the kernel whole.

    No window dim has more shards than elements. With more than five shards of one, the
    result's are no larger than those of x.
    """
    shape, result = case.use.inputs["x"].shape, case.use.result_shapes[0]
    channels = len(shape) - 1
    alike = draw(
        shardings(
            case.mesh,
            shape,
            unsplit=[channels, *case.use.whole],
            even=[0],
            all_axes=True,
        )
    )
    for n, m, shards in zip(shape, result, alike.splits(), strict=True):
        assume(shards <= min(n, m))
        assume(shards <= 5 or math.ceil(m / shards) <= math.ceil(n / shards))
    whole = Sharding.replicated(case.mesh, len(shape))
    return dataclasses.replace(
        case,
        arrives=(alike, case.arrives[1]),
        annotated=(alike, whole),
        result=(alike,),
        leaves=(alike,),
    )


def _is_known_to_fail(case: Case, partitioner: Partitioner) -> bool:
    everywhere = (_splits_rows_like_indices, _regroups_axes, _needs_far_halos)
    if any(fails(case) for fails in everywhere):
        return True
    return partitioner is Partitioner.GSPMD and _splits_batches_apart(case)


def _shardings(case: Case, name: str) -> list[Sharding]:
    """All that a tensor has in the case: at the border and where it is annotated."""
    if name == "result":
        found = [*case.result, *case.leaves]
    else:
        at = list(case.use.inputs).index(name)
        found = [case.arrives[at], case.annotated[at]]
    return [sharding for sharding in found if sharding is not None]


def _splits_rows_like_indices(case: Case) -> bool:
    """Whether rows and indices may reach a gather split by the same axes.

    That fails where more shards are asked of its result.
    """
    use = case.use

    def groups(names, of_rows: bool):
        """The groups of axes that split dims of these tensors."""
        return {
            axes
            for name in names
            for sharding in _shardings(case, name)
            for dim, axes in enumerate(sharding.dims)
            if axes and (dim in use.rows.get(name, ())) is of_rows
        }

    if not use.picked:
        return False
    wanted = groups(["i", use.picked], of_rows=False)
    wanted |= groups([use.picked], of_rows=True)
    return any(
        set(axes).isdisjoint(other)
        and case.mesh.axes_size(other) > case.mesh.axes_size(axes)
        for axes in groups(use.rows, of_rows=True) & groups(["i"], of_rows=False)
        for other in wanted
    )


def _regroups_axes(case: Case) -> bool:
    """Whether dims in a product are split by axes of which neither begins the other's.

    Such as X and Y.X. That fails where a third axis splits the sum.
    """
    if not case.use.product:
        return False
    groups = {
        axes
        for name in (*case.use.inputs, "result")
        for sharding in _shardings(case, name)
        for axes in sharding.dims
        if axes
    }
    for one, other in itertools.permutations(groups, 2):
        prefix = one[: len(other)] == other or other[: len(one)] == one
        third = set(case.mesh.axis_names).difference(one, other)
        if third and not prefix and not set(one).isdisjoint(other):
            return True
    return False


def _needs_far_halos(case: Case) -> bool:
    """Whether windows of two dims are split, and the halo of one is a whole shard.

    As where 4 columns are split by 3 into 2, 2 and none, and the result's 3 into one
    each. That fails where the other dim has strides.
    """
    pools = case.operator == "avg_pool"
    if not case.use.halo and not pools:
        return False
    shape, result = case.use.inputs["x"].shape, case.use.result_shapes[0]
    # A pool's operand may be split though its result is not.
    of_x = _shardings(case, "x") if pools else []
    for sharding in [*_shardings(case, "result"), *of_x]:
        splits = sharding.splits()[1:-1]
        far = [
            (shards - 1) * (math.ceil(n / shards) - math.ceil(m / shards))
            >= math.ceil(n / shards)
            for n, m, shards in zip(shape[1:-1], result[1:-1], splits, strict=True)
        ]
        if any(far) and sum(shards > 1 for shards in splits) > 1:
            return True
    return False


def _splits_batches_apart(case: Case) -> bool:
    """Whether x and y reach a contraction with a batch dim split by different axes."""
    if not case.use.batch:
        return False
    pairs = zip(case.arrives, case.annotated, strict=True)
    x, y = [(annotated or arrives).dims for arrives, annotated in pairs]
    batches = zip(x[: case.use.batch], y[: case.use.batch], strict=True)
    return any(a and b and a != b for a, b in batches)
