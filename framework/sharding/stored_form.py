"""The logical and the stored form of a tensor that crosses a program's border."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from meshwright.framework.sharding.annotations import annotate
from meshwright.framework.sharding.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class StoredForm:
    """How a tensor of a logical shape is kept as evenly split device arrays.

    Inside a program XLA pads a dim that its mesh axes do not divide; arrays between
    programs must be split evenly. The stored form is the logical tensor, with some of
    its dims optionally combined into one, padded with zeros at the end of such dims
    (weight-update sharding 4.1: reformat, then slice).

    Args:
      shape: logical shape.
      dtype: element type.
      sharding: the sharding of the logical tensor.
      split: the sharding of the stored tensor, if different: see weight-update
        sharding.
      combined: (first, count) of the dims that are stored as one, None for none.
      kept_from: the program that gave a variable its sharding, if this one did not.

    Raises:
      ValueError: `combined` or `split` does not fit the shape.
    """

    shape: tuple[int, ...]
    dtype: tf.DType
    sharding: Sharding
    split: Sharding | None = None
    combined: tuple[int, int] | None = None
    kept_from: str = dataclasses.field(default="", compare=False)

    def __post_init__(self):
        first, count = self.combined or (0, 1)
        rank = len(self.shape) - count + 1 if self.combined else len(self.shape)
        fits = first >= 0 and count >= 1 and first + count <= max(len(self.shape), 1)
        if not fits or self.border.rank != rank:
            raise ValueError(
                f"stored form of shape {self.shape} with dims (first, count) = "
                f"{self.combined} combined cannot be split as {self.border}, which has "
                f"{self.border.rank} dims: give {rank} of them"
            )

    @classmethod
    def of(cls, spec: tf.TensorSpec, sharding: Sharding) -> StoredForm:
        """Raises ValueError if the ranks differ."""
        if spec.shape.rank != sharding.rank:
            raise ValueError(
                f"sharding {sharding} is of rank {sharding.rank}, and tensor "
                f"{spec.name or ''} has shape {spec.shape}"
            )
        return cls(tuple(spec.shape), spec.dtype, sharding)

    @property
    def border(self) -> Sharding:
        """The sharding of the stored tensor."""
        return self.split or self.sharding

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.border.padded_shape(self._combined_shape)

    @property
    def is_logical(self) -> bool:
        """Whether both forms have the same shape."""
        return self.stored_shape == self.shape

    @property
    def _combined_shape(self) -> tuple[int, ...]:
        if self.combined is None:
            return self.shape
        first, count = self.combined
        together = math.prod(self.shape[first : first + count])
        return (*self.shape[:first], together, *self.shape[first + count :])

    def to_logical(self, stored: tf.Tensor) -> tf.Tensor:
        """The logical tensor of a stored tensor, inside a program."""
        if self.is_logical and self.split is None:
            return stored
        shape = self._combined_shape
        together = tf.slice(stored, [0] * len(shape), shape)
        if self.combined is not None:
            # Unsharded first: of dims that are split as one none is split by itself.
            dims = list(self.border.dims)
            dims[self.combined[0]] = ()
            unsharded = annotate(together, Sharding(self.border.mesh, tuple(dims)))
            together = tf.reshape(unsharded, self.shape)
        return annotate(together, self.sharding)

    def to_stored(self, logical: tf.Tensor) -> tf.Tensor:
        """The stored tensor of a logical tensor, inside a program."""
        if self.is_logical and self.split is None:
            return logical
        together = tf.reshape(logical, self._combined_shape)
        return annotate(tf.pad(together, self._paddings()), self.border)

    def pad(self, logical: np.ndarray) -> np.ndarray:
        """The stored array of a logical host array."""
        if self.is_logical:
            return logical
        return np.pad(logical.reshape(self._combined_shape), self._paddings())

    def unpad(self, stored: np.ndarray) -> np.ndarray:
        """The logical host array of a stored array."""
        logical = stored[tuple(slice(n) for n in self._combined_shape)]
        return logical.reshape(self.shape)

    def _paddings(self) -> Sequence[tuple[int, int]]:
        pairs = zip(self._combined_shape, self.stored_shape, strict=True)
        return [(0, stored - size) for size, stored in pairs]
