"""What tasks on speech share: an input, and a backbone behind a subsampling.

Dims: B batch, T frames, F mel bins, S frames after subsampling, M model.
"""

from __future__ import annotations

import dataclasses

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

    Outside the backbone the dims that are split are called "batch": what comes before
    and after is data-parallel, and the backbone as its layers and the plan say.

    Args:
      speech: the input.
      subsampling: layer from [B, T, F] to [B, S, M], which takes and gives a `mask`,
        such as `ConvSubsampling`.
      backbone: any layer from [B, S, M] to [B, S, M] that takes `mask`, bool [B, S].

    Raises:
      ValueError: a field is no layer.
    """

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
        """The loss of a batch, as it is."""
        raise NotImplementedError(f"{type(self).__name__}.loss_at")

    def subsampled(
        self, ctx: Context, theta: NestedMap, features: tf.Tensor, frames: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """[B, S, M] in the activation dtype and the mask, bool [B, S].

        Raises:
          ValueError: `SpeechInput.subsampling` is not the layer's.
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
        """[B, S, M] of `x` [B, S, M]."""
        with ctx.scope("backbone") as c:
            x = self.backbone.fprop(c, theta.backbone, x, mask=mask)
        return ctx.split(x, BSM)

    @property
    def input(self) -> SpeechInput:
        return self.speech

    def batch_dims(self) -> NestedMap:
        return _BATCH_DIMS

    def describe_data(self) -> dict[str, float]:
        found = {}
        for split in Split:
            of = self.speech.utterances(split)
            name = split.value.replace("_", "-").replace("train", "training")
            seconds = int(of.frames.sum()) * self.speech.log_mel.hop / SAMPLE_RATE
            found[f"{name} utterances"] = len(of.listed)
            found[f"{name} minutes"] = seconds / 60
            found[f"{name} utterances too long"] = of.too_long
            found[f"{name} utterances with too many labels"] = of.too_wordy
            found[f"{name} utterances too fast for CTC"] = of.too_fast
        return found

    def data_fingerprint(self) -> dict[str, str | int]:
        return {
            "utterances": self.speech.utterances(Split.TRAIN).sha256,
            "vocabulary": self.speech.trained_vocabulary().sha256,
            "SpeechInput.seed": self.speech.seed,
            "SpeechInput.bucket_frames": str(self.speech.bucket_frames),
        }

    def train_flops(self, global_batch: int) -> float:
        """Of a batch in the longest bucket: six FLOPs a frame and matrix weight, and
        what layers have beyond weights.
        """
        length = -(-self.speech.max_frames // self.speech.subsampling)
        total = 0.0
        for name, specs in self.weights().items():
            size = sum(spec.size for spec in specs.leaves() if spec.is_matrix)
            extra = getattr(self, name).extra_flops(length)
            total += global_batch * length * (6.0 * size + 3.0 * extra)
        return total

    def tokens(self, global_batch: int) -> int:
        """Frames, of a batch in the longest bucket."""
        return global_batch * self.speech.max_frames
