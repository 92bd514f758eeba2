"""Products of rows with the matrices of their groups, by libtpu's kernel for them.

libtpu has one for XLA's `ragged-dot` where rows are grouped, forward and by rows; it
computes tiles of rows, and those that two groups share twice.

Dims: R rows, G groups, A contracted, B produced.
"""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ragged:
    """The kernel; it has no settings."""

    is_bound = True
    """Whether only one platform runs it."""

    def forward(
        self, x: jax.Array, weight: jax.Array, sizes: jax.Array
    ) -> tuple[jax.Array]:
        """[R, B] of rows [R, A] and matrices [G, A, B]; int32 [G]: rows of each."""
        return (self._product(x, weight, sizes, 1),)

    def transposed(
        self, x: jax.Array, weight: jax.Array, sizes: jax.Array
    ) -> tuple[jax.Array]:
        """[R, A] of rows [R, B] and the transposes of such matrices."""
        return (self._product(x, weight, sizes, 2),)

    def _product(self, x, weight, sizes, contracted: int) -> jax.Array:
        dims = jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(([1], [contracted]), ([], [])),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=[0],
        )
        return jax.lax.ragged_dot_general(
            x, weight, sizes, dims, preferred_element_type=x.dtype
        )
