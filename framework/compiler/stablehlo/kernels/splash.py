"""JAX's splash attention, a Pallas kernel for TPUs, which CPUs can interpret.

It computes attention tile by tile, and no tiles that the mask leaves nothing of.
Logits, the softmax's sums and those of tiles are float32.

Dims: B batch, S sequence (query), T sequence (key), N heads, K heads of keys and
values, D head size.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)
from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.stable_hlo import (
    FRONTEND_ATTRIBUTES,
    call_target,
    note_cycles,
    walk,
)

_LANES = 128
# Of a tile's queries, or of its keys, in full lanes: for more, the fast memory of v4,
# v5e and v5p was too small in some settings.
_TILE_BYTES = 2**18
_CALL = "tpu_custom_call"
PRODUCTS = {"_fwd_": 2, "_dq_": 3, "_dkv_": 4}
"""Products of a tile, by a part of the name of the call.

The logits are computed in each, and their gradient in both of the backward pass.
"""

# By kind of TPU, bytes of an element, and features of a head, up to: the cycles of 1024
# logits in each of these calls, as libtpu schedules their instructions for a causal row
# (benchmarks/kernel_cycles.py).
_SCHEDULES = {
    "v4": {
        2: {128: (8.8, 7.4, 11.3), 256: (17.4, 15.6, 21.1)},
        4: {128: (11.8, 9.9, 12.6), 256: (26.9, 24.5, 32.4)},
    },
    "v5e": {
        2: {128: (6.5, 6.2, 8.0), 256: (13.0, 13.7, 17.9)},
        4: {128: (8.6, 8.2, 9.8), 256: (20.8, 20.8, 25.0)},
    },
    "v5p": {
        2: {128: (6.6, 6.3, 8.4), 256: (13.4, 14.5, 17.0)},
        4: {128: (9.2, 8.8, 11.3), 256: (23.2, 23.1, 29.5)},
    },
    "v6e": {
        2: {128: (4.2, 3.9, 5.0), 256: (6.7, 5.4, 7.4)},
        4: {128: (6.6, 5.1, 6.8), 256: (18.5, 12.8, 19.3)},
    },
    "tpu7x": {
        2: {128: (4.1, 4.0, 4.9), 256: (8.0, 6.3, 7.8)},
        4: {128: (6.5, 5.6, 7.4), 256: (18.3, 14.3, 19.5)},
    },
}

# Kinds whose devices have two cores. libtpu divides the rows of a call over these; of a
# single row the heads, but in the forward pass only: JAX does not let it divide those
# of the backward pass, which the first core computes alone.
_TWO_CORES = ("v4", "v5p")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splash:
    """The kernel with its settings.

    Args:
      left: how many keys before itself a query sees; None: all.
      right: how many after itself; None: all.
      cap: c of c * tanh(logits / c), or None.
      tile: the most tokens of a tile, of queries or of keys.
      interpret: whether it is ordinary ops, for any device, in place of a call of the
        compiled kernel.
    """

    left: int | None
    right: int | None
    cap: float | None
    tile: int
    interpret: bool

    @property
    def is_bound(self) -> bool:
        """Whether only one platform runs it."""
        return not self.interpret

    def forward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The weighted sums of values, and the logarithms of the softmax's sums.

        Args:
          q: [B, N, S, D], scaled.
          k: [B, K, T, D].
          v: [B, K, T, D].
          *segments: nothing, or int32 [B, S] and [B, T]: queries see the keys of equal
            numbers.

        Returns:
          [B, N, S, D] of the dtype of `q`, and float32 [B, N, S].
        """

        def of_row(q, k, v, *segments):
            kernel = self._kernel(q, k, saves=True)
            out, (sums,) = kernel(q, k, v, _segment_ids(segments))
            return out, sums

        return jax.vmap(of_row)(q, k, v, *segments)

    def backward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, *more: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The gradients by q, k and v.

        Args:
          q, k, v: see `forward`.
          *more: its segments, if there are any, and its results; then the gradient of
            the first result.
        """

        def of_row(q, k, v, *more):
            *segments, out, sums, dy = more
            kernel = self._kernel(q, k, saves=False)
            settings = kernel.kwargs
            # JAX differentiates the kernel by this function. In public there is only
            # the kernel and its gradient together.
            gradients = splash._splash_attention_bwd(
                *(
                    settings[name]
                    for name in (
                        "save_residuals",
                        "mask_value",
                        "is_mqa",
                        "block_sizes",
                        "residual_checkpoint_name",
                        "mask_function",
                        "attn_logits_soft_cap",
                        "interpret",
                    )
                ),
                (
                    q,
                    k,
                    v,
                    _segment_ids(segments),
                    None,  # No sinks.
                    out,
                    sums,
                    kernel.dq_mask_info,
                    kernel.dkv_mask_info,
                ),
                dy,
            )
            return gradients[3:6]

        return jax.vmap(of_row)(q, k, v, *more)

    def note_costs(
        self,
        module: ir.Operation,
        device_kind: str,
        operands: Sequence[jax.ShapeDtypeStruct],
    ) -> None:
        """Gives the calls in a module their costs, of which compilers know nothing.

        Args:
          module: as JAX lowers a pass; changed in place.
          device_kind: the kind of the devices, see `kind_name`.
          operands: the specs of queries, keys, and more.
        """
        calls = [op for op in walk(module) if call_target(op) == _CALL]
        if not calls:
            return
        (B, N, S, D), keys = operands[0].shape, operands[1].shape[2]
        itemsize = operands[0].dtype.itemsize
        tile = self.tile_of(S, D, itemsize), self.tile_of(keys, D, itemsize)
        tiles = B * N * _count(self._mask(S, keys), tile)
        logits = tiles * math.prod(tile)
        cycles = _cycles(device_kind, itemsize, logits, D)
        share = _shares(device_kind, B, N)
        for call in calls:
            name = ir.StringAttr(call.attributes["kernel_name"]).value
            (part,) = (part for part in PRODUCTS if part in name)
            config = json.loads(ir.StringAttr(call.attributes["backend_config"]).value)
            config["custom_call_config"]["cost_estimate"] = {
                "flops": PRODUCTS[part] * 2 * logits * D,
                "transcendentals": logits,
                # What is fetched anew for each tile: keys and values, or queries and
                # gradients.
                "bytes_accessed": 2 * tiles * max(tile) * D * itemsize,
            }
            call.attributes["backend_config"] = ir.StringAttr.get(json.dumps(config))
            # JAX's attributes are lines of their own in HLO text.
            del call.attributes[FRONTEND_ATTRIBUTES]
            if part in cycles:
                note_cycles(call, round(cycles[part] * share[part]))

    def _kernel(self, q, k, *, saves: bool) -> splash.SplashAttentionKernel:
        """The kernel for a row of queries [N, S, D] and keys [K, T, D]."""
        (heads, queries, head_dim), keys = q.shape, k.shape[1]
        query_tile, key_tile = (
            self.tile_of(length, head_dim, q.dtype.itemsize)
            for length in (queries, keys)
        )
        sizes = splash.BlockSizes(
            block_q=query_tile,
            block_kv=key_tile,
            block_q_dkv=query_tile,
            block_kv_dkv=key_tile,
            block_q_dq=query_tile,
            block_kv_dq=key_tile,
        )
        return splash.make_splash_mha_single_device(
            masks.MultiHeadMask([self._mask(queries, keys)] * heads),
            block_sizes=sizes,
            save_residuals=saves,
            attn_logits_soft_cap=self.cap,
            interpret=self.interpret,
        )

    def _mask(self, queries: int, keys: int) -> masks.Mask:
        if self.left is None and self.right is None:
            return masks.FullMask((queries, keys))
        return _Window((queries, keys), (self.left, self.right), offset=0)

    def tile_of(self, length: int, head_dim: int, itemsize: int) -> int:
        """The tokens of a tile: a multiple of 128 that divides the length."""
        token_bytes = math.ceil(head_dim / _LANES) * _LANES * itemsize
        most = min(length, self.tile, _TILE_BYTES // token_bytes)
        sizes = range(_LANES, most + 1, _LANES)
        return max(size for size in sizes if length % size == 0)


class _Window(masks.LocalMask):
    """JAX's window, which computes only tiles that it cuts.

    Of others it has one element: JAX asks whether any is seen, or all. To compute all
    tiles of a row of 32768 tokens took ten seconds.
    """

    def __getitem__(self, tile: tuple[slice, slice]) -> np.ndarray:
        rows, columns = tile
        left, right = self.window_size
        # The distances from a query to a key after it.
        least = columns.start - (rows.stop - 1)
        most = columns.stop - 1 - rows.start
        if (left is not None and most < -left) or (right is not None and least > right):
            return np.zeros([1, 1], bool)
        if (left is None or least >= -left) and (right is None or most <= right):
            return np.ones([1, 1], bool)
        return super().__getitem__(tile)


def _segment_ids(segments: Sequence[jax.Array]) -> splash.SegmentIds | None:
    return splash.SegmentIds(*segments) if segments else None


def _count(mask: masks.Mask, tile: tuple[int, int]) -> int:
    """The tiles that a mask leaves something of."""
    parts = [
        [slice(start, start + size) for start in range(0, length, size)]
        for length, size in zip(mask.shape, tile, strict=True)
    ]
    return sum(bool(mask[pair].any()) for pair in itertools.product(*parts))


def _cycles(
    device_kind: str, itemsize: int, logits: int, head_dim: int
) -> dict[str, float]:
    """The cycles of each call that computes so many logits, where they are known.

    They are those of one core.
    """
    if device_kind not in _SCHEDULES:
        return {}
    schedule = _SCHEDULES[device_kind][itemsize]
    width = min(width for width in schedule if head_dim <= width)
    each = zip(PRODUCTS, schedule[width], strict=True)
    return {part: cycles * logits / 1024 for part, cycles in each}


def _shares(device_kind: str, rows: int, heads: int) -> dict[str, float]:
    """The share of each call's tiles that the busier core of a device computes."""
    if device_kind not in _TWO_CORES:
        return dict.fromkeys(PRODUCTS, 1.0)
    if rows > 1:
        return dict.fromkeys(PRODUCTS, math.ceil(rows / 2) / rows)
    forward = math.ceil(heads / 2) / heads
    return {part: forward if part == "_fwd_" else 1.0 for part in PRODUCTS}
