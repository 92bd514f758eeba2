"""Batches of pairs and negatives: what is read, drawn and held out; what is refused."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from meshwright.tasks.recommendation.interactions import Interactions, RatingsFile
from meshwright.tasks.recommendation.recommendation_input import RecommendationInput
from meshwright.tasks.recommendation.synthetic_interactions import SyntheticInteractions

MADE = SyntheticInteractions(users=12, items=20, per_user=6)
GIVEN = RecommendationInput(files=MADE, negatives=3, held_out_negatives=9)
PAIRS = 12 * 5

# User 7 rates film 30 twice, and 10 and 20 at one time; lines are in no order.
LINES = """\
userId,movieId,rating,timestamp
7,30,1.0,400
9,10,5.0,300
7,20,3.0,200
7,10,4.5,200
7,30,0.5,100
9,40,2.0,100
9,30,2.5,200
"""


def written(folder, text: str) -> RatingsFile:
    path = folder / "ratings.csv"
    path.write_text(text)
    return RatingsFile(path=str(path))


# Files.


@pytest.mark.parametrize("text", [LINES, LINES.replace("\n", "\r\n"), LINES + "\n"])
def test_a_file_is_read_and_the_last_items_held_out(tmp_path, text):
    data = written(tmp_path, text).read()
    assert (data.user_count, data.item_count) == (2, 4)
    assert data.held_out.tolist() == [2, 0]  # Films 30 and 10.
    pairs = list(zip(data.user.tolist(), data.item.tolist(), strict=True))
    assert pairs == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert sorted(data.taken_by(0)) == [0, 1, 2]


def test_of_one_time_the_last_line_is_held_out(tmp_path):
    lines = "userId,movieId,rating,timestamp\n1,8,3,50\n1,5,3,50\n"
    assert written(tmp_path, lines).read().held_out.tolist() == [0]


@pytest.mark.parametrize("rating", ["rating", "Wertung für Filme"])
def test_columns_may_have_any_order(tmp_path, rating):
    rows = [line.split(",") for line in LINES.replace("rating", rating).splitlines()]
    text = "\n".join(",".join([row[3], *row[:3]]) for row in rows)
    (tmp_path / "other").mkdir()
    data = written(tmp_path / "other", text).read()
    assert data.sha256() == written(tmp_path, LINES).read().sha256()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("200\n7,10", "200\n7"), r"line 5: 3 columns in '7,4.5,200'.* line names 4"),
        (("9,10,5.0,300", "9,ten,5.0,300"), "line 3: movieId is 'ten', which is no"),
        (("9,10,5.0,300", "9,1.5,5.0,300"), "line 3: movieId is '1.5', which is no"),
        (("9,10,", "9\U000ba330ø,10,"), r"line 3: userId is '9\\U000ba330ø', which"),
        (("9,40,2.0,100", "9,40,2.0,"), "line 7: timestamp is '', which is no whole"),
        (("userId,", "user,"), "line 1: no column userId among user, movieId"),
        (("9,40,2.0,100\n9,30,2.5,200", ""), "user 9 has one item only: the last"),
        (("9,40,2.0,100", "9,40,2.0,1" + "0" * 30), "line 7: timestamp .* of 64 bits"),
        ((LINES[32:], ""), "has no lines but the first"),
    ],
)
@pytest.mark.filterwarnings("ignore:loadtxt")  # Of a file without lines.
def test_what_is_wrong_with_a_file_is_named(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=rf"ratings.csv.*{message}"):
        written(tmp_path, LINES.replace(*wrong)).read()


@pytest.mark.parametrize("at", [0, -2])
def test_what_is_no_text_is_named(tmp_path, at):
    (tmp_path / "r.csv").write_bytes(LINES[:at].encode() + b"\xff" + LINES.encode())
    with pytest.raises(ValueError, match="r.csv is not in UTF-8: .* byte 0xff"):
        RatingsFile(path=str(tmp_path / "r.csv")).read()


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match="no file '/no/r.csv': set RatingsFile"):
        RatingsFile(path="/no/r.csv").read()


# Interactions made here.


def test_made_interactions_follow_from_the_settings():
    data = MADE.read()
    assert (data.user_count, data.item_count) == (12, 20)
    assert np.bincount(data.user).tolist() == [5] * 12
    for user in range(12):
        assert len(set(data.taken_by(user))) == 6
    again = dataclasses.replace(MADE, per_user=6).read()
    assert again.sha256() == data.sha256()
    assert dataclasses.replace(MADE, seed=1).read().sha256() != data.sha256()


def test_taste_and_popularity_make_some_items_more_frequent():
    """Of one taste there are two kinds of users, and what either kind likes most."""

    def share_of_first(count, **kwargs):
        given = dataclasses.replace(MADE, users=400, tastes=1, per_user=2, **kwargs)
        data = given.read()
        return np.sort(np.bincount(data.item, minlength=20))[-count:].sum() / 400

    assert share_of_first(4, taste=0, popularity=0) < 0.35
    assert share_of_first(2, taste=0, popularity=20) > 0.9
    assert share_of_first(4, taste=500, popularity=0) > 0.9


# Batches.


def arrays(batches, count):
    return [
        {name: value.numpy() for name, value in batch.items()}
        for batch in batches.take(count)
    ]


def trained_on(given, count, start=0, B=16, rows=None):
    rows = range(B) if rows is None else rows
    return arrays(given.train_batches(start, global_batch=B, rows=rows), count)


def joined(batches):
    return {n: np.concatenate([batch[n] for batch in batches]) for n in batches[0]}


def assert_equal(ones, others):
    for batch, other in zip(ones, others, strict=True):
        for name, value in batch.items():
            np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_an_epoch_reads_each_pair_once_and_its_negatives():
    data, B = MADE.read(), 16
    epoch = PAIRS * 4 // B
    batches = trained_on(GIVEN, 2 * epoch, B=B)
    negatives = []
    for half in (batches[:epoch], batches[epoch:]):
        batch = joined(half)
        assert (batch["weight"] == 1).all()
        yes = batch["label"] == 1
        pairs = sorted(zip(batch["user"][yes], batch["item"][yes], strict=True))
        assert pairs == list(zip(data.user, data.item, strict=True))
        assert np.bincount(batch["user"][~yes]).tolist() == [15] * 12
        assert not data.are_trained_on(batch["user"][~yes], batch["item"][~yes]).any()
        negatives.append(
            sorted(zip(batch["user"][~yes], batch["item"][~yes], strict=True))
        )
    assert negatives[0] != negatives[1], "each epoch draws anew"
    spec = GIVEN.element_spec(B)
    assert {n: (v.shape, tf.as_dtype(v.dtype)) for n, v in batches[0].items()} == {
        n: (tuple(s.shape), s.dtype) for n, s in spec.items()
    }


def test_what_is_held_out_may_be_a_negative():
    """To leave it out would tell what it is."""
    batch, held_out = joined(trained_on(GIVEN, 60)), MADE.read().held_out
    is_last = batch["item"] == held_out[batch["user"]]
    assert is_last.any() and not batch["label"][is_last].any()


def test_a_batch_follows_from_its_step_alone():
    batches = trained_on(GIVEN, 5)
    assert_equal(trained_on(GIVEN, 2, start=3), batches[3:])
    parts = [trained_on(GIVEN, 5, rows=rows) for rows in (range(3), range(3, 16))]
    assert_equal([joined(shares) for shares in zip(*parts, strict=True)], batches)
    other = trained_on(dataclasses.replace(GIVEN, seed=1), 1)
    assert (other[0]["user"] != batches[0]["user"]).any()


def test_held_out_items_come_once_and_the_rest_is_filled_up():
    data = MADE.read()
    batches = arrays(GIVEN.held_out_batches(global_batch=20, rows=range(20)), -1)
    assert len(batches) == 3
    joint = joined(batches)
    assert joint["weight"].tolist() == [1] * 48 + [0] * 12
    joint = {name: value[:48].reshape(12, 4) for name, value in joint.items()}
    np.testing.assert_array_equal(
        joint["user"], np.repeat(np.arange(12)[:, None], 4, 1)
    )
    np.testing.assert_array_equal(joint["label"], [[1, 0, 0, 0]] * 12)
    np.testing.assert_array_equal(joint["item"][:, 0], data.held_out)
    ranked = joined(arrays(GIVEN.ranked_batches(global_batch=12), -1))["ranked"]
    np.testing.assert_array_equal(joint["item"], ranked[:, :4])
    some = GIVEN.held_out_batches(global_batch=20, rows=range(5, 9), max_batches=2)
    assert [len(batch["user"]) for batch in arrays(some, -1)] == [4, 4]


def test_held_out_items_are_ranked_among_items_never_taken():
    data = MADE.read()
    batches = arrays(GIVEN.ranked_batches(global_batch=5), -1)
    assert_equal(batches, arrays(GIVEN.ranked_batches(global_batch=5), -1))
    batch = joined(batches)
    assert batch["user"].tolist() == [*range(12), -1, -1, -1]
    np.testing.assert_array_equal(batch["ranked"][:12, 0], data.held_out)
    for user in range(12):
        negatives = batch["ranked"][user, 1:]
        assert len(set(negatives)) == 9
        assert not set(negatives) & set(data.taken_by(user))
    seeds = [dataclasses.replace(GIVEN, seed=n).ranked_batches for n in (0, 1)]
    ranked = [arrays(read(global_batch=12), 1)[0]["ranked"] for read in seeds]
    assert (ranked[0] != ranked[1]).any()


def test_all_negatives_are_equally_likely():
    """Of 14 that a user never took, each is among 9 in 9 of 14 seeds."""
    counts, data = np.zeros(20), MADE.read()
    for seed in range(200):
        given = dataclasses.replace(GIVEN, seed=seed)
        counts[given._ranked(data, np.array([0]))[0, 1:]] += 1
    never = np.setdiff1d(np.arange(20), data.taken_by(0))
    assert counts.sum() == counts[never].sum() == 1800
    assert abs(counts[never] - 1800 / 14).max() < 4 * np.sqrt(200 * 9 * 5) / 14


def test_an_order_one_longer_than_the_data_has_a_row_without_weight(monkeypatch):
    """As `shuffled_examples` has for some numbers of examples from 2^16 up."""
    name = "meshwright.tasks.recommendation.recommendation_input.shuffled_examples"
    monkeypatch.setattr(name, lambda index, count, seed: index % (count + 1))
    batch = joined(trained_on(GIVEN, 16))
    assert np.flatnonzero(batch["weight"] == 0).tolist() == [240]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"negatives": 0}, "RecommendationInput.negatives is 0"),
        (
            {"held_out_negatives": 2},
            "negatives is 2; it must be a number of at least 3",
        ),
        ({"seed": -1}, "RecommendationInput.seed is -1"),
    ],
)
def test_numbers_out_of_range(kwargs, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GIVEN, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"per_user": 1}, "SyntheticInteractions.per_user is 1; .* at least 2"),
        ({"per_user": 21}, "per_user is 21; .* at most 20"),
        ({"taste": -1}, "SyntheticInteractions.taste is -1"),
    ],
)
def test_interactions_that_cannot_be_made(kwargs, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MADE, **kwargs)


def test_too_few_items_to_rank_among():
    message = "negatives is 15, but user number 0 took all but 14 of the 20 items"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GIVEN, held_out_negatives=15).ranked_batches(global_batch=4)


def test_rows_that_are_not_of_the_batch():
    with pytest.raises(ValueError, match="not part of a global batch of 4 rows"):
        GIVEN.train_batches(0, global_batch=4, rows=range(2, 5))


def test_events_of_one_pair_count_once():
    user, item = np.array([1, 1, 1, 1]), np.array([5, 6, 5, 7])
    data = Interactions.from_events(user, item, np.array([9, 2, 1, 3]), source="x")
    assert data.held_out.tolist() == [0]
    assert data.item.tolist() == [1, 2]
