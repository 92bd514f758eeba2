"""Layouts of Keras models that no file knows."""

import dataclasses
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.compiler.hlo.out_of_memory import OutOfMemoryError, Refusal
from meshwright.framework.compiler.lowering.errors import LoweringError, leaves_of
from meshwright.framework.devices.topology import topology
from meshwright.framework.functions.keras_layouts import layout_of
from meshwright.trainers import search_keras
from meshwright.trainers.planning.search.found.finding import Finder
from meshwright.trainers.planning.search.found.keras_step import KerasStep
from tests.needs import libtpu

ROWS, WIDTH, CLASSES = 64, 32, 16


def model(optimizer=None, dropout=0.1):
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    made = keras.Sequential(
        [
            keras.Input((WIDTH,)),
            dense(256, "relu", name="first"),
            dense(256, "relu", name="dense_1"),
            dense(256, "relu", name="dense_2"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(dropout),
            dense(CLASSES, name="last"),
        ],
        name="sized",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer or "adam", loss, metrics=["accuracy"])
    return made


def batch_of(rows):
    return tf.TensorSpec([rows, WIDTH]), tf.TensorSpec([rows], tf.int32)


def search_with(rows, **how):
    how = {"most": 40, "compiled": 0} | how
    return search_keras(model(), batch_of(rows), "v3:2x2", **how)


def test_a_large_batch_is_split(caplog):
    with caplog.at_level("INFO", "absl"):
        found = search_with(65536)
    assert re.search("propagating: .*best .* ms, none below .* considered", caplog.text)
    assert re.search(r"tracing: 1 of 1, .*\n.*simplifying plans: ", caplog.text, re.S)
    assert found.mesh.axes_size(found.options["data_axes"]) == 8
    assert found.progress.propagated <= 40
    lines = found.text().splitlines()
    assert lines[0].startswith("mesh X=8") and lines[1].startswith("  batch: X;")
    assert max(map(len, lines)) <= 80 and len(repr(found)) < 80
    assert "layout: 'data'" in found.text([o.name for o in found.layouts].index("data"))
    table = lines[lines.index("compared, in ms a step:") + 2 :]
    assert {line.split()[0] for line in table[:4]} == {
        "found",
        "data",
        "fsdp",
        "tensor",
    }


def test_layers_are_split_alike_and_slots_as_their_weights():
    found = search_with(512)
    best = next(one for one in found.layouts if one.name == "found")
    rows = best.layout
    both = [rows.get(f"^sized/dense_{number}/kernel$") for number in (1, 2)]
    assert both[0] == both[1] and rows
    assert all(path.endswith("/kernel$") for path in rows)  # Of two dims each.
    step = KerasStep(model(), batch_of(512))
    layout = layout_of(model(), best.mesh, rows, best.data_axes)
    paths = [path for path, _ in leaves_of(step.args)]
    leaves = dict(zip(paths, step.shardings(layout, best.mesh, ["X"]), strict=True))
    slot = "1/adam/sized_dense_1_kernel_momentum"
    weight = next(p for p, name in step.paths.items() if "dense_1/kernel" in name)
    assert leaves[slot] == leaves[weight] and any(leaves[slot].dims)
    assert leaves["3/0"].dims == (("X",), ())


def test_fit_with_the_layout_is_that_of_one_device():
    found = search_with(ROWS)
    random = np.random.default_rng(0)
    x = random.normal(size=(4 * ROWS, WIDTH)).astype(np.float32)
    y = np.arange(4 * ROWS) % CLASSES
    made = []
    for layout in (None, *found.layouts):
        one = model(dropout=0.0)
        if layout is not None:
            mw.keras.distribute(
                one, layout.mesh, layout.layout, data_axes=layout.data_axes
            )
        history = one.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
        made.append((history.history["loss"], one.get_weights()))
    for split in made[1:]:
        for mine, its in zip(*map(tf.nest.flatten, (split, made[0])), strict=True):
            np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-4)


def test_a_batch_that_no_axis_splits():
    one = model(dropout=0.0)
    table = {"first/kernel": [None, "X"]}
    mesh = mw.DeviceMesh(("X",), (8,))
    mw.keras.distribute(one, mesh, table, data_axes=())
    x, y = batch_of(ROWS)
    made = mw.keras.program(one, x, y)
    # The second product sums over what splits the first kernel; all else is alike.
    sent = [(c.kind, c.bytes) for c in made.collectives()]
    assert sent == [("all-reduce", ROWS * 256 * 4)]


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        (
            "v3:2x2",
            0.014,
            "does not tell 1.4% apart: .* by up to 4.7%. Either",
        ),
        ("v5e:2x4", 0.014, "up to 4.7%, and on v5e none were compared. Either may be"),
        ("v5e:2x4", 0.05, ""),
    ],
)
def test_a_layout_that_is_hardly_faster_is_told(kind, more, says):
    found = search_with(64, most=9)
    plain = next(one for one in found.layouts if one.name == "data")
    best = dataclasses.replace(plain, name="found", seconds=1e-3)
    plain = dataclasses.replace(plain, seconds=(1 + more) * 1e-3)
    layouts, torus = (best, plain), topology(kind)
    text = dataclasses.replace(found, layouts=layouts, torus=torus).text()
    assert max(map(len, text.splitlines())) <= 80
    text = " ".join(text.split())
    assert ("'found' takes less than 'data'. The estimate" in text) == bool(says)
    assert re.search(says, text)
    other_way = dataclasses.replace(found, layouts=(plain, best), torus=torus)
    assert "does not tell" not in other_way.text()


@libtpu
def test_the_fastest_program_of_fit_is_taken():
    """The layouts of `distribute` are compiled too, as `fit` runs them."""
    found = search_keras(model(), batch_of(4096), "v3:1x1", most=5, compiled=1)
    names = [one.name for one in found.layouts]
    assert {*names} == {"found", "data", "fsdp"}  # There is no mesh of two axes.
    seconds = [one.seconds for one in found.layouts]
    assert seconds == sorted(seconds) and found.best.memory
    how = {one.updates.value for one in found.layouts if one.name == "data"}
    assert how == {"auto", "off"}
    planned = model()
    x, y = batch_of(4096)
    plan = mw.keras.plan(
        planned, found.mesh, found.layout, topology="v3:1x1", x=x, y=y, **found.options
    )
    assert plan.time.seconds == pytest.approx(found.best.seconds, rel=1e-6)
    assert plan.memory == found.best.memory


def two_outputs():
    x = keras.Input((WIDTH,))
    outputs = {"a": keras.layers.Dense(256)(x), "b": keras.layers.Dense(512)(x)}
    made = keras.Model(x, outputs, name="two")
    made.compile("sgd", {"a": "mse", "b": "mae"})
    return made


def test_several_outputs_and_weights_of_samples():
    y = {"a": tf.TensorSpec([4096, 256]), "b": tf.TensorSpec([4096, 512])}
    batch = tf.TensorSpec([4096, WIDTH]), y, {"a": W, "b": W}
    searched = two_outputs()
    how = {"most": 9, "compiled": 0, "baselines": ()}
    found = search_keras(searched, batch, "v3:2x2", **how)
    assert [layout.name for layout in found.layouts] == ["found"]
    assert found.mesh.axes_size(found.options["data_axes"]) > 1
    mw.keras.distribute(searched, found.mesh, found.layout, **found.options)
    x, y = np.ones([16, WIDTH]), {"a": np.ones([16, 256]), "b": np.ones([16, 512])}
    assert np.isfinite(searched.fit(x, y, verbose=0).history["loss"][0])


def test_what_fits_nowhere_is_told(monkeypatch):
    monkeypatch.setattr(Finder, "fits", lambda self, found: False)
    with pytest.raises(ValueError, match="none can be taken on v3:2x2.*data: does not"):
        search_with(ROWS, most=5)


@libtpu
def test_what_does_not_compile_is_left_out(monkeypatch, capfd):
    real = mw.keras.program
    tried = []

    def program(one, *args, **kwargs):
        tried.append(one)
        if len(tried) == 1:
            raise OutOfMemoryError("sized", Refusal(needed=2**35, available=2**34))
        if len(tried) == 2:
            raise LoweringError("sized: no such op\nand more")
        return real(one, *args, **kwargs)

    monkeypatch.setattr(mw.keras, "program", program)
    how = {"most": 5, "compiled": 1, "baselines": ["data", "fsdp"]}
    found = search_keras(model("sgd"), batch_of(64), "v3:1x1", **how)
    text = "sized: compiling 3 layouts (data, fsdp, found); those with sharded weight"
    assert text in capfd.readouterr().err
    failed = {one.name: one.failed for one in found.layouts}
    assert failed == {
        "data": "does not fit",
        "fsdp": "sized: no such op",
        "found": "",
    }
    assert "does not fit" in found.text() and "no such op" in found.text()


W = tf.TensorSpec([4096])
X, Y = tf.TensorSpec([8, WIDTH]), tf.TensorSpec([8], tf.int32)


@pytest.mark.parametrize(
    ("batch", "topology", "options", "error", "message"),
    [
        ((X, Y), "v3:2x2", {"propagated": 9}, TypeError, "it has most .plans propag"),
        ((X, Y), "v3:2x2", {"compile": 4}, TypeError, "did you mean 'compiled'"),
        (
            (X, Y),
            "v3:2x2",
            {"baselines": "data"},
            ValueError,
            "'data': pass a list, of",
        ),
        ((X, Y), "v3:2x2", {"baselines": ["dp"]}, ValueError, "some of .'data', 'fsdp"),
        ((X, Y), "v3:2x2", {"most": 0}, ValueError, "sized: most is 0; pass 1 or more"),
        ((X, Y), "v3:2x2", {"most": "5"}, TypeError, "most is '5'; pass an int"),
        ((X, Y), "h100:8", {}, ValueError, "'h100:8' are GPUs, and .* such as 'v5e:"),
        ((X, Y), "v5e:1x1", {}, ValueError, "has one device"),
        ((X, Y), None, {}, TypeError, "topology is None: pass a name, such as 'v5e"),
        ((X, Y), "v5e:2by4", {}, ValueError, "joined by 'x', as in 'v5e:16x16'"),
        (X, "v3:2x2", {}, ValueError, "sized: a batch is a tuple of the model's input"),
        ((X,), "v3:2x2", {}, ValueError, "a batch is a tuple of .* and the labels"),
        ((np.zeros([8, WIDTH]), Y), "v3:2x2", {}, TypeError, "the batch has a ndarray"),
        ((X, tf.TensorSpec([])), "v3:2x2", {}, ValueError, "the batch has a scalar"),
        ((X, W), "v3:2x2", {}, ValueError, "rows differ: x has 8, y has 4096; pass"),
        (
            (tf.TensorSpec([None, WIDTH]), Y),
            "v3:2x2",
            {},
            ValueError,
            r"known sizes, not \(None, 32\): give the spec its number of rows",
        ),
    ],
)
def test_what_cannot_be_searched_is_told(batch, topology, options, error, message):
    with pytest.raises(error, match=message):
        search_keras(model(), batch, topology, **options)


def test_specs_of_a_batch_have_all_sizes():
    one = model()
    mw.keras.distribute(one, mw.DeviceMesh(("X",), (8,)))
    with pytest.raises(ValueError, match="give the spec its number of rows too"):
        mw.keras.program(one, tf.TensorSpec([None, WIDTH]), Y)
    with pytest.raises(ValueError, match="specs are of one batch, and batch_size is 4"):
        mw.keras.program(one, X, Y, batch_size=4)


def test_fsdp_without_axes_is_refused():
    with pytest.raises(ValueError, match="along data_axes, which are"):
        mw.keras.distribute(model(), mw.DeviceMesh(("X",), (8,)), "fsdp", data_axes=())


def test_what_is_not_compiled_is_refused():
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="build and compile it first"):
        search_keras(made, (tf.TensorSpec([8, 4]), tf.TensorSpec([8])), "v3:2x2")
