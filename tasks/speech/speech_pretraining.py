"""Learning from sound alone: masked frames are to be identified.

This is wav2vec 2.0 (Baevski et al. 2020) without its quantizer, as in BigSSL (Zhang et
al. 2021): targets are linear in the subsampled features.

Dims: B batch, T frames, S frames after subsampling, M model, P projected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling import random
from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.initializers import FanIn, Normal
from meshwright.framework.modeling.layer import Context, Layer, Mode, WeightSpec
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.basic.linear import BSM, contract, spread
from meshwright.tasks.speech.speech_task import SpeechTask
from meshwright.tasks.task import TaskLoss

# The similarity of frames that are no candidates.
_NEVER = -1e9


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedPrediction(Layer):
    """Masks spans of frames, and identifies each masked frame among the masked ones.

    Args:
      model_dims: M.
      projected_dims: P, the size in which contexts and targets are compared.
      start_share: each frame begins a span with this probability.
      span: number of frames of a span; spans may overlap.
      temperature: divides cosine similarities.

    Raises:
      ValueError: a number is out of range.
    """

    model_dims: int = bounded(at_least=1)
    projected_dims: int = bounded(256, at_least=1)
    start_share: float = bounded(0.065, above=0, below=1)
    span: int = bounded(10, at_least=1)
    temperature: float = bounded(0.1, above=0)

    def weights(self) -> NestedMap:
        projection = WeightSpec(
            shape=(self.model_dims, self.projected_dims),
            dims=("model", "projected"),
            initializer=FanIn(),
        )
        mask_vector = WeightSpec(
            shape=(self.model_dims,), dims=("features",), initializer=Normal(1.0)
        )
        return NestedMap(context=projection, target=projection, mask_vector=mask_vector)

    def spans(self, ctx: Context, real: tf.Tensor) -> tf.Tensor:
        """bool [B, S], the frames to mask, among those that are `real`, bool [B, S].

        In `Mode.EVAL` they are always the same.
        """
        key = random.key_from_seed(0) if ctx.mode is Mode.EVAL else ctx.random_key()
        starts = tf.cast(random.bernoulli(key, self.start_share, real.shape), tf.int32)
        begun = tf.cumsum(starts, axis=1)
        before = tf.pad(begun, [[0, 0], [self.span, 0]])[:, : real.shape[1]]
        return (begun > before) & real

    def masked(
        self, ctx: Context, theta: NestedMap, x: tf.Tensor, spans: tf.Tensor
    ) -> tf.Tensor:
        """`x` [B, S, M], with the learned vector where `spans` is True."""
        return tf.where(spans[:, :, None], spread(ctx, theta.mask_vector, x), x)

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        features: tf.Tensor,
        spans: tf.Tensor,
    ) -> NestedMap:
        """Sums over all masked frames of utterances that have two or more.

        The distractors of a frame are all other masked frames of its utterance: that
        takes a product of matrices, where drawing some would take a gather.

        Args:
          ctx: context.
          theta: weights.
          x: [B, S, M], the backbone's output for the masked features.
          features: [B, S, M], the features before masking.
          spans: bool [B, S].

        Returns:
          float32 scalars: `nats`, the loss; `correct`, how often the right frame was
          the likeliest; `frames`, the number of these frames.
        """
        context = _directions(contract(ctx, x, theta.context))
        target = _directions(contract(ctx, features, theta.target))
        similarities = tf.matmul(context, target, transpose_b=True) / self.temperature
        similarities = tf.where(spans[:, None, :], similarities, _NEVER)
        matching = tf.linalg.diag_part(similarities)
        count = tf.reduce_sum(tf.cast(spans, tf.float32), axis=1, keepdims=True)
        weight = tf.cast(spans & (count > 1), tf.float32)
        nats = tf.reduce_logsumexp(similarities, axis=-1) - matching
        correct = tf.cast(matching >= tf.reduce_max(similarities, axis=-1), tf.float32)
        return NestedMap(
            nats=tf.reduce_sum(nats * weight),
            correct=tf.reduce_sum(correct * weight),
            frames=tf.reduce_sum(weight),
        )


def _directions(x: tf.Tensor) -> tf.Tensor:
    """Vectors `x` [B, S, P] as float32, scaled to length 1."""
    x = tf.cast(x, tf.float32)
    squares = tf.reduce_sum(tf.square(x), axis=-1, keepdims=True)
    return x * tf.math.rsqrt(squares + 1e-9)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeechPretraining(SpeechTask):
    """Pretrains a subsampling and a backbone, such as those of `SpeechRecognition`.

    Transcripts are used only for what the input leaves out.

    Args:
      prediction: how frames are masked and compared.
    """

    prediction: MaskedPrediction

    def loss_at(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> TaskLoss:
        """The contrastive loss, in nats per masked frame."""
        features, real = self.subsampled(ctx, theta, batch.features, batch.frames)
        with ctx.scope("prediction") as c:
            spans = self.prediction.spans(c, real)
            x = self.prediction.masked(c, theta.prediction, features, spans)
        x = self.run_backbone(ctx, theta, ctx.split(x, BSM), real)
        with ctx.scope("prediction") as c:
            sums = self.prediction.fprop(
                c, theta.prediction, x, features=features, spans=spans
            )
        loss = sums.nats / tf.maximum(sums.frames, 1.0)
        return TaskLoss(loss=loss, sums=sums)

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        frames = max(float(sums["frames"]), 1.0)
        return {
            "loss": float(sums["nats"]) / frames,
            "accuracy": float(sums["correct"]) / frames,
        }
