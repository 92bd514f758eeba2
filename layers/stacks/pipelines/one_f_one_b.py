"""A pipeline that trains with 1F1B's memory: `PipelineOrder.ONE_F_ONE_B`.

Dims: L stages, Q layers of a stage, U rows of a microbatch, S sequence; R rounds.

Devices run in step, so an iteration has a forward and a backward pass of each stage, of
different microbatches, and three loops let no device wait for longer than in GPipe:

  forward   LR - 1 iterations, until the first microbatch leaves the last stage
  both      a forward pass; the loss of what the last stage gives, and its gradient; a
            backward pass, which starts from this gradient in the last stage
  backward  LR - 1 iterations

The gradients are complete when the loss is: the gradient function only multiplies them
by the gradient of the loss.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.annotations import annotate
from meshwright.framework.sharding.plan import as_axes
from meshwright.framework.sharding.sharding import Sharding
from meshwright.layers.basic.linear import BSM
from meshwright.layers.stacks.loss_by_parts import read_unreduced
from meshwright.layers.stacks.pipelines.pipeline_run import PipelineRun
from meshwright.layers.stacks.pipelines.stage_stores import ReusedStores
from meshwright.layers.stacks.stacked_body import divide


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossHead:
    """What follows a pipeline in training, up to the loss, microbatch by microbatch.

    Args:
      ctx: the context of its layers. They get it without a key: their random numbers
        would not be those of the whole batch.
      fn: (ctx, theta, x [U, ...], rows [U, ...]) -> (loss, sums): a float32 scalar, and
        a mapping of such. Each is added up over the microbatches.
      theta: the weights that it reads; none is a running statistic.
      specs: their specs.
      rows: nested map of tensors [B, ...], not differentiated.
      sums: the names of the sums.
      aux_loss: nest of the layers' side results -> what is added to the loss; linear.
    """

    ctx: Context
    fn: Callable[..., tuple[tf.Tensor, Mapping[str, tf.Tensor]]]
    theta: NestedMap
    specs: NestedMap
    rows: NestedMap
    sums: Sequence[str] = ()
    aux_loss: Callable[[Any], tf.Tensor] | None = None

    def __post_init__(self):
        for path, spec in self.specs.items_by_path():
            if spec.is_statistic:
                raise ValueError(
                    f"layer {self.ctx.path!r}: {path} is a running statistic of what "
                    "follows a pipeline, which PipelineOrder.ONE_F_ONE_B computes for "
                    "each microbatch by itself: set Pipeline.order = "
                    "%PipelineOrder.FORWARD_FIRST"
                )


class OneFOneBRun(PipelineRun):
    """One call of `Pipeline.loss`; `head` and all arguments of a `PipelineRun`.

    `flat` is [*x, *weights, *shared, *the head's weights]. The results are [loss,
    *sums, *aux, by stage and layer], of which the loss alone is differentiated.
    """

    def __init__(self, *args, head: LossHead, aux_loss, **kwargs):
        super().__init__(*args, **kwargs)
        self._check_even()
        self.head, self.aux_loss = head, aux_loss
        ctx = self._head_context()
        batch, stream, _ = ctx.plan.activation_sharding(BSM, ctx.path).dims
        self.head_ctx, self.head_theta = read_unreduced(
            ctx, head.theta, head.specs, [*batch, *stream]
        )
        self.rows = self.microbatches.divide(head.rows.leaves())
        self.reused = ReusedStores(
            stages=self.stages, schedule=self.schedule, in_a_row=self.in_a_row
        )
        # The same, but for the tables of backward passes.
        self.back = copy.copy(self)
        self.back.schedule = self.schedule.backward

    def _check_even(self) -> None:
        if self.microbatches.missing:
            raise ValueError(
                f"layer {self.ctx.path!r}: a batch of {self.microbatches.batch} does "
                f"not divide into {self.microbatches.count} microbatches, which "
                "PipelineOrder.ONE_F_ONE_B needs: change the global batch or "
                "Pipeline.num_microbatches, or set Pipeline.order = "
                "%PipelineOrder.FORWARD_FIRST"
            )

    def _head_context(self) -> Context:
        """The head's context for a microbatch; each device computes a part of the loss.

        The axes of the stages split sequences there, if they can.
        """
        plan, axes = self.head.ctx.plan, self.stages.axes
        (batch,) = self.plan.activation_sharding(["batch"], self.ctx.path).dims
        splits = {**plan.activations, "batch": batch}
        taken = {axis for split in splits.values() for axis in as_axes(split)}
        shape = tf.nest.flatten(self.body.x)[0].shape
        if shape.rank > 2 and not taken & {*axes}:
            for name in ("sequence", *({"stream"} & splits.keys())):
                split = (*as_axes(splits.get(name)), *axes)
                if shape[1] % plan.mesh.axes_size(split) == 0:
                    splits[name] = split
        plan = dataclasses.replace(plan, activations=splits)
        return dataclasses.replace(self.head.ctx, plan=plan, key=None)

    def with_gradient(self, *flat: tf.Tensor):
        """The results, and their gradient function."""
        totals, aux, gradients = self._loops(*divide(flat, self.body.counts[:3]))
        dinputs, dstacks, dshared, dleaves = gradients
        loss, *sums = totals

        def gradient(dloss, *_):
            def scaled(values):
                return [value * tf.cast(dloss, value.dtype) for value in values]

            specs = self.body.specs.leaves()
            dweights = [  # Those of statistics are values.
                value if spec.is_statistic else scaled([value])[0]
                for value, spec in zip(self._reduced(dstacks), specs, strict=True)
            ]
            return [*scaled(dinputs), *dweights, *scaled(dshared), *scaled(dleaves)]

        return [loss + self.aux_loss(aux), *sums, *aux], gradient

    def _loops(self, inputs, stacks, shared, leaves):
        """[loss, *sums], aux, and gradients of inputs, weights, shared and leaves."""
        first, end = self.schedule.backward_start, self.schedule.iterations
        daux = self._aux_gradients()
        forward = functools.partial(self._forward, inputs, stacks, shared)
        backward = functools.partial(self._backward, stacks, shared, daux)

        def both(t, state):
            ahead, head, behind = state
            ahead = forward(t, ahead)
            x, _, kept = ahead
            dlast, head = self._loss(leaves, t, x, head)
            return [ahead, head, backward(kept, t, dlast, behind)]

        start = self._annotated(self.start(inputs))
        ahead = [start, self._aux_stacks(), self.reused.zeros(self.body.kept)]
        totals = [tf.zeros([]) for _ in ("loss", *self.head.sums)]
        behind = [
            self._annotated([tf.zeros_like(x) for x in start]),
            self._annotated(self.buffers(inputs)),
            self._zero_stacks(deferred=False),
            self._zero_shared(shared),
        ]
        head = [totals, [tf.zeros_like(leaf) for leaf in leaves]]
        ahead = _loop(0, first, forward, ahead)
        ahead, head, behind = _loop(first, end, both, [ahead, head, behind])
        _, aux, kept = ahead
        none = [tf.zeros_like(x[0]) for x in inputs]
        last = functools.partial(backward, kept, dlast=none)
        behind = _loop(end, end + first, lambda t, s: last(t, behind=s), behind)
        _, dinputs, dstacks, dshared = behind
        totals, dleaves = head
        return (
            totals,
            aux,
            (
                [d[0, : self.schedule.num_microbatches] for d in dinputs],
                dstacks,
                [tf.reduce_sum(d, axis=0) for d in dshared],
                dleaves,
            ),
        )

    def _forward(self, inputs, stacks, shared, t, state):
        """[x, aux, kept] after the forward passes of iteration `t`."""
        x, aux, kept = state
        x = self.shifted(t, x, inputs)
        return self.forward_layers(t, x, aux, kept, stacks, shared, stores=self.reused)

    def _loss(self, leaves, t, x, head):
        """The gradient of what the last stage gives, and the head's state after.

        Args:
          leaves: the head's weights.
          t: the iteration.
          x: the stages' outputs.
          head: [totals, gradients of leaves].
        """

        def computed():
            last = [self._of_tokens(self.stages.last(each)) for each in x]
            totals, dleaves = head
            new, dlast, more = self._of_head(leaves, t, last)
            return [dlast, [_sums(totals, new), _sums(dleaves, more)]]

        if not self.circular:
            return computed()
        gives = self.scalar(self.schedule.gives_output, t)
        none = [tf.zeros_like(each[0]) for each in x]
        return tf.cond(gives, computed, lambda: [none, head])

    def _of_tokens(self, x: tf.Tensor) -> tf.Tensor:
        """`x` [U, S, ...], or [U, ...] of rank 2, split as the head's context says."""
        plan, rank = self.head_ctx.plan, x.shape.rank
        tokens = plan.activation_sharding(BSM[: min(rank - 1, 2)]).dims
        rest = range(len(tokens), rank)
        sharding = Sharding(plan.mesh, tokens + ((),) * len(rest))
        return annotate(x, sharding.opened(rest))

    def _of_head(self, leaves, t, x):
        """[loss, *sums], and the loss's gradients by x and by the head's weights."""
        head, n = self.head, len(x)
        rows = [self.read_microbatch(row, t, stage=-1) for row in self.rows]
        with tf.GradientTape() as tape:
            inputs = [*x, *leaves]
            tape.watch(inputs)
            loss, sums = head.fn(
                self.head_ctx,
                self.head_theta.pack(inputs[n:]),
                tf.nest.pack_sequence_as(self.body.x, inputs[:n]),
                head.rows.pack(rows),
            )
        made = tape.gradient(loss, inputs, unconnected_gradients="zero")
        dx = [y.annotate(d) for d, y in zip(made[:n], self.body.outputs, strict=True)]
        return [loss, *(sums[name] for name in head.sums)], dx, made[n:]

    def _backward(self, stacks, shared, daux, kept, t, dlast, behind):
        """`behind` after the backward passes of iteration `t`.

        Args:
          stacks: the layers' weights.
          shared: the shared tensors.
          daux: the gradients of side results.
          kept: what the forward passes keep.
          t: the iteration.
          dlast: the gradient of what the last stage gave in its forward pass.
          behind: [dx, gradients of inputs, of weights, of shared tensors].
        """
        back, t = self.back, t - self.schedule.backward_start
        dx, dinputs, dstacks, dshared = behind
        is_inside = ~self.scalar(back.schedule.gives_output, t)
        dx = [
            self.stages.shift_back(d, last, is_inside, circular=self.circular)
            for d, last in zip(dx, dlast, strict=True)
        ]
        read = functools.partial(self.reused.read, kept, self.body.kept, t)
        dx, dstacks, dshared, _ = back.backward_layers(
            t, dx, [dstacks, dshared, []], stacks, shared, daux, read=read, masks=True
        )
        dinputs = back.write_microbatch(dinputs, dx, t, stage=0)
        return [dx, dinputs, dstacks, dshared]

    def _aux_gradients(self) -> list[tf.Tensor]:
        zeros = self._aux_stacks()
        with tf.GradientTape() as tape:
            tape.watch(zeros)
            loss = self.aux_loss(zeros)
        return tape.gradient(loss, zeros, unconnected_gradients="zero")


def _loop(first: int, end: int, body, state):
    """The nest `state` after (t, state) -> state of iterations `first` to `end`."""
    if first == end:
        return state
    # It counts from 0, as all loops whose iterations are read from compiled programs.
    step = lambda i, state: [i + 1, body(first + i, state)]  # noqa: E731
    start = [tf.constant(0), state]
    return tf.while_loop(lambda i, _: i < end - first, step, start)[1]


def _sums(totals: Sequence[tf.Tensor], more: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [total + value for total, value in zip(totals, more, strict=True)]
