"""The code that loops over equal layers share: the body as a flat, split function.

Dims: L layers, B batch; everything else is the body's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from meshwright.framework.modeling.layer import (
    Context,
    Layer,
    Mode,
    annotate_weights,
    check_returns,
)
from meshwright.framework.modeling.recompute import (
    Recompute,
    Saved,
    SplitFunction,
    forward_function,
    split_function,
)
from meshwright.framework.nested_map import NestedMap


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedStack:
    """A tensor that a stack keeps of each layer until the backward pass reads it.

    Args:
      tensor: the tensor of one layer; in a pipeline, of one stage and microbatch.
      count: the number of such tensors; in a pipeline, in each stage.
      stages: L of a pipeline, else 1.
      stage_axes: the mesh axes that split the stages.
    """

    tensor: Saved
    count: int
    stages: int = 1
    stage_axes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedForBackward:
    """The tensors that a stack keeps from its forward to its backward pass.

    Args:
      stacks: the tensors, without those that nothing reads, which compilers remove.
      result: nest of specs of the result of `fprop`.
    """

    stacks: tuple[SavedStack, ...]
    result: Any


class Constants:
    """Inputs that every layer of a stack gets unchanged: nests of tensors by name.

    Args:
      values: tensors, or their specs; None is passed on as None.
    """

    def __init__(self, values: Mapping[str, Any]):
        given = {k: v for k, v in values.items() if v is not None}
        self._absent = {k: None for k, v in values.items() if v is None}
        self.nests = tf.nest.map_structure(tf.convert_to_tensor, given)
        flat = tf.nest.flatten(self.nests)
        self._is_shared = [t.dtype.is_floating for t in flat]
        self.shared = [t for t in flat if t.dtype.is_floating]
        """The tensors that are differentiated."""
        self.fixed = [t for t in flat if not t.dtype.is_floating]
        """The other tensors."""

    def pack(self, shared: Sequence, fixed: Sequence) -> dict[str, Any]:
        """The keywords of `fprop`, made of such tensors."""
        shared, fixed = iter(shared), iter(fixed)
        flat = [next(shared if is_shared else fixed) for is_shared in self._is_shared]
        return tf.nest.pack_sequence_as(self.nests, flat) | self._absent


class StackedBody:
    """A single layer of a stack, traced.

    Its function takes flat [*x, *weights, *shared, *fixed, and a key if there is one]
    and returns flat [*x, *aux, *saved]; its gradient is by x, weights and shared.

    Args:
      body: the layer. It returns a nest like its input, or a nested map of such an `x`
        and of side results `aux`.
      stacks: nested map of the stacked weights, which may come as matrices; None: as
        `body.weights()` says.
      ctx: the stack's context. In `Mode.EVAL` there is no gradient.
      x: nest of specs of the body's input.
      shared: specs of `Constants.shared`, as the body gets them.
      fixed: specs of `Constants.fixed`, likewise.
      constants: packs both.
      recompute: what the backward pass computes again.
      saved_names: for `Recompute.ALL_BUT_NAMED`, the intermediates to save.
      annotates_gradients: whether the gradients of weights are annotated; the stack
        may do that itself.
      deferred: expressions of paths of weights whose gradients are cut off, where they
        are products (`SplitFunction.deferred`).

    Raises:
      ValueError: the body's output is not like its input; an expression of `deferred`
        fits no weight whose gradient can be cut off.
    """

    def __init__(
        self,
        body: Layer,
        ctx: Context,
        x: Any,
        *,
        shared: Sequence[tf.TensorSpec],
        fixed: Sequence[tf.TensorSpec],
        constants: Constants,
        recompute: Recompute,
        saved_names: Sequence[str],
        stacks: NestedMap | None = None,
        annotates_gradients: bool = True,
        deferred: Sequence[str] = (),
    ):
        self._annotates_gradients = annotates_gradients
        self._body, self._ctx, self._constants = body, ctx, constants
        self.specs = body.weights()
        if stacks is not None:
            self.specs = self.specs.map(
                lambda spec, stack: spec.like(stack, ctx.plan), stacks
            )
        self.x = x
        self.counts = [
            len(tf.nest.flatten(x)),
            len(self.specs.leaves()),
            len(shared),
            len(fixed),
        ]
        keys = [] if ctx.key is None else [tf.TensorSpec([2], tf.uint32)]
        inputs = tf.nest.flatten(x)
        weights = [tf.TensorSpec(s.shape, s.dtype) for s in self.specs.leaves()]
        fixed = [*fixed, *keys]
        if ctx.mode is Mode.EVAL:  # A gradient takes most of the time.
            self.split = forward_function(
                self._fprop, [*inputs, *weights, *shared, *fixed]
            )
            return
        self.split: SplitFunction = split_function(
            self._fprop,
            inputs,
            weights,
            fixed,
            shared=shared,
            recompute=recompute,
            names=saved_names,
            defer=[
                not spec.is_statistic and any(re.fullmatch(p, path) for p in deferred)
                for path, spec in self.specs.items_by_path()
            ],
        )
        self._check_deferred(deferred)

    def _check_deferred(self, patterns: Sequence[str]) -> None:
        split = self.split.deferred
        are_cut = [False] * self.counts[1] if split is None else split.weights
        pairs = zip(self.specs.items_by_path(), are_cut, strict=True)
        cut = [path for (path, _), is_cut in pairs if is_cut]
        for pattern in patterns:
            if not any(re.fullmatch(pattern, path) for path in cut):
                raise ValueError(
                    f"layer {self._ctx.path!r}: deferred_gradients has {pattern!r}, "
                    "but no weight that it fits has a gradient that is one product of "
                    "what differs by microbatch: leave it out; such weights are "
                    f"{', '.join(cut) or 'none'}"
                )

    def _fprop(self, *flat: tf.Tensor) -> list[tf.Tensor]:
        x, weights, shared, fixed, keys = divide(flat, self.counts)
        x = tf.nest.pack_sequence_as(self.x, x)
        ctx = dataclasses.replace(self._ctx, key=keys[0] if keys else None)
        theta = annotate_weights(
            ctx.plan,
            self.specs,
            self.specs.pack(weights),
            gradients=self._annotates_gradients,
        )
        y = self._body.fprop(ctx, theta, x, **self._constants.pack(shared, fixed))
        check_returns(self._body, y)
        self._aux = None
        returned = y
        has_aux = isinstance(y, NestedMap) and set(y) == {"x", "aux"}
        if has_aux and specs_of(y) != self.x:
            returned, self._aux = y.x, specs_of(y.aux)
        if specs_of(returned) != self.x:
            raise ValueError(
                f"layer {ctx.path!r}: a repeated body must return what it takes, but "
                f"{type(self._body).__name__} takes {self.x} and returns "
                f"{specs_of(returned)}"
            )
        return tf.nest.flatten(y) if self._aux is None else _x_then_aux(y)

    @property
    def outputs(self) -> list[Saved]:
        """The outputs for `x`, with the annotations that the body gives them."""
        return list(self.split.outputs[: self.counts[0]])

    @property
    def kept(self) -> list[Saved]:
        """The tensors that a loop keeps of each layer: its input and `saved`."""
        return [*self.outputs, *self.split.saved]

    @property
    def read(self) -> list[Saved]:
        """The tensors of `kept` that the backward part needs."""
        pairs = zip(self.kept, self.split.reads, strict=True)
        return [saved for saved, is_read in pairs if is_read]

    @property
    def aux(self) -> list[tf.TensorSpec]:
        """The specs of the leaves of `aux`."""
        return [saved.spec for saved in self.split.outputs[self.counts[0] :]]

    @property
    def aux_paths(self) -> list[str]:
        """Dotted paths of the leaves of `aux`."""
        return [] if self._aux is None else [p for p, _ in self._aux.items_by_path()]

    def divide_results(self, flat: Sequence) -> tuple[list, list, list]:
        """The results of `split.forward`: leaves of x, of aux, and saved tensors."""
        x, aux, saved = divide(flat, [self.counts[0], len(self.aux)])
        return x, aux, saved

    def result_specs(self, x: Any, count: int) -> Any:
        """Specs of the result of `count` layers, given the specs of their input."""
        aux = [tf.TensorSpec([count, *spec.shape], spec.dtype) for spec in self.aux]
        return self.result(tf.nest.flatten(x), aux)

    def result(self, x: Sequence[tf.Tensor], aux: Sequence[tf.Tensor]) -> Any:
        """The stack's result, from its last layer's x and all layers' aux."""
        x = tf.nest.pack_sequence_as(self.x, x)
        if self._aux is None:
            return x
        return NestedMap(x=x, aux=tf.nest.pack_sequence_as(self._aux, aux))


def divide(flat: Sequence, counts: Sequence[int]) -> list[list]:
    """`flat` in pieces of the given lengths, and a piece of what is left."""
    pieces, start = [], 0
    for count in counts:
        pieces.append(list(flat[start : start + count]))
        start += count
    return [*pieces, list(flat[start:])]


def specs_of(nest: Any) -> Any:
    """The nest's `TensorSpec`s."""
    return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), nest)


def check_stacked(ctx: Context, specs: NestedMap, theta: NestedMap) -> None:
    """Raises ValueError if the shape of a weight in `theta` is not that in `specs`."""

    def check(path, spec, stack):
        if stack.shape not in (spec.shape, spec.as_matrix(ctx.plan).shape):
            raise ValueError(
                f"layer {ctx.path!r}: weight {path!r} has shape {stack.shape}, but the "
                f"stack's layers need {spec.shape}"
            )

    specs.map_with_path(check, theta)


def check_depth(owner: str, num_layers: int, body: Layer) -> None:
    """Raises ValueError unless `num_layers` is a positive multiple of the body's."""
    if num_layers < 1 or num_layers % body.depth:
        raise ValueError(
            f"{owner}.num_layers is {num_layers}; it must be at least 1"
            + (
                f" and a multiple of the {body.depth} layers of its "
                f"{type(body).__name__}"
                if body.depth > 1
                else ""
            )
        )


def check_saved_names(owner: str, recompute: Recompute, names: Sequence[str]) -> None:
    """Raises ValueError for names without the policy that reads them."""
    if names and recompute is not Recompute.ALL_BUT_NAMED:
        raise ValueError(
            f"{owner}.saved_names {tuple(names)} are read only by "
            f"Recompute.ALL_BUT_NAMED, not by {recompute}"
        )


def _x_then_aux(y: NestedMap) -> list[tf.Tensor]:
    return [*tf.nest.flatten(y.x), *tf.nest.flatten(y.aux)]
