"""Keras's names and a user's module in gin files, through the binaries."""

import json
import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import meshwright.framework as mw
from meshwright.tasks.input.example_order import Split
from meshwright.trainers.experiment import config
from meshwright.trainers.experiment.bindings.outside_names import import_modules
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.serving.saved_model import export_saved_model
from tests.tasks.keras.keras_cases import programs_of, task_of
from tests.tasks.keras.test_keras_model import CASES
from tests.trainers.small_run import points

EXAMPLES = pathlib.Path(__file__).parents[3] / "docs" / "examples"


def run(binary, *flags, gin_file="my_models.gin", module="my_models"):
    """Runs a binary in the folder of the user's module."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            f"meshwright.trainers.{binary}",
            f"--import={module}",
            f"--gin_file={gin_file}",
            *flags,
        ],
        cwd=EXAMPLES,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_keras_model_is_trained_goes_on_and_is_exported(tmp_path):
    """From 20 steps on a mesh to 40 on another, as 40 in one go."""
    whole = run("train", f"--model_dir={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    assert "sparse_top_k_categorical_accuracy" in whole.stdout
    first = run(
        "train",
        f"--model_dir={tmp_path / 'parts'}",
        "--gin_param=Experiment.num_steps=20",
    )
    assert first.returncode == 0, first.stderr
    second = run("train", f"--model_dir={tmp_path / 'parts'}")
    assert second.returncode == 0, second.stderr
    want, got = (points(tmp_path / name, "train") for name in ("whole", "parts"))
    assert want["loss"] == got["loss"] and len(want["loss"]) == 4

    exported = run(
        "export",
        f"--model_dir={tmp_path / 'parts'}",
        f"--output={tmp_path / 'exported'}",
        "--what=saved_model,keras",
    )
    assert exported.returncode == 0, exported.stderr
    loaded = tf.saved_model.load(str(tmp_path / "exported" / "saved_model"))
    x = np.random.default_rng(1).standard_normal([70, 16], np.float32)
    logits = loaded.signatures["serving_default"](x=tf.constant(x))["output"]
    right = np.mean(np.argmax(logits, -1) == np.argmax(x[:, :10], -1))
    assert f"accuracy {right:.4g}" in second.stdout
    model = keras.models.load_model(tmp_path / "exported" / "model.keras")
    np.testing.assert_allclose(
        model.predict(x, verbose=0), logits, rtol=1e-4, atol=1e-5
    )


def test_a_model_of_two_inputs_is_exported(tmp_path):
    """Arguments of a SavedModel have no dots in their names."""
    make, arrays, compiled = CASES["two outputs"]
    programs = programs_of(task_of(make, arrays, **compiled), keras.optimizers.SGD(0.1))
    weights = mw.NestedMap(programs.init(programs.seed()).theta).map(np.asarray)
    export_saved_model(programs.experiment, weights, tmp_path / "saved")
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    x = arrays[0]["a"][:3]
    got = loaded.signatures["serving_default"](x_a=tf.constant(x), x_b=tf.constant(-x))
    want = programs.experiment.task.filled(weights)({"a": x, "b": -x})
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5)


def test_a_task_of_the_users_is_trained_and_exported(tmp_path):
    how = {"gin_file": "my_task.gin", "module": "my_task"}
    short = ("--gin_param=Experiment.num_steps=300", f"--model_dir={tmp_path}/run")
    done = run("train", *short, **how)
    assert done.returncode == 0, done.stderr
    right = float(re.search(r"Held-out: .* right ([\d.]+)", done.stdout)[1])
    assert right > 0.95
    export = (f"--model_dir={tmp_path}/run", f"--output={tmp_path}/exported")
    done = run("export", *export, "--what=saved_model", **how)
    assert done.returncode == 0, done.stderr
    loaded = tf.saved_model.load(f"{tmp_path}/exported/saved_model")
    points = tf.constant([[1.0, 0.0], [-1.0, 0.0]])  # After half a turn, and none.
    logits = loaded.signatures["serving_default"](point=points)["logit"].numpy()
    assert logits[0] > 0 > logits[1]


def test_a_task_of_the_users_takes_40_lines():
    lines = (EXAMPLES / "my_task.py").read_text().split('"""')[2].splitlines()
    assert len([line for line in lines if line.strip()]) <= 40


def test_a_keras_model_is_planned_by_keras_names(tmp_path):
    out = tmp_path / "plan.json"
    done = run("plan", "--topology=cpu", f"--json_out={out}")
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["model_flops"] == 6 * 32 * 64 * 26
    done = run("plan", "--explain")
    assert done.returncode == 0, done.stderr
    assert "0.theta.sequential.dense.kernel" in done.stdout


@pytest.fixture
def imported(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import_modules(["my_models"])


def built(*params):
    return config.load_and_build(Experiment, [EXAMPLES / "my_models.gin"], params)[0]


@pytest.mark.parametrize(
    ("param", "message"),
    [
        ("KerasModel.model=@my_models.classifer", "Did you mean my_models.classifier"),
        ("KerasModel.model=@my_models.classifier()", "without brackets"),
        (
            "DatasetInput.train=@my_models.classifier",
            "returns Sequential; it must",
        ),
        ("DatasetInput.train=@my_models.train()", "in gin @function, without brackets"),
        ("my_models.classifier.widht=3", "widht"),
        ("keras.optimizers.AdamW.learning_rat=3", "learning_rat"),
        (
            "KerasOptimizer.optimizer=@keras.losses.MeanSquaredError()",
            "a Keras opt",
        ),
        ("KerasModel.model=@keras.utils.get_file", "No configurable matching"),
        ("KerasModel.model=@keras.models.load_model", "No configurable matching"),
        ("KerasModel.model=@keras.layers.TFSMLayer", "No configurable matching"),
        ("KerasModel.model=@keras.applications.ResNet50", "No configurable matching"),
    ],
)
def test_a_wrong_binding_is_told(param, message, imported):
    with pytest.raises(config.ConfigError, match=message):
        built(param)


def test_short_names_are_ours(imported):
    experiment = built(
        "Experiment.optimizer=@Adam()",
        "Adam.learning_rate=0.1",
    )
    assert type(experiment.optimizer).__module__.startswith("meshwright")


@pytest.mark.parametrize(
    ("code", "kind"), [("x = (", "SyntaxError"), ("raise KeyError('x')", "KeyError")]
)
def test_a_module_that_fails_is_told(code, kind, tmp_path, monkeypatch):
    (tmp_path / f"failing_{kind}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    message = f"--import=failing_{kind}: the module raises {kind}"
    with pytest.raises(ValueError, match=message):
        import_modules([f"failing_{kind}"])


def test_a_module_that_is_not_there_is_told(tmp_path):
    done = run("train", f"--model_dir={tmp_path}", module="nope")
    assert done.returncode == 1
    assert (
        "--import=nope: No module named 'nope': it is looked for in the" in done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.fixture(params=["disk", "bucket"])
def root(request, tmp_path):
    """A folder."""
    return {"disk": str(tmp_path), "bucket": f"ram://{tmp_path.name}"}[request.param]


@pytest.fixture
def records(monkeypatch, root):
    """The input of the example that reads a language model's text from TFRecords."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import_modules(["my_records"])
    params = [f"TextRecords.root = '{root}'", "SEQUENCE_LENGTH = 8"]
    files = [str(EXAMPLES / "my_records.gin")]
    return config.load_and_build(Experiment, files, params)[0].task.text


def test_texts_of_records_are_documents(records, root):
    for name, texts in {
        "train-0": [b"one", b"two words"],
        "train-1": [b"three"],
        "validation-0": [b"held out"],
    }.items():
        with tf.io.TFRecordWriter(f"{root}/{name}.tfrecord") as writer:
            for each in texts:
                value = tf.train.Feature(bytes_list=tf.train.BytesList(value=[each]))
                feature = tf.train.Features(feature={"text": value})
                writer.write(tf.train.Example(features=feature).SerializeToString())
    assert records.statistics(Split.TRAIN).documents == 3
    assert records.statistics(Split.TRAIN).text_bytes == len(b"onetwo wordsthree")
    assert records.statistics(Split.HELD_OUT).text_bytes == len(b"held out")


def test_a_folder_without_records_is_named(records, root):
    with pytest.raises(FileNotFoundError, match=f"TextRecords.root: .* in {root}"):
        records.statistics(Split.TRAIN)


def tokens(monkeypatch, *params):
    """The task of the example on packed tokens."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import_modules(["my_tokens"])
    files = [str(EXAMPLES / "my_tokens.gin")]
    return config.load_and_build(Experiment, files, list(params))[0].task


def test_packed_tokens_of_the_users_are_rows_of_a_language_model(monkeypatch):
    task = tokens(monkeypatch)
    for batches in (
        task.train_batches(0, global_batch=4, rows=range(4)),
        task.eval_batches(global_batch=4, rows=range(4)),
    ):
        batch = next(iter(batches)).map(lambda t: t.numpy())
        starts = batch.segment_positions == 0
        assert (batch.ids[starts] == 0).all() and starts.sum(1).tolist() == [2] * 4
        follows = ~np.roll(starts, -1, 1)
        np.testing.assert_array_equal(
            np.roll(batch.ids, -1, 1)[follows], batch.labels[follows]
        )


def test_another_input_of_a_language_model_is_refused_with_those_that_fit(monkeypatch):
    message = "text is DatasetInput.*of class TextInput, .* or of class TokenDataset"
    with pytest.raises(config.ConfigError, match=message):
        tokens(
            monkeypatch,
            "LanguageModel.text = @DatasetInput()",
            "DatasetInput.train = @my_tokens.train",
        )


def pairs(monkeypatch, name):
    """The task of an example on pairs of tokens."""
    monkeypatch.syspath_prepend(EXAMPLES)
    if name == "my_pairs":
        import_modules([name])
    files = [str(EXAMPLES / f"{name}.gin")]
    return config.load_and_build(Experiment, files, [])[0].task


def test_pairs_of_the_users_are_rows_of_an_encoder_decoder(monkeypatch):
    task = pairs(monkeypatch, "my_pairs")
    for batches in (
        task.train_batches(0, global_batch=4, rows=range(4)),
        task.eval_batches(global_batch=4, rows=range(4)),
    ):
        batch = next(iter(batches)).map(lambda t: t.numpy())
        assert (batch.target_ids[:, 0] == 0).all()
        np.testing.assert_array_equal(
            batch.target_ids[:, 1:], batch.target_labels[:, :-1]
        )
        np.testing.assert_array_equal(
            batch.source_ids[:, :20], batch.target_labels[:, 19::-1]
        )
        np.testing.assert_array_equal(batch.target_weights, batch.target_labels != 0)


def test_what_serves_pairs_has_the_model_and_the_rows_of_the_training(monkeypatch):
    trained, served = (pairs(monkeypatch, n) for n in ("my_pairs", "my_pairs_serve"))
    assert served.weights() == trained.weights()
    assert served.text.source_length == trained.text.source_length
    assert served.text.target_length == trained.text.target_length
    assert served.text.files is None and served.serving is not None
