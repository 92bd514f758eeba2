"""Experts that are never full: tokens sorted by expert, in blocks of one expert each.

The products are those of MegaBlocks (Gale et al. 2022), in a loop over blocks. Where
experts are split, tokens travel by all-to-all in rounds: each device sends each other
at most Q rows, first those that come first, until none are left. Shapes are static and
no token is dropped, however many want the same expert.

Dims: D devices that have tokens, P devices that share the experts, N tokens of a
device, k experts of a token, M model, E experts, C rows of a block, Q rows that a
device sends another in a round.

  placed   by a sort of N k choices
  rows     N M    -> P Q M    split along D
  arrived  P Q M  -> P Q M    one AllToAll
  blocks   P Q M  -> U C M    sorted by expert; U C is at most P Q + E (C - 1) / P
  experts  U C M  -> U C M
  back     the same in reverse order
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import Checked, bounded
from meshwright.framework.modeling.layer import Context
from meshwright.framework.modeling.recompute import save_name
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.experts.local_ops import Devices, Placement
from meshwright.layers.experts.placement import Queues


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropless(Checked):
    """How tokens get to experts that take any number of them.

    Args:
      block_size: C, the most rows of a block. Each expert's last block is filled up, so
        on average it costs half a block of each expert.
      exchange_factor: where experts are split, Q is so many times N k / P, what a
        device sends another when all experts have the same load. What does not fit
        goes in further rounds, which compute their forward part twice. With P or more
        there is always one round, and memory for the worst case.

    Raises:
      ValueError: a number is out of range.
    """

    block_size: int = bounded(128, at_least=1)
    exchange_factor: float = bounded(1.5, above=0)

    def fprop(
        self,
        ctx: Context,
        layer: Callable,
        theta: NestedMap,
        x: tf.Tensor,
        experts: tf.Tensor,
        weights: tf.Tensor,
        *,
        num_experts: int,
    ) -> tf.Tensor:
        """The weighted sum of the outputs of each token's experts.

        Args:
          ctx: context.
          layer: (theta, blocks [D U, C, M], int32 [D U] their experts, devices) ->
            outputs [D U, C, M]: the experts.
          theta: its weights, whose dim 0 is E.
          x: [D N, M].
          experts: int32 [D N, k]; E for none.
          weights: float32 [D N, k].
          num_experts: E.

        Returns:
          [D N, M] in the activation dtype.

        Raises:
          ValueError: the plan's axes do not divide the experts.
        """
        devices = Devices.of(ctx.plan)
        if num_experts % devices.experts_split:
            raise ValueError(
                f"layer {ctx.path!r}: {num_experts} experts do not divide among "
                f"{devices.experts_split} devices: set num_experts to a multiple of "
                f"{devices.experts_split}, or change "
                "ShardingPlan.activations['experts']"
            )
        missing = -x.shape[0] % devices.count
        x, experts, weights = (
            devices.split(tf.pad(t, [(0, missing), (0, 0)], constant_values=value))
            for t, value in ((ctx.cast(x), 0), (experts, num_experts), (weights, 0))
        )
        run = _Run(self, ctx, layer, devices, num_experts // devices.experts_split)
        if devices.experts_split == 1:
            out = run.local(theta, x, experts, weights)
        else:
            out = run.in_rounds(theta, x, experts, weights)
        return out[: out.shape[0] - missing] if missing else out


@dataclasses.dataclass(frozen=True)
class _Run:
    """One call of `Dropless.fprop`; `num_experts` is that of a device."""

    config: Dropless
    ctx: Context
    layer: Callable
    devices: Devices
    num_experts: int

    def local(self, theta, x, experts, weights=None) -> tf.Tensor:
        """[D N, M]: each token goes to experts of its own device."""
        k, devices = experts.shape[1], self.devices
        size = min(self.config.block_size, x.shape[0] // devices.count * k)
        placement, of_block = devices.in_blocks(experts, self.num_experts, size)
        rows = placement.take(x)
        blocks = devices.split(tf.reshape(rows, [-1, size, x.shape[1]]))
        blocks = save_name(blocks, "dispatched")
        out = self.layer(theta, blocks, of_block, devices)
        out = devices.split(tf.reshape(out, [-1, x.shape[1]]))
        if weights is not None:
            out = save_name(out, "expert_out")
            out *= self.ctx.cast(placement.take_choices(weights))[:, None]
        return placement.put(out)

    def in_rounds(self, theta, x, experts, weights) -> tf.Tensor:
        """[D N, M]: tokens travel to the devices that have their experts."""
        shares = self.devices.experts_split
        choices = math.prod(experts.shape) // self.devices.count
        even = self.config.exchange_factor * choices / shares
        size = min(math.ceil(even), choices)
        count = self._rounds(experts, size)
        inputs = NestedMap(theta=theta, x=x, weights=weights)

        def of_round(number, inputs):
            return self._round(number, size, experts, inputs)

        first = of_round(tf.constant(0), inputs)
        if size == choices:
            return first
        return first + _others(of_round, count, inputs)

    def _round(self, number, size: int, experts, inputs: NestedMap) -> tf.Tensor:
        """What those tokens add that travel in the round of this number."""
        devices = self.devices

        def place(experts, number):
            queues = self._queues(experts)
            rows, choices = queues.window(number, size)
            return tf.reshape(rows, experts.shape), choices

        rows, choices = devices.run(place, experts, (number, ()))
        sent = Placement(devices, rows, choices)
        # Beside the tokens their experts' numbers, from 1: 0 is a row that has none.
        of_rows = sent.take_choices(experts % self.num_experts + 1)
        arrived = devices.exchanged(sent.take(inputs.x))
        of_rows = devices.exchanged(of_rows)
        of_rows = tf.where(of_rows > 0, of_rows - 1, self.num_experts)[:, None]
        out = devices.exchanged(self.local(inputs.theta, arrived, of_rows))
        out = save_name(out, "expert_out")
        out *= self.ctx.cast(sent.take_choices(inputs.weights))[:, None]
        return sent.put(out)

    def _queues(self, experts: tf.Tensor) -> Queues:
        """One for each device that shares the experts."""
        keys = tf.reshape(experts, [-1]) // self.num_experts
        return Queues.of(keys, self.devices.experts_split)

    def _rounds(self, experts: tf.Tensor, size: int) -> tf.Tensor:
        """int32 scalar: how many rounds the longest queue of any device needs."""
        counts = self.devices.run(lambda e: self._queues(e).counts, experts)
        return -(-tf.reduce_max(counts) // size)


def _others(of_round: Callable, count: tf.Tensor, inputs: NestedMap) -> tf.Tensor:
    """The sum of all rounds but the first; few steps have any.

    Their number is not known beforehand, so they keep nothing: the gradient computes
    each again.
    """

    def total(*flat):
        def loop(body, start):
            def step(number, *sums):
                return [number + 1, *body(number, *sums)]

            state = [tf.constant(1), *start]
            return tf.while_loop(
                lambda number, *_: number < count,
                step,
                state,
                name="expected_0_trips",  # For estimates of a step's time.
            )[1:]

        def add(number, out):
            return [out + of_round(number, inputs.pack(flat))]

        (out,) = loop(add, [tf.zeros_like(inputs.x)])

        def gradient(dy):
            def add_gradients(number, *sums):
                here = [tf.identity(t) for t in flat]
                with tf.GradientTape() as tape:
                    tape.watch(here)
                    y = of_round(number, inputs.pack(here))
                news = tape.gradient(y, here, dy)
                return [total + new for total, new in zip(sums, news, strict=True)]

            return loop(add_gradients, [tf.zeros_like(t) for t in flat])

        return out, gradient

    return tf.custom_gradient(total)(*inputs.leaves())
