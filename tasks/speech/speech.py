"""Speech recognition by connectionist temporal classification.

Dims: B batch, T frames, F mel bins, S frames after subsampling, M model, V vocabulary
and the blank, L labels.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.layer import Context
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.basic.embedding import Softmax, check_vocab_size
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.speech.speech_audio import SpecAugment
from meshwright.tasks.speech.speech_task import SpeechTask
from meshwright.tasks.speech.speech_text import (
    BLANK_ID,
    Recognized,
    beam_search,
    error_rates,
    greedy_search,
    samples,
)
from meshwright.tasks.task import DecodeResult, Decoding, Serving, TaskLoss


def ctc_loss(
    logits: tf.Tensor, frames: tf.Tensor, labels: tf.Tensor, label_counts: tf.Tensor
) -> tf.Tensor:
    """Negative log likelihood of transcripts, float32 [B], in nats.

    This is TF's loss of dense labels, the one of its two that XLA can compile.

    Args:
      logits: [B, S, V], `BLANK_ID` the blank.
      frames: int32 [B], how many of the S frames count.
      labels: int32 [B, L], in [1, V); labels beyond the count are ignored.
      label_counts: int32 [B]. A row without labels and frames has loss 0.
    """
    return tf.nn.ctc_loss(
        labels,
        tf.cast(logits, tf.float32),
        label_counts,
        frames,
        logits_time_major=False,
        blank_index=BLANK_ID,
    )


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeechRecognition(SpeechTask):
    """Transcribes speech, as GSPMD 5.3's Conformer with a CTC output.

    Args:
      softmax: output layer, M x V; label 0 is the blank.
      spec_augment: masks features in training.
      beams: number of prefixes that the search for transcripts keeps.

    Raises:
      ValueError: V is smaller than the input's; see `SpeechTask`.
    """

    softmax: Softmax
    spec_augment: SpecAugment = SpecAugment()
    beams: int = bounded(16, at_least=1)

    def __post_init__(self):
        super().__post_init__()
        vocabulary = type(self.speech.vocabulary).__name__
        check_vocab_size(self.softmax, self.speech.vocab_size, vocabulary)

    def logits(
        self, ctx: Context, theta: NestedMap, features: tf.Tensor, frames: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Logits [B, S, V] in the activation dtype, and how many of S count, int32 [B].

        Args:
          ctx: context; in `Mode.TRAIN` features are masked.
          theta: weights.
          features: float32 [B, T, F].
          frames: int32 [B].
        """
        with ctx.scope("spec_augment") as c:
            features = self.spec_augment.fprop(
                c, theta.spec_augment, features, frames=frames
            )
        x, mask = self.subsampled(ctx, theta, features, frames)
        x = self.run_backbone(ctx, theta, x, mask)
        with ctx.scope("softmax") as c:
            logits = self.softmax.fprop(c, theta.softmax, x)
        return logits, tf.reduce_sum(tf.cast(mask, tf.int32), axis=1)

    def loss_at(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> TaskLoss:
        """Negative log likelihood of transcripts, in nats per label."""
        logits, frames = self.logits(ctx, theta, batch.features, batch.frames)
        with ctx.scope("loss"):
            losses = ctc_loss(logits, frames, batch.labels, batch.label_counts)
            nats = tf.reduce_sum(losses)
            labels = tf.cast(tf.reduce_sum(batch.label_counts), tf.float32)
            loss = nats / tf.maximum(labels, 1.0)
        return TaskLoss(loss=loss, sums=NestedMap(nats=nats, labels=labels))

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        return {"loss": float(sums["nats"] / max(sums["labels"], 1.0))}

    @property
    def decoding(self) -> SpeechDecoding:
        return SpeechDecoding(self)

    @property
    def serving(self) -> SpeechServing:
        return SpeechServing(self)


@dataclasses.dataclass(frozen=True)
class SpeechDecoding(Decoding):
    """Transcribes held-out utterances."""

    task: SpeechRecognition

    def spec(self, global_batch: int) -> NestedMap:
        """Features, `frames`, and `utterance`: a held-out utterance's number, or -1."""
        spec = self.task.speech.element_spec(global_batch)
        utterance = tf.TensorSpec([global_batch], tf.int32)
        return NestedMap(
            features=spec.features, frames=spec.frames, utterance=utterance
        )

    def decode(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """`log_probs` float32 [B, S, V], and how many `frames` of S count, int32 [B].

        `score` searches for transcripts, on the host.
        """
        logits, frames = self.task.logits(ctx, theta, batch.features, batch.frames)
        log_probs = tf.nn.log_softmax(tf.cast(logits, tf.float32))
        return NestedMap(log_probs=log_probs, frames=frames)

    def batches(
        self, *, global_batch: int, max_batches: int | None = None
    ) -> Iterator[NestedMap]:
        batches = self.task.speech.held_out_batches(
            global_batch=global_batch, rows=range(global_batch), max_batches=max_batches
        )
        names = self.spec(global_batch)
        for batch in batches:
            yield NestedMap({name: batch[name].numpy() for name in names})

    def score(
        self, batches: Iterable[tuple[NestedMap, NestedMap]], folder: pathlib.Path
    ) -> DecodeResult:
        """Word and character error rates, by prefix beam search and greedily.

        References are spelled as by the vocabulary.
        """
        listed = self.task.speech.utterances(Split.HELD_OUT).listed
        vocabulary = self.task.speech.trained_vocabulary()
        recognized = []
        for batch, out in batches:
            log_probs, frames = np.asarray(out.log_probs), np.asarray(out.frames)
            searches = zip(
                batch.utterance,
                greedy_search(log_probs, frames),
                beam_search(log_probs, frames, self.task.beams),
                strict=True,
            )
            for number, *labels in searches:
                if number >= 0:
                    reference = vocabulary.normalized(listed[number].transcript)
                    texts = map(vocabulary.decode, labels)
                    recognized.append(Recognized(reference, *texts))
        return DecodeResult(
            metrics=error_rates(recognized), samples=samples(recognized)
        )


@dataclasses.dataclass(frozen=True)
class SpeechServing(Serving):
    """Transcribes features."""

    task: SpeechRecognition

    def spec(self, batch: int | None) -> NestedMap:
        """`features` float32 [B, T, F] and `frames` int32 [B], how many of T count."""
        spec = self.task.speech.element_spec(batch)
        return NestedMap(features=spec.features, frames=spec.frames)

    def serve(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """The results of `SpeechDecoding.decode`, and `ids`, int32 [B, L].

        These are the labels of the greedy search, then 0; L is the count of the longest
        row.
        """
        out = self.task.decoding.decode(ctx, theta, batch)
        by_frame = tf.transpose(out.log_probs, [1, 0, 2])
        (labels,), _ = tf.nn.ctc_greedy_decoder(
            by_frame, out.frames, blank_index=BLANK_ID
        )
        out.ids = tf.cast(tf.sparse.to_dense(labels, default_value=BLANK_ID), tf.int32)
        return out
