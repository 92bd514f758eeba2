"""Logical and stored form of a tensor that crosses a program's border."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from meshwright.framework.sharding.annotations import annotate
from meshwright.framework.sharding.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class StoredForm:
    """How a tensor of a logical shape is kept as evenly split device arrays.

    Inside a program XLA pads a dim that its mesh axes do not divide; arrays between
    programs must be split evenly. The stored form is the logical tensor padded with
    zeros at the end of such dims (weight-update sharding 4.2: reformat, then slice).

    Args:
      shape: logical shape.
      dtype: element type.
      sharding: of the logical tensor.
    """

    shape: tuple[int, ...]
    dtype: tf.DType
    sharding: Sharding

    @classmethod
    def of(cls, spec: tf.TensorSpec, sharding: Sharding) -> StoredForm:
        """Raises ValueError if the ranks differ."""
        if spec.shape.rank != sharding.rank:
            raise ValueError(
                f"sharding {sharding} has {sharding.rank} dims but tensor "
                f"{spec.name or ''} has shape {spec.shape}"
            )
        return cls(tuple(spec.shape), spec.dtype, sharding)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.sharding.padded_shape(self.shape)

    @property
    def is_padded(self) -> bool:
        return self.stored_shape != self.shape

    def to_logical(self, stored: tf.Tensor) -> tf.Tensor:
        """The logical tensor of a stored one, inside a program."""
        if not self.is_padded:
            return stored
        return annotate(
            tf.slice(stored, [0] * len(self.shape), self.shape), self.sharding
        )

    def to_stored(self, logical: tf.Tensor) -> tf.Tensor:
        """The stored tensor of a logical one, inside a program."""
        if not self.is_padded:
            return logical
        return annotate(tf.pad(logical, self._paddings()), self.sharding)

    def pad(self, logical: np.ndarray) -> np.ndarray:
        """The stored array of a logical host array."""
        return np.pad(logical, self._paddings()) if self.is_padded else logical

    def unpad(self, stored: np.ndarray) -> np.ndarray:
        """The logical host array of a stored one."""
        return stored[tuple(slice(n) for n in self.shape)]

    def _paddings(self) -> Sequence[tuple[int, int]]:
        pairs = zip(self.shape, self.stored_shape, strict=True)
        return [(0, stored - size) for size, stored in pairs]
