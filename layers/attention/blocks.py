"""Pairs of a block of queries and a block of keys, and a loop over those in sight.

Dims: B batch, S sequence (query), T sequence (key), U blocks, C tokens of a block.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import gin
import tensorflow as tf

from meshwright.framework.modeling.shapes import shape_of
from meshwright.layers.attention.mask_rules import MaskRule


@gin.constants_from_enum
class Blocks(enum.Enum):
    """Whether attention is computed in blocks, where no size of them is given.

    AUTO: in long sequences, in blocks of a size that was fast. NONE: never, all pairs
    of tokens at once.
    """

    AUTO = "auto"
    NONE = "none"


# By benchmarks/attention_length.py: 8 heads of 64, one row. Estimated for TPU v5e, all
# pairs at once, blocks of 512 and of 1024 take 0.44, 0.59 and 0.42 ms of 1024 tokens,
# 1.46, 1.52 and 1.38 of 2048, 7.2, 4.6 and 4.0 of 4096; of 32768, 297 and 206 ms.
# Measured on two CPU cores, of 4096 tokens 4.4, 1.8 and 2.0 CPU seconds.
AUTO_TOKENS = 2048
"""Sequences from here on are long."""
AUTO_SIZE = 1024
"""Tokens of their blocks."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """How `length` tokens are cut in blocks: `count` of `size`, the last one filled up.

    The blocks are as equal as can be, so that little is filled up.
    """

    length: int
    count: int
    size: int

    @classmethod
    def of(cls, length: int, block_size: int) -> Cut:
        """Blocks of at most `block_size` tokens."""
        count = -(-length // block_size)
        return cls(length, count, -(-length // count))

    @property
    def is_even(self) -> bool:
        """Whether nothing is filled up."""
        return self.count * self.size == self.length

    def apply(self, x: tf.Tensor, dim: int) -> tf.Tensor:
        """A stack of blocks [U, ..., C, ...] of `x` [..., S, ...], S at `dim`."""
        missing = self.count * self.size - self.length
        if missing:
            pads = [(0, 0)] * x.shape.rank
            pads[dim] = (0, missing)
            x = tf.pad(x, pads)
        shape = shape_of(x)
        x = tf.reshape(x, [*shape[:dim], self.count, self.size, *shape[dim + 1 :]])
        return _moved(x, dim, 0)

    def undo(self, stack: tf.Tensor, dim: int) -> tf.Tensor:
        """The reverse of `apply`."""
        x = _moved(stack, 0, dim)
        shape = shape_of(x)
        x = tf.reshape(x, [*shape[:dim], -1, *shape[dim + 2 :]])
        return x if self.is_even else tf.gather(x, tf.range(self.length), axis=dim)


def _moved(x: tf.Tensor, source: int, target: int) -> tf.Tensor:
    order = [d for d in range(x.shape.rank) if d != source]
    order.insert(target, source)
    return tf.transpose(x, order)


def blocks_of(spans: Iterable[tuple[int, int]], size: int) -> set[int]:
    """The numbers of the blocks that have tokens of some spans, see `in_sight`."""
    return {j for low, high in spans for j in range(low // size, high // size + 1)}


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The pairs of blocks of queries and keys that a mask leaves, row by row.

    Args:
      rows: the blocks of queries that see keys, in order.
      first: for each of them the first block of keys that one of its queries sees.
      last: the last one.
      gaps: for each the first block of a gap, and the first one behind it; equal: no
        gap.
    """

    rows: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    gaps: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, queries: Cut, keys: Cut, mask: MaskRule, *, has_gaps: bool = False
    ) -> Pairs:
        """The pairs that `mask` leaves; at least one for every block of queries.

        With `has_gaps` the mask's gaps are left out too.
        """
        by_row = {}
        for i in range(queries.count):
            start = i * queries.size
            end = min(start + queries.size, queries.length) - 1
            spans = mask.in_sight(start, end, keys.length, has_gap=has_gaps)
            if not spans:
                low = min(max(mask.span(start, end)[0] or 0, 0), keys.length - 1)
                spans = [(low, low)]
            by_row[i] = blocks_of(spans, keys.size)
        return cls.of_rows(by_row)

    @classmethod
    def of_rows(cls, by_row: Mapping[int, Set[int]]) -> Pairs:
        """Pairs of each row, the blocks of keys by that of queries; of gaps the widest.

        Other gaps are filled.
        """
        rows = {i: sorted(blocks) for i, blocks in by_row.items() if blocks}
        gaps = []
        for blocks in rows.values():
            steps = [(b - a, a) for a, b in itertools.pairwise(blocks)]
            width, before = max(steps, default=(1, -1), key=lambda step: step[0])
            gaps.append((before + 1, before + width))
        return cls(
            tuple(rows),
            tuple(blocks[0] for blocks in rows.values()),
            tuple(blocks[-1] for blocks in rows.values()),
            tuple((a, b) if a < b else (0, 0) for a, b in gaps),
        )

    @property
    def count(self) -> int:
        """How many pairs are computed."""
        return sum(map(len, self.by_row()))

    def by_row(self) -> list[list[int]]:
        """The blocks of keys of each row."""
        return [
            [j for j in range(first, last + 1) if not begin <= j < end]
            for first, last, (begin, end) in zip(
                self.first, self.last, self.gaps, strict=True
            )
        ]

    @property
    def has_all_rows(self) -> bool:
        """Whether no block of queries is left out before the last row."""
        return self.rows == tuple(range(len(self.rows)))

    def loop(
        self,
        body: Callable[..., Sequence[tf.Tensor]],
        state: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """`state` after `body` (i, j, *state) -> state of each pair.

        A single loop of known length, in which the numbers of the blocks are carried:
        of an inner loop whose length varies, compilers could not tell the cost.
        """
        first, last = tf.constant(self.first), tf.constant(self.last)
        rows = None if self.has_all_rows else tf.constant(self.rows)
        count = self.count

        def step(n, row, j, *state):
            i = row if rows is None else tf.gather(rows, row)
            ends = j == tf.gather(last, row)
            below = tf.minimum(row + 1, len(self.rows) - 1)
            next_row = tf.where(ends, below, row)
            next_j = tf.where(ends, tf.gather(first, below), self._after(row, j))
            return [n + 1, next_row, next_j, *body(i, j, *state)]

        zero = tf.constant(0)
        start = [zero, zero, tf.constant(self.first[0]), *state]
        return list(tf.while_loop(lambda n, *_: n < count, step, start)[3:])

    def _after(self, row: tf.Tensor, j: tf.Tensor) -> tf.Tensor:
        """The block of keys behind `j` in a row that goes on."""
        if not any(begin < end for begin, end in self.gaps):
            return j + 1
        gap = tf.gather(tf.constant(self.gaps), row)
        return tf.where(j + 1 == gap[0], gap[1], j + 1)
