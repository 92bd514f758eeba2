"""What reports and logs say of a Keras model, of Keras's own layers or others."""

import functools
import re
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

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


class Table(LAYERS.Layer):
    """An embedding that a user wrote."""

    def build(self, shape):
        del shape
        self.rows = self.add_weight(shape=(128, 16), name="rows")

    def call(self, ids):
        return keras.ops.take(self.rows, ids, axis=0)


class Attention(LAYERS.Layer):
    """Attention with 4 heads that a user wrote."""

    def build(self, shape):
        width = shape[-1]
        self.qkv = self.add_weight(shape=(width, 3, 4, 4), name="qkv")
        self.out = self.add_weight(shape=(4, 4, width), name="out")

    def call(self, x):
        q, k, v = tf.unstack(tf.einsum("bsm,mthd->tbshd", x, self.qkv), num=3)
        weights = tf.nn.softmax(tf.einsum("bshd,bthd->bhst", q, k))
        y = tf.einsum("bhst,bthd->bshd", weights, v)
        return tf.einsum("bshd,hdm->bsm", y, self.out)


class Checks(LAYERS.Layer):
    """Asserts something, of which a program keeps a record."""

    def call(self, x):
        tf.debugging.assert_less(tf.reduce_max(x), 1e6)
        return x


def written():
    """A model called `lm`, most of whose weights are in layers that a user wrote."""
    keras.utils.set_random_seed(1)
    ids = keras.Input((6,), dtype="int32")
    x = Checks()(Table(name="table")(ids))
    x = x + Attention(name="att")(x)
    x = x + LAYERS.Dense(16, name="down")(LAYERS.Dense(64, "relu", name="up")(x))
    made = keras.Model(ids, x, name="lm")
    made.compile(keras.optimizers.SGD(momentum=0.9, name="sgd"), "mse")
    return made


BATCH = np.zeros((16, 6), np.int32), np.zeros((16, 6, 16), np.float32)


def test_tensor_warns_of_layers_that_it_does_not_know(caplog):
    """And the remedy, as it is printed, splits the weight that it names."""
    model = mw.keras.distribute(written(), MESH, "tensor")
    program = mw.keras.program(model, *BATCH)
    (warning,) = (r.message for r in caplog.records if "knows no layers" in r.message)
    # 3072 weights of 5200: the table and the attention's two, in place of the pair's.
    assert warning.startswith(
        'lm: "tensor" knows no layers such as Table, Attention: 59% of the bytes of '
        "the weights stay whole on each device along model, the largest table/rows "
        "(128, 16) 8.00 KiB, att/qkv (16, 3, 4, 4) 3.00 KiB, att/out (4, 4, 16) 1.00 "
    )
    why = " ".join(str(program.why("table/rows")).split())
    assert "EinsumDense kernels, and its layer is of the class Table" in why
    assert "is of the class" not in str(program.why("up/bias"))
    caplog.clear()
    remedy = re.search(r"mw\.keras\.distribute\(.*\)$", warning)[0]
    eval(remedy, {"mw": mw, "model": model, "mesh": MESH})
    mw.keras.program(model, *BATCH)
    model.train_on_batch(*BATCH)
    placed = mw.keras.shardings(model)
    assert str(placed["table/rows"]) == "[model,_]"
    assert str(placed["up/kernel"]) == "[_,model]"
    assert "knows no layers" not in caplog.text


@pytest.mark.parametrize("layout", ["data", "fsdp"])
def test_other_layouts_know_all_layers(layout, caplog):
    mw.keras.program(mw.keras.distribute(written(), MESH, layout), *BATCH)
    assert "knows no layers" not in caplog.text


class Scale(LAYERS.Layer):
    """Scales each unit at each place."""

    def build(self, shape):
        self.by = self.add_weight(shape=shape[1:], name="by")

    def call(self, x):
        return x * self.by


def test_tensor_does_not_warn_of_what_completion_splits(caplog):
    """A third of the weights are in layers that it does not know."""
    up, down = LAYERS.Dense(64, name="up"), LAYERS.Dense(16, name="down")
    scales = [Scale(name=f"scale{number}") for number in range(3)]
    model = keras.Sequential([LAYERS.Input((6, 16)), up, *scales, down], name="own")
    model.compile("sgd", "mse")
    mw.keras.distribute(model, MESH, "tensor").fit(
        np.ones((8, 6, 16)), np.ones((8, 6, 16)), verbose=0
    )
    assert str(mw.keras.shardings(model)["own/scale0/by"]) == "[_,model]"
    assert "knows no layers" not in caplog.text


def test_updates_and_shardings_have_the_paths_of_variables(caplog):
    """Those that an assertion makes are no variables of the model."""
    caplog.set_level("INFO", "absl")
    model = mw.keras.distribute(written(), MESH, weight_update_sharding="all")
    program = mw.keras.program(model, *BATCH)
    paths = {v.path for v in [*model.variables, *model.optimizer.variables]}
    named = {name for line in program.updates.lines for name in line.names}
    assert "table/rows" in named <= paths
    assert "computes its update in shards along" in str(program.why("table/rows"))
    model.fit(*BATCH, verbose=0)
    placed = mw.keras.shardings(model)
    assert paths <= placed.keys() and "failed" not in placed


class Annotated(LAYERS.Layer):
    """Splits its input by an annotation."""

    def call(self, x):
        return mw.mesh_split(x, None, ["data", None, "model"])


def regrouped(annotated):
    """A model of which "fsdp" lays out a product as XLA gets it wrong."""
    ids = keras.Input((16,), dtype="int32")
    x = LAYERS.Embedding(100, 32)(ids)
    x = Annotated()(x) if annotated else x
    heads = LAYERS.Reshape((16, 4, 8))(LAYERS.Dense(32, name="q")(x))
    heads = LAYERS.Permute((2, 1, 3))(heads)
    weights = keras.ops.softmax(heads @ keras.ops.transpose(heads, (0, 1, 3, 2)))
    y = LAYERS.Reshape((16, 32))(LAYERS.Permute((2, 1, 3))(weights @ heads))
    x = LAYERS.Dense(100)(x + LAYERS.Dense(32, name="o")(y))
    model = keras.Model(ids, x)
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("layout", ["fsdp", "rows", "annotated"])
def test_a_repair_of_our_own_layout_is_no_warning(layout, caplog):
    """With rows or annotations it is: the user can change them."""
    caplog.set_level("INFO", "absl")
    model = regrouped(layout == "annotated")
    ours = mw.keras.rows(model, MESH, "fsdp") if layout == "rows" else "fsdp"
    axes = MESH.axis_names
    mw.keras.distribute(model, MESH, ours, data_axes=axes)
    mw.keras.program(model, np.zeros((8, 16)), np.zeros((8, 16, 100)))
    told = [r for r in caplog.records if "which XLA gets wrong" in r.message]
    assert told
    if layout == "fsdp":
        assert {record.levelname for record in told} == {"INFO"}
        assert "Annotate these tensors" not in caplog.text
    else:
        assert "WARNING" in {record.levelname for record in told}
        assert "Annotate these tensors" in caplog.text


class Wrong(LAYERS.Layer):
    """Names no axis of the mesh."""

    def call(self, x):
        return mw.mesh_split(x, None, [None, "mdl"])


def test_an_error_of_a_layer_names_it_and_comes_without_our_frames():
    model = keras.Sequential([LAYERS.Input((4,)), Wrong(name="wrong")], name="net")
    model.compile("sgd", "mse")
    mw.keras.distribute(model, MESH)
    message = r", used in 'net/wrong', has .* axis 'mdl': .*; did you mean 'model'\?"
    with pytest.raises(ValueError, match=message) as raised:
        model.fit(np.ones((8, 4)), np.ones((8, 4)), verbose=0)
    frames = [f.filename for f in traceback.extract_tb(raised.value.__traceback__)]
    functions = [f for f in frames if "framework/functions/" in f and "tests" not in f]
    assert [f.rpartition("/")[2] for f in functions] == ["keras_files.py"]  # `fit`.
    assert __file__ in frames[1:]  # The layer's.
