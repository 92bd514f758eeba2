"""The base of tasks on speech: an input, and a backbone behind a subsampling.

Dims: B batch, T frames, F mel bins, S frames after subsampling, M model.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Layer
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.basic.linear import BSM
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.speech.speech_audio import SAMPLE_RATE
from meshwright.tasks.speech.speech_buckets import loss_by_length
from meshwright.tasks.speech.speech_input import SpeechInput
from meshwright.tasks.task import Task, TaskLoss

_BATCH_DIMS = NestedMap(
    features=("batch", "time", "frequency"),
    frames=("batch",),
    labels=("batch", "labels"),
    label_counts=("batch",),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeechTask(Task):
    """Base of tasks on speech.

    Outside the backbone only dims called "batch" are split: the layers before and after
    it are data-parallel, and the backbone is as its layers and the plan say.

    Args:
      speech: the input.
      subsampling: layer from [B, T, F] to [B, S, M], which takes and returns a `mask`,
        such as `ConvSubsampling`.
      backbone: any layer from [B, S, M] to [B, S, M] that takes `mask`, bool [B, S].

    Raises:
      ValueError: a field is no layer.
    """

    token_name: ClassVar[str] = "frames"

    speech: SpeechInput
    subsampling: Layer
    backbone: Layer

    def loss(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> TaskLoss:
        """`loss_at` of the batch cut to its bucket's length, see `loss_by_length`."""

        def cut(theta: NestedMap, frames: int) -> TaskLoss:
            shorter = NestedMap(batch, features=batch.features[:, :frames])
            return self.loss_at(ctx, theta, shorter)

        buckets = self.speech.bucket_frames
        return loss_by_length(cut, ctx.mode, theta, batch.frames, buckets)

    def loss_at(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> TaskLoss:
        """The loss of a batch, at the length that it has."""
        raise NotImplementedError(f"{type(self).__name__}.loss_at")

    def subsampled(
        self, ctx: Context, theta: NestedMap, features: tf.Tensor, frames: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Subsampled features [B, S, M] in the activation dtype, and mask bool [B, S].

        Raises:
          ValueError: `SpeechInput.subsampling` differs from the layer's.
        """
        T = features.shape[1]
        mask = tf.range(T)[None] < frames[:, None]
        with ctx.scope("subsampling") as c:
            out = self.subsampling.fprop(
                c, theta.subsampling, ctx.cast(features), mask=mask
            )
        wanted = -(-T // self.speech.subsampling)
        if out.x.shape[1] != wanted:
            raise ValueError(
                f"{type(self.subsampling).__name__} makes {out.x.shape[1]} frames of "
                f"{T}, but SpeechInput.subsampling {self.speech.subsampling} makes "
                f"{wanted}: set that to what the layer does"
            )
        return ctx.split(out.x, BSM), out.mask

    def run_backbone(
        self, ctx: Context, theta: NestedMap, x: tf.Tensor, mask: tf.Tensor
    ) -> tf.Tensor:
        """The backbone's output [B, S, M] for `x` [B, S, M]."""
        with ctx.scope("backbone") as c:
            x = self.backbone.fprop(c, theta.backbone, x, mask=mask)
        return ctx.split(x, BSM)

    @property
    def input(self) -> SpeechInput:
        return self.speech

    def batch_dims(self) -> NestedMap:
        return _BATCH_DIMS

    def describe_data(self) -> dict[str, float]:
        facts = {}
        for split in Split:
            utterances = self.speech.utterances(split)
            name = split.value.replace("_", "-").replace("train", "training")
            seconds = (
                int(utterances.frames.sum()) * self.speech.log_mel.hop / SAMPLE_RATE
            )
            facts[f"{name} utterances"] = len(utterances.listed)
            facts[f"{name} minutes"] = seconds / 60
            facts[f"{name} utterances too long"] = utterances.too_long
            facts[f"{name} utterances with too many labels"] = utterances.too_wordy
            facts[f"{name} utterances too fast for CTC"] = utterances.too_fast
        return facts

    def data_fingerprint(self) -> dict[str, str | int]:
        return {
            "utterances": self.speech.utterances(Split.TRAIN).sha256,
            "vocabulary": self.speech.trained_vocabulary().sha256,
            "SpeechInput.seed": self.speech.seed,
            "SpeechInput.bucket_frames": str(self.speech.bucket_frames),
        }

    def train_flops(self, global_batch: int) -> float:
        """FLOPs of a batch in the longest bucket: six per frame and matrix weight, and
        those of layers beyond weights.
        """
        length = -(-self.speech.max_frames // self.speech.subsampling)
        total = 0.0
        for name, specs in self.weights().items():
            size = sum(spec.size for spec in specs.leaves() if spec.is_matrix)
            extra = getattr(self, name).extra_flops(length)
            total += global_batch * length * (6.0 * size + 3.0 * extra)
        return total

    def tokens(self, global_batch: int) -> int:
        """Frames of a batch in the longest bucket."""
        return global_batch * self.speech.max_frames
