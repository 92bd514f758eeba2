"""Vectors of relative positions, added to keys and to values.

A vector is that of a key's position minus the query's, r. It is a product of features
of r with a weight. Of all pairs, or of a pair of blocks, there are fewer distances than
pairs: products are computed of each query and distance, and then moved to where keys
are. Blocks read the vectors of their distances from a table.

Distances are those of indices: inside a packed segment, whose tokens are adjacent, they
are distances of positions too.

Dims: B batch, S sequence (query), T sequence (key), P distances, F features, M model, N
heads, D head size, R distances from a key to the next.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import gin
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright.framework.modeling.checks import Checked, bounded
from meshwright.framework.modeling.initializers import Constant, FanIn, Normal
from meshwright.framework.modeling.layer import Context, WeightSpec
from meshwright.framework.modeling.recompute import computed_once
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.positions import sinusoids
from meshwright.layers.basic.linear import add_bias, contract

PND = ("distance", "heads", "head_dim")
TABLE = ("", "heads", "distance", "head_dim")


def by_key(x: tf.Tensor, keys: int) -> tf.Tensor:
    """[..., S, P] by distance -> [..., S, T] by key: (s, t) is from (s, t - s + S - 1).

    P is S + T or one less. Each row is the row above moved by one, so rows end to end
    are read with a stride one short (Dai et al. 2019, appendix B). A gather's gradient
    would be a scatter.
    """
    *lead, size, distances = shape_of(x)
    stride = distances - 1
    ends = tf.reshape(x, [*lead, -1])[..., size - 1 : size - 1 + size * stride]
    return tf.reshape(ends, [*lead, size, stride])[..., :keys]


def by_distance(x: tf.Tensor) -> tf.Tensor:
    """[..., S, T] by key -> [..., S, S + T] by distance, the transpose of `by_key`."""
    *lead, size, keys = shape_of(x)
    beside = [(0, 0)] * (x.shape.rank - 1)
    ends = tf.reshape(tf.pad(x, [*beside, (0, size - 1)]), [*lead, -1])
    ends = tf.pad(ends, [*beside[1:], (size - 1, 1)])
    return tf.reshape(ends, [*lead, size, size + keys])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistanceVectors:
    """Vectors of relative positions.

    Args:
      features: makes float32 [P, F] of relative positions, int32 [P].
      weight: [F, N, D], what turns features into vectors.
      shift: [N, D], what is added to queries in products with vectors, or None.
      reach: beyond this distance, to either side, all vectors are the same; None:
        nowhere.
    """

    features: Callable[[tf.Tensor], tf.Tensor]
    weight: tf.Tensor
    shift: tf.Tensor | None = None
    reach: int | None = None

    def products(
        self,
        ctx: Context,
        q: tf.Tensor,
        keys: int,
        offset: int | tf.Tensor = 0,
        relative: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Products of queries and the vectors of their distances to keys.

        Args:
          ctx: context.
          q: [B, S, N, D], scaled.
          keys: T.
          offset: the index of the first key minus that of the first query.
          relative: int32 [T], see `Logits`.

        Returns:
          [B, N, S, T] in the activation dtype.
        """
        if self.shift is not None:
            q = add_bias(ctx, q, self.shift)
        if relative is None and q.shape[1] == 1:
            relative = tf.range(keys) + offset
        if relative is not None:  # Fewer products than if distances were projected.
            q = tf.einsum("bsnd,fnd->bsnf", q, ctx.cast(self.weight))
            features = ctx.cast(self.features(relative))
            return tf.einsum("bsnf,tf->bnst", q, features)
        vectors = self._of_pairs(ctx, q.shape[1], keys, offset)
        return by_key(tf.einsum("bsnd,pnd->bnsp", q, vectors), keys)

    def sums(
        self,
        ctx: Context,
        probs: tf.Tensor,
        offset: int | tf.Tensor = 0,
        relative: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Sums [B, S, N, D] of vectors, weighted by `probs` [B, N, S, T]."""
        *_, queries, keys = probs.shape
        if relative is None and queries == 1:
            relative = tf.range(keys) + offset
        if relative is not None:
            features = ctx.cast(self.features(relative))
            sums = tf.einsum("bnst,tf->bsnf", probs, features)
            return tf.einsum("bsnf,fnd->bsnd", sums, ctx.cast(self.weight))
        vectors = self._of_pairs(ctx, queries, keys, offset)
        return tf.einsum("bnsp,pnd->bsnd", by_distance(probs), vectors)

    def table(self, ctx: Context, rows: TableRows) -> tf.Tensor:
        """The vectors [R, N, P, D] that blocks read, see `TableRows`.

        Each device of a split sequence computes some; then all have all.
        """
        vectors = self._of(ctx, rows.relative(), "sequence")
        vectors = ctx.split(vectors, PND)
        vectors = tf.reshape(vectors, [rows.stride, rows.count, *vectors.shape[1:]])
        return ctx.split(tf.transpose(vectors, [0, 2, 1, 3]), TABLE)

    def _of_pairs(self, ctx, queries: int, keys: int, offset) -> tf.Tensor:
        """The vectors [P, N, D] that `by_key` moves."""
        relative = tf.range(queries + keys) - (queries - 1) + offset
        return self._of(ctx, relative, PND[0])

    def _of(self, ctx, relative: tf.Tensor, dim: str) -> tf.Tensor:
        vectors = contract(ctx, self.features(relative), self.weight)
        return ctx.split(vectors, (dim, *PND[1:]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRows:
    """Which relative positions a table has: m * `stride` + residue, by residue and m.

    Args:
      stride: the index of a key, or query, minus that of the one before it.
      lowest: the least m.
      count: how many there are.
      seen: how many a pair of blocks reads.
    """

    stride: int
    lowest: int
    count: int
    seen: int

    @classmethod
    def of(
        cls,
        *,
        queries: int,
        keys: int,
        sizes: tuple[int, int],
        stride: int,
        reach: int | None,
        after: int | None,
    ) -> TableRows:
        """The rows that blocks may read.

        Args:
          queries: one above the largest index of a query, filled up ones too.
          keys: likewise of a key.
          sizes: the tokens of a block of queries, and of one of keys.
          stride: see `TableRows`.
          reach: see `DistanceVectors`.
          after: how far after the first query of a block keys are in sight; in stripes,
            after the first of all devices' blocks. None: no bound.
        """
        seen = sum(sizes)
        lowest, highest = -math.ceil(queries / stride), math.ceil(keys / stride)
        if after is not None:  # A pair with a key in sight reaches no further.
            highest = min(highest, after // stride + 1 + sizes[1])
        if reach is not None:
            # Where a read beyond an end begins at it instead, all vectors are the same.
            most = math.ceil(reach / stride) + seen
            lowest, highest = max(lowest, -most), min(highest, most)
        count = highest - lowest + 1
        return cls(stride=stride, lowest=lowest, count=count, seen=seen)

    def relative(self) -> tf.Tensor:
        """The relative positions, int32 [R * P]."""
        m = tf.range(self.lowest, self.lowest + self.count) * self.stride
        return tf.reshape(tf.range(self.stride)[:, None] + m, [-1])

    def start(self, offset: int | tf.Tensor, queries: int) -> tf.Tensor:
        """Where a pair of blocks reads: a residue, and a row of the table.

        Args:
          offset: the index of the first key minus that of the first query.
          queries: how many queries there are.
        """
        row = offset // self.stride - (queries - 1) - self.lowest
        row = tf.clip_by_value(row, 0, self.count - self.seen)
        return tf.stack([offset % self.stride, row])

    def read(self, table: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
        """The rows [..., N, 2 C, D] that begin there, of a table [..., R, N, P, D]."""
        *lead, _, heads, _, dims = shape_of(table)
        sizes = [*lead, 1, heads, self.seen, dims]
        piece = xla.dynamic_slice(table, self._place(table, start), sizes)
        return tf.squeeze(piece, axis=len(lead))

    def add_at(self, table: tf.Tensor, rows: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
        """`table` with `rows` added where `read` reads them."""
        # See `entries.add_at`.
        total = computed_once(self.read(table, start) + tf.cast(rows, table.dtype))[0]
        total = tf.expand_dims(total, table.shape.rank - 4)
        return xla.dynamic_update_slice(table, total, self._place(table, start))

    def _place(self, table: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
        zero = tf.constant(0)
        lead = [zero] * (table.shape.rank - 4)
        return tf.stack([*lead, start[0], zero, start[1], zero])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativePositions(Checked):
    """How relative positions enter attention where they have vectors."""

    @property
    def num_tables(self) -> int:
        """How many vectors a relative position has: for keys, and maybe for values."""
        return 1

    def weights(self, model_dims: int, num_heads: int, head_dim: int) -> NestedMap:
        """The weights of a layer."""
        raise NotImplementedError(f"{type(self).__name__}.weights")

    def for_keys(
        self, ctx: Context, theta: NestedMap, q: tf.Tensor, scale: float
    ) -> tf.Tensor:
        """What keys are multiplied by, of queries [B, S, N, D] times `scale`."""
        del ctx, theta, scale
        return q

    def of_keys(
        self, theta: NestedMap, num_heads: int, scale: float
    ) -> DistanceVectors:
        """What is added to keys, for queries that were multiplied by `scale`."""
        raise NotImplementedError(f"{type(self).__name__}.of_keys")

    def of_values(self, theta: NestedMap, num_heads: int) -> DistanceVectors | None:
        """What is added to values, if anything is."""
        del theta, num_heads


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeVectors(RelativePositions):
    """A learned vector for each distance (Shaw et al. 2018, section 3.2).

    Args:
      max_distance: k: keys further away, to either side, are as if they were k away.
      has_values: whether values get vectors too, not keys only.
      by_head: whether each head has separate vectors; otherwise heads share them.

    Raises:
      ValueError: a distance below 1.
    """

    max_distance: int = bounded(16, at_least=1)
    has_values: bool = True
    by_head: bool = False

    @property
    def num_tables(self) -> int:
        return 2 if self.has_values else 1

    def weights(self, model_dims: int, num_heads: int, head_dim: int) -> NestedMap:
        del model_dims
        count = 2 * self.max_distance + 1
        spec = WeightSpec(
            shape=(count, num_heads, head_dim) if self.by_head else (count, head_dim),
            dims=PND if self.by_head else (PND[0], PND[2]),
            initializer=Normal(head_dim**-0.5),
        )
        names = ["to_keys", "to_values"] if self.has_values else ["to_keys"]
        return NestedMap(dict.fromkeys(names, spec))

    def of_keys(
        self, theta: NestedMap, num_heads: int, scale: float
    ) -> DistanceVectors:
        del scale
        return self._vectors(theta.to_keys, num_heads)

    def of_values(self, theta: NestedMap, num_heads: int) -> DistanceVectors | None:
        return self._vectors(theta.to_values, num_heads) if self.has_values else None

    def _vectors(self, weight: tf.Tensor, num_heads: int) -> DistanceVectors:
        reach = self.max_distance
        count = 2 * reach + 1
        if not self.by_head:
            shape = [count, num_heads, weight.shape[-1]]
            weight = tf.broadcast_to(weight[:, None, :], shape)

        def features(relative: tf.Tensor) -> tf.Tensor:
            return tf.one_hot(tf.clip_by_value(relative, -reach, reach) + reach, count)

        return DistanceVectors(features=features, weight=weight, reach=reach)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeSinusoids(RelativePositions):
    """Transformer-XL's positions (Dai et al. 2019, section 3.3).

    The product of query i and key j is (q_i + u) k_j + (q_i + v) r_(i-j), where r is a
    projection of the distance's sinusoids, and u and v are weights of each head.

    Args:
      max_timescale: the wave lengths of sinusoids go from 2 pi up to near 2 pi times
        this.

    Raises:
      ValueError: a number that is not above 1; an odd M.
    """

    max_timescale: float = bounded(10000.0, above=1)

    def weights(self, model_dims: int, num_heads: int, head_dim: int) -> NestedMap:
        check_pairs(model_dims)
        bias = WeightSpec(
            shape=(num_heads, head_dim), dims=PND[1:], initializer=Constant(0.0)
        )
        w_r = WeightSpec(
            shape=(model_dims, num_heads, head_dim),
            dims=("model", *PND[1:]),
            initializer=FanIn(),
        )
        return NestedMap(w_r=w_r, u=bias, v=bias)

    def for_keys(
        self, ctx: Context, theta: NestedMap, q: tf.Tensor, scale: float
    ) -> tf.Tensor:
        return add_bias(ctx, q, theta.u * scale)

    def of_keys(
        self, theta: NestedMap, num_heads: int, scale: float
    ) -> DistanceVectors:
        del num_heads

        def features(relative: tf.Tensor) -> tf.Tensor:
            dims = theta.w_r.shape[0]
            return sinusoids(-relative, dims, max_timescale=self.max_timescale)

        # `for_keys` has added u already.
        shift = (theta.v - theta.u) * scale
        return DistanceVectors(features=features, weight=theta.w_r, shift=shift)


def check_pairs(model_dims: int) -> None:
    """Refuses an odd M.

    Raises:
      ValueError: it is odd.
    """
    if model_dims % 2:
        raise ValueError(
            f"relative positions are sines and cosines in pairs, but model_dims is "
            f"{model_dims}: make it even"
        )
