"""The loss of tokens, part after part of a sequence: no tensor has all logits.

Dims: B batch, S sequence, M model, V vocabulary, P parts of a sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.types import reshard_to
from meshwright.layers.basic.entries import read, write
from meshwright.layers.basic.linear import BSM
from meshwright.layers.basic.token_loss import TokenLoss


def check_parts(ctx: Context, field: str, parts: int, length: int) -> None:
    """Raises unless `parts` divide the rows that each device has of a sequence.

    Raises:
      ValueError: they do not.
    """
    devices = ctx.plan.activation_sharding(BSM, field).splits()[1]
    if length % (parts * devices):
        split = f" on {devices} devices" if devices > 1 else ""
        raise ValueError(
            f"{field} is {parts}, but a sequence has {length} tokens{split}, no "
            f"multiple of {parts * devices}: set a number of parts that divides it"
        )


def loss_by_parts(
    ctx: Context,
    loss: Callable[[Context, NestedMap, Sequence[tf.Tensor]], TokenLoss],
    theta: NestedMap,
    specs: NestedMap,
    x: tf.Tensor,
    others: Sequence[tf.Tensor],
    *,
    parts: int,
) -> TokenLoss:
    """The loss of P parts of each sequence, one after another.

    No tensor has all logits [B, S, V]: the backward pass computes those of a part
    again, and adds up the gradients of weights. Each device adds up its own, and they
    are reduced once, after the loop. A part has every P-th token, so that a device's
    tokens stay where they are.

    Args:
      ctx: context of the layer that computes logits.
      loss: of a context, weights like `theta`, and parts of `x` and `others`.
      theta: the weights that `loss` reads.
      specs: their specs.
      x: floating-point [B, S, M], in the activation dtype; differentiated.
      others: [B, S], not differentiated.
      parts: P; see `check_parts`.
    """
    (batch,) = ctx.plan.activation_sharding(BSM, ctx.path).dims[:1]
    ctx, weights = read_unreduced(ctx, theta, specs, batch)
    rows = [_divided(each, parts) for each in others]

    def of_part(i, part: tf.Tensor, leaves: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        inputs = [ctx.split(part, BSM), *(read(row, i) for row in rows)]
        result = loss(ctx, weights.pack(leaves), inputs)
        return [result.nats, result.total]

    @tf.custom_gradient
    def looped(x, *leaves):
        cut = _divided(x, parts)

        def gradient(*upstream):
            def body(i, dx, *sums):
                with tf.GradientTape() as tape:
                    inputs = [read(cut, i), *leaves]
                    tape.watch(inputs)
                    results = of_part(i, inputs[0], inputs[1:])
                made = tape.gradient(results, inputs, list(upstream))
                return [i + 1, write(dx, made[0], i), *map(tf.add, sums, made[1:])]

            start = [tf.zeros_like(each) for each in (cut, *leaves)]
            dx, *dleaves = _loop(parts, body, start)
            return _joined(dx), *dleaves

        def body(i, *sums):
            return [i + 1, *map(tf.add, sums, of_part(i, read(cut, i), leaves))]

        return _loop(parts, body, [tf.zeros([])] * 2), gradient

    nats, total = looped(x, *weights.leaves())
    return TokenLoss(nats=nats, total=total)


def read_unreduced(
    ctx: Context, theta: NestedMap, specs: NestedMap, axes: Sequence[str]
) -> tuple[Context, NestedMap]:
    """Weights that a loop reads, whose gradients are reduced after it.

    Args:
      ctx: context of the layers that read them.
      theta: the weights.
      specs: their specs.
      axes: the axes along which their gradients are unreduced, where these can be.

    Returns:
      The context within the loop, and the weights.
    """
    axes = dict.fromkeys((*ctx.plan.unreduced_gradient_axes, *axes))
    plan = dataclasses.replace(ctx.plan, unreduced_gradient_axes=tuple(axes))
    ctx = dataclasses.replace(ctx, plan=plan)
    weights = theta.map_with_path(
        lambda path, weight, spec: reshard_to(
            weight, plan.read_sharding(spec.dims, f"{ctx.path}.{path}")
        ),
        specs,
    )
    return ctx, weights


def _divided(x: tf.Tensor, parts: int) -> tf.Tensor:
    """[P, B, S / P, ...] of [B, S, ...]."""
    batch, length, *rest = x.shape
    x = tf.reshape(x, [batch, length // parts, parts, *rest])
    return tf.transpose(x, [2, 0, 1, *range(3, len(x.shape))])


def _joined(x: tf.Tensor) -> tf.Tensor:
    """The reverse of `_divided`."""
    parts, batch, length, *rest = x.shape
    x = tf.transpose(x, [1, 2, 0, *range(3, len(x.shape))])
    return tf.reshape(x, [batch, length * parts, *rest])


def _loop(count: int, body, start: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    state = [tf.constant(0), *start]
    return list(tf.while_loop(lambda i, *_: i < count, body, state)[1:])
