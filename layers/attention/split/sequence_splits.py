"""How attention is computed where a plan splits the sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.sharding.plan import SequenceAttention

BSND = ("batch", "sequence", "heads", "head_dim")


def splits_sequence(ctx: Context) -> bool:
    """Whether the context's plan splits the sequence of queries and keys."""
    return ctx.plan.activation_sharding(BSND, ctx.path).splits()[1] > 1


def way_of(ctx: Context, queries: int | None) -> SequenceAttention:
    """How a sequence of so many queries is attended to.

    A single query, or a number unknown as the batch is, is as in `GATHER`; so is eager
    execution, which has no mesh.

    Raises:
      ValueError: a ring in a pipeline.
    """
    is_short = queries in (None, 1)
    if is_short or tf.executing_eagerly() or not splits_sequence(ctx):
        return SequenceAttention.GATHER
    way = ctx.plan.sequence_attention
    if way is SequenceAttention.RING and ctx.plan.pipeline_axes is not None:
        raise ValueError(
            f"layer {ctx.path!r} is in a pipeline, whose stages cannot hold a ring of "
            "attention: set ShardingPlan.sequence_attention to "
            "SequenceAttention.ALL_TO_ALL, or leave out the pipeline"
        )
    return way


def by_heads(ctx: Context, heads: Mapping[str, int]) -> Context:
    """The context in which heads are split in place of the sequence.

    Args:
      ctx: context, whose plan splits "sequence".
      heads: the numbers of heads that are split, by the names of their settings.

    Raises:
      ValueError: the devices do not divide a number of heads.
    """
    inside = dataclasses.replace(ctx, plan=ctx.plan.with_split_heads())
    devices = inside.plan.activation_sharding(BSND, ctx.path).splits()[2]
    for name, count in heads.items():
        if count % devices:
            raise ValueError(
                f"layer {ctx.path!r}: {name} is {count}, which the {devices} devices "
                "that the plan splits heads and 'sequence' over do not divide: with "
                "SequenceAttention.ALL_TO_ALL make it a multiple of them, or set "
                "ShardingPlan.sequence_attention to SequenceAttention.RING"
            )
    return inside
