"""Decoding through stages: weights and caches stay where they are, tokens travel.

Dims: L stages, Q layers of a stage, K of them in a row, G groups of rows, U rows of a
group, E entries of a stage's cache; S tokens, M model.

The rows of a batch go through the stages in groups, as microbatches do in training.
A stage's cache has an entry for each group and round, in the order in which the stage
comes to them, turned by the stage's number: so in iteration t all stages read and
write entry t % E.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright.framework.modeling.layer import Context, annotate_weights
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.annotations import annotate
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.sharding.sharding import Sharding
from meshwright.layers.stacks.pipelines.pipeline_loop import (
    PipelineLoop,
    by_stage_and_layer,
)
from meshwright.layers.stacks.pipelines.pipeline_schedule import PipelineSchedule
from meshwright.layers.stacks.pipelines.stages import StageMode
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.stacks.stacked_body import divide

ROWS_DIM = 3
"""The dim of a group's rows in caches, after L, K and E."""


class PipelineDecoding(PipelineLoop):
    """Caches and steps of a `Pipeline` on a mesh that splits its stages.

    Args:
      stack: the pipeline's layers.
      schedule: its microbatches are the groups, L or fewer.
      ctx: the pipeline's context.
      stage_mode: how a layer becomes all stages' layers.
    """

    def __init__(
        self,
        stack: Repeat,
        schedule: PipelineSchedule,
        ctx: Context,
        *,
        stage_mode: StageMode,
    ):
        super().__init__(schedule, ctx, count=stack.count, stage_mode=stage_mode)
        self.body = stack.body
        self.groups = schedule.num_microbatches
        self.entries = schedule.slots * schedule.num_repeats

    def init_cache(self, rows: int, length: int) -> NestedMap:
        """The body's cache by stage, layer and entry, [L, K, E, U, ...]."""
        ctx = self._body_ctx([])
        cache = self.body.init_cache(ctx, rows // self.groups, length)
        lead = [self.stages.count, self.in_a_row, self.entries]
        return cache.map(
            # Not new zeros: these have the body's annotations.
            lambda t: self.stages.annotate(
                tf.broadcast_to(t[(None,) * ROWS_DIM], [*lead, *t.shape])
            )
        )

    def encode_memory(self, theta: NestedMap, memory: tf.Tensor) -> NestedMap:
        """The body's caches of a memory [B, ...], by stage, layer and entry."""
        table = self._grouped("memory", memory)
        groups, rounds = (
            by_entry(self.schedule, numbers)
            for numbers in (self.schedule.microbatch, self.schedule.repeat)
        )
        groups = np.minimum(groups, self.groups - 1)
        specs = self._specs(theta)
        shardings = self._stacked_shardings(specs)
        parts = {}

        def of_stage(*flat):
            weights, (memory,) = divide(flat, [len(specs.leaves())])
            ctx = self._body_ctx([])
            cache = self.body.encode_memory(
                ctx, annotate_weights(ctx.plan, specs, specs.pack(weights)), memory
            )
            parts["cache"] = cache
            return cache.leaves()

        def caches(i, j):
            slot = j
            if self.circular:
                slot += self.stages.entry(rounds, i) * self.in_a_row
            pairs = zip(theta.leaves(), shardings, strict=True)
            weights = [self.stages.read(stack, slot, like) for stack, like in pairs]
            memory = self.stages.pick(table, self.stages.entry(groups, i))
            return self.stages.run(of_stage, [*weights, memory])

        def body(n, *stacks):
            i, j = n // self.in_a_row, n % self.in_a_row
            pairs = zip(stacks, caches(i, j), strict=True)
            return [n + 1, *(self._write(stack, value, j, i) for stack, value in pairs)]

        specs_of_caches = tf.function(
            lambda: caches(tf.constant(0), tf.constant(0)), autograph=False
        ).get_concrete_function()
        lead = [self.stages.count, self.in_a_row, self.entries]
        zeros = [
            self.stages.annotate(tf.zeros([*lead, *spec.shape[1:]], spec.dtype))
            for spec in specs_of_caches.structured_outputs
        ]
        count = self.entries * self.in_a_row
        start = [tf.constant(0), *zeros]
        stacks = tf.while_loop(lambda n, *_: n < count, body, start)[1:]
        return parts["cache"].pack(stacks)

    def step(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        cache: NestedMap,
        position: int | tf.Tensor,
        memory: NestedMap | None,
        inputs: Mapping[str, tf.Tensor | None],
    ) -> tuple[tf.Tensor, NestedMap]:
        """See `Pipeline.step`."""
        given = {name: value for name, value in inputs.items() if value is not None}
        absent = {name: None for name, value in inputs.items() if value is None}
        tables = [self._grouped(*item) for item in given.items()]
        x = self._grouped("x", self.ctx.cast(x))
        memories = [] if memory is None else memory.leaves()
        specs = self._specs(theta)
        shardings = self._stacked_shardings(specs)
        of_stage = self._step_of_stage(specs, cache, memory, list(given), absent)

        def iterate(t, *state):
            x_now, outs, caches = divide(state, [1, 1])
            x_now = self.shifted(t, x_now, [x])
            rows = [self.stages.pick(each, self.microbatch(t)) for each in tables]
            entry = t % self.entries

            def layer(j, x, *caches):
                before = [self._read(stack, j, entry) for stack in caches]
                arguments = [
                    x,
                    *self.layer_weights(theta.leaves(), shardings, t, j),
                    *before,
                    *(self._read(stack, j, entry) for stack in memories),
                    *rows,
                    *self.keys(t, j),
                ]
                common = [tf.convert_to_tensor(position)]
                y, *after = self.stages.run(of_stage, arguments, common)
                (y,) = self.of_layers(t, j, [y], [x])
                after = self.in_valid(t, after, before)
                pairs = zip(caches, after, strict=True)
                caches = [self._write(*pair, j, entry) for pair in pairs]
                return [j + 1, self._split(y, 1), *caches]

            y, *caches = self.layers(layer, [*x_now, *caches])
            outs = self.write_microbatch(outs, [y], t, stage=-1)
            return [t + 1, y, *outs, *caches]

        (outs,) = self.buffers([x])
        start = [self._split(t, 1) for t in self.start([x])]
        state = [*start, self._split(outs, 2), *cache.leaves()]
        _, outs, *caches = self.iterations(iterate, state)
        return self._joined(outs[-1, : self.groups]), cache.pack(caches)

    def _step_of_stage(self, specs, cache, memory, given, absent):
        """A layer's step: (*[x, *weights, *cache, *memory, *rows, key], position).

        It returns [x, *cache]. Only the structures of `cache` and `memory` matter;
        `given` are the names of what comes by rows.
        """
        counts = [1, len(specs.leaves()), len(cache.leaves())]
        counts += [len(memory.leaves()) if memory else 0, len(given)]

        def of_stage(*flat):
            *flat, position = flat
            (x,), weights, before, memories, rows, keys = divide(flat, counts)
            ctx = self._body_ctx(keys)
            y, after = self.body.step(
                ctx,
                annotate_weights(ctx.plan, specs, specs.pack(weights)),
                x,
                cache.pack(before),
                position,
                memory=memory and memory.pack(memories),
                **dict(zip(given, rows, strict=True)),
                **absent,
            )
            return [y, *after.leaves()]

        return of_stage

    def _body_ctx(self, keys) -> Context:
        key = keys[0] if keys else None
        return dataclasses.replace(self.ctx, plan=self.plan, key=key)

    def _specs(self, theta: NestedMap) -> NestedMap:
        """Of a layer's weights, which may come as matrices."""
        plan = self.ctx.plan
        return self.body.weights().map(lambda spec, w: spec.like(w, plan), theta)

    def _stacked_shardings(self, specs: NestedMap) -> list[Sharding]:
        sizes = (self.stages.count, self.layers_of_stage)
        return self.shardings(specs.map(lambda spec: by_stage_and_layer(spec, *sizes)))

    def _grouped(self, name: str, tensor: tf.Tensor) -> tf.Tensor:
        """[B, ...] as [G, U, ...]; one row for all is every group's."""
        tensor = tf.convert_to_tensor(tensor)
        rows, *rest = tensor.shape
        if rows == 1:
            return tf.broadcast_to(tensor[None], [self.groups, 1, *rest])
        if rows % self.groups:
            raise ValueError(
                f"layer {self.ctx.path!r}: the rows of {name!r} of shape "
                f"{tensor.shape} do not divide into the cache's {self.groups} groups: "
                "give it the rows that `init_cache` got, or a multiple"
            )
        shape = [self.groups, rows // self.groups, *rest]
        return self._split(tf.reshape(tensor, shape), 0)

    def _joined(self, tensor: tf.Tensor) -> tf.Tensor:
        """[G, U, ...] as [B, ...], split as the pipeline's outside has it."""
        _, _, *rest = tensor.shape
        return self._annotated(tf.reshape(tensor, [-1, *rest]), self.ctx.plan, [])

    def _split(self, tensor: tf.Tensor, before: int) -> tf.Tensor:
        """[G, U, ...], or with a dim `before` that, split by stage and by rows."""
        lead = [self.stages.axes, *[()] * (before - 1)] if before else [()]
        return self._annotated(tensor, self.plan, lead)

    def _annotated(self, tensor, plan: ShardingPlan, lead) -> tf.Tensor:
        (rows,) = plan.activation_sharding(["batch"], self.ctx.path).dims
        rest = range(len(lead) + 1, tensor.shape.rank)
        sharding = Sharding(plan.mesh, (*lead, rows, *[()] * len(rest)))
        return annotate(tensor, sharding.opened(rest))

    def _read(self, stack: tf.Tensor, j: tf.Tensor, entry: tf.Tensor) -> tf.Tensor:
        """[L, U, ...] of [L, K, E, U, ...]."""
        stages, _, _, *rest = stack.shape
        piece = xla.dynamic_slice(stack, _at(stack, j, entry), [stages, 1, 1, *rest])
        return self.stages.annotate(tf.reshape(piece, [stages, *rest]))

    def _write(self, stack, value, j, entry) -> tf.Tensor:
        value = value[:, None, None]
        stack = xla.dynamic_update_slice(stack, value, _at(stack, j, entry))
        return self.stages.annotate(stack)


def by_entry(schedule: PipelineSchedule, table: np.ndarray) -> np.ndarray:
    """A table [iterations, L] of a schedule, by entry of caches: [E, L]."""
    stage = np.arange(schedule.num_stages)
    count = schedule.slots * schedule.num_repeats
    since_start = (np.arange(count)[:, None] - stage) % count
    return table[since_start + stage, stage]


def _at(stack: tf.Tensor, j: tf.Tensor, entry: tf.Tensor) -> tf.Tensor:
    return tf.stack([0, j, entry, *[0] * (stack.shape.rank - ROWS_DIM)])
