"""Rows of tokens of any tf.data pipeline, as a language model reads them."""

import dataclasses
import logging
import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.input.batched_input import Resume
from meshwright.tasks.input.token_dataset import PairDataset, TokenDataset
from meshwright.tasks.text.text_input import TextInput
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.batches import CallBatches, check_first
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.training import loop
from tests.tasks.text.parallel_files import install_all
from tests.tasks.text.test_translation import PLANS, SIZES
from tests.trainers.parity import initial_state
from tests.trainers.small_run import at, small_programs, train

S = 8


def rows(**changes):
    """A function that returns five rows of tokens; None leaves a tensor out."""
    given = {
        "ids": np.arange(5 * S, dtype=np.int32).reshape(5, S),
        "labels": np.arange(5 * S, dtype=np.int32).reshape(5, S) + 1,
    }
    given = {k: v for k, v in (given | changes).items() if v is not None}
    return lambda: tf.data.Dataset.from_tensor_slices(given)


def dataset(vocab_size=100, **changes):
    function = rows(**changes)
    return TokenDataset(train=function, held_out=function, vocab_size=vocab_size)


def test_what_a_row_lacks_has_its_default():
    given = dataset()
    (batch,) = given.train_batches(0, global_batch=5, rows=range(5)).take(1)
    assert batch.map(lambda t: tf.TensorSpec(t.shape, t.dtype)) == given.element_spec(5)
    assert (batch.labels.numpy() - batch.ids.numpy() == 1).all()
    assert (batch.weights.numpy() == 1).all()
    assert (batch.segment_ids.numpy() == 1).all()
    assert (batch.segment_positions.numpy() == np.arange(S)).all()


def test_what_a_row_has_is_kept():
    rng = np.random.default_rng(0)
    named = ("segment_ids", "segment_positions", "weights")
    more = {name: rng.integers(0, 2, [5, S]).astype(np.int64) for name in named}
    given = dataset(**more)
    (batch,) = given.train_batches(0, global_batch=5, rows=range(5)).take(1)
    for name in named:
        np.testing.assert_array_equal(batch[name], more[name])
    assert batch.weights.dtype == tf.float32 and batch.segment_ids.dtype == tf.int32


def test_rows_that_fill_up_a_batch_are_padding():
    first, last = dataset().held_out_batches(global_batch=3, rows=range(3))
    assert (first.weights.numpy() == 1).all()
    assert last.weights.numpy().sum(1).tolist() == [S, S, 0]
    assert last.segment_ids.numpy().sum(1).tolist() == [S, S, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "examples without labels: they have ids"),
        ({"ids": np.zeros([5], np.int32)}, r"ids .* have shape \(\); it must be \[S\]"),
        ({"labels": np.zeros([5, 7], np.int32)}, r"labels .* int32 \[7\]; it must be"),
        (
            {"labels": np.zeros([5, S])},
            r"labels .* float64 \[8\]; it must be int32 \[8",
        ),
        ({"mask": np.zeros([5, S])}, "with 'mask'; a language model reads ids, "),
    ],
)
def test_rows_of_another_kind_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"TokenDataset.train.* {message}"):
        dataset(**changes)


def test_examples_that_are_no_dicts_are_refused():
    with pytest.raises(
        ValueError, match="examples of tuple; it must return dicts with"
    ):
        TokenDataset(
            train=lambda: tf.data.Dataset.from_tensor_slices(([[1]], [[2]])),
            vocab_size=5,
        )


def test_packed_rows_for_training_alone_are_told_what_lacks():
    packed = rows(segment_ids=np.ones([5, S], np.int32))
    with pytest.raises(ValueError, match="give held_out segment ids, 1 and in padding"):
        TokenDataset(train=packed, held_out=rows(), vocab_size=100)


def test_names_of_seqio_are_told_by_ours():
    given = rows(ids=None, decoder_input_tokens=np.ones([5, S], np.int32))
    message = "these are seqio's names: call decoder_input_tokens ids$"
    with pytest.raises(ValueError, match=message):
        TokenDataset(train=given, vocab_size=100)
    more = rows(decoder_segment_ids=np.ones([5, S], np.int32))
    with pytest.raises(ValueError, match="segment_ids.*: call it 'segment_ids'$"):
        TokenDataset(train=more, vocab_size=100)


def test_messages_name_the_class():
    with pytest.raises(ValueError, match="TokenDataset.train is 3; it must be a func"):
        TokenDataset(train=3, vocab_size=5)


def test_an_id_beyond_the_vocabulary_stops_the_run(tmp_path, monkeypatch):
    how = {"global_batch": 5, "rows": range(5)}
    (batch,) = dataset(vocab_size=41).train_batches(0, **how).take(1)
    assert batch.ids.shape == [5, S]
    batches = dataset(vocab_size=40).train_batches(0, **how)
    message = "labels has ids from [0-9]* to 40, which must be from 0 to 39, as vocab"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        next(iter(batches))
    experiment = small_programs().experiment
    task = dataclasses.replace(experiment.task, text=dataset(vocab_size=40))
    programs = StepPrograms(dataclasses.replace(experiment, task=task))
    monkeypatch.setattr(loop, "trace", None)  # Before anything is traced.
    with pytest.raises(ValueError, match=f"the input is refused: .*{message}"):
        loop.train_and_evaluate(programs, loop.Run(model_dir=str(tmp_path)))
    anew = dataclasses.replace(task.text, resume=Resume.ANEW)
    task = dataclasses.replace(task, text=anew)
    # It takes no row.
    assert check_first(dataclasses.replace(experiment, task=task)) == []


def of_texts(text: TextInput, batch: int) -> TokenDataset:
    """The training rows of a `TextInput`, as somebody else's pipeline."""

    def made():
        batches = text.train_batches(0, global_batch=batch, rows=range(batch))
        return batches.take(40).map(dict).unbatch()

    return TokenDataset(train=made, held_out=made, vocab_size=text.vocab_size)


def test_training_is_that_on_the_same_rows_of_text(tmp_path, caplog):
    """On eight devices, resumed; how many bytes tokens are, nobody knows."""
    caplog.set_level(logging.INFO, logger="absl")
    programs = at(small_programs(), num_steps=6, checkpoint_interval=3, eval_interval=6)
    experiment = programs.experiment
    want = train(programs, tmp_path / "text")
    tokens = of_texts(experiment.task.text, experiment.global_batch)
    task = dataclasses.replace(experiment.task, text=tokens)
    train(programs, tmp_path / "tokens", task=task, num_steps=3)
    got = train(programs, tmp_path / "tokens", task=task)
    for step, loss in got.losses.items():
        assert loss == pytest.approx(want.losses[step], rel=1e-6), step
    assert set(got.losses) == {4, 5, 6}
    assert re.search("first 256 rows of ids: .* tokens, 0.0% padding", caplog.text)
    assert set(got.evaluation) == {"loss"}


def test_a_served_text_of_t5_s_tokens_starts_with_0():
    experiment = small_programs().experiment
    task, theta = experiment.task, initial_state(experiment).theta
    ids = np.zeros([1, task.text.sequence_length], np.int32)
    ids[0, 1:4] = [30, 40, 50]
    text = NestedMap(
        ids=ids,
        segment_ids=np.int32(np.arange(ids.size) < 4)[None],
        segment_positions=np.arange(ids.size, dtype=np.int32)[None],
    )
    theta, text = (tree.map(tf.constant) for tree in (theta, text))
    want = tf.nn.log_softmax(task.logits(Context(), theta, text))
    got = task.serving.serve(Context(), theta, NestedMap(ids=text.ids))
    np.testing.assert_allclose(got.log_probs[:, :4], want[:, :4], rtol=1e-5, atol=1e-5)


def test_a_batch_that_is_refused_in_training_is_named():
    experiment = small_programs().experiment
    task = dataclasses.replace(experiment.task, text=dataset(vocab_size=33))
    how = {"task": task, "global_batch": 1, "steps_per_loop": 1}
    calls = CallBatches(dataclasses.replace(experiment, **how), 2, range(1))
    assert (next(calls)["labels"].max(), next(calls)["labels"].max()) == (24, 32)
    with pytest.raises(ValueError, match=r"refused: .* \(batch 5 of the "):
        next(calls)


def test_ids_that_are_the_labels_are_warned_of(caplog):
    experiment = small_programs().experiment
    same = np.arange(5 * S, dtype=np.int32).reshape(5, S)
    weights = np.zeros([5, S], np.float32)
    for given, is_warned in (
        (dataset(labels=same), True),
        (dataset(), False),
        (dataset(labels=same, weights=weights), False),  # Of a first batch of padding.
        (dataset(labels=same + np.eye(5, S, dtype=np.int32)), False),
    ):
        caplog.clear()
        task = dataclasses.replace(experiment.task, text=given)
        check_first(dataclasses.replace(experiment, task=task, global_batch=5))
        warned = [r.getMessage() for r in caplog.records if r.levelno > logging.INFO]
        assert bool(warned) == is_warned, warned
        for line in warned:
            assert "in the first 260 rows ids are labels, so that the model" in line


T = 6
SIDES = "source", "target"


def pairs(**changes):
    """Rows of a pair each, the source of which ends in padding."""
    source = np.arange(5 * S, dtype=np.int32).reshape(5, S) + 2
    labels = np.arange(5 * T, dtype=np.int32).reshape(5, T) + 2
    source[:, -2:], labels[:, -1:] = 0, 0
    target = np.roll(labels, 1, 1)
    given = {"source_ids": source, "target_ids": target, "target_labels": labels}
    given = {k: v for k, v in (given | changes).items() if v is not None}
    made = lambda: tf.data.Dataset.from_tensor_slices(given)  # noqa: E731
    return PairDataset(train=made, held_out=made, vocab_size=100)


def test_packed_pairs_without_segments_are_warned_of():
    given = pairs()
    (batch,) = given.train_batches(0, global_batch=5, rows=range(5)).take(1)
    batch = {name: tensor.numpy() for name, tensor in batch.items()}
    assert given.doubts([batch]) == []
    batch["target_ids"][3, 2] = 0
    (line,) = given.doubts([batch])
    assert "in 1 of the first 5 rows a target begins anew, by token 0" in line
    segments = {f"{side}_segment_ids": batch[f"{side}_segment_ids"] for side in SIDES}
    assert pairs(**segments).doubts([batch]) == []


def test_pairs_without_segments_end_in_padding():
    given = pairs()
    assert (given.source_length, given.target_length) == (S, T)
    first, last = given.held_out_batches(global_batch=3, rows=range(3))
    assert first.map(lambda t: tf.TensorSpec(t.shape, t.dtype)) == given.element_spec(3)
    assert first.source_segment_ids.numpy().sum(1).tolist() == [S - 2] * 3
    assert first.target_segment_ids.numpy().tolist() == [[1] * (T - 1) + [0]] * 3
    np.testing.assert_array_equal(first.target_weights, first.target_segment_ids)
    assert (first.source_positions.numpy() == np.arange(S)).all()
    assert last.target_weights.numpy().sum(1).tolist() == [T - 1, T - 1, 0]
    assert last.source_segment_ids.numpy().sum(1).tolist() == [S - 2, S - 2, 0]
    assert given.fullness([first]) == [
        f"first 3 rows of source_ids: {3 * (S - 2)} tokens, 25.0% padding, 0 full rows",
        f"first 3 rows of target_ids: {3 * (T - 1)} tokens, 16.7% padding, 0 full rows",
    ]
    assert given.fullness([]) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_labels": None}, "examples without target_labels: they have source"),
        (
            {"target_labels": np.zeros([5, S], np.int32)},
            r"target_labels of an example is int32 \[8\]; it must be int32 \[6\]",
        ),
        (
            {"source_segment_ids": np.ones([5, S], np.int32)},
            "examples with source_segment_ids alone: a target attends",
        ),
        ({"weights": np.zeros([5, T])}, "with 'weights'; a translation model reads"),
    ],
)
def test_pairs_of_another_kind_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"PairDataset.train.* {message}"):
        pairs(**changes)


def test_a_translation_model_has_the_loss_of_the_same_pairs(tmp_path):
    """Packed pairs of files, by the task's input and as a pipeline of one's own."""
    install_all(tmp_path, {"de": 60, "fr": 40})
    root = f"GettextCatalogues.root = '{tmp_path}'"
    model, plan, *params = PLANS["dense"]
    experiment, _ = build_experiment([model, plan], [*SIZES, *params, root])
    task = experiment.task
    text, how = task.text, {"global_batch": 8, "rows": range(8)}

    def made():
        return text.train_batches(0, **how).take(3).map(dict).unbatch()

    own = PairDataset(train=made, vocab_size=text.vocab_size)
    other = dataclasses.replace(task, text=own)
    assert other.decoding is None and other.serving is None
    assert other.batch_spec(8) == task.batch_spec(8)
    assert (other.tokens(8), other.train_flops(8)) == (
        task.tokens(8),
        task.train_flops(8),
    )
    assert "the dataset of PairDataset.train" in other.data_fingerprint()
    theta = initial_state(experiment).theta.map(tf.constant)
    losses = [
        each.loss(Context(), theta, next(iter(each.train_batches(0, **how)))).loss
        for each in (task, other)
    ]
    assert losses[0] == losses[1] > 1
