"""Translation between many languages by one model (GShard 4).

Dims: B batch, S source, T target, M model, V vocabulary, K beams.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.checks import check_number
from meshwright.framework.modeling.layer import Context, Layer
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.embedding import (
    Softmax,
    SoftmaxKind,
    TokenEmbedding,
    cross_entropy,
)
from meshwright.tasks.decoding import BeamSearch, Decoded, Decoder, TokenModel
from meshwright.tasks.expert_metrics import expert_heat_maps, expert_metrics
from meshwright.tasks.task import Decoding, Task, TaskLoss
from meshwright.tasks.text_input import Split
from meshwright.tasks.translation_input import TranslationInput
from meshwright.tasks.translation_scores import Translated, samples, scores
from meshwright.tasks.vocabulary import Vocabulary


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation(Task):
    """An encoder and a decoder on one vocabulary.

    Args:
      text: the input; see `TranslationInput`.
      embedding: of tokens of both sides, V x M.
      encoder: layers from [B, S, M] to [B, S, M], which see all of a source.
      encoder_norm: normalization of what the decoder attends to.
      decoder: a stack of layers from [B, T, M] to [B, T, M], which see what was said
        before and attend to a memory.
      decoder_norm: normalization before the softmax.
      softmax: output layer, or None if the embedding's table is shared with it.
      label_smoothing: share of the loss that asks for all tokens alike.
      search: how translations are found.

    Raises:
      ValueError: the vocabulary is smaller than the input's; the embedding and
        `softmax` disagree on whether the table is shared; a share out of range.
    """

    text: TranslationInput
    embedding: TokenEmbedding
    encoder: Layer
    encoder_norm: Layer
    decoder: Layer
    decoder_norm: Layer
    softmax: Softmax | None = None
    label_smoothing: float = 0.1
    search: Decoder = BeamSearch()

    def __post_init__(self):
        check_number(self, "label_smoothing", at_least=0, below=1)
        if self.embedding.vocab_size < self.text.vocab_size:
            raise ValueError(
                f"TokenEmbedding.vocab_size {self.embedding.vocab_size} is smaller "
                f"than SentencePieceVocabulary.vocab_size {self.text.vocab_size}"
            )
        shared = self.embedding.softmax is SoftmaxKind.SHARED
        if shared == (self.softmax is not None):
            raise ValueError(
                f"TokenEmbedding.softmax is {self.embedding.softmax} but "
                f"Translation.softmax is {self.softmax}: give a softmax layer, if "
                "and only if the table is SEPARATE"
            )

    def weights(self) -> NestedMap:
        parts = ("embedding", "encoder", "encoder_norm", "decoder", "decoder_norm")
        specs = NestedMap({part: getattr(self, part).weights() for part in parts})
        if self.softmax is not None:
            specs.softmax = self.softmax.weights()
        return specs

    def encode(
        self, ctx: Context, theta: NestedMap, batch: NestedMap
    ) -> tuple[tf.Tensor, NestedMap | None]:
        """What the decoder attends to, [B, S, M], and `aux` of mixtures of experts."""
        x = self._embed(ctx, theta, batch.source_ids)
        with ctx.scope("encoder") as c:
            out = self.encoder.fprop(
                c,
                theta.encoder,
                x,
                segment_ids=batch.source_segment_ids,
                segment_positions=batch.source_positions,
            )
        x, aux = (out.x, out.aux) if isinstance(out, NestedMap) else (out, None)
        with ctx.scope("encoder_norm") as c:
            return self.encoder_norm.fprop(c, theta.encoder_norm, x), aux

    def logits(
        self, ctx: Context, theta: NestedMap, batch: NestedMap
    ) -> tuple[tf.Tensor, NestedMap]:
        """Logits [B, T, V] of what is said, in the activation dtype; `aux` by part."""
        memory, encoder_aux = self.encode(ctx, theta, batch)
        x = self._embed(ctx, theta, batch.target_ids)
        with ctx.scope("decoder") as c:
            out = self.decoder.fprop(
                c,
                theta.decoder,
                x,
                segment_ids=batch.target_segment_ids,
                segment_positions=batch.target_positions,
                memory=memory,
                memory_segment_ids=batch.source_segment_ids,
            )
        x, decoder_aux = (out.x, out.aux) if isinstance(out, NestedMap) else (out, None)
        aux = {"encoder": encoder_aux, "decoder": decoder_aux}
        aux = NestedMap({part: one for part, one in aux.items() if one is not None})
        return self._logits(ctx, theta, x), aux

    def loss(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> TaskLoss:
        """Mean smoothed loss in nats a token, and the losses of mixtures of experts.

        `sums.nats` is without either.
        """
        logits, aux = self.logits(ctx, theta, batch)
        with ctx.scope("loss"):
            weights = batch.target_weights
            count = tf.reduce_sum(weights)
            exact = cross_entropy(logits, batch.target_labels, weights=weights)
            nats, total = tf.reduce_sum(exact), tf.reduce_sum(exact)
            if self.label_smoothing:
                logits = tf.cast(logits, tf.float32)
                even = tf.reduce_logsumexp(logits, -1) - tf.reduce_mean(logits, -1)
                total = (1 - self.label_smoothing) * total
                total += self.label_smoothing * tf.reduce_sum(even * weights)
            loss = total / tf.maximum(count, 1.0)
        sums = NestedMap(nats=nats, tokens=count)
        for part, one in aux.items():
            loss += one.loss
            sums[part] = one.sums
        return TaskLoss(loss=loss, sums=sums)

    def decodes(self) -> bool:
        return True

    def decode_spec(self, global_batch: int) -> NestedMap:
        """`pair`, the number of a held-out pair or -1, and the sources."""
        return self.text.source_spec(global_batch)

    def decode(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """`ids` int32 [B, K, T] and `scores` float32 [B, K] of translations.

        The best first, up to an end and then 0; see `Decoded`.

        Args:
          ctx: context of `Mode.EVAL`.
          theta: weights.
          batch: as `decode_spec`, a source to a row.
        """
        found = self._search(ctx, theta, batch)
        return NestedMap(ids=found.ids, scores=found.scores)

    def decode_batches(
        self, *, global_batch: int, max_batches: int | None = None
    ) -> Iterator[NestedMap]:
        return self.text.source_batches(global_batch, max_batches=max_batches)

    def decoded(self, batches: Sequence[tuple[NestedMap, NestedMap]]) -> Decoding:
        """BLEU and chrF by direction, of the best translations."""
        pairs = self.text.files.pairs(Split.HELD_OUT)
        vocabulary = self.text.trained_vocabulary()
        translated = [
            Translated(
                pairs[number].direction,
                pairs[number].source,
                pairs[number].target,
                vocabulary.decode(ids),
            )
            for batch, out in batches
            for number, ids in zip(batch.pair, np.asarray(out.ids)[:, 0], strict=True)
            if number >= 0
        ]
        return Decoding(metrics=scores(translated), samples=samples(translated))

    def _search(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> Decoded:
        memory, _ = self.encode(ctx, theta, batch)
        paddings = tf.cast(batch.source_segment_ids == 0, tf.int32)
        with ctx.scope("decoder") as c:
            remembered = self.decoder.remember(c, theta.decoder, memory)
        batch_size, beams = memory.shape[0], self.search.beams
        length = self.text.target_length

        def step(ids, cache, position):
            x = self._embed(ctx, theta, tf.reshape(ids, [-1, 1]))
            with ctx.scope("decoder") as c:
                x, cache = self.decoder.step(
                    c,
                    theta.decoder,
                    x,
                    cache,
                    position,
                    memory=remembered,
                    memory_paddings=paddings,
                )
            logits = self._logits(ctx, theta, x)
            return tf.reshape(logits, [batch_size, beams, -1]), cache

        with ctx.scope("decoder") as c:
            cache = self.decoder.start_cache(c, batch_size * beams, length)
        with ctx.scope("search") as c:
            model = TokenModel(
                step=step,
                cache=cache,
                batch=batch_size,
                length=length,
                start_id=Vocabulary.start_id,
                end_id=Vocabulary.end_id,
                cache_dim=1,  # Of a stack.
            )
            return self.search.decode(c, model)

    def _embed(self, ctx: Context, theta: NestedMap, ids: tf.Tensor) -> tf.Tensor:
        with ctx.scope("embedding") as c:
            return self.embedding.fprop(c, theta.embedding, ids)

    def _logits(self, ctx: Context, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        with ctx.scope("decoder_norm") as c:
            x = self.decoder_norm.fprop(c, theta.decoder_norm, x)
        with ctx.scope("softmax") as c:
            if self.softmax is None:
                return self.embedding.attend(c, theta.embedding, x)
            return self.softmax.fprop(c, theta.softmax, x)

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        nats = float(sums["nats"] / max(sums["tokens"], 1.0))
        found = {"loss": nats, "perplexity": math.exp(min(nats, 700.0))}
        for part in ("encoder", "decoder"):
            found |= expert_metrics(sums, part)
        return found

    def heat_maps(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        both = (expert_heat_maps(sums, part) for part in ("encoder", "decoder"))
        return {name: one for found in both for name, one in found.items()}

    def batch_spec(self, global_batch: int) -> NestedMap:
        return self.text.element_spec(global_batch)

    def batch_dims(self) -> NestedMap:
        return self.batch_spec(1).map(lambda _: ("batch", "sequence"))

    def train_batches(
        self, start_step: int, *, global_batch: int, rows: range
    ) -> tf.data.Dataset:
        return self.text.train_batches(start_step, global_batch=global_batch, rows=rows)

    def eval_batches(
        self, *, global_batch: int, rows: range, max_batches: int | None = None
    ) -> tf.data.Dataset:
        return self.text.held_out_batches(
            global_batch=global_batch, rows=rows, max_batches=max_batches
        )

    def describe_data(self) -> dict[str, float]:
        train, held_out = (self.text.rows(split) for split in Split)
        return {
            "training pairs": train.pairs,
            "training pairs too long": train.too_long,
            "training rows": len(train.columns["source_ids"]),
            "held-out pairs": held_out.pairs,
            "directions": len(train.directions),
        }

    def data_fingerprint(self) -> dict[str, str | int]:
        return {
            "pairs": self.text.rows(Split.TRAIN).sha256,
            "vocabulary": self.text.trained_vocabulary().sha256,
            "TranslationInput.seed": self.text.seed,
            "TranslationInput.temperature": self.text.temperature,
        }

    def train_flops(self, global_batch: int) -> float:
        """Six FLOPs a matrix weight and token that meets it, and what is beyond that.

        Cross-attention's keys and values are of the source, and count with the target,
        as if both had one length.
        """
        weights = self.weights()
        softmax = weights.get("softmax", weights.embedding)
        source, target = self.text.source_length, self.text.target_length
        parts = [
            (weights.encoder, self.encoder.extra_flops(source), source),
            (weights.decoder, self.decoder.extra_flops(target), target),
            (softmax, 0.0, target),
        ]
        total = 0.0
        for specs, extra, length in parts:
            size = sum(
                spec.size
                for spec in specs.leaves()
                if len(spec.shape) - spec.stack_rank >= 2
            )
            total += global_batch * length * (6.0 * size + 3.0 * extra)
        return total

    def tokens(self, global_batch: int) -> int:
        return global_batch * (self.text.source_length + self.text.target_length)
