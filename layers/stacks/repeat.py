"""Equal layers in a row, as one loop over stacked weights.

Dims: L layers; everything else is the body's.

The loop lowers to two HLO loops, one forward and one backward, so the program's size
does not grow with depth (GSPMD 5.1 trains up to 256 layers this way):

  forward   for i in 0..L-1:  keep x[i];  x, saved[i] = layer(theta[i], x)
  backward  for i in L-1..0:  dx, dtheta[i] = gradient(theta[i], x[i], saved[i], dx)

The gradients of tensors that all layers share (the memory of cross-attention) are
summed over the layers in the backward loop.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import gin
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright.framework.modeling import random
from meshwright.framework.modeling.layer import Context, Layer, Mode, annotate_weights
from meshwright.framework.modeling.recompute import Recompute, Saved
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.annotations import annotate
from meshwright.layers.basic.entries import read, write
from meshwright.layers.stacks.stacked_body import (
    Constants,
    SavedForBackward,
    SavedStack,
    StackedBody,
    check_depth,
    check_saved_names,
    check_stacked,
    divide,
    specs_of,
)


@gin.constants_from_enum
class Unroll(enum.Enum):
    """Whether the stack is a loop in the program, or its layers one after another.

    Unrolled, an optimization barrier keeps XLA from merging recomputation with the
    first computation; XLA's CPU compiler drops the barrier and merges most of it.
    """

    LOOP = "loop"
    UNROLLED = "unrolled"


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeat(Layer):
    """`num_layers` layers like `body`, each with its own weights and random key.

    Args:
      body: the layer; its output has the structure, shapes and dtypes of its input, or
        is a nested map of such an `x` and of side results `aux`, such as losses.
      num_layers: the number of layers in all, a multiple of the body's `depth`; L is
        how often the body is run.
      recompute: what the backward pass computes again.
      saved_names: for `Recompute.ALL_BUT_NAMED`, the intermediates to save.
      unroll: loop, or layers one after another; weights are stacked either way.

    Raises:
      ValueError: `num_layers` < 1 or no multiple of the body's depth; names without
        the policy that reads them.
    """

    body: Layer
    num_layers: int
    recompute: Recompute = Recompute.EVERYTHING
    saved_names: Sequence[str] = ()
    unroll: Unroll = Unroll.LOOP

    def __post_init__(self):
        super().__post_init__()
        check_depth("Repeat", self.num_layers, self.body)
        check_saved_names("Repeat", self.recompute, self.saved_names)

    @property
    def count(self) -> int:
        """L, how often the body is run."""
        return self.num_layers // self.body.depth

    def weights(self) -> NestedMap:
        return self.body.weights().map(lambda spec: spec.stacked(self.count))

    def extra_flops(self, sequence_length: int) -> float:
        return self.count * self.body.extra_flops(sequence_length)

    def fprop(self, ctx: Context, theta: NestedMap, x: Any, **constants: Any) -> Any:
        """Runs the stack.

        Args:
          ctx: context. In `Mode.EVAL` nothing is saved, so there is no gradient.
          theta: weights of the body, stacked along a leading dim L.
          x: the body's input, a nest of floating-point tensors.
          **constants: nests of tensors that each layer gets unchanged; None is passed
            on as None. Floating-point tensors are differentiated; XLA removes the
            computation of gradients that nothing reads, such as a mask's.

        Returns:
          The last layer's output, a nest like `x`. If the body returns a nested map of
          `x` and `aux`, such a map: its `aux` has a leading dim L.

        Raises:
          ValueError: weights are not stacked L times; the body's output is not like its
            input.
        """
        check_stacked(ctx, self.weights(), theta)
        stack = _Stack(self, ctx, x, constants, theta)
        flat = [*tf.nest.flatten(x), *theta.leaves(), *stack.shared]
        if ctx.mode is Mode.EVAL:
            outputs = stack.evaluate(flat)
        elif self.unroll is Unroll.LOOP:
            outputs = tf.custom_gradient(stack.looped)(*flat)
        else:
            outputs = tf.custom_gradient(stack.unrolled)(*flat)
        x, aux = divide(tf.nest.flatten(outputs), [stack.body.counts[0]])
        return stack.body.result(x, aux)

    def saved(self, ctx: Context, x: Any, **constants: Any) -> SavedForBackward:
        """What `fprop` keeps for the backward pass, by tracing a single layer.

        Args:
          ctx: as for `fprop`, in training.
          x: as for `fprop`; only shapes and dtypes matter.
          **constants: as for `fprop`.

        Raises:
          ValueError: the body's output is not like its input.
        """
        body = _Stack(self, ctx, x, constants).body
        return SavedForBackward(
            stacks=tuple(
                SavedStack(tensor=tensor, count=self.count) for tensor in body.read
            ),
            result=body.result_specs(specs_of(x), self.count),
        )

    def init_cache(self, ctx: Context, batch: int, length: int) -> NestedMap:
        """The body's cache, stacked along a leading dim L."""
        cache = self.body.init_cache(ctx, batch, length)
        # Not new zeros: these have the body's annotations.
        return cache.map(lambda t: tf.broadcast_to(t[None], [self.count, *shape_of(t)]))

    def encode_memory(
        self, ctx: Context, theta: NestedMap, memory: tf.Tensor
    ) -> NestedMap:
        """The body's cache for each layer's weights, stacked along a leading dim L."""

        def layer(ctx, theta, i, caches):
            cache = self.body.encode_memory(ctx, theta, memory)
            return caches.map(lambda stack, t: write(stack, t, i), cache)

        specs = tf.function(
            lambda: self.body.encode_memory(
                ctx, self._layer_theta(ctx, theta, 0), memory
            ),
            autograph=False,
        ).get_concrete_function()
        rows = shape_of(memory)[0]
        stacks = specs.structured_outputs.map(
            lambda t: tf.zeros([self.count, rows, *t.shape[1:]], t.dtype)
        )
        return self._layers(ctx, theta, layer, stacks)

    def step(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        cache: NestedMap,
        position: tf.Tensor,
        *,
        memory: NestedMap | None = None,
        **inputs: tf.Tensor | None,
    ) -> tuple[tf.Tensor, NestedMap]:
        """One more token, or the first S, through all layers.

        See `TransformerLayer.step`.
        """

        def layer(ctx, theta, i, state):
            x, cache = self.body.step(
                ctx,
                theta,
                state.x,
                state.cache.map(lambda t: read(t, i)),
                position,
                memory=memory and memory.map(lambda t: read(t, i)),
                **inputs,
            )
            cache = state.cache.map(lambda stack, t: write(stack, t, i), cache)
            return NestedMap(x=x, cache=cache)

        state = NestedMap(x=ctx.cast(x), cache=cache)
        out = self._layers(ctx, theta, layer, state)
        return out.x, out.cache

    def _layers(self, ctx: Context, theta: NestedMap, layer, state: NestedMap):
        """`state` after (ctx, theta, i, state) -> state of each layer."""

        def body(i, state):
            key = None if ctx.key is None else random.fold_in(ctx.key, i)
            layer_ctx = dataclasses.replace(ctx, key=key)
            return [i + 1, layer(layer_ctx, self._layer_theta(ctx, theta, i), i, state)]

        start = [tf.constant(0), state]
        return tf.while_loop(lambda i, _: i < self.count, body, start)[1]

    def _layer_theta(self, ctx: Context, theta: NestedMap, i) -> NestedMap:
        """The weights of layer `i`, annotated."""
        weights = theta.map(lambda stack: read(stack, i))
        return annotate_weights(ctx.plan, self.body.weights(), weights)


class _Stack:
    """One call of a `Repeat`.

    `flat` is always [*x leaves, *stacked weight leaves, *shared]: `shared` are the
    constants that are differentiated, `fixed` those that are not. The results are
    [*x leaves, *aux leaves of all layers, stacked].
    """

    def __init__(self, repeat: Repeat, ctx: Context, x, constants, theta=None):
        self.repeat = repeat
        self.ctx = ctx
        self.count = repeat.count
        constants = Constants(constants)
        self.shared, self.fixed = constants.shared, constants.fixed
        self.body = StackedBody(
            repeat.body,
            ctx,
            specs_of(x),
            shared=specs_of(self.shared),
            fixed=specs_of(self.fixed),
            constants=constants,
            recompute=repeat.recompute,
            saved_names=repeat.saved_names,
            stacks=theta,
        )
        self.split = self.body.split

    def _arguments(self, i, x, weights, shared) -> list[tf.Tensor]:
        """Arguments of layer `i`; its key depends on its number, not on the loop."""
        key = self.ctx.key
        keys = [] if key is None else [random.fold_in(key, i)]
        return [*x, *weights, *shared, *self.fixed, *keys]

    def _divide(self, flat: Sequence) -> tuple[list, list, list]:
        """Leaves of x, stacked weights, shared tensors."""
        x, weights, shared = divide(flat, self.body.counts[:2])
        return x, weights, shared

    def _aux_stores(self) -> list[tf.Tensor]:
        specs = self.body.aux
        return [tf.zeros([self.count, *spec.shape], spec.dtype) for spec in specs]

    def evaluate(self, flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The forward pass only: nothing is saved."""
        x, stacks, shared = self._divide(flat)
        n = len(x)
        if self.repeat.unroll is Unroll.UNROLLED:
            rows = []
            for i, weights in enumerate(_unstack(stacks)):
                y = self.split.forward(*self._arguments(i, x, weights, shared))
                x, aux, _ = self.body.divide_results(y)
                rows.append(aux)
            return [*x, *_stacks(rows)]

        def body(i, *state):
            weights = [read(t, i) for t in stacks]
            y = self.split.forward(*self._arguments(i, state[:n], weights, shared))
            x, aux, _ = self.body.divide_results(y)
            return [i + 1, *self._annotated(x), *_writes(state[n:], aux, i)]

        return self._while(body, [*x, *self._aux_stores()])

    def looped(self, *flat: tf.Tensor):
        """Outputs and gradient function, each with a loop."""
        x, stacks, shared = self._divide(flat)
        n, a = len(x), len(self.body.aux)

        def body(i, *state):
            x, aux_stores, stores = divide(state, [n, a])
            weights = [read(t, i) for t in stacks]
            y = self.split.forward(*self._arguments(i, x, weights, shared))
            y, aux, saved = self.body.divide_results(y)
            aux_stores = _writes(aux_stores, aux, i)
            stores = _writes(stores, [*x, *saved], i)
            return [i + 1, *self._annotated(y), *aux_stores, *stores]

        stores = [_store(saved, self.count) for saved in self.body.kept]
        final = self._while(body, [*x, *self._aux_stores(), *stores])
        stores = final[n + a :]

        def gradient(*dy):
            dy, daux = dy[:n], dy[n:]

            def body(j, *state):
                dx, dstacks, dshared = self._divide(state)
                i = self.count - 1 - j
                kept = [read(s, i) for s in stores]
                weights = [read(t, i) for t in stacks]
                arguments = self._arguments(i, kept[:n], weights, shared)
                dout = [*dx, *(read(d, i) for d in daux)]
                grads = self.split.backward(*arguments, *kept[n:], *dout)
                dx, dweights, more = self._divide(grads)
                dstacks = _writes(dstacks, dweights, i)
                return [j + 1, *self._annotated(dx), *dstacks, *_sums(dshared, more)]

            zeros = [tf.zeros(t.shape, t.dtype) for t in shared]
            return self._while(body, [*dy, *self._zero_stacks(), *zeros])

        return final[: n + a], gradient

    def unrolled(self, *flat: tf.Tensor):
        """Outputs and gradient function, layer after layer."""
        x, stacks, shared = self._divide(flat)
        n = len(x)
        weights = _unstack(stacks)
        kept, rows = [], []
        for i in range(self.count):
            y = self.split.forward(*self._arguments(i, x, weights[i], shared))
            y, aux, saved = self.body.divide_results(y)
            kept.append([*x, *saved])
            rows.append(aux)
            x = y

        def gradient(*dy):
            dx, daux = list(dy[:n]), dy[n:]
            dweights: list = [None] * self.count
            dshared = [tf.zeros(t.shape, t.dtype) for t in shared]
            for i in reversed(range(self.count)):
                # Without a barrier XLA reuses the forward values instead of recomputing
                # them, which keeps them all alive.
                again = [*kept[i], *weights[i], *dx]
                if self.repeat.recompute is not Recompute.NOTHING:
                    again = list(xla.optimization_barrier(*again))
                before, w, dx = divide(again, [len(kept[i]), len(weights[i])])
                arguments = self._arguments(i, before[:n], w, shared)
                dout = [*dx, *(d[i] for d in daux)]
                grads = self.split.backward(*arguments, *before[n:], *dout)
                dx, dweights[i], more = self._divide(grads)
                dshared = _sums(dshared, more)
            return [*dx, *_stacks(dweights), *dshared]

        return [*x, *_stacks(rows)], gradient

    def _while(self, body, state: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        start = [tf.constant(0), *state]
        return list(tf.while_loop(lambda i, *_: i < self.count, body, start)[1:])

    def _annotated(self, x: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """`x` annotated as the body annotates its output."""
        return [y.annotate(t) for t, y in zip(x, self.body.outputs, strict=True)]

    def _zero_stacks(self) -> list[tf.Tensor]:
        stores = []
        for path, spec in self.body.specs.items_by_path():
            spec = spec.stacked(self.count)
            sharding = spec.sharding(self.ctx.plan, path)
            zeros = tf.zeros(spec.shape, spec.dtype)
            stores.append(annotate(zeros, sharding))
        return stores


def _sums(totals: Sequence, more: Sequence) -> list[tf.Tensor]:
    return [total + value for total, value in zip(totals, more, strict=True)]


def _store(saved: Saved, count: int) -> tf.Tensor:
    """An empty stack for `count` tensors like `saved`."""
    zeros = tf.zeros([count, *saved.spec.shape], saved.spec.dtype)
    return saved.annotate_stack(zeros)


def _unstack(stacks: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    return [list(layer) for layer in zip(*(tf.unstack(t) for t in stacks), strict=True)]


def _stacks(rows: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    return [tf.stack(leaves) for leaves in zip(*rows, strict=True)]


def _writes(stores: Sequence, values: Sequence, i) -> list[tf.Tensor]:
    return [write(s, t, i) for s, t in zip(stores, values, strict=True)]
