"""Layouts of Keras models that no file knows."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.trainers import search_keras

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


def search_with(rows, **how):
    batch = tf.TensorSpec([rows, WIDTH]), tf.TensorSpec([rows], tf.int32)
    return search_keras(model(), batch, "v3:2x2", most=40, **how)


def test_a_large_batch_is_split(caplog):
    with caplog.at_level("INFO", "absl"):
        found = search_with(65536)
    assert re.search("propagating: .*considered, best .* ms, none below", caplog.text)
    assert found.mesh.axes_size(found.data_axes) == 8
    assert found.found.progress.propagated <= 40
    first, batch, *rest = found.text().splitlines()
    assert first.startswith("mesh X=8") and batch == "  batch: X"
    assert all(line.split()[0].endswith("/kernel") for line in rest)


def test_layers_are_split_alike_and_slots_as_their_weights():
    found = search_with(512)
    rows = found.layout
    both = [rows.get(f"^sized/dense_{number}/kernel$") for number in (1, 2)]
    assert both[0] == both[1] and rows
    leaves = dict(zip(found.found.paths, found.found.leaves, strict=True))
    slot = "1/adam/sized_dense_1_kernel_momentum"
    weight = next(p for p, name in found.paths.items() if "dense_1/kernel" in name)
    assert leaves[slot].dims == leaves[weight].dims


def test_fit_with_the_layout_is_that_of_one_device():
    found = search_with(ROWS)
    random = np.random.default_rng(0)
    x = random.normal(size=(4 * ROWS, WIDTH)).astype(np.float32)
    y = np.arange(4 * ROWS) % CLASSES
    made = []
    for is_split in (False, True):
        one = model(dropout=0.0)
        if is_split:
            axes = found.data_axes or found.mesh.axis_names[:1]
            mw.keras.distribute(one, found.mesh, found.layout, data_axes=axes)
        history = one.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
        made.append((history.history["loss"], one.get_weights()))
    for alone, split in zip(*map(tf.nest.flatten, made), strict=True):
        np.testing.assert_allclose(split, alone, rtol=1e-4, atol=1e-4)


def test_what_is_not_compiled_is_refused():
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="build and compile it first"):
        search_keras(made, (tf.TensorSpec([8, 4]), tf.TensorSpec([8])), "v3:2x2")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "propagated",
            r"'propagated'; it has most \(plans propagated at most\),",
        ),
        ("compile", "sized: search_keras has no option 'compile'; did you mean 'c"),
    ],
)
def test_an_unknown_option_is_refused_with_those_there_are(option, message):
    with pytest.raises(TypeError, match=message):
        search_with(ROWS, **{option: 40})
