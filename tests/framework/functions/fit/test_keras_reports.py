"""What reports say of a Keras model of Keras's own layers."""

import functools

import keras
import numpy as np
import pytest

import meshwright.framework as mw

MESH = mw.DeviceMesh(("data", "model"), (2, 4))
LAYERS = keras.layers


def model():
    """Called `own`, of which no op is made by a line of this file."""
    keras.utils.set_random_seed(1)
    ids = keras.Input((6,), dtype="int32")
    x = LAYERS.Embedding(100, 16, name="emb")(ids)
    shared = LAYERS.Dense(16, name="twice")
    x = shared(shared(LAYERS.LayerNormalization(name="norm")(x)))
    x = x + LAYERS.Dense(16, name="down")(LAYERS.Dense(64, "relu", name="up")(x))
    x = LAYERS.Dense(10, name="head")(LAYERS.GlobalAveragePooling1D(name="pool")(x))
    made = keras.Model(ids, x, name="own")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.AdamW(clipnorm=1.0), loss)
    return made


@functools.cache
def program():
    x = np.zeros((16, 6), np.int32)
    ours = mw.keras.distribute(model(), MESH, "tensor")
    return mw.keras.program(ours, x, np.zeros(16, np.int32), batch_size=16)


@functools.cache
def explained():
    return mw.explain(program())


def test_layers_and_ops_have_the_names_that_the_user_gave_them():
    layers = {t.layer for t in explained().tensors if t.source and not t.annotated}
    assert {"emb", "norm", "twice", "up", "down", "head", "pool"} <= layers
    gradients = {t.layer for t in explained().tensors if "gradient_tape" in t.op_name}
    assert {"norm", "twice", "up", "down", "head"} <= gradients
    assert not {layer for layer in layers | gradients if layer.endswith("_1")}
    for path in ("up/Tensordot/MatMul", "own/up/Tensordot/MatMul"):
        assert "own/up/Tensordot/MatMul" in str(program().why(path))


def test_a_variable_may_have_the_name_of_the_model_before_it():
    own, path = (str(program().why(f"{name}up/kernel")) for name in ("own/", ""))
    assert own == path and own.startswith("argument 0.up/kernel ")
    with pytest.raises(ValueError, match="no tensor, line or layer 'own/upp/kernel'"):
        program().why("own/upp/kernel")


def test_the_line_that_calls_fit_is_no_ops_line():
    text = str(explained())
    assert "test_keras_reports.py" not in text + str(program().why("up/kernel"))
    assert "test_keras_reports.py" not in str(mw.what_if(program(), {"up/bias": None}))
    assert "      of the gradient\n" in text


def test_the_report_has_slots_and_small_parts_in_a_line_each():
    text = str(explained())
    arguments = text[text.index("\narguments\n") : text.index("\nresults\n")]
    assert arguments.count("0.adam_w/") == 1  # Its count of steps.
    count = len(model().trainable_variables)
    assert arguments.count("      and its 2 slots alike") == count
    assert "small parts of this all-reduce, at other ops" in text
    assert text.count("\nadam_w.clip_by_norm") <= 2
    first = text.index("Collectives that move most at an op:")
    assert text.index("Left replicated:") < first < text.index("\narguments\n")
    assert "\nbatch\n  XlaSharding" in text  # Which split its rows.


def test_explain_and_why_give_one_reason():
    (kernel,) = (t for t in explained().tensors if t.op_name == "0.head/kernel")
    assert kernel.why_text.startswith("no axis reaches it")
    assert "is not split: no axis reaches it" in str(program().why("head/kernel"))
