"""The loss of predicted tokens.

Dims: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """Sums over tokens, float32 scalars.

    Args:
      nats: the negative log likelihood of the labels.
      total: what is minimized: `nats`, smoothed, and the z-loss.
    """

    nats: tf.Tensor
    total: tf.Tensor


def token_loss(
    logits: tf.Tensor,
    labels: tf.Tensor,
    weights: tf.Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> TokenLoss:
    """The loss of all tokens.

    Args:
      logits: [B, S, V].
      labels: int32 [B, S], in [0, V).
      weights: [B, S] factors of the tokens' losses, such as 0 for padding.
      label_smoothing: the share of the loss in which all tokens are equally right.
      z_loss: the factor of the squared logarithm of the softmax's denominator, which
        keeps logits from growing (Chowdhery et al. 2022, section 5: 1e-4).
    """
    weights = tf.cast(weights, tf.float32)
    exact = cross_entropy(logits, labels, weights=weights)
    nats = total = tf.reduce_sum(exact)
    if label_smoothing or z_loss:
        logits = tf.cast(logits, tf.float32)
        log_sums = tf.reduce_logsumexp(logits, -1)
    if label_smoothing:
        even = log_sums - tf.reduce_mean(logits, -1)
        total = (1 - label_smoothing) * total
        total += label_smoothing * tf.reduce_sum(even * weights)
    if z_loss:
        total += z_loss * tf.reduce_sum(tf.square(log_sums) * weights)
    return TokenLoss(nats=nats, total=total)


def cross_entropy(
    logits: tf.Tensor, labels: tf.Tensor, *, weights: tf.Tensor | None = None
) -> tf.Tensor:
    """The loss of each token, in nats.

    Written as a logsumexp minus the label's logit, picked by a one-hot sum: it
    partitions over a split vocabulary, and is faster on CPU than TF's fused op.

    Args:
      logits: [B, S, V].
      labels: int32 [B, S], in [0, V).
      weights: [B, S] factors of the losses, such as 0 for padding.

    Returns:
      float32 [B, S].
    """
    logits = tf.cast(logits, tf.float32)
    one_hot = tf.one_hot(labels, logits.shape[-1], dtype=tf.float32)
    picked = tf.reduce_sum(logits * one_hot, axis=-1)
    losses = tf.reduce_logsumexp(logits, axis=-1) - picked
    return losses if weights is None else losses * tf.cast(weights, tf.float32)
