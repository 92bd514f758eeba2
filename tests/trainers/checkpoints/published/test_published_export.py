"""What is exported as published is what was imported, or what was trained here."""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.task import Task
from meshwright.trainers.checkpoints.checkpoints import CheckpointError
from meshwright.trainers.checkpoints.published import published_families as families
from meshwright.trainers.checkpoints.published.published_export import (
    export_published,
)
from meshwright.trainers.checkpoints.published.published_facts import Model
from tests.trainers import parity
from tests.trainers.checkpoints.published import numpy_models
from tests.trainers.checkpoints.published.published_cases import (
    CASES,
    FAMILIES,
    begun,
    experiment,
    imported,
    programs_of,
    random_tensors,
    task_logits,
    write,
)


def export(name, weights, folder, *, dtype="float32", **changes):
    folder.mkdir()
    fields = {"family": CASES[name].config["model_type"], "file_bytes": 10**9}
    task = programs_of(name).experiment.task
    export_published(task, weights, folder, dtype=dtype, **(fields | changes))


def tree_of(taken) -> NestedMap:
    tree = NestedMap()
    for path, array in taken.items():
        tree.set_path(path, np.asarray(array))
    return tree


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("name", CASES)
def test_what_is_imported_is_exported_byte_by_byte(tmp_path, name, dtype):
    config = CASES[name].config
    write(tmp_path / "in", config, random_tensors(config, dtype))
    taken = imported(programs_of(name), tmp_path / "in")
    export(name, tree_of(taken), tmp_path / "out", dtype=np.dtype(dtype).name)
    ours, theirs = (
        (tmp_path / folder / "model.safetensors").read_bytes()
        for folder in ("out", "in")
    )
    assert ours == theirs
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["torch_dtype"] == np.dtype(dtype).name
    for key, value in config.items():
        if key not in ("max_position_embeddings", "bos_token_id", "sliding_window"):
            assert written[key] == value, key
    again = imported(programs_of(name), tmp_path / "out")
    for path, weight in taken.items():
        np.testing.assert_array_equal(again[path], weight)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_trained_here_says_the_same_elsewhere(tmp_path, name):
    programs = programs_of(name)
    write(tmp_path / "in", CASES[name].config, random_tensors(CASES[name].config))
    start = begun(programs, tmp_path / "in")
    # Enough to follow what it was trained on.
    state = parity.train(programs.experiment, start, 30, programs=programs).state
    theta = {
        path.removeprefix("theta."): weight
        for path, weight in state.items()
        if path.startswith("theta.")
    }
    export(name, tree_of(theta), tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    tensors = load_file(tmp_path / "out/model.safetensors")
    (batch,) = parity.random_batches(programs.experiment, 1)
    ids = batch.ids[0, 0, :3].tolist()
    ours = list(ids)
    for _ in range(12):
        logits = task_logits(programs.experiment.task, theta, ours)
        ours.append(int(np.argmax(logits[-1])))
    assert ours[3:] == numpy_models.greedy(config, tensors, ids, 12)
    assert len(set(ours[3:])) > 3


def test_large_models_are_several_files_with_an_index(tmp_path):
    config = CASES["qwen2"].config
    tensors = random_tensors(config)
    write(tmp_path / "in", config, tensors)
    taken = tree_of(imported(programs_of("qwen2"), tmp_path / "in"))
    export("qwen2", taken, tmp_path / "out", file_bytes=20000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 2
    size = sum(array.nbytes for array in tensors.values())
    assert index["metadata"] == {"total_size": size}
    for file in files:
        part = load_file(tmp_path / "out" / file)
        assert {n for n, f in index["weight_map"].items() if f == file} == set(part)
        nbytes = [array.nbytes for array in part.values()]
        assert sum(nbytes) <= 20000 or len(nbytes) == 1
        for name, array in part.items():
            np.testing.assert_array_equal(array, tensors[name])
        assert (tmp_path / "out" / file).stat().st_mode & 0o777 == 0o644
    assert not (tmp_path / "out/model.safetensors").exists()
    again = imported(programs_of("qwen2"), tmp_path / "out")
    for path, weight in taken.items_by_path():
        np.testing.assert_array_equal(again[path], weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "mistral"}, r"--family=mistral must be one of llama, qwen2, "),
        ({"dtype": "int8"}, "--dtype=int8 must be one of float32, bfloat16, float16"),
        (
            {"family": "qwen2"},
            r"no qwen2 model is like this one:\n  layer 0: MultiHeadAttention\.use_b"
            r"ias is False, but a qwen2 model has True(\n.*)*\nexport it as another",
        ),
        (
            {"dtype": "float16"},
            r"model\.norm\.weight has values that float16 ",
        ),
    ],
)
def test_what_cannot_be_is_told(tmp_path, changes, message):
    config = CASES["llama"].config
    write(tmp_path / "in", config, random_tensors(config))
    taken = tree_of(imported(programs_of("llama"), tmp_path / "in"))
    taken.final_norm.scale = np.full_like(taken.final_norm.scale, 1e6)
    with pytest.raises(CheckpointError, match=message):
        export("llama", taken, tmp_path / "out", **changes)


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (
            "MultiHeadAttention.positions = %PositionKind.RELATIVE",
            r"MultiHeadAttention\.positions is .*, but a qwen3 model has PositionKind",
        ),
        (
            "TransformerLayer.feed_forward_norm = @LayerNorm()\n"
            "LayerNorm.model_dims = 16",
            r"TransformerLayer\.feed_forward_norm is of class LayerNorm: set it to @RM",
        ),
        (
            "FeedForward.activation = %Activation.RELU",
            r"FeedForward\.activation is Activation\.RELU, but hidden_act in",
        ),
        (
            "MultiHeadAttention.mask = @PrefixMask()\nPrefixMask.length = 3",
            r"the window of MultiHeadAttention\.mask is PrefixMask\(.*\), but",
        ),
        (
            "TransformerLayer.order = %Order.PARALLEL",
            r"TransformerLayer\.order is Order\.PARALLEL, but a qwen3 .* Order\.SEQ",
        ),
        (
            "MultiHeadAttention.sink = %Sink.LEARNED",
            r"MultiHeadAttention\.sink is Sink\.LEARNED, but a qwen3 .* Sink\.NONE",
        ),
        (
            "MultiHeadAttention.positions = @RelativeVectors()",
            r"MultiHeadAttention\.positions is RelativeVectors\(.*\), but",
        ),
    ],
)
def test_a_model_that_no_family_has_is_told(tmp_path, param, message):
    params = param.split("\n")
    made = experiment("qwen3", *params)
    weights = parity.initial_state(made).theta
    assert re.search(message, refused(made.task, weights, tmp_path, "qwen3"))


def refused(task, weights, folder, family) -> str:
    how = {"family": family, "dtype": "float32", "file_bytes": 10**9}
    with pytest.raises(CheckpointError) as told:
        export_published(task, weights, folder, **how)
    return str(told.value)


def test_caps_of_attention_are_not_gemma_3s(tmp_path):
    """Its config.json has the key, but what reads it caps nothing."""
    made = experiment("gemma3", "MultiHeadAttention.logit_cap = 50.0")
    text = refused(made.task, NestedMap(), tmp_path, "gemma3_text")
    assert re.search(r"Attention\.logit_cap is 50\.0, but a gemma3_text .* None", text)


def test_weights_that_no_table_names_are_told(tmp_path, monkeypatch):
    kind = families.FAMILIES["llama"]
    lines = [line for line in kind.lines if "w_gate" not in line.weight]
    lesser = dataclasses.replace(kind, lines=tuple(lines))
    monkeypatch.setitem(families.FAMILIES, "llama", lesser)
    task = programs_of("llama").experiment.task
    text = refused(task, NestedMap(), tmp_path, "llama")
    assert re.search(
        r"llama models have no tensors .*\n  stack\.feed_forw.*gate$", text
    )


def test_tasks_that_are_no_language_models_are_told(tmp_path):
    text = refused(Task(), NestedMap(), tmp_path, "llama")
    assert re.search("those of a LanguageModel, not of a Task: set", text)


@pytest.mark.parametrize(
    ("name", "length"), [("llama", 128), ("qwen2", 256), ("gemma3", 24), ("qwen3", 24)]
)
def test_the_length_of_contexts(name, length):
    """Of a linear scaling, and of none, that of rows."""
    model = Model.of(programs_of(name).experiment.task)
    kind = families.FAMILIES[CASES[name].config["model_type"]]
    assert kind.config(model)["max_position_embeddings"] == length
