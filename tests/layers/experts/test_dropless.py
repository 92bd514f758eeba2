"""Experts that are never full: the dense sum over chosen experts, on any mesh.

Dims: B batch, T sequence, M model, H hidden, E experts, k experts of a token.
"""

import collections
import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import (
    Context,
    Mode,
    annotate_weights,
    initialize,
)
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.layers.basic.feed_forward import Activation, FeedForward
from meshwright.layers.basic.linear import BSM
from meshwright.layers.experts.dropless import Dropless
from meshwright.layers.experts.gating import Capacity
from meshwright.layers.experts.gatings import (
    ExpertChoice,
    Hash,
    Scores,
    SecondExpert,
    Sinkhorn,
    Switch,
    Top2,
    TopK,
)
from meshwright.layers.experts.moe import ExpertFeedForward, MoE

B, T, M, E, H, K = 8, 4, 8, 8, 12, 2
SIZES = {"model_dims": M, "num_experts": E}
TOP2 = TopK(**SIZES, k=K, scores=Scores.SIGMOID)
ROUTINGS = ("usual", "all_to_one")


def inputs_of(routing: str, *shape: int) -> tuple[np.ndarray, np.ndarray, NestedMap]:
    """Tokens, paddings and weights of a layer with `TOP2`.

    With "all_to_one" expert 3 is every token's first choice, and 5 the second.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((*shape, M)).astype(np.float32)
    x[..., 0] = 1
    paddings = (rng.random(shape) < 0.2).astype(np.float32)
    theta = initialize(mixture().weights(), key_from_seed(1)).map(lambda w: w.numpy())
    if routing == "all_to_one":
        theta.gating.w *= 0.1
        theta.gating.w[0, [3, 5]] = 3, 2
    return x, paddings, theta


def mixture(gating=TOP2, *, block_size=5, factor=1.5, **kwargs) -> MoE:
    kwargs = {"activation": Activation.RELU} | kwargs
    experts = ExpertFeedForward(
        **SIZES, hidden_dims=H, activation=kwargs.pop("activation")
    )
    dropless = Dropless(block_size=block_size, exchange_factor=factor)
    return MoE(
        gating=gating,
        experts=experts,
        **{"dropless": dropless, "z_weight": 0.1, **kwargs},
    )


def results(layer, plan=ShardingPlan(), dtype=tf.float32):  # noqa: B008
    """A function of (theta, x, paddings): output, auxiliary results, gradients."""

    def function(theta, x, paddings):
        ctx = Context(plan=plan, mode=Mode.TRAIN, path="moe", activation_dtype=dtype)
        with tf.GradientTape() as tape:
            tape.watch([theta, x])
            annotated = annotate_weights(plan, layer.weights(), theta)
            out = layer.fprop(ctx, annotated, x, paddings=paddings)
            loss = tf.reduce_sum(tf.cast(out.x, tf.float32) ** 3) + 10 * out.aux.loss
        gradients = tape.gradient(loss, [theta, x])
        return NestedMap(out=out, weights=gradients[0], x=gradients[1])

    return function


def dense_sum(theta, x, paddings) -> NestedMap:
    """Output and gradients of the same, by all experts of all tokens; no losses."""
    theta, x = theta.map(tf.constant), tf.constant(x)
    logits = np.einsum("btm,me->bte", x, theta.gating.w)
    chosen = logits >= np.sort(logits)[..., -K:][..., :1]
    chosen = chosen * (1.0 - paddings)[..., None]
    with tf.GradientTape() as tape:
        tape.watch([theta, x])
        scores = tf.sigmoid(tf.einsum("btm,me->bte", x, theta.gating.w)) * chosen
        total = tf.reduce_sum(scores, -1, keepdims=True)
        gates = tf.math.divide_no_nan(scores, total)
        hidden = tf.nn.relu(tf.einsum("btm,emh->bteh", x, theta.experts.w_in))
        outs = tf.einsum("bteh,ehm->btem", hidden, theta.experts.w_out)
        out = tf.einsum("bte,btem->btm", gates, outs)
        loss = tf.reduce_sum(out**3)
    gradients = tape.gradient(loss, [theta, x])
    return NestedMap(out=NestedMap(x=out), weights=gradients[0], x=gradients[1])


def assert_close(got, want, tolerance=1e-5):
    """Within `tolerance` of the tensor's largest element: sums in another order."""
    for path, expected in want.items_by_path():
        expected = np.asarray(expected)
        atol = tolerance * max(np.abs(expected).max(), 1e-3)
        value = np.asarray(got.get_path(path))
        np.testing.assert_allclose(value, expected, rtol=0, atol=atol, err_msg=path)


NO_LOSSES = {"balance_weight": 0.0, "z_weight": 0.0}


@pytest.mark.parametrize("block_size", [1, 5, 128])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", [(B, T), (3, 7), (1, 1)])
def test_is_the_sum_over_chosen_experts(shape, routing, block_size):
    x, paddings, theta = inputs_of(routing, *shape)
    layer = mixture(block_size=block_size, **NO_LOSSES)
    args = theta.map(tf.constant), tf.constant(x), paddings
    got = results(layer)(*args)
    assert_close(got, dense_sum(theta, x, paddings))
    sums = got.out.aux.sums
    assert sums.dropped == 0
    assert tf.reduce_sum(sums.load) == K * sums.tokens
    if routing == "all_to_one":
        np.testing.assert_array_equal(sums.load, sums.tokens * np.eye(E)[[3, 5]].sum(0))


GATINGS = {
    "top2": Top2(**SIZES, second_expert=SecondExpert.ALWAYS),
    "threshold": Top2(
        **SIZES, second_expert=SecondExpert.ABOVE_THRESHOLD, threshold=0.3
    ),
    "switch": Switch(**SIZES),
    "sinkhorn": Sinkhorn(**SIZES, iterations=3),
    "top3": TopK(**SIZES, k=3, gate_factor=2.5, bias_rate=0.1),
}
SLOTS = Capacity(factor=float(E))


@pytest.mark.parametrize("activation", [Activation.RELU, Activation.GATED_SILU])
@pytest.mark.parametrize("gating", GATINGS)
def test_is_what_slots_for_all_give(gating, activation):
    x, paddings, _ = inputs_of("usual", B, T)
    gating = dataclasses.replace(GATINGS[gating], capacity=SLOTS)
    shared = FeedForward(model_dims=M, hidden_dims=4)
    kwargs = {"activation": activation, "shared": shared, "group_size": 2 * T}
    layers = [mixture(gating, **kwargs), mixture(gating, **kwargs, dropless=None)]
    theta = initialize(layers[0].weights(), key_from_seed(1))
    got, want = (results(layer)(theta, tf.constant(x), paddings) for layer in layers)
    assert_close(got, want)


def test_one_more_token_is_as_in_the_sequence():
    layer = mixture(TopK(**SIZES, k=3))
    theta = initialize(layer.weights(), key_from_seed(1))
    x = tf.constant(inputs_of("usual", B, T)[0])
    together = layer.fprop(Context(), theta, x).x
    steps = [layer.step(Context(), theta, x[:, t : t + 1]).x for t in range(T)]
    np.testing.assert_allclose(tf.concat(steps, 1), together, rtol=1e-5, atol=1e-6)


def test_hashed_tokens():
    layer = mixture(Hash(**SIZES))
    theta = initialize(layer.weights(), key_from_seed(1))
    x = tf.constant(inputs_of("usual", B, T)[0])
    ids = np.random.default_rng(0).integers(0, 1000, (B, T)).astype(np.int32)
    slots = mixture(Hash(**SIZES, capacity=SLOTS), dropless=None)
    got, want = (
        each.fprop(Context(), theta, x, token_ids=ids).x for each in (layer, slots)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_batch_of_any_size_has_slots_for_all():
    x, paddings, theta = inputs_of("all_to_one", B, T)
    layer, weights = mixture(), theta.map(tf.constant)

    @tf.function(input_signature=[tf.TensorSpec([None, T, M])])
    def exported(x):
        return layer.fprop(Context(), weights, x).x

    want = layer.fprop(Context(), weights, tf.constant(x)).x
    np.testing.assert_allclose(exported(x), want, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_near():
    x, paddings, theta = inputs_of("usual", B, T)
    weights = theta.map(tf.constant)
    want = dense_sum(theta, x, paddings)
    got = results(mixture(**NO_LOSSES), dtype=tf.bfloat16)(
        weights, tf.constant(x), paddings
    )
    assert got.out.x.dtype == tf.bfloat16
    for name in ("w_in", "w_out"):
        expected = want.weights.experts[name].numpy()
        gradient = got.weights.experts[name].numpy()
        assert np.abs(gradient - expected).mean() < 0.03 * np.abs(expected).mean()


PLANS = {
    "sparse": ((8,), {"experts": "X"}, {"batch": "X", "experts": "X"}),
    "hybrid": (
        (4, 2),
        {"experts": "X", "hidden": "Y"},
        {"batch": "X", "model": "Y", "hidden": "Y", "experts": "X"},
    ),
    "batch_elsewhere": ((2, 4), {"experts": "Y"}, {"batch": "X", "experts": "Y"}),
    "both_axes": (
        (2, 4),
        {"experts": ("X", "Y")},
        {"batch": ("X", "Y"), "experts": ("X", "Y")},
    ),
    "another_order": (
        (2, 4),
        {"experts": ("Y", "X")},
        {"batch": ("X", "Y"), "experts": ("Y", "X")},
    ),
    "part_of_the_batch": (
        (2, 4),
        {"experts": "X"},
        {"batch": ("X", "Y"), "experts": "X"},
    ),
    "gathered": (
        (2, 4),
        {"experts": "X", "expert_model": "Y"},
        {"batch": "X"},
    ),
    "hidden_not_divided": ((1, 8), {"hidden": "Y"}, {"hidden": "Y"}),
    "dense": (
        (2, 4),
        {"expert_model": "X", "hidden": "Y", "gate_model": "Y"},
        {"batch": "X", "model": "Y", "hidden": "Y"},
    ),
    "sequence": (
        (2, 4),
        {"experts": "X", "hidden": "Y"},
        {"batch": "X", "stream": "Y", "hidden": "Y", "experts": "X"},
        ("Y",),
    ),
}


def plan_of(name: str) -> ShardingPlan:
    shape, weights, activations, *unreduced = PLANS[name]
    return ShardingPlan(
        mesh_axes=("X", "Y")[: len(shape)],
        mesh_shape=shape,
        weights=weights,
        activations=activations,
        unreduced_gradient_axes=unreduced[0] if unreduced else (),
    )


@functools.cache
def on_the_mesh(
    plan_name, partitioner, routing="usual", shape=(B, T), factor=1.5, rate=0.0
):
    """The compiled program, its results, and those of TF alone on one device.

    The gradient of biases is what they are to be next, by the load of all devices.
    """
    gating = dataclasses.replace(TOP2, bias_rate=rate)
    layer, plan = mixture(gating, factor=factor), plan_of(plan_name)
    x, paddings, theta = inputs_of(routing, *shape)
    if rate:
        theta.gating.bias = np.zeros(E, np.float32)
    specs = layer.weights()
    program = compile_program(
        results(layer, plan),
        tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape), (theta, x, paddings)),
        plan.mesh,
        in_shardings=[
            specs.map_with_path(lambda path, s: s.sharding(plan, path)),
            plan.activation_sharding(BSM),
            plan.activation_sharding(BSM[:2]),
        ],
        partitioner=partitioner,
        name="moe",
    )
    got = program.unshard(program(theta, x, paddings))
    want = results(layer)(theta.map(tf.constant), tf.constant(x), paddings)
    return program, got, want


over_partitioners = pytest.mark.parametrize("partitioner", Partitioner)


# Every plan under one partitioner; under the other too where tests may take long.
@pytest.mark.parametrize(
    ("plan", "partitioner"),
    [
        pytest.param(plan, each, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, plan in enumerate(PLANS)
        for j, each in enumerate(Partitioner)
    ],
)
def test_computes_on_eight_devices_what_it_does_on_one(plan, partitioner):
    _, got, want = on_the_mesh(plan, partitioner, rate=0.125)
    assert_close(got, want)
    assert got.out.aux.sums.dropped == 0


@over_partitioners
@pytest.mark.parametrize("factor", [0.1, 1.5, 8.0])
def test_all_tokens_want_one_expert_in_rounds_of_any_size(factor, partitioner):
    _, got, want = on_the_mesh("sparse", partitioner, "all_to_one", factor=factor)
    assert_close(got, want)


@over_partitioners
def test_tokens_that_devices_do_not_divide(partitioner):
    # The batch is along X, the experts along Y: eight devices have 2 x 5 tokens.
    _, got, want = on_the_mesh(
        "batch_elsewhere", partitioner, "all_to_one", shape=(2, 5)
    )
    assert_close(got, want)


@over_partitioners
def test_what_moves(partitioner):
    program, _, _ = on_the_mesh("sparse", partitioner)
    kinds = collections.Counter(c.kind for c in program.collectives())
    # Tokens, their experts' numbers, results; two gradients. In further rounds the
    # gradient computes the forward part again.
    assert kinds.pop("all-to-all") == 3 + 2 + 3 + (3 + 2)
    assert set(kinds) == {"all-reduce"}
    program, _, _ = on_the_mesh("sparse", partitioner, "all_to_one", factor=8.0)
    kinds = collections.Counter(c.kind for c in program.collectives())
    assert kinds["all-to-all"] == 3 + 2  # All fit in the first.


@over_partitioners
def test_experts_that_are_not_split_move_no_tokens(partitioner):
    program, _, _ = on_the_mesh("dense", partitioner)
    moved = collections.Counter(
        (c.kind, c.axes) for c in program.collectives() if "experts" in c.op_name
    )
    assert not {kind for kind, _ in moved} & {"all-to-all", "collective-permute"}
    # Weights are gathered along X before the loops, sums over Y follow them.
    assert all(axes == ("Y",) for kind, axes in moved if kind == "all-reduce")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Dropless(block_size=0), r"Dropless\.block_size is 0"),
        (lambda: Dropless(exchange_factor=0), r"Dropless\.exchange_factor is 0"),
        (
            lambda: mixture(ExpertChoice(**SIZES)),
            r"by ExpertChoice experts choose tokens: set MoE\.dropless = None, or use",
        ),
        (lambda: mixture(dropless=True), r"MoE\.dropless is True; .* such as Dropless"),
        (
            lambda: MoE(
                gating=TOP2,
                experts=ExpertFeedForward(**SIZES, hidden_dims=H, dropout_rate=0.1),
                dropless=Dropless(),
            ),
            r"dropout_rate is 0\.1 with MoE\.dropless: .*set it to 0",
        ),
        (
            lambda: mixture(shared=FeedForward(model_dims=M + 1, hidden_dims=4)),
            r"MoE\.gating\.model_dims is 8 but MoE\.shared\.model_dims is 9: give both",
        ),
    ],
)
def test_hyperparameters_that_make_no_sense_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("plan", ["sparse", "dense"])
def test_names_what_recomputation_may_save(plan):
    x, _, theta = inputs_of("usual", B, T)
    with tf.Graph().as_default() as graph:
        weights = theta.map(tf.constant)
        mixture().fprop(Context(plan=plan_of(plan)), weights, tf.constant(x))
    saved = [op.name for op in graph.get_operations() if "saved." in op.name]
    names = collections.Counter(name.split("saved.")[1].split(".")[0] for name in saved)
    assert names == dict.fromkeys(
        ["gate_logits", "dispatched", "hidden", "expert_out", "feed_forward_out"], 1
    )


def test_a_pipeline_is_refused():
    plan = plan_of("batch_elsewhere").inside_pipeline(["X"])
    plan = dataclasses.replace(plan, activations={}, weights={})
    x, _, theta = inputs_of("usual", B, T)
    with pytest.raises(ValueError, match=r"'m': MoE\.dropless is not for pipelines: s"):
        mixture().fprop(Context(plan=plan, path="m"), theta, tf.constant(x))


def test_experts_that_devices_do_not_divide_are_refused():
    plan = ShardingPlan(mesh_axes=("X",), mesh_shape=(3,), activations={"experts": "X"})
    x, _, theta = inputs_of("usual", B, T)
    message = r"'m.experts': 8 experts do not divide among 3 devices: set num_experts"
    with pytest.raises(ValueError, match=message):
        mixture().fprop(Context(plan=plan, path="m"), theta, tf.constant(x))


def test_extra_flops_are_those_of_k_experts():
    shared = FeedForward(model_dims=M, hidden_dims=4)
    layer = mixture(TopK(**SIZES, k=3), shared=shared)
    weights = 2 * E * M * H  # Two matrices; two FLOPs for each number.
    assert layer.extra_flops(T) == pytest.approx(2 * weights * (3 / E - 1))
