"""meshwright-export as a user meets it: what it writes, and how it fails."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright.trainers import export as main_module
from tests.trainers import small_run
from tests.trainers.small_run import saved_state, small_programs


def call_main(output, *params, **more_flags):
    given = {"output": str(output), "device_count": "8"}
    return small_run.status_of(main_module, *params, **given, **more_flags)


def test_weights_are_those_of_the_step_asked_for(straight, tmp_path):
    _, folder = straight()
    flags_of_15 = {"model_dir": str(folder), "step": "15", "what": "saved_model"}
    assert call_main(tmp_path / "exported", **flags_of_15) is None
    loaded = tf.saved_model.load(str(tmp_path / "exported" / "saved_model"))
    tables = [
        saved_state(small_programs(), folder, step)["theta.embedding.table"]
        for step in (15, 20)
    ]
    np.testing.assert_array_equal(loaded.weights["embedding"]["table"], tables[0])
    assert not np.array_equal(*tables)


@pytest.mark.slow  # Whatever runs first in a process compiles the trainer's programs.
def test_a_training_is_exported_whole(straight, tmp_path, capsys):
    _, folder = straight()
    output = tmp_path / "exported"
    call_main(output, model_dir=str(folder), step="15", calls="1", platforms="cpu")
    help_text = capsys.readouterr().out
    assert re.search(r"exported/saved_model: [\d.]+ MB in \d+ s", help_text)
    assert f"python {output}/bundle/run_bundle.py --steps=10" in help_text
    state = saved_state(small_programs(), folder, 15)
    loaded = tf.saved_model.load(str(output / "saved_model"))
    table = loaded.weights["embedding"]["table"].numpy()
    np.testing.assert_array_equal(table, state["theta.embedding.table"])
    for path, value in state.items():
        got = np.load(output / "bundle/state" / f"state.{path}.npy")
        np.testing.assert_array_equal(got, value, err_msg=path)
    manifest = json.loads((output / "bundle/manifest.json").read_text())
    assert manifest["platforms"] == ["cpu"]
    assert "NUM_LAYERS = 1" in manifest["step"]["config"]
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]


@pytest.mark.parametrize(
    ("more_flags", "message"),
    [
        (
            {"what": "weights"},
            "--what=weights must be some of saved_model, bundle, keras",
        ),
        (
            {},
            "a SavedModel or Keras model has weights: give the training's --model_dir",
        ),
        (
            {"what": "bundle", "platforms": "gpu"},
            r"platforms \['gpu'\]: some of cpu",
        ),
        (
            {"what": "bundle", "calls": "0"},
            "calls is 0; it must be a whole number of at least 1",
        ),
        (
            {"what": "safetensors", "model_dir": "/none"},
            "a family of models, or of a mapping: give one of these, such as --fam",
        ),
        (
            {
                "what": "safetensors",
                "model_dir": "/none",
                "family": "llama",
                "mapping": "my.map",
            },
            "a family of models, or of a mapping: give one of these, such as --fam",
        ),
        ({"model_dir": "/none"}, "there is no checkpoint in /none/checkpoints"),
    ],
)
def test_bad_flag(tmp_path, capfd, more_flags, message):
    assert call_main(tmp_path / "out", **more_flags) == 1
    assert re.search(f"meshwright-export: .*{message}", capfd.readouterr().err)
    assert not any(tmp_path.iterdir())


def test_no_such_step(straight, tmp_path, capfd):
    _, folder = straight()
    assert call_main(tmp_path / "out", model_dir=str(folder), step="7") == 1
    assert re.search(
        "no checkpoint of step 7 .*, only of 5, 10", capfd.readouterr().err
    )


def test_output_that_is_there(tmp_path, capfd):
    assert call_main(tmp_path, what="bundle") == 1
    assert re.search("is there already: name another", capfd.readouterr().err)
    file = tmp_path / "file"
    file.touch()
    assert call_main(file / "out", what="bundle") == 1
    assert re.search(r"out cannot be made \(.*\): name", capfd.readouterr().err)


def test_a_bundle_that_lacks_data_is_refused_before_anything_is_written(
    straight, tmp_path, capfd
):
    _, folder = straight()
    params = ["TextFiles.root = '/none'"]
    assert call_main(tmp_path / "out", *params, model_dir=str(folder)) == 1
    shown = capfd.readouterr()
    assert "saved_model:" not in shown.out
    assert re.search(
        "there is no folder '/none'.*--what=saved_model --model_dir", shown.err
    )
    assert not any(tmp_path.iterdir())


def test_nothing_is_left_of_an_export_that_fails(straight, tmp_path, capfd):
    _, folder = straight()
    flags = {"model_dir": str(folder), "what": "saved_model,keras"}
    assert call_main(tmp_path / "out", **flags) == 1
    shown = capfd.readouterr()
    assert "saved_model:" in shown.out and "is no KerasModel" in shown.err
    assert not any(tmp_path.iterdir())
