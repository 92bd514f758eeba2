"""cuDNN's attention, a kernel for NVIDIA's GPUs, by JAX's public function.

It was lowered by tests, and never compiled or run: no GPU was at hand.

Dims: B batch, S sequence (query), T sequence (key), N heads, K heads of keys and
values, D head size.
"""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cudnn:
    """The kernel with its settings.

    Args:
      left: how many keys before itself a query sees; None: all.
      right: how many after itself: 0, or None for all.
    """

    left: int | None
    right: int | None
    is_bound = True
    """Whether only one platform runs it."""

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array]:
        """The weighted sums of values.

        Args:
          q: bfloat16 or float16 [B, N, S, D], scaled.
          k: [B, K, T, D].
          v: [B, K, T, D].

        Returns:
          [B, N, S, D].
        """
        out = jax.nn.dot_product_attention(
            *(heads.swapaxes(1, 2) for heads in (q, k, v)),
            scale=1.0,
            is_causal=self.right == 0,
            local_window_size=None if self.left is None else (self.left, 0),
            implementation="cudnn",
        )
        return (out.swapaxes(1, 2),)

    def backward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The gradients by q, k and v, for which the forward pass is computed again.

        JAX has no public function for the gradient alone.
        """
        _, pull = jax.vjp(self.forward, q, k, v)
        return pull((dy,))
