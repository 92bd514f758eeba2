"""Which frames are real: sequences of a batch end at different positions.

Dims: B batch, S sequence.
"""

from __future__ import annotations

import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.modeling.shapes import shape_of


def check_mask(ctx: Context, x: tf.Tensor, mask: tf.Tensor | None) -> None:
    """Raises ValueError, naming the layer, unless `mask` is bool and leads `x`.

    The mask has the leading dims of `x`, all but one or more, and True at real frames.
    """
    if mask is None:
        return
    lead = x.shape[: mask.shape.rank]
    if mask.dtype != tf.bool or mask.shape.rank >= x.shape.rank or mask.shape != lead:
        raise ValueError(
            f"layer {ctx.path!r}: for inputs {x.shape} the mask must be bool "
            f"{x.shape[:-1]}, True at real frames, but is {mask.dtype.name} "
            f"{mask.shape}; for paddings pass paddings == 0"
        )


def zero_padding(ctx: Context, x: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """`x`, with zeros where `mask` is False, whatever `x` holds there.

    Raises:
      ValueError: see `check_mask`.
    """
    check_mask(ctx, x, mask)
    if mask is None:
        return x
    ones = [1] * (x.shape.rank - mask.shape.rank)
    wide = tf.reshape(mask, [*shape_of(mask), *ones])
    return tf.where(wide, x, tf.zeros([], x.dtype))


def check_rows(ctx: Context, x: tf.Tensor, **given: tf.Tensor | None) -> None:
    """Raises ValueError, naming the layer, unless what is given has a number a token.

    Args:
      ctx: context.
      x: [B, S, ...].
      **given: tensors that must be [B, S] or [1, S], by their names; None: not given.
    """
    rows, length = x.shape[:2]
    for name, tensor in given.items():
        if tensor is None:
            continue
        shapes = [tf.TensorShape([count, length]) for count in (rows, 1)]
        if not any(map(tf.TensorShape(tensor.shape).is_compatible_with, shapes)):
            raise ValueError(
                f"layer {ctx.path!r}: for inputs {x.shape} {name} must be {shapes[0]}, "
                f"a number for each token, but is {tensor.shape}"
            )
