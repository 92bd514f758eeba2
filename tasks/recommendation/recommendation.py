"""Recommendation: which items a user takes, learned from items taken before.

Dims: B batch (pairs of a user and an item, or users to rank for), K negatives.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.checks import check_number
from meshwright.framework.modeling.layer import Context
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.neumf import NeuMF
from meshwright.tasks.recommendation.interactions import Interactions
from meshwright.tasks.recommendation.recommendation_input import RecommendationInput
from meshwright.tasks.task import DecodeResult, Decoding, Serving, Task, TaskLoss


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recommendation(Task):
    """Tells real pairs from negatives, trained by cross-entropy (He et al. 2017).

    Each user's last item is held out. An evaluation ranks it among K items that the
    user never took, by score: the hit rate is the share of users for whom it is among
    the first `top`, and NDCG counts 1 / log2(rank + 1) for these and 0 for others,
    where the first rank is 1. Items of an equal score rank before it.

    Args:
      data: the input.
      network: scores pairs.
      top: number of items that are recommended.

    Raises:
      ValueError: `top` is out of range, or so large that every item is a hit.
    """

    token_name: ClassVar[str] = "pairs"

    data: RecommendationInput
    network: NeuMF
    top: int = 10

    def __post_init__(self):
        super().__post_init__()
        check_number(self, "top", at_least=1, at_most=self.data.held_out_negatives)

    def logits(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> tf.Tensor:
        """Logits [B] of each `user` with its `item`, in the activation dtype."""
        with ctx.scope("network") as c:
            user, item = (
                c.split(ids, ("batch",), name=name)
                for name, ids in (("user", batch.user), ("item", batch.item))
            )
            return self.network.fprop(c, theta.network, user, item=item)

    def loss(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> TaskLoss:
        """Mean cross-entropy of pairs, in nats."""
        logits = self.logits(ctx, theta, batch)
        with ctx.scope("loss"):
            nats = tf.nn.sigmoid_cross_entropy_with_logits(
                labels=batch.label, logits=tf.cast(logits, tf.float32)
            )
            sums = NestedMap(
                nats=tf.reduce_sum(nats * batch.weight),
                pairs=tf.reduce_sum(batch.weight),
            )
        return TaskLoss(loss=sums.nats / tf.maximum(sums.pairs, 1.0), sums=sums)

    @property
    def decoding(self) -> HeldOutRanking:
        return HeldOutRanking(self)

    @property
    def serving(self) -> PairChances:
        return PairChances(self)

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        return {"loss": float(sums["nats"] / max(sums["pairs"], 1.0))}

    @property
    def input(self) -> RecommendationInput:
        return self.data

    def batch_dims(self) -> NestedMap:
        return self.batch_spec(1).map(lambda _: ("batch",))

    def train_batches(
        self, start_step: int, *, global_batch: int, rows: range
    ) -> tf.data.Dataset:
        self.interactions()
        return super().train_batches(start_step, global_batch=global_batch, rows=rows)

    def eval_batches(
        self, *, global_batch: int, rows: range, max_batches: int | None = None
    ) -> tf.data.Dataset:
        self.interactions()
        return super().eval_batches(
            global_batch=global_batch, rows=rows, max_batches=max_batches
        )

    def describe_data(self) -> dict[str, float]:
        """Sizes, and the scores of ranking items by how often they were taken."""
        interactions = self.interactions()
        counts = np.bincount(interactions.item, minlength=interactions.item_count)
        before = [
            np.sum(taken[:, 1:] >= taken[:, :1], axis=1)[batch.user >= 0]
            for batch in self.decoding.batches(global_batch=1024)
            for taken in [counts[batch.ranked]]
        ]
        by_popularity = self.decoding.scores(np.concatenate(before))
        return {
            "users": interactions.user_count,
            "items": interactions.item_count,
            "training pairs": len(interactions.user),
            **{f"{name} by popularity": n for name, n in by_popularity.items()},
        }

    def data_fingerprint(self) -> dict[str, str | int]:
        return {
            "interactions": self.interactions().sha256(),
            "RecommendationInput.negatives": self.data.negatives,
            "RecommendationInput.seed": self.data.seed,
        }

    def train_flops(self, global_batch: int) -> float:
        """Three times the forward FLOPs; looking up rows does not count."""
        return 3.0 * global_batch * self.network.flops()

    def tokens(self, global_batch: int) -> int:
        """Pairs."""
        return global_batch

    def interactions(self) -> Interactions:
        """The interactions, after a check that the tables have a row for each id."""
        interactions = self.data.interactions()
        for name in ("user", "item"):
            rows, needed = (
                getattr(self.network, f"{name}s"),
                getattr(interactions, f"{name}_count"),
            )
            if rows < needed:
                raise ValueError(
                    f"NeuMF.{name}s is {rows}, but the data have {needed} {name}s: "
                    "raise it to that"
                )
        return interactions


@dataclasses.dataclass(frozen=True)
class HeldOutRanking(Decoding):
    """Ranks each user's held-out item among negatives."""

    task: Recommendation

    def spec(self, global_batch: int) -> NestedMap:
        """See `RecommendationInput.ranked_batches`."""
        return self.task.data.ranked_spec(global_batch)

    def decode(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """`before` int32 [B]: how many negatives rank before the held-out item.

        Items are scored one after another, so that memory suffices for a pair per user.
        """
        user = tf.maximum(batch.user, 0)
        ranked = tf.transpose(batch.ranked)

        def score(i):
            with ctx.scope("network") as c:
                item = c.split(ranked[i], ("batch",))
                return self.task.network.fprop(c, theta.network, user, item=item)

        held_out = score(0)

        def count(i, before):
            # Not >=: a score that is NaN must not make a hit.
            is_behind = score(i) < held_out
            return i + 1, before + 1 - tf.cast(is_behind, tf.int32)

        before = ctx.split(tf.zeros_like(user), ("batch",))
        last = self.task.data.held_out_negatives
        _, before = tf.while_loop(
            lambda i, _: i <= last, count, (tf.constant(1), before)
        )
        return NestedMap(before=before)

    def batches(
        self, *, global_batch: int, max_batches: int | None = None
    ) -> Iterator[NestedMap]:
        self.task.interactions()
        batches = self.task.data.ranked_batches(
            global_batch=global_batch, max_batches=max_batches
        )
        for batch in batches:
            yield NestedMap(batch).map(lambda t: t.numpy())

    def score(
        self, batches: Iterable[tuple[NestedMap, NestedMap]], folder: pathlib.Path
    ) -> DecodeResult:
        """Hit rate and NDCG of the first `top`."""
        ranks = [np.asarray(out.before)[batch.user >= 0] for batch, out in batches]
        return DecodeResult(metrics=self.scores(np.concatenate(ranks)))

    def scores(self, before: np.ndarray) -> dict[str, float]:
        """Scores, given how many negatives rank before each user's held-out item."""
        gains = np.where(before < self.task.top, 1 / np.log2(before + 2.0), 0.0)
        return {
            f"hit_rate@{self.task.top}": float(np.mean(before < self.task.top)),
            f"ndcg@{self.task.top}": float(np.mean(gains)),
        }


@dataclasses.dataclass(frozen=True)
class PairChances(Serving):
    """Answers how likely users are to take items."""

    task: Recommendation

    def spec(self, batch: int | None) -> NestedMap:
        """`user` and `item`, int32 [B]: pairs."""
        spec = self.task.data.element_spec(batch)
        return NestedMap(user=spec.user, item=spec.item)

    def serve(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """`chances` float32 [B] that the user takes the item."""
        logits = tf.cast(self.task.logits(ctx, theta, batch), tf.float32)
        return NestedMap(chances=tf.sigmoid(logits))
