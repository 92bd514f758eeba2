"""What the loops of a pipeline's iterations share (GSPMD 3.3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from meshwright.framework.modeling import random
from meshwright.framework.modeling.layer import STAGE_DIM, Context, WeightSpec
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.sharding import Sharding
from meshwright.layers.basic.entries import read, write
from meshwright.layers.stacks.pipelines.pipeline_schedule import PipelineSchedule
from meshwright.layers.stacks.pipelines.stages import StageMode, Stages


class PipelineLoop:
    """A loop of iterations, in each of which every stage runs some of its layers.

    Dims: L stages, Q layers of a stage, K of them in a row, U rows of a microbatch.

    Where stages and rounds do not divide the layers, the last ones run layers that are
    none: what comes out of those is what went in.

    Args:
      schedule: what each stage works on, by iteration.
      ctx: the pipeline's context.
      count: the number of layers.
      stage_mode: how a layer becomes all stages' layers.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        ctx: Context,
        *,
        count: int,
        stage_mode: StageMode,
    ):
        self.ctx, self.schedule = ctx, schedule
        self.stages = Stages(
            mesh=ctx.plan.mesh,
            axes=stage_axes(ctx),
            count=schedule.num_stages,
            mode=stage_mode,
        )
        self.count = count
        self.in_a_row = schedule.in_a_row(count)
        self.layers_of_stage = self.in_a_row * schedule.num_repeats
        self.is_even = count == self.layers_of_stage * schedule.num_stages
        self.circular = schedule.num_repeats > 1
        self.plan = ctx.plan.inside_pipeline(self.stages.axes)

    def shardings(self, weights: NestedMap) -> list[Sharding]:
        """Those of weights' specs by stage and layer."""
        plan = self.ctx.plan
        return [spec.sharding(plan, path) for path, spec in weights.items_by_path()]

    # What an iteration reads.

    def scalar(self, table: np.ndarray, t: tf.Tensor) -> tf.Tensor:
        """The entry `t` of a table [iterations]."""
        return read(tf.constant(table), t, dim=0)

    def microbatch(self, t: tf.Tensor) -> tf.Tensor:
        """int32 [L], a valid microbatch in bubbles too."""
        last = self.schedule.num_microbatches - 1
        return self.stages.entry(np.minimum(self.schedule.microbatch, last), t)

    def slot(self, t: tf.Tensor, j: tf.Tensor) -> tf.Tensor:
        """The number of a stage's layer: a scalar for all, or one for each stage."""
        if not self.circular:
            return j
        return self.stages.entry(self.schedule.repeat, t) * self.in_a_row + j

    def layer_weights(self, stacks, shardings, t, j) -> list[tf.Tensor]:
        """[L, ...] of the layer `j` in a row, of weights [L, Q, ...]."""
        slot = self.slot(t, j)
        pairs = zip(stacks, shardings, strict=True)
        return [self.stages.read(stack, slot, like) for stack, like in pairs]

    def keys(self, t, j) -> list[tf.Tensor]:
        """The stages' random keys, which depend on layer and microbatch, if any."""
        if self.ctx.key is None:
            return []
        first = self.stages.entry(self.schedule.first_layer(self.in_a_row), t)
        keys = random.fold_in(self.ctx.key, first + j)
        return [tf.transpose(random.fold_in(keys, self.microbatch(t)))]

    def in_valid(
        self,
        t: tf.Tensor,
        values: Sequence[tf.Tensor],
        others: Sequence[tf.Tensor] | None = None,
    ) -> list[tf.Tensor]:
        """Stacked `values`, in bubbles `others`, or 0."""
        valid = self.stages.entry(self.schedule.valid, t)
        return self.stages.where(valid, values, others)

    def of_layers(
        self,
        t: tf.Tensor,
        j: tf.Tensor,
        values: Sequence[tf.Tensor],
        others: Sequence[tf.Tensor] | None = None,
    ) -> list[tf.Tensor]:
        """Stacked `values`, where layer `j` in a row is none `others`, or 0."""
        if self.is_even:
            return list(values)
        first = self.stages.entry(self.schedule.first_layer(self.in_a_row), t)
        return self.stages.where(first + j < self.count, values, others)

    # The iterations.

    def iterations(self, body, state: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """`state` after (t, *state) -> [t + 1, *state] of all iterations."""
        count = self.schedule.iterations
        start = [tf.constant(0), *state]
        return list(tf.while_loop(lambda t, *_: t < count, body, start)[1:])

    def layers(self, body, state: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """`state` after the K layers that a stage has in a row."""
        start = [tf.constant(0), *state]
        if self.in_a_row == 1:
            return list(body(*start)[1:])
        return list(tf.while_loop(lambda j, *_: j < self.in_a_row, body, start)[1:])

    def shifted(self, t, x: Sequence, inputs: Sequence) -> list[tf.Tensor]:
        """What stages get: [L, U, ...] of the stage before, or a microbatch's input."""
        return [
            self.stages.shift(
                tensor,
                self.read_microbatch(micro, t, stage=0),
                self.scalar(self.schedule.takes_input, t),
                circular=self.circular,
            )
            for tensor, micro in zip(x, inputs, strict=True)
        ]

    def read_microbatch(self, table, t, *, stage: int) -> tf.Tensor:
        """The stage's entry of [microbatches, ...]; any entry in a bubble."""
        last = self.schedule.num_microbatches - 1
        numbers = np.minimum(self.schedule.microbatch[:, stage], last)
        return read(table, self.scalar(numbers, t), dim=0)

    def write_microbatch(self, buffers, x, t, *, stage: int) -> list[tf.Tensor]:
        """`x` [L, ...] written at the microbatch of `stage`, whose entry will be read.

        Entries of another stage's microbatch, or of a bubble, are overwritten later.
        """
        numbers = np.minimum(
            self.schedule.microbatch[:, stage], self.schedule.slots - 1
        )
        at = self.scalar(numbers, t)
        return [
            write(b, tensor, at, dim=1) for b, tensor in zip(buffers, x, strict=True)
        ]

    def start(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What stages have before they get anything.

        Bubbles compute on a real microbatch: zeros might give NaN.
        """
        return [
            tf.broadcast_to(x[:1], [self.stages.count, *x.shape[1:]]) for x in inputs
        ]

    def buffers(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Empty buffers for x [..., U, ...] of each stage and microbatch."""
        lead = [self.stages.count, self.schedule.slots]
        return [tf.zeros([*lead, *x.shape[1:]], x.dtype) for x in inputs]


def stage_axes(ctx: Context) -> tuple[str, ...]:
    """The mesh axes that split the stages."""
    return ctx.plan.weight_sharding([STAGE_DIM]).dims[0]


def by_stage_and_layer(spec: WeightSpec, stages: int, layers: int) -> WeightSpec:
    """The spec of a layer's weight, stacked by stage and its layers: [L, Q, ...]."""
    return spec.stacked(layers).stacked(stages, STAGE_DIM)
