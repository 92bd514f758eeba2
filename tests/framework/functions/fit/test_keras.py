"""Keras models on a mesh: the same numbers as Keras on one device."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import meshwright.framework as mw
from meshwright.framework.compiler.program import Program
from meshwright.framework.functions import function
from meshwright.framework.functions.mesh_variable import value_of

distribute = mw.keras.distribute
MESH = mw.DeviceMesh(("data", "model"), (2, 4))
DATA = mw.DeviceMesh(("data",), (8,))
RNG = np.random.default_rng(0)
X = RNG.standard_normal((20, 6, 6, 2)).astype(np.float32)
Y = np.arange(20) % 3
FIT = {"batch_size": 8, "epochs": 2, "verbose": 0}
TABLE = {"dense.*kernel": [None, "model"]}
PLAN = mw.ShardingPlan(
    mesh_axes=MESH.axis_names,
    mesh_shape=MESH.shape,
    weights={"tensor": "model", "fsdp": "data"},
    activations={"batch": "data"},
)
LAYERS = keras.layers
MOMENTS = ("momentum", "velocity")


def network():
    """With pooling, batch norm and dropout; the same weights each time."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            LAYERS.Input(X.shape[1:]),
            LAYERS.Conv2D(4, 3, activation="relu"),
            LAYERS.MaxPooling2D(),
            LAYERS.BatchNormalization(),
            LAYERS.Flatten(),
            LAYERS.Dense(8, activation="relu"),
            LAYERS.Dropout(0.1),
            LAYERS.Dense(3),
        ]
    )


def compiled(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = keras.optimizers.Adam(1e-2)
    model.compile(adam, loss, metrics=["accuracy"], jit_compile=True)
    return model


def assert_alike(ours, theirs):
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def trained():
    """By Keras on one device, with what `fit` returned."""
    model = compiled(network())
    return model, model.fit(X, Y, **FIT, validation_data=(X[:12], Y[:12])).history


@pytest.mark.parametrize(
    ("layout", "partitioner"),
    [
        ("data", mw.Partitioner.SHARDY),
        pytest.param("data", mw.Partitioner.GSPMD, marks=pytest.mark.slow),
        ("fsdp", mw.Partitioner.SHARDY),
        ("fsdp", mw.Partitioner.GSPMD),
        (TABLE, mw.Partitioner.SHARDY),
        (TABLE, mw.Partitioner.GSPMD),
        pytest.param(PLAN, mw.Partitioner.SHARDY, marks=pytest.mark.slow),
        (PLAN, mw.Partitioner.GSPMD),
    ],
    ids=lambda value: {id(TABLE): "table", id(PLAN): "plan"}.get(id(value), str(value)),
)
def test_fit_evaluate_and_predict(trained, layout, partitioner, tmp_path, caplog):
    theirs, history = trained
    how = {"partitioner": partitioner, "weight_update_sharding": "all"}
    ours = distribute(network(), MESH, layout, **how)
    fit = compiled(ours).fit(X, Y, **FIT, validation_data=(X[:12], Y[:12]))
    assert history.keys() == fit.history.keys()
    assert_alike(fit.history.values(), history.values())
    assert_alike(ours.get_weights(), theirs.get_weights())
    assert_alike(
        [v.numpy() for v in ours.optimizer.variables],
        [v.numpy() for v in theirs.optimizer.variables],
    )
    assert_alike(ours.evaluate(X, Y, verbose=0), theirs.evaluate(X, Y, verbose=0))
    assert_alike(ours.predict(X, verbose=0), theirs.predict(X, verbose=0))
    ours.save(tmp_path / "saved.keras")
    loaded = keras.models.load_model(tmp_path / "saved.keras")
    assert_alike(loaded.get_weights(), theirs.get_weights())
    assert "does not run on the mesh" not in caplog.text


def shard_shape(variable):
    return value_of(variable._value).array.addressable_data(0).shape


def test_fsdp_splits_weights_and_slots():
    model = compiled(distribute(network(), MESH, "fsdp"))
    model.fit(X[:8], Y[:8], verbose=0)
    dense = model.layers[4]
    assert shard_shape(dense.kernel) == (2, 8)
    slots = [v for v in model.optimizer.variables if "dense" in v.path]
    assert {shard_shape(v) for v in slots if v.shape == dense.kernel.shape} == {(2, 8)}


def wide(**how):
    """Trained for a step of Adam, and the program of the step."""
    model = keras.Sequential(
        [LAYERS.Input((512,)), LAYERS.Dense(1024), LAYERS.Dense(4)]
    )
    distribute(model, DATA, **how)
    model.compile("adam", "mse", jit_compile=True)
    programs, run = {}, Program.__call__

    def watched(program, *args):
        programs[program.name] = program
        return run(program, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "__call__", watched)
        model.fit(np.ones((16, 512)), np.ones((16, 4)), verbose=0)
    return model, programs["train_step"]


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_weight_updates_that_gain_by_it_are_sharded(partitioner):
    model, program = wide(partitioner=partitioner)
    kernel, bias = model.layers[0].variables
    slots = {v.path.split("/")[-1]: v for v in model.optimizer.variables}
    moments = [slots[f"{kernel.path.replace('/', '_')}_{name}"] for name in MOMENTS]
    assert [shard_shape(v) for v in moments] == [(64, 1024)] * 2
    assert shard_shape(kernel) == (512, 1024) and shard_shape(bias) == (1024,)
    (update,) = program.updates.sharded
    assert update.state_saved_bytes == 2 * kernel.value.shape.num_elements() * 4 * 7 / 8
    assert "reduce-scatter" in {c.kind for c in program.collectives()}
    _, unsharded = wide(partitioner=partitioner, weight_update_sharding="off")
    assert unsharded.updates is None
    saved = unsharded.memory().arguments - program.memory().arguments
    assert saved == update.state_saved_bytes


def test_an_update_that_does_not_compile_sharded_is_left_alone(monkeypatch, caplog):
    trace = function.trace_program

    def fails(*args, update_sharding=None, **how):
        if update_sharding is not None:
            raise mw.LoweringError("train_step: no way to split op 'mul'")
        return trace(*args, **how)

    monkeypatch.setattr(function, "trace_program", fails)
    model, program = wide()
    assert program.updates is None
    assert shard_shape(model.optimizer.variables[2]) == (512, 1024)
    assert "train_step: each device updates all weights" in caplog.text
    assert "no way to split op 'mul'" in caplog.text
    with pytest.raises(mw.LoweringError, match="no way to split op 'mul'"):
        wide(weight_update_sharding="all")


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_tensor_parallelism_splits_heads_units_and_words(partitioner):
    def run(change, split=()):
        keras.utils.set_random_seed(4)
        ids = keras.Input((6,), dtype="int32")
        x = LAYERS.Embedding(16, 8, name="words")(ids)
        x += LAYERS.MultiHeadAttention(4, 2, name="attention")(x, x)
        x += LAYERS.Dense(8, name="down")(LAYERS.Dense(32, "gelu", name="up")(x))
        model = change(keras.Model(ids, LAYERS.Dense(3, name="head")(x[:, 0])))
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
        data = np.arange(48).reshape(8, 6) % 16
        fit = model.fit(data, np.arange(8) % 3, epochs=2, verbose=0)
        attention = model.get_layer("attention")
        kernels = [attention.query_dense.kernel, attention.output_dense.kernel]
        kernels += [model.get_layer(name).kernel for name in ("up", "down")]
        shards = [
            shard_shape(k) for k in (*kernels, model.layers[1].embeddings) if split
        ]
        assert shards == list(split)
        return [fit.history["loss"], *model.get_weights()]

    split = [(8, 1, 2), (1, 2, 8), (8, 8), (8, 8), (4, 8)]
    ours = run(lambda m: distribute(m, MESH, "tensor", partitioner=partitioner), split)
    assert_alike(ours, run(lambda m: m))


def test_tensor_parallelism_of_no_such_layers_is_refused():
    layers = [LAYERS.Conv2D(8, 2), LAYERS.Flatten(), LAYERS.Dense(4)]
    conv = keras.Sequential([LAYERS.Input((4, 4, 1)), *layers])
    with pytest.raises(ValueError, match="splits none of its weights, as no layer is"):
        distribute(conv, MESH, "tensor")


def test_a_layout_map_of_keras():
    class Row:  # As the TensorLayout of Keras.
        axes = (None, "model")

    model = compiled(distribute(network(), MESH, {"dense.*kernel": Row()}))
    model.fit(X[:8], Y[:8], verbose=0)
    assert shard_shape(model.layers[4].kernel) == (16, 2)


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_a_masked_recurrent_layer_in_both_directions(partitioner):
    def run(change):
        keras.utils.set_random_seed(3)
        layers = [
            LAYERS.Embedding(5, 4, mask_zero=True),
            LAYERS.Bidirectional(LAYERS.GRU(4)),
            LAYERS.Dense(1),
        ]
        model = change(keras.Sequential([LAYERS.Input((6,)), *layers]))
        model.compile("adam", "mse", jit_compile=True)
        ids = np.arange(48).reshape(8, 6) % 5
        history = model.fit(ids, Y[:8], epochs=2, verbose=0).history
        return [*history.values(), *model.get_weights()]

    ours = run(lambda model: distribute(model, MESH, "fsdp", partitioner=partitioner))
    assert_alike(ours, run(lambda model: model))


class Clipped(keras.Model):
    """A subclass with a `train_step` of its own, and a metric."""

    def __init__(self):
        super().__init__()
        self.hidden = LAYERS.Dense(8, activation="tanh")
        self.out = LAYERS.Dense(1)
        self.norm = keras.metrics.Mean(name="norm")

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True)[:, 0] - y) ** 2)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        clipped, norm = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply_gradients(zip(clipped, weights, strict=True))
        self.norm.update_state(norm)
        return {"loss": loss, "norm": self.norm.result()}


class Shrink(keras.callbacks.Callback):
    """Reads and writes a weight after each batch."""

    def on_train_batch_end(self, batch, logs=None):
        kernel = self.model.hidden.kernel
        kernel.assign(kernel * 0.99)


def callbacks(folder):
    return [
        Shrink(),
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
        keras.callbacks.ModelCheckpoint(
            folder / "best.weights.h5", "loss", 0, True, True
        ),
        keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True),
    ]


def test_a_train_step_of_ones_own_with_callbacks(tmp_path):
    x, y = X[:, :, 0, 0], Y.astype(np.float32)

    def run(change, folder):
        folder.mkdir()
        keras.utils.set_random_seed(2)
        model = change(Clipped())
        model.compile(keras.optimizers.SGD(momentum=0.9), steps_per_execution=2)
        fit = model.fit(x, y, **{**FIT, "epochs": 4}, callbacks=callbacks(folder))
        before = model.get_weights()
        model.load_weights(folder / "best.weights.h5")
        fit = model.fit(x, y, **{**FIT, "epochs": 1})
        return [*fit.history.values(), *before, *model.get_weights()]

    ours = run(lambda model: distribute(model, MESH, "fsdp"), tmp_path / "ours")
    assert_alike(ours, run(lambda model: model, tmp_path / "theirs"))


def test_a_plan_splits_weights_by_the_names_of_their_dims():
    model = compiled(distribute(network(), MESH, PLAN))
    model.fit(X[:8], Y[:8], verbose=0)
    kernel = model.layers[4].kernel
    assert kernel.shape == (16, 8) and shard_shape(kernel) == (8, 2)
    slots = [v for v in model.optimizer.variables if v.shape == kernel.shape]
    assert {shard_shape(v) for v in slots} == {(8, 2)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh_shape": (4, 2)}, r"a plan of .*, but the mesh is .*: pass the plan's"),
        (
            {"weights": {"model": "model"}},
            r"weights\['model'\] of the plan is for",
        ),
        (
            {"activations": {"heads": "data"}},
            r"activations\['heads'\] of the plan",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        distribute(network(), MESH, dataclasses.replace(PLAN, **changes))


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("zero", {}, "the layout is 'zero'; pass 'data', 'fsdp'"),
        ("fdsp", {}, "the layout is 'fdsp'; did you mean 'fsdp'. Pass 'data'"),
        ("data", {"data_axes": "dat"}, "data_axes is 'dat'; pass some of the"),
        ("data", {"data_axes": ["data", "data"]}, "data_axes is .*; pass some of the"),
        ("data", {"weight_update_sharding": "some"}, "is 'some'; it must be one of"),
        ("data", {"partitioner": "shard"}, "there is no partitioner 'shard'"),
        ({"kernel": ...}, {}, "row 'kernel': Ellipsis of the layout is no list"),
        ({"kernel": ["modle"]}, {}, "row 'kernel': unknown mesh axis 'modle'.* mean"),
        (
            {"dense": ["data"]},
            {},
            "'dense' has 1 .* matches '.*kernel', which has 2",
        ),
        (
            {"dence": [None, "model"]},
            {},
            r"'dence' matches none.*'\w+/dense.*bias'$",
        ),
        (
            {"adam.*v": ["data"]},
            {},
            "'adam.*v' matches none .* slots call compile",
        ),
        (
            {"*kernel": ["data"]},
            {},
            r"expression: it is no glob, pass '\.\*kernel'",
        ),
        ("FSDP", {}, "the layout is 'FSDP'; did you mean 'fsdp'. Pass 'data'"),
        ("data", {"data_axes": 3}, "data_axes is 3; pass some of the mesh's axes"),
        ("data", {"strict": "yes"}, "strict is 'yes'; pass True or False"),
        ("data", {"devices": 3}, "devices is 3: pass mw.topology_devices"),
    ],
)
def test_what_distribute_refuses(layout, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        distribute(network(), MESH, layout, **options)


def test_distribute_refuses_models_meshes_and_options():
    with pytest.raises(
        TypeError, match="mw.keras takes a Keras 3 model, not a builtins"
    ):
        distribute(3, MESH)
    with pytest.raises(TypeError, match="DeviceMesh; pass the model first, then the"):
        distribute(MESH, network())
    with pytest.raises(TypeError, match="the mesh is None; pass a DeviceMesh"):
        distribute(network(), None)
    ids = [f"cpu:{i}" for i in range(8)]
    theirs = keras.distribution.DeviceMesh((2, 4), ("data", "model"), ids)
    with pytest.raises(TypeError, match=r"pass mw.DeviceMesh\(\('data', 'model'\)"):
        distribute(network(), theirs)
    large = mw.DeviceMesh(("data", "model"), (4, 4))
    with pytest.raises(ValueError, match="needs 16 devices but 8 cpu devices exist"):
        distribute(network(), large)
    near = "no option 'data_axis'; did you mean 'data_axes'.; it has data_axes, weight"
    with pytest.raises(TypeError, match=near) as error:
        distribute(network(), MESH, data_axis=["data"])
    assert " update_sharding" not in str(error.value)
    with pytest.raises(TypeError, match="did you mean 'weight_update_sharding'"):
        distribute(network(), MESH, update_sharding=None)
    eager = network()
    eager.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="run_eagerly is True"):
        distribute(eager, MESH)
    later = distribute(network(), MESH)
    later.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="run_eagerly is True"):
        later.fit(X, Y, **FIT)


def test_what_was_made_for_a_strategy_is_refused():
    scope = tf.distribute.MirroredStrategy(["CPU:0"]).scope
    with scope():
        model = network()
    with pytest.raises(ValueError, match="in the scope of a tf.distribute.Mirrored.*"):
        distribute(model, MESH)
    dense = LAYERS.Dense(4, name="mirrored")
    with scope():
        dense.build((None, 3))
    model = keras.Sequential([LAYERS.Input((3,)), dense])
    with pytest.raises(ValueError, match="mirrored/kernel was made in the scope of"):
        distribute(model, MESH)
    model = distribute(network(), MESH)
    with scope():
        model.compile("adam", "mse")
        with pytest.raises(ValueError, match="used in the scope of .*: leave the s"):
            model.fit(X, Y, **FIT)
    with pytest.raises(ValueError, match="the optimizer of .* was made in the scope"):
        model.fit(X, Y, **FIT)


def test_rows_for_slots_are_looked_for_in_the_optimizer():
    rows = {**TABLE, "^adam.*velocity": [None, "model"]}
    model = compiled(network())
    with pytest.raises(ValueError, match="row '.adam.*velocity' has 2 entries, and"):
        distribute(model, MESH, rows)  # Slots of biases have one dim.
    rows = {**TABLE, "^adam.*dense.*kernel_velocity": [None, "model"]}
    distribute(model, MESH, rows).fit(X[:8], Y[:8], verbose=0)
    with pytest.raises(ValueError, match="row '.adam.*momenta' matches none of its"):
        distribute(model, MESH, {"^adam.*momenta": [None, "model"]})


def test_a_model_that_is_not_built_is_checked_by_fit():
    keras.utils.set_random_seed(1)
    layers = [LAYERS.Flatten(), LAYERS.Dense(8), LAYERS.Dense(3, name="dense_115")]
    with pytest.raises(ValueError, match="unknown mesh axis 'modle'"):
        distribute(keras.Sequential(layers), MESH, {"dense": [None, "modle"]})
    model = distribute(keras.Sequential(layers), MESH, {"dence": [None, "model"]})
    near = r"'dence' matches none.*near it is '\w+/dense_115/bias'"
    with pytest.raises(ValueError, match=near) as error:
        compiled(model).fit(X, Y, **FIT)
    assert "in user code" not in str(error.value)


def test_the_program_of_a_train_step_is_that_of_fit(monkeypatch):
    layers = [LAYERS.Flatten(), LAYERS.Dense(8, name="hidden"), LAYERS.Dense(3)]
    model = distribute(keras.Sequential(layers), MESH, {"hidden.*l$": [None, "model"]})
    with pytest.raises(ValueError, match="is not compiled, and a train step"):
        mw.keras.program(model, X, Y)
    compiled(model)
    program = mw.keras.program(model, X[:16], Y[:16], batch_size=8)
    text = str(mw.explain(program))
    assert program.name == "train_step" and "f32[72,8]" in text
    assert "[_,model]" in str(program.why("hidden/kernel"))
    called, run = [], Program.__call__

    def watched(program, *args):
        called.append(program)
        return run(program, *args)

    monkeypatch.setattr(Program, "__call__", watched)
    model.fit(X[:16], Y[:16], batch_size=8, verbose=0)
    assert [one is program for one in called] == [True, True]
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8, drop_remainder=True)
    assert mw.keras.program(model, data).name == "train_step"


def test_a_program_wants_a_model_on_a_mesh_and_data():
    with pytest.raises(ValueError, match="is on no mesh: call mw.keras.distribute"):
        mw.keras.program(compiled(network()), X, Y)
    model = compiled(distribute(network(), MESH))
    with pytest.raises(ValueError, match="there are no data: pass x, and y, as to fit"):
        mw.keras.program(model)
    with pytest.raises(ValueError, match="have no batches"):
        mw.keras.program(model, tf.data.Dataset.from_tensor_slices((X, Y)).take(0))
    specs = [tf.TensorSpec([n, 12, 12, 3]) for n in (16, 8)]
    for x, y in ((X[:16], Y[:8]), (specs[0], {"y": specs[1]})):
        with pytest.raises(ValueError, match="differ: x has 16, y has 8; pass the sam"):
            mw.keras.program(model, x, y)
    for size, message in ((0, "is 0; pass 1 or more"), (True, "is True; pass an int")):
        with pytest.raises((TypeError, ValueError), match=f"batch_size {message}"):
            mw.keras.program(model, X, Y, batch_size=size)


def test_what_the_module_shows():
    names = ["backup", "distribute", "plan", "program", "rows", "shardings"]
    assert dir(mw.keras) == names


def test_losses_of_several_outputs_count_batches_as_keras_does():
    """Of a last batch with fewer rows too."""

    def run(change):
        keras.utils.set_random_seed(5)
        x = keras.Input((4,))
        outputs = [LAYERS.Dense(1, name=name)(x) for name in ("p", "q")]
        model = change(keras.Model(x, outputs))
        model.compile("sgd", ["mse", "mae"], jit_compile=True)
        data = np.arange(48, dtype=np.float32).reshape(12, 4) / 48
        targets = [data[:, :1] * 3, data[:, 1:2]]
        history = model.fit(data, targets, batch_size=8, verbose=0, shuffle=False)
        on_batch = model.train_on_batch(data[:6], [t[:6] for t in targets])
        return [*history.history.values(), on_batch, *model.get_weights()]

    assert_alike(run(lambda m: distribute(m, MESH)), run(lambda m: m))
