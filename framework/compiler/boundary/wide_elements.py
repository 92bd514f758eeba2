"""64-bit elements, which JAX cuts to 32 bits by default.

Its setting, `jax_enable_x64`, changes what a user's own JAX code means, so it is set
here only during a call, and only for the thread that makes it. That is needed where JAX
makes an array or describes it. A compiled program takes and returns arrays as they are:
running it needs no setting.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax
import numpy as np
import tensorflow as tf


def is_wide(dtype: tf.DType) -> bool:
    """Whether JAX cuts elements of this dtype to fewer bits."""
    dtype = np.dtype(dtype.as_numpy_dtype)
    return dtype.kind in "iufc" and dtype.itemsize // (1 + (dtype.kind == "c")) == 8


def wide_elements() -> AbstractContextManager[None]:
    """JAX leaves 64-bit elements as they are within this context."""
    return jax.enable_x64(True)


def put(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """A host array on devices of this process, element type and all."""
    with wide_elements():
        # A new view: JAX 0.10 keeps the 32-bit form that an array object had when JAX
        # got it outside this context.
        return jax.device_put(value.view(), sharding)
