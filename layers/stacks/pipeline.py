"""Equal layers as a pipeline: stages are a tensor dim like any other (GSPMD 3.3).

Dims: L stages, Q layers of a stage, K of them in a row, B batch, U rows of a
microbatch; everything else is the body's.

In iteration t stage s works on the microbatch that the schedule gives, with the weights
of its layers, and passes the result on: the state, [L, U, ...], shifts by one. As only
the stage dim is split by the stage axis, that is one CollectivePermute.

  forward   for t:  x = shift(x, input[t]);  for K layers: keep x;  x = stages(theta, x)
  backward  for t, last first:  dx = gradient of the K layers;  shift back;  sum dtheta

Layer numbers go on from stage to stage, K at a time: layer (r * L + s) * K + j is
number r * K + j of stage s, r being the round of a circular pipeline.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling import random
from meshwright.framework.modeling.checks import instance
from meshwright.framework.modeling.layer import STAGE_DIM, Context, Layer, Mode
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.annotations import OnConflict, annotate
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.types import reshard_to
from meshwright.layers.basic.entries import read, write
from meshwright.layers.stacks.microbatches import Microbatches
from meshwright.layers.stacks.pipeline_schedule import PipelineSchedule
from meshwright.layers.stacks.repeat import Repeat, Unroll
from meshwright.layers.stacks.stacked_body import (
    Constants,
    SavedForBackward,
    SavedStack,
    StackedBody,
    check_stacked,
    divide,
    specs_of,
)
from meshwright.layers.stacks.stages import StageMode, Stages


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

    Raises:
      ValueError: stages and repeats do not divide the layers; a number below 1; an
        unrolled stack.
    """

    stack: Repeat = instance(example="@Repeat()")
    num_stages: int
    num_microbatches: int
    num_repeats: int = 1
    stage_mode: StageMode = StageMode.VECTORIZED

    def __post_init__(self):
        super().__post_init__()
        parts = self.schedule.num_stages * self.num_repeats
        if self.stack.count % parts:
            depth = self.stack.body.depth
            what = "layers" if depth == 1 else f"times {depth} layers"
            raise ValueError(
                f"Pipeline: {self.stack.count} {what} do not divide into "
                f"{self.num_stages} stages with {self.num_repeats} repeats: change "
                f"Repeat.num_layers to a multiple of {parts * depth}, or num_stages or "
                "num_repeats"
            )
        if self.stack.unroll is not Unroll.LOOP:
            raise ValueError(
                f"Pipeline.stack has {self.stack.unroll}: a pipeline is a loop, set "
                "Repeat.unroll = %Unroll.LOOP"
            )

    @property
    def schedule(self) -> PipelineSchedule:
        return PipelineSchedule(
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            num_repeats=self.num_repeats,
        )

    @property
    def layers_of_stage(self) -> int:
        """Q."""
        return self.stack.count // self.num_stages

    def weights(self) -> NestedMap:
        return self.stack.body.weights().map(self.stacked)

    def stacked(self, spec):
        """The spec of a layer's weight, stacked by stage and layer."""
        return spec.stacked(self.layers_of_stage).stacked(self.num_stages, STAGE_DIM)

    def extra_flops(self, sequence_length: int) -> float:
        return self.stack.extra_flops(sequence_length)

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
          What `Repeat` returns. Entries of `aux` called `loss` are the microbatches'
          mean, others their sums.

        Raises:
          ValueError: microbatches do not divide the batch, a tensor has another batch;
            the stage axis is used inside, or does not divide the stages; see `Repeat`.
        """
        if tf.nest.flatten(x)[0].shape[0] is None:  # Of any size: not to be divided.
            return self.stack.fprop(ctx, self.plain_weights(theta), x, **constants)
        check_stacked(ctx, self.weights(), theta)
        run = _Run(self, ctx, x, constants, theta)
        run.microbatches.check_split()
        inputs = run.microbatches.divide(tf.nest.flatten(x))
        flat = [*inputs, *theta.leaves(), *run.shared]
        if ctx.mode is Mode.EVAL:
            outputs = run.forward(flat, keep=False)[0]
        else:
            outputs = tf.custom_gradient(run.with_gradient)(*flat)
        x, aux = divide(tf.nest.flatten(outputs), [run.body.counts[0]])
        return run.body.result(run.microbatches.join(x), run.aux_by_layer(aux))

    def init_cache(self, ctx: Context, batch: int, length: int) -> NestedMap:
        """See `Repeat.init_cache`."""
        return self.stack.init_cache(ctx, batch, length)

    def encode_memory(
        self, ctx: Context, theta: NestedMap, memory: tf.Tensor
    ) -> NestedMap:
        """See `Repeat.encode_memory`."""
        return self.stack.encode_memory(ctx, self.plain_weights(theta), memory)

    def step(self, ctx: Context, theta: NestedMap, x: tf.Tensor, *args, **inputs):
        """See `Repeat.step`: one token passes the layers one after another.

        For that, all stages' devices get the layers' weights.
        """
        theta = self.plain_weights(theta)
        return self.stack.step(ctx, theta, x, *args, **inputs)

    def plain_weights(self, theta: NestedMap) -> NestedMap:
        """Weights, or anything else by stage and layer, as the `Repeat` has them."""
        return theta.map(functools.partial(_by_layer, repeats=self.num_repeats))

    def saved(self, ctx: Context, x: Any, **constants: Any) -> SavedForBackward:
        """See `Repeat.saved`; with the gradients of the microbatches' inputs.

        Tensors that each stage keeps in every iteration are kept in bubbles too.
        """
        run = _Run(self, ctx, x, constants)
        each = self.schedule.iterations * run.in_a_row
        kept = [(tensor, each) for tensor in run.body.read]
        kept += [(tensor, self.schedule.slots) for tensor in run.body.outputs]
        staged = {"stages": self.num_stages, "stage_axes": run.stages.axes}
        return SavedForBackward(
            stacks=tuple(SavedStack(tensor=t, count=n, **staged) for t, n in kept),
            result=run.body.result_specs(specs_of(x), self.stack.count),
        )


def _by_layer(stack: tf.Tensor, *, repeats: int) -> tf.Tensor:
    """[L, Q, ...] in the order of layer numbers, [L * Q, ...]."""
    stages, layers, *rest = stack.shape
    stack = tf.reshape(stack, [stages, repeats, layers // repeats, *rest])
    order = [1, 0, 2, *range(3, stack.shape.rank)]
    return tf.reshape(tf.transpose(stack, order), [stages * layers, *rest])


class _Run:
    """One call of a `Pipeline`.

    `flat` is always [*x, *weights, *shared], x and shared by microbatch. The results
    are [*x, by microbatch, *aux, by stage and layer].
    """

    def __init__(self, pipeline: Pipeline, ctx: Context, x, constants, theta=None):
        self.pipeline, self.ctx, self.schedule = pipeline, ctx, pipeline.schedule
        self.stages = Stages(
            mesh=ctx.plan.mesh,
            axes=ctx.plan.weight_sharding([STAGE_DIM]).dims[0],
            count=pipeline.num_stages,
            mode=pipeline.stage_mode,
        )
        # K.
        self.in_a_row = pipeline.layers_of_stage // pipeline.num_repeats
        self.circular = pipeline.num_repeats > 1
        self.plan = ctx.plan.inside_pipeline(self.stages.axes)
        self.microbatches = Microbatches(
            plan=self.plan,
            batch=tf.nest.flatten(x)[0].shape[0],
            count=pipeline.num_microbatches,
            path=ctx.path,
        )
        constants = Constants(constants)
        self.shared = self.microbatches.divide(constants.shared)
        self.fixed = self.microbatches.divide(constants.fixed)
        rows = functools.partial(tf.nest.map_structure, self.microbatches.spec)
        self.body = StackedBody(
            pipeline.stack.body,
            dataclasses.replace(ctx, plan=self.plan),
            rows(specs_of(x)),
            shared=rows(specs_of(constants.shared)),
            fixed=rows(specs_of(constants.fixed)),
            constants=constants,
            recompute=pipeline.stack.recompute,
            saved_names=pipeline.stack.saved_names,
            stacks=theta,
            # As of all stages they can be unreduced, which no vectorized op can be. A
            # manual region has its own.
            annotates_gradients=pipeline.stage_mode is StageMode.MANUAL,
        )
        self.split = self.body.split
        self.weights = self.body.specs.map(pipeline.stacked)
        self.shardings = [
            spec.sharding(ctx.plan, path) for path, spec in self.weights.items_by_path()
        ]
        tokens = self.plan.activation_sharding(["batch", "stream"], ctx.path).dims
        self.token_axes = [axis for axes in tokens for axis in axes]

    def aux_by_layer(self, aux: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Side results by stage and layer in the layers' order, over microbatches."""
        paths = self.body.aux_paths
        layers_aux = []
        for path, total in zip(paths, aux, strict=True):
            if path.rsplit(".", 1)[-1] == "loss":
                total /= self.pipeline.num_microbatches
            layers_aux.append(_by_layer(total, repeats=self.pipeline.num_repeats))
        return layers_aux

    # What an iteration reads.

    def _scalar(self, table: np.ndarray, t: tf.Tensor) -> tf.Tensor:
        return read(tf.constant(table), t, dim=0)

    def _by_stage(self, table: np.ndarray, t: tf.Tensor) -> tf.Tensor:
        return self.stages.annotate(read(tf.constant(table), t, dim=0))

    def _microbatch(self, t: tf.Tensor) -> tf.Tensor:
        """int32 [L], a valid microbatch in bubbles too."""
        last = self.pipeline.num_microbatches - 1
        return self._by_stage(np.minimum(self.schedule.microbatch, last), t)

    def _slot(self, t: tf.Tensor, j: tf.Tensor) -> tf.Tensor:
        """The number of a stage's layer: a scalar for all, or one for each stage."""
        if not self.circular:
            return j
        return self._by_stage(self.schedule.repeat, t) * self.in_a_row + j

    def _arguments(self, t, j, x, stacks, constants) -> list[tf.Tensor]:
        slot = self._slot(t, j)
        pairs = zip(stacks, self.shardings, strict=True)
        weights = [self.stages.read(stack, slot, like) for stack, like in pairs]
        arguments = [*x, *weights, *constants]
        if self.ctx.key is None:
            return arguments
        first = self._by_stage(self.schedule.first_layer(self.in_a_row), t)
        keys = random.fold_in(self.ctx.key, first + j)
        return [*arguments, tf.transpose(random.fold_in(keys, self._microbatch(t)))]

    def _constants(self, t, shared) -> list[tf.Tensor]:
        """The constants of each stage's microbatch."""
        microbatch = self._microbatch(t)
        return [self.stages.pick(c, microbatch) for c in (*shared, *self.fixed)]

    def _in_valid(self, t, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Stacked `values`, 0 in bubbles."""
        valid = self._by_stage(self.schedule.valid, t)
        masks = (tf.reshape(valid, [-1] + [1] * (v.shape.rank - 1)) for v in values)
        return [
            tf.where(mask, v, tf.zeros_like(v))
            for mask, v in zip(masks, values, strict=True)
        ]

    def _weight_gradients(self, t, dweights: Sequence) -> list[tf.Tensor]:
        """Gradients of a microbatch, unreduced along the axes that split its tokens.

        Those of statistics are values, averaged over microbatches.
        """
        gradients = []
        for (path, spec), value in zip(
            self.body.specs.items_by_path(), dweights, strict=True
        ):
            if spec.is_statistic:
                (value,) = self._in_valid(t, [value / self.microbatches.count])
            spec = spec.stacked(self.stages.count, STAGE_DIM)
            sharding = self._unreduced(spec, path, self.token_axes)
            gradients.append(annotate(value, sharding, on_conflict=OnConflict.REDUCE))
        return gradients

    def _unreduced(self, spec, path: str, axes: Sequence[str]) -> Sharding:
        """The sharding of a weight's gradient, unreduced along `axes` where it can be.

        None of a statistic is.
        """
        plan = dataclasses.replace(self.ctx.plan, unreduced_gradient_axes=tuple(axes))
        sharding = plan.read_sharding(spec.dims, path).dual()
        return sharding.untyped() if spec.is_statistic else sharding

    def _reduced(self, dstacks: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gradients of weights, unreduced only as those of the plan's weights are."""
        axes = self.ctx.plan.unreduced_gradient_axes
        return [
            reshard_to(stack, self._unreduced(spec, path, axes))
            for (path, spec), stack in zip(
                self.weights.items_by_path(), dstacks, strict=True
            )
        ]

    # The loops.

    def forward(self, flat: Sequence[tf.Tensor], *, keep: bool):
        """The results, and what the layers got and saved in every iteration."""
        inputs, stacks, shared = divide(flat, self.body.counts[:2])
        counts = [len(inputs), len(inputs), len(self.body.aux)]

        def iterate(t, *state):
            x, outs, aux, kept = divide(state, counts)
            x = [
                self.stages.shift(
                    tensor,
                    self._read_microbatch(micro, t, stage=0),
                    self._scalar(self.schedule.takes_input, t),
                    circular=self.circular,
                )
                for tensor, micro in zip(x, inputs, strict=True)
            ]
            constants = self._constants(t, shared)

            def layer(j, *state):
                x, aux, kept = divide(state, counts[1:])
                arguments = self._arguments(t, j, x, stacks, constants)
                y = self.stages.run(self.split.forward, arguments)
                y, new_aux, saved = self.body.divide_results(y)
                slot = self._slot(t, j)
                aux = self._add(aux, self._in_valid(t, new_aux), slot)
                if keep:
                    at = t * self.in_a_row + j
                    pairs = zip(kept, [*x, *saved], strict=True)
                    kept = [write(store, tensor, at, dim=0) for store, tensor in pairs]
                return [j + 1, *self._annotated(y), *aux, *kept]

            x, aux, kept = divide(self._layers(layer, [*x, *aux, *kept]), counts[1:])
            outs = self._write_microbatch(outs, x, t, stage=-1)
            return [t + 1, *x, *outs, *aux, *kept]

        # Bubbles compute on a real microbatch: zeros might give NaN.
        start = [
            tf.broadcast_to(x[:1], [self.stages.count, *x.shape[1:]]) for x in inputs
        ]
        final = self._iterations(
            iterate,
            [
                *self._annotated(start),
                *self._buffers(inputs),
                *self._aux_stacks(),
                *(self._stores() if keep else ()),
            ],
        )
        _, outs, aux, kept = divide(final, counts)
        last = self.pipeline.num_microbatches
        return [*(out[-1, :last] for out in outs), *aux], kept

    def with_gradient(self, *flat: tf.Tensor):
        """The results, and their gradient function."""
        inputs, stacks, shared = divide(flat, self.body.counts[:2])
        outputs, kept = self.forward(flat, keep=True)
        n = len(inputs)
        counts = [n, n, len(stacks)]

        def gradient(*dy):
            dy, daux = dy[:n], dy[n:]

            def iterate(i, *state):
                t = self.schedule.iterations - 1 - i
                dx, dinputs, dstacks, dshared = divide(state, counts)
                gives = self._scalar(self.schedule.gives_output, t)
                lasts = [self._read_microbatch(d, t, stage=-1) for d in dy]
                dx = [
                    self.stages.shift_back(
                        tensor,
                        tf.where(gives, last, tf.zeros_like(last)),
                        self._scalar(self.schedule.comes_round, t),
                        circular=self.circular,
                    )
                    for tensor, last in zip(dx, lasts, strict=True)
                ]
                constants = self._constants(t, shared)

                def layer(i, *state):
                    j = self.in_a_row - 1 - i
                    dx, dstacks, dshared = divide(state, counts[1:])
                    before = [read(s, t * self.in_a_row + j, dim=0) for s in kept]
                    arguments = self._arguments(t, j, before[:n], stacks, constants)
                    slot = self._slot(t, j)
                    dout = self._in_valid(t, [self.stages.read(d, slot) for d in daux])
                    grads = self.stages.run(
                        self.split.backward, [*arguments, *before[n:], *dx, *dout]
                    )
                    dx, dweights, more = divide(grads, self.body.counts[:2])
                    dweights = self._weight_gradients(t, dweights)
                    slots = [
                        self._scalar(rounds, t) * self.in_a_row + j
                        for rounds in self.schedule.rounds
                    ]
                    dstacks = [
                        self.stages.add_among(stack, value, slot, slots)
                        for stack, value in zip(dstacks, dweights, strict=True)
                    ]
                    dshared = self._add(dshared, more, self._microbatch(t))
                    return [i + 1, *self._annotated(dx), *dstacks, *dshared]

                state = self._layers(layer, [*dx, *dstacks, *dshared])
                dx, dstacks, dshared = divide(state, counts[1:])
                dinputs = self._write_microbatch(dinputs, dx, t, stage=0)
                return [i + 1, *dx, *dinputs, *dstacks, *dshared]

            zeros = [tf.zeros([self.stages.count, *t.shape[1:]], t.dtype) for t in dy]
            final = self._iterations(
                iterate,
                [
                    *self._annotated(zeros),
                    *self._buffers(inputs),
                    *self._zero_stacks(),
                    *self._zero_shared(shared),
                ],
            )
            _, dinputs, dstacks, dshared = divide(final, counts)
            last = self.pipeline.num_microbatches
            return [
                *(d[0, :last] for d in dinputs),
                *self._reduced(dstacks),
                *(tf.reduce_sum(d, axis=0) for d in dshared),
            ]

        return outputs, gradient

    def _add(self, stacks, values, slot) -> list[tf.Tensor]:
        pairs = zip(stacks, values, strict=True)
        return [self.stages.add(stack, value, slot) for stack, value in pairs]

    def _iterations(self, body, state: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        count = self.schedule.iterations
        start = [tf.constant(0), *state]
        return list(tf.while_loop(lambda t, *_: t < count, body, start)[1:])

    def _layers(self, body, state: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """`state` after the K layers that a stage has in a row."""
        start = [tf.constant(0), *state]
        if self.in_a_row == 1:
            return list(body(*start)[1:])
        return list(tf.while_loop(lambda j, *_: j < self.in_a_row, body, start)[1:])

    def _read_microbatch(self, table, t, *, stage: int) -> tf.Tensor:
        """The stage's entry of [microbatches, ...]; any entry in a bubble."""
        last = self.pipeline.num_microbatches - 1
        numbers = np.minimum(self.schedule.microbatch[:, stage], last)
        return read(table, self._scalar(numbers, t), dim=0)

    def _write_microbatch(self, buffers, x, t, *, stage: int) -> list[tf.Tensor]:
        """`x` [L, ...] written at the microbatch of `stage`, whose entry will be read.

        Entries of another stage's microbatch, or of a bubble, are overwritten later.
        """
        numbers = np.minimum(
            self.schedule.microbatch[:, stage], self.schedule.slots - 1
        )
        at = self._scalar(numbers, t)
        return [
            write(b, tensor, at, dim=1) for b, tensor in zip(buffers, x, strict=True)
        ]

    def _annotated(self, x: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Stacked `x` annotated as the body annotates its output."""
        outputs = self.body.outputs
        return [self.stages.annotate(*pair) for pair in zip(x, outputs, strict=True)]

    def _buffers(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Buffers for x [..., U, ...] of each stage and microbatch."""
        lead = [self.stages.count, self.schedule.slots]
        zeros = [tf.zeros([*lead, *x.shape[1:]], x.dtype) for x in inputs]
        return self._annotated(zeros)

    def _aux_stacks(self) -> list[tf.Tensor]:
        lead = [self.stages.count, self.pipeline.layers_of_stage]
        zeros = [tf.zeros([*lead, *spec.shape], spec.dtype) for spec in self.body.aux]
        return [self.stages.annotate(zero) for zero in zeros]

    def _stores(self) -> list[tf.Tensor]:
        lead = [self.schedule.iterations * self.in_a_row, self.stages.count]
        return [
            self.stages.annotate(
                tf.zeros([*lead, *saved.spec.shape], saved.spec.dtype), saved, before=1
            )
            for saved in self.body.kept
        ]

    def _zero_stacks(self) -> list[tf.Tensor]:
        specs = self.weights.leaves()
        return [
            annotate(tf.zeros(spec.shape, spec.dtype), sharding)
            for spec, sharding in zip(specs, self.shardings, strict=True)
        ]

    def _zero_shared(self, shared: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Zero gradients of tensors that all layers share: a sum for each stage."""
        lead = [self.stages.count]
        zeros = [tf.zeros([*lead, *t.shape], t.dtype) for t in shared]
        return [self.stages.annotate(zero) for zero in zeros]
