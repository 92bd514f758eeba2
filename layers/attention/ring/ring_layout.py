"""Where the tokens of a sequence lie in a ring of devices, and what each step computes.

Dims: S sequence, R devices of the ring, U blocks of a device, C tokens of a block.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.modeling.shapes import shape_of
from meshwright.layers.attention.blocks import Cut, Pairs
from meshwright.layers.attention.mask_rules import MaskRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """`length` tokens on `devices`, in `count` blocks of `size` on each.

    Token t is on device t div (U * C), or, in stripes (Brandon et al. 2023), on device
    t mod R. What is missing is filled up at the end.
    """

    length: int
    devices: int
    count: int
    size: int
    in_stripes: bool

    @classmethod
    def of(
        cls, length: int, devices: int, block_size: int | None, *, in_stripes: bool
    ) -> Layout:
        """Blocks of at most `block_size` tokens; None: one block to a device."""
        least = -(-length // devices)
        block_size = block_size or least + devices
        count = -(-least // block_size)
        while True:
            # What is striped is exchanged in equal parts.
            unit = math.lcm(count, devices if in_stripes else 1)
            size = -(-least // unit) * unit // count
            if size <= block_size:
                return cls(
                    length=length,
                    devices=devices,
                    count=count,
                    size=size,
                    in_stripes=in_stripes,
                )
            count += 1

    @property
    def part(self) -> int:
        """The tokens of a device."""
        return self.count * self.size

    @property
    def stride(self) -> int:
        """The index of a device's token minus that of the one before it."""
        return self.devices if self.in_stripes else 1

    def start(self, device: int | tf.Tensor) -> int | tf.Tensor:
        """The index of a device's first token."""
        return device if self.in_stripes else device * self.part

    @property
    def filled_up_from(self) -> int | None:
        """The index of the first token that is filled up, None if none is."""
        is_full = self.devices * self.part == self.length
        return None if is_full else self.length

    def apply(
        self, ctx: Context, x: tf.Tensor, dim: int, dims: Sequence[str]
    ) -> tf.Tensor:
        """A stack of all devices' blocks [R * U, ..., C, ...] of `x` [..., S, ...].

        Args:
          ctx: context, whose plan says what splits "sequence".
          x: S at `dim`.
          dim: that dim.
          dims: the names of its dims for the plan; "sequence" at `dim`.
        """
        before, after = dims[:dim], dims[dim + 1 :]
        missing = self.devices * self.part - self.length
        if missing:
            pads = [(0, 0)] * x.shape.rank
            pads[dim] = (0, missing)
            x = tf.pad(x, pads)
        x = ctx.split(x, dims)
        if self.in_stripes:
            x = _unfolded(x, dim, self.part, self.devices)
            x = ctx.split(x, [*before, "", "sequence", *after])
            x = _folded(_exchanged(x, dim), dim)
        stack = self._cut.apply(ctx.split(x, dims), dim)
        return ctx.split(stack, ("sequence", *before, "", *after))

    def undo(
        self, ctx: Context, stack: tf.Tensor, dim: int, dims: Sequence[str]
    ) -> tf.Tensor:
        """The reverse of `apply`."""
        before, after = dims[:dim], dims[dim + 1 :]
        stack = ctx.split(stack, ("sequence", *before, "", *after))
        x = ctx.split(self._cut.undo(stack, dim), dims)
        if self.in_stripes:
            x = _exchanged(_unfolded(x, dim, self.devices, self.part), dim)
            x = ctx.split(x, [*before, "sequence", "", *after])
            x = _folded(x, dim)
        sizes = shape_of(x)
        sizes[dim] = self.length
        return tf.slice(x, [0] * x.shape.rank, sizes)

    @property
    def _cut(self) -> Cut:
        count = self.devices * self.count
        return Cut(count * self.size, count, self.size)

    def seen(
        self, keys: Layout, mask: MaskRule, i: int, device: int, source: int
    ) -> tuple[int, int] | None:
        """The first and last of the source's blocks of keys that block `i` sees."""
        start = self.start(device) + self.stride * i * self.size
        if start >= self.length:
            return None
        end = min(start + self.stride * (self.size - 1), self.length - 1)
        low, high = mask.span(start, end)
        high = keys.length - 1 if high is None else min(high, keys.length - 1)
        first = keys.start(source)
        low = 0 if low is None else max(-((first - low) // keys.stride), 0)
        high = min((high - first) // keys.stride, keys.part - 1)
        return None if low > high else (low // keys.size, high // keys.size)

    def pairs(self, keys: Layout, mask: MaskRule, step: int) -> Pairs:
        """The pairs that some device computes with the keys of `step` devices before.

        All devices compute these, as they wait for each other.
        """
        rows = {}
        for i in range(self.count):
            ends = [
                self.seen(keys, mask, i, device, (device - step) % self.devices)
                for device in range(self.devices)
            ]
            ends = [pair for pair in ends if pair is not None]
            if ends:
                rows[i] = (min(low for low, _ in ends), max(high for _, high in ends))
        return Pairs(
            tuple(rows),
            tuple(low for low, _ in rows.values()),
            tuple(high for _, high in rows.values()),
        )


def _unfolded(x: tf.Tensor, dim: int, major: int, minor: int) -> tf.Tensor:
    shape = shape_of(x)
    return tf.reshape(x, [*shape[:dim], major, minor, *shape[dim + 1 :]])


def _folded(x: tf.Tensor, dim: int) -> tf.Tensor:
    shape = shape_of(x)
    size = shape[dim] * shape[dim + 1]
    return tf.reshape(x, [*shape[:dim], size, *shape[dim + 2 :]])


def _exchanged(x: tf.Tensor, dim: int) -> tf.Tensor:
    order = list(range(x.shape.rank))
    order[dim], order[dim + 1] = dim + 1, dim
    return tf.transpose(x, order)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Equal steps of the ring, one after the other.

    Args:
      steps: how many there are.
      first: how many devices before the own one the first step's keys come from.
      pairs: what each step computes.
      came: by how many devices keys were passed on before each, but the first of all.
      goes: by how many they are passed on after each; 0: not at all, after the last of
        all, which is a run of its own.
    """

    steps: int
    first: int
    pairs: Pairs
    came: int
    goes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingSchedule:
    """What a ring computes, and how queries and keys lie in it.

    Args:
      queries: the layout of queries.
      keys: that of keys.
      runs: the steps in which some device sees a key.
    """

    queries: Layout
    keys: Layout
    runs: tuple[Run, ...]

    @classmethod
    def of(
        cls,
        queries: int,
        keys: int,
        devices: int,
        block_size: int | None,
        mask: MaskRule,
    ) -> RingSchedule:
        """The schedule of either layout that computes fewer pairs, for so many tokens.

        In stripes every device sees about half of the keys of every other under a
        causal mask. Otherwise the last device sees all, and the others wait for it; but
        then a window reaches near devices only.

        Raises:
          ValueError: by the mask's span no query sees a key.
        """
        schedules = [
            cls._laid_out(
                *(
                    Layout.of(length, devices, block_size, in_stripes=in_stripes)
                    for length in (queries, keys)
                ),
                mask,
            )
            for in_stripes in (False, True)
        ]
        return min(schedules, key=lambda schedule: schedule.pairs_of_tokens)

    @classmethod
    def _laid_out(cls, queries: Layout, keys: Layout, mask: MaskRule) -> RingSchedule:
        by_step = [queries.pairs(keys, mask, s) for s in range(queries.devices)]
        steps = [s for s, pairs in enumerate(by_step) if pairs.rows]
        if not steps:
            raise ValueError(
                f"attention in a ring: by its span {mask} hides all {keys.length} keys "
                "from all queries: correct span, which may return more than is seen"
            )
        hops = [b - a for a, b in itertools.pairwise(steps)]
        came = [*hops[:1], *hops] or [0]
        kinds = zip((by_step[s] for s in steps), came, [*hops, 0], strict=True)
        runs, at = [], 0
        for (pairs, came, goes), group in itertools.groupby(kinds):
            count = len(list(group))
            runs.append(
                Run(steps=count, first=steps[at], pairs=pairs, came=came, goes=goes)
            )
            at += count
        return cls(queries=queries, keys=keys, runs=tuple(runs))

    @property
    def pairs_of_tokens(self) -> int:
        """How many pairs of a query and a key each device computes."""
        blocks = sum(run.steps * run.pairs.count for run in self.runs)
        return blocks * self.queries.size * self.keys.size

    @property
    def back(self) -> int:
        """By how many devices what came to the last step is passed on to come home."""
        return -self.runs[-1].first % self.queries.devices
