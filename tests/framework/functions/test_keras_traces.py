"""How often the first step of `fit` is traced, where it makes variables."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import meshwright.framework as mw

MESH = mw.DeviceMesh(("data", "model"), (2, 4))
X = np.random.default_rng(0).standard_normal((32, 12)).astype(np.float32)
Y = np.arange(32) % 4


@pytest.fixture
def traces(monkeypatch):
    """The names of dense layers, each time that a step is traced."""
    call, names = keras.layers.Dense.call, []

    def noted(self, x, *args, **how):
        names.append(self.name)
        return call(self, x, *args, **how)

    monkeypatch.setattr(keras.layers.Dense, "call", noted)
    return names


class Flagged(keras.layers.Dense):
    """Writes to its weight when it is first called, by a flag of Python."""

    is_first = True

    def call(self, x):
        if self.is_first:
            self.is_first = False
            self.kernel.assign(0.1 * self.kernel)
        return super().call(x)


class Rescaled(keras.layers.Dense):
    """Writes to what it builds, in the trace if it is built there."""

    def build(self, shape):
        super().build(shape)
        self.kernel.assign(0.1 * self.kernel)


class Warm(keras.optimizers.SGD):
    """Writes to its slots when they are made."""

    def build(self, variables):
        super().build(variables)
        for slot in self.momentums:
            slot.assign(slot + 1.0)


class Counted(keras.metrics.Metric):
    """Writes to what it makes in its first update."""

    count = None

    def update_state(self, labels, outputs, sample_weight=None):
        if self.count is None:
            self.count = self.add_variable((), "zeros", name="count")
            self.count.assign(5.0)
        self.count.assign_add(1.0)

    def result(self):
        return 0.0 if self.count is None else self.count

    def reset_state(self):
        pass


class Cached(keras.layers.Dense):
    """Makes a variable of which Keras does not know."""

    made = None

    def call(self, x):
        if self.made is None:
            self.made = [tf.Variable(0.5)]
        self.made[0].assign_add(0.25)
        return super().call(x) * self.made[0]


class Careless(keras.layers.Dense):
    """Makes a variable in each call."""

    def call(self, x):
        scale = tf.Variable(1.0)
        scale.assign_add(1.0)
        return super().call(x) * scale


def fitted(layer, optimizer, mesh, *, built=True, metrics=()):
    """What `fit` gives, on one device or on a mesh."""
    keras.utils.set_random_seed(1)
    first = layer(16, use_bias=False, name="first")  # Normalization takes it off.
    layers = [first, keras.layers.BatchNormalization(), keras.layers.Dense(4)]
    model = keras.Sequential([*([keras.Input((12,))] if built else []), *layers])
    if mesh is not None:
        mw.keras.distribute(model, mesh, "fsdp")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    top = keras.metrics.SparseTopKCategoricalAccuracy(2)
    metrics = ["accuracy", top, *(metric() for metric in metrics)]
    model.compile(optimizer(), loss, metrics=metrics, jit_compile=True)
    fit = model.fit(X, Y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    return [*fit.history.values(), *(v.numpy() for v in variables)]


def averaged():
    return keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=2)


def warm():
    return Warm(0.1, momentum=0.9)


def scaled(inner):
    return keras.optimizers.LossScaleOptimizer(inner)


@pytest.mark.parametrize(
    ("layer", "optimizer", "how", "count"),
    [
        (keras.layers.Dense, keras.optimizers.Adam, {}, 1),
        (keras.layers.Dense, averaged, {}, 1),
        (keras.layers.Dense, lambda: scaled(averaged()), {}, 1),
        (keras.layers.Dense, keras.optimizers.Adam, {"built": False}, 2),
        (Rescaled, keras.optimizers.Adam, {"built": False}, 2),
        (Flagged, keras.optimizers.Adam, {}, 2),
        (keras.layers.Dense, warm, {}, 2),
        (keras.layers.Dense, lambda: scaled(warm()), {}, 2),
        (keras.layers.Dense, keras.optimizers.Adam, {"metrics": [Counted]}, 2),
        (Cached, keras.optimizers.Adam, {}, 2),
    ],
    ids=[
        "built",
        "averages",
        "scaled",
        "unbuilt",
        "written",
        "flag",
        "optimizer",
        "inner_optimizer",
        "metric",
        "untracked",
    ],
)
def test_a_step_is_traced_once_if_keras_makes_its_variables(
    layer, optimizer, how, count, traces
):
    """In a model of Keras's own parts; TF drops writes of the first of two."""
    got = fitted(layer, optimizer, MESH, **how)
    assert traces.count("first") == count
    want = fitted(layer, optimizer, None, **how)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_variable_of_each_call_is_refused():
    with pytest.raises(ValueError, match="is only created once or created outside"):
        fitted(Careless, keras.optimizers.Adam, MESH)


class Unpacking(keras.Model):
    """Has a step that takes what Keras gives it apart."""

    def train_step(self, data):
        x, y, _ = data
        return super().train_step((x, y))


def test_a_batch_alone_runs_the_program_of_fit():
    x, y = np.ones((16, 4), np.float32), np.ones((16, 2), np.float32)

    def trained(kind, change=lambda model: model):
        given = keras.Input((4,))
        head = keras.layers.Dense(2, kernel_initializer="ones")
        model = change(kind(given, head(given)))
        model.compile("sgd", "mse", jit_compile=True)
        if kind is keras.Model:
            model.fit(x, y, batch_size=8, verbose=0)
        losses = [model.train_on_batch(x[:8], y[:8]), model.test_on_batch(x[:8], y[:8])]
        weighted = model.train_on_batch(x[:8], y[:8], np.arange(8, dtype=np.float32))
        return model, [*losses, weighted]

    for kind in (keras.Model, Unpacking):
        model, ours = trained(kind, lambda m: mw.keras.distribute(m, MESH))
        np.testing.assert_allclose(ours, trained(kind)[1], rtol=1e-5)
        assert len(model.train_function.step._compiled) == 2  # One has weights.


class WeightOfRows(keras.Model):
    """Has a loss without targets, by the weights of rows."""

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        assert y is None
        return keras.ops.mean(y_pred[:, 0] * sample_weight)


@pytest.mark.parametrize("how", ["batch", "dataset"])
def test_weights_of_rows_without_targets_are_kept(how):
    x, weights = np.ones((8, 4), np.float32), np.arange(8, dtype=np.float32)

    def loss(change=lambda model: model):
        given = keras.Input((4,))
        head = keras.layers.Dense(2, kernel_initializer="ones")
        model = change(WeightOfRows(given, head(given)))
        model.compile("sgd", jit_compile=True)
        if how == "batch":
            return model.train_on_batch(x, None, weights)
        data = tf.data.Dataset.from_tensors((x, None, weights))
        return model.fit(data, verbose=0).history["loss"][0]

    ours = loss(lambda model: mw.keras.distribute(model, MESH))
    np.testing.assert_allclose(ours, loss(), rtol=1e-6)
    assert ours > 10
