"""Safetensors of a family of one's own, by a file that says which tensor is which."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.checkpoints.checkpoint_rules import InitializeFrom
from meshwright.trainers.checkpoints.checkpoints import CheckpointError
from meshwright.trainers.checkpoints.published import mapping_files
from meshwright.trainers.checkpoints.published.mapping_files import read_mapping
from meshwright.trainers.checkpoints.published.published_export import (
    export_published,
)
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.trainers.checkpoints.published.published_cases import (
    CASES,
    imported,
    programs_of,
    random_tensors,
    write,
)
from tests.trainers.parity import initial_state, small_experiment

LLAMA = mapping_files.__file__.replace("mapping_files.py", "llama.map")
# As T5's decoder and PaLM's layers have it: no published family does.
OURS = """\
# tensor                    weight
wte                      -> embedding.table
norm                     -> final_norm.scale
bias                     -> stack.relative_bias        # of all layers
h.*.ln                   -> *.attention_norm.scale
h.*.q                    -> *.attention.w_q            transpose
h.*.k                    -> *.attention.w_k            flat
h.*.v                    -> *.attention.w_v
h.*.o                    -> *.attention.w_o            transpose
h.*.up                   -> *.feed_forward.w_in        transpose
h.*.down                 -> *.feed_forward.w_out
h.*.none                 -> *.feed_forward.b_in
"""
PARAMS = (
    "MESH_SHAPE = (2, 4)",
    "LanguageModel.stack = @SharedRelativeBias()",
    "SharedRelativeBias.stack = @Repeat()",
    "transformer_layer.positions = %PositionKind.SHARED",
    "transformer_layer.order = %Order.PARALLEL",
)


@pytest.fixture(scope="module")
def ours():
    return StepPrograms(small_experiment(*PARAMS))


def mapping_of(folder, text):
    file = folder / "my.map"
    file.write_text(text)
    return str(file)


def test_a_family_of_ones_own_goes_out_and_in(tmp_path, ours):
    task = ours.experiment.task
    weights = initial_state(ours.experiment).theta
    mapping = mapping_of(tmp_path, OURS)
    how = {"mapping": mapping, "dtype": "float32", "file_bytes": 10**9}
    (tmp_path / "out").mkdir()
    export_published(task, weights, tmp_path / "out", **how)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    tensors = load_file(tmp_path / "out/model.safetensors")
    layers = weights.stack.stack
    M = layers.attention.w_q.shape[1]
    for i in range(2):
        of = {name: tensors[f"h.{i}.{name}"] for name in "qkvo"}
        attention = layers.attention.map(lambda w, i=i: w[i])
        np.testing.assert_array_equal(of["q"], attention.w_q.reshape(M, -1).T)
        np.testing.assert_array_equal(of["k"], attention.w_k.reshape(-1))
        np.testing.assert_array_equal(of["v"], attention.w_v)
        np.testing.assert_array_equal(of["o"], attention.w_o.reshape(-1, M).T)
    np.testing.assert_array_equal(tensors["bias"], weights.stack.relative_bias)
    assert not any("none" in name for name in tensors)
    taken = imported(ours, tmp_path / "out", mapping=mapping)
    assert sorted(taken) == [path for path, _ in weights.items_by_path()]
    for path, weight in weights.items_by_path():
        np.testing.assert_array_equal(taken[path], weight)


def test_the_files_of_families_are_such_mappings(tmp_path):
    """Without a config.json too."""
    config = CASES["llama"].config
    write(tmp_path, config, random_tensors(config, jnp.bfloat16))
    want = imported(programs_of("llama"), tmp_path)
    (tmp_path / "config.json").unlink()
    got = imported(programs_of("llama"), tmp_path, mapping=LLAMA)
    assert got.keys() == want.keys()
    for path, weight in want.items():
        np.testing.assert_array_equal(got[path], weight)


@pytest.mark.parametrize(
    "line,message",
    [
        ("norm final_norm.scale", r":3: `norm .*` must read `tensor -> weight`, with"),
        ("norm -> final_norm.scale rot", r":3: .* with transpose or flat behind it or"),
        ("norm.* -> final_norm.scale", r":3: .* must have `\*` once in the tensor"),
        ("norm -> *.scale", r":3: .* must have `\*` once in the tensor, for the numb"),
        ("h.*.q.* -> *.attention.w_q", r":3: .* must have `\*` once"),
        ("h.*.q -> *.attention.*", r":3: \*\.attention\.\* is no path of a weight: wr"),
        ("wte -> final_norm.scale", r":3: wte is on line 1 already: leave out one"),
        ("norm -> embedding.table", r":3: embedding\.table is on line 1 already: le"),
    ],
)
def test_a_line_that_cannot_be_is_told_by_its_number(tmp_path, line, message):
    mapping = mapping_of(tmp_path, f"wte -> embedding.table\n# Norms.\n{line}\n")
    with pytest.raises(ValueError, match=re.escape(mapping) + message):
        InitializeFrom(checkpoint="x", mapping=mapping)


def test_files_that_cannot_be_read_are_told(tmp_path):
    with pytest.raises(ValueError, match=r"my\.map cannot be read \(No such file"):
        read_mapping(str(tmp_path / "my.map"))
    with pytest.raises(ValueError, match=r"has no line `tensor -> weight`: add some"):
        read_mapping(mapping_of(tmp_path, "# Nothing.\n"))
    (tmp_path / "my.map").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"my\.map is not in UTF-8 .*: save it as"):
        read_mapping(str(tmp_path / "my.map"))


def test_what_does_not_fit_is_told(tmp_path, ours):
    lesser = mapping_of(tmp_path, OURS.replace("h.*.up ", "# "))
    how = {"mapping": lesser, "dtype": "float32", "file_bytes": 10**9}
    message = r"my\.map have no tensors for these weights:\n  stack\.stack\.feed_.*w_in"
    with pytest.raises(CheckpointError, match=message):
        export_published(ours.experiment.task, NestedMap(), tmp_path, **how)
    with pytest.raises(CheckpointError, match="mapping is for safetensors, and"):
        imported(ours, tmp_path / "none", mapping=lesser)
    with pytest.raises(ValueError, match="and rules say it too: leave out one of"):
        InitializeFrom(checkpoint="x", mapping=lesser, rules=("a -> b",))


@pytest.mark.parametrize(
    "line,message",
    [
        (
            ("norm ", "h.1.ln "),
            r"my\.map: h\.1\.ln is to be both final_norm\.scale and stack\.stack\..*",
        ),
        (
            ("h.*.none -> *.feed_forward.b_in", "v -> stack.stack.attention.w_v"),
            r"my\.map: stack\.stack\.attention\.w_v\[0\] is to be both v and h\.0\.v",
        ),
    ],
)
def test_a_line_for_all_layers_and_one_for_none_do_not_say_the_same(
    tmp_path, ours, line, message
):
    twice = mapping_of(tmp_path, re.sub(" +->", " ->", OURS).replace(*line))
    how = {"mapping": twice, "dtype": "float32", "file_bytes": 10**9}
    with pytest.raises(CheckpointError, match=message + ": leave out one of the lines"):
        export_published(ours.experiment.task, NestedMap(), tmp_path, **how)
