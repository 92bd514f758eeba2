"""Mixtures of experts: reference numbers, parity on a mesh, what moves between devices.

Dims: B batch, T sequence, M model, H hidden, E experts.
"""

import collections
import functools
import pathlib

import gin
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
from meshwright.layers.experts.gating import Capacity, Picks
from meshwright.layers.experts.gatings import (
    ExpertChoice,
    GateScale,
    Hash,
    SecondExpert,
    Sinkhorn,
    Switch,
    Top2,
    TopK,
)
from meshwright.layers.experts.moe import ExpertFeedForward, MoE

ROOT = pathlib.Path(__file__).parents[3]
B, T, M, E, H = 8, 16, 8, 8, 12
SIZES = {"model_dims": M, "num_experts": E}
GATINGS = {
    "top2": Top2(**SIZES),
    "switch": Switch(**SIZES, jitter=0.1),
    "top3": TopK(**SIZES, k=3),
    "expert_choice": ExpertChoice(**SIZES),
    "hash": Hash(**SIZES),
    "sinkhorn": Sinkhorn(**SIZES, iterations=3),
}
MESHES = {"sparse": (8,), "hybrid": (2, 4), "dense": (2, 4)}
RNG = np.random.default_rng(0)
INPUTS = NestedMap(
    x=RNG.standard_normal((B, T, M)).astype(np.float32),
    token_ids=RNG.integers(0, 1000, (B, T)).astype(np.int32),
    segment_ids=np.where(np.arange(T) < RNG.integers(T // 2, T + 1, (B, 1)), 1, 0),
)
INPUTS.segment_ids = INPUTS.segment_ids.astype(np.int32)


def plan_of(name: str, shape=None) -> ShardingPlan:
    try:
        gin.parse_config_files_and_bindings(
            [str(ROOT / "params" / "plans" / f"{name}.gin")],
            [f"MESH_SHAPE = {shape or MESHES[name]}"],
        )
        return gin.get_configurable("ShardingPlan")()
    finally:
        gin.clear_config()


def mixture(gating, **kwargs) -> MoE:
    experts = ExpertFeedForward(**SIZES, hidden_dims=H, dropout_rate=0.1)
    return MoE(gating=gating, experts=experts, z_weight=0.1, **kwargs)


def loss_and_gradients(layer, plan):
    """A function of (theta, inputs): output, auxiliary results, all gradients."""

    def results(theta, inputs):
        ctx = Context(plan=plan, mode=Mode.TRAIN, key=key_from_seed(0), path="moe")
        with tf.GradientTape() as tape:
            tape.watch([theta, inputs.x])
            annotated = annotate_weights(plan, layer.weights(), theta)
            out = layer.fprop(ctx, annotated, **inputs)
            loss = tf.reduce_sum(out.x**3) + 10 * out.aux.loss
        gradients = tape.gradient(loss, [theta, inputs.x])
        return NestedMap(out=out, weights=gradients[0], x=gradients[1])

    return results


@functools.cache
def on_the_mesh(gating: str, plan_name: str, partitioner: Partitioner):
    """The compiled program, its results, and those of TF alone on one device."""
    layer = mixture(GATINGS[gating])
    plan = plan_of(plan_name)
    theta = initialize(layer.weights(), key_from_seed(1))
    args = (theta, INPUTS.map(tf.constant))
    weights = layer.weights().map_with_path(lambda path, s: s.sharding(plan, path))
    by_token = plan.activation_sharding(BSM[:2])
    inputs = NestedMap(
        x=plan.activation_sharding(BSM), token_ids=by_token, segment_ids=by_token
    )
    program = compile_program(
        loss_and_gradients(layer, plan),
        tf.nest.map_structure(tf.TensorSpec.from_tensor, args),
        plan.mesh,
        in_shardings=[weights, inputs],
        partitioner=partitioner,
        name="moe",
    )
    got = program.unshard(program(*tf.nest.map_structure(lambda t: t.numpy(), args)))
    want = loss_and_gradients(layer, ShardingPlan())(*args)
    return program, got, want


over_gatings = pytest.mark.parametrize("gating", GATINGS)
over_partitioners = pytest.mark.parametrize("partitioner", Partitioner)


def assert_close(got, want):
    """Within 1e-5 of the tensor's largest element: sums in another order."""
    for path, expected in want.items_by_path():
        expected = np.asarray(expected)
        atol = 1e-5 * max(np.abs(expected).max(), 1e-3)
        gradient = got.get_path(path)
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=atol, err_msg=path)


@over_partitioners
@over_gatings
def test_computes_on_eight_devices_what_it_does_on_one(gating, partitioner):
    program, got, want = on_the_mesh(gating, "sparse", partitioner)
    assert_close(got, want)
    assert want.out.aux.sums.tokens < B * T


@over_partitioners
@over_gatings
def test_tokens_go_to_their_experts_and_back_by_one_all_to_all(gating, partitioner):
    program, _, _ = on_the_mesh(gating, "sparse", partitioner)
    counts = collections.Counter(
        (collective.kind, "gradient_tape" in collective.op_name)
        for collective in program.collectives()
        if collective.kind != "all-reduce"
    )
    # Two in the forward part and their gradients; weights are whole, so nothing else.
    assert counts == {("all-to-all", False): 2, ("all-to-all", True): 2}


@over_partitioners
def test_hybrid_plan(partitioner):
    program, got, want = on_the_mesh("top2", "hybrid", partitioner)
    assert_close(got, want)
    kinds = collections.defaultdict(list)
    for collective in program.collectives():
        kinds[collective.kind].append(collective)
    assert [c.axes for c in kinds.pop("all-to-all")] == [("X",)] * 4
    # GSPMD's figure 8b: what the experts read, and backwards what they are told.
    gathers = kinds.pop("all-gather")
    assert [c.axes for c in gathers] == [("Y",)] * 2
    assert all("experts" in c.op_name for c in gathers)
    assert set(kinds) == {"all-reduce"}


@over_partitioners
def test_dense_plan_moves_no_tokens(partitioner):
    program, got, want = on_the_mesh("top2", "dense", partitioner)
    assert_close(got, want)
    kinds = {(c.kind, c.axes) for c in program.collectives()}
    assert not {kind for kind, _ in kinds} & {"all-to-all", "collective-permute"}
    # Weights are gathered along X, activations along Y, as with Table 1's finalized.
    for collective in program.collectives():
        if collective.kind == "all-gather" and collective.axes == ("X",):
            assert "experts" in collective.op_name


class Given(Hash):
    """Token ids are the experts' numbers."""

    def pick(self, ctx, theta, logits, valid, token_ids):
        chosen = tf.one_hot(token_ids, self.num_experts) * valid[..., None]
        return Picks(choices=[chosen], scores=chosen, scale=GateScale.RAW, goes=[None])


def golden_layer(gating=Top2, *, slots=3, group_size=None, **kwargs) -> MoE:
    """Two groups of 8 tokens, M 6, 4 experts, H 10."""
    capacity = Capacity(factor=0.01, at_least=slots)
    activation = kwargs.pop("activation", Activation.RELU)
    if gating is Top2:
        kwargs["second_expert"] = SecondExpert.ALWAYS
    return MoE(
        gating=gating(model_dims=6, num_experts=4, capacity=capacity, **kwargs),
        experts=ExpertFeedForward(
            num_experts=4, model_dims=6, hidden_dims=10, activation=activation
        ),
        group_size=group_size,
        balance_weight=1.0,
    )


@pytest.mark.parametrize(
    ("case", "kwargs", "tolerance"),
    [
        ("top2_relu", {}, 1e-5),
        # gelu is the tanh approximation, off by up to 5e-4.
        ("top2_glu_gelu", {"activation": Activation.GATED_GELU}, 3e-3),
        ("top2_renorm", {"gate_scale": GateScale.KEPT}, 1e-5),
        ("top2_global_dispatch", {"slots": 5, "group_size": 16}, 1e-5),
        ("top2_cf1", {"slots": 4}, 1e-5),
    ],
)
def test_gives_the_reference_numbers(case, kwargs, tolerance):
    with np.load(ROOT / "tests" / "data" / "moe_ffn.npz") as arrays:
        golden = dict(arrays)
    layer = golden_layer(**kwargs)
    experts = NestedMap(w_in=golden["wi_EMH"], w_out=golden["wo_EHM"])
    if layer.experts.activation.is_gated:
        experts.w_gate, experts.w_in = golden["wi_glu_KEMH"]
    theta = NestedMap(gating=NestedMap(w=golden["gate_w_ME"]), experts=experts)
    theta, x = theta.map(tf.constant), tf.constant(golden["x_GSM"])
    paddings = golden["paddings_GS"]
    with tf.GradientTape() as tape:
        tape.watch([theta, x])
        out = layer.fprop(Context(), theta, x, paddings=paddings)
        aux = out.aux.loss
        if case != "top2_renorm":  # Only there is padding left out of the means.
            probs = tf.nn.softmax(tf.einsum("gsm,me->gse", x, theta.gating.w))
            aux = loss_with_padding(layer, probs, 1 - paddings)
        loss = tf.reduce_sum(out.x**2) + aux
    gradients = tape.gradient(loss, [theta, x])
    sums = {
        "y": out.x,
        "aux_loss": aux,
        "dx": gradients[1],
        "dgate": gradients[0].gating.w,
        "dwo": gradients[0].experts.w_out,
    }
    for name, value in sums.items():
        want = golden[f"{case}/{name}"]
        atol = tolerance * max(1.0, np.abs(want).max())
        np.testing.assert_allclose(value, want, rtol=0, atol=atol, err_msg=name)
    w_in = gradients[0].experts.w_in
    if layer.experts.activation.is_gated:
        w_in = np.stack([gradients[0].experts.w_gate, w_in])
    np.testing.assert_allclose(w_in, golden[f"{case}/dwi"], atol=3 * tolerance)


def loss_with_padding(layer, probs, valid):
    """The auxiliary loss as the reference has it: means are over padding too."""
    size = layer.group_size or 8
    valid = tf.reshape(tf.constant(valid), [-1, size, 1])
    probs = tf.reshape(probs, [-1, size, 4])
    first = tf.one_hot(tf.argmax(probs, -1), 4) * valid
    means = tf.reduce_mean(probs * valid, 1) * tf.reduce_mean(first, 1)
    return 16 * tf.reduce_mean(means)


def test_given_experts_give_the_reference_numbers():
    with np.load(ROOT / "tests" / "data" / "moe_ffn.npz") as arrays:
        golden = dict(arrays)
    theta = NestedMap(
        gating=NestedMap(),
        experts=NestedMap(w_in=golden["wi_EMH"], w_out=golden["wo_EHM"]),
    ).map(tf.constant)
    x = tf.constant(golden["x_GSM"])[1:]  # The other group has padding among it.
    ids = tf.constant(golden["expert_id_GS"])[1:]
    out = golden_layer(Given).fprop(Context(), theta, x, token_ids=ids)
    np.testing.assert_allclose(out.x, golden["hashing/y"][1:], atol=1e-5)


@pytest.mark.parametrize("activation", Activation)
def test_one_expert_is_a_feed_forward_layer(activation):
    """With one expert and room for all, the gate of the only choice is 1."""
    experts = ExpertFeedForward(
        num_experts=1, model_dims=M, hidden_dims=H, activation=activation
    )
    layer = MoE(gating=Switch(model_dims=M, num_experts=1), experts=experts)
    theta = initialize(layer.weights(), key_from_seed(0))
    dense = FeedForward(model_dims=M, hidden_dims=H, activation=activation)
    want = dense.fprop(Context(), theta.experts.map(lambda w: w[0]), INPUTS.x)
    out = layer.fprop(Context(), theta, tf.constant(INPUTS.x))
    np.testing.assert_allclose(out.x, want, rtol=1e-5, atol=1e-5)


def test_each_token_gets_the_weighted_sum_of_its_experts():
    layer = mixture(TopK(**SIZES, k=2, capacity=Capacity(factor=8)))
    theta = initialize(layer.weights(), key_from_seed(1))
    out = layer.fprop(Context(), theta, tf.constant(INPUTS.x))
    probs = tf.nn.softmax(INPUTS.x @ theta.gating.w).numpy()
    w_in, w_out = theta.experts.w_in.numpy(), theta.experts.w_out.numpy()
    hidden = np.maximum(np.einsum("btm,emh->bteh", INPUTS.x, w_in), 0)
    by_expert = np.einsum("bteh,ehm->btem", hidden, w_out)
    gates = np.where(probs >= np.sort(probs)[..., -2:-1], probs, 0)
    gates /= gates.sum(-1, keepdims=True)
    want = np.einsum("bte,btem->btm", gates, by_expert)
    np.testing.assert_allclose(out.x, want, rtol=1e-4, atol=1e-5)


def test_a_token_without_a_slot_gets_zeros():
    layer = mixture(Switch(**SIZES, capacity=Capacity(factor=0.25)))
    theta = initialize(layer.weights(), key_from_seed(1))
    out = layer.fprop(Context(), theta, tf.constant(INPUTS.x))
    zeros = ~out.x.numpy().any(axis=-1)
    assert 0 < zeros.sum() == out.aux.sums.dropped < B * T


def test_padding_by_either_name():
    layer = mixture(GATINGS["switch"])
    theta = initialize(layer.weights(), key_from_seed(1))
    x = tf.constant(INPUTS.x)
    by_segment = layer.fprop(Context(), theta, x, segment_ids=INPUTS.segment_ids)
    paddings = (INPUTS.segment_ids == 0).astype(np.float32)
    by_padding = layer.fprop(Context(), theta, x, paddings=paddings)
    np.testing.assert_array_equal(by_segment.x, by_padding.x)
    assert not by_padding.x.numpy()[paddings > 0].any()
    assert by_padding.aux.sums.tokens == B * T - paddings.sum()


@pytest.mark.parametrize("size", [4, 16, 32, 128])
def test_groups_are_consecutive_tokens(size):
    layer = mixture(GATINGS["switch"], group_size=size)
    theta = initialize(layer.weights(), key_from_seed(1))
    out = layer.fprop(Context(), theta, tf.constant(INPUTS.x)).x
    x = INPUTS.x.reshape(-1, size, M)
    alone = mixture(GATINGS["switch"])
    groups = [alone.fprop(Context(), theta, tf.constant(g[None])).x for g in x]
    want = np.concatenate(groups).reshape(B, T, M)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


def test_losses_are_weighed():
    theta = initialize(mixture(GATINGS["switch"]).weights(), key_from_seed(1))
    x = tf.constant(INPUTS.x)
    losses = []
    for balance, z in ((1, 0), (0, 1), (0.25, 3)):
        layer = MoE(
            gating=GATINGS["switch"],
            experts=ExpertFeedForward(**SIZES, hidden_dims=H),
            balance_weight=balance,
            z_weight=z,
        )
        losses.append(layer.fprop(Context(), theta, x).aux.loss.numpy())
    np.testing.assert_allclose(losses[2], losses[0] / 4 + losses[1] * 3, rtol=1e-6)
    assert losses[0] > 1


def test_auxiliary_results_are_what_their_specs_say():
    layer = mixture(GATINGS["top2"])
    theta = initialize(layer.weights(), key_from_seed(1))
    ctx = Context(activation_dtype=tf.bfloat16)
    out = layer.fprop(ctx, theta, tf.constant(INPUTS.x))
    assert out.x.dtype == tf.bfloat16
    shapes = {path: tuple(t.shape) for path, t in out.aux.items_by_path()}
    assert shapes.pop("sums.load") == (layer.gating.num_experts,)
    assert set(shapes.values()) == {()}


def test_names_what_recomputation_may_save():
    names = {"dispatched", "hidden", "expert_out", "feed_forward_out"}
    for gating, more in (("hash", set()), ("switch", {"gate_logits"})):
        layer = mixture(GATINGS[gating])
        with tf.Graph().as_default() as graph:
            weights = layer.weights().map(lambda s: tf.zeros(s.shape))
            layer.fprop(Context(), weights, **INPUTS.map(tf.constant))
        saved = [op.name for op in graph.get_operations() if "saved." in op.name]
        assert {name.split("saved.")[1].split(".")[0] for name in saved} == names | more


def test_extra_flops_are_those_of_slots_less_those_of_all_weights():
    layer = mixture(Switch(**SIZES, capacity=Capacity(factor=2)))
    slots = 2  # A token: C E / S.
    all_weights = 2 * (2 * E * M * H)
    experts = slots * (2 * 2 * M * H)
    dispatch_and_combine = 2 * 2 * E * (2 * T // E) * M
    want = experts - all_weights + dispatch_and_combine
    assert layer.extra_flops(T) == pytest.approx(want)


def test_first_weights_keep_the_variance_of_their_input():
    layer = ExpertFeedForward(num_experts=4, model_dims=64, hidden_dims=256)
    theta = initialize(layer.weights(), key_from_seed(0))
    np.testing.assert_allclose(np.std(theta.w_in), 64**-0.5, rtol=0.05)
    np.testing.assert_allclose(np.std(theta.w_out), 256**-0.5, rtol=0.05)


OTHER = ExpertFeedForward(num_experts=4, model_dims=M, hidden_dims=H)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: MoE(gating=GATINGS["top2"], experts=OTHER),
            r"gating\.num_experts is 8 but MoE\.experts\.num_experts is 4: give both",
        ),
        (lambda: mixture(GATINGS["top2"], group_size=0), r"MoE\.group_size is 0"),
        (lambda: mixture(GATINGS["top2"], balance_weight=-1), r"MoE\.balance_weight"),
        (
            lambda: MoE(gating=Switch(**SIZES), experts=OTHER, z_weight=-1),
            r"MoE\.z_weight is -1",
        ),
        (
            lambda: ExpertFeedForward(num_experts=0, model_dims=1, hidden_dims=1),
            r"ExpertFeedForward\.num_experts is 0",
        ),
        (
            lambda: ExpertFeedForward(**SIZES, hidden_dims=1, dropout_rate=1),
            r"ExpertFeedForward\.dropout_rate is 1",
        ),
        (
            lambda: ExpertFeedForward(**SIZES, hidden_dims=0),
            r"ExpertFeedForward\.hidden_dims is 0",
        ),
        (
            lambda: MoE(gating=Switch, experts=OTHER),
            r"MoE\.gating is <class .*must be of class Gating, such",
        ),
        (
            lambda: MoE(gating=Switch(**SIZES), experts=None),
            r"MoE\.experts is None; it must be of class Expert",
        ),
        (lambda: Switch(**SIZES, capacity=2.0), r"Switch\.capacity is 2\.0"),
    ],
)
def test_hyperparameters_that_make_no_sense_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("plan", "size", "message"),
    [
        ({}, 24, r"'moe': groups of 24 tokens do not .* 8 x 16: set MoE\.group_size"),
        ({}, 48, r"groups of 48 tokens do not divide"),
        (
            {"mesh_shape": (16,), "weights": {"experts": "X"}},
            None,
            r"'moe': 8 experts do not divide among 16 devices: set num_experts to a",
        ),
        (
            {"mesh_shape": (16,), "activations": {"batch": "X"}},
            None,
            r"'moe': 8 groups do not divide among 16 devices: make the batch larger",
        ),
        (
            {"mesh_shape": (8,), "activations": {"experts": "X", "hidden": "X"}},
            None,
            r"'moe.experts': .* hidden\] .*used twice.*ShardingPlan\.activations",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(plan, size, message):
    plan = ShardingPlan(mesh_axes=("X",), **{"mesh_shape": (1,), **plan})
    layer = mixture(GATINGS["switch"], group_size=size)
    theta = initialize(layer.weights(), key_from_seed(1))
    with pytest.raises(ValueError, match=message):
        layer.fprop(Context(plan=plan, path="moe"), theta, tf.constant(INPUTS.x))


def test_slots_of_other_sizes_are_refused():
    theta = initialize(OTHER.weights(), key_from_seed(1))
    with pytest.raises(ValueError, match="'e' has 4 experts of model dims 8 but was"):
        OTHER.fprop(Context(path="e"), theta, tf.zeros([5, 1, 2, M]))


def test_one_more_token_does_not_compete_with_other_rows():
    layer = mixture(GATINGS["top2"], group_size=4)
    theta = initialize(layer.weights(), key_from_seed(1))
    x = tf.constant(INPUTS.x[:, :1])  # Two groups of four, if it were training.
    ctx = Context(mode=Mode.EVAL)
    together = layer.step(ctx, theta, x)
    assert together.aux.sums.dropped == 0
    alone = [layer.step(ctx, theta, x[b : b + 1]).x for b in range(B)]
    np.testing.assert_allclose(together.x, tf.concat(alone, 0), rtol=1e-5, atol=1e-6)


def test_experts_that_choose_cannot_say_one_token_after_another():
    layer = mixture(GATINGS["expert_choice"])
    theta = initialize(layer.weights(), key_from_seed(1))
    with pytest.raises(ValueError, match="layer 'a': ExpertChoice lets .* another gat"):
        layer.step(Context(path="a"), theta, tf.constant(INPUTS.x[:, :1]))
