"""Decoder-only language modelling.

Dims: B batch, S sequence, M model, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Layer
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.mask_rules import (
    MaskKind,
    MaskRule,
    NearMask,
    PrefixMask,
    rule_of,
)
from meshwright.layers.experts.moe import merge_aux
from meshwright.layers.stacks.pipelines.one_f_one_b import LossHead
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.sequential import each_layer
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.input.token_dataset import TokenDataset
from meshwright.tasks.task import Serving, TaskLoss
from meshwright.tasks.text.text_input import TextInput
from meshwright.tasks.text.text_task import TextTask


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel(TextTask):
    """Predicts each next token: embedding, a stack of layers, softmax.

    Args:
      text: the input, a `TextInput` or `TokenDataset`; a batch has ids, labels,
        weights, segment_ids and segment_positions, each [B, S].
      stack: L layers from [B, S, M] to [B, S, M], such as `Repeat` or `Pipeline`.
      final_norm: normalization before the softmax.

    Raises:
      ValueError: attention by which tokens see those after them; `loss_parts` above 1
        with a pipeline in the order `ONE_F_ONE_B`; see `TextTask`.
    """

    stacks = ("stack",)

    text: TextInput | TokenDataset
    stack: Layer
    final_norm: Layer

    def __post_init__(self):
        super().__post_init__()
        for path, rule in _masks(self.stack, "LanguageModel.stack"):
            if isinstance(rule, NearMask) and rule.right != 0:
                raise ValueError(
                    f"{path} lets tokens see those after them, which they are to "
                    f"predict ({rule}): make it MaskKind.CAUSAL, or a NearMask with "
                    "right = 0"
                )

        stack = self.stack
        if (
            isinstance(stack, Pipeline)
            and stack.schedule.is_one_f_one_b
            and self.loss_parts > 1
        ):
            raise ValueError(
                f"LanguageModel.loss_parts is {self.loss_parts}, but Pipeline.order = "
                f"{stack.order} computes logits of a microbatch at a time: set "
                "LanguageModel.loss_parts = 1"
            )

    @property
    def prefix_length(self) -> int:
        """How many first tokens of a document a `PrefixMask` of the stack shows."""
        rules = (rule for _, rule in _masks(self.stack, "LanguageModel.stack"))
        return max((r.length for r in rules if isinstance(r, PrefixMask)), default=0)

    def hidden(
        self, ctx: Context, theta: NestedMap, batch: NestedMap
    ) -> tuple[tf.Tensor, NestedMap]:
        """What logits are computed of, [B, S, M] in the activation dtype; `aux`."""
        (x,) = self.embed(ctx, theta, (batch.ids, batch.segment_positions))
        x, aux = self.run_stack(ctx, theta, "stack", x, **_rows(batch))
        with ctx.scope("final_norm") as c:
            return self.final_norm.fprop(c, theta.final_norm, x), aux

    def logits(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> tf.Tensor:
        """Logits [B, S, V] of the next token, in the activation dtype."""
        x, _ = self.hidden(ctx, theta, batch)
        return self.to_logits(ctx, theta, x)

    def init_cache(self, ctx: Context, batch: int, length: int) -> NestedMap:
        """The cache of `step` for `length` tokens of each of `batch` rows, still empty.

        Raises:
          ValueError: a layer of the stack has no decoding; the message names it.
        """
        _check_steps(self.stack, "LanguageModel.stack")
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
        segment_positions: tf.Tensor,
        **inputs: tf.Tensor,
    ) -> tuple[tf.Tensor, NestedMap]:
        """`hidden` of one more token of each row, or of the first ones at once.

        Args:
          ctx: context of `Mode.EVAL`.
          theta: weights.
          ids: int32 [B, 1], or [B, S]: see `MultiHeadAttention.step`.
          cache: as `init_cache` or `step` returned it.
          position: see `MultiHeadAttention.step`, as the next two.
          segment_positions: int32 [B, S].
          **inputs: paddings, and times.

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
                segment_positions=segment_positions,
                **inputs,
            )
        with ctx.scope("final_norm") as c:
            return self.final_norm.fprop(c, theta.final_norm, x), cache

    def loss(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> TaskLoss:
        """Mean loss in nats over tokens of weight 1, smoothed and with the z-loss.

        The losses of mixtures of experts are added; `sums.nats` is without any of them.
        Tokens of a prefix, which are seen where they would be predicted, do not count.
        """
        weights, prefix = batch.weights, self.prefix_length
        if prefix > 1:
            is_seen = batch.segment_positions + 1 < prefix
            weights = tf.where(is_seen, 0.0, weights)
        with ctx.scope("loss"):
            count = ctx.split(tf.reduce_sum(weights), ())
        stack = self.stack
        if isinstance(stack, Pipeline) and stack.trains_with_loss(ctx):
            return self._loss_within(ctx, theta, batch, weights, count)
        x, aux = self.hidden(ctx, theta, batch)
        sums = self.token_loss(ctx, theta, x, batch.labels, weights)
        with ctx.scope("loss"):
            nats, total = ctx.split(sums.nats, ()), ctx.split(sums.total, ())
            loss = total / tf.maximum(count, 1.0)
        return self.total_loss(loss, NestedMap(nats=nats, tokens=count), aux)

    def _loss_within(
        self,
        ctx: Context,
        theta: NestedMap,
        batch: NestedMap,
        weights: tf.Tensor,
        count: tf.Tensor,
    ) -> TaskLoss:
        """`loss`, of each microbatch within the pipeline."""

        def of_rows(ctx, theta, x, rows):
            with ctx.scope("final_norm") as c:
                x = self.final_norm.fprop(c, theta.final_norm, x)
            sums = self.token_loss(ctx, theta, x, rows.labels, rows.weights)
            return sums.total / tf.maximum(count, 1.0), {"nats": sums.nats}

        names = ("final_norm", "embedding" if self.softmax is None else "softmax")
        read, specs = (
            NestedMap({name: tree[name] for name in names if name in tree})
            for tree in (theta, self.weights())
        )
        head = LossHead(
            ctx=ctx,
            fn=of_rows,
            theta=read,
            specs=specs,
            rows=NestedMap(labels=batch.labels, weights=weights),
            sums=("nats",),
            aux_loss=lambda aux: merge_aux(aux).loss,
        )
        (x,) = self.embed(ctx, theta, (batch.ids, batch.segment_positions))
        with ctx.scope("stack") as c:
            made = self.stack.loss(c, theta.stack, x, head, **_rows(batch))
        sums = NestedMap(nats=made.sums.nats, tokens=count)
        if made.aux is not None:
            sums.stack = merge_aux(made.aux).sums
        return TaskLoss(loss=made.loss, sums=sums)

    @property
    def serving(self) -> NextTokens:
        return NextTokens(self)

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        metrics = super().metrics(sums)
        if not isinstance(self.text, TextInput):  # Nobody knows their bytes.
            return metrics
        # All tokens are bytes, or as many bytes in the mean as those held out.
        tokens_of_a_byte = 1.0
        if self.subwords is not None:
            held_out = self.text.statistics(Split.HELD_OUT)
            tokens_of_a_byte = held_out.tokens / held_out.text_bytes
        bits = metrics["loss"] * tokens_of_a_byte / math.log(2)
        return {**metrics, "bits_per_byte": bits}

    def describe_data(self) -> dict[str, float]:
        if not isinstance(self.text, TextInput):
            return super().describe_data()
        train = self.text.statistics(Split.TRAIN)
        held_out = self.text.statistics(Split.HELD_OUT)
        facts = {
            "training files": train.documents,
            "training bytes": train.text_bytes,
            "held-out files": held_out.documents,
            "held-out bytes": held_out.text_bytes,
            "unigram entropy, bits per byte": train.unigram_entropy,
        }
        if self.subwords is not None:
            facts["training tokens"] = train.tokens
        return facts

    def data_fingerprint(self) -> dict[str, str | int]:
        if not isinstance(self.text, TextInput):
            return super().data_fingerprint()
        vocabulary = {}
        if self.subwords is not None:
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


def _rows(batch: NestedMap) -> dict[str, tf.Tensor]:
    """What layers read of a batch besides embeddings."""
    return {
        "token_ids": batch.ids,
        "segment_ids": batch.segment_ids,
        "segment_positions": batch.segment_positions,
    }


def _masks(stack: Layer, path: str) -> Iterator[tuple[str, MaskRule]]:
    """The rule of each layer's attention, and the fields that lead to it."""
    for name, layer in each_layer(stack, path):
        mask = getattr(getattr(layer, "attention", None), "mask", None)
        if isinstance(mask, MaskKind | MaskRule):
            yield f"{name}.attention.mask", rule_of(mask)


def _check_steps(stack: Layer, path: str) -> None:
    """Refuses a stack with a layer that cannot decode token by token."""
    for name, layer in each_layer(stack, path):
        if not (hasattr(layer, "step") and hasattr(layer, "init_cache")):
            raise ValueError(
                f"{name} is {type(layer).__name__}, which cannot decode token by "
                "token: generate with transformer_layer there, or give the class "
                "`init_cache` and `step` as TransformerLayer has them"
            )


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
            # A text of T5's tokens starts with a 0.
            segment_ids=tf.cast((batch.ids != 0) | (positions == 0), tf.int32),
            segment_positions=tf.broadcast_to(positions, shape_of(batch.ids)),
        )
        logits = self.task.logits(ctx, theta, rows)
        return NestedMap(log_probs=tf.nn.log_softmax(tf.cast(logits, tf.float32)))
