"""One call of a pipeline: its loops, forward and backward (GSPMD 3.3)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from meshwright.framework.modeling.layer import STAGE_DIM, Context, WeightSpec
from meshwright.framework.modeling.recompute import Saved
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.annotations import OnConflict, annotate
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.types import reshard_to
from meshwright.framework.sharding.vectorize import vectorize
from meshwright.layers.basic.entries import write
from meshwright.layers.stacks.pipelines.microbatches import Microbatches
from meshwright.layers.stacks.pipelines.pipeline_loop import (
    PipelineLoop,
    by_stage_and_layer,
)
from meshwright.layers.stacks.pipelines.pipeline_schedule import PipelineSchedule
from meshwright.layers.stacks.pipelines.stage_stores import StageStores
from meshwright.layers.stacks.pipelines.stages import StageMode
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.stacks.stacked_body import (
    Constants,
    StackedBody,
    divide,
    specs_of,
)


class PipelineRun(PipelineLoop):
    """One call of a `Pipeline`; the arguments are its fields, and those of its `fprop`.

    `flat` is always [*x, *weights, *shared], x and shared by microbatch. The results
    are [*x, by microbatch, *aux, by stage and layer].
    """

    def __init__(
        self,
        stack: Repeat,
        schedule: PipelineSchedule,
        ctx: Context,
        x: Any,
        constants: Any,
        theta: Any,
        *,
        stage_mode: StageMode,
        deferred: Sequence[str],
    ):
        super().__init__(schedule, ctx, count=stack.count, stage_mode=stage_mode)
        self.microbatches = Microbatches(
            plan=self.plan,
            batch=tf.nest.flatten(x)[0].shape[0],
            count=schedule.num_microbatches,
            path=ctx.path,
        )
        constants = Constants(constants)
        self.shared = self.microbatches.divide(constants.shared)
        self.fixed = self.microbatches.divide(constants.fixed)
        rows = functools.partial(tf.nest.map_structure, self.microbatches.spec)
        self.body = StackedBody(
            stack.body,
            dataclasses.replace(ctx, plan=self.plan),
            rows(specs_of(x)),
            shared=rows(specs_of(constants.shared)),
            fixed=rows(specs_of(constants.fixed)),
            constants=constants,
            recompute=stack.recompute,
            saved_names=stack.saved_names,
            stacks=theta,
            # As of all stages they can be unreduced, which no vectorized op can be. A
            # manual region has its own.
            annotates_gradients=stage_mode is StageMode.MANUAL,
            deferred=deferred,
        )
        self._check_rows()
        self.split = self.body.split
        self.deferred = self.split.deferred
        self.is_deferred = (
            [False] * self.body.counts[1]
            if self.deferred is None
            else list(self.deferred.weights)
        )
        self.stores = StageStores(
            stages=self.stages,
            schedule=schedule,
            in_a_row=self.in_a_row,
            by_layer=self.deferred is not None,
        )
        self.weights = self.body.specs.map(
            lambda spec: by_stage_and_layer(
                spec, schedule.num_stages, self.layers_of_stage
            )
        )
        self.weight_shardings = self.shardings(self.weights)
        tokens = self.plan.activation_sharding(["batch", "stream"], ctx.path).dims
        self.token_axes = [axis for axes in tokens for axis in axes]

    def _check_rows(self) -> None:
        """Raises ValueError: there are rows of nothing, which results would have."""
        of_rows = [f"aux.{path}" for path in self.body.aux_paths]
        of_rows += [p for p, s in self.body.specs.items_by_path() if s.is_statistic]
        if self.microbatches.missing and of_rows:
            raise ValueError(
                f"layer {self.ctx.path!r}: a batch of {self.microbatches.batch} does "
                f"not divide into {self.microbatches.count} microbatches, and layers "
                f"compute {', '.join(of_rows)} of all rows of a microbatch: change the "
                "global batch or Pipeline.num_microbatches"
            )

    def averaged(self, aux: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Side results, sums over microbatches; means of losses and statistics."""
        count = self.schedule.num_microbatches
        return [
            total / count if _is_mean(path) else total
            for path, total in zip(self.body.aux_paths, aux, strict=True)
        ]

    def kept_for_backward(self) -> list[Saved]:
        """The tensors that the stages keep for the backward pass."""
        if self.deferred is None:
            return self.body.read
        factors = {*self.deferred.factors}
        return [
            saved
            for number, saved in enumerate([*self.body.kept, *self.deferred.made])
            if number in factors or self.split.reads[number]
        ]

    def _arguments(self, t, j, x, stacks, constants) -> list[tf.Tensor]:
        weights = self.layer_weights(stacks, self.weight_shardings, t, j)
        return [*x, *weights, *constants, *self.keys(t, j)]

    def _constants(self, t, shared) -> list[tf.Tensor]:
        """The constants of each stage's microbatch."""
        microbatch = self.microbatch(t)
        return [self.stages.pick(c, microbatch) for c in (*shared, *self.fixed)]

    def _weights(
        self, specs: NestedMap, *, deferred: bool
    ) -> list[tuple[str, WeightSpec]]:
        """Paths and specs of weights whose gradients are deferred, or are not."""
        pairs = zip(specs.items_by_path(), self.is_deferred, strict=True)
        return [item for item, is_deferred in pairs if is_deferred == deferred]

    def _unreduced_gradients(
        self, gradients: Sequence[tf.Tensor], *, deferred: bool
    ) -> list[tf.Tensor]:
        """Gradients [L, ...], unreduced along the axes that split tokens.

        Those of statistics are values: of them none is.
        """
        weights = self._weights(self.body.specs, deferred=deferred)
        annotated = []
        for (path, spec), value in zip(weights, gradients, strict=True):
            spec = spec.stacked(self.stages.count, STAGE_DIM)
            sharding = self._unreduced(spec, path, self.token_axes)
            annotated.append(annotate(value, sharding, on_conflict=OnConflict.REDUCE))
        return annotated

    def _unreduced(self, spec, path: str, axes: Sequence[str]) -> Sharding:
        """The sharding of a weight's gradient, unreduced along `axes` where it can be.

        None of a statistic is.
        """
        plan = dataclasses.replace(self.ctx.plan, unreduced_gradient_axes=tuple(axes))
        sharding = plan.read_sharding(spec.dims, path).dual().without_trivial_types()
        return sharding.untyped() if spec.is_statistic else sharding

    def _reduced(self, dstacks: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gradients of weights, unreduced only as those of the plan's weights are."""
        axes = self.ctx.plan.unreduced_gradient_axes
        reduced = []
        for (path, spec), stack in zip(
            self.weights.items_by_path(), dstacks, strict=True
        ):
            before = self._unreduced(spec, path, self.token_axes)
            after = self._unreduced(spec, path, axes)
            reduced.append(stack if before == after else reshard_to(stack, after))
        return reduced

    # The loops.

    def forward(self, flat: Sequence[tf.Tensor], *, keep: bool):
        """The results, and what the layers got and saved in every iteration."""
        inputs, stacks, shared = divide(flat, self.body.counts[:2])
        counts = [len(inputs), len(inputs), len(self.body.aux)]
        stores = self.stores if keep else None

        def iterate(t, *state):
            x, outs, aux, kept = divide(state, counts)
            x = self.shifted(t, x, inputs)
            x, aux, kept = self.forward_layers(
                t, x, aux, kept, stacks, shared, stores=stores
            )
            outs = self.write_microbatch(outs, x, t, stage=-1)
            return [t + 1, *x, *outs, *aux, *kept]

        final = self.iterations(
            iterate,
            [
                *self._annotated(self.start(inputs)),
                *self._annotated(self.buffers(inputs)),
                *self._aux_stacks(),
                *(self.stores.zeros(self.body.kept) if keep else ()),
            ],
        )
        _, outs, aux, kept = divide(final, counts)
        last = self.schedule.num_microbatches
        return [*(out[-1, :last] for out in outs), *aux], kept

    def forward_layers(self, t, x, aux, kept, stacks, shared, *, stores):
        """x, aux and kept tensors after the layers of iteration `t`.

        What they get and save is written to `stores`, if not None.
        """
        constants = self._constants(t, shared)
        counts = [len(x), len(aux)]

        def layer(j, *state):
            x, aux, kept = divide(state, counts)
            arguments = self._arguments(t, j, x, stacks, constants)
            y = self.stages.run(self.split.forward, arguments)
            y, new_aux, saved = self.body.divide_results(y)
            y = self.of_layers(t, j, y, x)
            new_aux = self.of_layers(t, j, self.in_valid(t, new_aux))
            aux = self._add(aux, new_aux, self.slot(t, j))
            if stores is not None:
                kept = stores.write(kept, [*x, *saved], self.body.kept, t, j)
            return [j + 1, *self._annotated(y), *aux, *kept]

        return divide(self.layers(layer, [*x, *aux, *kept]), counts)

    def with_gradient(self, *flat: tf.Tensor):
        """The results, and their gradient function."""
        outputs, kept = self.forward(flat, keep=True)
        n = len(self.body.outputs)

        def gradient(*dy):
            dx, dstacks, dshared, made = self._backward(flat, kept, dy[:n], dy[n:])
            if self.deferred is not None:
                later = iter(self._deferred_gradients([*kept, *made]))
                now = iter(dstacks)
                dstacks = [next(later if is_ else now) for is_ in self.is_deferred]
            return [*dx, *self._reduced(dstacks), *dshared]

        return outputs, gradient

    def _backward(self, flat, kept, dy, daux):
        """The backward loop.

        Returns:
          Gradients of x, of weights but for deferred ones, and of shared tensors; and
          the stores of factors of deferred gradients that the loop makes.
        """
        inputs, stacks, shared = divide(flat, self.body.counts[:2])
        n, weights = len(inputs), self.is_deferred.count(False)
        counts = [n, n, weights, len(shared)]
        new = () if self.deferred is None else self.deferred.made

        def iterate(i, *state):
            t = self.schedule.iterations - 1 - i
            dx, dinputs, *sums = divide(state, counts)
            dx = self._shift_back(t, dx, dy)
            read = functools.partial(self.stores.read, kept, self.body.kept, t)
            dx, *sums = self.backward_layers(
                t, dx, sums, stacks, shared, daux, read=read, masks=self.stores.by_layer
            )
            dinputs = self.write_microbatch(dinputs, dx, t, stage=0)
            return [i + 1, *dx, *dinputs, *(each for some in sums for each in some)]

        zeros = [tf.zeros([self.stages.count, *t.shape[1:]], t.dtype) for t in dy]
        final = self.iterations(
            iterate,
            [
                *self._annotated(zeros),
                *self._annotated(self.buffers(inputs)),
                *self._zero_stacks(deferred=False),
                *self._zero_shared(shared),
                *self.stores.zeros(new),
            ],
        )
        _, dinputs, dstacks, dshared, made = divide(final, counts)
        last = self.schedule.num_microbatches
        return (
            [d[0, :last] for d in dinputs],
            dstacks,
            [tf.reduce_sum(d, axis=0) for d in dshared],
            made,
        )

    def backward_layers(self, t, dx, sums, stacks, shared, daux, *, read, masks):
        """Gradients after the layers of iteration `t`, last first.

        Args:
          t: the iteration.
          dx: the gradients of the stages' outputs.
          sums: gradients of weights but for deferred ones, gradients of shared tensors,
            and the stores of factors of deferred gradients; all are added to.
          stacks: the weights.
          shared: the shared tensors.
          daux: the gradients of side results [L, Q, ...].
          read: (j) -> what was kept of layer `j` in a row, in its forward pass.
          masks: whether gradients of bubbles are not zero by themselves: what bubbles
            read is of another layer and microbatch than their weights and masks, so
            that their gradients may be NaN.

        Returns:
          [dx, *sums].
        """
        n = len(dx)
        counts = [n, *map(len, sums[:2])]
        backward, new = self.split.backward, ()
        if self.deferred is not None:
            backward, new = self.deferred.backward, self.deferred.made
        constants = self._constants(t, shared)

        def layer(i, *state):
            j = self.in_a_row - 1 - i
            dx, dstacks, dshared, made = divide(state, counts)
            before = read(j)
            arguments = self._arguments(t, j, before[:n], stacks, constants)
            slot = self.slot(t, j)
            dout = self.in_valid(t, [self.stages.read(d, slot) for d in daux])
            grads = self.stages.run(backward, [*arguments, *before[n:], *dx, *dout])
            before, dx = dx, grads[:n]
            dx = self.of_layers(t, j, dx, before)
            dweights, more, factors = divide(grads[n:], counts[1:])
            more = self.of_layers(t, j, more)
            if masks:
                more = self.in_valid(t, more)
            dstacks = self._add_weights(t, j, dstacks, dweights, masks=masks)
            dshared = self._add(dshared, more, self.microbatch(t))
            made = self.stores.write(made, factors, new, t, j)
            return [i + 1, *self._annotated(dx), *dstacks, *dshared, *made]

        state = [*dx, *(each for some in sums for each in some)]
        return divide(self.layers(layer, state), counts)

    def _shift_back(self, t, dx, dy) -> list[tf.Tensor]:
        """Gradients of the stages' outputs, of those of their inputs later on."""
        gives = self.scalar(self.schedule.gives_output, t)
        comes_round = self.scalar(self.schedule.comes_round, t)
        shifted = []
        for tensor, outside in zip(dx, dy, strict=True):
            last = self.read_microbatch(outside, t, stage=-1)
            last = tf.where(gives, last, tf.zeros_like(last))
            shifted.append(
                self.stages.shift_back(
                    tensor, last, comes_round, circular=self.circular
                )
            )
        return shifted

    def _deferred_gradients(self, stores: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Products over all microbatches, for one layer of each stage after another."""
        stores = [stores[number] for number in self.deferred.factors]

        def of_stage(*factors):
            products = vectorize(self.deferred.multiply, factors)
            return self.deferred.finish(*(tf.reduce_sum(p, axis=0) for p in products))

        def layer(q, *dstacks):
            factors = [self.stores.microbatches(store, q) for store in stores]
            gradients = self._unreduced_gradients(
                self.stages.run(of_stage, factors), deferred=True
            )
            if not self.is_even:
                gradients = self.stages.where(self.stages.entry(real, q), gradients)
            pairs = zip(dstacks, gradients, strict=True)
            return [q + 1, *(write(stack, g, q, dim=1) for stack, g in pairs)]

        numbers = self.schedule.numbers(self.in_a_row)
        real = self.count > numbers.T
        start = [tf.constant(0), *self._zero_stacks(deferred=True)]
        count = self.layers_of_stage
        return list(tf.while_loop(lambda q, *_: q < count, layer, start)[1:])

    def _add_weights(self, t, j, dstacks, dweights, *, masks) -> list[tf.Tensor]:
        """Gradients of weights with those of a layer and iteration added."""
        dweights = [
            self.in_valid(t, [value / self.microbatches.count])[0]
            if spec.is_statistic
            else value
            for (_, spec), value in zip(
                self._weights(self.body.specs, deferred=False), dweights, strict=True
            )
        ]
        dweights = self._unreduced_gradients(dweights, deferred=False)
        dweights = self.of_layers(t, j, dweights)
        if masks:
            dweights = self.in_valid(t, dweights)
        slot = self.slot(t, j)
        slots = [
            self.scalar(rounds, t) * self.in_a_row + j
            for rounds in self.schedule.rounds
        ]
        added = []
        for (path, spec), stack, value in zip(
            self._weights(self.weights, deferred=False), dstacks, dweights, strict=True
        ):
            if self._unreduced(spec, path, self.token_axes).unreduced:
                added.append(self.stages.add_among(stack, value, slot, slots))
            else:
                sharding = spec.sharding(self.ctx.plan, path)
                added.append(self.stages.add(stack, value, slot, sharding))
        return added

    def _add(self, stacks, values, slot) -> list[tf.Tensor]:
        pairs = zip(stacks, values, strict=True)
        return [self.stages.add(stack, value, slot) for stack, value in pairs]

    def _annotated(self, x: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Stacked `x` annotated as the body annotates its output."""
        outputs = self.body.outputs
        return [self.stages.annotate(*pair) for pair in zip(x, outputs, strict=True)]

    def _aux_stacks(self) -> list[tf.Tensor]:
        lead = [self.stages.count, self.layers_of_stage]
        zeros = [tf.zeros([*lead, *spec.shape], spec.dtype) for spec in self.body.aux]
        return [self.stages.annotate(zero) for zero in zeros]

    def _zero_stacks(self, *, deferred: bool) -> list[tf.Tensor]:
        return [
            annotate(
                tf.zeros(spec.shape, spec.dtype), spec.sharding(self.ctx.plan, path)
            )
            for path, spec in self._weights(self.weights, deferred=deferred)
        ]

    def _zero_shared(self, shared: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Zero gradients of tensors that all layers share: a sum for each stage."""
        lead = [self.stages.count]
        zeros = [tf.zeros([*lead, *t.shape], t.dtype) for t in shared]
        return [self.stages.annotate(zero) for zero in zeros]


def is_statistic(path: str) -> bool:
    """Whether the side result of this dotted path is a running statistic."""
    return "statistics" in path.split(".")


def _is_mean(path: str) -> bool:
    return path.rsplit(".", 1)[-1] == "loss" or is_statistic(path)
