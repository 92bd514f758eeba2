"""What `fit` on a mesh tells a user of Keras."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import meshwright.framework as mw
from meshwright.framework.functions import progress
from meshwright.framework.functions.layouts.layout import LayoutTable

LAYERS = keras.layers
MESH = mw.DeviceMesh(("data", "model"), (2, 4))


def words(rows):
    """A model whose lookup XLA gets wrong in shards of unequal size, and data."""
    layers = [LAYERS.Input((5,)), LAYERS.Embedding(16, 8), LAYERS.Flatten()]
    model = keras.Sequential([*layers, LAYERS.Dense(4)], name="words")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=True)
    ids = np.random.default_rng(0).integers(0, 16, (rows, 5))
    return model, ids, np.arange(rows) % 4


@pytest.mark.parametrize("partitioner", list(mw.Partitioner))
def test_rows_that_devices_do_not_divide_are_told_once(partitioner, caplog):
    model, x, y = words(19)
    table = {"embeddings": ["data", None]}
    axes = ("data", "model")
    mw.keras.distribute(model, MESH, table, data_axes=axes, partitioner=partitioner)
    model.fit(x, y, batch_size=16, verbose=0, validation_data=(x[:11], y[:11]))
    told = [text for text in caplog.messages if "XLA" in text or "divide" in text]
    assert len(told) == 1
    assert "words: train_step has a batch of 3 rows, which 8 devices do not" in told[0]
    assert "pass a batch_size, and so many rows" in told[0]


def test_a_long_start_is_told_and_arrays_are_read_without_tuning(monkeypatch, capfd):
    """TF's thread that tunes a pipeline may let `fit` end a minute late."""
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_AGAIN_SECONDS", 0.02)
    model, x, y = words(16)
    mw.keras.distribute(model, MESH)
    run, tuned = dict.fromkeys(("train", "test")), []
    for name in run:
        getattr(model, f"make_{name}_function")()
        run[name] = getattr(model, f"{name}_function")

        def noted(iterator, name=name):
            tuned.append((name, iterator._dataset.options().autotune.enabled))
            return run[name](iterator)

        setattr(model, f"{name}_function", noted)
    model.fit(x, y, batch_size=16, verbose=0)
    model.evaluate(x, y, batch_size=16, verbose=0)
    dataset = tf.data.Dataset.from_tensors((x, y))  # Of a user: left as it is.
    model.fit(dataset, verbose=0)
    assert tuned == [("train", False), ("test", False), ("train", None)]
    stderr = capfd.readouterr().err
    of = "int64[16,5], int64[16] ..."
    assert f"train_step: tracing, once for each shape of its arguments, {of}" in stderr
    compiling = f"train_step: compiling for the mesh (data=2, model=4), {of}"
    assert compiling in stderr and f"{compiling} 0 min so far" in stderr
    program = mw.function(lambda *x: x[0], MESH, name="one")
    program.program(*[tf.TensorSpec([n, 2]) for n in range(5)])
    of = ", ".join(f"float32[{n},2]" for n in range(4))
    text = f"one: compiling for the mesh (data=2, model=4), {of}, and 1 more ..."
    assert text in capfd.readouterr().err


class Split(LAYERS.Layer):
    """Splits what it is given, over a mesh."""

    def __init__(self, mesh, **how):
        super().__init__(**how)
        self.mesh = mesh

    def call(self, x):
        return mw.mesh_split(x, self.mesh, ["data", "model"])


def split_by(mesh):
    layers = [LAYERS.Input((8,)), Split(mesh, name="split"), LAYERS.Dense(4)]
    model = keras.Sequential(layers, name="annotated")
    model.compile("sgd", "mse", jit_compile=True)
    return model


def test_a_layer_is_split_over_the_mesh_of_its_model():
    x, y = np.ones((8, 8)), np.ones((8, 4))
    model = mw.keras.distribute(split_by(None), MESH)
    program = mw.keras.program(model, x, y)
    (split,) = {
        str(tensor.sharding)
        for tensor in mw.explain(program).tensors
        if "split/XlaSharding" in tensor.op_name
    }
    assert split == "[data,model]"
    other = mw.DeviceMesh(("data", "model"), (4, 2))
    model = mw.keras.distribute(split_by(other), MESH)
    message = (
        r"mesh_split: tensor 'batch/.*', used in 'annotated/split', has shape "
        r"\(None, 8\), and the mesh of this annotation is \(data=4, model=2\), but the "
        r"model is on \(data=2, model=4\): pass None in its place"
    )
    with pytest.raises(ValueError, match=message):
        model.fit(x, y, verbose=0)
    # Of other names it is another mesh of the same devices, as GSPMD has them.
    model.layers[0].mesh = mw.DeviceMesh(("data", "model", "x"), (2, 4, 1))
    mw.keras.distribute(model, MESH).fit(x, y, verbose=0)


class Turned(LAYERS.Layer):
    """Has an op that XLA gets wrong whatever the batch."""

    def build(self, shape):
        del shape
        self.table = self.add_weight(shape=(16, 8), name="table")

    def call(self, x):
        ids = mw.mesh_split(tf.range(21) % 16, MESH, [("data", "model")])
        return x + tf.reduce_sum(tf.gather(self.table, ids) ** 2)


def test_uneven_rows_are_not_blamed_for_other_ops(caplog):
    model = keras.Sequential([LAYERS.Input((4,)), Turned()])
    model.compile("sgd", "mse", jit_compile=True)
    mw.keras.distribute(model, MESH, {"table": ["data", None]})
    with caplog.at_level("INFO", "absl"):  # It sends less than 1 KiB.
        model.predict(np.ones([19, 4]), verbose=0)
    assert "GatherV2" in caplog.text
    assert "Annotate these tensors" in caplog.text
    assert "rows, which" not in caplog.text


class Reads(LAYERS.Layer):
    """Reads a value while it is traced."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def call(self, x):
        return x * self.read(x)


class Keeping(LAYERS.Layer):
    """Keeps what it made, from Keras's graph that only gives its shape too."""

    kept = ()

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones")

    def call(self, x):
        y = x * self.scale
        self.kept = (*self.kept, Kept(y))
        return y


@dataclasses.dataclass
class Kept:
    tensor: tf.Tensor


def test_a_tensor_that_is_kept_of_a_scratch_graph_is_no_other_function(caplog):
    model = keras.Sequential([LAYERS.Input((4,)), Keeping()])
    model.compile("sgd", "mse")
    mw.keras.distribute(model, MESH)
    model.fit(np.ones([8, 4]), np.ones([8, 4]), verbose=0)
    names = [kept.tensor.graph.name for kept in model.layers[0].kept]
    assert names[0].startswith("scratch_graph")
    assert "does not run on the mesh" not in caplog.text


class Returns(keras.Model):
    """Its steps return what they are told to."""

    def __init__(self, result):
        super().__init__(name="returns")
        self.result = result

    def train_step(self, data):
        return self.result(data)

    test_step = predict_step = train_step


LOGS = "a dict of logs, names to values, such as {'loss': loss}"
NOTHING, SCALAR, TUPLE = lambda _: None, lambda _: tf.constant(1.0), lambda _: (1.0,)


@pytest.mark.parametrize(
    ("run", "step", "result", "kind", "what"),
    [
        ("fit", "train", NOTHING, "None", LOGS),
        ("evaluate", "test", NOTHING, "None", LOGS),
        ("predict", "predict", NOTHING, "None", "the predictions"),
        ("fit", "train", SCALAR, "a tensor", LOGS),
        ("evaluate", "test", TUPLE, "a tuple", LOGS),
    ],
)
def test_a_step_that_returns_something_else_is_refused(run, step, result, kind, what):
    model = Returns(result)
    model.compile("sgd", "mse")
    mw.keras.distribute(model, MESH)
    text = f"returns: {step}_step returned {kind}; it must return {what}$"
    with pytest.raises(TypeError, match=text):
        getattr(model, run)(np.ones([8, 4]), verbose=0)


KEPT = tf.Variable(2.0, name="kept_outside")


@pytest.mark.parametrize(
    "read",
    [lambda x: x.numpy().max(), lambda x: np.asarray(x), lambda x: KEPT.numpy()],
)
def test_a_layer_that_reads_values_is_told_of_keras_ops(read):
    model = keras.Sequential([LAYERS.Dense(4), Reads(read)])
    model.compile("sgd", "mse")
    mw.keras.distribute(model, MESH)
    with pytest.raises(
        mw.LoweringError, match=r"by .numpy\(\) .* use TF ops, or .*ker"
    ):
        model.fit(np.ones([8, 4]), np.ones([8, 4]), verbose=0)


def test_an_error_of_an_object_that_is_no_tensor_stays_as_it_is():
    model = keras.Sequential([LAYERS.Dense(4), Reads(lambda x: object().numpy)])
    model.compile("sgd", "mse")
    mw.keras.distribute(model, MESH)
    with pytest.raises(AttributeError, match="'object' object has no attribute"):
        model.predict(np.ones([8, 4]), verbose=0)


def test_a_row_of_another_rank_names_the_model_and_warns_of_no_idle_devices(caplog):
    model, *_ = words(8)
    one = mw.DeviceMesh(("data",), (1,))
    with pytest.raises(ValueError, match="words: layout row 'kernel' has 1 entries"):
        mw.keras.distribute(model, one, {"kernel": ["data"]})
    assert "idle" not in caplog.text
    mw.keras.distribute(model, one)
    assert "words: the mesh (data=1) has 1 of 8 devices; the others are" in caplog.text


def test_a_backup_in_place_of_a_file_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file is a file: pass a folder"):
        mw.keras.backup(tmp_path / "file")
    mw.keras.backup(tmp_path / "none")
    with pytest.raises(TypeError, match="the folder is 3; pass its path, such as"):
        mw.keras.backup(3)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"topolgy": "v5e:2x4"}, TypeError, "plan has .* 'topolgy'; did you mean 'top"),
        ({}, TypeError, "mw.keras.plan needs a topology, such as topology='v5e:2x4'"),
        (
            {"topology": "v5e:2x4"},
            ValueError,
            "no data: .* as to fit, to mw.keras.plan",
        ),
        (
            {"topology": "v5e:2x4", "x": np.ones([8, 4])},
            ValueError,
            r"bare is not compiled.* call model.compile\(\) before mw.keras.plan",
        ),
    ],
)
def test_a_plan_says_what_it_lacks(given, error, message):
    bare = keras.Sequential([LAYERS.Dense(4)], name="bare")
    with pytest.raises(error, match=message):
        mw.keras.plan(bare, MESH, **given)


def test_a_plan_that_is_refused_leaves_the_model_here():
    model = keras.Sequential([LAYERS.Input((4,)), LAYERS.Dense(4)])
    mw.keras.distribute(model, MESH)
    model.compile("sgd", "mse")
    specs = {"x": tf.TensorSpec([8, 4]), "y": tf.TensorSpec([8, 4])}
    with pytest.raises(ValueError, match="specs are of one batch, and batch_size is"):
        mw.keras.plan(model, MESH, topology="v5e:2x4", batch_size=8, **specs)
    model.fit(np.ones([8, 4]), np.ones([8, 4]), verbose=0)


def test_a_variable_that_is_not_on_a_mesh_cannot_be_drawn():
    with pytest.raises(TypeError, match="for a Keras model call fit"):
        mw.visualize(tf.Variable([1.0]))


class Checked(LAYERS.Layer):
    """Refuses ids that an embedding has no row for."""

    def call(self, ids):
        tf.debugging.assert_less(ids, 16, "no such word")
        return ids


def test_an_id_beyond_the_rows_reads_the_last_one_unless_it_is_checked():
    """As TF's own jit does; without it Keras on a CPU raises."""
    ids = np.array([[3, 16], [15, 100]] * 4)

    def model(*first):
        layers = [LAYERS.Input((2,), dtype="int32"), *first, LAYERS.Embedding(16, 4)]
        return keras.Sequential(layers)

    words = mw.keras.distribute(model(), MESH, "tensor")
    table = words.layers[0].embeddings.numpy()
    read = table[np.minimum(ids, 15)]
    np.testing.assert_array_equal(words.predict(ids, verbose=0), read)
    checked = mw.keras.distribute(model(Checked()), MESH, "tensor")
    checked.predict(np.minimum(ids, 15), verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no such word"):
        checked.predict(ids, verbose=0)
    checked.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no such word"):
        checked.fit(ids, np.zeros((8, 2, 4)), verbose=0)


class Twice(keras.Model):
    """Has two layers of one name."""

    def __init__(self):
        super().__init__(name="twice")
        self.first = LAYERS.Dense(16, name="same")
        self.second = LAYERS.Dense(4, use_bias=False, name="same")

    def call(self, x):
        return self.second(self.first(x))


def test_the_rows_of_a_layout_split_as_the_layout_does():
    """And what is changed by hand decides."""
    sizes = {"up": 32, "down": 8, "head": 4}
    layers = [LAYERS.Dense(size, name=name) for name, size in sizes.items()]
    model = keras.Sequential([LAYERS.Input((8,)), *layers], name="rowed")
    model.compile("adam", "mse", jit_compile=True)

    def splits(layout):
        mw.keras.distribute(model, MESH, layout, weight_update_sharding="off")
        mw.keras.program(model, np.ones((8, 8)), np.ones((8, 4)))
        model.predict(np.ones((8, 8)), verbose=0)
        shardings = mw.keras.shardings(model)
        return {v.path: str(shardings[v.path]) for v in model.weights}

    rows = mw.keras.rows(model, MESH, "tensor")
    assert rows == {
        "^rowed/up/kernel$": [None, "model"],
        "^rowed/down/kernel$": ["model", None],
    }
    split = splits("tensor")
    assert splits(rows) == split
    other = {"^rowed/head/kernel$": ["model", None], "^rowed/up/bias$": [None]}
    changed = splits(rows | other)
    different = {"rowed/head/kernel": "[model,_]", "rowed/up/bias": "[_]"}
    left = {"rowed/down/bias": changed["rowed/down/bias"]}  # To completion.
    assert changed == split | different | left
    assert split["rowed/up/bias"] == "[model]" and split["rowed/head/kernel"] == "[_,_]"
    both = ["data", "model"]
    fsdp = mw.keras.rows(model, MESH, "fsdp")
    assert fsdp["^rowed/up/kernel$"] == [None, both] and fsdp["^rowed/head/bias$"] == [
        None
    ]
    one = mw.keras.rows(model, MESH, "fsdp", data_axes="data")
    assert one["^rowed/up/kernel$"] == [None, "data"]


class Scaled(LAYERS.Layer):
    """Has a scalar weight."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), name="scale")

    def call(self, x):
        return x * self.scale


def test_the_rows_of_a_plan_are_those_of_weights_with_dims():
    layers = [LAYERS.Input((8,)), LAYERS.Dense(16, name="up"), Scaled(name="scaled")]
    model = keras.Sequential([*layers, LAYERS.Dense(8, name="down")], name="planned")
    plan = mw.ShardingPlan(
        mesh_axes=MESH.axis_names,
        mesh_shape=MESH.shape,
        weights={"tensor": "model"},
        activations={"batch": "data"},
    )
    rows = mw.keras.rows(model, MESH, plan)
    assert rows["^planned/up/kernel$"] == [None, "model"]
    assert mw.keras.distribute(model, MESH, rows) is model


def test_rows_of_weights_that_a_table_cannot_tell_apart_are_refused():
    model = Twice()
    with pytest.raises(ValueError, match="twice has no weights yet, or not all: call"):
        mw.keras.rows(model, MESH, "fsdp")
    model(np.ones((1, 12), np.float32))
    message = "has two weights 'twice/same/kernel', which"
    for layout in ("fsdp", "tensor"):  # "tensor" leaves the second to completion.
        with pytest.raises(ValueError, match=message):
            mw.keras.rows(model, MESH, layout)


@pytest.mark.parametrize(
    ("row", "near"),
    [
        ("fnn/up/kernel", "net/block/ffn/up/kernel"),
        ("^ffn/upp/kernel$", "net/block/ffn/up/kernel"),
        ("query.*kernl", "net/block/attention/query/kernel"),
        ("heads", "net/head/bias"),
        ("dence", "net/dense_115/bias"),
    ],
)
def test_a_row_is_compared_with_parts_of_paths(row, near):
    layers = ("block/attention/query", "block/ffn/up", "dense_115", "head")
    paths = [f"net/{name}/{end}" for name in layers for end in ("kernel", "bias")]
    variables = [tf.Variable(0.0, name=path) for path in paths]
    with pytest.raises(ValueError, match=f"matches none of .*near it is '{near}'"):
        LayoutTable({row: []}).check(variables, "net")
