"""Manual regions: collectives, gradients and subgroups against the same maths whole."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.collectives import (
    Reduction,
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    collective_permute,
    reduce_scatter,
)
from meshwright.framework.sharding.manual import (
    auto_to_manual,
    manual_partition,
    manual_to_auto,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

MESH = DeviceMesh(("X", "Y"), (2, 4))
PERMUTED = DeviceMesh(("X", "Y"), (2, 4), (3, 1, 4, 0, 5, 7, 2, 6))
RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 16)).astype(np.float32)
W = RNG.standard_normal((16, 12)).astype(np.float32)
over_partitioners = pytest.mark.parametrize("partitioner", list(Partitioner))


def close(got, want):
    """Within 1e-5 of the largest element."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)


# Each body in two forms: of one device's shard, and of the list of all shards along X.
BODIES = {
    "sum": (lambda u, r: all_reduce(u, r, "X"), lambda us: [sum(us)] * 2),
    "max": (
        lambda u, r: all_reduce(u, r, "X", reduction=Reduction.MAX),
        lambda us: [tf.maximum(*us)] * 2,
    ),
    "min": (
        lambda u, r: all_reduce(u, r, "X", reduction=Reduction.MIN),
        lambda us: [tf.minimum(*us)] * 2,
    ),
    "gather": (
        lambda u, r: all_gather(u, r, "X", dim=1),
        lambda us: [tf.concat(us, 1)] * 2,
    ),
    "scatter": (
        lambda u, r: reduce_scatter(u, r, "X", dim=1),
        lambda us: tf.split(sum(us), 2, 1),
    ),
    "exchange": (
        lambda u, r: all_to_all(u, r, "X", split_dim=1, concat_dim=0),
        lambda us: [
            tf.concat([tf.split(u, 2, 1)[place] for u in us], 0) for place in (0, 1)
        ],
    ),
    "exchange in place": (
        lambda u, r: all_to_all(u, r, "X", split_dim=0, concat_dim=0),
        lambda us: [
            tf.concat([tf.split(u, 2, 0)[place] for u in us], 0) for place in (0, 1)
        ],
    ),
    "shift": (
        lambda u, r: collective_permute(u, r, "X", [(0, 1)]),
        lambda us: [tf.zeros_like(us[0]), us[0]],
    ),
    "place": (
        lambda u, r: u * tf.cast(1 + axis_index(r, "X"), tf.float32),
        lambda us: [us[0], us[1] * 2.0],
    ),
    "loop": (
        lambda u, r: tf.while_loop(
            lambda i, u: i < 3,
            lambda i, u: (i + 1, 0.5 * tf.nn.tanh(all_reduce(u, r, "X"))),
            (tf.constant(0), u),
            maximum_iterations=3,
        )[1],
        lambda us: functools.reduce(
            lambda us, _: [0.5 * tf.nn.tanh(sum(us))] * 2, range(3), us
        ),
    ),
    "branch": (
        lambda u, r: tf.cond(tf.reduce_sum(u) > 0, lambda: u * 2.0, lambda: u * 3.0),
        lambda us: [u * 2.0 if tf.reduce_sum(u) > 0 else u * 3.0 for u in us],
    ),
}


def value_and_gradients(fn, x, w):
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        outs = {name: tf.sin(y) for name, y in fn(x, w).items()}
        # Weights that tell elements, and so devices, apart.
        losses = [
            tf.reduce_sum(
                y * tf.reshape(tf.range(tf.size(y), dtype=tf.float32), y.shape)
            )
            for y in outs.values()
        ]
    return outs, tape.gradient(tf.add_n(losses), [x, w])


@over_partitioners
@pytest.mark.parametrize("manual_axes", [None, ("X",)], ids=["all axes", "subgroups"])
@pytest.mark.parametrize("body", BODIES)
def test_collectives_and_their_gradients(body, manual_axes, partitioner):
    local, by_hand = BODIES[body]

    def region(x, w):
        u = x @ w
        if manual_axes:  # Along Y the compiler goes on splitting.
            u = mesh_split(u, MESH, [None, "Y"])
        return local(u, MESH)

    partitioned = manual_partition(
        region,
        mesh=MESH,
        manual_axes=manual_axes,
        in_dims=[["X", None], [None, None]],
        out_dims=["X", None],
    )

    def program_fn(x, w):
        return value_and_gradients(lambda x, w: {body: partitioned(tf.sin(x), w)}, x, w)

    def reference(x, w):
        us = [u @ w for u in tf.split(tf.sin(x), 2)]
        return {body: tf.concat(by_hand(us), 0)}

    program = compile_program(
        program_fn,
        [tf.TensorSpec(X.shape), tf.TensorSpec(W.shape)],
        MESH,
        in_shardings=[Sharding.parse(MESH, "[X,_]"), None],
        partitioner=partitioner,
    )
    outs, gradients = program.unshard(program(X, W))
    want, want_gradients = value_and_gradients(
        reference, tf.constant(X), tf.constant(W)
    )
    close(outs[body], want[body])
    for gradient, wanted in zip(gradients, want_gradients, strict=True):
        close(gradient, wanted)


@over_partitioners
@pytest.mark.parametrize("mesh", [MESH, PERMUTED], ids=["in order", "permuted"])
def test_several_axes_are_taken_major_first(mesh, partitioner):
    def body(x):
        place = tf.reshape(axis_index(mesh, ("Y", "X")), [1])
        turned = all_gather(place, mesh, ("Y", "X"))
        back = reduce_scatter(all_gather(x, mesh, ("X", "Y")), mesh, ("X", "Y"))
        ring = collective_permute(
            x, mesh, ("Y", "X"), [(i, (i + 1) % 8) for i in range(8)]
        )
        return turned, back, ring, place

    fn = manual_partition(
        body,
        mesh=mesh,
        in_dims=[[("X", "Y")]],
        out_dims=([None], [("X", "Y")], [("Y", "X")], [("X", "Y")]),
    )
    program = compile_program(fn, [tf.TensorSpec([8])], mesh, partitioner=partitioner)
    x = np.arange(8, dtype=np.float32)
    turned, back, ring, place = map(np.asarray, program(x))
    assert turned.tolist() == list(range(8))
    assert back.tolist() == (8 * x).tolist()
    # Shards lie X major; the ring goes through them Y major.
    assert ring.tolist() == np.roll(x.reshape(2, 4).T.flatten(), 1).tolist()
    assert place.tolist() == np.arange(8).reshape(4, 2).T.flatten().tolist()


@over_partitioners
def test_subgroups_on_a_mesh_of_three_axes(partitioner):
    """Two axes manual, the third left to the compiler, in both ways round."""
    mesh = DeviceMesh(("A", "B", "C"), (2, 2, 2))

    def body(x, w):
        y = mesh_split(x @ w, mesh, [None, "B"])
        return all_reduce(y, mesh, ("C", "A")) + tf.cast(axis_index(mesh, "C"), y.dtype)

    fn = manual_partition(
        body,
        mesh=mesh,
        manual_axes=("A", "C"),
        in_dims=[[None, ("A", "C")], [("A", "C"), None]],
        out_dims=["C", None],
    )
    program = compile_program(
        fn,
        [tf.TensorSpec(X.shape), tf.TensorSpec(W.shape)],
        mesh,
        partitioner=partitioner,
    )
    close(program(X, W), np.concatenate([X @ W, X @ W + 1]))


@over_partitioners
def test_regions_take_turns_with_the_compiler(partitioner):
    """Manual values may wait while others go through automatic code and come back."""

    def fn(x, w):
        shard = auto_to_manual(x, MESH, ["X", None])
        first = shard * 2.0
        total = manual_to_auto(all_reduce(first, MESH, "X"), MESH, [None, None])
        automatic = tf.nn.softmax(total @ w)
        again = auto_to_manual(automatic, MESH, [None, None])
        scalar = tf.reduce_sum(first)  # A scalar crosses too.
        out = tf.concat([again * scalar, first[:, :12]], 0)
        return manual_to_auto(out, MESH, ["X", None])

    program = compile_program(
        fn,
        [tf.TensorSpec(X.shape), tf.TensorSpec(W.shape)],
        MESH,
        partitioner=partitioner,
    )
    halves = np.split(2 * X, 2)
    automatic = tf.nn.softmax((halves[0] + halves[1]) @ W).numpy()
    want = [np.concatenate([automatic * h.sum(), h[:, :12]]) for h in halves]
    close(program(X, W), np.concatenate(want))


@over_partitioners
def test_a_region_in_a_loop_that_is_differentiated(partitioner):
    def body(x, w):
        return all_reduce(tf.nn.tanh(x @ w), MESH, "Y")

    partitioned = manual_partition(
        body, mesh=MESH, in_dims=[["X", "Y"], ["Y", None]], out_dims=["X", None]
    )

    def loop(layer, x, w):
        step = tf.recompute_grad(lambda x: layer(x, w))
        return tf.while_loop(
            lambda i, x: i < 3,
            lambda i, x: (i + 1, step(x)),
            (tf.constant(0), x),
            maximum_iterations=3,
        )[1]

    def gradient(layer):
        def fn(x, w):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(loop(layer, x, w) ** 2)
            return loss, tape.gradient(loss, x)

        return fn

    def without_region(x, w):
        pairs = zip(tf.split(x, 4, 1), tf.split(w, 4, 0), strict=True)
        return tf.add_n([tf.nn.tanh(a @ b) for a, b in pairs])

    w = 0.3 * RNG.standard_normal((16, 16)).astype(np.float32)
    program = compile_program(
        gradient(partitioned),
        [tf.TensorSpec(X.shape), tf.TensorSpec(w.shape)],
        MESH,
        partitioner=partitioner,
    )
    want = tf.function(gradient(without_region))(X, w)
    for result, wanted in zip(program(X, w), want, strict=True):
        close(result, wanted)


@over_partitioners
def test_gshards_gather(partitioner):
    """GShard 3.2: each device gathers from its own groups by shard-sized indices.

    input [G,S,M] is split on G, indices [E,G,C,1] too; what comes out is [E,G,C,M].
    """
    groups, tokens, model, experts, capacity = 16, 4, 6, 3, 2
    values = RNG.standard_normal((groups, tokens, model)).astype(np.float32)
    where = RNG.integers(0, tokens, (experts, groups, capacity, 1)).astype(np.int32)
    both = ("X", "Y")

    def body(values, where):
        groups = values.shape[0]
        group = tf.reshape(tf.range(groups), [1, groups, 1, 1])
        group = tf.broadcast_to(group, where.shape)
        return tf.gather_nd(values, tf.concat([group, where], -1))

    gather = manual_partition(
        body,
        mesh=MESH,
        in_dims=[[both, None, None], [None, both, None, None]],
        out_dims=[None, both, None, None],
    )

    def fn(values, where):
        with tf.GradientTape() as tape:
            tape.watch(values)
            out = gather(values, where)
            loss = tf.reduce_sum(out**2)
        return out, tape.gradient(loss, values)

    program = compile_program(
        fn,
        [tf.TensorSpec(values.shape), tf.TensorSpec(where.shape, tf.int32)],
        MESH,
        in_shardings=[
            Sharding.from_dims_mapping(MESH, [both, None, None]),
            Sharding.from_dims_mapping(MESH, [None, both, None, None]),
        ],
        partitioner=partitioner,
    )
    out, gradient = map(np.asarray, program(values, where))
    want = np.stack(
        [values[np.arange(groups)[:, None], where[e, :, :, 0]] for e in range(experts)]
    )
    np.testing.assert_array_equal(out, want)
    counts = np.zeros((groups, tokens, 1), np.float32)
    for e, g, c, _ in np.ndindex(where.shape):
        counts[g, where[e, g, c, 0]] += 1
    close(gradient, 2 * values * counts)
    # That is what the region is for: nothing moves.
    assert not program.collectives()


def test_on_one_device_a_region_is_its_body():
    mesh = DeviceMesh(("X", "Y"), (1, 1))

    def body(x):
        y = all_gather(all_reduce(x, mesh, "X"), mesh, ("X", "Y"), dim=1)
        y = all_to_all(y, mesh, "Y", split_dim=0, concat_dim=1)
        return reduce_scatter(y, mesh, "X") + tf.cast(axis_index(mesh, "Y"), y.dtype)

    fn = manual_partition(body, mesh=mesh, in_dims=[["X", "Y"]], out_dims=["X", None])
    np.testing.assert_array_equal(fn(tf.constant(X)), X)
    program = compile_program(fn, [tf.TensorSpec(X.shape)], mesh)
    np.testing.assert_array_equal(program(X), X)


@over_partitioners
@pytest.mark.parametrize("manual_axes", [None, ("X",)], ids=["all axes", "subgroups"])
def test_constants_enter_a_region(manual_axes, partitioner):
    """The gradient of a plain sum is a constant; so is what is made of ones."""
    borders = {"manual_axes": manual_axes, "out_dims": ["X", None]}
    partitioned = manual_partition(
        lambda x, ones: tf.nn.tanh(x + all_reduce(ones, MESH, "X")),
        mesh=MESH,
        in_dims=[["X", None], [None, None]],
        **borders,
    )

    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(partitioned(x, tf.ones([4, 16])))
        return loss, tape.gradient(loss, x)

    program = compile_program(
        fn, [tf.TensorSpec(X.shape)], MESH, partitioner=partitioner
    )
    loss, gradient = program(X)
    close(loss, np.tanh(X + 2).sum())
    close(gradient, 1 - np.tanh(X + 2) ** 2)


@over_partitioners
@pytest.mark.parametrize("manual_axes", [None, ("X",)], ids=["all axes", "subgroups"])
def test_sorts_in_a_region(manual_axes, partitioner):
    partitioned = manual_partition(
        lambda x: (tf.sort(x), tf.math.top_k(x, 3).indices),
        mesh=MESH,
        manual_axes=manual_axes,
        in_dims=[["X", None]],
        out_dims=(["X", None], ["X", None]),
    )
    program = compile_program(
        partitioned, [tf.TensorSpec(X.shape)], MESH, partitioner=partitioner
    )
    ordered, places = map(np.asarray, program(X))
    np.testing.assert_array_equal(ordered, np.sort(X))
    np.testing.assert_array_equal(places, np.argsort(-X)[:, :3])


@over_partitioners
def test_a_region_in_a_branch_that_is_differentiated(partitioner):
    partitioned = manual_partition(
        lambda x: all_reduce(tf.nn.tanh(x), MESH, "Y"),
        mesh=MESH,
        in_dims=[["X", "Y"]],
        out_dims=["X", None],
    )

    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            step = tf.recompute_grad(partitioned)
            y = tf.cond(x[0, 0] > -100, lambda: step(x), lambda: x[:, :4])
            loss = tf.reduce_sum(y**2)
        return tape.gradient(loss, x)

    program = compile_program(
        fn, [tf.TensorSpec(X.shape)], MESH, partitioner=partitioner
    )
    total = np.tanh(X).reshape(8, 4, 4).sum(1)
    close(program(X), 2 * np.tile(total, 4) * (1 - np.tanh(X) ** 2))


def test_a_permute_among_one_device_keeps_or_drops():
    mesh = DeviceMesh(("X", "Y"), (1, 1))
    x = tf.constant(X)
    assert collective_permute(x, mesh, "X", [(0, 0)]) is x
    assert not np.any(collective_permute(x, mesh, "X", []))


@over_partitioners
def test_an_all_to_all_beside_a_zero_of_the_program(partitioner):
    """XLA merged that zero with a zero of the region's, and ended the process."""
    region = manual_partition(
        lambda x: all_to_all(x, MESH, "Y", split_dim=1, concat_dim=0),
        mesh=MESH,
        in_dims=[["Y", None]],
        out_dims=[None, "Y"],
        manual_axes=["Y"],
    )

    def fn(x, counts):
        return region(x * tf.cast(tf.maximum(counts[0], 0), x.dtype))

    specs = [tf.TensorSpec(X.shape), tf.TensorSpec([2], tf.int32)]
    borders = {
        "in_shardings": [
            Sharding.replicated(MESH, 2),
            Sharding.replicated(MESH, 1),
        ]
    }
    for shardings in ({}, borders):
        program = compile_program(fn, specs, MESH, partitioner=partitioner, **shardings)
        close(program(X, np.array([2, 0], np.int32)), 2 * X)


def test_a_body_may_have_a_private_name():
    """TF takes no such name for a scope."""

    def _doubled(x):
        return 2 * x

    dims = ["X", None]
    region = manual_partition(_doubled, mesh=MESH, in_dims=[dims], out_dims=dims)
    close(compile_program(region, [tf.TensorSpec(X.shape)], MESH)(X), 2 * X)
