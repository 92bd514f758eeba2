"""Ring attention (Liu et al. 2023): keys pass round while blocks are computed.

Each device keeps its queries. What it has of keys is passed on to the next device while
the products with it are computed, and the softmax goes on where it was (see
`blockwise.py`). The gradient passes keys round again, and theirs behind them.

Dims: B batch, S sequence (query), T sequence (key), N heads, K heads of keys and
values, D head size, U blocks of a device, C tokens of a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.modeling.recompute import save_name
from meshwright.framework.modeling.shapes import copies_of_each, shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.collectives import (
    all_reduce,
    axis_index,
    collective_permute,
)
from meshwright.framework.sharding.manual import auto_to_manual, manual_to_auto
from meshwright.layers.attention.blockwise import (
    BLOCKS,
    ROWS,
    DropoutByBlock,
    PairsOfBlocks,
    QueryBlocks,
    dropout_words,
    inner_products,
    no_sums,
)
from meshwright.layers.attention.learned_terms import (
    BY_BATCH,
    Learned,
    by_batch,
    no_gradients,
    over_batch,
)
from meshwright.layers.attention.logits import BlockTokens, Logits, PairLogits
from meshwright.layers.attention.mask_rules import Tokens, rule_of
from meshwright.layers.attention.split.ring_layout import Layout, RingSchedule, Run
from meshwright.layers.attention.split.sequence_splits import BSND
from meshwright.layers.basic.dropout import Dropout

_Tensors = Mapping[str, tf.Tensor]
_STACK = ("sequence", *BLOCKS[1:])


def attend_in_ring(
    ctx: Context,
    logits: Logits,
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    learned: Learned,
    *,
    key_dims: Sequence[str],
    dropout: Dropout,
    block_size: int | None,
) -> tf.Tensor:
    """The weighted sums of values; see `attend_in_blocks`, whose arguments these are.

    Args:
      ctx: context, whose plan splits "sequence".
      logits: makes the logits of any queries and keys.
      q: [B, S, N, D].
      k: [B, T, K, D].
      v: [B, T, K, D].
      learned: what joins the logits and values; all devices have all of it.
      key_dims: the names of the dims of `k` and `v`.
      dropout: of the weights.
      block_size: the most tokens of a block; None: a device's are one block.

    Returns:
      [B, S, N, D] in the activation dtype.
    """
    axes = ctx.plan.activation_sharding(("sequence",), ctx.path).dims[0]
    schedule = RingSchedule.of(
        q.shape[1],
        k.shape[1],
        ctx.plan.mesh.axes_size(axes),
        block_size,
        rule_of(logits.mask),
        has_gaps=logits.keys.position is None,
    )
    queries, keys = schedule.queries, schedule.keys
    of_queries = _tokens(ctx, logits.queries, queries)
    of_keys = _tokens(ctx, logits.keys, keys, logits.paddings)
    words = dropout_words(ctx, dropout, q, k.shape[1])
    if words is not None:
        dims = ("words", "batch", "heads", "sequence", "")
        of_queries["rows"] = queries.apply(ctx, words[0], 3, dims)
        of_keys["columns"] = keys.apply(ctx, words[1], 1, ("words", "sequence"))
    ring = _Ring(
        ctx=ctx,
        axes=axes,
        logits=logits,
        schedule=schedule,
        dropout=dropout,
        key_dims=("blocks", "batch", key_dims[2], "block", "head_dim"),
        of_queries=of_queries,
        of_keys=of_keys,
        reach=learned.reach,
    )
    tensors = learned.in_blocks(ctx, ring.by_pair(0, 0, {}, {}).rows)
    dims = ("batch", "heads", "sequence", "head_dim")
    dims_of_keys = ("batch", key_dims[2], "sequence", "head_dim")
    stacks = [
        layout.apply(ctx, tf.transpose(t, [0, 2, 1, 3]), 2, names)
        for t, layout, names in (
            (q, queries, dims),
            (k, keys, dims_of_keys),
            (v, keys, dims_of_keys),
        )
    ]
    fprop = tf.custom_gradient(lambda *args: ring.fprop(sorted(tensors), *args))
    out = fprop(*stacks, *tensors.leaves())
    context = tf.transpose(queries.undo(ctx, out, 2, dims), [0, 2, 1, 3])
    return ctx.split(context, BSND)


def _tokens(
    ctx: Context, tokens: Tokens, layout: Layout, paddings: tf.Tensor | None = None
) -> dict[str, tf.Tensor]:
    """Stacks of blocks [R * U, B or 1, C], by the names that `BlockTokens` has."""
    parts = {
        "segment": tokens.segment,
        "position": tokens.position,
        "paddings": paddings,
    }
    stacks = {}
    for name, part in parts.items():
        if part is not None:
            dims = ("" if part.shape[0] == 1 else "batch", "sequence")
            stacks[name] = layout.apply(ctx, part, 1, dims)
    return stacks


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ring:
    """The forward pass and its gradient, on stacks of all devices' blocks.

    Both are regions that are manual along the ring; batch and heads stay automatic.

    Args:
      ctx: context.
      axes: the mesh axes along which the ring goes.
      logits: makes the logits, but for where tokens are.
      schedule: where they are, and what is computed.
      dropout: of the weights.
      key_dims: the names of the dims of stacks of keys.
      of_queries: stacks that the blocks of queries have besides: `segment` and
        `position` of tokens, and `rows` of words for dropout, if there are such.
      of_keys: likewise, and `paddings`; `columns` in place of rows.
      reach: of vectors of relative positions, see `DistanceVectors`.
    """

    ctx: Context
    axes: Sequence[str]
    logits: Logits
    schedule: RingSchedule
    dropout: Dropout
    key_dims: Sequence[str]
    of_queries: _Tensors
    of_keys: _Tensors
    reach: int | None

    def fprop(self, names, q, k, v, *tensors):
        """The output's blocks, and the function of their gradient.

        `names` are those of `tensors`, see `Learned.in_blocks`.
        """
        ctx, learned = self.ctx, NestedMap(zip(names, tensors, strict=True))
        total, largest, weighted = self._forward(q, k, v, learned)
        # At least the exponential of 0, but for queries that are filled up.
        out = weighted / tf.maximum(total, 1.0)[..., None]
        out = ctx.split(ctx.cast(out), _STACK)
        # Whoever saves the context saves what its gradient needs.
        out, total, largest = (save_name(t, "context") for t in (out, total, largest))

        def gradient(dy):
            dy = ctx.split(ctx.cast(dy), _STACK)
            inner = ctx.split(inner_products(dy, out), _STACK[:-1])
            query = [q, dy, inner, total, largest]
            *by_stack, dlearned = self._backward(k, v, learned, query)
            return [*by_stack, *dlearned.leaves()]

        return out, gradient

    def _forward(self, q, k, v, learned: NestedMap) -> list[tf.Tensor]:
        """Stacks of what `PairsOfBlocks.forward` sums up."""
        q, queries = self._enter(q, BLOCKS), self._queries()
        learned = learned.map(self._enter_whole)

        def compute(run, step, keys, sums, _):
            blocks = self._blocks(run, step, queries, keys)
            k, v = (_for_queries(blocks, keys[name], q) for name in "kv")
            return blocks.forward(sums, q, k, v, learned), []

        sums = no_sums(self.ctx, q, learned.get("sink"))
        sums, _ = self._around(compute, self._keys(k, v), sums, [])
        return [self._leave(t, BLOCKS[: t.shape.rank]) for t in sums]

    def _backward(self, k, v, learned: NestedMap, query) -> list:
        """The gradients by q, k, v and `learned`, a nested map."""
        query = QueryBlocks(*(self._enter(t, BLOCKS[: t.shape.rank]) for t in query))
        queries, keys = self._queries(), self._keys(k, v)
        learned = by_batch(learned.map(self._enter_whole), query.q)

        def compute(run, step, keys, sums, of_keys):
            blocks = self._blocks(run, step, queries, keys)
            k, v = (_for_queries(blocks, keys[name], query.q) for name in "kv")
            none = [blocks.split(tf.zeros(shape_of(t))) for t in (k, v)]
            dq, dk, dv, dlearned = blocks.backward(
                [sums[0], *none, learned.pack(sums[1:])], query, k, v, learned
            )
            return [dq, *dlearned.leaves()], [
                self.ctx.split(d + _of_keys(new, d), self.key_dims)
                for d, new in zip(of_keys, (dk, dv), strict=True)
            ]

        sums = [self.ctx.split(tf.zeros(shape_of(query.q)), BLOCKS)]
        sums += no_gradients(self.ctx, learned, query.q).leaves()
        of_keys = [
            self.ctx.split(tf.zeros(shape_of(keys[name])), self.key_dims)
            for name in "kv"
        ]
        (dq, *dlearned), of_keys = self._around(compute, keys, sums, of_keys)
        by_stack = [self._leave(self.ctx.cast(dq), BLOCKS)]
        by_stack += [self._leave(self.ctx.cast(d), self.key_dims) for d in of_keys]
        dlearned = learned.pack(dlearned).map_with_path(self._leave_whole)
        return [*by_stack, over_batch(dlearned, learned)]

    def _around(
        self,
        compute: Callable,
        keys: _Tensors,
        sums: list[tf.Tensor],
        of_keys: list[tf.Tensor],
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """`sums` and `of_keys` after all steps.

        `compute` (run, number of devices that the keys have passed, keys, sums,
        of_keys) adds to both; `of_keys` go round with the keys, a step behind, and come
        home. Nothing that is sent is waited for by the step in which it is.
        """
        keys = self._sent_keys(keys, self.schedule.runs[0].first)
        for run in self.schedule.runs:

            def body(n, keys, sums, of_keys, run=run):
                passed_on = self._sent_keys(keys, run.goes)
                of_keys = [self._sent(d, run.came, self.key_dims) for d in of_keys]
                step = run.first + n * run.goes
                sums, of_keys = compute(run, step, keys, sums, of_keys)
                return n + 1, passed_on, sums, of_keys

            state = (0, keys, sums, of_keys)
            if run.steps == 1:
                state = body(*state)
            else:
                start = (tf.constant(0), *state[1:])
                state = tf.while_loop(lambda n, *_, run=run: n < run.steps, body, start)
            _, keys, sums, of_keys = state
        back = self.schedule.back
        return sums, [self._sent(d, back, self.key_dims) for d in of_keys]

    def _blocks(self, run: Run, step, queries: _Tensors, keys: _Tensors):
        """The pairs of a step: of these queries, and keys that came so far."""
        me = axis_index(self.ctx.plan.mesh, self.axes)
        source = (me - step) % self.schedule.queries.devices
        logits = self.by_pair(me, source, queries, keys)
        dropout = None
        if "rows" in queries:
            dropout = DropoutByBlock(
                dropout=self.dropout, rows=queries["rows"], columns=keys["columns"]
            )
        return PairsOfBlocks(
            ctx=self.ctx, pairs=run.pairs, logits=logits, dropout=dropout
        )

    def by_pair(
        self,
        device: int | tf.Tensor,
        source: int | tf.Tensor,
        queries: _Tensors,
        keys: _Tensors,
    ) -> PairLogits:
        """The logits of a device's blocks of queries, and of keys of another device."""
        layout, layout_of_keys = self.schedule.queries, self.schedule.keys
        return self.logits.by_pair(
            BlockTokens(
                size=layout.size,
                end=layout.end,
                first=layout.start(device),
                stride=layout.stride,
                segment=queries.get("segment"),
                position=queries.get("position"),
            ),
            BlockTokens(
                size=layout_of_keys.size,
                end=layout_of_keys.end,
                first=layout_of_keys.start(source),
                stride=layout_of_keys.stride,
                length=layout_of_keys.filled_up_from,
                segment=keys.get("segment"),
                position=keys.get("position"),
                paddings=keys.get("paddings"),
            ),
            self.reach,
        )

    def _queries(self) -> _Tensors:
        """What blocks of queries have besides, of a device."""
        stacks = self.of_queries.items()
        return {name: self._enter(t, self._dims(name, t)) for name, t in stacks}

    def _keys(self, k: tf.Tensor, v: tf.Tensor) -> _Tensors:
        """What goes round, of a device."""
        stacks = {"k": k, "v": v, **self.of_keys}.items()
        return {name: self._enter(t, self._dims(name, t)) for name, t in stacks}

    def _dims(self, name: str, stack: tf.Tensor) -> Sequence[str]:
        """The names of the dims of what blocks of queries or keys have."""
        if name in ("k", "v"):
            return self.key_dims
        if name == "rows":
            return ROWS
        if name == "columns":
            return ("blocks", "words", "block")
        return ("blocks", "" if stack.shape[1] == 1 else "batch", "block")

    def _sent_keys(self, keys: _Tensors, places: int) -> _Tensors:
        return {
            name: self._sent(t, places, self._dims(name, t)) for name, t in keys.items()
        }

    def _sent(self, stack: tf.Tensor, places: int, dims: Sequence[str]) -> tf.Tensor:
        """A stack passed on by so many places of the ring."""
        devices = self.schedule.queries.devices
        if not places:
            return stack
        pairs = [(i, (i + places) % devices) for i in range(devices)]
        stack = self.ctx.split(stack, dims)
        stack = collective_permute(stack, self.ctx.plan.mesh, self.axes, pairs)
        return self.ctx.split(stack, dims)

    def _enter(self, stack: tf.Tensor, dims: Sequence[str]) -> tf.Tensor:
        """A device's blocks of a stack; annotated, as GSPMD wants it in regions."""
        mapping = [self.axes, *[()] * (stack.shape.rank - 1)]
        stack = auto_to_manual(
            stack, self.ctx.plan.mesh, mapping, manual_axes=self.axes
        )
        return self.ctx.split(stack, dims)

    def _leave(self, stack: tf.Tensor, dims: Sequence[str]) -> tf.Tensor:
        mapping = [self.axes, *[()] * (stack.shape.rank - 1)]
        stack = manual_to_auto(
            self.ctx.split(stack, dims),
            self.ctx.plan.mesh,
            mapping,
            manual_axes=self.axes,
        )
        return self.ctx.split(stack, ("sequence", *dims[1:]))

    def _enter_whole(self, x: tf.Tensor) -> tf.Tensor:
        """`x`, which all devices have."""
        whole = [()] * x.shape.rank
        return auto_to_manual(x, self.ctx.plan.mesh, whole, manual_axes=self.axes)

    def _leave_whole(self, name: str, x: tf.Tensor) -> tf.Tensor:
        """The sum over devices of `x`, a gradient by what is learned, by batch."""
        mesh = self.ctx.plan.mesh
        x = all_reduce(self.ctx.split(x, BY_BATCH[name]), mesh, self.axes)
        return manual_to_auto(x, mesh, [()] * x.shape.rank, manual_axes=self.axes)


def _for_queries(blocks: PairsOfBlocks, stack: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
    """Keys or values [U, B, K, C, D] for the heads of queries: [U, B, N, C, D]."""
    copies = q.shape[2] // stack.shape[2]
    if copies == 1:
        return stack
    return blocks.split(copies_of_each(stack, copies, 2))


def _of_keys(stack: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """The sums [U, B, K, C, D] over heads of queries that read a head of keys."""
    shape = shape_of(like)
    if stack.shape[2] == shape[2]:
        return stack
    groups = [*shape[:3], stack.shape[2] // shape[2], *shape[3:]]
    return tf.reduce_sum(tf.reshape(stack, groups), 3)
