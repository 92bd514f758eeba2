"""Gatings: reference numbers, Algorithm 1 literally, and what holds for all of them.

Dims: G groups, S tokens of a group, E experts, C slots.
"""

import json
import math
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Mode, initialize
from meshwright.framework.modeling.random import key_from_seed, uniform
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.experts.gating import Capacity, Rounding
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

DATA = pathlib.Path(__file__).parents[2] / "data"
G, S, M, E = 3, 16, 8, 4
SIZES = {"model_dims": M, "num_experts": E}
GATINGS = {
    "top2": Top2(**SIZES),
    "top2_threshold": Top2(
        **SIZES, second_expert=SecondExpert.ABOVE_THRESHOLD, threshold=0.3
    ),
    "top2_always": Top2(**SIZES, second_expert=SecondExpert.ALWAYS),
    "switch": Switch(**SIZES),
    "top3": TopK(**SIZES, k=3, capacity=Capacity(factor=3)),
    "expert_choice": ExpertChoice(**SIZES),
    "hash": Hash(**SIZES),
    "sinkhorn": Sinkhorn(**SIZES),
}
EXPERTS_A_TOKEN = {"expert_choice": E, "top3": 3, "switch": 1, "hash": 1, "sinkhorn": 1}
over_all = pytest.mark.parametrize("name", GATINGS)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((G, S, M)).astype(np.float32)
X[:, :, 0] += 1  # So that some expert is asked for more than its share.
IDS = RNG.integers(0, 1000, (G, S)).astype(np.int32)
VALID = np.ones((G, S), np.float32)
VALID[1, 10:] = 0
VALID[2] = 0


def route(name, *, capacity=None, x=X, valid=VALID, dtype=tf.float32, seed=0):
    """Numpy arrays of the routing, and the softmax of its logits."""
    gating = GATINGS[name]
    if capacity is not None:
        gating = type(gating)(**{**gating.__dict__, "capacity": capacity})
    theta = initialize(gating.weights(), key_from_seed(1))
    ctx = Context(mode=Mode.TRAIN, key=key_from_seed(seed), activation_dtype=dtype)
    routing = gating.fprop(
        ctx, theta, tf.constant(x), valid=tf.constant(valid), token_ids=IDS
    )
    probs = tf.ones([*x.shape[:2], E])
    if theta:
        probs = tf.nn.softmax(tf.einsum("gsm,me->gse", x, theta.w))
    return routing, routing.dispatch.numpy(), routing.combine.numpy(), probs.numpy()


class OfLogits(Top2):
    """Reads logits instead of tokens."""

    def logits(self, ctx, theta, x):
        return x


def golden_cases():
    cases = json.loads((DATA / "top2_gating_on_logits.meta.json").read_text())
    # Importance weights of tokens and padded experts are not for us.
    out = ("importance", "expert_padding")
    return [case for case in cases if not case["case"].startswith(out)]


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case["case"])
def test_top2_gives_the_reference_numbers(case):
    with np.load(DATA / "top2_gating_on_logits.npz") as arrays:
        prefix = case["case"] + "/"
        golden = {
            name.removeprefix(prefix): arrays[name]
            for name in arrays
            if name.startswith(prefix)
        }
    slots = golden["combine_GSEC"].shape[-1]
    before = case.get("legacy_mtf_behavior", True)
    at_random = case.get("second_expert_policy") == "random"
    gating = OfLogits(
        model_dims=1,
        num_experts=golden["logits"].shape[-1],
        capacity=Capacity(factor=0.01, at_least=slots),
        second_expert=(
            SecondExpert.IN_PROPORTION if at_random else SecondExpert.ALWAYS
        ),
        threshold=case.get("second_expert_threshold", 0.5),
        gate_scale=GateScale.CHOSEN if before else GateScale.KEPT,
    )
    valid = 1 - golden.get("paddings", np.zeros(golden["logits"].shape[:2], "f"))
    routing = gating.fprop(
        Context(mode=Mode.TRAIN),
        NestedMap(),
        tf.constant(golden["logits"]),
        valid=tf.constant(valid),
    )
    np.testing.assert_allclose(routing.combine, golden["combine_GSEC"], atol=1e-6)
    np.testing.assert_array_equal(routing.dispatch, golden["dispatch_GSEC"] != 0)
    if valid.all() or not before:  # The other divides by padding too.
        np.testing.assert_allclose(routing.balance_loss, golden["aux_loss"], rtol=1e-5)


def test_capacity_gives_the_reference_table():
    table = json.loads((DATA / "capacity_table.json").read_text())["rows"]
    compared = 0
    for tokens, experts, factor, given, want in table:
        if given and tokens * factor < experts:
            continue  # There the reference takes 4 for 0 before it compares.
        capacity = Capacity(
            factor=factor, rounding=Rounding.DOWN, at_least=given, multiple_of=4
        )
        # More slots than tokens serve nobody.
        assert capacity.slots(tokens, experts) == min(want, tokens)
        compared += 1
    assert compared > 300


def test_capacity_is_rounded_as_asked():
    assert Capacity(factor=1.25).slots(10, 4) == 4
    assert Capacity(factor=1.25, rounding=Rounding.DOWN).slots(10, 4) == 3
    assert Capacity(factor=1.1).slots(100, 10) == 11  # Not 12 for 11.000000000000002.
    assert Capacity(factor=1.25, multiple_of=8).slots(64, 8) == 16
    assert Capacity(factor=0.01, rounding=Rounding.DOWN).slots(10, 4) == 1
    both = Capacity(factor=1, eval_factor=2)
    assert [both.slots(8, 4, mode) for mode in Mode] == [2, 4]


def algorithm_1(probs, slots, chance):
    """The paper's two passes for one group: combine weights [S, E], auxiliary loss."""
    tokens, experts = probs.shape
    out, count = np.zeros((tokens, experts)), np.zeros(experts)
    best = np.argsort(-probs, axis=1, kind="stable")[:, :2]
    for s, (e1, e2) in enumerate(best):
        if count[e1] < slots:
            out[s, e1] = probs[s, e1] / (probs[s, e1] + probs[s, e2])
        count[e1] += 1
    loss = np.sum(count / tokens * probs.mean(axis=0)) / experts
    for s, (e1, e2) in enumerate(best):
        gate = probs[s, e2] / (probs[s, e1] + probs[s, e2])
        if count[e2] < slots and 2 * gate > chance[s]:
            out[s, e2] = gate
        count[e2] += 1
    return out, loss


@pytest.mark.parametrize("factor", [0.5, 1, 2])
def test_top2_is_algorithm_1(factor):
    capacity = Capacity(factor=factor)
    everyone = np.ones_like(VALID)
    routing, _, combine, probs = route("top2", capacity=capacity, valid=everyone)
    chance = uniform(Context(key=key_from_seed(0)).random_key(), [G, S, 1]).numpy()
    slots = capacity.slots(S, E)
    wants = [algorithm_1(p, slots, c[:, 0]) for p, c in zip(probs, chance, strict=True)]
    weights = np.stack([weights for weights, _ in wants])
    np.testing.assert_allclose(combine.sum(-1), weights, atol=1e-6)
    loss = np.mean([loss for _, loss in wants])
    np.testing.assert_allclose(routing.balance_loss, E**2 * loss, rtol=1e-5)
    assert 0 < np.sum(weights[..., None] > 0) < 2 * G * S


def test_second_experts_are_dropped_in_proportion():
    """Of 4096 tokens with g2 = 0.1, one in five goes to the second expert."""
    logits = np.tile(np.log([0.9, 0.1]), (64, 64, 1)).astype(np.float32)
    gating = OfLogits(model_dims=1, num_experts=2, capacity=Capacity(factor=4))
    ctx = Context(mode=Mode.TRAIN, key=key_from_seed(0))
    kept = gating.fprop(ctx, NestedMap(), tf.constant(logits)).sums.load
    assert kept[0] == 4096
    assert abs(kept[1] / 4096 - 0.2) < 0.025  # Four standard deviations.
    evaluated = gating.fprop(Context(), NestedMap(), tf.constant(logits))
    assert evaluated.sums.load[1] == 4096


def test_a_second_expert_below_the_threshold_takes_no_place():
    probs = np.array([[[0.8, 0.2], [0.6, 0.4], [0.6, 0.4]]], np.float32)
    gating = OfLogits(
        model_dims=1,
        num_experts=2,
        capacity=Capacity(factor=0.01, at_least=1),
        second_expert=SecondExpert.ABOVE_THRESHOLD,
        threshold=0.3,
    )
    routing = gating.fprop(Context(), NestedMap(), tf.constant(np.log(probs)))
    np.testing.assert_allclose(
        routing.combine[0, :, :, 0], [[0.8, 0], [0, 0.4], [0, 0]], atol=1e-6
    )


@over_all
@pytest.mark.parametrize("factor", [0.5, 1, 2])
def test_no_slot_and_no_expert_is_taken_twice(name, factor):
    capacity = Capacity(factor=factor)
    routing, dispatch, combine, _ = route(name, capacity=capacity)
    assert dispatch.shape == combine.shape == (G, S, E, capacity.slots(S, E))
    assert set(np.unique(dispatch)) == {0, 1}
    assert dispatch.sum(axis=1).max() == 1  # A slot has one token at most,
    assert dispatch.sum(axis=3).max() == 1  # a token one slot of an expert.
    assert dispatch.sum(axis=(2, 3)).max() <= EXPERTS_A_TOKEN.get(name, 2)
    assert not combine[dispatch == 0].any()
    assert (combine[dispatch == 1] > 0).all()
    if name == "top2":
        return  # A second expert that chance rejects leaves its slot empty.
    assert (np.diff(dispatch.sum(axis=1), axis=-1) <= 0).all()


@over_all
def test_padding_takes_no_slot_and_counts_nowhere(name):
    capacity = Capacity(factor=0.01, at_least=3)
    routing, dispatch, combine, _ = route(name, capacity=capacity)
    assert not dispatch[VALID == 0].any()
    assert routing.sums.tokens == VALID.sum() == 26
    # The first ten tokens of the second group alone give the same again.
    x = X.copy()
    x[VALID == 0] = 7 * RNG.standard_normal((22, M))
    again, _, combine_again, _ = route(name, capacity=capacity, x=x)
    np.testing.assert_allclose(combine, combine_again, atol=1e-6)
    np.testing.assert_allclose(routing.balance_loss, again.balance_loss, rtol=1e-5)
    np.testing.assert_allclose(routing.z_loss, again.z_loss, rtol=1e-5)
    for path, value in routing.sums.items_by_path():
        np.testing.assert_allclose(value, again.sums[path], rtol=1e-5, err_msg=path)


@over_all
def test_padding_alone_gives_zeros(name):
    routing, dispatch, combine, _ = route(name, valid=np.zeros_like(VALID))
    assert not dispatch.any()
    assert not combine.any()
    for value in (routing.balance_loss, routing.z_loss, *routing.sums.leaves()):
        np.testing.assert_array_equal(value, 0)


@over_all
def test_statistics_are_those_of_the_routing(name):
    routing, dispatch, _, probs = route(name, capacity=Capacity(factor=0.5))
    served = dispatch.max(axis=(2, 3))
    np.testing.assert_allclose(routing.sums.load, dispatch.sum(axis=(0, 1, 3)))
    np.testing.assert_allclose(routing.sums.dropped, np.sum(VALID * (1 - served)))
    assert routing.sums.dropped > 0
    if name == "hash":
        return
    entropy = np.sum(-probs * np.log(probs), axis=-1)
    np.testing.assert_allclose(routing.sums.entropy, np.sum(VALID * entropy), rtol=1e-4)
    assert 0 < routing.sums.entropy < 26 * math.log(E)


@pytest.mark.parametrize("name", ["switch", "sinkhorn", "expert_choice"])
def test_a_kept_token_is_weighed_by_its_probability(name):
    _, dispatch, combine, probs = route(name)
    weights = np.sum(combine, axis=-1)
    np.testing.assert_allclose(weights, probs * dispatch.sum(axis=-1), atol=1e-6)


@pytest.mark.parametrize("name", ["top2_always", "top3"])
def test_the_gates_of_a_token_sum_to_one(name):
    _, _, combine, _ = route(name, capacity=Capacity(factor=10))
    np.testing.assert_allclose(combine.sum(axis=(2, 3)), VALID, atol=1e-6)


@pytest.mark.parametrize("scale", GateScale)
def test_gates_are_scaled_as_asked(scale):
    logits = np.log([[[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]]).astype(np.float32)
    # One slot an expert: the first token gets experts 0 and 1, the second none.
    kwargs = {"k": 2, "capacity": Capacity(factor=0.01), "gate_scale": scale}
    gating = TopK(model_dims=3, num_experts=3, **kwargs)
    identity = NestedMap(w=tf.eye(3))
    combine = gating.fprop(Context(), identity, tf.constant(logits)).combine
    want = {GateScale.RAW: [0.5, 0.3, 0]}.get(scale, [0.625, 0.375, 0])
    np.testing.assert_allclose(combine[0, 0, :, 0], want, atol=1e-6)
    # Two tokens with one expert in common: the second keeps one of its two.
    logits[0, 1] = np.log([0.5, 0.2, 0.3])
    combine = gating.fprop(Context(), identity, tf.constant(logits)).combine
    want = {GateScale.RAW: 0.3, GateScale.CHOSEN: 0.375, GateScale.KEPT: 1.0}
    np.testing.assert_allclose(combine[0, 1, :, 0], [0, 0, want[scale]], atol=1e-6)


@pytest.mark.parametrize("name", ["top2_always", "switch", "top3", "hash"])
def test_earlier_tokens_have_priority_and_first_choices_before_second(name):
    slots = 3
    _, dispatch, _, probs = route(name, capacity=Capacity(factor=0.01, at_least=slots))
    k = EXPERTS_A_TOKEN.get(name, 2)
    everyone = Capacity(factor=0.01, at_least=S * k)
    _, wanted, _, _ = route(name, capacity=everyone)
    order = np.argsort(-probs, axis=-1, kind="stable")
    for g in range(G):
        count = np.zeros(E)
        for choice in range(k):
            for s in np.flatnonzero(VALID[g]):
                e = order[g, s, choice]
                if name == "hash":
                    e = wanted[g, s].sum(-1).argmax()
                assert dispatch[g, s, e].any() == (count[e] < slots), (g, s, e)
                count[e] += 1


def test_experts_choose_the_tokens_that_want_them_most():
    slots = 5
    capacity = Capacity(factor=0.01, at_least=slots)
    _, dispatch, _, probs = route("expert_choice", capacity=capacity)
    for g in range(2):  # The third group is all padding.
        for e in range(E):
            taken = np.flatnonzero(dispatch[g, :, e].any(axis=-1))
            want = np.argsort(-np.where(VALID[g] > 0, probs[g, :, e], -1))[:slots]
            assert sorted(taken) == sorted(want)


def test_experts_take_the_earlier_of_tokens_that_want_them_alike():
    gating = ExpertChoice(model_dims=M, num_experts=E)
    routing = gating.fprop(
        Context(), NestedMap(w=tf.zeros([M, E])), tf.constant(X), valid=VALID
    )
    load = routing.dispatch.numpy().sum(axis=(2, 3))
    np.testing.assert_array_equal(load[0], [E] * 8 + [0] * 8)  # C = 2 S / E = 8.


def test_hash_depends_on_the_id_alone_and_spreads_evenly():
    gating = Hash(model_dims=M, num_experts=E, capacity=Capacity(factor=E))
    ids = tf.constant(np.arange(4096).reshape(64, 64) % 2048, tf.int32)
    x = tf.zeros([64, 64, M])
    routing = gating.fprop(Context(), NestedMap(), x, token_ids=ids)
    load = routing.sums.load.numpy()
    assert load.sum() == 4096
    assert np.abs(load / 1024 - 1).max() < 0.15

    def expert_of(routing):
        return routing.dispatch.numpy().any(axis=-1).argmax(axis=-1).reshape(-1)

    expert = expert_of(routing)
    np.testing.assert_array_equal(expert[:2048], expert[2048:])
    other = Hash(model_dims=M, num_experts=E, capacity=Capacity(factor=E), seed=1)
    moved = expert_of(other.fprop(Context(), NestedMap(), x, token_ids=ids))
    assert 0.6 < np.mean(moved != expert) < 0.9


def test_sinkhorn_balances_experts_that_argmax_would_not():
    x = np.tile(RNG.standard_normal((1, 64, M)).astype(np.float32), (2, 1, 1))
    x[..., 0] += 3
    loads = {}
    for gating in (
        Sinkhorn(model_dims=M, num_experts=E, capacity=Capacity(factor=E)),
        Switch(model_dims=M, num_experts=E, capacity=Capacity(factor=E)),
    ):
        theta = initialize(gating.weights(), key_from_seed(1))
        routing = gating.fprop(Context(mode=Mode.TRAIN), theta, tf.constant(x))
        loads[type(gating)] = routing.sums.load.numpy() / (2 * 64 / E)
        evaluated = gating.fprop(Context(), theta, tf.constant(x)).sums.load
    assert loads[Sinkhorn].max() < 1.4 < 1.6 < loads[Switch].max()
    np.testing.assert_array_equal(evaluated / (2 * 64 / E), loads[Switch])


@over_all
def test_gating_is_float32_under_bfloat16(name):
    x = tf.cast(X, tf.bfloat16).numpy()
    _, _, combine, _ = route(name, x=x.astype(np.float32))
    _, _, combined, _ = route(name, x=x.astype(np.float32), dtype=tf.bfloat16)
    assert combined.dtype == np.float32
    np.testing.assert_array_equal(combined, combine)


def test_jitter_is_of_training_and_of_the_asked_size():
    gating = Switch(model_dims=1, num_experts=1, jitter=0.1)
    theta = NestedMap(w=tf.ones([1, 1]))
    x = tf.ones([1, 4096, 1])
    ctx = Context(mode=Mode.TRAIN, key=key_from_seed(0))
    logits = gating.logits(ctx, theta, x).numpy()
    assert 0.9 <= logits.min() < 0.905 < 1.095 < logits.max() <= 1.1
    np.testing.assert_array_equal(gating.logits(Context(), theta, x), 1)


def test_z_loss_is_the_mean_square_of_the_logsumexp():
    routing, _, _, _ = route("switch")
    theta = initialize(GATINGS["switch"].weights(), key_from_seed(1))
    z = np.log(np.exp(X @ theta.w.numpy()).sum(-1)) ** 2
    np.testing.assert_allclose(routing.z_loss, z[VALID > 0].mean(), rtol=1e-5)


@over_all
def test_losses_and_weights_reach_the_gates(name):
    gating = GATINGS[name]
    theta = initialize(gating.weights(), key_from_seed(1))
    if not theta:
        return
    ctx = Context(mode=Mode.TRAIN, key=key_from_seed(0))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(theta)
        routing = gating.fprop(ctx, theta, tf.constant(X), valid=VALID)
        parts = {
            "combine": tf.reduce_sum(routing.combine**2),
            "z": routing.z_loss,
            "balance": routing.balance_loss,
        }
    for what, part in parts.items():
        gradient = tape.gradient(part, theta.w)
        if what == "balance" and name == "expert_choice":  # Balanced as it is.
            assert gradient is None
            continue
        assert np.isfinite(gradient).all() and np.any(gradient), what


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Capacity(factor=0), r"Capacity\.factor is 0; .* above 0"),
        (lambda: Capacity(eval_factor=-1), r"Capacity\.eval_factor is -1"),
        (lambda: Capacity(at_least=-1), r"Capacity\.at_least is -1"),
        (lambda: Capacity(multiple_of=0), r"Capacity\.multiple_of is 0"),
        (
            lambda: Capacity(rounding="up"),
            r"rounding is 'up'; .*one of Rounding.UP, Rounding.DOWN",
        ),
        (lambda: Switch(model_dims=1, num_experts=0), r"Switch\.num_experts is 0"),
        (lambda: Switch(**SIZES, jitter=1.5), r"Switch\.jitter is 1\.5"),
        (
            lambda: Top2(model_dims=1, num_experts=1),
            r"Top2 sends a token to 2 experts but Top2\.num_experts is 1: have more",
        ),
        (
            lambda: Top2(**SIZES, second_expert="sometimes"),
            r"Top2\.second_expert is 'sometimes'; it must be one of SecondExpert",
        ),
        (lambda: Top2(**SIZES, gate_scale=None), r"Top2\.gate_scale is None"),
        (lambda: Top2(**SIZES, threshold=1), r"Top2\.threshold is 1; .*below 1"),
        (lambda: TopK(**SIZES, k=0), r"TopK\.k is 0"),
        (lambda: TopK(**SIZES, k=5), r"TopK sends a token to 5 experts .* is 4"),
        (lambda: TopK(**SIZES, k=1), r"TopK\.k is 1 .* use GateScale\.RAW, or Switch"),
        (lambda: Sinkhorn(**SIZES, iterations=0), r"Sinkhorn\.iterations is 0"),
    ],
)
def test_hyperparameters_that_make_no_sense_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_hash_without_ids_is_refused():
    with pytest.raises(ValueError, match="'a.b' hashes token ids but .*token_ids="):
        GATINGS["hash"].fprop(Context(path="a.b"), NestedMap(), tf.constant(X))


def test_an_input_of_other_model_dims_is_refused():
    theta = initialize(GATINGS["top2"].weights(), key_from_seed(0))
    with pytest.raises(ValueError, match=r"'moe.gating' takes inputs .*\[8\]"):
        GATINGS["top2"].fprop(Context(path="moe.gating"), theta, tf.zeros([1, 2, 9]))


def test_gating_without_a_key_where_chance_decides_is_refused():
    theta = initialize(GATINGS["top2"].weights(), key_from_seed(0))
    ctx = Context(mode=Mode.TRAIN, path="gating")
    with pytest.raises(ValueError, match="'gating' needs random numbers"):
        GATINGS["top2"].fprop(ctx, theta, tf.constant(X))
