"""Models from config.json and safetensors compute what a NumPy model of them does."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.trainers.checkpoints.published.published_facts import Model
from meshwright.trainers.checkpoints.published.safetensors_files import Tensor
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.trainers import parity
from tests.trainers.checkpoints.published import numpy_models
from tests.trainers.checkpoints.published.published_cases import (
    CASES,
    FAMILIES,
    S,
    V,
    as_bfloat16,
    begun,
    experiment,
    imported,
    programs_of,
    random_tensors,
    task_logits,
    write,
)

IDS = np.random.default_rng(1).integers(1, V, S).tolist()


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_numpy(tmp_path, name):
    config = CASES[name].config
    tensors = random_tensors(config)
    write(tmp_path, config, tensors)
    programs = programs_of(name)
    ours = task_logits(programs.experiment.task, imported(programs, tmp_path), IDS)
    theirs = numpy_models.logits(config, tensors, IDS)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_narrower_floats_become_float32_as_they_are(tmp_path, dtype):
    config = CASES["llama"].config
    tensors = random_tensors(config, dtype)
    write(tmp_path, config, tensors, files=3)
    taken = imported(programs_of("llama"), tmp_path)
    kernel = taken["softmax.kernel"]
    assert kernel.dtype == np.float32
    want = tensors["lm_head.weight"].astype(np.float32).T
    np.testing.assert_array_equal(kernel, want)


def test_newer_and_older_files_say_the_same(tmp_path):
    """Transformers 5 has all of rotary positions in one object, by kind of layer."""
    config = dict(CASES["gemma3"].config)
    tensors = random_tensors(config)
    write(tmp_path / "a", config, tensors)
    scaling, base = config.pop("rope_scaling"), config.pop("rope_theta")
    config["rope_parameters"] = {
        "full_attention": {**scaling, "rope_theta": base},
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": config.pop("rope_local_base_freq"),
        },
    }
    write(tmp_path / "b", config, tensors)
    del config["layer_types"]
    write(tmp_path / "c", {**config, "sliding_window_pattern": 6}, tensors)
    a, *others = (imported(programs_of("gemma3"), tmp_path / name) for name in "abc")
    for other in others:
        assert a.keys() == other.keys()
        for path in a:
            np.testing.assert_array_equal(a[path], other[path])


@pytest.mark.parametrize("layers", [8, 7])
def test_layers_of_a_pipeline_are_in_the_streams_order(tmp_path, layers):
    """Of 7, the last that stages and rounds have is none."""
    config = {**CASES["llama"].config, "num_hidden_layers": layers}
    tensors = random_tensors(config)
    write(tmp_path, config, tensors)
    made = experiment("llama", f"NUM_LAYERS = {layers}")
    pipeline = Pipeline(
        stack=made.task.stack, num_stages=2, num_microbatches=2, num_repeats=2
    )
    task = dataclasses.replace(made.task, stack=pipeline)
    programs = StepPrograms(dataclasses.replace(made, task=task))
    taken = imported(programs, tmp_path)
    stacked = tf.constant(np.asarray(taken["stack.feed_forward.w_in"]))
    in_order = pipeline.plain_weights(NestedMap(w_in=stacked)).w_in
    for i, layer in enumerate(Model.of(task).layers):
        want = tensors[f"model.layers.{i}.mlp.up_proj.weight"].T
        np.testing.assert_array_equal(stacked[layer.index], want)
        np.testing.assert_array_equal(in_order[i], want)
    assert np.any(stacked[1, 3]) == (layers == 8)


@pytest.mark.parametrize("name", FAMILIES)
def test_eight_devices_get_what_one_gets_and_train_alike(tmp_path, name):
    config = CASES[name].config
    write(tmp_path, config, random_tensors(config), files=2)
    one = programs_of(name)
    start = begun(one, tmp_path)
    want = parity.train(one.experiment, start, 2, programs=one)
    for partitioner in Partitioner:
        params = f"Experiment.partitioner = %Partitioner.{partitioner.name}"
        several = programs_of(name, params, mesh=(2, 4))
        state = begun(several, tmp_path)
        for path, weight in start.items_by_path():
            got = state.get_path(path)
            np.testing.assert_array_equal(got, weight, err_msg=path)
        got = parity.train(several.experiment, state, 2, programs=several)
        np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
        np.testing.assert_allclose(got.norms, want.norms, rtol=1e-4)


def test_each_device_reads_its_own_part(tmp_path, monkeypatch):
    config = CASES["llama"].config
    tensors = as_bfloat16(random_tensors(config))
    write(tmp_path, config, tensors)
    read = {}
    whole = Tensor.__getitem__

    def counted(self, index):
        part = whole(self, index)
        read[self.name] = read.get(self.name, 0) + part.nbytes
        return part

    monkeypatch.setattr(Tensor, "__getitem__", counted)
    imported(programs_of("llama", mesh=(2, 4)), tmp_path)
    # Each part is read once, though here one process has all devices.
    assert read == {name: array.nbytes for name, array in tensors.items()}


def test_only_some_weights_may_be_taken(tmp_path, caplog):
    """Such as the embedding of a model with other layers."""
    config = {**CASES["llama"].config, "num_hidden_layers": 1}
    tensors = random_tensors(config)
    write(tmp_path, config, tensors)
    taken = imported(programs_of("llama"), tmp_path, only=[r"embedding\..*"])
    assert list(taken) == ["embedding.table"]
    assert re.search(r"the number of layers is 2, but .* has 1", caplog.text)


def test_rules_take_tensors_without_a_config(tmp_path):
    config = CASES["llama"].config
    tensors = random_tensors(config)
    write(tmp_path, config, tensors)
    (tmp_path / "config.json").unlink()
    taken = imported(
        programs_of("llama"),
        tmp_path / "model.safetensors",
        rules=["lm_head.weight -> softmax.kernel transpose"],
        missing="initialize",
    )
    assert list(taken) == ["softmax.kernel"]
    np.testing.assert_array_equal(taken["softmax.kernel"], tensors["lm_head.weight"].T)
