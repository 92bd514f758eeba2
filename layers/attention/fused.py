"""Attention by a fused kernel, where devices have one.

Dims: B batch, S sequence (query), T sequence (key), N heads, K heads of keys and
values, D head size.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gin
import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.modeling.recompute import save_name
from meshwright.framework.modeling.shapes import copies_of_each
from meshwright.framework.sharding.manual import (
    auto_to_manual,
    in_manual_partition,
    manual_to_auto,
)
from meshwright.framework.sharding.placeholders import kernel, traced_for
from meshwright.framework.sharding.vectorize import is_vectorized
from meshwright.layers.attention.blocks import AUTO_SIZE, AUTO_TOKENS, Blocks
from meshwright.layers.attention.learned_terms import Learned
from meshwright.layers.attention.logits import Logits
from meshwright.layers.attention.mask_rules import NearMask, rule_of
from meshwright.layers.attention.split.sequence_splits import BSND, splits_sequence
from meshwright.layers.basic.dropout import Dropout


@gin.constants_from_enum
class Kernel(enum.Enum):
    """Whether a fused kernel computes attention.

    AUTO: in long sequences with `Blocks.AUTO` SPLASH, on TPUs for which it is compiled,
    if it can. NONE: never. SPLASH: JAX's splash attention, which is for TPUs; CPUs
    interpret it, slowly, for tests. CUDNN: cuDNN's attention, for NVIDIA's GPUs.
    """

    AUTO = "auto"
    NONE = "none"
    SPLASH = "splash"
    CUDNN = "cudnn"


BTKD = ("batch", "sequence", "kv_heads", "head_dim")
LANES = 128
"""What lengths that the kernel computes are multiples of."""
# Others would have small tiles.
_AUTO_MULTIPLE = 512
SPLASH_TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
"""The kinds that libtpu compiles the kernel for."""
_DTYPES = {
    Kernel.SPLASH: (tf.float32, tf.bfloat16),
    Kernel.CUDNN: (tf.bfloat16, tf.float16),
}
_HIDDEN = tf.int32.min
"""The segment of keys that no query sees."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """What is to be computed, see `weighted_sums`, whose arguments these are."""

    ctx: Context
    logits: Logits
    q: tf.Tensor
    k: tf.Tensor
    v: tf.Tensor
    learned: Learned
    dropout: Dropout


def dims_of_keys(q: tf.Tensor, k: tf.Tensor) -> tuple[str, ...]:
    """The names of the dims of keys [B, T, K, D] of queries, and of their values."""
    return BSND if k.shape[2] == q.shape[2] else BTKD


def for_each_head(ctx: Context, heads: tf.Tensor, count: int) -> tf.Tensor:
    """Keys or values [B, T, K, D] for the heads of queries: [B, T, N, D]."""
    copies = count // heads.shape[2]
    if copies == 1:
        return heads
    return ctx.split(copies_of_each(heads, copies, 2), BSND)


def kernel_of(
    attention: Attention, setting: Kernel, block_size: int | Blocks
) -> Kernel:
    """The kernel that computes it, for the devices that it is traced for, or NONE.

    What is not traced for devices, such as eager execution, has none.

    Raises:
      ValueError: a kernel is asked for that cannot.
    """
    if setting is Kernel.NONE or traced_for() is None:
        return Kernel.NONE
    if setting is Kernel.AUTO:
        queries, keys = (heads.shape[1] for heads in (attention.q, attention.k))
        if block_size is not Blocks.AUTO or None in (queries, keys):
            return Kernel.NONE
        if queries * keys < AUTO_TOKENS**2 or traced_for() not in SPLASH_TPUS:
            return Kernel.NONE
        if queries % _AUTO_MULTIPLE or keys % _AUTO_MULTIPLE:
            return Kernel.NONE
        can = not any(_obstacles(attention, Kernel.SPLASH, block_size))
        return Kernel.SPLASH if can else Kernel.NONE
    for obstacle in _obstacles(attention, setting, block_size):
        raise ValueError(
            f"layer {attention.ctx.path!r}: Kernel.{setting.name} cannot compute its "
            f"attention, {obstacle}; or set kernel to Kernel.AUTO or Kernel.NONE"
        )
    return setting


def _obstacles(
    attention: Attention, asked: Kernel, block_size: int | Blocks
) -> Iterator[str]:
    """Why a kernel cannot compute it, each with a remedy."""
    ctx, mask = attention.ctx, attention.logits.mask
    kinds = ("cuda",) if asked is Kernel.CUDNN else (*SPLASH_TPUS, "cpu")
    if traced_for() not in kinds:
        yield f"as the devices are {traced_for()}: use {', '.join(kinds)}"
    if ctx.plan.pipeline_axes is not None:
        yield "which is in a pipeline: leave out the pipeline"
    if in_manual_partition():
        yield "which is in a manual region: call it outside of manual_partition"
    if is_vectorized():
        yield "which is vectorized: call it outside of tf.vectorized_map"
    if splits_sequence(ctx):
        yield (
            "as the plan splits 'sequence': set ShardingPlan.sequence_attention to "
            "SequenceAttention.ALL_TO_ALL"
        )
    rule = rule_of(mask)
    if type(rule) is not NearMask:
        yield f"whose mask is {mask}: make it a MaskKind or a NearMask"
    elif rule.first:
        yield "whose window has first keys: set NearMask.first to 0"
    yield from _learned(attention.learned)
    if attention.dropout.drops(ctx):
        yield "which drops out probabilities: set dropout_rate to 0"
    dtypes, dtype = _DTYPES[asked], attention.q.dtype
    if dtype not in dtypes:
        names = " or ".join(allowed.name for allowed in dtypes)
        yield f"whose activations are {dtype.name}: use {names}"
    yield from _uneven(attention)
    if asked is Kernel.CUDNN:
        yield from _beyond_cudnn(attention)
    else:
        yield from _beyond_splash(attention, block_size)


def _learned(learned: Learned) -> Iterator[str]:
    """Learned terms: a kernel knows of none."""
    if learned.sink is not None:
        yield "which has sinks: set sink to Sink.NONE"
    if (learned.bias, learned.to_keys, learned.to_values) != (None,) * 3:
        yield "which has relative positions: use PositionKind.ROTARY"


def _beyond_splash(attention: Attention, block_size: int | Blocks) -> Iterator[str]:
    for name, heads in ("queries", attention.q), ("keys", attention.k):
        count = heads.shape[1]
        if count is None or count % LANES:
            yield f"as it has {count} {name}: make their number a multiple of {LANES}"
    head_dim = attention.q.shape[3]
    if head_dim > 2 * LANES:
        yield f"whose head_dim is {head_dim}: make it at most {2 * LANES}"
    if isinstance(block_size, int) and block_size < LANES:
        yield f"whose block_size is {block_size}: make it {LANES} or more"


def _beyond_cudnn(attention: Attention) -> Iterator[str]:
    logits, rule = attention.logits, rule_of(attention.logits.mask)
    head_dim = attention.q.shape[3]
    if head_dim % 8 or head_dim > 128:
        yield f"whose head_dim is {head_dim}: make it a multiple of 8, at most 128"
    if (rule.left, rule.right) != (None, None) and rule.right != 0:
        yield f"whose mask is {rule}: make its right 0"
    if logits.cap is not None:
        yield f"whose logit_cap is {logits.cap}: set it to None"
    if logits.queries.segment is not None or logits.paddings is not None:
        yield "which has segments or paddings: leave them out"


def _uneven(attention: Attention) -> Iterator[str]:
    """Dims of queries that devices cannot share evenly."""
    sharding = attention.ctx.plan.activation_sharding(BSND, attention.ctx.path)
    names = ("rows", "tokens", "heads", "features of a head")
    for d, (size, split) in enumerate(
        zip(attention.q.shape, sharding.splits(), strict=True)
    ):
        if size is None or size % split or (d == 3 and split > 1):
            yield (
                f"as the plan splits its {size} {names[d]} over {split} devices: make "
                "them a multiple, or split another dim"
            )


def attend_by_kernel(
    attention: Attention, chosen: Kernel, block_size: int | Blocks
) -> tf.Tensor:
    """The weighted sums of values, by the kernel that `kernel_of` chose.

    Its logits are float32. There is no second gradient. A query that sees no key gets a
    mean of values, but no right gradient.

    Args:
      attention: what is computed.
      chosen: the kernel.
      block_size: the most tokens of a tile, if it is a number.

    Returns:
      [B, S, N, D] in the activation dtype, named "context".
    """
    ctx, logits = attention.ctx, attention.logits
    rule = rule_of(logits.mask)
    config = {"left": rule.left, "right": rule.right}
    if chosen is Kernel.SPLASH:
        config["cap"] = logits.cap
        config["tile"] = AUTO_SIZE if isinstance(block_size, Blocks) else block_size
        config["interpret"] = traced_for() == "cpu"
    q, k, v = attention.q, attention.k, attention.v
    key_dims = dims_of_keys(q, k)
    if not _has_whole_groups(ctx, key_dims, k.shape[2]):
        # A device's heads of queries would not find theirs among its heads of keys.
        k, v = (for_each_head(ctx, t, q.shape[2]) for t in (k, v))
        key_dims = BSND
    run = _Fused(
        ctx=ctx,
        chosen=chosen,
        config=config,
        key_dims=key_dims,
        segments=_segments(attention),
    )
    heads = [tf.transpose(t, [0, 2, 1, 3]) for t in (q, k, v)]
    out = tf.custom_gradient(run.fprop)(*heads)
    return ctx.split(tf.transpose(out, [0, 2, 1, 3]), BSND)


def _has_whole_groups(ctx: Context, key_dims: Sequence[str], heads: int) -> bool:
    """Whether devices have, of so many heads of keys, those that their queries read."""
    of_keys, of_queries = (
        ctx.plan.activation_sharding(dims, ctx.path) for dims in (key_dims, BSND)
    )
    return of_keys.dims == of_queries.dims and heads % of_keys.splits()[2] == 0


def _segments(attention: Attention) -> list[tf.Tensor]:
    """The segments [B, S] and [B, T], padded keys in one of their own; or nothing."""
    logits = attention.logits
    queries, keys = logits.queries.segment, logits.keys.segment
    if queries is None and logits.paddings is None:
        return []
    shapes = [heads.shape[:2] for heads in (attention.q, attention.k)]
    if queries is None:
        queries, keys = map(tf.zeros, shapes, [tf.int32] * 2)
    if logits.paddings is not None:
        keys = tf.where(logits.paddings != 0, _HIDDEN, keys)
    return [
        tf.broadcast_to(tf.cast(ids, tf.int32), shape)
        for ids, shape in zip((queries, keys), shapes, strict=True)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fused:
    """The kernel and its gradient, on heads [B, N or K, S or T, D].

    Each device computes its own rows and heads, in a region that is manual along all
    axes: no partitioner can split a kernel.
    """

    ctx: Context
    chosen: Kernel
    config: Mapping[str, Any]
    key_dims: Sequence[str]
    segments: Sequence[tf.Tensor]

    def fprop(self, q, k, v):
        """The output, and the function of its gradient."""
        of_queries, of_keys = _by_heads(BSND), _by_heads(self.key_dims)
        dims = [of_queries, of_keys, of_keys, *[("batch", "")] * len(self.segments)]
        operands = [*zip((q, k, v, *self.segments), dims, strict=True)]
        results = [(tf.TensorSpec(q.shape, q.dtype), of_queries)]
        reads_results = self.chosen is Kernel.SPLASH
        if reads_results:
            sums = tf.TensorSpec(q.shape[:3], tf.float32)
            results.append((sums, of_queries[:3]))
        # Whoever saves the context saves what its gradient needs.
        saved = [
            (save_name(t, "context"), names)
            for t, (_, names) in zip(
                self._run("forward", operands, results), results, strict=True
            )
        ]

        def gradient(dy):
            inputs = [*operands, *(saved if reads_results else [])]
            inputs.append((self.ctx.cast(dy), of_queries))
            specs = [(tf.TensorSpec(t.shape, t.dtype), d) for t, d in operands[:3]]
            return self._run("backward", inputs, specs)

        return saved[0][0], gradient

    def _run(self, part: str, operands, results) -> list[tf.Tensor]:
        """A pass of the kernel.

        Args:
          part: "forward" or "backward".
          operands: pairs of a tensor and the names of its dims.
          results: pairs of a spec and such names.
        """
        ctx, mesh = self.ctx, self.ctx.plan.mesh

        def sharding(names):
            return ctx.plan.activation_sharding(names, ctx.path)

        local = [
            auto_to_manual(ctx.split(t, names), mesh, sharding(names).dims)
            for t, names in operands
        ]
        specs = [
            tf.TensorSpec(sharding(names).shard_shape(spec.shape), spec.dtype)
            for spec, names in results
        ]
        out = kernel(f"{self.chosen.value}_{part}", local, specs, self.config)
        return [
            ctx.split(manual_to_auto(t, mesh, sharding(names).dims), names)
            for t, (_, names) in zip(out, results, strict=True)
        ]


def _by_heads(dims: Sequence[str]) -> tuple[str, ...]:
    """The names of dims with the heads before the sequence."""
    return (dims[0], dims[2], dims[1], dims[3])
