"""Any `tf.data.Dataset` as an input."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from meshwright.tasks import DatasetInput, Resume
from meshwright.tasks.input.dataset_input import named, unnamed


def numbers(count=10):
    return tf.data.Dataset.range(count)


def read(batches, count=None):
    return [
        {path: leaf.numpy().tolist() for path, leaf in batch.items()}
        for batch in itertools.islice(batches, count)
    ]


def test_training_begins_anew_when_the_examples_end():
    given = DatasetInput(train=numbers)
    batches = given.train_batches(0, global_batch=4, rows=range(4))
    assert [b["x"] for b in read(batches, 4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 0, 1],
        [2, 3, 4, 5],
    ]


def test_a_run_goes_on_where_it_was_and_processes_read_their_rows():
    given = DatasetInput(train=lambda: numbers(1000).shuffle(1000), seed=7)
    again = DatasetInput(train=lambda: numbers(1000).shuffle(1000), seed=7)
    whole = read(given.train_batches(0, global_batch=64, rows=range(64)), 40)
    late = read(again.train_batches(30, global_batch=64, rows=range(64)), 10)
    assert late == whole[30:]
    part = read(again.train_batches(30, global_batch=64, rows=range(16, 32)), 10)
    assert [b["x"] for b in part] == [b["x"][16:32] for b in late]
    assert whole[0]["x"] != sorted(whole[0]["x"]) and whole[0] != whole[16]
    other = DatasetInput(train=lambda: numbers(1000).shuffle(1000), seed=8)
    assert read(other.train_batches(0, global_batch=64, rows=range(64)), 1) != whole[:1]


def test_the_last_held_out_batch_is_filled_up():
    given = DatasetInput(train=numbers, held_out=numbers)
    batches = read(given.held_out_batches(global_batch=4, rows=range(4)))
    assert [b["x"] for b in batches][-1] == [8, 9, 0, 0]
    assert [b["row_weights"] for b in batches] == [[1] * 4, [1] * 4, [1, 1, 0, 0]]
    part = read(given.held_out_batches(global_batch=4, rows=range(2, 4), max_batches=1))
    assert part == [{"x": [2, 3], "row_weights": [1, 1]}]


@pytest.mark.parametrize(
    "example",
    [
        1,
        (1, 2),
        (1, 2, 3),
        ({"token-ids": 1, "items": (2, 3)}, {"kind": 4}),
        {"ids": 1, "labels": 2},
        ([1, [2, 3]], 4),
    ],
)
def test_names_lead_back_to_the_example(example):
    names = named(example)
    parts = unnamed(names, example)
    whole = example if isinstance(example, tuple) else (example,)
    assert tf.nest.flatten(parts) == tf.nest.flatten(whole)
    assert [type(part) for part in parts] == [type(part) for part in whole]


def test_names_are_those_of_the_features():
    names = named(({"token-ids": 1, "items": (2, 3)}, 4))
    assert dict(names.items_by_path()) == {
        "x.token_ids": 1,
        "x._items._0": 2,
        "x._items._1": 3,
        "y": 4,
    }


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (numbers(), "train is <.*; it must be a function that returns a tf.data.Data"),
        (lambda: 3, "train returns int; it must return a tf.data.Dataset of examples"),
        (lambda: numbers().batch(4), r"x of an example has shape \(None,\): have the"),
        (
            lambda: numbers().map(tf.strings.as_string),
            r"x of an example is string \(\), which no",
        ),
        (lambda: tf.data.Dataset.from_tensors((1, 2, 3, 4)), "is a tuple of 4"),
        (lambda: tf.data.Dataset.from_tensors({"a b": 1, "a-b": 1}), "names .* alike"),
        (lambda: numbers(0), "train returns an empty dataset"),
        (lambda: numbers().map(lambda x: {"row_weights": x}), "call it otherwise"),
    ],
)
def test_what_is_no_dataset_of_examples_is_refused(train, message):
    with pytest.raises(ValueError, match=message):
        DatasetInput(train=train)


def test_held_out_examples_are_like_those_for_training():
    def batched():
        return numbers(8).batch(4, drop_remainder=True)

    with pytest.raises(ValueError, match="give both the same tensors") as error:
        DatasetInput(train=lambda: numbers().map(lambda x: (x, 1.5)), held_out=batched)
    assert str(error.value).endswith(
        "of the same shapes and kinds (.unbatch() undoes .batch())\n"
        "held_out:\n  x: int64 (4,)\ntrain:\n  x: int64 ()\n  y: float32 ()"
    )


def test_held_out_examples_have_an_end():
    with pytest.raises(ValueError, match=r"held_out returns a dataset without end"):
        DatasetInput(train=numbers, held_out=lambda: numbers().repeat())


def test_a_tuple_of_a_dict_is_the_input():
    given = DatasetInput(train=lambda: numbers().map(lambda x: ({"a": x},)))
    batch = next(iter(given.train_batches(0, global_batch=2, rows=range(2))))
    assert batch["x"]["a"].numpy().tolist() == [0, 1]


def test_an_evaluation_without_held_out_examples_is_refused():
    given = DatasetInput(train=numbers)
    with pytest.raises(ValueError, match="held_out is not set"):
        given.held_out_batches(global_batch=4, rows=range(4))


def test_arrays_stay_as_they_are():
    x = np.random.default_rng(0).standard_normal([8, 3], np.float32)
    given = DatasetInput(train=lambda: tf.data.Dataset.from_tensor_slices((x, x[:, 0])))
    batch = next(iter(given.train_batches(1, global_batch=4, rows=range(4))))
    np.testing.assert_array_equal(batch["x"], x[4:])
    assert given.element_spec(None).x.shape.as_list() == [None, 3]


def distorted():
    """Random numbers that are drawn in parallel, by ops that take long or short."""

    def draw(x):
        count = tf.random.uniform([], 1, 20_000, tf.int32)
        noise = tf.reduce_sum(tf.random.normal([count]))
        return {"x": x, "noise": noise, "other": tf.random.uniform([])}

    return numbers(400).shuffle(50).map(draw, num_parallel_calls=8)


def test_random_numbers_of_a_parallel_map_are_the_same_in_each_run():
    def noise(start, count):
        given = DatasetInput(train=distorted)
        batches = given.train_batches(start, global_batch=50, rows=range(50))
        return [batch["noise"] for batch in read(batches, count)]

    first = noise(0, 16)
    assert noise(0, 16) == first and noise(10, 6) == first[10:]
    assert first[0] != first[8]  # The second epoch draws others.


@pytest.fixture
def service():
    dispatcher = tf.data.experimental.service.DispatchServer()
    address = dispatcher.target.removeprefix("grpc://")
    config = tf.data.experimental.service.WorkerConfig(dispatcher_address=address)
    worker = tf.data.experimental.service.WorkerServer(config)
    yield dispatcher.target
    del worker


def test_a_service_reads_for_a_run_and_begins_anew(service):
    def served():
        return numbers().apply(
            tf.data.experimental.service.distribute("parallel_epochs", service)
        )

    given = DatasetInput(train=served, held_out=served, resume=Resume.ANEW)
    for start in (0, 3):
        batches = given.train_batches(start, global_batch=4, rows=range(4))
        assert [b["x"] for b in read(batches, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    batches = read(given.held_out_batches(global_batch=4, rows=range(4)))
    assert [b["x"] for b in batches][-1] == [8, 9, 0, 0]
    for resume in (Resume.STEP, Resume.STATE):
        with pytest.raises(ValueError, match=r"a tf.data service.* to %Resume.ANEW"):
            DatasetInput(train=served, resume=resume)
