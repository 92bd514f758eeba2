"""Embeddings of tokens, and logits of vectors.

Dims: B batch, S sequence, M model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.initializers import FanIn, Normal
from meshwright.framework.modeling.layer import Context, Layer, WeightSpec
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.basic.linear import contract, read_stream, to_stream

BSV = ("batch", "sequence", "vocab")


@gin.constants_from_enum
class Lookup(enum.Enum):
    """How table rows are picked.

    GATHER reads these rows alone. Where the vocabulary is split, each device reads the
    rows that it has, and an all-reduce adds zeros for the others. ONE_HOT is a product
    of one-hot rows with the table, of which a TPU's matrix units do a part, and which
    computes as much as a softmax over the vocabulary.
    """

    GATHER = "gather"
    ONE_HOT = "one_hot"


@gin.constants_from_enum
class SoftmaxKind(enum.Enum):
    """Whether the output layer uses the embedding's table or its own weights."""

    SHARED = "shared"
    SEPARATE = "separate"


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenEmbedding(Layer):
    """A table of token vectors, which may also be the output layer.

    A shared table starts with standard deviation M^-0.5, right for logits, and rows
    that are looked up are scaled by M^0.5; a separate table starts at 1, unscaled.

    Args:
      vocab_size: V.
      model_dims: M.
      lookup: how rows are picked.
      softmax: whether `attend` is used as the output layer.
      input_scale: what rows that are looked up are multiplied by; None: as above.

    Raises:
      ValueError: a scale that is not above 0.
    """

    vocab_size: int = bounded(at_least=1)
    model_dims: int = bounded(at_least=1)
    lookup: Lookup = Lookup.GATHER
    softmax: SoftmaxKind = SoftmaxKind.SEPARATE
    input_scale: float | None = bounded(None, above=0)

    @property
    def scale(self) -> float:
        """What rows that are looked up are multiplied by."""
        if self.input_scale is not None:
            return self.input_scale
        return self.model_dims**0.5 if self.softmax is SoftmaxKind.SHARED else 1.0

    def weights(self) -> NestedMap:
        shared = self.softmax is SoftmaxKind.SHARED
        return NestedMap(
            table=WeightSpec(
                shape=(self.vocab_size, self.model_dims),
                dims=("vocab", "model"),
                initializer=Normal(self.model_dims**-0.5 if shared else 1.0),
            )
        )

    def fprop(self, ctx: Context, theta: NestedMap, ids: tf.Tensor) -> tf.Tensor:
        """The vectors [B, S, M], in the activation dtype, of `ids` [B, S] in [0, V)."""
        return self.fprop_each(ctx, theta, [ids])[0]

    def fprop_each(
        self, ctx: Context, theta: NestedMap, ids: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """`fprop` of several `ids`, in one lookup where they are gathered and alike.

        The gradient of a lookup has the table's size: that of one is written once.
        """
        table = theta.table
        if not ctx.widens_gradients:  # First: then the rows of a smaller table move.
            table = ctx.cast(table)
        first, *others = (each.shape.as_list() for each in ids)
        alike = all(shape == first for shape in others)
        if len(ids) > 1 and alike and self.lookup is Lookup.GATHER:
            together = tf.stack(ids, axis=1)
            rows = pick_rows(ctx, table, together, self.lookup)
            picked = tf.unstack(rows, axis=1)
        else:
            picked = [pick_rows(ctx, table, each, self.lookup) for each in ids]
        picked = [to_stream(ctx, x) for x in picked]
        return picked if self.scale == 1 else [x * self.scale for x in picked]

    def attend(self, ctx: Context, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Logits [B, S, V] of `x` [B, S, M] by the shared table, activation dtype.

        Raises:
          ValueError: the table is not shared; the last dim of `x` is not M.
        """
        if self.softmax is not SoftmaxKind.SHARED:
            raise ValueError(
                f"layer {ctx.path!r} cannot compute logits, as its table is not scaled "
                "for them: set softmax=SHARED, or use a Softmax layer"
            )
        x = read_stream(ctx, x)
        return ctx.split(contract(ctx, x, tf.transpose(theta.table)), BSV)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Softmax(Layer):
    """An output layer with its own weights.

    Args:
      model_dims: M.
      vocab_size: V.
    """

    model_dims: int = bounded(at_least=1)
    vocab_size: int = bounded(at_least=1)

    def weights(self) -> NestedMap:
        return NestedMap(
            kernel=WeightSpec(
                shape=(self.model_dims, self.vocab_size),
                dims=("model", "vocab"),
                initializer=FanIn(),
            )
        )

    def fprop(self, ctx: Context, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Logits [B, S, V] of `x` [B, S, M], in the activation dtype.

        Raises:
          ValueError: the last dim of `x` is not M.
        """
        return ctx.split(contract(ctx, read_stream(ctx, x), theta.kernel), BSV)


def check_vocab_size(
    layer: TokenEmbedding | Softmax, needed: int, vocabulary: str
) -> None:
    """Raises ValueError if a layer has fewer ids than an input's `vocabulary`."""
    if layer.vocab_size < needed:
        raise ValueError(
            f"{type(layer).__name__}.vocab_size {layer.vocab_size} is smaller than the "
            f"{needed} of {vocabulary}: raise it to that"
        )


def pick_rows(
    ctx: Context, table: tf.Tensor, ids: tf.Tensor, lookup: Lookup
) -> tf.Tensor:
    """The rows of a table that `ids` name.

    Args:
      ctx: gives the activation dtype.
      table: [V, M]. In its dtype a gather's gradient adds up the gradients of a row.
      ids: integers [...], in [0, V).
      lookup: how rows are picked.

    Returns:
      [..., M] in the activation dtype.
    """
    if lookup is Lookup.GATHER:
        return _gathered(ctx, table, ids)
    one_hot = tf.one_hot(ids, table.shape[0], dtype=ctx.activation_dtype)
    return contract(ctx, one_hot, table)


def _gathered(ctx: Context, table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    if not ctx.widens_gradients:
        # The reshape keeps the shape; its gradient makes the gather's dense.
        return ctx.cast(tf.gather(tf.reshape(table, table.shape), ids))

    @tf.custom_gradient
    def gathered(table):
        def gradient(dy):
            rows = tf.reshape(tf.cast(dy, ctx.gradient_dtype), [-1, table.shape[1]])
            number = tf.reshape(ids, [-1])
            summed = tf.math.unsorted_segment_sum(rows, number, table.shape[0])
            return tf.cast(summed, table.dtype)

        return tf.gather(ctx.cast(table), ids), gradient

    return gathered(table)
