"""Rows of a layout, reports and names of arguments have Keras's paths of variables."""

import keras
import numpy as np
import pytest

import meshwright.framework as mw
from meshwright.framework.functions.mesh_variable import value_of

LAYERS = keras.layers
MESH = mw.DeviceMesh(("data", "model"), (2, 4))
X = np.random.default_rng(0).standard_normal((16, 12)).astype(np.float32)
Y = np.arange(16) % 4


class Block(LAYERS.Layer):
    """A layer of layers, without `build`."""

    def __init__(self, **how):
        super().__init__(**how)
        self.up = LAYERS.Dense(32, "relu", name="up")
        self.down = LAYERS.Dense(12, name="down")
        self.dropout = LAYERS.Dropout(0.1, seed=1)

    def call(self, x, training=False):
        return self.dropout(self.down(self.up(x)), training=training)


class Sub(keras.Model):
    """A subclass with layers and layers of layers, a weight and a metric of its own."""

    def __init__(self, **how):
        super().__init__(**how)
        self.first = Block(name="first")
        self.second = Block(name="second")
        self.head = LAYERS.Dense(4, name="head")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.norm = keras.metrics.Mean(name="norm")

    def call(self, x, training=False):
        y = self.second(self.first(x, training=training), training=training)
        return self.head(y) * self.scale

    def train_step(self, data):
        logs = super().train_step(data)
        self.norm.update_state(logs["loss"])
        return logs


ROWS = {
    "^sub/first/up/kernel": [None, "model"],
    "^sub/second/down/kernel": ["model", None],
    "adam/sub_first_up_kernel_velocity": ["model", None],
}


def compiled(how="unbuilt", change=lambda model: model):
    """The model, trained for two steps; see `test_rows_have_the_paths_of_keras`."""
    keras.utils.set_random_seed(1)
    model = Sub(name="sub")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = keras.optimizers.Adam(name="adam")
    model.compile(adam, loss, metrics=["accuracy"], jit_compile=True)
    if how == "built":
        model.build((None, 12))
    if how == "called":
        model(X)
    return change(model)


def fitted(model):
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history
    return [*history.values(), *model.get_weights()]


def assert_alike(ours, theirs):
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def shard_shape(variable):
    return value_of(variable._value).array.addressable_data(0).shape


@pytest.mark.parametrize("partitioner", mw.Partitioner)
@pytest.mark.parametrize("how", ["unbuilt", "built", "called"])
def test_rows_have_the_paths_of_keras(how, partitioner):
    ours = compiled(
        how, lambda m: mw.keras.distribute(m, MESH, ROWS, partitioner=partitioner)
    )
    assert_alike(fitted(ours), fitted(compiled(how)))
    assert shard_shape(ours.first.up.kernel) == (12, 8)
    assert shard_shape(ours.second.down.kernel) == (8, 12)
    by_path = {variable.path: variable for variable in ours.optimizer.variables}
    assert shard_shape(by_path["adam/sub_first_up_kernel_velocity"]) == (3, 32)


def test_arguments_and_reasons_have_the_paths_of_keras():
    model = mw.keras.distribute(compiled("called"), MESH, ROWS)
    program = mw.keras.program(model, X, Y, batch_size=8)
    kept = model.variables + model.optimizer.variables + model.metrics_variables
    state, read, *_ = program.inputs
    assert {*state, *read} <= {variable.path for variable in kept}
    assert {v.path for v in model.weights} <= {*state, *read}
    assert "[_,model]" in str(program.why("first/up/kernel"))
    assert "0.sub/second/down/kernel" in str(mw.explain(program))


def test_a_layout_map_has_the_paths_of_keras():
    devices = [f"cpu:{i}" for i in range(8)]
    mesh = keras.distribution.DeviceMesh((2, 4), ("data", "model"), devices)
    rows = keras.distribution.LayoutMap(mesh)
    rows["first/up/kernel"] = (None, "model")
    model = mw.keras.distribute(compiled(), MESH, rows)
    assert_alike(fitted(model), fitted(compiled()))
    assert shard_shape(model.first.up.kernel) == (12, 8)
    assert shard_shape(model.second.up.kernel) != (12, 8)


def test_a_name_that_only_tf_gives_is_no_path():
    with pytest.raises(ValueError, match="'sub/kernel' .* sub/first/up/kernel"):
        mw.keras.distribute(compiled("built"), MESH, {"sub/kernel": [None, "model"]})


def test_a_backup_goes_on_where_layers_are_split_by_their_paths(tmp_path):
    def trained(layout, epochs):
        model = mw.keras.distribute(compiled("called"), MESH, layout)
        saved = [mw.keras.backup(tmp_path / "backup")]
        model.fit(X, Y, epochs=epochs, shuffle=False, verbose=0, callbacks=saved)
        return model.get_weights()

    trained("data", 1)
    whole = mw.keras.distribute(compiled("called"), MESH, ROWS)
    whole.fit(X, Y, epochs=2, shuffle=False, verbose=0)
    assert_alike(trained(ROWS, 2), whole.get_weights())
