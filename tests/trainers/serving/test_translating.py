"""meshwright-generate translates lines by a translation model that was trained."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.input.token_dataset import PairDataset
from meshwright.tasks.text.vocabulary import (
    VOCABULARY_FILE,
    SentencePieceVocabulary,
    SpecialTokens,
)
from meshwright.trainers import export
from meshwright.trainers import generate as main_module
from meshwright.trainers.checkpoints.checkpoints import Checkpoints
from meshwright.trainers.checkpoints.trained_files import write_files
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.serving import generate_main
from meshwright.trainers.serving.saved_model import (
    ExportError,
    export_saved_model,
)
from meshwright.trainers.serving.translating import (
    Translator,
    check_source,
    for_translating,
    target_language,
)
from tests.tasks.text.parallel_files import install_all, sentences
from tests.tasks.text.test_translation import PLANS, SIZES
from tests.trainers import small_run

MODEL, PLAN, *PARAMS = PLANS["dense"]
TEXTS = ["red green blue number 3", "house", "a river \N{BLACK STAR}"]


@dataclasses.dataclass(frozen=True)
class Trained:
    folder: str
    params: list[str]
    programs: StepPrograms
    state: TrainState


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model_dir, whose training pairs are gone."""
    folder = tmp_path_factory.mktemp("mt")
    install_all(folder / "text", {"de": 60, "fr": 40})
    params = [*SIZES, *PARAMS, f"GettextCatalogues.root = '{folder / 'text'}'"]
    experiment, _ = build_experiment([MODEL, PLAN], params)
    programs = StepPrograms(experiment)
    state = TrainState.initial(programs)
    metadata = {"batches": experiment.task.data_fingerprint()}
    with Checkpoints(folder / "checkpoints") as saver:
        saver.save(0, state.logical(), metadata=metadata)
    write_files(str(folder), experiment.task.trained_files())
    shutil.rmtree(folder / "text")
    return Trained(str(folder), params, programs, state)


def call_main(trained, *params, **more_flags):
    return small_run.status_of(
        main_module,
        *params,
        gin_files=[MODEL, PLAN],
        gin_params=trained.params,
        model_dir=trained.folder,
        device_count="8",
        **more_flags,
    )


def expected(trained, language):
    """Ids and scores by the program that evaluation uses."""
    text = trained.programs.experiment.task.text
    sources = [text.encode(source, language) for source in TEXTS]
    batch = text.to_translate(sources, range(len(sources)), 8)
    out = trained.programs.decode(trained.state.weights(), batch)
    return np.asarray(out.ids)[: len(TEXTS)], np.asarray(out.scores)[: len(TEXTS)]


def test_lines_are_translated_as_evaluation_does(trained, tmp_path, capsys):
    file, output = tmp_path / "sources.txt", tmp_path / "out.jsonl"
    file.write_text("\n".join(TEXTS) + "\n")
    flags = {"prompts_file": str(file), "rows": "2", "output": str(output)}
    assert call_main(trained, target_language="de", **flags) is None
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == TEXTS
    vocabulary = trained.programs.experiment.task.text.trained_vocabulary()
    for line, ids, scores in zip(lines, *expected(trained, "de"), strict=True):
        found = line["translations"]
        assert len(found) == 4  # Beams of the task's search.
        np.testing.assert_allclose([f["score"] for f in found], scores, rtol=1e-4)
        best = found[0]
        ended = 2 in ids[0]
        assert best["ended"] is ended
        length = list(ids[0]).index(2) if ended else len(ids[0])
        assert best["ids"] == ids[0][:length].tolist()
        assert best["text"] == vocabulary.decode(ids[0])


def test_a_text_and_draws(trained, tmp_path, capsys):
    """A single prompt's translation is shown as text; ids count as they are."""
    flags = {"target_language": "fr", "temperature": "1.0", "top_k": "5"}
    assert call_main(trained, prompt=TEXTS[:1], seed="3", **flags) is None
    text = capsys.readouterr().out
    ids = trained.programs.experiment.task.text.encode(TEXTS[0], "fr")
    file = tmp_path / "sources.jsonl"
    file.write_text(json.dumps({"prompt": ids}))
    assert call_main(trained, prompts_file=str(file), seed="3", **flags) is None
    assert capsys.readouterr().out == text != "\n"


def test_a_source_that_is_too_long_keeps_no_other_from_its_translation(
    trained, tmp_path, capfd
):
    file, output = tmp_path / "sources.txt", tmp_path / "out.jsonl"
    long = "red " * 20
    file.write_bytes("\r\n".join([TEXTS[0], long, long, "", TEXTS[1]]).encode())
    flags = {"prompts_file": str(file), "target_language": "de"}
    # Of the batches of two sources one has only such that are too long.
    assert call_main(trained, rows="2", output=str(output), **flags) == 1
    message = "2 of 4 prompts are too long, and the others are answered: line 2 of "
    assert message in capfd.readouterr().err
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [TEXTS[0], long, long, TEXTS[1]]
    assert [len(line["translations"]) for line in lines] == [4, 0, 0, 4]
    assert "line 3 of " in lines[2]["refused"] and "refused" not in lines[3]
    ids, _ = expected(trained, "de")
    for line, want in zip((lines[0], lines[3]), ids, strict=False):
        got = line["translations"][0]["ids"]
        assert got == want[0, : len(got)].tolist()
    # Where none is left nothing is compiled.
    file.write_text(f"{long}\n{long}\n")
    assert call_main(trained, **flags) == 1
    assert "line 1 of " in capfd.readouterr().err


@pytest.mark.slow
def test_draws_are_the_same_on_every_mesh(trained, tmp_path, capsys):
    """Of batches behind the first too, which have more rows on more devices."""
    file = tmp_path / "sources.txt"
    file.write_text("\n".join(TEXTS))
    flags = {"prompts_file": str(file), "target_language": "fr", "rows": "1"}
    texts = set()
    for mesh in ("(2, 4)", "(1, 1)"):
        mesh_shape = f"MESH_SHAPE = {mesh}"
        assert call_main(trained, mesh_shape, temperature="1", **flags) is None
        lines = map(json.loads, capsys.readouterr().out.splitlines())
        texts.add(tuple(line["translations"][0]["text"] for line in lines))
    assert len(texts) == 1


def test_ids_of_another_language_than_the_flag_s_are_refused(trained, tmp_path, capfd):
    file = tmp_path / "sources.jsonl"
    ids = trained.programs.experiment.task.text.encode("red", "de")
    file.write_text(json.dumps({"prompt": ids}))
    flags = {"prompts_file": str(file), "target_language": "fr"}
    assert call_main(trained, **flags) == 1
    message = f"line 1 of {file} begins with the id {ids[0]}, but --target_language=fr"
    assert message in capfd.readouterr().err
    flags["target_language"] = "it"
    assert call_main(trained, **flags) == 1
    message = "--target_language is 'it': the model translates to de, fr"
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    "flags,message",
    [
        ({}, "--target_language is needed: the model translates to de, fr"),
        ({"target_language": "it"}, "is 'it': the model translates to de, fr"),
        (
            {"target_language": "de", "prompt": ["red " * 20]},
            "tokens, tag and end among them, but the model was trained on 16 at most",
        ),
        ({"target_language": "de", "max_tokens": "3"}, "--max_tokens is for text that"),
        # Before anything is read from standard input.
        ({"prompt": [], "target_language": "it"}, "is 'it': the model translates to d"),
    ],
)
def test_what_cannot_be_translated_is_refused(trained, capfd, flags, message):
    assert call_main(trained, **{"prompt": ["red"], **flags}) == 1
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    "plan", [pytest.param("hybrid", marks=pytest.mark.slow), "figure2"]
)
def test_a_single_source_fills_groups_of_experts_and_microbatches(tmp_path, plan):
    install_all(tmp_path, {"de": 60, "fr": 40})
    model, plan, *params = PLANS[plan]
    root = f"GettextCatalogues.root = '{tmp_path}'"
    experiment, _ = build_experiment([model, plan], [*SIZES, *params, root])
    wanted = experiment.global_batch
    assert for_translating(experiment, wanted + 1, 0).global_batch == 2 * wanted
    experiment = for_translating(experiment, 1, 0)
    assert experiment.global_batch == wanted
    programs = StepPrograms(experiment)
    theta = TrainState.initial(programs).weights()
    source = experiment.task.text.encode("red house", "de")
    (found,) = Translator(programs, theta).all([source])
    assert len(found) == experiment.task.search.beams and found[0].ids


def test_pairs_of_tokens_have_no_vocabulary_to_translate_by(trained, tmp_path):
    ids = {name: [2, 1] for name in ("source_ids", "target_ids", "target_labels")}
    pairs = PairDataset(train=lambda: tf.data.Dataset.from_tensors(ids), vocab_size=336)
    experiment = trained.programs.experiment
    task = dataclasses.replace(experiment.task, text=pairs)
    with pytest.raises(ValueError, match="decodes nothing, as PairDataset has no voc"):
        dataclasses.replace(experiment, task=task, decode_batches=1)
    experiment = dataclasses.replace(experiment, task=task, decode_batches=0)
    message = "Translation.text is PairDataset, which has no vocabulary: .*Translation"
    with pytest.raises(ValueError, match=message):
        generate_main._with_vocabulary(experiment)
    with pytest.raises(ExportError, match="PairDataset, which .* @TranslationInput"):
        export_saved_model(experiment, NestedMap(), tmp_path / "model")


def test_only_a_model_that_is_served_needs_no_files(trained, capfd):
    """The vocabulary is that of the folder of the training."""
    flags = {"prompt": TEXTS[:1], "target_language": "de"}
    assert call_main(trained, **flags) is None
    with_files = capfd.readouterr().out
    assert call_main(trained, "TranslationInput.files = None", **flags) is None
    assert capfd.readouterr().out == with_files
    task = trained.programs.experiment.task
    task = dataclasses.replace(task, text=dataclasses.replace(task.text, files=None))
    for refused in (
        task.describe_data,
        task.trained_files,
        lambda: next(task.decoding.batches(global_batch=1)),
    ):
        with pytest.raises(ValueError, match="Input.files is not set: bind it to your"):
            refused()


def test_sources_of_a_vocabulary_without_tags_have_none(trained, tmp_path):
    """As T5's, whose end is 1."""
    file = tmp_path / "t5.model"
    spec = SentencePieceVocabulary(vocab_size=300, special_tokens=SpecialTokens.T5)
    file.write_bytes(spec.trained(sentences(300)).model)
    task = trained.programs.experiment.task
    spec = dataclasses.replace(spec, model_file=str(file))
    text = dataclasses.replace(task.text, vocabulary=spec)
    task = dataclasses.replace(task, text=text)
    assert target_language(task, None) is None
    source = text.encode("red house", None)
    assert source == [*text.trained_vocabulary().encode(["red house"])[0], 1]
    check_source(task, source, "line 1", None)
    with pytest.raises(ValueError, match="--target_language is given, .*no tags"):
        target_language(task, "de")


def test_another_vocabulary_is_refused(trained, tmp_path, capfd):
    other = tmp_path / "text"
    install_all(other, {"de": 70, "fr": 40})
    kept = shutil.move(f"{trained.folder}/{VOCABULARY_FILE}", tmp_path)
    try:
        root = f"GettextCatalogues.root = '{other}'"
        flags = {"prompt": ["red"], "target_language": "de"}
        assert call_main(trained, root, **flags) == 1
    finally:
        shutil.move(kept, trained.folder)
    message = "the vocabulary is not the one that the weights were trained with"
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (SpecialTokens.WITH_START, "not the one that the weights were trained with"),
        (SpecialTokens.T5, "special_tokens"),
    ],
)
def test_an_export_with_another_vocabulary_is_refused(
    trained, tmp_path, capfd, tokens, message
):
    """Its texts would start and end elsewhere, or mean something else."""
    file = tmp_path / "other.model"
    spec = SentencePieceVocabulary(vocab_size=300, special_tokens=tokens)
    file.write_bytes(spec.trained(sentences(300)).model)
    params = [
        f"SentencePieceVocabulary.model_file = '{file}'",
        "SentencePieceVocabulary.vocab_size = 300",
    ]
    status = small_run.status_of(
        export,
        *params,
        gin_files=[MODEL, PLAN],
        gin_params=trained.params,
        model_dir=trained.folder,
        output=str(tmp_path / "out"),
        what="saved_model",
        device_count="8",
    )
    assert status == 1 and message in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_language_model_has_no_target_language(straight, capfd):
    _, folder = straight()
    flags = {"model_dir": str(folder), "device_count": "8", "target_language": "de"}
    assert small_run.status_of(main_module, prompt=["de"], **flags) == 1
    message = "--target_language is for a Translation, but Experiment.task is Language"
    assert message in capfd.readouterr().err
