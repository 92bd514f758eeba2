"""Plans that nobody wrote are found, and what is found is the best there is."""

import dataclasses
import heapq
import itertools

import numpy as np
import pytest

from meshwright.framework.compiler.stablehlo.shardy.device_work import (
    DeviceWork,
    Product,
)
from meshwright.framework.compiler.stablehlo.shardy.named_module import ClashError
from meshwright.framework.devices.topology import topology
from meshwright.framework.sharding.plan import as_axes
from meshwright.trainers.planning.search.found import finding
from meshwright.trainers.planning.search.found.alike import distinct, plainest
from meshwright.trainers.planning.search.found.finding import (
    Finder,
    Point,
    mesh_shapes,
)
from meshwright.trainers.planning.search.found.found_plans import PlanFinder, table_text
from meshwright.trainers.planning.search.found.propagated import (
    compute_seconds,
    propagated,
)
from meshwright.trainers.planning.search.search_space import Candidate
from tests.trainers.planning.search.search_cases import NOTHING, space

# Wide enough that sending all weights costs more than computing with a part of them.
WIDE = (
    "MODEL_DIMS = 512",
    "HIDDEN_DIMS = 2048",
    "NUM_HEADS = 8",
    "HEAD_DIM = 64",
    "VOCAB_SIZE = 1024",
)


@pytest.fixture(scope="module")
def finder():
    where = space(*WIDE, batches=(64,))
    choice = Candidate(
        mesh=(2, 4), plan=where.plans[0], policy=NOTHING, batch=64, microbatches=None
    )
    return PlanFinder(where.experiment, [choice], where.torus, known={})


def fresh(finder):
    old = finder.finder
    return Finder(old.steps, old.weights, old.torus, known=old.known)


def masks(finder, **tables):
    return tuple(tables.get(name.table, {}).get(name.dim, 0) for name in finder.names)


@pytest.mark.slow
def test_the_fastest_of_all_plans_is_found(finder):
    """On one axis all plans can be propagated: 1014 of 16384 are plans at all."""
    shape = (8,)
    rough = finder.finder.rough(0, shape)
    all_ = np.array(list(itertools.product(*rough.allowed)))
    plans = all_[rough.evaluate(all_).clashes == 0]
    search = fresh(finder)
    everything = [search.look_up(Point(0, shape, tuple(map(int, p)))) for p in plans]
    fastest = min(found.priced.seconds for found in everything)
    search.shapes = [shape]
    search.run([], most=40)
    assert search.progress.propagated == 40 < len(everything)
    assert search.best().priced.seconds <= 1.03 * fastest
    assert search.progress.floor < fastest


def test_a_clash_is_seen_without_propagating(finder):
    weights = {"model": 1, "hidden": 1}
    plan = masks(finder, weights=weights)
    rough = finder.finder.rough(0, (8,))
    assert rough.evaluate(np.array([plan])).clashes > 0
    with pytest.raises(ClashError):
        propagated(finder.finder.steps[0], (8,), plan, finder.finder.torus)


def test_memory_is_bounded_from_below(finder):
    rough = finder.finder.rough(0, (8,))
    for tables in ({}, {"weights": {"hidden": 1, "vocab": 1}}):
        plan = masks(finder, **tables)
        bound = rough.evaluate(np.array([plan])).memory[0]
        step, torus = finder.finder.steps[0], finder.finder.torus
        assert bound <= 1.05 * propagated(step, (8,), plan, torus).memory


def test_a_plan_file_is_a_point_of_the_space(finder):
    where = space(*WIDE, batches=(64,))
    (finalized,) = (plan for plan in where.plans if plan.name == "finalized")
    candidate = Candidate(mesh=(2, 4), plan=finalized, policy=NOTHING, batch=64)
    point = finder.point_of(candidate)
    assert point.shape == (4, 2)  # The larger axis first: Y.
    tables = finder.tables(point)
    names = {"X": "Y", "Y": "X"}
    for table in ("weights", "activations"):
        assert {
            dim: tuple(names[axis] for axis in as_axes(axes))
            for dim, axes in getattr(finalized.tables, table).items()
        } == {d: axes for d, axes in getattr(tables, table).items() if axes}


def test_names_that_do_not_matter_are_left_out(finder):
    search = fresh(finder)
    model = masks(finder, activations={"batch": 1, "stream": 2})
    with_more = masks(finder, activations={"batch": 1, "stream": 2, "head_dim": 0})
    found = search.look_up(Point(0, (4, 2), model))
    assert plainest(search, found).priced.same(found.priced)
    assert sum(map(bool, plainest(search, found).point.masks)) <= 2
    assert with_more == model


def test_plans_that_hardly_differ_are_one(finder):
    search = fresh(finder)
    one = masks(finder, activations={"batch": 1})
    search.found = [search.look_up(Point(0, (4, 2), one))] * 2
    assert distinct(search, 10) == search.found[:1]


def test_large_weights_that_are_split_otherwise_make_another_plan(finder):
    search = fresh(finder)
    plans = [
        masks(finder, weights={dim: 1}, activations={"batch": 1})
        for dim in ("model", "hidden")
    ]
    search.found = [search.look_up(Point(0, (8,), plan)) for plan in plans]
    assert len(distinct(search, 10)) == 2 and len(distinct(search, 1)) == 1


def test_one_of_each_kind_within_the_error_comes_first(finder):
    """Plans that split large weights otherwise come before more of the same kind."""
    search = fresh(finder)
    plans = [
        masks(finder, weights={dim: axis}, activations={"batch": 1})
        for dim, axis in (("model", 1), ("model", 1), ("hidden", 1), ("vocab", 1))
    ]
    seconds = (1.0, 1.01, 1.02, 1.2)
    search.found = [
        dataclasses.replace(found, priced=dataclasses.replace(found.priced, seconds=s))
        for s, plan in zip(seconds, plans, strict=True)
        for found in [search.look_up(Point(0, (8,), plan))]
    ]
    order = [found.priced.seconds for found in distinct(search, 4)]
    assert order == [1.0, 1.02, 1.01, 1.2]
    assert [found.priced.seconds for found in distinct(search, 2)] == [1.0, 1.02]


def test_axes_of_one_size_that_change_places_are_alike(finder):
    small = fresh(finder)
    plans = [
        masks(finder, weights={"model": 3 - batch}, activations={"batch": batch})
        for batch in (1, 2)
    ]
    found = [small.look_up(Point(0, (4, 2), plan)) for plan in plans]
    same = dataclasses.replace(found[1], priced=found[0].priced)
    small.found = [found[0], same]
    assert len(distinct(small, 10)) == 2
    small.found = [
        dataclasses.replace(one, point=dataclasses.replace(one.point, shape=(4, 4)))
        for one in small.found
    ]
    assert len(distinct(small, 10)) == 1


def test_the_search_ends_when_told(finder):
    search = fresh(finder)
    search.run([], most=40, until=0.0)
    assert search.progress.considered == search.progress.propagated == 0
    assert search.best() is None


def test_crowds_take_turns_with_neighbours(finder):
    """What is best by rough costs is looked at, whatever neighbours promise."""
    search = fresh(finder)
    search.run([], most=0)
    crowd = [point for *_, point in sorted(search._crowded)[:2]]
    assert len(search._crowded) > 2
    waiting = [Point(0, (8,), (mask, *crowd[0].masks[1:])) for mask in range(4)]
    for i, point in enumerate(waiting):
        heapq.heappush(search._waiting, (0.1 * i, point))
    search._crowded = [(0, 1.0, crowd[0]), (2, 1.0, crowd[1])]
    turns = [search._next() for _ in range(6)]
    # The third of a crowd comes when nothing waits.
    assert turns == [crowd[0], *waiting, crowd[1]]


def test_a_plan_of_a_crowd_comes_as_a_neighbour_too(finder):
    """Where it waits with a promising cost, not at the crowd's end; and once."""
    search = fresh(finder)
    search.run([], most=0)
    late = max(search._crowded)[-1]
    search._wait(late, 0.0)
    assert late in [search._next() for _ in range(2)]
    assert late in {point for *_, point in search._crowded}
    search._waiting = []
    rest = iter(search._next, None)
    assert late not in itertools.islice(rest, len(search._crowded))


def test_a_name_takes_axes_from_all_that_it_clashes_with(finder):
    """Two steps by way of a plan without the axis are one."""
    plan = masks(finder, activations={"batch": 1, "sequence": 2, "stream": 2})
    taken = masks(finder, activations={"batch": 3})
    assert taken in {*finding._neighbours(plan, finder.finder.rough(0, (4, 2)))}


def test_axes_of_other_sizes_change_places(finder):
    search = fresh(finder)
    tables = {"weights": {"model": 1, "hidden": 2}, "activations": {"batch": 1}}
    swapped = {"weights": {"model": 2, "hidden": 1}, "activations": {"batch": 2}}
    for shape, waits in (((4, 2), True), ((2, 2, 2), False)):
        search._waiting, search._waited = [], set()
        search._wait_around(search.look_up(Point(0, shape, masks(finder, **tables))))
        other = Point(0, shape, masks(finder, **swapped))
        assert (other in {point for _, point in search._waiting}) == waits


def test_meshes_have_their_largest_axis_first():
    assert mesh_shapes(topology("v3:2x2"), 3) == [(8,), (4, 2), (2, 2, 2)]


def test_a_plan_is_a_table_of_names(finder):
    point = Point(
        0, (4, 2), masks(finder, weights={"vocab": 2}, activations={"batch": 3})
    )
    assert table_text(finder.tables(point)) == [
        "name   weights  activations",
        "batch           X.Y",
        "vocab  Y",
    ]


def test_a_small_product_takes_what_it_moves():
    kind = topology("v3:2x2").kind
    seconds = [
        compute_seconds(DeviceWork(products=[Product(*sizes, 1, moved)]), kind)
        for sizes, moved in (((8, 128, 128), 1e6), ((8192, 8192, 8192), 1e6))
    ]
    assert seconds[0] == 1e6 / kind.memory_bandwidth
    assert seconds[1] > 2 * 8192**3 / kind.peak_flops
