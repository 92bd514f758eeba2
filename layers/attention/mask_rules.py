"""Which keys a query sees: rules of positions and segments.

Dims: B batch, S sequence (query), T sequence (key).
"""

from __future__ import annotations

import dataclasses
import enum

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import Checked, bounded


@gin.constants_from_enum
class MaskKind(enum.Enum):
    """Which keys a query sees by their position: all, or only those up to its own."""

    FULL = "full"
    CAUSAL = "causal"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Where tokens are. All have a dim of queries or keys, and one for the batch.

    Args:
      index: int32, the number in the row.
      segment: int32, the segment, None where rows are not packed.
      position: int32, the position in the segment; the index where it is not given.
    """

    index: tf.Tensor
    segment: tf.Tensor | None = None
    position: tf.Tensor | None = None

    def expanded(self, axis: int) -> Tokens:
        """With a new dim at `axis`."""
        parts = (self.index, self.segment, self.position)
        index, segment, position = (
            None if part is None else tf.expand_dims(part, axis) for part in parts
        )
        return Tokens(
            index=index,
            segment=segment,
            position=index if position is None else position,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskRule(Checked):
    """A rule by which queries see keys: subclass it to say another.

    Packed segments and padded keys are hidden whatever the rule says.
    """

    def visible(self, query: Tokens, key: Tokens) -> tf.Tensor | None:
        """Whether each query sees each key.

        Args:
          query: tokens [B or 1, S, 1].
          key: tokens [B or 1, 1, T].

        Returns:
          bool, of a shape that broadcasts to [B, S, T]; None: every query sees all.
        """
        raise NotImplementedError(f"{type(self).__name__}.visible")

    @property
    def reads_positions(self) -> bool:
        """Whether `visible` reads positions, which packed rows must have then."""
        return False

    def span(self, first: int, last: int) -> tuple[int | None, int | None]:
        """The first and the last key that any of some queries sees, by index.

        Attention in blocks computes no blocks outside of it.

        Args:
          first: index of the first of the queries.
          last: index of the last.

        Returns:
          Indices, also beyond the ends of the row; None: no bound.
        """
        del first, last
        return None, None

    def gap(self, first: int, last: int) -> tuple[int, int]:
        """Where in the span none of some queries sees a key, of a row not packed.

        Attention in blocks computes no blocks inside of it. In packed rows, and in rows
        that begin with padding, it does.

        Args:
          first: index of the first of the queries.
          last: index of the last.

        Returns:
          The index where it begins and that of the first key behind it; equal: nowhere.
        """
        del first, last
        return 0, 0

    def in_sight(
        self, first: int, last: int, keys: int, *, has_gap: bool = False
    ) -> list[tuple[int, int]]:
        """The spans of keys that any of some queries sees, each with first and last.

        Args:
          first: index of the first of the queries.
          last: index of the last.
          keys: how many keys there are.
          has_gap: whether what `gap` says is left out.

        Returns:
          None, one or two spans, within the row.
        """
        low, high = self.span(first, last)
        low = 0 if low is None else max(low, 0)
        high = keys - 1 if high is None else min(high, keys - 1)
        begin, end = self.gap(first, last) if has_gap else (0, 0)
        spans = [(low, high)]
        if begin < end:
            spans = [(low, min(high, begin - 1)), (max(low, end), high)]
        return [span for span in spans if span[0] <= span[1]]


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class NearMask(MaskRule):
    """Keys near the query, by index: a sliding window.

    Args:
      left: how many keys before itself a query sees; None: all.
      right: how many after itself; None: all; 0 is causal.
      first: how many keys at the beginning of the row or segment a query sees besides,
        but for those that are too far after it: the attention sinks of Xiao et al.
        2023, section 3.1.

    Raises:
      ValueError: a number below 0.
    """

    left: int | None = bounded(None, at_least=0)
    right: int | None = bounded(None, at_least=0)
    first: int = bounded(0, at_least=0)

    @property
    def reads_positions(self) -> bool:
        return self.left is not None and self.first > 0

    def visible(self, query: Tokens, key: Tokens) -> tf.Tensor | None:
        near = None
        if self.left is not None:
            near = key.index + self.left >= query.index
            if self.first:
                near |= key.position < self.first
        if self.right is not None:
            early = query.index + self.right >= key.index
            near = early if near is None else early & near
        return near

    def span(self, first: int, last: int) -> tuple[int | None, int | None]:
        # In a packed row first keys are anywhere.
        return (
            None if self.left is None or self.first else first - self.left,
            None if self.right is None else last + self.right,
        )

    def gap(self, first: int, last: int) -> tuple[int, int]:
        del last
        has_gap = self.left is not None and 0 < self.first < first - self.left
        return (self.first, first - self.left) if has_gap else (0, 0)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixMask(MaskRule):
    """The first keys of a row or segment, and those up to the query's own.

    The prefix language model of Raffel et al. 2020, section 3.2.1.

    Args:
      length: how many keys every query of the row or segment sees.

    Raises:
      ValueError: a length below 0.
    """

    length: int = bounded(at_least=0)

    @property
    def reads_positions(self) -> bool:
        return self.length > 0

    def visible(self, query: Tokens, key: Tokens) -> tf.Tensor:
        return (query.index >= key.index) | (key.position < self.length)

    def span(self, first: int, last: int) -> tuple[int | None, int | None]:
        # In a packed row prefixes are anywhere, but a query's own begins before it.
        return None, last + max(self.length - 1, 0)


def rule_of(mask: MaskKind | MaskRule) -> MaskRule:
    """The rule that `mask` is or stands for."""
    if isinstance(mask, MaskRule):
        return mask
    return NearMask(right=0 if mask is MaskKind.CAUSAL else None)


def kind_of(mask: MaskKind | MaskRule) -> MaskKind:
    """CAUSAL if the first query of a row sees no later keys, otherwise FULL."""
    last = rule_of(mask).span(0, 0)[1]
    return MaskKind.CAUSAL if last is not None and last <= 0 else MaskKind.FULL


def reach_after(mask: MaskKind | MaskRule, queries: int, together: int) -> int | None:
    """How far after the first of some queries the last key is that any of them sees.

    Args:
      mask: which keys a query sees by position.
      queries: how many there are.
      together: how many are taken together, from multiples of it on.

    Returns:
      The largest distance, at least 0; None: no bound.
    """
    rule, most = rule_of(mask), 0
    for first in range(0, queries, together):
        last = rule.span(first, min(first + together, queries) - 1)[1]
        if last is None:
            return None
        most = max(most, last - first)
    return most


def visibility(
    mask: MaskKind | MaskRule,
    queries: Tokens,
    keys: Tokens,
    paddings: tf.Tensor | None = None,
) -> tf.Tensor | None:
    """Which keys each query sees.

    Args:
      mask: which keys a query sees by position.
      queries: tokens [B or 1, S].
      keys: tokens [B or 1, T]; with segments if the queries have them: queries see
        keys of the same segment.
      paddings: [B, T], 1 at keys that no query sees; or [B, S, T], of each query.

    Returns:
      bool [B or 1, S or 1, T], query before key, or None where every key is seen.

    Raises:
      ValueError: the mask reads positions in segments that have none.
    """
    rule = rule_of(mask)
    if rule.reads_positions and keys.segment is not None and keys.position is None:
        raise ValueError(
            f"{rule} reads positions in packed segments, but segment_ids are given "
            "without them: give segment_positions too"
        )
    queries, keys = queries.expanded(2), keys.expanded(1)
    parts = [rule.visible(queries, keys)]
    if queries.segment is not None:
        parts.append(queries.segment == keys.segment)
    if paddings is not None:
        of_each = paddings if len(paddings.shape) == 3 else paddings[:, None, :]
        parts.append(of_each == 0)
    visible = None
    for part in parts:
        if part is not None:
            visible = part if visible is None else visible & part
    return visible
