"""64-bit elements, which JAX makes 32 bits of unless it is told not to.

Its setting, `jax_enable_x64`, changes what a user's own JAX code means, so it is never
set here but for the time of one call, and for the thread that makes it. That is needed
where JAX makes an array or describes it. A compiled program takes and gives arrays as
they are: running it needs no setting.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax
import numpy as np
import tensorflow as tf


def is_wide(dtype: tf.DType) -> bool:
    """Whether JAX makes fewer bits of it."""
    dtype = np.dtype(dtype.as_numpy_dtype)
    return dtype.kind in "iufc" and dtype.itemsize // (1 + (dtype.kind == "c")) == 8


def wide_elements() -> AbstractContextManager[None]:
    """JAX leaves 64-bit elements as they are within this context."""
    return jax.enable_x64(True)


def put(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """A host array on devices of this process, element type and all."""
    with wide_elements():
        # A view of its own: of an array object that was given to JAX before, JAX 0.10
        # keeps the 32-bit form that it had outside of this context.
        return jax.device_put(value.view(), sharding)
