"""What each stage of a pipeline keeps, until the backward pass reads it.

Dims: L stages, Q layers of a stage, K of them in a row, U rows of a microbatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright.framework.modeling.recompute import Saved
from meshwright.layers.basic.entries import read, write
from meshwright.layers.stacks.pipelines.pipeline_schedule import PipelineSchedule
from meshwright.layers.stacks.pipelines.stages import Stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageStores:
    """Stacks of tensors [L, U, ...], written in one loop and read in another.

    Either by iteration, [iterations * K, L, U, ...], bubbles too; or by layer, with the
    microbatches of a layer one after another, [L, Q * microbatches + 1, U, ...]: so all
    microbatches of a layer can be read at once. The last entry is for all bubbles.

    Args:
      stages: the stages.
      schedule: the microbatch of each, by iteration.
      in_a_row: K.
      by_layer: whether they are by layer.
    """

    stages: Stages
    schedule: PipelineSchedule
    in_a_row: int
    by_layer: bool

    @property
    def count(self) -> int:
        """The number of entries of each stage."""
        if not self.by_layer:
            return self.schedule.iterations * self.in_a_row
        layers = self.schedule.num_repeats * self.in_a_row
        return layers * self.schedule.slots + 1

    def zeros(self, kept: Sequence[Saved]) -> list[tf.Tensor]:
        lead = [self.count, self.stages.count]
        if self.by_layer:
            lead.reverse()
        return [
            self.stages.annotate(
                tf.zeros([*lead, *saved.spec.shape], saved.spec.dtype),
                saved,
                before=0 if self.by_layer else 1,
            )
            for saved in kept
        ]

    def write(self, stacks, values, kept: Sequence[Saved], t, j) -> list[tf.Tensor]:
        """`stacks` with `values` [L, U, ...] of layer `j` in iteration `t`."""
        if not self.by_layer:
            at = t * self.in_a_row + j
            return [write(s, v, at, dim=0) for s, v in zip(stacks, values, strict=True)]
        at = self._entries(t, j)
        return [
            self.stages.write(stack, value, at, self.stages.sharding(saved, 2))
            for stack, value, saved in zip(stacks, values, kept, strict=True)
        ]

    def read(self, stacks, kept: Sequence[Saved], t, j) -> list[tf.Tensor]:
        """What was written for layer `j` in iteration `t`; anything in bubbles."""
        if not self.by_layer:
            return [read(stack, t * self.in_a_row + j, dim=0) for stack in stacks]
        at = self._entries(t, j)
        return [
            self.stages.read(stack, at, self.stages.sharding(saved, 2))
            for stack, saved in zip(stacks, kept, strict=True)
        ]

    def microbatches(self, stack: tf.Tensor, layer: tf.Tensor) -> tf.Tensor:
        """[L, microbatches, U, ...] of the layer of this number in each stage."""
        count = self.schedule.slots
        start = tf.stack([0, layer * count, *[0] * (stack.shape.rank - 2)])
        sizes = [stack.shape[0], count, *stack.shape[2:]]
        return xla.dynamic_slice(stack, start, sizes)

    def _entries(self, t, j) -> tf.Tensor:
        """int32 [L]: the entry of each stage; the last in bubbles."""
        schedule = self.schedule
        first = schedule.repeat * self.in_a_row * schedule.slots + schedule.microbatch
        at = self.stages.entry(first.astype(np.int32), t) + j * schedule.slots
        valid = self.stages.entry(schedule.valid, t)
        return tf.where(valid, at, self.count - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReusedStores:
    """Stacks [L, passes * K, U, ...] of which each place is written again once read.

    For `PipelineOrder.ONE_F_ONE_B`; the places are `PipelineSchedule.kept_at`.

    Args:
      stages: the stages.
      schedule: the microbatch of each, by iteration.
      in_a_row: K.
    """

    stages: Stages
    schedule: PipelineSchedule
    in_a_row: int

    @property
    def count(self) -> int:
        """The number of entries of each stage."""
        return self.schedule.kept_passes * self.in_a_row

    def zeros(self, kept: Sequence[Saved]) -> list[tf.Tensor]:
        lead = [self.stages.count, self.count]
        return [
            self.stages.annotate(
                tf.zeros([*lead, *saved.spec.shape], saved.spec.dtype), saved
            )
            for saved in kept
        ]

    def write(self, stacks, values, kept: Sequence[Saved], t, j) -> list[tf.Tensor]:
        """`stacks` with `values` [L, U, ...] of layer `j` in iteration `t`."""
        at = self._entries(self.schedule.kept_at[0], t, j)
        return [
            self.stages.write(stack, value, at, self.stages.sharding(saved, 2))
            for stack, value, saved in zip(stacks, values, kept, strict=True)
        ]

    def read(self, stacks, kept: Sequence[Saved], t, j) -> list[tf.Tensor]:
        """What was written for layer `j` of those in backward iteration `t`."""
        at = self._entries(self.schedule.kept_at[1], t, j)
        return [
            self.stages.read(stack, at, self.stages.sharding(saved, 2))
            for stack, saved in zip(stacks, kept, strict=True)
        ]

    def _entries(self, places: np.ndarray, t, j) -> tf.Tensor:
        return self.stages.entry(places * np.int32(self.in_a_row), t) + j
