"""Weight-update sharding's decisions: what it saves and costs, and what is gathered.

Small functions, lowered and analysed; nothing is compiled.
"""

import dataclasses
import functools
import re

import pytest
import tensorflow as tf

from meshwright.framework.compiler.stablehlo.stable_hlo import (
    call_target,
    shape_of,
    walk,
)
from meshwright.framework.compiler.weight_update_sharding.decide import (
    Machine,
    batch_bytes,
    longer,
)
from meshwright.framework.compiler.weight_update_sharding.decisions import (
    UpdateLine,
    UpdateReport,
)
from meshwright.framework.compiler.weight_update_sharding.gradient import find_sum
from meshwright.framework.compiler.weight_update_sharding.update_layouts import Tiles
from meshwright.framework.devices.hardware import TPU_KINDS
from meshwright.framework.devices.topology import topology
from meshwright.framework.sharding.annotations import annotate
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from tests.framework.updates.updates import (
    ALL,
    AUTO,
    BOTH,
    DATA,
    DENSE,
    MADE_UP,
    NO_LATENCY,
    B,
    H,
    L,
    M,
    X,
    analysed,
    gradients,
    mean_square,
    momentum,
)

SLOW_START = Machine(hardware=dataclasses.replace(MADE_UP, latency=1e-4))
STEP = tf.TensorSpec([], tf.int32)
POD = Machine(
    hardware=TPU_KINDS["v3"],
    torus=topology("v3:32x32"),
    tiles=Tiles(rows=8, columns=128),
)
SUMMARIES = {**DENSE, "step": STEP}


def rarely(step):
    return tf.equal(step % 100, 0)


def with_summary(w, m, x, step, *, due, read, swap=False):
    """Reads a slot in a branch, in a way that cannot be computed on shards."""
    new = momentum(w, m, x)
    cases = [lambda: read(new["m"]), lambda: tf.zeros([])]
    new["s"] = tf.cond(due(step), *(reversed(cases) if swap else cases))
    return new


def by_product(m):
    return tf.reduce_sum(m @ tf.ones([H, 1]))


def by_sorting(m):
    """Some of its ops are computed on shards inside the branch."""
    return tf.reduce_sum(tf.sort(-m, 0)[:3])


WHOLE = M * H * 4


@pytest.mark.parametrize("read", [by_product, by_sorting], ids=["outer", "inner"])
def test_a_rare_branch_is_cheap(read):
    fn = functools.partial(with_summary, due=rarely, read=read)
    with analysed(fn, SUMMARIES, X) as analysis:
        (decision,) = analysis.decide().values()
        assert decision.gathered_bytes == WHOLE + WHOLE // 100


@pytest.mark.parametrize(
    "due,swap",
    [
        (lambda step: step > 5, False),
        (rarely, True),
        (lambda step: tf.not_equal(step % 100, 0), False),
    ],
    ids=["always", "else", "not_equal"],
)
def test_a_branch_that_is_taken_mostly_is_dear(due, swap):
    fn = functools.partial(with_summary, due=due, read=by_product, swap=swap)
    with analysed(fn, SUMMARIES, X) as analysis:
        (decision,) = analysis.decide().values()
        assert decision.gathered_bytes >= WHOLE + WHOLE * 99 // 100


def test_what_a_rare_branch_reads_is_gathered_inside_it():
    fn = functools.partial(with_summary, due=rarely, read=by_product)
    with analysed(fn, SUMMARIES, X) as analysis:
        forms = analysis.rewrite()
        borders = {name: str(form.border) for name, form in forms.items()}
        assert borders == {"m": "[data,_]"}
        # The new slot is a sum, the new weight a difference.
        gathers = {
            op.operands[0].owner.name: op.parent.operation.name
            for op in walk(analysis.completed.main)
            if call_target(op) == "Sharding"
            and "replicated" in str(op.attributes["mhlo.sharding"])
            and getattr(op.operands[0].owner, "name", "")
            in ("stablehlo.add", "stablehlo.subtract")
        }
        names = ("stablehlo.add", "stablehlo.subtract")
        assert gathers == dict(zip(names, ("stablehlo.if", "func.func"), strict=True))


def test_auto_leaves_alone_what_does_not_pay():
    """A bias of 16 numbers saves less than a collective takes to begin."""

    def fn(w, m, x):
        (g,) = gradients(lambda w: mean_square(x + w), w)
        m = 0.9 * m + g
        return {"w": w - m, "m": m}

    with analysed(fn, {"w": [M], "m": [M], "x": [B, M]}, X) as analysis:
        decision = analysis.decide(SLOW_START, AUTO)["m w"]
        assert decision.layout is None and decision.state_saved_bytes == 0
        why = r"a step would take 9\d+\.\d us longer, by estimate"
        assert re.fullmatch(why, decision.why), decision.why
    with analysed(fn, {"w": [M], "m": [M], "x": [B, M]}, X) as analysis:
        forced = analysis.decide(SLOW_START, ALL)["m w"]
        assert forced.why == "" and forced.layout.shards == 8
        assert forced.gain < 0 and forced.state_saved_bytes == M * 4 * 7 // 8
    with analysed(fn, {"w": [M], "m": [M], "x": [B, M]}, X) as analysis:
        free = analysis.decide(NO_LATENCY, AUTO)["m w"]
        assert free.layout is not None and free.gain > 0


def test_a_gain_that_rounds_to_none_is_no_number():
    assert longer(1e-6) == "1.0 us longer"
    assert longer(1e-9) == longer(-0.0) == "no less time"


def test_that_no_update_is_sharded_is_said_with_a_reason():
    def line(name, shape, why):
        return UpdateLine(
            names=(name,),
            shape=shape,
            ops=1,
            format="",
            why=why,
            state_saved_bytes=0,
            traffic_saved_bytes=0,
            gathered_bytes=0,
            gain=0.0,
        )

    left = line("theta.a", (2,), "too small"), line("theta.b", (9, 9), "a reason")
    report = UpdateReport(mode="auto", data_axes=("X",), lines=left)
    assert report.summary() == (
        "weight-update sharding (auto): not used; each device along X makes all 2 "
        "updates\n  (for the largest, theta.b: a reason)"
    )
    sharded = line("theta.c", (3,), "")
    report = dataclasses.replace(report, lines=(*left, sharded))
    assert report.summary() == (
        "weight-update sharding (auto): 1 of 3 updates repeated along X, 0 B less "
        "state on each device"
    )


@pytest.mark.parametrize("mode", [AUTO, ALL])
def test_what_has_no_dim_to_split_is_left_alone(mode):
    def fn(w, v, x):
        g, h = gradients(lambda w, v: mean_square(x * w + v), w, v)
        # Pieces of another size than the whole cannot be split like it.
        return {"w": w - g, "v": v - tf.concat([h[:5] * 2, h[5:]], 0)}

    with analysed(fn, {"w": [1], "v": [M], "x": [B, M]}, X) as analysis:
        decisions = analysis.decide(NO_LATENCY, mode)
        assert sorted(decisions) == ["v", "w"]
        for decision in decisions.values():
            assert decision.layout is None
            assert decision.why == (
                "no dim of it can be split in all that its update computes"
            )


def test_along_a_data_axis_that_splits_no_weight():
    """The batch is split by both axes, weights by one: the other is left to split."""
    split = {"x": (("data", "model"), None)}
    split |= {"w": (None, "model"), "m": (None, "model")}
    with analysed(
        momentum, DENSE, split, mesh=BOTH, data_axes=("data", "model")
    ) as analysis:
        assert analysis.updated() == [["m", "w"]]
        (decision,) = analysis.decide().values()
        slot = analysis.arguments["m"]
        assert decision.layout.axes == ("data",)
        assert str(decision.layout.sharding(slot)) == "[data,model]"
        assert decision.state_saved_bytes == WHOLE // 2 * 3 // 4


def test_a_weight_that_is_read_in_less_precision_is_kept_in_shards():
    """Its conversion is computed on shards, so that half the bytes are gathered."""

    def fn(w, m, x):
        half = lambda t: tf.cast(t, tf.bfloat16)  # noqa: E731
        loss = lambda w: mean_square(tf.cast(half(x) @ half(w), tf.float32))  # noqa: E731
        (g,) = gradients(loss, w)
        m = 0.9 * m + g
        return {"w": w - m, "m": m}

    with analysed(fn, DENSE, X) as analysis:
        (decision,) = analysis.decide().values()
        assert decision.gathered_bytes == WHOLE // 2
        assert decision.state_saved_bytes == 2 * WHOLE * 7 // 8
        (leaves,) = decision.cluster.exits()
        assert leaves.owner.name == "stablehlo.convert"


def test_a_weight_that_is_turned_before_it_is_read_in_less_precision():
    """It is gathered in bfloat16 all the same, and its gradient is reduced in that."""

    def fn(w, m, x):
        half = lambda t: tf.cast(t, tf.bfloat16)  # noqa: E731
        loss = lambda w: mean_square(  # noqa: E731
            tf.cast(half(x) @ half(tf.transpose(w)), tf.float32)
        )
        (g,) = gradients(loss, w)
        m = 0.9 * m + g
        return {"w": w - m, "m": m}

    with analysed(fn, {"w": [H, M], "m": [H, M], "x": [B, M]}, X) as analysis:
        (decision,) = analysis.decide().values()
        assert decision.gathered_bytes == WHOLE // 2
        (leaves,) = decision.cluster.exits()
        assert leaves.owner.name == "stablehlo.convert"
        (gradient,) = decision.cluster.entries()
        assert gradient.owner.name == "stablehlo.transpose"
        assert "bf16" in str(gradient.type)
        summed = find_sum(analysis.completed, analysis.redundancy.reduced, gradient)
        assert summed.axes == ("data",)


def test_a_stack_that_is_read_layer_by_layer_in_less_precision():
    """All of it is converted and gathered at once, but not what nobody reads."""

    def fn(w, m, x, layers):
        def loss(w):
            y, w = x, annotate(w, Sharding.replicated(DATA, 3))
            for i in range(layers):
                y = tf.cast(
                    tf.cast(y, tf.bfloat16) @ tf.cast(w[i], tf.bfloat16), y.dtype
                )
            return mean_square(y)

        (g,) = gradients(loss, w)
        m = 0.9 * m + g
        return {"w": w - m, "m": m}

    shapes = {"w": [L, M, M], "m": [L, M, M], "x": [B, M]}
    for layers, read in ((L, [(L, M, M)]), (L - 1, (L - 1) * [(1, M, M)])):
        with analysed(functools.partial(fn, layers=layers), shapes, X) as analysis:
            (decision,) = analysis.decide().values()
            exits = list(decision.cluster.exits())
            assert [shape_of(value) for value in exits] == read
            assert all("bf16" in str(value.type) for value in exits)


def test_shards_are_no_less_than_a_tile_where_others_cost_less():
    """2048 shards of a Transformer's table would be 17 rows each, and moved as 24."""
    mesh = DeviceMesh(("rows", "columns"), (32, 64))
    v3 = dataclasses.replace(POD, torus=None)

    def fn(w, m, x, ids):
        (g,) = gradients(lambda w: mean_square(tf.gather(w, ids) * x), w)
        m = 0.9 * m + g
        return {"w": w - m, "m": m}

    ids = tf.TensorSpec([4096], tf.int32)
    for rows, axes in [(33708, ("columns",)), (2048 * 16, ("columns", "rows"))]:
        shapes = {"w": [rows, 1024], "m": [rows, 1024], "x": [4096, 1024], "ids": ids}
        split = {"x": (["rows", "columns"], None), "ids": (["rows", "columns"],)}
        how = {"mesh": mesh, "data_axes": ("rows", "columns")}
        with analysed(fn, shapes, split, **how) as analysis:
            (decision,) = analysis.decide(v3).values()
            assert decision.layout.axes == axes


def chosen(mesh, shape, machine):
    """The axes by which a weight is split whose gradient is a sum over the batch."""

    def fn(w, m, x):
        m = 0.9 * m + tf.reduce_sum(x, 0)
        return {"w": w - m, "m": m}

    axes, shapes = mesh.axis_names, {"w": shape, "m": shape, "x": [2048, *shape]}
    split = {"x": (list(axes), *[None] * len(shape))}
    with analysed(fn, shapes, split, mesh=mesh, data_axes=axes) as analysis:
        (decision,) = analysis.decide(machine, AUTO).values()
        return decision.layout and decision.layout.axes


def without_latency(machine):
    hardware = dataclasses.replace(machine.hardware, latency=0.0)
    return dataclasses.replace(machine, hardware=hardware)


@pytest.mark.parametrize(
    "mesh,partial,full",
    [
        (
            DeviceMesh(("rows", "columns"), (32, 64)),
            ("columns",),
            ("columns", "rows"),
        ),
        (DeviceMesh(("data",), (2048,)), ("data:(32)64",), ("data:(2)1024",)),
    ],
    ids=["rows and columns", "one axis"],
)
def test_latency_makes_sharding_partial(mesh, partial, full):
    """4 MB among groups of 64 of a pod's 2048 cores, as in section 5.2."""
    shape = [8192, 128]
    assert chosen(mesh, shape, POD) == partial
    assert chosen(mesh, shape, without_latency(POD)) == full
    # What is small is not worth the latency of a scatter.
    assert chosen(mesh, [1024], POD) is None


def test_results_are_batched_until_latency_is_a_tenth():
    mesh = DeviceMesh(("rows", "columns"), (32, 64))
    with analysed(momentum, DENSE, X) as analysis:
        (decision,) = analysis.decide().values()
        layout = dataclasses.replace(decision.layout, axes=("columns",))
        decisions = [dataclasses.replace(decision, layout=layout)]
    batched = batch_bytes(decisions, POD, mesh)
    (phase,) = POD.network(mesh).along(("columns",), batched)
    assert phase.waiting == pytest.approx(0.1 * phase.moving)
    assert batch_bytes(decisions, NO_LATENCY, mesh) == 0
    assert batch_bytes(decisions, without_latency(POD), mesh) == 0
    unsharded = [dataclasses.replace(decision, layout=None)]
    assert batch_bytes(unsharded, POD, mesh) == 0
    cores = DeviceMesh(("rows", "columns"), (1024, 2))
    assert batch_bytes(decisions, POD, cores) == 0
