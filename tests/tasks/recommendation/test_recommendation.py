"""Recommendation: its loss, how it ranks and scores, and what it refuses."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Mode, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.neumf import NeuMF
from meshwright.tasks.recommendation.recommendation import Recommendation
from meshwright.tasks.recommendation.recommendation_input import RecommendationInput
from meshwright.tasks.recommendation.synthetic_interactions import SyntheticInteractions

U, ITEMS, K = 12, 20, 9
MADE = SyntheticInteractions(users=U, items=ITEMS, per_user=6)
TASK = Recommendation(
    data=RecommendationInput(files=MADE, held_out_negatives=K),
    network=NeuMF(users=U, items=ITEMS, factors=4, mlp_dims=(8, 6)),
    top=3,
)
THETA = initialize(TASK.weights(), key_from_seed(0))


def arrays(batch) -> dict[str, np.ndarray]:
    return {path: np.asarray(value) for path, value in batch.items_by_path()}


def test_loss_is_the_mean_cross_entropy_and_trains_all_weights():
    batch = next(iter(TASK.train_batches(0, global_batch=32, rows=range(32))))
    spec = TASK.batch_spec(32)
    assert NestedMap(batch).map(lambda t: (t.shape, t.dtype)) == spec.map(
        lambda s: (s.shape, s.dtype)
    )
    assert set(TASK.batch_dims()) == set(batch)
    batch = NestedMap({**batch, "weight": tf.cast(tf.range(32) % 3 > 0, tf.float32)})
    leaves = THETA.leaves()
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        theta = THETA.pack(leaves)
        result = TASK.loss(Context(mode=Mode.TRAIN), theta, batch)
    logits = TASK.network.fprop(
        Context(), THETA.network, batch.user, item=batch.item
    ).numpy()
    chance = 1 / (1 + np.exp(-np.float64(logits)))
    nats = -np.log(np.where(batch.label == 1, chance, 1 - chance))
    want = np.average(nats, weights=batch.weight)
    np.testing.assert_allclose(result.loss, want, rtol=1e-5)
    np.testing.assert_allclose(TASK.metrics(arrays(result.sums))["loss"], want, 1e-5)
    for gradient in tape.gradient(result.loss, leaves):
        assert np.isfinite(gradient).all() and np.any(gradient)


def test_a_batch_of_nothing_teaches_nothing():
    batch = TASK.batch_spec(4).map(lambda s: tf.zeros(s.shape, s.dtype))
    result = TASK.loss(Context(), THETA, batch)
    assert result.loss == 0 and TASK.metrics(arrays(result.sums)) == {"loss": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByTable(NeuMF):
    """Scores an item by its number alone: the first ones best, if they are numbers."""

    scores: tuple[float, ...]

    def fprop(self, ctx, theta, user, *, item):
        return tf.gather(tf.constant(self.scores, tf.float32), item)


def ranked_by(scores) -> np.ndarray:
    """How many of the others rank before item 3, of items 3, 0, ..., 9 but for 3."""
    network = ByTable(users=U, items=ITEMS, mlp_dims=(2, 1), scores=tuple(scores))
    task = dataclasses.replace(TASK, network=network)
    ranked = tf.constant([[3, *np.delete(np.arange(10), 3)]] * 2, tf.int32)
    batch = NestedMap(user=tf.constant([0, -1]), ranked=ranked)
    result = task.decoding.decode(
        Context(), NestedMap(network=NestedMap()), batch
    ).before
    assert result.dtype == tf.int32 and result[0] == result[1]
    return result[0]


@pytest.mark.parametrize(
    ("scores", "before"),
    [
        (np.arange(20.0), 6),
        (-np.arange(20.0), 3),
        (np.eye(20)[3], 0),
        (-np.eye(20)[3], 9),
        (np.zeros(20), 9),
        (np.eye(20)[3] * np.nan, 9),
        (np.where(np.arange(20) == 5, np.nan, np.eye(20)[3]), 1),
    ],
    ids=["high", "low", "best", "worst", "equal", "no number", "one is none"],
)
def test_what_ranks_before_the_held_out_item(scores, before):
    """Where it is a draw, all of them: a model that says nothing hits nothing."""
    assert ranked_by(scores) == before


def test_decoding_ranks_by_the_networks_scores():
    theta = THETA.map(lambda w: 100 * w)
    (batch,) = TASK.decoding.batches(global_batch=14)
    spec = TASK.decoding.spec(14)
    assert batch.map(lambda a: (tf.TensorShape(a.shape), tf.as_dtype(a.dtype))) == (
        spec.map(lambda s: (s.shape, s.dtype))
    )
    before = TASK.decoding.decode(Context(), theta, batch.map(tf.constant)).before
    for user in range(U):
        scores = TASK.network.fprop(
            Context(),
            theta.network,
            tf.fill([1 + K], user),
            item=tf.constant(batch.ranked[user]),
        ).numpy()
        assert before[user] == (scores[1:] >= scores[0]).sum()


def test_scores_are_of_all_users_and_not_of_rows_that_fill_up(tmp_path):
    batches = [
        (NestedMap(user=np.array([0, 1])), NestedMap(before=np.array([0, 2]))),
        (NestedMap(user=np.array([2, -1])), NestedMap(before=np.array([3, 0]))),
    ]
    result = TASK.decoding.score(batches, tmp_path)
    assert result.metrics == {
        "hit_rate@3": pytest.approx(2 / 3),
        "ndcg@3": pytest.approx((1 + 1 / 2) / 3),
    }
    assert TASK.decoding and not list(tmp_path.iterdir())


def test_what_is_said_of_the_data():
    lines = TASK.describe_data()
    assert (lines["users"], lines["items"], lines["training pairs"]) == (12, 20, 60)
    counts = np.bincount(MADE.read().item, minlength=ITEMS)
    (batch,) = TASK.decoding.batches(global_batch=U)
    taken = counts[batch.ranked]
    hits = [(row[1:] >= row[0]).sum() < 3 for row in taken]
    assert lines["hit_rate@3 by popularity"] == np.mean(hits)
    assert TASK.train_flops(4) == 3 * 4 * TASK.network.flops() and TASK.tokens(4) == 4


def test_a_resumed_run_compares_what_batches_follow_from():
    before = TASK.data_fingerprint()
    for field, value, name in (
        ("seed", 1, "RecommendationInput.seed"),
        ("negatives", 2, "RecommendationInput.negatives"),
        ("files", dataclasses.replace(MADE, seed=1), "interactions"),
        ("held_out_negatives", 5, None),
    ):
        data = dataclasses.replace(TASK.data, **{field: value})
        now = dataclasses.replace(TASK, data=data).data_fingerprint()
        assert {n for n in before if now[n] != before[n]} == ({name} - {None})


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"users": 11}, "NeuMF.users is 11, but the data have 12 users: raise it"),
        ({"items": 19}, "NeuMF.items is 19, but the data have 20 items: raise it"),
    ],
)
def test_tables_that_are_too_small(tables, message):
    network = dataclasses.replace(TASK.network, **tables)
    task = dataclasses.replace(TASK, network=network)
    rows = {"global_batch": 4, "rows": range(4)}
    for read in (
        task.describe_data,
        lambda: task.train_batches(0, **rows),
        lambda: task.eval_batches(**rows),
        lambda: next(task.decoding.batches(global_batch=4)),
    ):
        with pytest.raises(ValueError, match=message):
            read()


def test_too_many_recommended_items_are_refused():
    with pytest.raises(ValueError, match="Recommendation.top is 10; .* at most 9"):
        dataclasses.replace(TASK, top=10)
