"""Vectors of relative positions, and sinks, against plain loops; bad settings."""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.attention.blocks import Blocks
from meshwright.layers.attention.learned_terms import Sink
from meshwright.layers.attention.mask_rules import MaskKind, NearMask
from meshwright.layers.attention.positions import PositionKind
from meshwright.layers.attention.relative.relative_positions import (
    RelativeSinusoids,
    RelativeVectors,
    TableRows,
    by_distance,
    by_key,
)

B, S, M, N, K, D = 2, 9, 6, 4, 2, 2
RNG = np.random.default_rng(0)
X = RNG.standard_normal([B, S, M])
Y_GRADIENT = RNG.standard_normal([B, S, M])
SEGMENTS = np.stack([np.arange(S) // 5, np.arange(S) // 9]).astype(np.int32)
PLACES = np.stack([np.arange(S) % 5, np.arange(S) % 9]).astype(np.int32)
CASES = {
    "no_positions": {
        "mask": NearMask(left=3, right=0, first=2),
        "sink": Sink.LEARNED,
    },
    "vectors": {"positions": RelativeVectors(max_distance=3)},
    "vectors_of_heads": {
        "positions": RelativeVectors(max_distance=2, by_head=True),
        "mask": NearMask(left=4, right=1, first=1),
        "sink": Sink.LEARNED,
    },
    "vectors_of_keys": {
        "positions": RelativeVectors(max_distance=20, has_values=False),
        "mask": MaskKind.FULL,
        "sink": Sink.ZERO,
    },
    "sinusoids": {"positions": RelativeSinusoids(max_timescale=50.0)},
    "sinusoids_both_ways": {
        "positions": RelativeSinusoids(),
        "mask": MaskKind.FULL,
        "sink": Sink.LEARNED,
    },
}


def attention(block_size=Blocks.NONE, **kwargs):
    return MultiHeadAttention(
        model_dims=M,
        num_heads=N,
        head_dim=D,
        num_kv_heads=K,
        block_size=block_size,
        **kwargs,
    )


def weights(layer):
    """float64 weights, for attention far from uniform."""
    rng = np.random.default_rng(1)
    return layer.weights().map(lambda s: 0.7 * rng.standard_normal(s.shape))


def sees(mask, b, i, j):
    if SEGMENTS[b, i] != SEGMENTS[b, j]:
        return False
    if isinstance(mask, NearMask):
        is_first = PLACES[b, j] < mask.first
        return i + mask.right >= j and (j + mask.left >= i or is_first)
    return mask is MaskKind.FULL or j <= i


def waves(distance, longest):
    angle = distance / longest ** (2 * np.arange(M // 2) / M)
    return np.concatenate([np.sin(angle), np.cos(angle)])


def pair(layer, w, q, k, v, i, j, n):
    """The logit of a query and a key of head n, and the value, as the papers say."""
    positions = layer.positions
    if positions is PositionKind.NONE:
        return q @ k, v
    if isinstance(positions, RelativeSinusoids):
        r = waves(i - j, positions.max_timescale) @ w.relative.w_r[:, n]
        return (q + w.relative.u[n]) @ k + (q + w.relative.v[n]) @ r, v
    reach = positions.max_distance
    place = max(-reach, min(reach, j - i)) + reach

    def vector(name):
        table = w.relative[name]
        return table[place, n] if positions.by_head else table[place]

    value = v + vector("to_values") if positions.has_values else v
    return q @ (k + vector("to_keys")), value


def plain(layer, w, x):
    """The layer's output [B, S, M] in float64, by loops over everything."""
    out = np.zeros([B, S, M])
    for b, i, n in np.ndindex(B, S, N):
        q, group = x[b, i] @ w.w_q[:, n], n // (N // K)
        total, weighted = 0.0, np.zeros(D)
        for j in range(S):
            if not sees(layer.mask, b, i, j):
                continue
            k, v = x[b, j] @ w.w_k[:, group], x[b, j] @ w.w_v[:, group]
            logit, value = pair(layer, w, q, k, v, i, j, n)
            score = np.exp(logit * D**-0.5)
            total, weighted = total + score, weighted + score * value
        if layer.sink is not Sink.NONE:
            total += np.exp(w.sink[n] if layer.sink is Sink.LEARNED else 0.0)
        out[b, i] += weighted / total @ w.w_o[n]
    return out


def numeric_gradients(layer, w, x):
    """Central differences by every element of weights and input."""

    def loss(w, x):
        return np.sum(plain(layer, w, x) * Y_GRADIENT)

    def by(tensor):
        gradient, step = np.zeros(tensor.shape), 1e-5
        for place in np.ndindex(*tensor.shape):
            kept, ends = tensor[place], []
            for moved in (kept + step, kept - step):
                tensor[place] = moved
                ends.append(loss(w, x))
            tensor[place] = kept
            gradient[place] = (ends[0] - ends[1]) / (2 * step)
        return gradient

    return w.map(by), by(x)


def computed(layer, w, x):
    """The layer's output, and its gradients by weights and input."""
    theta, x = w.map(lambda t: tf.constant(t, tf.float32)), tf.constant(x, tf.float32)

    @tf.function(jit_compile=True, autograph=False)
    def step(theta, x):
        with tf.GradientTape() as tape:
            tape.watch((theta, x))
            y = layer.fprop(
                Context(),
                theta,
                x,
                segment_ids=tf.constant(SEGMENTS),
                segment_positions=tf.constant(PLACES),
            )
            loss = tf.reduce_sum(y * tf.constant(Y_GRADIENT, tf.float32))
        return y, *tape.gradient(loss, (theta, x))

    return step(theta, x)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_loops(name):
    """At once, in blocks of several, and in blocks of one."""
    layer = attention(**CASES[name])
    w = weights(layer)
    y = plain(layer, w, X)
    dw, dx = numeric_gradients(layer, w, X.copy())
    for size in (Blocks.NONE, 4, 1):
        in_blocks = dataclasses.replace(layer, block_size=size)
        got_y, got_dw, got_dx = computed(in_blocks, w, X)
        pairs = [("y", got_y, y), ("x", got_dx, dx)]
        want = dict(dw.items_by_path())
        pairs += [(p, got, want[p]) for p, got in NestedMap(got_dw).items_by_path()]
        assert len(pairs) == 2 + len(want)
        for path, got, expected in pairs:
            np.testing.assert_allclose(
                got,
                expected,
                rtol=0,
                atol=1e-5 * np.abs(expected).max(),
                err_msg=f"{path}, {size}",
            )


@pytest.mark.parametrize("queries,keys", [(1, 4), (5, 3), (4, 4)])
def test_moving_to_keys_and_back_are_transposes(queries, keys):
    x = RNG.standard_normal([2, queries, queries + keys])
    y = RNG.standard_normal([2, queries, keys])
    moved = by_key(tf.constant(x), keys).numpy()
    for s, t in np.ndindex(queries, keys):
        np.testing.assert_array_equal(moved[:, s, t], x[:, s, t - s + queries - 1])
    back = by_distance(tf.constant(y)).numpy()
    np.testing.assert_allclose(np.sum(moved * y), np.sum(x * back))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("reach", [None, 0, 7])
@pytest.mark.parametrize("stride", [1, 3])
def test_blocks_read_the_rows_of_their_distances(stride, reach, is_causal):
    """Wherever they are, and whatever of a table without ends is left out."""
    sizes, length = (4, 6), 12 * 3 * stride
    rows = TableRows.of(
        queries=length,
        keys=length,
        sizes=sizes,
        stride=stride,
        reach=reach,
        after=stride * sizes[0] - 1 if is_causal else None,
    )
    most = length if reach is None else reach

    def clipped(relative):
        return np.clip(relative, -most, most)

    relative = clipped(rows.relative().numpy())
    table = tf.constant(relative.reshape(stride, 1, rows.count, 1))
    assert reach is None or rows.count <= 2 * (reach + sum(sizes)) + 1
    # Of each device, in stripes, the first tokens of blocks.
    blocks = [
        [d + stride * size * i for d in range(stride) for i in range(36 // size)]
        for size in sizes
    ]
    for query, key in itertools.product(*blocks):
        distance = key - query + stride * (np.arange(9) - 3)
        if is_causal and distance.min() > 0:
            continue
        start = rows.start(key - query, sizes[0])
        got = rows.read(table, start)[0, :9, 0]
        np.testing.assert_array_equal(got, clipped(distance))


@pytest.mark.parametrize(
    "make,message",
    [
        (
            lambda: RelativeVectors(max_distance=0),
            r"RelativeVectors\.max_distance is 0",
        ),
        (lambda: RelativeSinusoids(max_timescale=1), r"max_timescale is 1; .* above 1"),
        (lambda: attention(positions="shaw"), r"positions is 'shaw'.*@RelativeVectors"),
        (lambda: attention(sink=True), r"MultiHeadAttention\.sink is True.*LEARNED"),
        (
            lambda: dataclasses.replace(
                attention(positions=RelativeSinusoids()), model_dims=5
            ).weights(),
            "model_dims is 5: make it even",
        ),
        (
            lambda: attention(positions=RelativeVectors()).fprop(
                Context(), NestedMap(), tf.zeros([1, 2, M]), memory=tf.zeros([1, 3, M])
            ),
            "attends to a memory.*positions=NONE",
        ),
    ],
)
def test_what_does_not_go_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
