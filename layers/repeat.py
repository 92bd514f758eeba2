"""Equal layers in a row, as one loop over stacked weights.

Dims: L layers; everything else is the body's.

The loop lowers to two HLO loops, one forward and one backward, so the program's size
does not grow with depth (GSPMD 5.1 trains up to 256 layers this way):

  forward   for i in 0..L-1:  keep x[i];  x, saved[i] = layer(theta[i], x)
  backward  for i in L-1..0:  dx, dtheta[i] = gradient(theta[i], x[i], saved[i], dx)

What all layers share (the memory of cross-attention) gets its gradients summed over
them in the backward loop.
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
from meshwright.framework.modeling.recompute import (
    Recompute,
    Saved,
    SplitFunction,
    split_function,
)
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.annotations import annotate


@gin.constants_from_enum
class Unroll(enum.Enum):
    """Whether the stack is a loop in the program, or its layers one after another.

    Unrolled, an optimization barrier keeps XLA from merging what is recomputed with its
    first computation; XLA's CPU compiler drops it and merges most of it.
    """

    LOOP = "loop"
    UNROLLED = "unrolled"


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeat(Layer):
    """`num_layers` layers like `body`, each with weights and random key of its own.

    Args:
      body: the layer; its output has the structure, shapes and dtypes of its input.
      num_layers: L.
      recompute: what the backward pass computes again.
      saved_names: for `Recompute.ALL_BUT_NAMED`, the intermediates to save.
      unroll: loop, or layers one after another; weights are stacked either way.

    Raises:
      ValueError: `num_layers` < 1, or names without the policy that reads them.
    """

    body: Layer
    num_layers: int
    recompute: Recompute = Recompute.EVERYTHING
    saved_names: Sequence[str] = ()
    unroll: Unroll = Unroll.LOOP

    def __post_init__(self):
        if self.num_layers < 1:
            raise ValueError(f"Repeat.num_layers is {self.num_layers}, must be >= 1")
        if self.saved_names and self.recompute is not Recompute.ALL_BUT_NAMED:
            raise ValueError(
                f"Repeat.saved_names {tuple(self.saved_names)} are read only by "
                f"Recompute.ALL_BUT_NAMED, not by {self.recompute}"
            )

    def weights(self) -> NestedMap:
        return self.body.weights().map(lambda spec: spec.stacked(self.num_layers))

    def extra_flops(self, sequence_length: int) -> float:
        return self.num_layers * self.body.extra_flops(sequence_length)

    def fprop(self, ctx: Context, theta: NestedMap, x: Any, **constants: Any) -> Any:
        """Runs the stack.

        Args:
          ctx: context. In `Mode.EVAL` nothing is saved, so there is no gradient.
          theta: weights of the body, stacked along a leading dim L.
          x: the body's input, a nest of floating-point tensors.
          **constants: nests of tensors that each layer gets unchanged; None is passed
            on as None. Floating-point ones are differentiated; XLA takes out again what
            computes a gradient that nobody reads, such as a mask's.

        Returns:
          The last layer's output, a nest like `x`.

        Raises:
          ValueError: weights are not stacked L times; the body's output is not like its
            input.
        """
        stack = _Stack(self, ctx, theta, x, constants)
        flat = [*tf.nest.flatten(x), *theta.leaves(), *stack.shared]
        if ctx.mode is Mode.EVAL:
            outputs = stack.evaluate(flat)
        elif self.unroll is Unroll.LOOP:
            outputs = tf.custom_gradient(stack.looped)(*flat)
        else:
            outputs = tf.custom_gradient(stack.unrolled)(*flat)
        return tf.nest.pack_sequence_as(x, tf.nest.flatten(outputs))

    def start_cache(self, ctx: Context, batch: int, length: int) -> NestedMap:
        """The body's, stacked along a leading dim L."""
        one = self.body.start_cache(ctx, batch, length)
        # Not new zeros: these lie as the body says.
        return one.map(lambda t: tf.broadcast_to(t[None], [self.num_layers, *t.shape]))

    def remember(self, ctx: Context, theta: NestedMap, memory: tf.Tensor) -> NestedMap:
        """The body's, of each layer's weights, stacked along a leading dim L."""

        def layer(ctx, theta, i, found):
            one = self.body.remember(ctx, theta, memory)
            return found.map(lambda stack, t: _write(stack, t, i), one)

        specs = tf.function(
            lambda: self.body.remember(ctx, self._layer_theta(ctx, theta, 0), memory),
            autograph=False,
        ).get_concrete_function()
        stacks = specs.structured_outputs.map(
            lambda t: tf.zeros([self.num_layers, *t.shape], t.dtype)
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
        """One more token through all layers, see `TransformerLayer.step`."""

        def layer(ctx, theta, i, state):
            x, cache = self.body.step(
                ctx,
                theta,
                state.x,
                state.cache.map(lambda t: _read(t, i)),
                position,
                memory=memory and memory.map(lambda t: _read(t, i)),
                **inputs,
            )
            cache = state.cache.map(lambda stack, t: _write(stack, t, i), cache)
            return NestedMap(x=x, cache=cache)

        state = NestedMap(x=ctx.cast(x), cache=cache)
        out = self._layers(ctx, theta, layer, state)
        return out.x, out.cache

    def _layers(self, ctx: Context, theta: NestedMap, layer, state: NestedMap):
        """`state` after (ctx, theta, i, state) -> state of each layer."""

        def body(i, state):
            key = None if ctx.key is None else random.fold_in(ctx.key, i)
            own = dataclasses.replace(ctx, key=key)
            return [i + 1, layer(own, self._layer_theta(ctx, theta, i), i, state)]

        start = [tf.constant(0), state]
        return tf.while_loop(lambda i, _: i < self.num_layers, body, start)[1]

    def _layer_theta(self, ctx: Context, theta: NestedMap, i) -> NestedMap:
        """The weights of layer `i`, annotated."""
        own = theta.map(lambda stack: _read(stack, i))
        return annotate_weights(ctx.plan, self.body.weights(), own)


class _Stack:
    """One call of a `Repeat`.

    `flat` is always [*x leaves, *stacked weight leaves, *shared]: `shared` are the
    constants that are differentiated, `fixed` those that are not.
    """

    def __init__(self, repeat: Repeat, ctx: Context, theta, x, constants):
        self.repeat = repeat
        self.ctx = ctx
        self.count = repeat.num_layers
        self.specs = repeat.body.weights()
        self.x = x
        self.constants = {k: v for k, v in constants.items() if v is not None}
        self.absent = {k: None for k, v in constants.items() if v is None}
        flat = [tf.convert_to_tensor(t) for t in tf.nest.flatten(self.constants)]
        self.is_shared = [t.dtype.is_floating for t in flat]
        self.shared = [t for t in flat if t.dtype.is_floating]
        self.fixed = [t for t in flat if not t.dtype.is_floating]
        self.split: SplitFunction = self._trace(theta)

    def _trace(self, theta: NestedMap) -> SplitFunction:
        def check(path, spec, stack):
            if stack.shape != (self.count, *spec.shape):
                raise ValueError(
                    f"layer {self.ctx.path!r}: weight {path!r} has shape "
                    f"{stack.shape}, but {self.count} repeated layers need "
                    f"{(self.count, *spec.shape)}"
                )

        self.specs.map_with_path(check, theta)
        carry = _specs(self.x)
        slices = [tf.TensorSpec(t.shape[1:], t.dtype) for t in theta.leaves()]
        fixed = _specs(self.fixed)
        if self.ctx.key is not None:
            fixed.append(tf.TensorSpec([2], tf.uint32))
        split = split_function(
            self._layer,
            tf.nest.flatten(carry),
            slices,
            fixed,
            shared=_specs(self.shared),
            recompute=self.repeat.recompute,
            names=self.repeat.saved_names,
        )
        if self.returned != carry:
            raise ValueError(
                f"layer {self.ctx.path!r}: a repeated body must return what it takes, "
                f"but {type(self.repeat.body).__name__} takes {carry} and returns "
                f"{self.returned}"
            )
        return split

    def _layer(self, *args: tf.Tensor) -> list[tf.Tensor]:
        """(*x leaves, *a layer's weights, *shared, *fixed[, key]) -> output leaves."""
        remaining = iter(args)
        take = lambda leaves: [next(remaining) for _ in leaves]  # noqa: E731
        x = tf.nest.pack_sequence_as(self.x, take(tf.nest.flatten(self.x)))
        theta = self.specs.pack(take(self.specs.leaves()))
        shared, fixed = iter(take(self.shared)), iter(take(self.fixed))
        flat = [next(shared if is_shared else fixed) for is_shared in self.is_shared]
        constants = tf.nest.pack_sequence_as(self.constants, flat)
        ctx = dataclasses.replace(self.ctx, key=next(remaining, None))
        theta = annotate_weights(ctx.plan, self.specs, theta)
        y = self.repeat.body.fprop(ctx, theta, x, **constants, **self.absent)
        self.returned = _specs(y)
        return tf.nest.flatten(y)

    def _arguments(self, i, x, weights, shared) -> list[tf.Tensor]:
        """Arguments of layer `i`; its key depends on its number, not on the loop."""
        key = self.ctx.key
        keys = [] if key is None else [random.fold_in(key, i)]
        return [*x, *weights, *shared, *self.fixed, *keys]

    def _divide(self, flat: Sequence) -> tuple[list, list, list]:
        """Leaves of x, stacked weights, shared tensors."""
        n, m = len(tf.nest.flatten(self.x)), len(self.specs.leaves())
        return list(flat[:n]), list(flat[n : n + m]), list(flat[n + m :])

    def evaluate(self, flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Forward only: nothing is saved."""
        x, stacks, shared = self._divide(flat)
        if self.repeat.unroll is Unroll.UNROLLED:
            for i, weights in enumerate(_unstack(stacks)):
                y = self.split.forward(*self._arguments(i, x, weights, shared))
                x = y[: len(x)]
            return x

        def body(i, *x):
            weights = [_read(t, i) for t in stacks]
            arguments = self._arguments(i, x, weights, shared)
            y = self.split.forward(*arguments)[: len(x)]
            return [i + 1, *self._annotated(y)]

        return self._while(body, x)

    def looped(self, *flat: tf.Tensor):
        """Outputs and gradient function, both with a loop inside."""
        x, stacks, shared = self._divide(flat)
        n = len(x)
        kept = [*self.split.outputs, *self.split.saved]

        def body(i, *state):
            x, stores = state[:n], state[n:]
            weights = [_read(t, i) for t in stacks]
            y = self.split.forward(*self._arguments(i, x, weights, shared))
            keep = [*x, *y[n:]]
            stores = [_write(s, t, i) for s, t in zip(stores, keep, strict=True)]
            return [i + 1, *self._annotated(y[:n]), *stores]

        final = self._while(body, [*x, *(_store(s, self.count) for s in kept)])
        stores = final[n:]

        def gradient(*dy):
            def body(j, *state):
                dx, dstacks, dshared = self._divide(state)
                i = self.count - 1 - j
                kept = [_read(s, i) for s in stores]
                weights = [_read(t, i) for t in stacks]
                arguments = self._arguments(i, kept[:n], weights, shared)
                grads = self.split.backward(*arguments, *kept[n:], *dx)
                dx, dweights, more = self._divide(grads)
                dstacks = [
                    _write(d, g, i) for d, g in zip(dstacks, dweights, strict=True)
                ]
                return [j + 1, *self._annotated(dx), *dstacks, *_sums(dshared, more)]

            zeros = [tf.zeros(t.shape, t.dtype) for t in shared]
            return self._while(body, [*dy, *self._zero_stacks(), *zeros])

        return final[:n], gradient

    def unrolled(self, *flat: tf.Tensor):
        """Outputs and gradient function, layer after layer."""
        x, stacks, shared = self._divide(flat)
        n = len(x)
        weights = _unstack(stacks)
        kept = []
        for i in range(self.count):
            y = self.split.forward(*self._arguments(i, x, weights[i], shared))
            kept.append([*x, *y[n:]])
            x = y[:n]

        def gradient(*dx):
            dweights: list = [None] * self.count
            dshared = [tf.zeros(t.shape, t.dtype) for t in shared]
            for i in reversed(range(self.count)):
                # Without a barrier XLA finds the forward values and recomputes nothing,
                # which keeps them all alive.
                again = [*kept[i], *weights[i], *dx]
                if self.repeat.recompute is not Recompute.NOTHING:
                    again = list(xla.optimization_barrier(*again))
                before, w, dx = (
                    again[: len(kept[i])],
                    again[len(kept[i]) : -n],
                    again[-n:],
                )
                arguments = self._arguments(i, before[:n], w, shared)
                grads = self.split.backward(*arguments, *before[n:], *dx)
                dx, dweights[i], more = self._divide(grads)
                dshared = _sums(dshared, more)
            dstacks = [tf.stack(g) for g in zip(*dweights, strict=True)]
            return [*dx, *dstacks, *dshared]

        return x, gradient

    def _while(self, body, state: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        start = [tf.constant(0), *state]
        return list(tf.while_loop(lambda i, *_: i < self.count, body, start)[1:])

    def _annotated(self, x: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """`x` laid out as the body lays out its output."""
        return [y.annotate(t) for t, y in zip(x, self.split.outputs, strict=True)]

    def _zero_stacks(self) -> list[tf.Tensor]:
        stores = []
        for path, spec in self.specs.items_by_path():
            sharding = spec.stacked(self.count).sharding(self.ctx.plan, path)
            zeros = tf.zeros([self.count, *spec.shape], spec.dtype)
            stores.append(annotate(zeros, sharding))
        return stores


def _specs(nest):
    return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), nest)


def _sums(totals: Sequence, more: Sequence) -> list[tf.Tensor]:
    return [total + one for total, one in zip(totals, more, strict=True)]


def _store(saved: Saved, count: int) -> tf.Tensor:
    """An empty stack for `count` tensors like `saved`."""
    zeros = tf.zeros([count, *saved.spec.shape], saved.spec.dtype)
    return saved.annotate_stack(zeros)


def _unstack(stacks: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    return [list(layer) for layer in zip(*(tf.unstack(t) for t in stacks), strict=True)]


def _start(tensor: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
    return tf.stack([i] + [tf.constant(0)] * (tensor.shape.rank - 1))


def _read(stack: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
    shape = stack.shape[1:]
    piece = xla.dynamic_slice(stack, _start(stack, i), [1, *shape])
    return tf.reshape(piece, shape)


def _write(stack: tf.Tensor, value: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
    return xla.dynamic_update_slice(stack, value[None], _start(stack, i))
