"""Decoder-only language modelling.

Dims: B batch, S sequence, M model, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Layer
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.embedding import (
    Softmax,
    SoftmaxKind,
    TokenEmbedding,
    cross_entropy,
)
from meshwright.layers.repeat import Repeat
from meshwright.tasks.task import Task, TaskLoss
from meshwright.tasks.text_input import Split, TextInput


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel(Task):
    """Predicts each next token: embedding, a stack of layers, softmax.

    Args:
      text: the input; a batch has ids, labels, weights, segment_ids and
        segment_positions, each [B, S].
      embedding: token embedding, V x M.
      stack: L layers from [B, S, M] to [B, S, M].
      final_norm: normalization before the softmax.
      softmax: output layer, or None if the embedding's table is shared with it.

    Raises:
      ValueError: the vocabulary is smaller than the tokenizer's, or the embedding and
        `softmax` disagree on whether the table is shared.
    """

    text: TextInput
    embedding: TokenEmbedding
    stack: Repeat
    final_norm: Layer
    softmax: Softmax | None = None

    def __post_init__(self):
        if self.embedding.vocab_size < self.text.vocab_size:
            raise ValueError(
                f"TokenEmbedding.vocab_size {self.embedding.vocab_size} is smaller "
                f"than the tokenizer's {self.text.vocab_size}"
            )
        shared = self.embedding.softmax is SoftmaxKind.SHARED
        if shared == (self.softmax is not None):
            raise ValueError(
                f"TokenEmbedding.softmax is {self.embedding.softmax} but "
                f"LanguageModel.softmax is {self.softmax}: give a softmax layer, if "
                "and only if the table is SEPARATE"
            )

    def weights(self) -> NestedMap:
        specs = NestedMap(
            embedding=self.embedding.weights(),
            stack=self.stack.weights(),
            final_norm=self.final_norm.weights(),
        )
        if self.softmax is not None:
            specs.softmax = self.softmax.weights()
        return specs

    def logits(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> tf.Tensor:
        """Logits [B, S, V] of the next token, in the activation dtype."""
        with ctx.scope("embedding") as c:
            x = self.embedding.fprop(c, theta.embedding, batch.ids)
        with ctx.scope("stack") as c:
            x = self.stack.fprop(
                c,
                theta.stack,
                x,
                segment_ids=batch.segment_ids,
                segment_positions=batch.segment_positions,
            )
        with ctx.scope("final_norm") as c:
            x = self.final_norm.fprop(c, theta.final_norm, x)
        with ctx.scope("softmax") as c:
            if self.softmax is None:
                return self.embedding.attend(c, theta.embedding, x)
            return self.softmax.fprop(c, theta.softmax, x)

    def loss(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> TaskLoss:
        """Mean negative log likelihood in nats over tokens of weight 1."""
        logits = self.logits(ctx, theta, batch)
        with ctx.scope("loss"):
            total = tf.reduce_sum(
                cross_entropy(logits, batch.labels, weights=batch.weights)
            )
            count = tf.reduce_sum(batch.weights)
            loss = total / tf.maximum(count, 1.0)
        return TaskLoss(loss=loss, sums=NestedMap(nats=total, tokens=count))

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        nats = float(sums["nats"] / max(sums["tokens"], 1.0))
        # The tokenizer is bytes, and only bytes carry weight.
        return {"loss": nats, "bits_per_byte": nats / math.log(2)}

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
        train = self.text.statistics(Split.TRAIN)
        held_out = self.text.statistics(Split.HELD_OUT)
        return {
            "training files": train.documents,
            "training bytes": train.text_bytes,
            "held-out files": held_out.documents,
            "held-out bytes": held_out.text_bytes,
            "unigram entropy, bits per byte": train.unigram_entropy,
        }

    def data_fingerprint(self) -> dict[str, str | int]:
        return {
            "files or Python version": self.text.statistics(Split.TRAIN).sha256,
            "TextInput.seed": self.text.seed,
            "TextInput.sequence_length": self.text.sequence_length,
        }

    def train_flops(self, global_batch: int) -> float:
        """Six FLOPs a token and matrix weight, plus what layers have beyond weights.

        Embedding lookup does not count. The backward pass costs twice the forward one.
        """
        weights = self.weights()
        matrices = [weights.stack, weights.get("softmax", weights.embedding)]
        size = sum(
            spec.size
            for part in matrices
            for spec in part.leaves()
            if len(spec.shape) - spec.stack_rank >= 2
        )
        extra = self.stack.extra_flops(self.text.sequence_length)
        return self.tokens(global_batch) * (6.0 * size + 3.0 * extra)

    def tokens(self, global_batch: int) -> int:
        return global_batch * self.text.sequence_length
