"""Attention to another sequence, and token by token with a cache."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.layers.attention.mask_rules import MaskKind
from meshwright.layers.attention.positions import PositionKind
from tests.layers.attention.test_attention import (
    B,
    D,
    M,
    S,
    attention,
    from_outside,
    inputs,
    run,
)

T = 7


def memory() -> np.ndarray:
    return np.random.default_rng(3).standard_normal([B, T, M]).astype(np.float32)


def crosses():
    return attention(mask=MaskKind.FULL)


def reference(theta, x, memory, visible) -> np.ndarray:
    """Cross-attention by einsums in float64; visible [B, S, T]."""
    w = theta.map(lambda t: t.numpy().astype(np.float64))
    q = np.einsum("bsm,mnd->bsnd", x, w.w_q)
    k = np.einsum("btm,mnd->btnd", memory, w.w_k)
    v = np.einsum("btm,mnd->btnd", memory, w.w_v)
    score = np.exp(np.einsum("bsnd,btnd->bnst", q, k) / np.sqrt(D))
    score = score * visible[:, None]
    score /= score.sum(-1, keepdims=True)
    return np.einsum("bnst,btnd,ndm->bsm", score, v, w.w_o)


def test_a_memory_is_attended_to_by_segment():
    layer, theta = crosses()
    ours = np.repeat([[1, 2]], [8, 4], axis=1).astype(np.int32).repeat(B, axis=0)
    theirs = np.repeat([[1, 2, 0]], [2, 4, 1], axis=1).astype(np.int32)
    theirs = theirs.repeat(B, axis=0)
    visible = ours[:, :, None] == theirs[:, None, :]
    y = run(
        layer,
        theta,
        inputs(),
        memory=memory(),
        segment_ids=ours,
        memory_segment_ids=theirs,
    )
    expected = reference(theta, inputs(), memory(), visible)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_what_is_remembered_is_what_is_attended_to():
    layer, theta = crosses()
    paddings = np.zeros([B, T], np.int32)
    paddings[1, 4:] = 1
    unlimited = run(layer, theta, inputs(), memory=memory(), paddings=paddings)
    expected = reference(theta, inputs(), memory(), 1 - paddings[:, None].repeat(S, 1))
    np.testing.assert_allclose(unlimited, expected, rtol=1e-4, atol=1e-5)
    cache = layer.encode_memory(Context(), theta, tf.constant(memory()))
    y = layer.attend_memory(Context(), theta, tf.constant(inputs()), cache, paddings)
    np.testing.assert_allclose(y, unlimited, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("positions", PositionKind)
@pytest.mark.parametrize("use_bias", [False, True])
def test_token_by_token_equals_the_whole_sequence(positions, use_bias):
    layer, theta = attention(positions=positions, use_bias=use_bias)
    x = tf.constant(inputs())

    @tf.function(jit_compile=True, autograph=False)
    def steps():
        cache, out = layer.init_cache(Context(), B, S), []
        for t in range(S):
            position = tf.constant(t)
            token = x[:, t : t + 1]
            more = from_outside(layer)
            y, cache = layer.step(Context(), theta, token, cache, position, **more)
            out.append(y)
        return tf.concat(out, axis=1)

    np.testing.assert_allclose(
        steps(), run(layer, theta, inputs()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    "kwargs", [{"mask": MaskKind.CAUSAL}, {"positions": PositionKind.ROTARY}]
)
def test_a_mask_or_positions_for_a_memory_are_refused(kwargs):
    layer, theta = attention(**{"mask": MaskKind.FULL, **kwargs})
    with pytest.raises(
        ValueError, match="attends to a memory.*mask=FULL and positions"
    ):
        run(layer, theta, inputs(), memory=memory())


@pytest.mark.parametrize("given", ["segment_ids", "memory_segment_ids"])
def test_segments_of_one_side_alone_are_refused(given):
    layer, theta = attention(mask=MaskKind.FULL)
    ids = np.ones([B, T if "memory" in given else S], np.int32)
    with pytest.raises(ValueError, match="of both the tokens and the memory, or"):
        run(layer, theta, inputs(), memory=memory(), **{given: ids})
