"""How cases are drawn: any sizes, any shardings."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from tests.operators.definitions.operators import OPERATORS
from tests.operators.definitions.use import BOOLEANS, Use
from tests.operators.judging.cases import OTHER_MESHES, Case
from tests.operators.judging.layouts import LAYOUTS

# One draw in so many, the rare value last: Hypothesis shrinks to the first.
_SELDOM = st.sampled_from([False] * 5 + [True])


@st.composite
def shardings(
    draw, mesh: DeviceMesh, rank: int, *, unsplit=(), all_axes=False, manual=()
):
    """Each axis splits one of the dims or none; several may split one, in any order.

    None of the `manual` axes of the region around it.
    """
    dims: list[list[str]] = [[] for _ in range(rank)]
    free = [dim for dim in range(rank) if dim not in unsplit]
    axes = [axis for axis in mesh.axis_names if axis not in manual]
    for axis in draw(st.permutations(axes)):
        chosen = draw(st.sampled_from(free if all_axes else [None, *free]))
        if chosen is not None:
            dims[chosen].append(axis)
    return Sharding(mesh, tuple(map(tuple, dims)))


@st.composite
def annotations(draw, mesh: DeviceMesh, rank: int, several: bool, manual=()):
    """None, or a sharding; some with dims left open, some over another mesh."""
    if draw(BOOLEANS):
        return None
    if several:
        alike = [m for m in OTHER_MESHES if m.size == mesh.size]
        mesh = draw(st.sampled_from([mesh, *alike]))
    sharding = draw(shardings(mesh, rank, manual=manual))
    if rank and draw(_SELDOM):
        unspecified = draw(st.integers(0, rank - 1))
        sharding = dataclasses.replace(sharding, unspecified=(unspecified,))
    return sharding


@st.composite
def regions(draw, mesh: DeviceMesh) -> tuple[str, ...]:
    """Now and then one of several axes, manual in a region around the operator."""
    if len(mesh.shape) == 1 or not draw(_SELDOM):
        return ()
    return (draw(st.sampled_from(mesh.axis_names)),)


@st.composite
def uses(draw, operator: str) -> Use:
    """In float32, or now and then in another of the formats that the operator has."""
    use = draw(OPERATORS[operator])
    if use.formats and draw(st.sampled_from([False, False, True])):
        use = use.in_format(draw(st.sampled_from(use.formats)))
    return use


def _result_ranks(use: Use, operator: str) -> list[int]:
    try:
        return [len(shape) for shape in use.result_shapes]
    except ValueError as error:
        raise ValueError(f"operator {operator!r}: {error}") from error.__cause__


@st.composite
def cases(draw, operator: str, mesh: DeviceMesh) -> Case:
    use = draw(uses(operator))
    inputs = [len(operand.shape) for operand in use.inputs.values()]
    results = _result_ranks(use, operator)
    region = draw(regions(mesh))
    several = not region and draw(_SELDOM)

    def borders(ranks):
        return tuple(draw(shardings(mesh, rank)) for rank in ranks)

    def annotated(ranks):
        return tuple(draw(annotations(mesh, rank, several, region)) for rank in ranks)

    case = Case(
        operator=operator,
        use=use,
        mesh=mesh,
        arrives=borders(inputs),
        annotated=annotated(inputs),
        result=annotated(results),
        leaves=borders(results),
        inner=annotated(use.inner),
        region=region,
    )
    if use.spatial and not region and draw(BOOLEANS):
        case = draw(_with_halos(case))
    return case


@st.composite
def layouts(draw, name: str, mesh: DeviceMesh) -> Case:
    """One of `LAYOUTS`, every tensor of its operator annotated."""
    use = LAYOUTS[name]
    inputs = [len(operand.shape) for operand in use.inputs.values()]
    results = _result_ranks(use, name)
    region = draw(regions(mesh))

    def annotated(ranks):
        return tuple(draw(shardings(mesh, rank, manual=region)) for rank in ranks)

    def replicated(ranks):
        return tuple(Sharding.replicated(mesh, rank) for rank in ranks)

    return Case(
        operator="layouts",
        use=use,
        mesh=mesh,
        arrives=replicated(inputs),
        annotated=annotated(inputs),
        result=annotated(results),
        leaves=replicated(results),
        region=region,
    )


@st.composite
def _with_halos(draw, case: Case) -> Case:
    """Batch and window dims split, alike in x and the result; the rest whole."""
    rank = len(case.use.inputs["x"].shape)
    channels = {rank - 1}
    alike = draw(shardings(case.mesh, rank, unsplit=channels, all_axes=True))
    others = [len(operand.shape) for operand in case.use.inputs.values()][1:]
    wholes = tuple(Sharding.replicated(case.mesh, rank) for rank in others)
    return dataclasses.replace(
        case,
        arrives=(alike, *case.arrives[1:]),
        annotated=(alike, *wholes),
        result=(alike,),
        leaves=(alike,),
    )
