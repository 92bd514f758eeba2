"""A pipeline of a user's function computes what its layers do one after another."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.modeling import random
from meshwright.layers import pipeline
from meshwright.layers.stacks.pipelines.stages import StageMode

B, M, H, LAYERS, MICROBATCHES = 12, 8, 16, 8, 3
MESH = mw.DeviceMesh(("stage", "data", "model"), (2, 2, 2))
RNG = np.random.default_rng(0)
WEIGHTS = {
    "mlp": {
        "w_in": RNG.normal(size=[LAYERS, M, H]).astype(np.float32) / 3,
        "w_out": RNG.normal(size=[LAYERS, H, M]).astype(np.float32) / 3,
    },
    "bias": RNG.normal(size=[LAYERS, M]).astype(np.float32),
}
X = RNG.normal(size=[B, M]).astype(np.float32)
SCALE = RNG.normal(size=[B, 1]).astype(np.float32)
SPLIT = {"mlp.w_in": [None, "model"], "mlp.w_out": ["model", None]}
HOW = {
    "mesh": MESH,
    "stage_axis": "stage",
    "num_stages": 2,
    "num_microbatches": MICROBATCHES,
    "batch_axes": "data",
    "weight_dims": SPLIT,
}


def layer(weights, x, scale):
    h = tf.nn.gelu(x @ weights["mlp"]["w_in"])
    y = x + scale * tf.tanh(h @ weights["mlp"]["w_out"] + weights["bias"])
    return y, {"loss": tf.reduce_mean(h * h), "rows": tf.cast(tf.shape(x)[0], x.dtype)}


def in_a_row(fn, weights, x, **constants):
    """Of each microbatch by itself."""
    results = []
    for m in range(MICROBATCHES):
        rows = tf.nest.map_structure(lambda t, m=m: t[m::MICROBATCHES], (x, constants))
        y, aux = rows[0], []
        for n in range(LAYERS):
            of_layer = tf.nest.map_structure(lambda w, n=n: w[n], weights)
            y, of = fn(of_layer, y, **rows[1])
            aux.append(of)
        results.append((y, tf.nest.map_structure(lambda *t: tf.stack(t), *aux)))
    y = tf.reshape(tf.stack([y for y, _ in results], 1), x.shape)
    sums = tf.nest.map_structure(lambda *t: tf.add_n(t), *(aux for _, aux in results))
    means = {name: sums[name] for name in ("loss", "statistics") if name in sums}
    return y, sums | tf.nest.map_structure(lambda t: t / MICROBATCHES, means)


def gradients(run, weights, x, scale):
    with tf.GradientTape() as tape:
        sources = (weights, x, scale)
        tape.watch(sources)
        y, aux = run(weights, x, scale=scale)
        loss = tf.reduce_sum(y**2) / B + tf.reduce_sum(aux["loss"])
    found = tape.gradient(loss, sources, unconnected_gradients="zero")
    return {"y": y, "aux": aux, "gradients": found}


def of_pipeline(weights, x, **how):
    made = pipeline(layer, weights, x, **HOW | how)
    return made.x, dict(made.aux)


def assert_close(got, want, tolerance=1e-5):
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        atol = tolerance * max(np.abs(b).max(), 1.0)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_repeats": 2, "deferred_gradients": ["mlp.*"]},
        {"stage_mode": StageMode.MANUAL},
    ],
    ids=str,
)
@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_equals_its_layers_in_a_row(how, partitioner):
    args = tf.nest.map_structure(tf.constant, (WEIGHTS, X, SCALE))
    want = gradients(functools.partial(in_a_row, layer), *args)
    program = mw.compile_program(
        functools.partial(gradients, functools.partial(of_pipeline, **how)),
        tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), args),
        MESH,
        partitioner=partitioner,
    )
    assert_close(program.unshard(program(WEIGHTS, X, SCALE)), want)


def test_blocks_of_keras_train_as_a_pipeline():
    blocks = [keras.layers.Dense(M, activation="tanh") for _ in range(LAYERS)]
    for block in blocks:
        block.build([None, M])
    stacks = {
        name: tf.Variable(np.stack([getattr(block, name) for block in blocks]))
        for name in ("kernel", "bias")
    }

    def block(weights, x):
        trained = [weights["kernel"], weights["bias"]]
        return blocks[0].stateless_call(trained, [], x)[0]

    def step(run, x):
        with tf.GradientTape() as tape:
            values = {name: tf.convert_to_tensor(v) for name, v in stacks.items()}
            loss = tf.reduce_mean(run(values, x) ** 2)
        for v, g in zip(
            stacks.values(), tape.gradient(loss, [*stacks.values()]), strict=True
        ):
            v.assign_sub(0.5 * g)
        return loss

    def pipelined(weights, x):
        return pipeline(block, weights, x, **HOW | {"weight_dims": {}})

    def plain(weights, x):
        for n in range(LAYERS):
            x = block({name: w[n] for name, w in weights.items()}, x)
        return x

    start = {name: v.numpy() for name, v in stacks.items()}
    losses = []
    for run, compiled in ((plain, None), (pipelined, MESH)):
        for name, v in stacks.items():
            v.assign(start[name])
        one = functools.partial(step, run)
        call = one if compiled is None else mw.function(one, compiled)
        losses.append([float(call(tf.constant(X))) for _ in range(5)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def normalized():
    """A block with a batch normalization; weights of eight, x and a scale.

    In float64: normalization over four rows, eight times, magnifies what is rounded.
    """
    dense = keras.layers.Dense(M, dtype="float64")
    norm = keras.layers.BatchNormalization(momentum=0.75, dtype="float64")
    for part in (dense, norm):
        part.build([None, M])
    names = "mean", "variance"

    def block(weights, x, scale):
        trained = [weights["kernel"], weights["bias"]]
        h, _ = dense.stateless_call(trained, [], x)
        trained = [weights["gamma"], weights["beta"]]
        old = [weights[name] for name in names]
        y, new = norm.stateless_call(trained, old, h, training=True)
        new = dict(zip(names, new, strict=True))
        aux = {"loss": tf.reduce_mean(h * h), "statistics": new}
        return x + scale * tf.tanh(y), aux

    vectors = RNG.normal(size=[5, LAYERS, M])
    weights = dict(zip(("bias", "gamma", "beta", *names), vectors, strict=True))
    weights["variance"] = weights["variance"] ** 2
    weights["kernel"] = WEIGHTS["mlp"]["w_in"][:, :, :M]
    args = weights, X, SCALE
    return block, tf.nest.map_structure(lambda t: t.astype(np.float64), args)


@pytest.mark.parametrize(
    ("how", "partitioner"),
    [
        ({"num_repeats": 2}, mw.Partitioner.SHARDY),
        ({"stage_mode": StageMode.MANUAL}, mw.Partitioner.GSPMD),
    ],
    ids=str,
)
def test_running_statistics_of_keras_are_updated_once(how, partitioner):
    """By the mean over microbatches of what one device has of each."""
    block, given = normalized()

    def pipelined(weights, x, **constants):
        made = pipeline(
            block, weights, x, **HOW | {"weight_dims": {}} | how, **constants
        )
        return made.x, dict(made.aux)

    args = tf.nest.map_structure(tf.constant, given)
    want = gradients(functools.partial(in_a_row, block), *args)
    program = mw.compile_program(
        functools.partial(gradients, pipelined),
        tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), args),
        MESH,
        partitioner=partitioner,
    )
    got = program.unshard(program(*given))
    assert_close(got, want, tolerance=1e-12)
    for name, new in got["aux"]["statistics"].items():
        kept = new - 0.75 * given[0][name]  # A quarter of the microbatches' mean.
        assert np.abs(kept).max() > 0.01


def test_statistics_have_no_gradient():
    def fn(weights, x):
        y = x @ weights["w"]
        return tf.tanh(y), {"statistics": {"mean": tf.reduce_mean(y, axis=0)}}

    w = tf.constant(WEIGHTS["mlp"]["w_in"][:, :, :M])
    with tf.GradientTape() as tape:
        tape.watch(w)
        made = pipeline(fn, {"w": w}, X, **HOW | {"weight_dims": {}})
        total = tf.reduce_sum(made.aux.statistics.mean)
    assert total.numpy() and not tape.gradient(total, w).numpy().any()


def test_statistics_at_any_depth_are_means():
    """Also of what is called a loss, and of layers that stages are filled up with."""

    def fn(weights, x):
        mean = tf.reduce_mean(x)
        statistics = {"loss": mean, "mean": mean}
        return x @ weights["w"], {"norm": {"statistics": statistics}, "sum": mean}

    w = {"w": tf.constant(WEIGHTS["mlp"]["w_in"][:3, :, :M])}
    made = pipeline(fn, w, X, **HOW | {"weight_dims": {}})
    parts = [X[m::MICROBATCHES] for m in range(MICROBATCHES)]
    want = [np.mean(parts)]
    for kernel in w["w"][:2]:
        parts = [part @ kernel.numpy() for part in parts]
        want.append(np.mean(parts))
    got = made.aux.norm.statistics
    for value in (got.loss, got.mean, made.aux["sum"] / MICROBATCHES):
        assert_close(value, np.array(want))


def test_results_without_a_known_rank_are_not_kept():
    """What fused normalization reserves for its gradient is computed again."""

    def fn(weights, x, scale):
        h = tf.reshape(x @ weights["w"], [-1, 2, 1, M // 2])
        y, mean, _ = tf.compat.v1.nn.fused_batch_norm(h, *weights["norm"])
        y = scale * tf.tanh(tf.reshape(y, x.shape))
        return x + y, {"loss": tf.reduce_mean(h * h), "mean": mean}

    vectors = tf.constant(WEIGHTS["bias"][:, : M // 2])
    weights = {"w": tf.constant(WEIGHTS["mlp"]["w_in"][:, :, :M])}

    def layer(weights, x, scale):
        norm = weights["scale"], weights["offset"]
        return fn({"w": weights["w"], "norm": norm}, x, scale)

    def pipelined(weights, x, **constants):
        how = {"weight_dims": {}, "recompute": mw.Recompute.NOTHING}
        made = pipeline(layer, weights, x, **HOW | how, **constants)
        return made.x, dict(made.aux)

    weights |= {"scale": vectors, "offset": 2.0 * vectors}
    args = weights, tf.constant(X), tf.constant(SCALE)
    want = gradients(functools.partial(in_a_row, layer), *args)
    assert_close(gradients(pipelined, *args), want)


def test_several_inputs_and_random_numbers():
    """Two streams; noise that differs by layer and microbatch, and not by schedule."""
    key = random.key_from_seed(3)

    def fn(weights, x, key):
        noise = random.uniform(key, x[0].shape)
        return x[1] + noise, tf.tanh(x[0] @ weights["w"])

    def run(weights, x, **how):
        return pipeline(fn, weights, (x, 2.0 * x), **HOW | {"weight_dims": {}} | how)

    weights = {"w": WEIGHTS["mlp"]["w_in"][:, :, :M]}
    specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape), (weights, X))
    results = [
        mw.compile_program(functools.partial(run, key=key, **how), specs, MESH)
        for how in ({}, {"num_repeats": 2}, {"stage_mode": StageMode.MANUAL})
    ]
    first, *others = (program.unshard(program(weights, X)) for program in results)
    for other in others:
        assert_close(other, first)
    assert len({*np.round(first[0] - first[0].mean(1, keepdims=True), 4)[:, 0]}) == B


def test_bubbles_add_nothing_to_gradients():
    """Not even what is NaN for one microbatch's x with another's constants."""

    def fn(weights, x, scale):
        y = tf.sqrt(4.0 * scale**2 - x**2) @ weights["w"]
        return scale * tf.tanh(y), {"loss": tf.reduce_mean(y)}

    weights = {"w": tf.constant(WEIGHTS["mlp"]["w_in"][:, :, :M])}
    scale = np.where(np.arange(B) % MICROBATCHES, 1.0, 0.1)
    scale = tf.constant(scale[:, None], X.dtype)
    args = weights, scale * tf.tanh(X), scale

    def pipelined(weights, x, scale):
        how = {"num_stages": LAYERS, "deferred_gradients": ["w"], "weight_dims": {}}
        made = pipeline(fn, weights, x, **HOW | how, scale=scale)
        return made.x, dict(made.aux)

    want = gradients(functools.partial(in_a_row, fn), *args)
    assert_close(gradients(pipelined, *args), want)


@pytest.mark.parametrize(
    ("weights", "how", "message"),
    [
        ({}, {}, "needs? a leading dim.*here it is of no weight"),
        (
            {"a": X, "b": X[:3]},
            {"weight_dims": {}},
            "that is the same for all; here it is a: 12, b: 3",
        ),
        (
            WEIGHTS,
            {"weight_dims": {"w": [None]}},
            "names 'w', which is no weight; ther",
        ),
        (
            WEIGHTS,
            {"weight_dims": {"bias": [None, "model"]}},
            "has 2 dims for 'bias', which has 1 after that of layers",
        ),
    ],
)
def test_what_does_not_fit_is_refused(weights, how, message):
    with pytest.raises(ValueError, match=message):
        pipeline(layer, weights, X, **HOW | how, scale=SCALE)


def test_a_function_returns_what_it_takes():
    with pytest.raises(ValueError, match="must return what it takes"):
        pipeline(lambda w, x: x[:, :2], WEIGHTS, X, **HOW)


VARIABLE = tf.Variable(2.0)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda w, x: (x, x, x), "neither like its x nor a pair of that and a mapping"),
        (lambda w, x: (x, x), "neither like its x nor a pair of that and a mapping"),
        (
            lambda w, x: (x, {"statistics": {"n": tf.size(x)}}),
            "returns statistics.n as int32, of which microbatches have no mean: retur",
        ),
        (lambda w, x: x * VARIABLE, "reads a variable that it is not given, which wou"),
    ],
)
def test_what_a_function_does_wrong_is_told(fn, message):
    with pytest.raises(ValueError, match=message):
        pipeline(fn, WEIGHTS, X, **HOW)


def test_a_function_is_given_what_it_reads():
    @tf.function
    def run(x):
        two, scale = tf.constant(2.0), tf.reduce_max(x)
        pipeline(lambda w, x: two * x, WEIGHTS, x, **HOW)
        pipeline(lambda w, x: scale * x, WEIGHTS, x, **HOW)

    with pytest.raises(ValueError, match="reads a tensor 'Max:0' that it is not given"):
        run.get_concrete_function(tf.TensorSpec(X.shape))
