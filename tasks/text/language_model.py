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
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.stacks.pipeline import Pipeline
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.task import Serving, TaskLoss
from meshwright.tasks.text.text_input import TextInput
from meshwright.tasks.text.text_task import TextTask


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel(TextTask):
    """Predicts each next token: embedding, a stack of layers, softmax.

    Args:
      text: the input; a batch has ids, labels, weights, segment_ids and
        segment_positions, each [B, S].
      stack: L layers from [B, S, M] to [B, S, M], such as `Repeat` or `Pipeline`.
      final_norm: normalization before the softmax.

    Raises:
      ValueError: see `TextTask`.
    """

    stacks = ("stack",)

    text: TextInput
    stack: Layer
    final_norm: Layer

    def hidden(
        self, ctx: Context, theta: NestedMap, batch: NestedMap
    ) -> tuple[tf.Tensor, NestedMap]:
        """What logits are computed of, [B, S, M] in the activation dtype; `aux`."""
        (x,) = self.embed(ctx, theta, (batch.ids, batch.segment_positions))
        x, aux = self.run_stack(
            ctx,
            theta,
            "stack",
            x,
            token_ids=batch.ids,
            segment_ids=batch.segment_ids,
            segment_positions=batch.segment_positions,
        )
        with ctx.scope("final_norm") as c:
            return self.final_norm.fprop(c, theta.final_norm, x), aux

    def logits(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> tf.Tensor:
        """Logits [B, S, V] of the next token, in the activation dtype."""
        x, _ = self.hidden(ctx, theta, batch)
        return self.to_logits(ctx, theta, x)

    def init_cache(self, ctx: Context, batch: int, length: int) -> NestedMap:
        """The cache of `step` for `length` tokens of each of `batch` rows, still empty.

        Raises:
          ValueError: the stack has no decoding.
        """
        stack = self.stack.stack if isinstance(self.stack, Pipeline) else self.stack
        if not hasattr(getattr(stack, "body", None), "step"):
            raise ValueError(
                f"LanguageModel.stack is {type(self.stack).__name__} of layers that "
                "cannot decode token by token: generate with a Repeat or a Pipeline of "
                "transformer_layer, or of Sequential with these"
            )
        with ctx.scope("stack") as c:
            return self.stack.init_cache(c, batch, length)

    def step(
        self,
        ctx: Context,
        theta: NestedMap,
        ids: tf.Tensor,
        cache: NestedMap,
        position: int | tf.Tensor,
        *,
        paddings: tf.Tensor,
        segment_positions: tf.Tensor,
    ) -> tuple[tf.Tensor, NestedMap]:
        """`hidden` of one more token of each row, or of the first ones at once.

        Args:
          ctx: context of `Mode.EVAL`.
          theta: weights.
          ids: int32 [B, 1]; or [B, S] if `position` is 0.
          cache: as `init_cache` or `step` returned it.
          position: see `MultiHeadAttention.step`, as the next two.
          paddings: [B, T].
          segment_positions: int32 [B, S].

        Returns:
          What logits are computed of, [B, S, M], and the cache.
        """
        (x,) = self.embed(ctx, theta, (ids, segment_positions))
        with ctx.scope("stack") as c:
            x, cache = self.stack.step(
                c,
                theta.stack,
                x,
                cache,
                position,
                token_ids=ids,
                paddings=paddings,
                segment_positions=segment_positions,
            )
        with ctx.scope("final_norm") as c:
            return self.final_norm.fprop(c, theta.final_norm, x), cache

    def loss(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> TaskLoss:
        """Mean loss in nats over tokens of weight 1, smoothed and with the z-loss.

        The losses of mixtures of experts are added; `sums.nats` is without any of them.
        """
        x, aux = self.hidden(ctx, theta, batch)
        sums = self.token_loss(ctx, theta, x, batch.labels, batch.weights)
        with ctx.scope("loss"):
            nats, total = ctx.split(sums.nats, ()), ctx.split(sums.total, ())
            count = ctx.split(tf.reduce_sum(batch.weights), ())
            loss = total / tf.maximum(count, 1.0)
        return self.total_loss(loss, NestedMap(nats=nats, tokens=count), aux)

    @property
    def serving(self) -> NextTokens:
        return NextTokens(self)

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        metrics = super().metrics(sums)
        # All tokens are bytes, or as many bytes in the mean as those held out.
        tokens_of_a_byte = 1.0
        if self.text.vocabulary is not None:
            held_out = self.text.statistics(Split.HELD_OUT)
            tokens_of_a_byte = held_out.tokens / held_out.text_bytes
        bits = metrics["loss"] * tokens_of_a_byte / math.log(2)
        return {**metrics, "bits_per_byte": bits}

    def describe_data(self) -> dict[str, float]:
        train = self.text.statistics(Split.TRAIN)
        held_out = self.text.statistics(Split.HELD_OUT)
        facts = {
            "training files": train.documents,
            "training bytes": train.text_bytes,
            "held-out files": held_out.documents,
            "held-out bytes": held_out.text_bytes,
            "unigram entropy, bits per byte": train.unigram_entropy,
        }
        if self.text.vocabulary is not None:
            facts["training tokens"] = train.tokens
        return facts

    def data_fingerprint(self) -> dict[str, str | int]:
        vocabulary = {}
        if self.text.vocabulary is not None:
            vocabulary["vocabulary"] = self.text.trained_vocabulary().sha256
        return {
            **vocabulary,
            "files or Python version": self.text.statistics(Split.TRAIN).sha256,
            "TextInput.seed": self.text.seed,
            "TextInput.sequence_length": self.text.sequence_length,
        }

    def train_flops(self, global_batch: int) -> float:
        """See `TextTask.stacks_flops`."""
        length = self.text.sequence_length
        return self.stacks_flops(global_batch, {"stack": length, "softmax": length})

    def tokens(self, global_batch: int) -> int:
        return global_batch * self.text.sequence_length


@dataclasses.dataclass(frozen=True)
class NextTokens(Serving):
    """Predicts what comes after each token of a text."""

    task: LanguageModel

    def spec(self, batch: int | None) -> NestedMap:
        """`ids` int32 [B, S], a text per row from its start token on; then 0."""
        return NestedMap(ids=self.task.text.element_spec(batch).ids)

    def serve(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """`log_probs` float32 [B, S, V] of the token after each, in nats."""
        positions = tf.range(self.task.text.sequence_length)
        rows = NestedMap(
            ids=batch.ids,
            segment_ids=tf.cast(batch.ids != 0, tf.int32),
            segment_positions=tf.broadcast_to(positions, shape_of(batch.ids)),
        )
        logits = self.task.logits(ctx, theta, rows)
        return NestedMap(log_probs=tf.nn.log_softmax(tf.cast(logits, tf.float32)))
