"""Random bits that each device makes for its own shard.

TF's stateless random ops, and so Keras's dropout, come from TF2XLA as an op that draws
the bits of a tensor by Philox (Salmon et al. 2011). A partitioner knows nothing of this
op: every device makes the bits of all devices and then takes a slice. Here they become
the same numbers by arithmetic on the elements' indices, which is split as its readers
are.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir

from meshwright.framework.compiler.boundary.wide_elements import wide_elements
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    element_type,
    shape_of,
    walk,
)
from meshwright.framework.compiler.stablehlo.tidy import as_function, inline_text

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_WORDS = 4  # Of 32 bits, in a block.
_DTYPES = {"ui8": jnp.uint8, "ui16": jnp.uint16, "ui32": jnp.uint32, "ui64": jnp.uint64}


def split_random_bits(module: ir.Operation) -> None:
    """Writes out what draws random bits by Philox, if its state is read by nothing.

    Args:
      module: changed in place.
    """
    for op in list(walk(module)):
        if op.name != "stablehlo.rng_bit_generator" or list(op.results[0].uses):
            continue
        shape, dtype = shape_of(op.results[1]), str(element_type(op.results[1]))
        is_philox = "PHILOX" in str(op.attributes["rng_algorithm"])
        has_key = shape_of(op.operands[0]) == (3,)
        if not is_philox or not has_key or dtype not in _DTYPES or 0 in shape:
            continue
        inline_text(op, _lowered(shape, dtype))


@functools.lru_cache(maxsize=64)
def _lowered(shape: tuple[int, ...], dtype: str) -> str:
    """A function of a state, to itself and the bits, which equal ops share."""
    with wide_elements():
        state = jax.ShapeDtypeStruct((3,), np.uint64)
        traced = jax.jit(lambda s: (s, _bits(s, shape, _DTYPES[dtype]))).trace(state)
        text = traced.lower(lowering_platforms=("cpu",)).as_text()
    return str(as_function(text))


def _bits(state, shape: tuple[int, ...], dtype):
    """Bits as XLA's expansion of the op draws them: blocks fill the elements in order.

    A block is computed for each of its elements, which then takes its own.
    """
    index = _index(shape)
    drawn = _WORDS // 2 if dtype == jnp.uint64 else _WORDS  # Elements of a block.
    low = state[1] + (index // drawn).astype(np.uint64)
    high = jnp.where(low < state[1], state[2] + 1, state[2])
    words = _philox([*_halves(low), *_halves(high)], _halves(state[0]))
    if dtype == jnp.uint64:
        wide = [word.astype(np.uint64) for word in words]
        words = [wide[0] | wide[1] << 32, wide[2] | wide[3] << 32]
    own = lax.select_n((index % drawn).astype(np.int32), *words)
    return own.astype(dtype)


def _philox(x: list, key: list) -> list:
    for _ in range(_ROUNDS):
        products = [
            word.astype(np.uint64) * np.uint64(by)
            for word, by in zip(x[::2], _MULTIPLIERS, strict=True)
        ]
        (low_0, high_0), (low_1, high_1) = map(_halves, products)
        x = [high_1 ^ x[1] ^ key[0], low_1, high_0 ^ x[3] ^ key[1], low_0]
        key = [part + np.uint32(by) for part, by in zip(key, _KEY_STEPS, strict=True)]
    return x


def _halves(x) -> list:
    """The low and the high 32 bits of 64."""
    return [x.astype(np.uint32), (x >> 32).astype(np.uint32)]


def _index(shape: tuple[int, ...]):
    """The number of each element in row-major order."""
    dtype = np.uint32 if math.prod(shape) <= 2**32 else np.uint64
    index, stride = jnp.zeros(shape, dtype), 1
    for dim in reversed(range(len(shape))):
        index += lax.broadcasted_iota(dtype, shape, dim) * dtype(stride)
        stride *= shape[dim]
    return index
