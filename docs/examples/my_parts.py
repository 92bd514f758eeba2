"""A layer, for `--import=my_parts`."""

import dataclasses

import gin
import tensorflow as tf

from meshwright import framework as mw


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bilinear(mw.Layer):
    """(x A * x B) C, in place of a feed-forward layer.

    B batch, S sequence, M model, H hidden.

    Args:
      model_dims: M.
      hidden_dims: H.
    """

    model_dims: int
    hidden_dims: int

    def weights(self):
        into = (self.model_dims, self.hidden_dims), ("model", "hidden")
        back = (self.hidden_dims, self.model_dims), ("hidden", "model")
        return mw.NestedMap(a=_weight(*into), b=_weight(*into), c=_weight(*back))

    def fprop(self, ctx, theta, x):
        a = tf.einsum("bsm,mh->bsh", x, ctx.cast(theta.a))
        b = tf.einsum("bsm,mh->bsh", x, ctx.cast(theta.b))
        h = ctx.split(a * b, ("batch", "sequence", "hidden"), name="hidden")
        y = tf.einsum("bsh,hm->bsm", h, ctx.cast(theta.c))
        return ctx.split(y, ("batch", "stream", "model"))


def _weight(shape, dims):
    return mw.WeightSpec(shape=shape, dims=dims, initializer=mw.FanIn())
