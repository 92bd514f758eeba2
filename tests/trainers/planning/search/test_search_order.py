"""Device orders that a search tries, and the rough costs that go by them."""

import dataclasses
from types import SimpleNamespace

import pytest

from meshwright.framework.devices.device_order import (
    device_order,
    device_orders,
    order_of,
)
from meshwright.framework.devices.network import LINK_EFFICIENCY
from meshwright.framework.devices.topology import topology
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.tasks.task import Task
from meshwright.trainers.planning.search import search_text, search_worker
from meshwright.trainers.planning.search.search_cost import bytes_passed, rough_seconds
from meshwright.trainers.planning.search.search_space import built, factorizations
from tests.trainers.planning.search.search_cases import (
    NAMED,
    candidate,
    searched,
    space,
)
from tests.trainers.small_run import GIN_FILES


@pytest.fixture(scope="module")
def small():
    return space(*NAMED)


def one_matrix(rows, cols):
    """A stack's matrices of small_lm.gin, elements."""
    return rows * cols * 2


def test_dims_of_a_batch_may_have_no_names(small, monkeypatch):
    """As by default, and of Keras models."""
    named = bytes_passed(small.experiment, 1.0)
    task = type(small.experiment.task)
    monkeypatch.setattr(task, "batch_dims", Task.batch_dims)
    assert bytes_passed(small.experiment, 1.0).keys() == named.keys()


def test_what_is_sent_follows_from_the_tables(small):
    """Attempt 2 on (8, 1) is data parallel, weights split: each goes round 3 times."""
    experiment = small.experiment
    tables = {plan.name: plan.tables for plan in small.plans}

    def sent(plan, mesh, recomputed=0.0):
        plan = dataclasses.replace(tables[plan], mesh_shape=mesh)
        return bytes_passed(dataclasses.replace(experiment, plan=plan), recomputed)

    matrices = 4 * one_matrix(16, 16) + 2 * one_matrix(16, 32) + 264 * 16
    assert sent("attempt2", (8, 1)) == {
        "X": pytest.approx(3 * 4 * matrices * 7 / 8),
        "Y": 0,
    }
    again = sent("attempt2", (8, 1), 1.0)
    assert again["X"] == pytest.approx(4 / 3 * sent("attempt2", (8, 1))["X"])
    # Activations split on one side alone are reduced on the other, there and back.
    reduced = 2 * 64 * 16 * (4 + 2) * 2 * 4 + 2 * 64 * 16 * 4
    assert sent("attempt2", (1, 4))["Y"] == pytest.approx(reduced * 3 / 4)
    full = dataclasses.replace(
        tables["attempt2"], mesh_shape=(8, 1), weights=ShardingPlan().weights
    )
    placed = dataclasses.replace(experiment, plan=full)
    assert bytes_passed(placed, 0.0)["X"] == pytest.approx(2 * 4 * matrices * 7 / 8)


@pytest.mark.parametrize("name", ["v3:8x16", "v3:4x4", "v4:2x4x4", "tpu7x:4x4x4"])
def test_device_orders_are_the_trainers_and_those_that_ask_less_somewhere(name):
    torus = topology(name)
    several = 0
    for shape in factorizations(torus.size, 2):
        orders = device_orders(shape, torus)
        default = device_order(shape, torus)
        assert orders[0].loads == default.loads and (orders[0].ids == default.ids).all()
        several += len(orders) > 1
        for order in orders:
            assert sorted(order.ids.flat) == list(range(torus.size))
            mesh = DeviceMesh(("X", "Y"), shape, tuple(order.ids.flat))
            # What a mesh that lists these devices is priced by.
            assert order_of(mesh, torus).loads == order.loads
            for other in orders[1:]:
                assert other is order or any(
                    a < b for a, b in zip(order.loads, other.loads, strict=True)
                )
    assert several


def test_the_order_that_a_program_is_fastest_in_is_found(small, monkeypatch):
    """Where one axis sends all, that which asks least along it; (4, 2) on v3:2x2."""
    torus, mesh = topology("v3:2x2"), DeviceMesh(("X", "Y"), (4, 2))
    default, other = device_orders((4, 2), torus)
    assert (default.loads, other.loads) == ((4, 0), (2, 4))
    experiment = built(small.gin_files, [*small.gin_params, "MESH_SHAPE = (4, 2)"])

    def fastest_order(x, y):
        def step_time(module, mesh, order):
            return SimpleNamespace(seconds=x * order.loads[0] + y * order.loads[1])

        monkeypatch.setattr(search_worker, "step_time", step_time)
        report = SimpleNamespace(
            experiment=experiment,
            pod=torus,
            order=default,
            module=None,
            step_seconds=step_time(None, mesh, default).seconds,
        )
        return search_worker.fastest(report)

    assert fastest_order(1, 0) == (2, other)
    assert fastest_order(1, 1) == (4, default)


DROPPED = ", but for its device order"


def test_a_device_order_is_written_down(small):
    """A long one is broken; what was given before is replaced."""
    given = "ShardingPlan.device_ids = (7, 6, 5, 4, 3, 2, 1, 0)"
    for where in (small, space(given, *NAMED)):
        (row, *_) = searched(where).ranked
        ids = (0, 2, 4, 6, 1, 3, 5, 7)
        row = dataclasses.replace(
            row, result=dataclasses.replace(row.result, device_ids=ids)
        )
        changed = dataclasses.replace(searched(where), ranked=(row,))
        text = search_text.winner(where, changed)
        made = built([*GIN_FILES], [*where.gin_params, *row.bindings()])
        assert made.plan.mesh.device_ids == ids
        assert text.endswith(row.bindings()[-1] + "\n")
        lines = search_text.table(where, changed).splitlines()
        assert lines[1].startswith(" +")
        assert "+ in a device order other than the trainer's" in lines
        lines = search_text.table(where, searched(where)).splitlines()
        mark = "* as configured" + ("" if where is small else DROPPED)
        assert mark in lines
    long = dataclasses.replace(
        row, result=dataclasses.replace(row.result, device_ids=tuple(range(256)))
    )
    assert all(len(line) <= 80 for line in long.bindings()[-1].splitlines())


def test_rough_seconds_count_in_the_best_order():
    """On (64, 4) nearly all goes along X."""
    large = "GLOBAL_BATCH = 192"
    where = space(large, name="v3:8x16", files=["paper/table3_32x8.gin"])
    case = candidate(where, mesh=(64, 4), batch=192)
    torus, plan = where.torus, case.plan.on(case.mesh)
    placed = dataclasses.replace(where.experiment, plan=plan, global_batch=192)
    sent = bytes_passed(placed, 1.0)
    loads = [order.loads for order in device_orders(case.mesh, torus)]
    assert loads == [(8, 2), (4, 4)]
    default, other = (
        sum(sent[axis] / 2 * n for axis, n in zip("XY", each, strict=True))
        / (LINK_EFFICIENCY * torus.kind.link_bandwidth)
        for each in loads
    )
    flops = where.experiment.task.train_flops(192) * 4 / 3
    compute = flops / (0.6 * torus.kind.peak_flops * torus.size)
    rough = rough_seconds(where.experiment, case, torus, 1.0)
    assert other < default and rough == pytest.approx(compute + other)
