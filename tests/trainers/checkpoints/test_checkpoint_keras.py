"""Weights that Keras has saved begin a training of the same model, or of another."""

import functools
import json
import logging
import os
import pathlib
import re
import zipfile

import h5py
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.checkpoints import checkpoint_keras
from meshwright.trainers.checkpoints.checkpoint_initialize import (
    weights_from,
    with_weights,
)
from meshwright.trainers.checkpoints.checkpoint_rules import InitializeFrom, Missing
from meshwright.trainers.checkpoints.checkpoints import CheckpointError
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.training import loop
from meshwright.trainers.training.evaluation import sums_over
from tests.tasks.keras.keras_cases import (
    CROSS_ENTROPY,
    ROWS,
    batches_of,
    examples,
    programs_of,
    task_of,
)

LAYERS = keras.layers
ENDINGS = (".keras", ".weights.h5", ".weights.json")
HELD_OUT = examples(40)


def classifier(classes=10, more=0):
    """Has running statistics, a frozen layer, and a model within the model."""
    x = keras.Input([16])
    h = LAYERS.Dense(32, "relu", name="first")(x)
    h = LAYERS.BatchNormalization()(h)
    inner = keras.Sequential(
        [keras.Input([32]), LAYERS.Dense(32), LAYERS.Dropout(0.1), LAYERS.Dense(32)],
        name="inner",
    )
    h = LAYERS.Dense(32, trainable=False, name="frozen")(inner(h))
    for _ in range(more):
        h = LAYERS.Dense(32)(h)
    return keras.Model(x, LAYERS.Dense(classes, name="head")(h))


class Subclass(keras.Model):
    """Waits for its input, and has layers in lists and dicts."""

    def __init__(self):
        super().__init__()
        self.blocks = [
            [LAYERS.Dense(16), LAYERS.LayerNormalization()],
            {"b": LAYERS.Dense(16), "a": LAYERS.Dense(16)},
        ]
        self.attention = LAYERS.MultiHeadAttention(2, 8)
        self.head = LAYERS.Dense(10)

    def call(self, x):
        for layer in (*self.blocks[0], *self.blocks[1].values()):
            x = layer(x)
        x = x[:, None]
        return self.head(self.attention(x, x)[:, 0])


MODELS = {"functional": classifier, "subclass": Subclass}


def saved(model, folder, ending):
    """The name of a file with a model's weights."""
    path = str(folder / f"model{ending}")
    if ending == ".keras":
        model.save(path)
    elif ending == ".weights.h5":
        model.save_weights(path)
    else:
        model.save_weights(path, max_shard_size=4.5e-6)
    return path


@functools.cache
def fitted(make):
    """A model that Keras has trained, and its own evaluation."""
    keras.utils.set_random_seed(0)
    model = make()
    model.compile("adam", **CROSS_ENTROPY, weighted_metrics=["accuracy"])
    model.fit(*examples(), batch_size=ROWS, epochs=2, verbose=0)
    results = model.evaluate(*HELD_OUT, verbose=0, return_dict=True)
    return model, results


@functools.cache
def programs_for(make, **fields):
    task = task_of(make, held_out=HELD_OUT, **CROSS_ENTROPY, metrics=["accuracy"])
    return programs_of(task, keras.optimizers.SGD(0.05), **fields)


def begun(programs, path, **fields):
    """The state that a training begins with."""
    source = InitializeFrom(checkpoint=path, **fields)
    theta = TrainState.abstract(programs).theta
    taken = weights_from(source, theta, programs.experiment.task)
    state = TrainState.initial(programs)
    return TrainState(programs, with_weights(state.logical(), taken))


def assert_is(model, programs, state):
    """The weights have the bits of a Keras model's variables."""
    theta = state.logical().theta.map(np.asarray)
    ours = programs.experiment.task.filled(theta).variables
    for got, want in zip(ours, model.variables, strict=True):
        if "seed_generator" not in want.path:
            np.testing.assert_array_equal(got, want, err_msg=want.path)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", MODELS)
def test_a_training_goes_on_from_what_keras_has_trained(tmp_path, name, ending):
    model, results = fitted(MODELS[name])
    programs = programs_for(MODELS[name])
    state = begun(programs, saved(model, tmp_path, ending))
    if ending == ".weights.json":
        assert len(list(tmp_path.glob("model_*.h5"))) > 2
    assert_is(model, programs, state)
    rows = range(ROWS)
    batches = programs.experiment.task.eval_batches(global_batch=ROWS, rows=rows)
    arrays = (NestedMap(batch).map(lambda t: t.numpy()) for batch in batches)
    sums = sums_over(programs, state.weights(), arrays, rows)
    metrics = programs.experiment.task.metrics(sums)
    assert metrics["loss"] == pytest.approx(results["loss"], rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(results["accuracy"], rel=1e-6)


def test_the_loop_trains_on_as_keras_does(tmp_path):
    model, _ = fitted(classifier_without_noise)
    programs = programs_for(
        classifier_without_noise,
        num_steps=3,
        initialize_from=InitializeFrom(checkpoint=saved(model, tmp_path, ".keras")),
    )
    result = loop.train_and_evaluate(
        programs, loop.Run(model_dir=str(tmp_path), evaluate=False)
    )
    model.compile(keras.optimizers.SGD(0.05), **CROSS_ENTROPY)
    losses = []
    for batch in batches_of(examples(), 3):
        losses.append(model.train_on_batch(*batch, return_dict=True)["loss"])
        model.reset_metrics()  # They are means over steps.
    np.testing.assert_allclose(list(result.losses.values()), losses, rtol=1e-5)


def classifier_without_noise():
    return keras.Sequential([keras.Input([16]), LAYERS.Dense(32), LAYERS.Dense(10)])


def twelve_classes():
    return classifier(classes=12)


def test_another_head_begins_anew(tmp_path, caplog):
    model, _ = fitted(classifier)
    path = saved(model, tmp_path, ".keras")
    programs = programs_for(twelve_classes)
    with pytest.raises(CheckpointError) as error:
        begun(programs, path)
    assert (
        "layers/dense_2/vars/0 is float32[32, 10] in the checkpoint, head.kernel is "
        "float32[32, 12] in this model"
    ) in str(error.value)
    caplog.set_level(logging.INFO, logger="absl")
    state = begun(programs, path, only=(r"(?!head).*",), unused="ignore")
    theta = state.logical().theta
    np.testing.assert_array_equal(theta.first.kernel, model.get_layer("first").kernel)
    assert "initialized 2 others:\n  head.bias\n  head.kernel" in caplog.text
    assert "not used, 2 of its arrays:\n  layers/dense_2/vars/0" in caplog.text


def test_a_layer_that_the_file_lacks_is_named(tmp_path):
    path = saved(classifier(), tmp_path, ".weights.h5")
    programs = programs_for(lambda: classifier(more=1))
    with pytest.raises(CheckpointError, match="head.bias .* gets nothing") as error:
        begun(programs, path)
    assert "head: Layer 'head' expected 2 variables, but received 0" in str(error.value)


class Scaled(LAYERS.Dense):
    """Changes what it reads."""

    def load_own_variables(self, store):
        self.kernel.assign(2 * store["0"])
        self.bias.assign(store["1"])


class Computed(LAYERS.Dense):
    """Has a value that is computed from others."""

    def load_own_variables(self, store):
        self.kernel.assign(store["0"])
        self.bias.assign(keras.ops.sum(self.kernel, axis=0))


@pytest.mark.parametrize(
    ("layer", "message"),
    [(Scaled, "unsupported operand"), (Computed, "only/bias' is computed from")],
)
def test_what_a_layer_computes_when_it_is_loaded_is_refused(
    tmp_path, caplog, layer, message
):
    def make():
        return keras.Sequential([keras.Input([16]), layer(10, name="only")])

    path = saved(make(), tmp_path, ".weights.h5")
    with pytest.raises(CheckpointError, match=f"only: .*{message}"):
        begun(programs_for(make), path)
    # Nor does it get half of what is in the file.
    with pytest.raises(CheckpointError, match="nothing in it for this model"):
        begun(programs_for(make), path, missing=Missing.INITIALIZE)

    def longer():
        layers = [LAYERS.Dense(16, name="other"), layer(10, name="only")]
        return keras.Sequential([keras.Input([16]), *layers])

    path = saved(longer(), tmp_path, ".weights.h5")
    caplog.set_level(logging.INFO, logger="absl")
    begun(programs_for(longer), path, missing=Missing.INITIALIZE)
    assert re.search(f"not taken, as Keras would not load it: .*{message}", caplog.text)
    assert "initialized 2 others" in caplog.text


def abstract(**shapes):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return NestedMap(shapes).map(
        lambda form: jax.ShapeDtypeStruct(form[1], form[0], sharding=one)
    )


def test_rules_take_arrays_for_any_task(tmp_path):
    path = str(tmp_path / "others.weights.h5")
    kernel, big = np.arange(12.0, dtype="float32").reshape(3, 4), np.ones(2, ">f4")
    halves = np.array([1.5, -2.0], jnp.bfloat16)
    with h5py.File(path, "w") as file:
        file["layers/dense/vars/0"], file["vars/0"] = kernel, big
        file.create_dataset("b", data=halves).attrs["dtype"] = "bfloat16"
        file["optimizer/vars/0"], file["text"] = kernel, "text"
        file["nothing"] = h5py.Empty("f4")
        file["elsewhere"] = h5py.ExternalLink("other.h5", "/a")
    rules = (
        r"layers/dense/vars/0 -> w[0] transpose",
        r"vars/0 -> big",
        r"b -> halves",
    )
    theta = abstract(
        w=("float32", (1, 4, 3)), big=("float32", (2,)), halves=("bfloat16", (2,))
    )
    source = InitializeFrom(checkpoint=path, rules=rules, unused="error")
    taken = weights_from(source, theta)
    np.testing.assert_array_equal(taken["w"][0], kernel.T)
    np.testing.assert_array_equal(taken["big"], big)
    np.testing.assert_array_equal(np.asarray(taken["halves"]), halves)


def test_only_the_part_of_a_process_is_read(tmp_path, monkeypatch):
    model, _ = fitted(classifier)
    read = []
    original = checkpoint_keras.FileArray.__getitem__

    def noted(self, index):
        value = original(self, index)
        read.append((self.name, value.shape))
        return value

    monkeypatch.setattr(checkpoint_keras.FileArray, "__getitem__", noted)
    begun(programs_for(classifier), saved(model, tmp_path, ".keras"))
    # Split four ways along "tensor" dims; see `programs_of`.
    assert {shape for name, shape in read if name == "layers/dense/vars/0"} == {(16, 8)}


def archive_of(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def damages():
    """What happens to a file, by name: (ending, damage, message)."""
    cut = lambda path: os.truncate(path, os.path.getsize(path) // 2)  # noqa: E731
    unreadable = "of Keras cannot be read"
    return {
        "none": (".keras", os.remove, "there is no file"),
        "cut": (".weights.h5", cut, unreadable),
        "cut archive": (".keras", cut, unreadable),
        "bits": (".keras", flip_in_the_middle, unreadable),
        "no hdf5": (".weights.h5", lambda p: write(p, b"text"), unreadable),
        "no weights": (
            ".keras",
            lambda p: archive_of(p, {"model.weights.npz": ""}),
            "has no model.weights.h5, but model.weights.npz: load it by Keras",
        ),
        "no json": (".weights.json", lambda p: write(p, b"{"), unreadable),
        "no map": (".weights.json", lambda p: write(p, b"[]"), unreadable),
        "elsewhere": (
            ".weights.json",
            lambda p: write(p, json.dumps({"weight_map": {"a": "../b.h5"}}).encode()),
            "'../b.h5', which is in another folder",
        ),
        "a part lost": (
            ".weights.json",
            lambda p: os.remove(p.replace(".weights.json", "_00000.weights.h5")),
            "there is no file .*_00000.weights.h5",
        ),
    }


def write(path, data):
    pathlib.Path(path).write_bytes(data)


def flip_in_the_middle(path):
    data = bytearray(pathlib.Path(path).read_bytes())
    data[len(data) // 2] ^= 1
    write(path, data)


DAMAGES = damages()


@pytest.mark.parametrize("name", DAMAGES)
def test_what_cannot_be_read_is_named(tmp_path, name):
    ending, damage, message = DAMAGES[name]
    path = saved(classifier_without_noise(), tmp_path, ending)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        weights_from(InitializeFrom(checkpoint=path), abstract(w=("float32", (2,))))


def test_other_files_are_refused_by_name(tmp_path):
    old = str(tmp_path / "old.h5")
    with h5py.File(old, "w") as file:
        file.attrs["layer_names"] = ["dense"]
        file["dense/dense/kernel:0"] = np.ones((16, 32), np.float32)
    programs = programs_for(classifier_without_noise)
    with pytest.raises(CheckpointError, match=r"Keras 2's .* such as dense/dense/kern"):
        begun(programs, old)
    (folder := tmp_path / "unzipped.keras").mkdir()
    with pytest.raises(CheckpointError, match="is a folder: name a file in it, such"):
        begun(programs, str(folder))
    with pytest.raises(CheckpointError, match="step and part are for .* file of Keras"):
        begun(programs, old, part="ema")
    external = str(tmp_path / "external.weights.h5")
    with h5py.File(external, "w") as file:
        file.create_dataset("w", (2,), "f4", external=[(old, 0, 8)])
    with pytest.raises(CheckpointError, match="w is in another file"):
        begun(programs, external)
