"""Top-k routing as current models have it: sigmoids, sets of experts, biases.

Dims: G groups, S tokens of a group, E experts, k experts of a token.
"""

import math

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Mode
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.experts.gatings import GateScale, Scores, TopK

G, S, E = 2, 32, 8
LOGITS = np.random.default_rng(0).standard_normal((G, S, E)).astype(np.float32)
VALID = tf.constant((np.arange(S) < [[S], [S - 5]]).astype(np.float32))
IDENTITY = NestedMap(w=tf.eye(E))


def top_k(**kwargs) -> TopK:
    return TopK(**{"model_dims": E, "num_experts": E, "k": 2, **kwargs})


def sent(gating, logits=LOGITS, theta=IDENTITY, mode=Mode.TRAIN, valid=VALID):
    return gating.send(Context(mode=mode), theta, tf.constant(logits), valid=valid)


def by_hand(scores, k, factor=1.0):
    """The experts, best first, and their gates, by the formulas of DeepSeek-V3."""
    experts = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    gates = np.take_along_axis(scores, experts, -1)
    return experts, factor * gates / gates.sum(-1, keepdims=True)


def test_sigmoids_are_divided_by_their_sum():
    got = sent(top_k(k=3, scores=Scores.SIGMOID, gate_factor=2.5))
    experts, gates = by_hand(1 / (1 + np.exp(-LOGITS)), 3, 2.5)
    valid = VALID.numpy()[..., None]
    np.testing.assert_array_equal(got.experts, np.where(valid, experts, E))
    np.testing.assert_allclose(got.weights, gates * valid, rtol=1e-5)
    raw = sent(top_k(k=1, scores=Scores.SIGMOID, gate_scale=GateScale.RAW))
    best = 1 / (1 + np.exp(-LOGITS.max(-1)))
    np.testing.assert_allclose(raw.weights[..., 0], best * VALID, rtol=1e-5)


@pytest.mark.parametrize(("sets", "chosen", "k"), [(4, 2, 4), (4, 2, 3), (2, 1, 2)])
def test_tokens_choose_among_the_experts_of_their_best_sets(sets, chosen, k):
    gating = top_k(k=k, expert_sets=sets, sets_per_token=chosen, scores=Scores.SIGMOID)
    scores = 1 / (1 + np.exp(-LOGITS))
    by_set = scores.reshape(G, S, sets, -1)
    totals = np.sort(by_set, -1)[..., -math.ceil(k / chosen) :].sum(-1)
    best = np.argsort(-totals, axis=-1)[..., :chosen]
    is_open = (np.arange(sets) == best[..., None]).any(-2)
    closed = np.where(np.repeat(is_open, E // sets, -1), scores, 0)
    experts, gates = by_hand(closed, k)
    got = sent(gating)
    valid = VALID.numpy()[..., None]
    np.testing.assert_array_equal(got.experts, np.where(valid, experts, E))
    np.testing.assert_allclose(got.weights, gates * valid, rtol=1e-5)


def test_biases_choose_but_do_not_weigh():
    bias = tf.constant(np.eye(E, dtype=np.float32)[5])
    theta = NestedMap(**IDENTITY, bias=bias)
    got = sent(top_k(k=1, gate_scale=GateScale.RAW, bias_rate=0.01), theta=theta)
    valid = VALID.numpy()[..., None]
    np.testing.assert_array_equal(got.experts, np.where(valid, 5, E))
    want = tf.nn.softmax(LOGITS)[..., 5:6] * valid
    np.testing.assert_allclose(got.weights, want, rtol=1e-5)


def new_bias(gating, bias, logits, mode=Mode.TRAIN, valid=VALID):
    """What a step makes of the biases (`WeightSpec.statistic_decay` is 0)."""
    with tf.GradientTape() as tape:
        tape.watch(bias)
        theta = NestedMap(**IDENTITY, bias=bias)
        routed = sent(gating, logits, theta, mode, valid)
        loss = tf.reduce_sum(routed.weights**2)
    return tape.gradient(loss, bias), routed.sums


def test_a_step_moves_biases_by_the_sign_of_the_missing_load():
    gating, bias = top_k(bias_rate=0.5), tf.zeros([E])
    assert gating.weights().bias.statistic_decay == 0
    got, sums = new_bias(gating, bias, LOGITS)
    load = sums.load.numpy()
    np.testing.assert_allclose(got, 0.5 * np.sign(load.mean() - load))
    assert new_bias(gating, bias, LOGITS, Mode.EVAL)[0] is None


def test_experts_with_the_mean_load_keep_their_biases():
    gating = TopK(
        model_dims=7, num_experts=7, k=1, gate_scale=GateScale.RAW, bias_rate=0.5
    )
    bias, logits = tf.zeros([7]), np.repeat(np.eye(7, dtype=np.float32), 3, 0)[None]

    @tf.function(jit_compile=True)  # XLA's mean of 7 times 3 is not 3.
    def step(bias):
        with tf.GradientTape() as tape:
            tape.watch(bias)
            theta = NestedMap(w=tf.eye(7), bias=bias)
            routed = sent(gating, logits, theta, valid=tf.ones([1, 21]))
        return tape.gradient(routed.weights, bias)

    np.testing.assert_array_equal(step(bias), bias)


def test_biases_even_out_the_load():
    skewed = np.random.default_rng(0).standard_normal((1, 1024, E), np.float32)
    skewed += np.linspace(0, 3, E, dtype=np.float32)
    gating, bias = top_k(scores=Scores.SIGMOID, bias_rate=0.005), tf.zeros([E])
    overload = []
    for _ in range(150):
        bias, sums = new_bias(gating, bias, skewed, valid=tf.ones([1, 1024]))
        overload.append(float(tf.reduce_max(sums.load) / tf.reduce_mean(sums.load)))
    assert overload[0] > 2
    assert np.mean(overload[-10:]) < 1.25


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"gate_factor": 0}, r"TopK\.gate_factor is 0"),
        ({"bias_rate": -1}, r"TopK\.bias_rate is -1"),
        ({"scores": "sigmoid"}, r"TopK\.scores is 'sigmoid'; .* Scores\.SIGMOID"),
        ({"expert_sets": 3}, r"TopK\.expert_sets is 3 .*let expert_sets divide"),
        (
            {"expert_sets": 2, "sets_per_token": 3},
            r"TopK\.sets_per_token 3, of 8 experts: .* at most expert_sets",
        ),
        (
            {"expert_sets": 4, "k": 3},
            r"TopK\.k is 3 but a token may choose among 2 experts of 1 of 4 sets: let",
        ),
    ],
)
def test_hyperparameters_that_make_no_sense_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        top_k(**kwargs)
