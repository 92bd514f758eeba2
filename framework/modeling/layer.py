"""The base of layers: frozen hyperparameters, weight specs, and a pure `fprop`."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from meshwright.framework.modeling import random
from meshwright.framework.modeling.checks import Checked, bounded, check_value
from meshwright.framework.modeling.initializers import Initializer
from meshwright.framework.modeling.layer_order import LayerOrder
from meshwright.framework.modeling.recompute import save_name
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.annotations import OnConflict, annotate
from meshwright.framework.sharding.origins import note_dims, note_layer, note_weight
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.types import reshard_to

STACK_DIM = "layers"
"""Logical name of the leading dim that stacks the weights of repeated layers."""
STAGE_DIM = "stages"
"""The same for the stages of a pipeline, each of which has several layers."""
EXPERT_DIM = "experts"
"""The same for the experts of a mixture: each is a separate layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSpec(Checked):
    """The description of a weight, which allocates nothing.

    Args:
      shape: logical shape.
      dims: the logical name of each dim, for the sharding plan. Leading `STACK_DIM`,
        `STAGE_DIM` and `EXPERT_DIM` dims stack weights of equal layers, which
        initializers and optimizers treat separately.
      initializer: makes the first value from a random key.
      dtype: storage dtype, float32 by default.
      statistic_decay: None for a trained weight. A number in [0, 1] for a running
        statistic: what a layer returns as its gradient (`as_gradient`) is its newest
        value g, and an update makes it decay * statistic + (1 - decay) * g, whatever
        the optimizer. It has no slots and no part in norms, clipping or averages. 1: a
        weight that stays as it is.
      constraint: what an optimizer makes of a new value before it is the weight's.
      rows: for a weight that is used as a matrix only: how many dims, after those that
        stack layers, its rows are; the rest are its columns. See `as_matrix`.
      order: of a weight that stacks layers by stage: in which order; or None.

    Raises:
      ValueError: shape and dims do not match; a size is no whole number of at least
        0; the initializer is none; the decay is out of range; no dim is left for
        columns.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    initializer: Initializer
    dtype: tf.DType = tf.float32
    statistic_decay: float | None = bounded(None, at_least=0, at_most=1)
    constraint: Callable[[tf.Tensor], tf.Tensor] | None = None
    rows: int | None = bounded(None, at_least=1)
    order: LayerOrder | None = None

    def __post_init__(self):
        super().__post_init__()
        for field in ("shape", "dims"):
            value = getattr(self, field)
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise ValueError(
                    f"WeightSpec.{field} is {value!r}; it must be a tuple, such as "
                    f"({value!r},)"
                )
        for dim, size in enumerate(self.shape):
            check_value(f"WeightSpec.shape[{dim}]", size, at_least=0, whole=True)
        # None: of a weight that is only described.
        if self.initializer is not None and (
            isinstance(self.initializer, type) or not callable(self.initializer)
        ):
            raise ValueError(
                f"WeightSpec.initializer is {self.initializer!r}; it must be an "
                "instance of an initializer, such as Constant(0.0) or FanIn()"
            )
        if len(self.shape) != len(self.dims):
            raise ValueError(
                f"weight spec has shape {self.shape} but names dims {self.dims}"
            )
        in_layer = len(self.shape) - self.stack_rank
        if self.rows is not None and self.rows >= in_layer:
            raise ValueError(
                f"WeightSpec.rows is {self.rows}, but the weight {self.dims} has "
                f"{in_layer} dims in a layer: leave one or more for the columns"
            )

    @property
    def stack_rank(self) -> int:
        """The number of leading dims that stack weights of equal layers."""
        count = 0
        stacks = (STACK_DIM, STAGE_DIM, EXPERT_DIM)
        while count < len(self.dims) and self.dims[count] in stacks:
            count += 1
        return count

    @property
    def is_matrix(self) -> bool:
        """Whether a layer's part has two dims or more: not a scale or a bias.

        A running statistic is no matrix either: nothing is multiplied by it.
        """
        return not self.is_statistic and len(self.shape) - self.stack_rank >= 2

    @property
    def is_statistic(self) -> bool:
        """Whether the weight follows layers' inputs instead of the loss."""
        return self.statistic_decay is not None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def sharding(self, plan: ShardingPlan, name: str = "weight") -> Sharding:
        """The sharding that `plan` gives this weight."""
        return plan.weight_sharding(self.dims, name)

    def as_matrix(self, plan: ShardingPlan) -> WeightSpec:
        """The spec of this weight as a matrix, after dims that stack layers.

        A TPU pads the last dim of a [M, N, D] weight to 128 columns, and moves all its
        elements where a matrix is made of it. The spec itself if it has no `rows`, or
        if the plan splits merged dims otherwise than in whole parts of the first.
        """
        if self.rows is None:
            return self
        ends = (self.stack_rank, self.stack_rank + self.rows, len(self.shape))
        groups = [slice(*pair) for pair in itertools.pairwise(ends)]
        splits = self.sharding(plan).splits()
        for group in groups:
            (first, *others), (size, *_) = splits[group], self.shape[group]
            if size % first or any(count > 1 for count in others):
                return self
        return dataclasses.replace(
            self,
            shape=(
                *self.shape[: ends[0]],
                *(math.prod(self.shape[group]) for group in groups),
            ),
            dims=(*self.dims[: ends[0]], *(self.dims[group][0] for group in groups)),
            rows=None,
        )

    def like(self, weight: tf.Tensor, plan: ShardingPlan) -> WeightSpec:
        """The spec of a `weight` of one layer or more, which may come as a matrix.

        It has the dims of this spec, with or without more that stack layers.
        """
        matrix = self.as_matrix(plan)
        rank = len(matrix.shape)
        is_matrix = list(weight.shape)[-rank:] == list(matrix.shape)
        return matrix if is_matrix else self

    def shard_bytes(self, sharding: Sharding) -> int:
        """Bytes of the part that a device holds, in this sharding."""
        return math.prod(sharding.shard_shape(self.shape)) * self.dtype.size

    def stacked(self, count: int, dim: str = STACK_DIM) -> WeightSpec:
        """The spec of `count` such weights stacked in a tensor."""
        return dataclasses.replace(
            self, shape=(count, *self.shape), dims=(dim, *self.dims), order=None
        )

    @property
    def layer_order(self) -> LayerOrder | None:
        """In which order the weight stacks layers; None if it does not."""
        if self.order is None and self.dims[:1] == (STACK_DIM,):
            return LayerOrder(layers=self.shape[0], stages=1, rounds=1)
        return self.order


class Mode(enum.Enum):
    """Whether a program trains or only evaluates, as for dropout."""

    TRAIN = "train"
    EVAL = "eval"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """The inputs of a layer besides its weights and its input tensors.

    Args:
      plan: how weights and activations are split.
      mode: train or eval.
      key: uint32 [2] random key of the model, or None where nothing random may happen.
        Layers draw from `random_key`, which differs by path.
      activation_dtype: dtype of activations; weights keep theirs and are cast on use.
      gradient_dtype: dtype in which gradients of weights are computed, and added up
        over devices; None: that of activations.
      path: dotted path of the layer, for names and messages.
    """

    plan: ShardingPlan = ShardingPlan()
    mode: Mode = Mode.EVAL
    key: tf.Tensor | None = None
    activation_dtype: tf.DType = tf.float32
    gradient_dtype: tf.DType | None = None
    path: str = ""

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[Context]:
        """The context of a part of this layer, with its own path and random numbers.

        Ops made inside carry the path in their names, and so does the compiled program.
        """
        path = f"{self.path}.{name}" if self.path else name
        with tf.name_scope(name) as scope:
            note_layer(scope, path)
            yield dataclasses.replace(self, path=path)

    def cast(self, tensor: tf.Tensor) -> tf.Tensor:
        """`tensor` in the activation dtype."""
        return tf.cast(tensor, self.activation_dtype)

    @property
    def widens_gradients(self) -> bool:
        """Whether gradients of weights have another dtype than activations."""
        return self.gradient_dtype not in (None, self.activation_dtype)

    def split(
        self, tensor: tf.Tensor, dims: Sequence[str], *, name: str | None = None
    ) -> tf.Tensor:
        """`tensor`, annotated as the plan's activation table says for `dims`.

        A `name` lets recomputation policies save the tensor (`save_name`).
        """
        path = ".".join(part for part in (self.path, name) if part)
        tensor = self.plan.annotate_activation(tensor, dims, path or "activation")
        return tensor if name is None else save_name(tensor, name)

    def random_key(self) -> tf.Tensor:
        """The layer's own random key, from the model's key and the layer's path.

        Raises:
          ValueError: the program was built without a key.
        """
        if self.key is None:
            raise ValueError(
                f"layer {self.path!r} needs random numbers but the context has no key: "
                "pass Context(key=...) or set its rate to 0"
            )
        return random.fold_in(self.key, self.path)


class Layer(Checked):
    """Base of layers: subclass as a frozen, keyword-only dataclass.

    A layer holds only hyperparameters. `weights()` describes its weights, `fprop` is a
    pure function of them, so that a layer can be stacked, looped, initialised in shards
    or only planned.
    """

    def weights(self) -> NestedMap:
        """Nested map of `WeightSpec`; a part's weights are under the part's name."""
        return NestedMap()

    @property
    def depth(self) -> int:
        """The number of layers of a stack that this layer counts for."""
        return 1

    def fprop(self, ctx: Context, theta: NestedMap, x: Any, **kwargs: Any) -> Any:
        """The layer's function; `theta` has the structure of `weights()`."""
        raise NotImplementedError(
            f"{type(self).__name__} has no fprop: define fprop(self, ctx, theta, x), "
            "which returns what the layer makes of x"
        )

    def extra_flops(self, sequence_length: int) -> float:
        """Forward FLOPs of a token beyond the two for each matrix weight.

        These are of products of activations with each other, such as attention's; a
        layer made of layers adds up theirs. They are used only for utilisation figures.
        """
        return 0.0


def weight_specs(owner: Any) -> NestedMap:
    """The specs of the weights of a layer or task.

    Raises:
      TypeError: `owner.weights()` is no nested map of weight specs.
    """
    specs = owner.weights()
    name = f"{type(owner).__name__}.weights()"
    if not isinstance(specs, NestedMap):
        raise TypeError(
            f"{name} returned a {type(specs).__name__}; return a NestedMap of "
            "WeightSpec, such as NestedMap(w=WeightSpec(...))"
        )
    for path, spec in specs.items_by_path():
        if not isinstance(spec, WeightSpec):
            raise TypeError(
                f"{name} has a {type(spec).__name__} at {path!r}; describe the weight "
                "by a WeightSpec"
            )
    return specs


def check_returns(layer: Layer, y: Any) -> None:
    """Checks what a layer's `fprop` returned.

    Raises:
      TypeError: it is None, or has None for a tensor.
    """
    if any(each is None for each in tf.nest.flatten(y)):
        what = "None" if y is None else f"a {type(y).__name__} with None in it"
        raise TypeError(
            f"{type(layer).__name__}.fprop returned {what}; return the layer's tensors"
        )


def annotate_weights(
    plan: ShardingPlan, specs: NestedMap, theta: NestedMap, *, gradients: bool = True
) -> NestedMap:
    """Annotates weights where they are read, and their gradients if `gradients`."""

    def annotated(path: str, weight: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
        sharding = plan.read_sharding(spec.dims, path)
        if spec.is_statistic:  # Its "gradient" is a value.
            sharding = sharding.untyped()
        if gradients:
            weight = annotate(weight, sharding, on_conflict=OnConflict.REDUCE)
        else:
            weight = _annotated_forward(weight, sharding)
        return note_dims(note_weight(weight, path), spec.dims)

    return theta.map_with_path(annotated, specs)


def _annotated_forward(weight: tf.Tensor, sharding: Sharding) -> tf.Tensor:
    """`weight`, annotated, and its gradient not."""
    return tf.custom_gradient(lambda x: (annotate(x, sharding), lambda dy: dy))(weight)


def added_up(plan: ShardingPlan, specs: NestedMap, gradients: NestedMap) -> NestedMap:
    """Gradients of weights from `annotate_weights`, reduced where they were not."""
    if not plan.unreduced_gradient_axes:
        return gradients
    return gradients.map_with_path(
        lambda path, g, spec: reshard_to(g, spec.sharding(plan, path)), specs
    )


def as_gradient(y: tf.Tensor, weight: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """`y`, such that `value` is returned as the gradient of `weight`.

    For a running statistic (`WeightSpec.statistic_decay`): its newest value thus leaves
    loops, recomputation and stacks of weights as gradients do. Gradients of several
    uses add up, so a layer may be used only once a step.

    Args:
      y: a tensor that the loss depends on.
      weight: the statistic.
      value: of the shape of `weight`; not differentiated here.
    """

    @tf.custom_gradient
    def attach(y, weight, value):
        # A new tensor, made by the gradient: recomputation then keeps `value` itself.
        return tf.identity(y), lambda dy: (
            dy,
            tf.cast(value, weight.dtype),
            tf.zeros_like(value),
        )

    return attach(y, weight, tf.stop_gradient(value))


def initialize(specs: NestedMap, key: tf.Tensor) -> NestedMap:
    """First values of all weights; each depends only on `key` and the weight's path."""
    paths = [path for path, _ in specs.items_by_path()]
    # All keys at once, as each takes a hundred ops.
    keys = tf.unstack(random.fold_in(key, paths), axis=1) if paths else []
    return specs.map(
        lambda spec, key: spec.initializer(
            key, spec.shape, spec.dtype, spec.stack_rank
        ),
        specs.pack(keys),
    )
