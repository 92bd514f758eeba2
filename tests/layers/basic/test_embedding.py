"""Embedding and output layers against numpy."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.layers.basic.embedding import (
    Lookup,
    Softmax,
    SoftmaxKind,
    TokenEmbedding,
)
from tests.framework.partial.partial_programs import compiled, sent

RNG = np.random.default_rng(0)
V, M = 11, 16


def embedding(lookup=Lookup.GATHER, softmax=SoftmaxKind.SEPARATE):
    layer = TokenEmbedding(vocab_size=V, model_dims=M, lookup=lookup, softmax=softmax)
    return layer, initialize(layer.weights(), key_from_seed(0))


@pytest.mark.parametrize(
    ("softmax", "scale"), [(SoftmaxKind.SEPARATE, 1), (SoftmaxKind.SHARED, 4)]
)
@pytest.mark.parametrize("lookup", Lookup)
def test_lookup_picks_rows(lookup, softmax, scale):
    layer, theta = embedding(lookup, softmax)
    ids = RNG.integers(0, V, [2, 5])
    with tf.GradientTape() as tape:
        tape.watch(theta)
        x = layer.fprop(Context(), theta, tf.constant(ids, tf.int32))
    np.testing.assert_allclose(x, scale * theta.table.numpy()[ids], rtol=1e-6)
    counts = np.bincount(ids.ravel(), minlength=V)
    expected = np.tile(scale * counts[:, None], [1, M])
    np.testing.assert_allclose(tape.gradient(x, theta.table), expected)


def test_rows_may_be_scaled_otherwise():
    layer, theta = embedding(softmax=SoftmaxKind.SHARED)
    layer = dataclasses.replace(layer, input_scale=1.0)
    x = layer.fprop(Context(), theta, tf.constant([[3]]))
    np.testing.assert_array_equal(x[0, 0], theta.table[3])
    with pytest.raises(ValueError, match="input_scale is 0; it must be a number above"):
        dataclasses.replace(layer, input_scale=0)


@pytest.mark.parametrize("lookup", Lookup)
@pytest.mark.parametrize("lengths", [(5, 5), (5, 3)])
def test_several_lookups_are_those_of_each(lengths, lookup):
    layer, theta = embedding(lookup, SoftmaxKind.SHARED)
    ids = [tf.constant(RNG.integers(0, V, [2, n]), tf.int32) for n in lengths]

    def summed(*vectors):
        return tf.add_n([tf.reduce_sum(tf.square(x)) for x in vectors])

    with tf.GradientTape(persistent=True) as tape:
        tape.watch(theta)
        each = [layer.fprop(Context(), theta, i) for i in ids]
        together = layer.fprop_each(Context(), theta, ids)
        losses = summed(*each), summed(*together)
    for x, y in zip(together, each, strict=True):
        np.testing.assert_array_equal(x, y)
    want, got = (tf.convert_to_tensor(tape.gradient(y, theta.table)) for y in losses)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_no_device_collects_a_table_whose_vocabulary_is_split():
    """Rows are added up, [4, 5, 16] of a device; and the gradient of its part."""
    layer = TokenEmbedding(vocab_size=64, model_dims=M)
    plan = ShardingPlan(
        mesh_axes=("dp", "tp"), mesh_shape=(2, 2), activations={"batch": "dp"}
    )

    def gradient(table, ids):
        with tf.GradientTape() as tape:
            tape.watch(table)
            x = layer.fprop(Context(plan=plan), NestedMap(table=table), ids)
            loss = tf.reduce_sum(tf.square(x))
        return tape.gradient(loss, table)

    for program in compiled(gradient, "[64@tp,16]", "s32[8@dp,5]"):
        sends = sent(program)
        assert "all-reduce tp [4,5,16]" in sends or "all-reduce tp [20,16]" in sends
        assert not [send for send in sends if "all-gather" in send]


@pytest.mark.parametrize("lengths,count", [((5, 5), 1), ((5, 3), 2)])
def test_the_gradient_of_lookups_that_are_alike_is_written_once(
    lengths, count, hlo_text
):
    layer, theta = embedding(Lookup.GATHER)
    ids = [tf.TensorSpec([2, n], tf.int32) for n in lengths]

    def gradient(table, *ids):
        with tf.GradientTape() as tape:
            tape.watch(table)
            vectors = layer.fprop_each(Context(), NestedMap(table=table), ids)
            loss = tf.add_n([tf.reduce_sum(tf.square(x)) for x in vectors])
        return tape.gradient(loss, table)

    table = tf.TensorSpec(theta.table.shape)
    assert hlo_text(gradient, table, *ids).count(" scatter(") == count


@pytest.mark.parametrize("lookup", Lookup)
def test_a_lookup_is_a_gather_or_a_product(lookup, hlo_text):
    layer, theta = embedding(lookup)
    specs = theta.map(tf.TensorSpec.from_tensor), tf.TensorSpec([2, 5], tf.int32)
    hlo = hlo_text(lambda theta, ids: layer.fprop(Context(), theta, ids), *specs)
    gathers = lookup is Lookup.GATHER
    assert (" dot(" in hlo, " gather(" in hlo) == (not gathers, gathers)


def test_vectors_have_unit_variance_however_the_table_is_used():
    for softmax, stddev in ((SoftmaxKind.SEPARATE, 1), (SoftmaxKind.SHARED, 1 / 16)):
        layer = TokenEmbedding(vocab_size=512, model_dims=256, softmax=softmax)
        theta = initialize(layer.weights(), key_from_seed(0))
        np.testing.assert_allclose(np.std(theta.table), stddev, rtol=0.02)
        x = layer.fprop(Context(), theta, tf.range(512)[None])
        np.testing.assert_allclose(np.std(x), 1, rtol=0.02)


def test_logits_of_a_shared_table_and_of_a_softmax_layer():
    x = RNG.standard_normal([2, 5, M]).astype(np.float32)
    layer, theta = embedding(softmax=SoftmaxKind.SHARED)
    logits = layer.attend(Context(), theta, tf.constant(x))
    np.testing.assert_allclose(logits, x @ theta.table.numpy().T, atol=1e-5)
    layer = Softmax(model_dims=M, vocab_size=V)
    theta = initialize(layer.weights(), key_from_seed(0))
    logits = layer.fprop(Context(), theta, tf.constant(x))
    np.testing.assert_allclose(logits, x @ theta.kernel.numpy(), atol=1e-5)


def test_logits_of_a_table_that_is_not_shared_are_refused():
    layer, theta = embedding()
    with pytest.raises(ValueError, match="'emb' cannot compute logits.*softmax=SHARED"):
        layer.attend(Context(path="emb"), theta, tf.zeros([1, 1, M]))
