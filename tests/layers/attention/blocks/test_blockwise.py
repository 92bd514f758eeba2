"""Attention in blocks against attention of all pairs at once."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Mode
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.attention.blocks import Blocks, Cut, Pairs
from meshwright.layers.attention.fused import Kernel
from meshwright.layers.attention.learned_terms import Learned, Sink
from meshwright.layers.attention.logits import Logits
from meshwright.layers.attention.mask_rules import (
    MaskKind,
    MaskRule,
    NearMask,
    PrefixMask,
    Tokens,
    rule_of,
    visibility,
)
from meshwright.layers.attention.positions import PositionKind
from meshwright.layers.attention.relative.relative_positions import (
    RelativeSinusoids,
    RelativeVectors,
)
from meshwright.layers.attention.weighted_sums import weighted_sums
from meshwright.layers.basic.dropout import Dropout

B, S, T, M, N, D = 2, 37, 23, 6, 2, 4
RNG = np.random.default_rng(0)
X = RNG.standard_normal([B, S, M], np.float32)
MEMORY = RNG.standard_normal([B, T, M], np.float32)
SEGMENTS = np.stack([np.arange(S) // 11, np.arange(S) // 17]).astype(np.int32)
POSITIONS = np.stack([np.arange(S) % 11, np.arange(S) % 17]).astype(np.int32)
PACKED = {"segment_ids": SEGMENTS, "segment_positions": POSITIONS}
PADDINGS = np.zeros([B, S], np.float32)
PADDINGS[0, 35:] = PADDINGS[1, 5] = 1  # Every query still sees a key.
NOTHING_SEEN = {"paddings": np.ones([B, S], np.float32)}
CROSS = {
    "memory": MEMORY,
    "segment_ids": SEGMENTS,
    "memory_segment_ids": (np.arange(T) // 8).astype(np.int32)[None].repeat(B, 0),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryOther(MaskRule):
    """A user's rule: tokens of odd segments see keys at an even distance."""

    def visible(self, query: Tokens, key: Tokens) -> tf.Tensor:
        return ((query.index - key.index) % 2 == 0) | (query.segment % 2 == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OddSeeAll(MaskRule):
    """A user's rule: even queries see no later keys, odd ones all."""

    def visible(self, query: Tokens, key: Tokens) -> tf.Tensor:
        return (query.index >= key.index) | (query.index % 2 == 1)

    def span(self, first: int, last: int) -> tuple[int | None, int | None]:
        return None, last if first == last and first % 2 == 0 else None


GROUPED = {"num_kv_heads": 1}
CAPPED = {"logit_cap": 2.0}
NORMED = {"qk_norm": True}
SINK = {"sink": Sink.LEARNED}
VECTORS = RelativeVectors(max_distance=6)
WAVES = RelativeSinusoids()
# Products with sinusoids sum M of them, with vectors D.
SMALL = {"query_scale": 0.2}
# By name: mask, positions, tokens of a block, inputs, further settings.
CASES = {
    "causal": (MaskKind.CAUSAL, "NONE", 8, {}),
    "full": (MaskKind.FULL, "NONE", 37, {}),
    "causal_buckets": (MaskKind.CAUSAL, "RELATIVE", 8, {}),
    "full_buckets_padded": (MaskKind.FULL, "RELATIVE", 7, {"paddings": PADDINGS}),
    "window": (NearMask(left=9, right=0), "ROTARY", 4, {}),
    "both_sides": (NearMask(left=3, right=2), "NONE", 64, {}),
    "window_packed_padded": (
        NearMask(left=20, right=0),
        "ROTARY",
        5,
        {**PACKED, "paddings": PADDINGS},
    ),
    "causal_packed": (MaskKind.CAUSAL, "ROTARY", 1, PACKED),
    "prefix": (PrefixMask(length=13), "ROTARY", 6, {}),
    "prefix_packed": (PrefixMask(length=4), "NONE", 6, PACKED),
    "own_rule": (EveryOther(), "RELATIVE", 10, PACKED),
    "memory": (MaskKind.FULL, "NONE", 8, {"memory": MEMORY}),
    "memory_by_segment": (MaskKind.FULL, "NONE", 8, CROSS),
    "nothing_seen": (MaskKind.FULL, "NONE", 10, NOTHING_SEEN),
    "grouped": (MaskKind.CAUSAL, "RELATIVE", 8, PACKED, {**GROUPED, "use_bias": True}),
    "capped": (NearMask(left=9, right=1), "RELATIVE", 8, {}, CAPPED),
    "normed": (MaskKind.CAUSAL, "ROTARY", 8, {}, NORMED),
    "grouped_memory": (MaskKind.FULL, "NONE", 8, CROSS, GROUPED | CAPPED | NORMED),
    "sink": (MaskKind.CAUSAL, "ROTARY", 8, PACKED, SINK),
    "sink_alone": (MaskKind.FULL, "RELATIVE", 10, NOTHING_SEEN, SINK),
    "zero_sink": (NearMask(left=9, right=1), "NONE", 7, {}, {"sink": Sink.ZERO}),
    "first_keys": (NearMask(left=6, right=0, first=3), "ROTARY", 4, {}),
    "first_keys_packed": (NearMask(left=3, right=2, first=2), "NONE", 4, PACKED, SINK),
    "vectors": (MaskKind.FULL, VECTORS, 5, {"paddings": PADDINGS}),
    "vectors_beyond_blocks": (MaskKind.CAUSAL, VECTORS, 3, PACKED, GROUPED),
    "vectors_of_heads": (
        NearMask(left=9, right=4),
        RelativeVectors(max_distance=20, by_head=True, has_values=False),
        8,
        {},
        CAPPED,
    ),
    "waves": (MaskKind.CAUSAL, WAVES, 8, PACKED, SMALL),
    "waves_both_ways": (
        MaskKind.FULL,
        WAVES,
        7,
        {"paddings": PADDINGS},
        SMALL | GROUPED,
    ),
    "vectors_own_rule": (OddSeeAll(), VECTORS, 1, {}),
    "waves_own_rule": (OddSeeAll(), WAVES, 5, {}, SMALL),
    "waves_window": (NearMask(left=9, right=0, first=2), WAVES, 4, {}, SMALL | SINK),
}


def attention(mask, positions="NONE", block_size=Blocks.NONE, **kwargs):
    """A layer with dropout, and weights that make attention far from uniform."""
    layer = MultiHeadAttention(
        model_dims=M,
        num_heads=N,
        head_dim=D,
        mask=mask,
        positions=PositionKind[positions] if isinstance(positions, str) else positions,
        num_buckets=8,
        max_distance=16,
        block_size=block_size,
        **{"dropout_rate": 0.3, **kwargs},
    )
    rng = np.random.default_rng(1)
    theta = layer.weights().map(
        lambda s: tf.constant(rng.standard_normal(s.shape), tf.float32)
    )
    return layer, theta


def gradients(layer, theta, x, inputs, dtype=tf.float32, jit=True) -> dict:
    """The output, and gradients by weights, input and memory."""

    def step(theta, x, inputs):
        ctx = Context(mode=Mode.TRAIN, key=key_from_seed(0), activation_dtype=dtype)
        sources = {"theta": theta, "x": x, "memory": inputs.get("memory", ())}
        with tf.GradientTape() as tape:
            tape.watch(sources)
            y = layer.fprop(ctx, theta, x, **inputs)
            loss = tf.reduce_sum(tf.sin(tf.cast(y, tf.float32)))
        return {"y": y, **tape.gradient(loss, sources)}

    if jit:
        step = tf.function(step, jit_compile=True, autograph=False)
    results = step(
        theta, tf.constant(x), {k: tf.constant(v) for k, v in inputs.items()}
    )
    return tf.nest.map_structure(
        lambda t: tf.cast(t, tf.float32).numpy(), tf.nest.flatten(results)
    )


def assert_close(got, want, tolerance=1e-5):
    # A bias of keys has no gradient but the rounding of what it sums.
    least = 0.1 * max(np.abs(b).max() for b in want)
    for a, b in zip(got, want, strict=True):
        scale = max(1.0, least, np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_all_pairs(name):
    mask, positions, size, inputs, *kwargs = CASES[name]
    kwargs = kwargs[0] if kwargs else {}
    (in_blocks, theta), (at_once, _) = (
        attention(mask, positions, of, **kwargs) for of in (size, Blocks.NONE)
    )
    # With weights twice as large float32 itself is off by up to 2.7e-5 of the largest
    # element, as dropout falls (five draws of two cases), with these by 1e-6.
    theta = theta.map(lambda weight: 0.5 * weight)
    got, want = (gradients(of, theta, X, inputs) for of in (in_blocks, at_once))
    assert_close(got, want)


def test_queries_that_see_no_key_stay_finite_and_reach_nobody():
    """They get a mean of values: of those that are computed, so it is another here."""
    paddings = np.zeros([B, S], np.float32)
    paddings[:, :9] = 1
    seen = (np.arange(S) >= 9)[None, :, None]
    results = []
    for size in (4, Blocks.NONE):
        layer, theta = attention(MaskKind.CAUSAL, "NONE", size)
        everything = gradients(layer, theta, X, {"paddings": paddings})
        assert all(np.isfinite(t).all() for t in everything)
        results.append(everything[-1] * seen)
    assert_close(results[:1], results[1:])


def test_eagerly_too():
    mask, positions, size, inputs = CASES["full_buckets_padded"]
    got = gradients(*attention(mask, positions, size), X, inputs, jit=False)
    want = gradients(*attention(mask, positions), X, inputs, jit=False)
    assert_close(got, want)


@pytest.mark.parametrize("logits_dtype", [tf.float32, None])
def test_sixteen_bit_activations_are_nearly_as_exact_as_at_once(logits_dtype):
    """The blocks' sums are float32."""
    in_blocks, at_once = sixteen_bit_errors("NONE", logits_dtype=logits_dtype)
    assert np.all(in_blocks < 1.2 * at_once)


@pytest.mark.parametrize("positions", [VECTORS, WAVES], ids=["vectors", "waves"])
def test_so_they_are_with_vectors_and_sinks(positions):
    """By the median: errors of the few elements that some tensors have are chance."""
    in_blocks, at_once = sixteen_bit_errors(positions, sink=Sink.LEARNED)
    assert np.median(in_blocks / at_once) < 1.2


def test_a_sinks_gradient_is_exact_where_values_have_a_part_in_common():
    """It is not of outputs, which 16 bits round alike for many queries."""
    S, N, D = 64, 16, 8
    rng = np.random.default_rng(0)
    q, k, v, dy = rng.standard_normal([4, 2, S, N, D])
    inputs = [tf.constant(t, tf.bfloat16) for t in (q, k / 10, v + 3, dy)]
    tokens = Tokens(index=tf.range(S)[None])
    mask = MaskKind.CAUSAL
    logits = Logits(mask=mask, queries=tokens, keys=tokens, dtype=tf.float32)

    @tf.function(jit_compile=True, autograph=False)
    def gradient(q, k, v, dy, block_size):
        sink = tf.zeros([N])
        with tf.GradientTape() as tape:
            tape.watch(sink)
            y = weighted_sums(
                Context(activation_dtype=q.dtype),
                logits,
                q,
                k,
                v,
                Learned(sink=sink),
                dropout=Dropout(rate=0.0),
                block_size=block_size,
                kernel=Kernel.NONE,
                is_step=False,
            )
            loss = tf.reduce_sum(tf.cast(y * dy, tf.float32))
        return tape.gradient(loss, sink)

    exact = gradient(*(tf.cast(t, tf.float32) for t in inputs), Blocks.NONE)
    in_blocks, at_once = (
        np.abs(gradient(*inputs, size) - exact).mean() for size in (16, Blocks.NONE)
    )
    assert in_blocks < 0.5 * at_once


def sixteen_bit_errors(positions, **kwargs):
    """The mean error of each tensor, in blocks and at once."""
    exact = gradients(*attention(MaskKind.CAUSAL, positions, **kwargs), X, {})
    errors = []
    for size in (8, Blocks.NONE):
        layer = attention(MaskKind.CAUSAL, positions, size, **kwargs)
        results = gradients(*layer, X, {}, tf.bfloat16)
        errors.append(
            [np.abs(a - b).mean() for a, b in zip(results, exact, strict=True)]
        )
    return np.array(errors)


@pytest.mark.parametrize("size", [4, Blocks.NONE])
@pytest.mark.parametrize(
    "mask", [NearMask(left=2, right=0, first=1), PrefixMask(length=3)]
)
def test_masks_that_read_positions_are_refused_where_segments_have_none(mask, size):
    layer, theta = attention(mask, block_size=size)
    with pytest.raises(ValueError, match=r"Mask\(.*give segment_positions too"):
        ids = tf.constant(SEGMENTS)
        layer.fprop(Context(), theta, tf.constant(X), segment_ids=ids)


RULES = [
    *MaskKind,
    NearMask(left=0, right=0),
    NearMask(left=9, right=0),
    NearMask(left=3, right=2),
    NearMask(left=None, right=5),
    NearMask(left=6, right=0, first=3),
    NearMask(left=2, right=1, first=17),
    PrefixMask(length=0),
    PrefixMask(length=13),
]


@pytest.mark.parametrize("mask", RULES, ids=str)
@pytest.mark.parametrize("size", [1, 5, 8, 64])
def test_pairs_of_blocks_out_of_sight_are_left_out(mask, size):
    cut = Cut.of(S, size)
    pairs = Pairs.of(cut, cut, rule_of(mask), has_gaps=True)
    tokens = Tokens(index=tf.range(S)[None])
    visible = visibility(mask, tokens, tokens)
    visible = np.ones([S, S]) if visible is None else visible[0].numpy()
    visible = np.broadcast_to(visible, [S, S])
    seen = {(i // cut.size, j // cut.size) for i, j in np.argwhere(visible)}
    computed = {(i, j) for i in range(cut.count) for j in pairs.by_row()[i]}
    assert seen <= computed and len(computed) == pairs.count
    if not isinstance(mask, PrefixMask):
        assert seen == computed


def test_blocks_are_as_equal_as_can_be():
    assert Cut.of(1100, 512) == Cut(1100, 3, 367)
    assert Cut.of(1024, 512) == Cut(1024, 2, 512)
    assert Cut.of(5, 512) == Cut(5, 1, 5)


@pytest.mark.parametrize("first", [0, 4])
def test_pairs_come_once_each(first):
    queries, keys = Cut.of(37, 5), Cut.of(37, 8)
    mask = NearMask(left=9, right=0, first=first)
    pairs = Pairs.of(queries, keys, mask, has_gaps=True)

    @tf.function(jit_compile=True, autograph=False)
    def count():
        seen = tf.zeros([queries.count, keys.count], tf.int32)

        def body(i, j, seen):
            row = tf.one_hot(i, queries.count, dtype=tf.int32)
            return [seen + row[:, None] * tf.one_hot(j, keys.count, dtype=tf.int32)]

        return pairs.loop(body, [seen])[0]

    expected = np.zeros([queries.count, keys.count])
    for i, blocks in enumerate(pairs.by_row()):
        expected[i, blocks] = 1
    assert expected.sum() == pairs.count
    np.testing.assert_array_equal(count(), expected)


@pytest.mark.parametrize(
    ("mask", "kwargs"),
    [
        (NearMask(left=3, right=0), {}),
        (PrefixMask(length=4), {}),
        (MaskKind.CAUSAL, GROUPED | CAPPED | NORMED | {"positions": "ROTARY"}),
        (NearMask(left=3, right=0, first=2), SINK),
        (MaskKind.CAUSAL, {"positions": VECTORS, "num_kv_heads": 1}),
        (MaskKind.CAUSAL, {"positions": WAVES}),
    ],
)
def test_token_by_token_equals_the_whole_sequence(mask, kwargs):
    kwargs = {"positions": "RELATIVE", "dropout_rate": 0.0, **kwargs}
    layer, theta = attention(mask, **kwargs)

    @tf.function(jit_compile=True, autograph=False)
    def steps():
        cache, out = layer.init_cache(Context(), B, S), []
        for t in range(S):
            y, cache = layer.step(
                Context(), theta, tf.constant(X[:, t : t + 1]), cache, tf.constant(t)
            )
            out.append(y)
        return tf.concat(out, axis=1)

    whole = layer.fprop(Context(), theta, tf.constant(X))
    # Of a prefix later tokens are not there yet.
    start = 4 if isinstance(mask, PrefixMask) else 0
    np.testing.assert_allclose(
        steps()[:, start:], whole[:, start:], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"block_size": 0},
            r"block_size is 0; it must be a whole number of at least 1",
        ),
        ({"block_size": "auto"}, r"block_size is 'auto'; it must be"),
        (
            {"mask": "causal"},
            r"mask is 'causal'; it must be one of .*CAUSAL.*@NearMask",
        ),
    ],
)
def test_bad_settings_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=f"MultiHeadAttention.{message}"):
        attention(**{"mask": MaskKind.CAUSAL, **kwargs})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NearMask(left=-1), r"NearMask\.left is -1"),
        (lambda: NearMask(right=-1), r"NearMask\.right is -1"),
        (lambda: NearMask(first=-1), r"NearMask\.first is -1"),
        (lambda: PrefixMask(length=-1), r"PrefixMask\.length is -1"),
    ],
)
def test_bad_rules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_sequence_split_between_devices_is_not_cut_in_blocks():
    plan = ShardingPlan(mesh_shape=(2, 4), activations={"sequence": "Y"})
    layer, theta = attention(MaskKind.CAUSAL, "NONE", 8, dropout_rate=0.0)
    with pytest.raises(ValueError, match="plan splits 'sequence'.*Blocks.AUTO"):
        layer.fprop(Context(plan=plan), theta, tf.constant(X))
