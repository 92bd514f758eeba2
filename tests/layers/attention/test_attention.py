"""Attention against Lingvo and numpy; who sees whom; bad input."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Mode
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.attention.mask_rules import MaskKind
from meshwright.layers.attention.positions import LinearScaling, PositionKind

DATA = pathlib.Path(__file__).parents[2] / "data"
B, S, M, N, D = 2, 12, 6, 2, 4


def attention(**kwargs):
    """A layer and weights large enough that attention is far from uniform."""
    layer = MultiHeadAttention(model_dims=M, num_heads=N, head_dim=D, **kwargs)
    rng = np.random.default_rng(1)
    theta = layer.weights().map(
        lambda s: tf.constant(rng.standard_normal(s.shape), tf.float32)
    )
    return layer, theta


def inputs(B: int = B, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal([B, S, M]).astype(np.float32)


def from_outside(layer) -> dict:
    """What the layer is given besides its input."""
    if layer.positions is not PositionKind.SHARED:
        return {}
    return {"relative_bias": np.random.default_rng(2).standard_normal([32, N])}


def run(layer, theta, x, ctx=None, **kwargs) -> np.ndarray:
    kwargs = {k: tf.constant(v) for k, v in (from_outside(layer) | kwargs).items()}
    return layer.fprop(ctx or Context(), theta, tf.constant(x), **kwargs).numpy()


def reference(theta, x, visible) -> np.ndarray:
    """Attention by loops over everything; visible [B, S, S]."""
    w = theta.map(lambda t: t.numpy().astype(np.float64))
    out = np.zeros(x.shape)
    for b, s, n in np.ndindex(len(x), S, N):
        q = x[b, s] @ w.w_q[:, n]
        seen = x[b, visible[b, s]]
        score = np.exp(seen @ w.w_k[:, n] @ q / np.sqrt(D))
        out[b, s] += score / score.sum() @ (seen @ w.w_v[:, n]) @ w.w_o[n]
    return out


def test_reproduces_lingvo():
    golden = dict(np.load(DATA / "atten_mha.npz"))

    def var(name: str) -> np.ndarray:
        return golden[f"var/atten/{name}/var"]

    # Lingvo also scales each feature of the queries by a softplus, 1 at the start;
    # in the weights, it comes to the same.
    scale = np.logaddexp(0, var("per_dim_scale/per_dim_scale")) / np.log(2)
    theta = NestedMap(
        w_q=var("query/w") * scale,
        b_q=var("query/b") * scale,
        w_k=var("key/w"),
        b_k=var("key/b"),
        w_v=var("value/w"),
        b_v=var("value/b"),
        w_o=var("post/w").transpose(1, 2, 0),
        b_o=var("post/b"),
    )
    layer = MultiHeadAttention(
        model_dims=8, num_heads=2, head_dim=4, mask=MaskKind.FULL, use_bias=True
    )
    y = run(
        layer, theta.map(tf.constant), golden["in/x"], paddings=golden["in/paddings"]
    )
    np.testing.assert_allclose(y, golden["out/y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", MaskKind)
def test_each_mask_against_loops(mask):
    layer, theta = attention(mask=mask)
    index = np.arange(S)
    visible = np.ones([B, S, S], bool)
    if mask is MaskKind.CAUSAL:
        visible &= index[:, None] >= index[None, :]
    segments = np.stack([index // 5, index // 7]).astype(np.int32)
    visible &= segments[:, :, None] == segments[:, None, :]
    paddings = np.zeros([B, S], np.float32)
    paddings[:, [3, 9]] = 1
    visible &= paddings[:, None, :] == 0
    y = run(layer, theta, inputs(), segment_ids=segments, paddings=paddings)
    expected = reference(theta, inputs(), visible)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", PositionKind)
def test_the_future_does_not_reach_the_past(positions):
    layer, theta = attention(positions=positions)
    x, changed = inputs(), inputs()
    changed[:, 7:] += 1
    before, after = run(layer, theta, x), run(layer, theta, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.all(np.any(before[:, 7:] != after[:, 7:], axis=-1))


@pytest.mark.parametrize("mask", MaskKind)
@pytest.mark.parametrize("positions", PositionKind)
def test_packed_segments_equal_separate_sequences(positions, mask):
    layer, theta = attention(positions=positions, mask=mask)
    x = inputs(B=1)
    segments = np.repeat([[1, 2, 3]], [3, 4, 5], axis=1).astype(np.int32)
    places = np.concatenate([np.arange(n) for n in (3, 4, 5)]).astype(np.int32)[None]
    packed = run(layer, theta, x, segment_ids=segments, segment_positions=places)
    alone = [run(layer, theta, part) for part in np.split(x, [3, 7], axis=1)]
    alone = np.concatenate(alone, axis=1)
    np.testing.assert_allclose(packed, alone, rtol=1e-4, atol=1e-5)
    by_index = run(layer, theta, x, segment_ids=segments)
    np.testing.assert_allclose(by_index, alone, rtol=1e-4, atol=1e-5)


def test_padded_keys_change_nothing_and_all_padding_stays_finite():
    layer, theta = attention(mask=MaskKind.FULL)
    paddings = np.zeros([B, S], np.int32)
    paddings[0, 8:] = 1
    paddings[1, :] = 1
    x, changed = inputs(), inputs()
    changed[0, 8:] += 1
    before = run(layer, theta, x, paddings=paddings)
    after = run(layer, theta, changed, paddings=paddings)
    np.testing.assert_array_equal(before[0, :8], after[0, :8])
    assert np.isfinite(before).all()


@pytest.mark.parametrize("positions", [PositionKind.ROTARY, PositionKind.RELATIVE])
def test_positions_tell_permuted_tokens_apart(positions):
    x = inputs()
    swapped = x[:, [*range(S - 3), S - 2, S - 3, S - 1]]
    for kind, differs in ((PositionKind.NONE, False), (positions, True)):
        layer, theta = attention(positions=kind, mask=MaskKind.FULL)
        last = run(layer, theta, x)[:, -1], run(layer, theta, swapped)[:, -1]
        assert (np.abs(last[0] - last[1]).max() > 1e-2) == differs


def test_dropout_is_of_probabilities_in_training_only():
    layer, theta = attention(dropout_rate=0.5)
    plain, _ = attention()
    x = inputs()
    np.testing.assert_array_equal(run(layer, theta, x), run(plain, theta, x))
    ctx = Context(mode=Mode.TRAIN, key=key_from_seed(0))
    dropped = run(layer, theta, x, ctx)
    np.testing.assert_array_equal(dropped, run(layer, theta, x, ctx))
    # The first token sees itself alone: each head is kept, doubled, or dropped.
    value = np.einsum("bm,mnd,nde->nbe", x[:, 0], theta.w_v, theta.w_o)
    for b in range(B):
        sums = [c0 * value[0, b] + c1 * value[1, b] for c0 in (0, 2) for c1 in (0, 2)]
        assert min(np.abs(dropped[b, 0] - total).max() for total in sums) < 1e-5


def test_an_odd_head_dim_is_refused_for_rotary_positions():
    with pytest.raises(ValueError, match="head_dim is 3: make it even"):
        MultiHeadAttention(
            model_dims=M, num_heads=N, head_dim=3, positions=PositionKind.ROTARY
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dropout_rate", -1),
        ("model_dims", 0),
        ("num_heads", 0),
        ("head_dim", -4),
        ("rotary_base", 0),
        ("num_buckets", 0),
        ("max_distance", 0),
    ],
)
def test_a_number_out_of_range_is_refused(field, value):
    sizes = {"model_dims": M, "num_heads": N, "head_dim": 4}
    with pytest.raises(ValueError, match=rf"Attention\.{field} is {value}; it must be"):
        MultiHeadAttention(**sizes | {field: value})


@pytest.mark.parametrize("name", ["paddings", "segment_ids", "segment_positions"])
def test_what_has_no_number_for_each_token_is_refused(name):
    layer, theta = attention(positions=PositionKind.ROTARY)
    given = {name: np.zeros([B, S - 1], np.int32)}
    message = rf"for inputs \(2, 12, 6\) {name} must be \(2, 12\).* but is \(2, 11\)"
    with pytest.raises(ValueError, match=message):
        run(layer, theta, inputs(), **given)


def test_a_scaling_that_changes_no_positions_is_refused():
    with pytest.raises(ValueError, match="rotary_scaling is Linear.*PositionKind.NONE"):
        attention(rotary_scaling=LinearScaling(factor=2.0))


@pytest.mark.parametrize("positions", [PositionKind.NONE, PositionKind.RELATIVE])
def test_logits_may_have_the_activations_dtype(positions):
    x, ids = inputs(), np.repeat([[1, 2]], S // 2, axis=1).repeat(B, 0).astype(np.int32)
    theta = attention(positions=positions)[1]
    outputs = {}
    for dtype in (tf.float32, None, tf.bfloat16):
        layer, _ = attention(positions=positions, logits_dtype=dtype)
        ctx = Context(activation_dtype=tf.bfloat16)
        y = layer.fprop(ctx, theta, tf.constant(x), segment_ids=tf.constant(ids))
        outputs[dtype] = tf.cast(y, tf.float32).numpy()
    np.testing.assert_array_equal(outputs[None], outputs[tf.bfloat16])
    error = np.abs(outputs[None] - outputs[tf.float32]).max()
    assert 0 < error < 0.05 * np.abs(outputs[tf.float32]).max()
    # In float32 the two are one.
    alike = [
        run(attention(positions=positions, logits_dtype=dtype)[0], theta, x)
        for dtype in (None, tf.float32)
    ]
    np.testing.assert_array_equal(*alike)


def test_a_dtype_of_logits_that_is_none_is_refused():
    with pytest.raises(ValueError, match="MultiHeadAttention.logits_dtype is 16"):
        attention(logits_dtype=16)
