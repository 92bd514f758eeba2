"""What experts need of each device by itself, as ops of a program.

Tensors are split along dim 0 among the devices that have tokens; each op computes with
a device's own part (`manual_partition`), and so does its gradient. Nothing else passes
from one region to another, so that loops over layers can keep what lies between.

Dims: D devices, N tokens of a device, k choices of a token, R rows, C rows of a block,
U blocks, E experts of a device, A contracted, B produced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from meshwright.framework.modeling.layer import EXPERT_DIM, Context, WeightSpec
from meshwright.framework.sharding.annotations import annotate
from meshwright.framework.sharding.collectives import all_reduce, all_to_all
from meshwright.framework.sharding.manual import auto_to_manual, manual_to_auto
from meshwright.framework.sharding.plan import ShardingPlan, as_axes
from meshwright.framework.sharding.sharding import Sharding
from meshwright.layers.basic.entries import add_at, read, write
from meshwright.layers.basic.linear import summed_products
from meshwright.layers.experts.placement import Queues, blocks_for, put, take
from meshwright.layers.experts.ragged import has_kernel, kernel_products


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the choices of each device's tokens lie in its rows; see `placement.py`.

    Args:
      devices: the devices.
      rows: int32 [D N, k].
      choices: int32 [D R].
    """

    devices: Devices
    rows: tf.Tensor
    choices: tf.Tensor

    def take(self, x: tf.Tensor) -> tf.Tensor:
        """[D R, ...] of `x` [D N, ...]: each row's token, or zeros."""
        if not x.dtype.is_floating:
            return self._take(x)

        @tf.custom_gradient
        def taken(x):
            return self._take(x), self._put

        return taken(x)

    def put(self, y: tf.Tensor) -> tf.Tensor:
        """[D N, ...] of `y` [D R, ...]: the sum of each token's rows."""

        @tf.custom_gradient
        def given(y):
            return self._put(y), self._take

        return given(y)

    def take_choices(self, x: tf.Tensor) -> tf.Tensor:
        """[D R] of `x` [D N, k]: what belongs to each row's choice, or 0."""
        alone = Placement(self.devices, tf.reshape(self.rows, [-1, 1]), self.choices)
        return alone.take(tf.reshape(x, [-1]))

    def _take(self, x: tf.Tensor) -> tf.Tensor:
        k = self.rows.shape[1]
        return self.devices.run(lambda x, c: take(x, c, k), x, self.choices)

    def _put(self, y: tf.Tensor) -> tf.Tensor:
        return self.devices.run(put, y, self.rows)


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices among which tokens are split, and along some axes experts too.

    Args:
      plan: the plan.
      token_axes: mesh axes that split tokens.
      expert_axes: those of them that split the experts.
    """

    plan: ShardingPlan
    token_axes: tuple[str, ...]
    expert_axes: tuple[str, ...]

    @classmethod
    def of(cls, plan: ShardingPlan) -> Devices:
        """Tokens are split like the batch, and along the axes of experts as well.

        The axes of experts are those of activations: weights that are split otherwise
        are gathered.
        """
        batch, experts = (
            plan.activation_sharding([dim]).dims[0] for dim in ("batch", EXPERT_DIM)
        )
        tokens = (*batch, *(axis for axis in experts if axis not in batch))
        return cls(plan, tokens, experts)

    @property
    def count(self) -> int:
        """D."""
        return self.plan.mesh.axes_size(self.token_axes)

    @property
    def experts_split(self) -> int:
        """Among how many devices the experts are divided."""
        return self.plan.mesh.axes_size(self.expert_axes)

    def split(self, x: tf.Tensor, *, last: str | None = None) -> tf.Tensor:
        """`x`, annotated: split among the devices along dim 0.

        The last dim is split by other axes, as weights' dim `last` is.
        """
        axes = () if last is None else self.other_axes(last, x.shape[-1])
        dims = (self.token_axes, *[()] * (x.shape.rank - 2), axes)
        return annotate(x, Sharding(self.plan.mesh, dims))

    def other_axes(self, dim: str, size: int) -> tuple[str, ...]:
        """The axes that split this dim of weights, but for those of tokens.

        No axes if they do not divide its `size`: devices then have all of it.
        """
        axes = as_axes(self.plan.weights.get(dim))
        axes = tuple(axis for axis in axes if axis not in self.token_axes)
        return () if size % self.plan.mesh.axes_size(axes) else axes

    def run(self, fn: Callable, *args: tf.Tensor | tuple, out_dims=None):
        """`fn` of each device's parts of `args`, whose results are put together.

        Args:
          fn: (*parts) -> a tensor or several, the same on devices that hold the same
            tokens.
          *args: tensors that are split along dim 0 as tokens are; others come with
            their mesh axes by dim.
          out_dims: the axes by dim of the results; None: as tokens.
        """
        mesh = self.plan.mesh

        def dims(x):
            return (self.token_axes, *[()] * (x.shape.rank - 1))

        pairs = [arg if isinstance(arg, tuple) else (arg, dims(arg)) for arg in args]
        parts = [auto_to_manual(x, mesh, axes) for x, axes in pairs]
        return tf.nest.map_structure(
            lambda x: manual_to_auto(x, mesh, out_dims or dims(x)), fn(*parts)
        )

    def exchanged(self, x: tf.Tensor) -> tf.Tensor:
        """An all-to-all of sections of rows among the devices that share the experts.

        `x` [D P Q, ...] has Q rows for each of P devices, and afterwards from each.
        """

        def exchange(x):
            axes = self.expert_axes
            return all_to_all(x, self.plan.mesh, axes, split_dim=0, concat_dim=0)

        if not x.dtype.is_floating:
            return self.run(exchange, x)

        @tf.custom_gradient
        def op(x):
            return self.run(exchange, x), lambda dy: self.run(exchange, dy)

        return op(x)

    def in_blocks(
        self, experts: tf.Tensor, num_experts: int, block_size: int
    ) -> tuple[Placement, tf.Tensor]:
        """Sorts choices by expert, in blocks of one expert each.

        Args:
          experts: int32 [D N, k], each of `num_experts`; that number for none.
          num_experts: E.
          block_size: C.

        Returns:
          The placement in R = U C rows, and the expert of each block, int32 [D U].
        """
        choices = experts.shape[0] // self.count * experts.shape[1]
        blocks = blocks_for(choices, num_experts, block_size)

        def place(experts):
            queues = Queues.of(tf.reshape(experts, [-1]), num_experts)
            rows, choices, of_block = queues.in_blocks(blocks, block_size)
            return tf.reshape(rows, experts.shape), choices, of_block

        rows, choices, of_block = self.run(place, experts)
        return Placement(self, rows, choices), of_block

    def product(
        self,
        ctx: Context,
        x: tf.Tensor,
        weight: tf.Tensor,
        spec: WeightSpec,
        experts: tf.Tensor,
    ) -> tf.Tensor:
        """Each block times its expert's matrix.

        Args:
          ctx: gives dtypes; where gradients are wider, this one is added up in theirs.
          x: [D U, C, A].
          weight: [E, A, B], of all devices that share the experts.
          spec: its spec.
          experts: int32 [D U], each block's expert among those of its device.

        Returns:
          [D U, C, B] in the activation dtype.
        """
        mesh, expert_axes = self.plan.mesh, self.expert_axes
        in_axes, out_axes = map(self.other_axes, spec.dims[-2:], spec.shape[-2:])
        summed = [axis for axis in self.token_axes if axis not in expert_axes]
        weight_dims = (expert_axes, in_axes, out_axes)

        def times(x, weight, *, transposed=False):
            before, after = in_axes, out_axes
            if transposed:
                before, after = after, before

            def local(x, weight, experts):
                y = _products(x, weight, experts, transposed=transposed)
                return all_reduce(y, mesh, before)

            return self.run(
                local,
                (x, (self.token_axes, (), before)),
                (weight, weight_dims),
                experts,
                out_dims=(self.token_axes, (), after),
            )

        def gradient_of_weight(x, dy, experts):
            count = weight.shape[0] // self.experts_split
            dtype = ctx.gradient_dtype if ctx.widens_gradients else x.dtype
            dw = _outer_products(x, dy, experts, count)
            return all_reduce(tf.cast(dw, dtype), mesh, summed)

        @tf.custom_gradient
        def op(x, weight):
            low = ctx.cast(weight)

            def gradient(dy):
                dw = self.run(
                    gradient_of_weight,
                    (x, (self.token_axes, (), in_axes)),
                    (dy, (self.token_axes, (), out_axes)),
                    experts,
                    out_dims=weight_dims,
                )
                return times(dy, low, transposed=True), tf.cast(dw, weight.dtype)

            return times(x, low), gradient

        return op(ctx.cast(x), weight)


def _products(x, weight, experts, *, transposed: bool) -> tf.Tensor:
    """[U, C, B] of `x` [U, C, A] and its experts' matrices; transposed, the reverse."""
    if has_kernel(x.shape[:2], weight.shape[0], transposed=transposed):
        return kernel_products(x, weight, experts, transposed=transposed)

    def body(u, y):
        matrix = read(weight, tf.gather(experts, u))
        return [
            u + 1,
            write(y, tf.matmul(read(x, u), matrix, transpose_b=transposed), u),
        ]

    width = weight.shape[1 if transposed else 2]
    return _loop(x.shape[0], body, tf.zeros([*x.shape[:2], width], x.dtype))


def _outer_products(x, dy, experts, count: int) -> tf.Tensor:
    """float32 [E, A, B]: sums of `x` [U, C, A] times `dy` [U, C, B] by expert."""

    def body(u, dw):
        product = summed_products(read(x, u), read(dy, u), tf.float32)
        return [u + 1, add_at(dw, product, tf.gather(experts, u))]

    shape = [count, x.shape[-1], dy.shape[-1]]
    return _loop(x.shape[0], body, tf.zeros(shape, tf.float32))


def _loop(count: int, body: Callable, start: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda u, _: u < count, body, [tf.constant(0), start])[1]
