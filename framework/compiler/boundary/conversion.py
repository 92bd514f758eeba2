"""Host arrays in the element type of a program's argument, if nothing is lost by it.

Numbers may be rounded to fewer digits, as NumPy's own are float64 by default. What is
more than that is refused: fractions and imaginary parts cut off, numbers that the type
does not reach, whole numbers that it has no digits for, texts and other objects.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import tensorflow as tf


def converted(value: np.ndarray, dtype: tf.DType) -> np.ndarray:
    """`value` with elements of `dtype`.

    Raises:
      ValueError: it cannot hold them; the message goes on after the array's name.
    """
    given = _tf_dtype(value.dtype)
    if given is None or not _is_kind_for(dtype, given):
        raise ValueError(f"is {value.dtype}, the program was compiled for {dtype.name}")
    if given == dtype:
        return value.astype(dtype.as_numpy_dtype, copy=False)
    if given.is_integer and value.size:
        _check_range(value, dtype)
    with np.errstate(over="ignore"):
        out = value.astype(dtype.as_numpy_dtype)
    if dtype.is_floating or dtype.is_complex:
        lost = _lost_digits(value, out) if given.is_integer else _beyond(value, out)
        if lost.any():
            raise ValueError(
                f"has the value {value[lost][0]}, which {dtype.name} cannot hold"
            )
    return out


def _tf_dtype(dtype: np.dtype) -> tf.DType | None:
    """None of what is no number."""
    try:
        found = tf.as_dtype(dtype)
    except TypeError:  # A time; or a number that is longer than TF's.
        return {"f": tf.float64, "c": tf.complex128}.get(dtype.kind)
    numeric = found.is_integer or found.is_floating or found.is_complex or found.is_bool
    return found if numeric else None


def _is_kind_for(dtype: tf.DType, given: tf.DType) -> bool:
    if dtype.is_complex or given.is_bool:
        return True
    if dtype.is_floating:
        return not given.is_complex
    return given.is_integer


def _check_range(value: np.ndarray, dtype: tf.DType) -> None:
    """Of whole numbers."""
    if dtype.is_integer or dtype.is_bool:
        least, most = (0, 1) if dtype.is_bool else (int(dtype.min), int(dtype.max))
        if int(value.min()) < least or int(value.max()) > most:
            raise ValueError(
                f"has values from {value.min()} to {value.max()}, which {dtype.name} "
                "cannot hold"
            )


def _lost_digits(whole: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Which whole numbers are others as floating ones: too long, or beyond reach."""
    every = 2 ** (jnp.finfo(out.dtype).nmant + 1)
    if not whole.size or -every <= int(whole.min()) <= int(whole.max()) <= every:
        return np.zeros([], bool)
    is_unsigned = whole.dtype.kind == "u"
    whole = whole.astype(np.uint64 if is_unsigned else np.int64)
    near = out.real.astype(np.float64)
    within = np.isfinite(near) & (near < (2.0**64 if is_unsigned else 2.0**63))
    return ~within | (np.where(within, near, 0).astype(whole.dtype) != whole)


def _beyond(value: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Which finite numbers are not in reach."""
    within = np.isfinite(out)
    return np.isfinite(value) & ~within if not within.all() else np.zeros([], bool)
