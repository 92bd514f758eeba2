"""Attention by a fused kernel, where devices have one.

Dims: B batch, S sequence (query), T sequence (key), N heads, K heads of keys and
values, D head size.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence

import gin
import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.modeling.recompute import save_name
from meshwright.framework.modeling.shapes import copies_of_each
from meshwright.framework.sharding.manual import auto_to_manual, manual_to_auto
from meshwright.framework.sharding.placeholders import kernel, traced_for
from meshwright.layers.attention.blocks import AUTO_SIZE, AUTO_TOKENS, Blocks
from meshwright.layers.attention.logits import Logits
from meshwright.layers.attention.mask_rules import NearMask, rule_of
from meshwright.layers.attention.sequence_splits import BSND, splits_sequence
from meshwright.layers.basic.dropout import Dropout

BTKD = ("batch", "sequence", "kv_heads", "head_dim")
LANES = 128
"""What lengths that the kernel computes are multiples of."""
_HIDDEN = tf.int32.min
"""The segment of keys that no query sees."""


@gin.constants_from_enum
class Kernel(enum.Enum):
    """Whether a fused kernel computes attention.

    AUTO: in long sequences with `Blocks.AUTO`, that of the devices, if they have one
    that can. NONE: never. SPLASH: JAX's splash attention, which is for TPUs; CPUs
    interpret it, slowly, for tests.
    """

    AUTO = "auto"
    NONE = "none"
    SPLASH = "splash"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """What is to be computed, see `weighted_sums`, whose arguments these are."""

    ctx: Context
    logits: Logits
    q: tf.Tensor
    k: tf.Tensor
    v: tf.Tensor
    bias: tf.Tensor | None
    dropout: Dropout

    @property
    def key_dims(self) -> tuple[str, ...]:
        """The names of the dims of keys and values."""
        return BSND if self.k.shape[2] == self.q.shape[2] else BTKD


def uses_kernel(
    attention: Attention, setting: Kernel, block_size: int | Blocks
) -> bool:
    """Whether a fused kernel computes it, for the devices that it is traced for.

    Raises:
      ValueError: a kernel is asked for that cannot.
    """
    if setting is Kernel.NONE:
        return False
    if setting is Kernel.AUTO:
        queries, keys = (heads.shape[1] for heads in (attention.q, attention.k))
        is_long = None not in (queries, keys) and queries * keys >= AUTO_TOKENS**2
        return (
            traced_for() == "tpu"
            and block_size is Blocks.AUTO
            and is_long
            and next(_obstacles(attention), None) is None
        )
    for obstacle in _obstacles(attention):
        raise ValueError(
            f"layer {attention.ctx.path!r}: Kernel.{setting.name} cannot compute its "
            f"attention, {obstacle}; or set kernel to Kernel.AUTO or Kernel.NONE"
        )
    return True


def _obstacles(attention: Attention) -> Iterator[str]:
    """Why the kernel cannot compute it, each with a remedy."""
    ctx, logits, q, k = attention.ctx, attention.logits, attention.q, attention.k
    if tf.executing_eagerly() or traced_for() is None:
        yield "which is traced for no devices: compile it by compile_program"
        return
    if traced_for() not in ("tpu", "cpu"):
        yield f"as the devices are of platform {traced_for()!r}: use TPUs"
    if ctx.plan.pipeline_axes is not None:
        yield "which is in a pipeline: leave out the pipeline"
    if splits_sequence(ctx):
        yield (
            "as the plan splits 'sequence': set ShardingPlan.sequence_attention to "
            "SequenceAttention.ALL_TO_ALL"
        )
    if not isinstance(rule_of(logits.mask), NearMask):
        yield f"whose mask is {logits.mask}: make it a MaskKind or a NearMask"
    if attention.bias is not None:
        yield "which has relative positions: use PositionKind.ROTARY"
    if attention.dropout.drops(ctx):
        yield "which drops out probabilities: set dropout_rate to 0"
    if q.dtype not in (tf.float32, tf.bfloat16):
        yield f"whose activations are {q.dtype.name}: use bfloat16 or float32"
    for name, heads in ("queries", q), ("keys", k):
        if heads.shape[1] is None or heads.shape[1] % LANES:
            yield (
                f"as it has {heads.shape[1]} {name}: make their number a multiple "
                f"of {LANES}"
            )
    yield from _uneven(attention)


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


def attend_by_kernel(attention: Attention, block_size: int | Blocks) -> tf.Tensor:
    """The weighted sums of values, by the kernel that `uses_kernel` allows.

    Its logits are float32. There is no second gradient. A query that sees no key gets a
    mean of values, but no right gradient.

    Args:
      attention: what is computed.
      block_size: the most tokens of a tile, if it is a number.

    Returns:
      [B, S, N, D] in the activation dtype, named "context".
    """
    ctx, logits = attention.ctx, attention.logits
    rule = rule_of(logits.mask)
    config = {
        "left": rule.left,
        "right": rule.right,
        "cap": logits.cap,
        "tile": AUTO_SIZE if isinstance(block_size, Blocks) else block_size,
        "interpret": traced_for() != "tpu",
    }
    key_dims = attention.key_dims
    k, v = attention.k, attention.v
    if _splits(ctx, key_dims) != _splits(ctx, BSND):
        # A device's heads of queries would not find theirs among its heads of keys.
        copies = attention.q.shape[2] // k.shape[2]
        k, v = (ctx.split(copies_of_each(t, copies, 2), BSND) for t in (k, v))
        key_dims = BSND
    run = _Fused(
        ctx=ctx, config=config, key_dims=key_dims, segments=_segments(attention)
    )
    heads = [tf.transpose(t, [0, 2, 1, 3]) for t in (attention.q, k, v)]
    out = tf.custom_gradient(run.fprop)(*heads)
    return ctx.split(tf.transpose(out, [0, 2, 1, 3]), BSND)


def _splits(ctx: Context, dims: Sequence[str]) -> tuple:
    return ctx.plan.activation_sharding(dims, ctx.path).dims


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
    config: dict
    key_dims: Sequence[str]
    segments: Sequence[tf.Tensor]

    def fprop(self, q, k, v):
        """The output, and the function of its gradient."""
        of_queries, of_keys = _by_heads(BSND), _by_heads(self.key_dims)
        sums = of_queries[:3]
        dims = [of_queries, of_keys, of_keys, *[("batch", "")] * len(self.segments)]

        def specs(*tensors):
            return [tf.TensorSpec(t.shape, t.dtype) for t in tensors]

        inputs = self._enter([q, k, v, *self.segments], dims)
        (local,) = specs(inputs[0])
        out, logs = self._leave(
            kernel(
                "splash_forward",
                inputs,
                [local, tf.TensorSpec(local.shape[:3], tf.float32)],
                self.config,
            ),
            [of_queries, sums],
        )
        # Whoever saves the context saves what its gradient needs.
        out, logs = (save_name(t, "context") for t in (out, logs))

        def gradient(dy):
            operands = [q, k, v, *self.segments, out, logs, self.ctx.cast(dy)]
            inputs = self._enter(operands, [*dims, of_queries, sums, of_queries])
            return self._leave(
                kernel("splash_backward", inputs, specs(*inputs[:3]), self.config),
                [of_queries, of_keys, of_keys],
            )

        return out, gradient

    def _enter(self, tensors, dims) -> list[tf.Tensor]:
        """A device's parts of tensors with these names of dims."""
        return [
            auto_to_manual(self.ctx.split(t, names), *self._mapping(names))
            for t, names in zip(tensors, dims, strict=True)
        ]

    def _leave(self, tensors, dims) -> list[tf.Tensor]:
        return [
            self.ctx.split(manual_to_auto(t, *self._mapping(names)), names)
            for t, names in zip(tensors, dims, strict=True)
        ]

    def _mapping(self, dims: Sequence[str]) -> tuple:
        sharding = self.ctx.plan.activation_sharding(dims, self.ctx.path)
        return self.ctx.plan.mesh, sharding.dims


def _by_heads(dims: Sequence[str]) -> tuple[str, ...]:
    """The names of dims with the heads before the sequence."""
    return (dims[0], dims[2], dims[1], dims[3])
