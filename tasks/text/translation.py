"""Translation between many languages by one model (GShard 4).

Dims: B batch, S source, T target, M model, V vocabulary, K beams.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling import random
from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.layer import Context, Layer
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.input.token_dataset import PairDataset
from meshwright.tasks.task import DecodeResult, Decoding, Serving, TaskLoss
from meshwright.tasks.text.decoding import BeamSearch, Decoded, Decoder, TokenModel
from meshwright.tasks.text.text_task import TextTask
from meshwright.tasks.text.translation_input import TranslationInput
from meshwright.tasks.text.translation_scores import Translated, samples, scores


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation(TextTask):
    """An encoder and a decoder with one vocabulary.

    Args:
      text: the input, a `TranslationInput` or `PairDataset`; a batch is as that of the
        first.
      encoder: layers from [B, S, M] to [B, S, M], which see all of a source.
      encoder_norm: normalization of the encoder's output.
      decoder: a stack of layers from [B, T, M] to [B, T, M], which see earlier tokens
        and attend to a memory.
      decoder_norm: normalization before the softmax.
      search: the search for translations.

    Raises:
      ValueError: see `TextTask`; or a share is out of range.
    """

    stacks = ("encoder", "decoder")

    text: TranslationInput | PairDataset
    encoder: Layer
    encoder_norm: Layer
    decoder: Layer
    decoder_norm: Layer
    label_smoothing: float = bounded(0.1, at_least=0, below=1)
    search: Decoder = BeamSearch()

    def encode(
        self, ctx: Context, theta: NestedMap, batch: NestedMap, x: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]:
        """The memory of the decoder, [B, S, M], and `aux` of mixtures of experts.

        `x` are the embedded sources.
        """
        x, aux = self.run_stack(
            ctx,
            theta,
            "encoder",
            x,
            token_ids=batch.source_ids,
            segment_ids=batch.source_segment_ids,
            segment_positions=batch.source_positions,
        )
        with ctx.scope("encoder_norm") as c:
            return self.encoder_norm.fprop(c, theta.encoder_norm, x), aux

    def hidden(
        self, ctx: Context, theta: NestedMap, batch: NestedMap
    ) -> tuple[tf.Tensor, NestedMap]:
        """What logits are computed of, [B, T, M] in the activation dtype; `aux`."""
        source, target = self.embed(
            ctx,
            theta,
            (batch.source_ids, batch.source_positions),
            (batch.target_ids, batch.target_positions),
        )
        memory, encoder_aux = self.encode(ctx, theta, batch, source)
        x, decoder_aux = self.run_stack(
            ctx,
            theta,
            "decoder",
            target,
            token_ids=batch.target_ids,
            segment_ids=batch.target_segment_ids,
            segment_positions=batch.target_positions,
            memory=memory,
            memory_segment_ids=batch.source_segment_ids,
        )
        aux = NestedMap({**encoder_aux, **decoder_aux})
        return self._normalized(ctx, theta, x), aux

    def loss(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> TaskLoss:
        """Mean loss in nats per token, smoothed and with the z-loss.

        The losses of mixtures of experts are added; `sums.nats` is without any of them.
        """
        x, aux = self.hidden(ctx, theta, batch)
        weights = batch.target_weights
        sums = self.token_loss(ctx, theta, x, batch.target_labels, weights)
        with ctx.scope("loss"):
            count = tf.reduce_sum(weights)
            loss = sums.total / tf.maximum(count, 1.0)
        return self.total_loss(loss, NestedMap(nats=sums.nats, tokens=count), aux)

    def translate(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> Decoded:
        """The best translations of sources, a source per row."""
        (x,) = self.embed(ctx, theta, (batch.source_ids, batch.source_positions))
        memory, _ = self.encode(ctx, theta, batch, x)
        paddings = tf.cast(batch.source_segment_ids == 0, tf.int32)
        with ctx.scope("decoder") as c:
            encoded = self.decoder.encode_memory(c, theta.decoder, memory)
        batch_size, beams = shape_of(memory)[0], self.search.beams
        length = self.text.target_length
        hypotheses = self.search.hypotheses(
            stack=self.decoder, path="Translation.decoder", steps=length
        )

        def step(ids, cache, position):
            ids = hypotheses.tokens(ids)
            (x,) = self.embed(ctx, theta, (ids, tf.reshape(position, [1, 1])))
            with ctx.scope("decoder") as c:
                run = functools.partial(
                    self.decoder.step,
                    c,
                    theta.decoder,
                    x,
                    token_ids=ids,
                    memory=encoded,
                    memory_paddings=paddings,
                )
                x, cache = hypotheses.step(run, cache, position)
            logits = self.to_logits(ctx, theta, self._normalized(ctx, theta, x))
            return tf.reshape(logits, [-1, beams, logits.shape[-1]]), cache

        with ctx.scope("decoder") as c:
            cache = self.decoder.init_cache(c, batch_size, hypotheses.length)
            cache = hypotheses.begin(c, cache, batch_size)
        with ctx.scope("search") as c:
            if c.key is not None:  # Other batches have other draws.
                c = dataclasses.replace(
                    c, key=random.fold_in(c.key, tf.reduce_max(batch.pair))
                )
            special = self.text.vocabulary.special_tokens
            model = TokenModel(
                step=step,
                cache=cache,
                batch=batch_size,
                length=length,
                start_id=special.start_id,
                end_id=special.end_id,
                reordered=hypotheses.reordered,
            )
            return self.search.decode(c, model)

    def _normalized(self, ctx: Context, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        with ctx.scope("decoder_norm") as c:
            return self.decoder_norm.fprop(c, theta.decoder_norm, x)

    @property
    def decoding(self) -> TranslationDecoding | None:
        return TranslationDecoding(self) if self._has_text else None

    @property
    def why_not_decoded(self) -> str:
        return f", as {type(self.text).__name__} has no vocabulary to score text by"

    @property
    def serving(self) -> TranslationServing | None:
        return TranslationServing(self) if self._has_text else None

    @property
    def to_serve(self) -> str:
        return (
            f"its Translation.text is {type(self.text).__name__}, which has no "
            "vocabulary: bind Translation.text = @TranslationInput() and "
            "SentencePieceVocabulary.model_file in its place, or export --what=bundle"
        )

    @property
    def _has_text(self) -> bool:
        """Whether the input knows the text of its tokens."""
        return isinstance(self.text, TranslationInput)

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        metrics = super().metrics(sums)
        return {**metrics, "perplexity": math.exp(min(metrics["loss"], 700.0))}

    def describe_data(self) -> dict[str, float]:
        if not self._has_text:
            return super().describe_data()
        train, held_out = (self.text.rows(split) for split in Split)
        return {
            "training pairs": train.pairs,
            "training pairs too long": train.too_long,
            "training rows": len(train.columns["source_ids"]),
            "held-out pairs": held_out.pairs,
            "directions": len(train.directions),
        }

    def data_fingerprint(self) -> dict[str, str | int]:
        if not self._has_text:
            return super().data_fingerprint()
        return {
            "pairs": self.text.rows(Split.TRAIN).sha256,
            "vocabulary": self.text.trained_vocabulary().sha256,
            "TranslationInput.seed": self.text.seed,
            "TranslationInput.temperature": self.text.temperature,
        }

    def train_flops(self, global_batch: int) -> float:
        """See `TextTask.stacks_flops`.

        Cross-attention's keys and values are the source's, but count with the target,
        as if both had the same length.
        """
        source, target = self.text.source_length, self.text.target_length
        lengths = {"encoder": source, "decoder": target, "softmax": target}
        return self.stacks_flops(global_batch, lengths)

    def tokens(self, global_batch: int) -> int:
        return global_batch * (self.text.source_length + self.text.target_length)


@dataclasses.dataclass(frozen=True)
class TranslationDecoding(Decoding):
    """Translates held-out sources."""

    task: Translation

    def spec(self, global_batch: int) -> NestedMap:
        """`pair`, the number of a held-out pair or -1, and the sources."""
        return self.task.text.source_spec(global_batch)

    def decode(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """`ids` int32 [B, K, T] and `scores` float32 [B, K] of translations.

        The best translation comes first; ids are 0 after an end, see `Decoded`.

        Args:
          ctx: context of `Mode.EVAL`.
          theta: weights.
          batch: as `spec`, a source per row.
        """
        decoded = self.task.translate(ctx, theta, batch)
        return NestedMap(ids=decoded.ids, scores=decoded.scores)

    def batches(
        self, *, global_batch: int, max_batches: int | None = None
    ) -> Iterator[NestedMap]:
        return self.task.text.source_batches(global_batch, max_batches=max_batches)

    def score(
        self, batches: Iterable[tuple[NestedMap, NestedMap]], folder: pathlib.Path
    ) -> DecodeResult:
        """BLEU and chrF by direction, of the best translations.

        References are spelled as by the vocabulary, in Unicode's NFKC.
        """
        pairs = self.task.text.given_files().pairs(Split.HELD_OUT)
        vocabulary = self.task.text.trained_vocabulary()
        translated = [
            Translated(
                pairs[number].direction,
                pairs[number].target_language,
                pairs[number].source,
                vocabulary.normalized(pairs[number].target),
                vocabulary.decode(ids),
            )
            for batch, out in batches
            for number, ids in zip(batch.pair, np.asarray(out.ids)[:, 0], strict=True)
            if number >= 0
        ]
        return DecodeResult(metrics=scores(translated), samples=samples(translated))


@dataclasses.dataclass(frozen=True)
class TranslationServing(Serving):
    """Translates sources."""

    task: Translation

    def spec(self, batch: int | None) -> NestedMap:
        """`source_ids` int32 [B, S], a source per row as in the input; then 0."""
        return NestedMap(source_ids=self.task.text.source_spec(batch).source_ids)

    def serve(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """As `TranslationDecoding.decode`."""
        ids = batch.source_ids
        positions = tf.range(self.task.text.source_length)
        rows = NestedMap(
            source_ids=ids,
            source_segment_ids=tf.cast(ids != 0, tf.int32),
            source_positions=tf.broadcast_to(positions, shape_of(ids)),
            pair=tf.zeros_like(ids[:, 0]),
        )
        return self.task.decoding.decode(ctx, theta, rows)
