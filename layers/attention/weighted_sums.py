"""What attention adds up: weighted sums of values, computed in one of several ways.

Dims: B batch, S sequence (query), T sequence (key), N heads, K heads of keys and
values, D head size.
"""

from __future__ import annotations

import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.modeling.recompute import save_name
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import SequenceAttention
from meshwright.layers.attention.blocks import AUTO_SIZE, AUTO_TOKENS, Blocks
from meshwright.layers.attention.blockwise import attend_in_blocks
from meshwright.layers.attention.fused import (
    Attention,
    Kernel,
    attend_by_kernel,
    dims_of_keys,
    for_each_head,
    kernel_of,
)
from meshwright.layers.attention.learned_terms import Learned, softmax
from meshwright.layers.attention.logits import Logits
from meshwright.layers.attention.split.ring import attend_in_ring
from meshwright.layers.attention.split.sequence_splits import (
    BSND,
    by_heads,
    splits_sequence,
    way_of,
)
from meshwright.layers.basic.dropout import Dropout

_RING_SIZES = {Blocks.AUTO: AUTO_SIZE, Blocks.NONE: None}


def weighted_sums(
    ctx: Context,
    logits: Logits,
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    learned: Learned,
    *,
    dropout: Dropout,
    block_size: int | Blocks,
    kernel: Kernel,
    is_step: bool,
) -> tf.Tensor:
    """The sums of values [B, S, N, D] in the activation dtype, named "context".

    Args:
      ctx: context; its plan says what devices do where it splits the sequence.
      logits: what is visible, and how logits are finished.
      q: queries [B, S, N, D], scaled.
      k: keys [B, T, K, D].
      v: values [B, T, K, D].
      learned: what joins the logits and values.
      dropout: of the weights.
      block_size: see `MultiHeadAttention`.
      kernel: likewise; a step with a cache uses none.
      is_step: whether it is part of a step with a cache. Where keys are gathered, its
        queries are attended from at once, whatever `block_size` says.

    Raises:
      ValueError: blocks, a ring or heads do not go with the plan; a kernel is asked
        for that cannot compute this.
    """
    # Queries that have the same index are as a single one.
    queries = q.shape[1] if logits.relative is None else 1
    way = way_of(ctx, queries)
    key_dims = dims_of_keys(q, k)
    inside = ctx
    if way is SequenceAttention.ALL_TO_ALL:
        counts = {"num_heads": q.shape[2], "num_kv_heads": k.shape[2]}
        inside = by_heads(ctx, counts)
        q = inside.split(q, BSND)
        k, v = (inside.split(t, key_dims) for t in (k, v))
    attention = Attention(
        ctx=inside, logits=logits, q=q, k=k, v=v, learned=learned, dropout=dropout
    )
    chosen = Kernel.NONE if is_step else kernel_of(attention, kernel, block_size)
    if chosen is not Kernel.NONE:
        context = attend_by_kernel(attention, chosen, block_size)
        return context if inside is ctx else ctx.split(context, BSND)
    if way is SequenceAttention.RING:
        return attend_in_ring(
            ctx,
            logits,
            q,
            k,
            v,
            learned,
            key_dims=key_dims,
            dropout=dropout,
            block_size=_RING_SIZES.get(block_size, block_size),
        )
    k, v = (for_each_head(inside, heads, q.shape[2]) for heads in (k, v))
    size = _size(ctx, block_size, queries, k.shape[1], is_step)
    if size is None:
        context = _at_once(inside, logits, q, k, v, learned, dropout)
    else:
        context = attend_in_blocks(
            inside, logits, q, k, v, learned, dropout=dropout, block_size=size
        )
        context = inside.split(context, BSND)
    return context if inside is ctx else ctx.split(context, BSND)


def _at_once(ctx, logits: Logits, q, k, v, learned, dropout: Dropout) -> tf.Tensor:
    probs = ctx.cast(softmax(logits.of_all(ctx, q, k, learned), learned.sink))
    with ctx.scope("dropout") as c:
        probs = dropout.fprop(
            c, NestedMap(), probs, read_by_products=True, dead_at_zero=True
        )
    context = tf.einsum("bnst,btnd->bsnd", probs, v)
    if learned.to_values is not None:
        context += learned.to_values.sums(ctx, probs, logits.offset, logits.relative)
    return save_name(ctx.split(context, BSND), "context")


def _size(
    ctx: Context,
    block_size: int | Blocks,
    queries: int | None,
    keys: int,
    is_step: bool,
) -> int | None:
    """The most tokens of a block, None for no blocks.

    A step has few queries (a number unknown if the batch is), or a prompt's.
    """
    if block_size is Blocks.NONE or queries in (None, 1):
        return None
    gathers = ctx.plan.sequence_attention is SequenceAttention.GATHER
    is_split = gathers and splits_sequence(ctx)
    if block_size is Blocks.AUTO:
        is_long = queries * keys >= AUTO_TOKENS**2
        return AUTO_SIZE if is_long and not is_split else None
    if is_split and is_step:
        return None
    if is_split:
        raise ValueError(
            f"layer {ctx.path!r} has blocks of {block_size} tokens, but the plan "
            "splits 'sequence', so that each block would be gathered: set "
            "ShardingPlan.sequence_attention to SequenceAttention.RING or "
            "ALL_TO_ALL, or block_size to Blocks.AUTO or Blocks.NONE"
        )
    return block_size
