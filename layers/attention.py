"""Multi-head self-attention.

Dims: B batch, S sequence (query), T sequence (key), M model, N heads, D head size.
"""

from __future__ import annotations

import dataclasses

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import check_number
from meshwright.framework.modeling.initializers import Constant, FanIn, Normal
from meshwright.framework.modeling.layer import Context, Layer, WeightSpec
from meshwright.framework.modeling.recompute import save_name
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.dropout import Dropout
from meshwright.layers.linear import BSM, contract, contract_each
from meshwright.layers.positions import (
    MaskKind,
    PositionKind,
    relative_bias,
    rotate,
)

BSND = ("batch", "sequence", "heads", "head_dim")

# Finite: a row with no key to see must come out as numbers, and so must its gradient.
_NEVER = -1e30


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHeadAttention(Layer):
    """Scaled dot-product self-attention (Vaswani et al. 2017), annotated as GSPMD 5.1.

    Recomputation may save `query`, `key`, `value`, `context` and `attention_out`.

    Args:
      model_dims: M.
      num_heads: N.
      head_dim: D, even for rotary positions.
      mask: whether queries see later keys; index order counts.
      positions: how positions enter.
      rotary_base: for rotary positions, see `rotate`.
      num_buckets: for relative positions, see `relative_bucket`.
      max_distance: for relative positions, see `relative_bucket`.
      dropout_rate: of attention probabilities.
      use_bias: adds a bias to each of the four projections.

    Raises:
      ValueError: rotary positions with an odd head size; a rate out of range.
    """

    model_dims: int
    num_heads: int
    head_dim: int
    mask: MaskKind = MaskKind.CAUSAL
    positions: PositionKind = PositionKind.NONE
    rotary_base: float = 10000.0
    num_buckets: int = 32
    max_distance: int = 128
    dropout_rate: float = 0.0
    use_bias: bool = False

    def __post_init__(self):
        check_number(self, "dropout_rate", at_least=0, below=1)
        if self.positions is PositionKind.ROTARY and self.head_dim % 2:
            raise ValueError(
                f"rotary positions turn pairs of features, but head_dim is "
                f"{self.head_dim}: make it even"
            )

    def weights(self) -> NestedMap:
        M, N, D = self.model_dims, self.num_heads, self.head_dim
        w_in = WeightSpec(
            shape=(M, N, D), dims=("model", "heads", "head_dim"), initializer=FanIn()
        )
        w_o = WeightSpec(
            shape=(N, D, M),
            dims=("heads", "head_dim", "model"),
            initializer=FanIn(in_dims=2),
        )
        specs = NestedMap(w_q=w_in, w_k=w_in, w_v=w_in, w_o=w_o)
        if self.use_bias:
            zero = Constant(0.0)
            b_in = WeightSpec(
                shape=(N, D), dims=("heads", "head_dim"), initializer=zero
            )
            b_o = WeightSpec(shape=(M,), dims=("features",), initializer=zero)
            specs.update(b_q=b_in, b_k=b_in, b_v=b_in, b_o=b_o)
        if self.positions is PositionKind.RELATIVE:
            specs.relative_bias = WeightSpec(
                shape=(self.num_buckets, N),
                dims=("relative_buckets", "heads"),
                initializer=Normal(0.02),
            )
        return specs

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        paddings: tf.Tensor | None = None,
        segment_ids: tf.Tensor | None = None,
        segment_positions: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Attends from every token to those it may see.

        Args:
          ctx: context.
          theta: weights.
          x: [B, S, M].
          paddings: [B, S], 1 at tokens that no one may see, 0 elsewhere.
          segment_ids: int32 [B, S]; tokens see only tokens of their own segment.
          segment_positions: int32 [B, S], for rotary positions; the index by default,
            which gives the same up to rounding where segments lie side by side.

        Returns:
          [B, S, M] in the activation dtype.

        Raises:
          ValueError: the last dim of `x` is not M.
        """
        q, k, v = self._project(ctx, theta, x)
        if self.positions is PositionKind.ROTARY:
            if segment_positions is None:
                segment_positions = tf.range(x.shape[1])[None, :]
            q = rotate(q, segment_positions, base=self.rotary_base)
            k = rotate(k, segment_positions, base=self.rotary_base)
        probs = self._probabilities(ctx, theta, q, k, paddings, segment_ids)
        context = ctx.split(tf.einsum("bnst,btnd->bsnd", probs, v), BSND)
        context = save_name(context, "context")
        out = ctx.split(contract(ctx, context, theta.w_o, dims=2), BSM)
        out = save_name(out, "attention_out")
        return out + ctx.cast(theta.b_o) if self.use_bias else out

    def extra_flops(self, sequence_length: int) -> float:
        """Of two S x S products; what a causal mask hides counts too, as is usual."""
        return 4.0 * sequence_length * self.num_heads * self.head_dim

    def _project(self, ctx, theta, x) -> list[tf.Tensor]:
        """Queries, keys and values of `x`, each [B, S, N, D]."""
        projected = contract_each(ctx, x, [theta.w_q, theta.w_k, theta.w_v])
        projected = [ctx.split(heads, BSND) for heads in projected]
        if self.use_bias:
            biases = (theta.b_q, theta.b_k, theta.b_v)
            pairs = zip(projected, biases, strict=True)
            projected = [heads + ctx.cast(bias) for heads, bias in pairs]
        names = ("query", "key", "value")
        return [save_name(h, n) for h, n in zip(projected, names, strict=True)]

    def _probabilities(self, ctx, theta, q, k, paddings, segment_ids) -> tf.Tensor:
        """What each query takes from each key: [B, N, S, T], activation dtype."""
        size = q.shape[1]
        logits = tf.einsum("bsnd,btnd->bnst", q * self.head_dim**-0.5, k)
        logits = tf.cast(logits, tf.float32)
        if self.positions is PositionKind.RELATIVE:
            logits += relative_bias(
                tf.cast(theta.relative_bias, tf.float32),
                size,
                mask=self.mask,
                max_distance=self.max_distance,
            )
        visible = visibility(size, self.mask, paddings, segment_ids)
        if visible is not None:
            logits += tf.where(visible, 0.0, _NEVER)[:, None, :, :]
        probs = ctx.cast(tf.nn.softmax(logits))
        with ctx.scope("dropout") as c:
            return Dropout(rate=self.dropout_rate).fprop(c, NestedMap(), probs)


def visibility(
    size: int,
    mask: MaskKind,
    paddings: tf.Tensor | None = None,
    segment_ids: tf.Tensor | None = None,
) -> tf.Tensor | None:
    """Which keys each query sees.

    Args:
      size: S.
      mask: by position.
      paddings: [B, S], 1 at keys that no one sees.
      segment_ids: int32 [B, S], equal for tokens that see each other.

    Returns:
      bool [B or 1, S or 1, S], query before key, or None where every key is seen.
    """
    parts = []
    if mask is MaskKind.CAUSAL:
        index = tf.range(size)
        parts.append((index[:, None] >= index[None, :])[None])
    if segment_ids is not None:
        parts.append(segment_ids[:, :, None] == segment_ids[:, None, :])
    if paddings is not None:
        parts.append((paddings == 0)[:, None, :])
    visible = None
    for part in parts:
        visible = part if visible is None else visible & part
    return visible
