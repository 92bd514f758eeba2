"""From published weights to published weights by the binaries; the examples' sizes."""

import json
import math
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

from meshwright.trainers.checkpoints.published.published_facts import Model
from meshwright.trainers.checkpoints.published.published_families import FAMILIES
from meshwright.trainers.checkpoints.published.published_weights import tensors_of
from meshwright.trainers.cli import build_experiment
from tests.trainers.checkpoints.published.published_cases import (
    CASES,
    SIZES,
    as_bfloat16,
    random_tensors,
    write,
)
from tests.trainers.parity import DATA
from tests.trainers.serving import test_export_main
from tests.trainers.training import test_train_main

EXAMPLES = pathlib.Path(__file__).parents[4] / "docs" / "examples"


def test_a_training_begins_with_and_ends_in_published_weights(tmp_path):
    case = CASES["qwen3"]
    tensors = as_bfloat16(random_tensors(case.config))
    write(tmp_path / "in", case.config, tensors, files=2)
    gin_files = [case.gin_file, "plans/finalized.gin", str(DATA / "small_adam.gin")]
    params = [
        *SIZES,
        *case.params,
        "Experiment.num_steps = 2",
        "Experiment.initialize_from = @InitializeFrom()",
        f"InitializeFrom.checkpoint = '{tmp_path / 'in'}'",
    ]
    test_train_main.call_main(
        tmp_path / "run", *params, gin_files=gin_files, mode="train"
    )
    status = test_export_main.call_main(
        tmp_path / "out",
        *params,
        gin_files=gin_files,
        model_dir=str(tmp_path / "run"),
        what="safetensors",
        family="qwen3",
        dtype="bfloat16",
    )
    assert status is None
    folder = tmp_path / "out" / "safetensors"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
    trained = load_file(folder / "model.safetensors")
    assert trained.keys() == tensors.keys()
    for name, tensor in trained.items():
        assert tensor.dtype == tensors[name].dtype
        moved = np.abs(np.float32(tensor) - np.float32(tensors[name]))
        # Adam's two steps, of 0.005 and 0.01, and a rounding to 8 bits.
        assert moved.max() < 0.05, name
    assert not np.array_equal(trained["lm_head.weight"], tensors["lm_head.weight"])


@pytest.mark.parametrize(
    ("name", "family", "size"),
    [
        ("llama_3_1_8b", "llama", 8_030_261_248),
        ("qwen_2_5_7b", "qwen2", 7_615_616_512),
        ("gemma_2_2b", "gemma2", 2_614_341_888),
        ("gemma_3_1b", "gemma3_text", 999_885_952),
    ],
)
def test_an_example_has_the_published_size_and_form(name, family, size):
    experiment, _ = build_experiment([str(EXAMPLES / f"{name}.gin")], [])
    model, kind = Model.of(experiment.task), FAMILIES[family]
    assert kind.problems(model, kind.config(model)) == []
    tensors = tensors_of(kind.mapping, model)
    assert sum(math.prod(tensor.shape) for tensor in tensors) == size
