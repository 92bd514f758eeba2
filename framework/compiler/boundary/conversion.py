"""Converts host arrays to a program's element types, if that loses nothing.

Numbers may be rounded to fewer digits, as NumPy's own are float64 by default. Other
losses are refused: fractions and imaginary parts cut off, numbers out of the type's
range, integers that it has too few digits for, texts and other objects.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import tensorflow as tf


def converted(value: np.ndarray, dtype: tf.DType) -> np.ndarray:
    """`value` with elements of `dtype`.

    Raises:
      ValueError: it cannot hold them; the message continues after the array's name.
    """
    given = _tf_dtype(value.dtype)
    if given is None or not _is_kind_for(dtype, given):
        remedy = "" if given is None else ": cast it first"
        raise ValueError(
            f"is {value.dtype}, the program was compiled for {dtype.name}{remedy}"
        )
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
    """TF's dtype of numbers or booleans; None for others."""
    try:
        known = tf.as_dtype(dtype)
    except TypeError:  # A time; or a number that is longer than TF's.
        return {"f": tf.float64, "c": tf.complex128}.get(dtype.kind)
    numeric = known.is_integer or known.is_floating or known.is_complex or known.is_bool
    return known if numeric else None


def _is_kind_for(dtype: tf.DType, given: tf.DType) -> bool:
    if dtype.is_complex or given.is_bool:
        return True
    if dtype.is_floating:
        return not given.is_complex
    return given.is_integer


def _check_range(value: np.ndarray, dtype: tf.DType) -> None:
    """Refuses integers out of the range of `dtype`, if this has a range of integers."""
    if dtype.is_integer or dtype.is_bool:
        least, most = (0, 1) if dtype.is_bool else (int(dtype.min), int(dtype.max))
        if int(value.min()) < least or int(value.max()) > most:
            raise ValueError(
                f"has values from {value.min()} to {value.max()}, which {dtype.name} "
                "cannot hold"
            )


def _lost_digits(value: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Which integers a floating type changes: they are too long, or out of range."""
    every = 2 ** (jnp.finfo(out.dtype).nmant + 1)
    if not value.size or -every <= int(value.min()) <= int(value.max()) <= every:
        return np.zeros([], bool)
    is_unsigned = value.dtype.kind == "u"
    value = value.astype(np.uint64 if is_unsigned else np.int64)
    near = out.real.astype(np.float64)
    within = np.isfinite(near) & (near < (2.0**64 if is_unsigned else 2.0**63))
    return ~within | (np.where(within, near, 0).astype(value.dtype) != value)


def _beyond(value: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Which finite numbers are out of range."""
    within = np.isfinite(out)
    return np.isfinite(value) & ~within if not within.all() else np.zeros([], bool)
