"""Text generated on eight devices is that of one; what bounds it."""

import dataclasses
import functools
import io

import numpy as np
import pytest

from meshwright.tasks.input.batched_input import TokenInput
from meshwright.tasks.text.decoding import BeamSearch, Sampling
from meshwright.tasks.text.vocabulary import SentencePieceVocabulary, SpecialTokens
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.serving.generation import (
    Generator,
    check_prompt,
    language_model,
    text_after,
)
from tests.layers.stacks.staged import state_by_stage
from tests.trainers.parity import initial_state, small_experiment

PROMPTS = [[1, 70, 80, 90], [1, 200], [1, 9, 8, 7, 6, 5]]
LENGTH = 16
PARAMS = (f"SEQUENCE_LENGTH = {LENGTH}", "NUM_LAYERS = 2")
SAMPLING = Sampling(temperature=0.7, top_k=100, top_p=0.9)
PIPELINE = (
    "include 'lm/pipeline.gin'",
    "include 'plans/pipeline.gin'",
    "NUM_STAGES = 2",
    "NUM_MICROBATCHES = 2",
)


# The plans by which steps have caches in parts.
SPLIT_SEQUENCES = ("ring", "all_to_all")


def experiment_of(kind, mesh, partitioner="SHARDY"):
    params = (
        *PARAMS,
        f"MESH_SHAPE = {mesh}",
        *(PIPELINE if kind == "pipeline" else ()),
    )
    by = f"Experiment.partitioner = %Partitioner.{partitioner}"
    if kind in SPLIT_SEQUENCES:
        return small_experiment(*params, by, plan=kind)
    if kind == "experts":
        return small_experiment(*params, by, plan="hybrid", experts=4)
    return small_experiment(*params, by)


@functools.cache
def start_of(kind):
    """The weights, large enough that each token makes a difference."""
    experts = "experts" if kind == "experts" else "dense"
    state = initial_state(experiment_of(experts, (1, 1)))
    state.theta = state.theta.map(lambda w: 2 * w if w.ndim > 1 else w)
    return state


def generator(experiment, start, search=SAMPLING, **kwargs):
    programs = StepPrograms(experiment)
    return Generator(programs, TrainState(programs, start).weights(), search, **kwargs)


@functools.cache
def on_one_device(kind, search):
    return generator(experiment_of(kind, (1, 1)), start_of(kind), search).all(PROMPTS)


@pytest.mark.parametrize(
    ("kind", "search", "partitioner"),
    [
        pytest.param("dense", SAMPLING, "SHARDY", marks=pytest.mark.always),
        ("dense", SAMPLING, "GSPMD"),
        ("dense", BeamSearch(beams=3), "SHARDY"),
        ("experts", BeamSearch(beams=3), "SHARDY"),
        ("experts", BeamSearch(beams=3), "GSPMD"),
        ("pipeline", SAMPLING, "SHARDY"),
        ("ring", SAMPLING, "SHARDY"),
        ("ring", BeamSearch(beams=3), "GSPMD"),
        ("all_to_all", BeamSearch(beams=3), "SHARDY"),
        ("all_to_all", SAMPLING, "GSPMD"),
    ],
)
def test_eight_devices_generate_as_one(kind, search, partitioner):
    wanted = on_one_device("experts" if kind == "experts" else "dense", search)
    is_plain = kind in ("dense", "experts")
    mesh = (2, 4) if is_plain else (2, 2, 2)
    experiment, start = experiment_of(kind, mesh, partitioner), start_of(kind)
    if kind == "pipeline":
        start = state_by_stage(experiment.task.stack, start)
    got = generator(experiment, start, search).all(PROMPTS)
    for ours, theirs in zip(got, wanted, strict=True):
        assert [beam.ids for beam in ours] == [beam.ids for beam in theirs]
        np.testing.assert_allclose(
            [beam.score for beam in ours], [beam.score for beam in theirs], rtol=1e-4
        )
    lengths = {len(beam.ids) for row in wanted for beam in row if not beam.ended}
    assert lengths == {LENGTH - max(map(len, PROMPTS))}


def test_a_pipeline_of_experts_continues_a_single_prompt():
    """Its microbatches are split over more devices than the batch outside of it."""
    sizes = (f"SEQUENCE_LENGTH = {LENGTH}", "NUM_LAYERS = 4")
    alone = small_experiment(*sizes, "MESH_SHAPE = (1, 1)", plan="hybrid", experts=4)
    start = initial_state(alone)
    start.theta = start.theta.map(lambda w: 2 * w if w.ndim > 1 else w)
    split = small_experiment(
        *("include 'lm/pipeline.gin'", *sizes, "MESH_SHAPE = (2, 4)", *PIPELINE[2:]),
        plan="pipelined_experts",
        experts=4,
    )
    ((wanted,),) = generator(alone, start).all(PROMPTS[:1])
    by_stage = state_by_stage(split.task.stack, start)
    ((got,),) = generator(split, by_stage).all(PROMPTS[:1])
    assert got.ids == wanted.ids


@functools.cache
def dense():
    return generator(experiment_of("dense", (1, 1)), start_of("dense"))


def test_a_stream_comes_token_by_token():
    *_, whole = parts = list(dense().stream(PROMPTS[0]))
    assert [len(part) for part in parts] == list(range(1, LENGTH - 4 + 1))
    assert all(part == whole[: len(part)] for part in parts)
    ((alone,),) = dense().all([PROMPTS[0]])
    assert alone.ids == whole and not alone.ended


def test_draws_depend_on_seed_and_batch():
    prompts = [PROMPTS[0]]
    first = dense().all(prompts)
    assert dense().all(prompts) == first
    assert dense().all(prompts, number=1) != first


def test_new_tokens_are_bounded():
    experiment, start = experiment_of("dense", (1, 1)), start_of("dense")
    short = generator(experiment, start, max_tokens=3, cache_length=40)
    assert [len(row[0].ids) for row in short.all(PROMPTS)] == [3, 3, 3]
    long = [1, *range(10, 10 + 37)]
    assert [len(row[0].ids) for row in short.all([long])] == [2]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "line 7 is empty: give text to continue"),
        (
            [1, 264],
            "line 7 has the id 264, but .* are from 1 to 263, .*vocab_size is 264: l",
        ),
        ([1, -3], "line 7 has the id -3"),
        ([0], "line 7 has the id 0"),
        ([5] * 16, "has 16 tokens, .* a cache of 16: shorten it, or .*cache_length=17"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused(prompt, message):
    task = experiment_of("dense", (1, 1)).task
    with pytest.raises(ValueError, match=message):
        check_prompt(task, prompt, None, "line 7")
    check_prompt(task, [5] * 16, 17, "line 7")
    with pytest.raises(ValueError, match=message.replace("line 7", "prompt 1")):
        dense().all([PROMPTS[0], prompt])


def test_a_prompt_of_t5_s_tokens_starts_with_its_padding():
    task = experiment_of("dense", (1, 1)).task
    vocabulary = SentencePieceVocabulary(
        vocab_size=264, special_tokens=SpecialTokens.T5
    )
    text = dataclasses.replace(task.text, vocabulary=vocabulary)
    check_prompt(dataclasses.replace(task, text=text), [0, 5], None, "line 7")


def test_prompts_of_a_larger_table_have_its_ids():
    task = experiment_of("dense", (1, 1)).task
    embedding = dataclasses.replace(task.embedding, vocab_size=1000)
    check_prompt(
        dataclasses.replace(task, embedding=embedding), [999], None, "--prompt"
    )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"cache_length": 0}, "cache_length is 0; it must be a whole number of at lea"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number of at least 1"),
        ({"seed": -1}, "seed is -1; it must be a whole number of at least 0"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be .* below"),
        ({"search": BeamSearch(beams=265)}, "265 beams, .* 264 tokens: take at most"),
    ],
)
def test_numbers_out_of_range_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        generator(experiment_of("dense", (1, 1)), start_of("dense"), **kwargs)


def test_no_prompts_are_refused():
    with pytest.raises(ValueError, match="there are no prompts: give one or more"):
        dense().all([])


def test_an_input_without_text_is_refused():
    class Ids(TokenInput):
        vocab_size, sequence_length = 264, LENGTH

    experiment = experiment_of("dense", (1, 1))
    task = dataclasses.replace(experiment.task, text=Ids())
    message = "text is Ids, which has no end_id and no encode and .*: generate with"
    with pytest.raises(ValueError, match=message):
        language_model(dataclasses.replace(experiment, task=task))


@pytest.mark.parametrize("cut", range(1, 9))
def test_the_text_after_a_prompt_of_bytes(cut):
    task = experiment_of("dense", (1, 1)).task
    ids = task.text.encode("aé 日b")
    text = text_after(task, ids[:cut], ids[cut:])
    assert "aé 日b".endswith(text) and len(text) == {
        1: 5, 2: 4, 3: 4, 4: 3, 5: 2, 6: 2, 7: 2, 8: 1,
    }[cut]  # fmt: skip
    assert text_after(task, [1, 200, 1, *ids[1:cut]], ids[cut:]) == text


def test_the_text_after_a_prompt_begins_with_its_space(tmp_path):
    """With SentencePiece's own defaults: a space before each text."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the walker walks in the forest of trees"] * 20),
        model_writer=model,
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    file = tmp_path / "model"
    file.write_bytes(model.getvalue())
    task = experiment_of("dense", (1, 1)).task
    vocabulary = SentencePieceVocabulary(vocab_size=290, model_file=str(file))
    text = dataclasses.replace(task.text, vocabulary=vocabulary)
    embedding = dataclasses.replace(task.embedding, vocab_size=290)
    task = dataclasses.replace(task, text=text, embedding=embedding)
    prompt, new = text.encode("the walker"), text.encode("walks in")[1:]
    assert text_after(task, prompt, new) == " walks in"
    assert text_after(task, [*prompt, text.end_id], new) == "walks in"
    assert text_after(task, prompt, []) == ""
