"""The CTC loss on a mesh, cut to a bucket, against TF's kernel on one device."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import Mode
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.tasks.speech.speech import ctc_loss
from meshwright.tasks.speech.speech_buckets import loss_by_length
from meshwright.tasks.speech.speech_text import BLANK_ID
from meshwright.tasks.task import TaskLoss

B, S, L, V = 8, 20, 5, 6
BUCKETS = (12, S)
PADDING = 2
PLAN = ShardingPlan(mesh_axes=("X",), mesh_shape=(8,), activations={"batch": "X"})
WEIGHTS = np.arange(1, 1 + B, dtype=np.float32)
"""Of the rows, for their gradients to differ."""


def batch(longest):
    """Some rows of repeats, one of padding; beyond the counts labels mean nothing."""
    rng = np.random.default_rng(longest)
    counts = rng.integers(1, L + 1, B).astype(np.int32)
    labels = rng.integers(1, V, [B, L]).astype(np.int32)
    labels[1] = 3
    frames = rng.integers(2 * L, longest + 1, B).astype(np.int32)
    frames[0] = longest
    frames[PADDING], counts[PADDING] = 0, 0
    logits = 3 * rng.standard_normal([B, S, V]).astype(np.float32)
    return NestedMap(logits=logits, frames=frames, labels=labels, label_counts=counts)


def loss_and_gradient(logits, frames, labels, label_counts):
    with tf.GradientTape() as tape:
        tape.watch(logits)

        def cut(theta, length):
            near = PLAN.annotate_activation(
                theta.logits[:, :length], ("batch", "sequence", "vocab"), "logits"
            )
            losses = ctc_loss(near, frames, labels, label_counts)
            loss = tf.reduce_sum(losses * WEIGHTS)
            return TaskLoss(loss=loss, sums=NestedMap(losses=losses))

        theta = NestedMap(logits=logits)
        result = loss_by_length(cut, Mode.TRAIN, theta, frames, BUCKETS)
    return {
        "losses": result.sums.losses,
        "gradient": tape.gradient(result.loss, logits),
    }


@pytest.fixture(scope="module", params=Partitioner, ids=str)
def program(request):
    def shardings(spec):
        return PLAN.activation_sharding(("batch", *"ab"[: len(spec.shape) - 1]), "in")

    specs = batch(S).map(lambda x: tf.TensorSpec(x.shape, x.dtype))
    return compile_program(
        lambda batch: loss_and_gradient(**batch),
        [specs],
        PLAN.mesh,
        in_shardings=[specs.map(shardings)],
        partitioner=request.param,
    )


def by_tf(logits, frames, labels, label_counts):
    """Its CPU kernel, which takes no rows of padding."""
    labels = np.where(np.arange(L) < label_counts[:, None], labels, BLANK_ID)
    logits = tf.constant(logits)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        losses = tf.nn.ctc_loss(
            tf.sparse.from_dense(labels),
            logits,
            None,
            frames,
            logits_time_major=False,
            blank_index=BLANK_ID,
        )
    return losses.numpy(), tape.gradient(losses, logits).numpy()


@pytest.mark.parametrize("longest", BUCKETS)
def test_eight_devices_compute_what_tf_does_on_one(program, longest):
    args = batch(longest)
    result = program.unshard(program(args))
    real = np.arange(B) != PADDING
    losses, gradient = by_tf(**args.map(lambda x: x[real]))
    np.testing.assert_allclose(result["losses"][real], losses, rtol=1e-5)
    found_gradient = result["gradient"][real] / WEIGHTS[real, None, None]
    np.testing.assert_allclose(found_gradient, gradient, rtol=0, atol=1e-5)
    assert result["losses"][PADDING] == 0
    assert not np.any(result["gradient"][PADDING])


def test_of_a_batch_no_logits_leave_their_device(program):
    """Only a number for each pair of neighbouring labels."""
    sent = program.collectives()
    assert {c.kind for c in sent} == {"all-reduce", "all-gather"}
    gathered = {c.bytes for c in sent if c.kind == "all-gather"}
    pairs = B * (L - 1)
    assert gathered == {4 * pairs}


def test_a_loss_of_bfloat16_has_the_digits_of_float32():
    args = batch(S)
    rounded = tf.cast(args.logits, tf.bfloat16)
    losses = ctc_loss(rounded, args.frames, args.labels, args.label_counts)
    assert losses.dtype == tf.float32
    exact = ctc_loss(
        tf.cast(rounded, tf.float32), args.frames, args.labels, args.label_counts
    )
    np.testing.assert_array_equal(losses, exact)
