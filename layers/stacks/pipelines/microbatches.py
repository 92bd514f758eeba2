"""Divides a batch into microbatches, and joins them (GSPMD 3.3).

Dims: B batch, U rows of a microbatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from meshwright.framework.sharding.annotations import annotate
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.sharding.sharding import Sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatches:
    """Each microbatch has every `count`-th row of the batch.

    So each device has rows of every microbatch, and these stay in place: the rows of a
    batch that the same axes split, perhaps followed by others, move to no other device.
    Where microbatches do not divide the batch, the last ones' last row is a copy of the
    batch's first, which is left out of what comes back.

    Args:
      plan: its activations table says how a microbatch is split, as "batch".
      batch: B.
      count: the number of microbatches.
      path: the layer's path, for messages.
    """

    plan: ShardingPlan
    batch: int
    count: int
    path: str

    @property
    def rows(self) -> int:
        """U."""
        return -(-self.batch // self.count)

    @property
    def missing(self) -> int:
        """How many rows the microbatches have more than the batch."""
        return self.rows * self.count - self.batch

    def divide(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """[B, ...] as [count, U, ...].

        Raises:
          ValueError: see `spec`.
        """
        return [self._divide(tf.convert_to_tensor(tensor)) for tensor in tensors]

    def join(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The reverse of `divide`."""
        # Annotated before too: so loops keep the gradient replicated along the stages.
        tensors = [self._split(_swap(self._split(t, 1)), 0) for t in tensors]
        joined = (tf.reshape(t, [-1, *t.shape[2:]]) for t in tensors)
        return [t[: self.batch] if self.missing else t for t in joined]

    def spec(self, tensor: tf.Tensor | tf.TensorSpec) -> tf.TensorSpec:
        """The spec [U, ...] of a tensor [B, ...].

        Raises:
          ValueError: the tensor has no dim B.
        """
        if tensor.shape.rank == 0 or tensor.shape[0] != self.batch:
            raise ValueError(
                f"layer {self.path!r}: a pipeline divides its inputs by rows, but one "
                f"has shape {tensor.shape} where the batch is {self.batch}"
            )
        return tf.TensorSpec([self.rows, *tensor.shape[1:]], tensor.dtype)

    def check_split(self) -> None:
        """Raises ValueError: a microbatch's rows do not divide over the devices."""
        rows = self.rows
        (axes,) = self.plan.activation_sharding(["batch"], self.path).dims
        devices = self.plan.mesh.axes_size(axes)
        if rows % devices:
            raise ValueError(
                f"layer {self.path!r}: {self.count} microbatches of a batch of "
                f"{self.batch} have {rows} rows each, which do not divide over the "
                f"{devices} devices along {', '.join(axes)}: take fewer microbatches "
                "or a larger global batch"
            )

    def _divide(self, tensor: tf.Tensor) -> tf.Tensor:
        rows, *rest = self.spec(tensor).shape
        if self.missing:
            more = tf.broadcast_to(tensor[:1], [self.missing, *rest])
            tensor = tf.concat([self._split(tensor, 0), more], axis=0)
        tensor = tf.reshape(self._split(tensor, 0), [rows, self.count, *rest])
        return self._split(_swap(self._split(tensor, 0)), 1)

    def _split(self, tensor: tf.Tensor, dim: int) -> tf.Tensor:
        """`tensor` with rows split along `dim`, earlier dims unsharded, others open."""
        rows = self.plan.activation_sharding(["batch"], self.path).dims
        rest = range(dim + 1, tensor.shape.rank)
        dims = ((),) * dim + rows + ((),) * len(rest)
        sharding = Sharding(self.plan.mesh, dims)
        return annotate(
            tensor, sharding.opened(rest, but=self.plan.pipeline_axes or ())
        )


def _swap(tensor: tf.Tensor) -> tf.Tensor:
    """The first two dims in the other order."""
    return tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])
