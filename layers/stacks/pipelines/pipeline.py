"""Equal layers as a pipeline: stages are a tensor dim like any other (GSPMD 3.3).

Dims: L stages, Q layers of a stage, K of them in a row, B batch, U rows of a
microbatch; everything else is the body's.

In iteration t stage s works on the microbatch that the schedule gives, with the weights
of its layers, and passes the result on: the state, [L, U, ...], shifts by one. As only
the stage dim is split by the stage axis, that is one CollectivePermute.

  forward   for t:  x = shift(x, input[t]);  for K layers: keep x;  x = stages(theta, x)
  backward  for t, last first:  dx = gradient of the K layers;  shift back;  sum dtheta

Each device sums dtheta over its own rows of all microbatches; devices add up the sums
once, after the loop.

Where stages and rounds do not divide the layers, the last layers are none: they have
weights, which only an optimizer's `weight_norm` counts, and pass on what they get.

Layer numbers go on from stage to stage, K at a time: layer (r * L + s) * K + j is
number r * K + j of stage s, r being the round of a circular pipeline.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.checks import instance
from meshwright.framework.modeling.layer import Context, Layer, Mode
from meshwright.framework.modeling.layer_order import LayerOrder
from meshwright.framework.modeling.shapes import take_rows
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.stacks.pipelines.one_f_one_b import LossHead, OneFOneBRun
from meshwright.layers.stacks.pipelines.pipeline_decoding import (
    ROWS_DIM,
    PipelineDecoding,
    by_entry,
)
from meshwright.layers.stacks.pipelines.pipeline_loop import (
    by_stage_and_layer,
    stage_axes,
)
from meshwright.layers.stacks.pipelines.pipeline_run import PipelineRun
from meshwright.layers.stacks.pipelines.pipeline_schedule import (
    PipelineOrder,
    PipelineSchedule,
)
from meshwright.layers.stacks.pipelines.stages import StageMode
from meshwright.layers.stacks.repeat import Repeat, Unroll
from meshwright.layers.stacks.stacked_body import (
    SavedForBackward,
    SavedStack,
    check_stacked,
    divide,
    specs_of,
)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline(Layer):
    """The layers of `stack` in `num_stages` stages.

    The plan's weights table says which axis splits "stages". Inside, "batch" is split
    like "microbatch" in its activations table, if that is there: before and after the
    pipeline the batch may be split by the stage axis too.

    Args:
      stack: the layers, and their recomputation.
      num_stages: L.
      num_microbatches: the number of microbatches of a batch.
      num_repeats: how often a microbatch passes each stage: 1 is GPipe's schedule, more
        the circular schedule, for fewer bubbles with few microbatches.
      stage_mode: how a layer becomes all stages' layers.
      order: when backward passes run. `ONE_F_ONE_B` is for models that compute their
        loss by `loss`, as `LanguageModel` does.
      deferred_gradients: regular expressions of paths of a layer's weights, such as
        "feed_forward.*". Their gradients, where each is one product of what differs by
        microbatch, are computed after the backward loop, over all microbatches at once:
        so they have no bubbles (as in Qi et al. 2023), and their factors are in memory
        until then.

    Raises:
      ValueError: a number below 1; an unrolled stack; an expression that fits no
        weight, or when the layers are traced, none whose gradient is a product;
        deferred gradients in the order `ONE_F_ONE_B`.
    """

    stack: Repeat = instance(example="@Repeat()")
    num_stages: int
    num_microbatches: int
    num_repeats: int = 1
    stage_mode: StageMode = StageMode.VECTORIZED
    order: PipelineOrder = PipelineOrder.FORWARD_FIRST
    deferred_gradients: Sequence[str] = ()

    def __post_init__(self):
        super().__post_init__()
        _ = self.schedule  # It checks the numbers.
        if self.stack.unroll is not Unroll.LOOP:
            raise ValueError(
                f"Pipeline.stack has {self.stack.unroll}: a pipeline is a loop, set "
                "Repeat.unroll = %Unroll.LOOP"
            )
        if self.deferred_gradients and self.schedule.is_one_f_one_b:
            raise ValueError(
                "Pipeline.deferred_gradients keep what all microbatches need until "
                f"the end, and Pipeline.order = {self.order} keeps few: set one of them"
            )
        paths = [path for path, _ in self.stack.body.weights().items_by_path()]
        for pattern in self.deferred_gradients:
            if not any(re.fullmatch(pattern, path) for path in paths):
                raise ValueError(
                    f"Pipeline.deferred_gradients has {pattern!r}, which fits no "
                    f"weight of a layer; it has {', '.join(paths)}"
                )

    @property
    def schedule(self) -> PipelineSchedule:
        return PipelineSchedule(
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            num_repeats=self.num_repeats,
            order=self.order,
        )

    @property
    def layers_of_stage(self) -> int:
        """Q; where stages and repeats do not divide the layers, the last are none."""
        return self.schedule.in_a_row(self.stack.count) * self.num_repeats

    def weights(self) -> NestedMap:
        return self.stack.body.weights().map(self.stacked)

    def stacked(self, spec):
        """The spec of a layer's weight, stacked by stage and layer."""
        stacked = by_stage_and_layer(spec, self.num_stages, self.layers_of_stage)
        order = LayerOrder(
            layers=self.stack.count, stages=self.num_stages, rounds=self.num_repeats
        )
        return dataclasses.replace(stacked, order=order)

    def extra_flops(self, sequence_length: int) -> float:
        # Layers that are none have weights too.
        none = self.num_stages * self.layers_of_stage - self.stack.count
        specs = self.stack.body.weights().leaves()
        size = sum(spec.size for spec in specs if spec.is_matrix)
        return self.stack.extra_flops(sequence_length) - 2.0 * none * size

    def fprop(self, ctx: Context, theta: NestedMap, x: Any, **constants: Any) -> Any:
        """Runs the stack.

        Args:
          ctx: context. In `Mode.EVAL` nothing is saved, so there is no gradient. A
            layer's random key depends on its number and on the microbatch's.
          theta: weights of the body with leading dims L and Q.
          x: the body's input, a nest of floating-point tensors [B, ...].
          **constants: nests of tensors [B, ...] of which each layer gets the
            microbatch's rows; None is passed on as None.

        Returns:
          What `Repeat` returns. Entries of `aux` called `loss`, and those below
          `statistics`, are the microbatches' mean, others their sums.

        Raises:
          ValueError: a tensor has another batch; microbatches do not divide the batch,
            and layers have side results or statistics of its rows; the stage axis is
            used inside, or does not divide the stages; in training, the order is
            `ONE_F_ONE_B`; see `Repeat`.
        """
        if self.trains_with_loss(ctx):
            raise ValueError(
                f"layer {ctx.path!r}: Pipeline.order is {self.order}, which needs the "
                "loss of each microbatch within the pipeline, as LanguageModel "
                "computes it; this model computes it after the whole batch: set "
                "Pipeline.order = %PipelineOrder.FORWARD_FIRST"
            )
        if tf.nest.flatten(x)[0].shape[0] is None:  # Of any size: not to be divided.
            return self.stack.fprop(ctx, self.plain_weights(theta), x, **constants)
        check_stacked(ctx, self.weights(), theta)
        run = self._run(ctx, x, constants, theta)
        run.microbatches.check_split()
        inputs = run.microbatches.divide(tf.nest.flatten(x))
        flat = [*inputs, *theta.leaves(), *run.shared]
        if ctx.mode is Mode.EVAL:
            outputs = run.forward(flat, keep=False)[0]
        else:
            outputs = tf.custom_gradient(run.with_gradient)(*flat)
        x, aux = divide(tf.nest.flatten(outputs), [run.body.counts[0]])
        aux = [self._by_layer(each) for each in run.averaged(aux)]
        return run.body.result(run.microbatches.join(x), aux)

    def trains_with_loss(self, ctx: Context) -> bool:
        """Whether to be called by `loss` instead of `fprop`."""
        return ctx.mode is Mode.TRAIN and self.schedule.is_one_f_one_b

    def loss(
        self, ctx: Context, theta: NestedMap, x: Any, head: LossHead, **constants: Any
    ) -> NestedMap:
        """The stack, and the loss of what it gives, in the order `ONE_F_ONE_B`.

        Args:
          ctx: context of `Mode.TRAIN`.
          theta: as for `fprop`.
          x: likewise.
          head: what follows the stack.
          **constants: as for `fprop`.

        Returns:
          `loss`: float32 scalar, of microbatches and side results together; it can be
            differentiated once, by theta, the head's, x and constants.
          `sums`: a nested map of the head's sums.
          `aux`: the layers' side results, as `fprop` returns them; None if they have
            none. Like sums, they are not differentiated.

        Raises:
          ValueError: as for `fprop`; microbatches do not divide the batch; a weight of
            the head is a running statistic; its layers need random numbers.
        """
        check_stacked(ctx, self.weights(), theta)

        def unstaged(run, aux):
            aux = [self._by_layer(each) for each in run.averaged(aux)]
            result = run.body.result(tf.nest.flatten(run.body.x), aux)
            return result.aux if aux else None

        def aux_loss(aux):
            if not aux or head.aux_loss is None:
                return tf.zeros([])
            return head.aux_loss(unstaged(run, aux))

        run = self._run(
            ctx, x, constants, theta, of=OneFOneBRun, head=head, aux_loss=aux_loss
        )
        run.microbatches.check_split()
        inputs = run.microbatches.divide(tf.nest.flatten(x))
        flat = [*inputs, *theta.leaves(), *run.shared, *run.head_theta.leaves()]
        outputs = tf.custom_gradient(run.with_gradient)(*flat)
        (loss,), sums, aux = divide(tf.nest.flatten(outputs), [1, len(head.sums)])
        sums = NestedMap(zip(head.sums, map(tf.stop_gradient, sums), strict=True))
        aux = unstaged(run, list(map(tf.stop_gradient, aux)))
        return NestedMap(loss=loss, sums=sums, aux=aux)

    def init_cache(
        self, ctx: Context, batch: int | tf.Tensor, length: int
    ) -> NestedMap:
        """The body's cache, by stage, layer and group of rows: see `cache_rows`.

        Groups are as many as stages, or fewer if so many do not divide the batch, or
        leave devices of a microbatch's axes without rows.
        """
        decoding = self._decoding(ctx, batch)
        if decoding is not None:
            return decoding.init_cache(batch, length)
        return _as_staged(self.stack.init_cache(ctx, batch, length))

    def encode_memory(
        self, ctx: Context, theta: NestedMap, memory: tf.Tensor
    ) -> NestedMap:
        """The body's cache for each layer's weights, as `init_cache` has it."""
        decoding = self._decoding(ctx, memory.shape[0])
        if decoding is not None:
            return decoding.encode_memory(theta, memory)
        theta = self.plain_weights(theta)
        return _as_staged(self.stack.encode_memory(ctx, theta, memory))

    def step(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        cache: NestedMap,
        position: int | tf.Tensor,
        *,
        memory: NestedMap | None = None,
        **inputs: tf.Tensor | None,
    ) -> tuple[tf.Tensor, NestedMap]:
        """One more token, or the first S, through all stages.

        Each stage keeps its weights and caches, and groups of rows travel. Where the
        mesh does not split the stages, all rows go through one layer after another.
        See `TransformerLayer.step`; what comes by rows comes in the order of `x`. For
        beams of a memory's rows, the cache is one of as many rows, `copied`.

        Raises:
          ValueError: rows do not divide into the groups that the cache has, or it or
            the memory is of other rows.
        """
        decoding = self._decoding(ctx, x.shape[0], cache)
        if decoding is not None:
            return decoding.step(theta, x, cache, position, memory, inputs)
        y, cache = self.stack.step(
            ctx,
            self.plain_weights(theta),
            x,
            _as_plain(cache),
            position,
            memory=memory and _as_plain(memory),
            **inputs,
        )
        return y, _as_staged(cache)

    def take_rows(self, cache: NestedMap, beam: tf.Tensor) -> NestedMap:
        """`cache` with rows in another order; see `cache_rows.reordered`."""

        def taken(t):
            if t.shape[0] == 1:  # It is `_as_staged`.
                return take_rows(t, beam, ROWS_DIM)
            rows, beams = t.shape[ROWS_DIM] // beam.shape[1], beam.shape[1]
            groups = tf.reshape(beam, [-1, rows, beams])
            schedule = self._decoding_schedule(groups.shape[0])
            numbers = np.minimum(schedule.microbatch, groups.shape[0] - 1)
            by_stage = tf.gather(groups, by_entry(schedule, numbers).T)
            return take_rows(t, by_stage[:, None], ROWS_DIM)

        return cache.map(taken)

    def _decoding_schedule(self, groups: int) -> PipelineSchedule:
        return dataclasses.replace(self.schedule, num_microbatches=groups)

    def _decoding(
        self,
        ctx: Context,
        rows: int | tf.Tensor | None,
        cache: NestedMap | None = None,
    ) -> PipelineDecoding | None:
        """None where nothing splits the stages: so it is with rows of any number."""
        axes = stage_axes(ctx)
        if ctx.plan.mesh.axes_size(axes) == 1:
            return None
        if cache:
            groups = max(rows // cache.leaves()[0].shape[ROWS_DIM], 1)
        else:
            inside = ctx.plan.inside_pipeline(axes)
            (batch,) = inside.activation_sharding(["batch"], ctx.path).dims
            devices = inside.mesh.axes_size(batch)
            divisors = (n for n in range(self.num_stages, 1, -1) if rows % n == 0)
            groups = next((n for n in divisors if rows // n % devices == 0), 1)
        return PipelineDecoding(
            self.stack,
            self._decoding_schedule(groups),
            ctx,
            stage_mode=self.stage_mode,
        )

    def plain_weights(self, theta: NestedMap) -> NestedMap:
        """Weights, or anything else by stage and layer, as the `Repeat` has them."""
        return theta.map(self._by_layer)

    def by_stage(self, stack: tf.Tensor) -> tf.Tensor:
        """A stack in the order of layer numbers as this layer has it, [L, Q, ...]."""
        repeats, (count, *rest) = self.num_repeats, stack.shape
        lead = [self.num_stages, self.layers_of_stage]
        none = lead[0] * lead[1] - count
        if none:
            zeros = tf.zeros([none, *rest], stack.dtype)
            stack = tf.concat([stack, zeros], axis=0)
        stack = tf.reshape(stack, [repeats, lead[0], lead[1] // repeats, *rest])
        order = [1, 0, 2, *range(3, stack.shape.rank)]
        return tf.reshape(tf.transpose(stack, order), [*lead, *rest])

    def _by_layer(self, stack: tf.Tensor) -> tf.Tensor:
        """[L, Q, ...] in the order of layer numbers, as many as there are layers."""
        stages, layers, *rest = stack.shape
        repeats = self.num_repeats
        stack = tf.reshape(stack, [stages, repeats, layers // repeats, *rest])
        order = [1, 0, 2, *range(3, stack.shape.rank)]
        stack = tf.reshape(tf.transpose(stack, order), [stages * layers, *rest])
        return stack[: self.stack.count]

    def saved(self, ctx: Context, x: Any, **constants: Any) -> SavedForBackward:
        """See `Repeat.saved`; with the gradients of the microbatches' inputs.

        Tensors that each stage keeps in every iteration are kept in bubbles too.
        """
        run = self._run(ctx, x, constants)
        count = run.stores.count
        if self.schedule.is_one_f_one_b:
            count = self.schedule.kept_passes * run.in_a_row
        kept = [(tensor, count) for tensor in run.kept_for_backward()]
        kept += [(tensor, self.schedule.slots) for tensor in run.body.outputs]
        staged = {"stages": self.num_stages, "stage_axes": run.stages.axes}
        return SavedForBackward(
            stacks=tuple(SavedStack(tensor=t, count=n, **staged) for t, n in kept),
            result=run.body.result_specs(specs_of(x), self.stack.count),
        )

    def _run(
        self, ctx: Context, x: Any, constants, theta=None, *, of=PipelineRun, **more
    ) -> PipelineRun:
        return of(
            self.stack,
            self.schedule,
            ctx,
            x,
            constants,
            theta,
            stage_mode=self.stage_mode,
            deferred=self.deferred_gradients,
            **more,
        )


def _as_staged(cache: NestedMap) -> NestedMap:
    """A `Repeat`'s cache, with as many dims as that of stages."""
    return cache.map(lambda t: t[None, None])


def _as_plain(cache: NestedMap) -> NestedMap:
    return cache.map(lambda t: t[0, 0])
