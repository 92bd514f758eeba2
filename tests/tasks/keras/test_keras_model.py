"""Keras models as tasks: the numbers of Keras, with rows of padding and without."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import meshwright.framework as mw
from meshwright.tasks import DatasetInput, KerasCompile, KerasModel
from meshwright.trainers.experiment.batches import readable
from tests.tasks.keras.keras_cases import (
    CROSS_ENTROPY,
    ROWS,
    assert_as_keras,
    batches_of,
    classifier,
    examples,
    from_arrays,
    programs_of,
    task_of,
    trained,
)

LAYERS = keras.layers


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def two_outputs():
    x = {"a": keras.Input([16], name="a"), "b": keras.Input([16], name="b")}
    h = LAYERS.Dense(32, "tanh")(LAYERS.concatenate([x["a"], x["b"]]))
    return keras.Model(x, {"kind": LAYERS.Dense(10)(h), "size": LAYERS.Dense(1)(h)})


def masked():
    return keras.Sequential(
        [
            keras.Input([6], dtype="int32"),
            LAYERS.Embedding(11, 8, mask_zero=True),
            LAYERS.LSTM(8, return_sequences=True),
            LAYERS.Dense(10),
        ]
    )


class Unbuilt(keras.Model):
    """A subclass with a layer that is frozen, one that is not used, and add_loss."""

    def __init__(self):
        super().__init__()
        self.frozen = LAYERS.Dense(16, trainable=False)
        self.unused = LAYERS.Dense(4)
        self.last = LAYERS.Dense(10)

    def call(self, x, training=False):
        self.unused(x)
        h = self.frozen(x)
        self.add_loss(0.1 * keras.ops.mean(h**2 * self.last(h)[:, :1]))
        return self.last(h)


def cases():
    """(model, examples, arguments of `compile`) by name."""
    x, y = examples()
    weights = np.linspace(0, 2, len(x)).astype(np.float32)
    words = np.random.default_rng(1).integers(0, 11, (100, 6))
    words[:, 3:] *= np.arange(100)[:, None] % 2
    mean_squared = keras.losses.MeanSquaredError()
    return {
        "classifier": (classifier, (x, y), CROSS_ENTROPY | {"metrics": ["accuracy"]}),
        "weighted": (
            classifier,
            (x, y, weights),
            CROSS_ENTROPY | {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]},
        ),
        "two outputs": (
            two_outputs,
            ({"a": x, "b": -x}, {"kind": y, "size": x[:, :1]}),
            {
                "loss": {"kind": CROSS_ENTROPY["loss"], "size": mean_squared},
                "loss_weights": {"kind": 0.5, "size": 2.0},
                "metrics": {"kind": ["accuracy"], "size": ["mae"]},
            },
        ),
        "one loss": (
            lambda: keras.Model(
                x_in := keras.Input([16]),
                [LAYERS.Dense(2)(x_in), LAYERS.Dense(3)(x_in)],
            ),
            (x, (x[:, :2], x[:, 3:6])),
            {"loss": "mse"},
        ),
        "masked": (masked, (words, words % 10), CROSS_ENTROPY | {"metrics": ["acc"]}),
        "subclass": (Unbuilt, (x, y), CROSS_ENTROPY),
    }


CASES = cases()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_training_is_that_of_keras(name, partitioner):
    make, arrays, compiled = CASES[name]
    programs = programs_of(
        task_of(make, arrays, **compiled), sgd(), partitioner=partitioner
    )
    assert_as_keras(programs, batches_of(arrays), sgd(), **compiled)


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_weights_are_gathered_along_fsdp_dims(partitioner):
    """Parts of activations would be added up else, where nothing says how they lie."""
    plan = mw.ShardingPlan(
        mesh_shape=(2, 4),
        weights={"fsdp": "X", "tensor": "Y"},
        activations={"batch": "X"},
    )
    make, arrays, compiled = CASES["classifier"]
    task = task_of(make, arrays, **compiled)
    programs = programs_of(task, sgd(), plan=plan, partitioner=partitioner)
    assert_as_keras(programs, batches_of(arrays), sgd(), **compiled)
    kernel = programs.plan_layout.forms.theta.dense.kernel
    assert str(kernel.border) == "[X,Y]"
    along_x = [c for c in programs.main.collectives() if c.axes == ("X",)]
    assert any(c.kind == "all-gather" for c in along_x)


@pytest.mark.parametrize("name", CASES)
def test_rows_that_fill_up_a_batch_do_not_count(name):
    make, arrays, compiled = CASES[name]
    count = 32 if name == "subclass" else 37  # It calls add_loss.
    few = tf.nest.map_structure(lambda a: a[:count], arrays)
    task = task_of(make, arrays, few, **compiled)
    programs = programs_of(task, sgd())
    theta = mw.NestedMap(programs.init(programs.seed()).theta).map(np.asarray)
    total = None
    for batch in task.eval_batches(global_batch=ROWS, rows=range(ROWS)):
        sums = programs.eval(theta, mw.NestedMap(batch).map(lambda t: t.numpy()))
        sums = mw.NestedMap(sums).map(np.asarray)
        total = sums if total is None else total.map(np.add, sums)
    got = task.metrics(dict(total.items_by_path()))

    model = task.filled(theta)
    model.compile(**compiled)
    x, y, sample_weight = (*few, None)[:3]
    how = {"sample_weight": sample_weight, "verbose": 0, "return_dict": True}
    want = model.evaluate(x, y, batch_size=ROWS, **how)
    # Of several outputs, Keras has the mean of the batches' losses.
    exact = model.evaluate(x, y, batch_size=count, **how)
    want |= {key: exact[key] for key in exact if key.endswith("_loss")}
    assert got.keys() == want.keys()
    for key in want:
        np.testing.assert_allclose(got[key], want[key], rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("make", [Unbuilt, classifier])
def test_losses_of_rows_together_want_full_batches(make):
    loss = CROSS_ENTROPY if make is Unbuilt else {"loss": keras.losses.Circle()}
    task = task_of(make, None, examples(37), **loss)
    task.weights()
    batches = task.eval_batches(global_batch=ROWS, rows=range(ROWS))
    with pytest.raises(ValueError, match="multiple of Experiment.global_batch, 16"):
        list(readable(batches))


def metrics_of_keras():
    """All metrics of Keras that can be made of numbers for ten classes, or for two."""
    kinds = {
        name: kind
        for name in dir(keras.metrics)
        if isinstance(kind := getattr(keras.metrics, name), type)
        and issubclass(kind, keras.metrics.Metric)
    }
    given = {
        "MeanIoU": {"num_classes": 2},
        "IoU": {"num_classes": 2, "target_class_ids": [0]},
        "BinaryIoU": {"target_class_ids": [0, 1]},
        "OneHotIoU": {"num_classes": 3, "target_class_ids": [0, 2]},
        "OneHotMeanIoU": {"num_classes": 3},
        "PrecisionAtRecall": {"recall": 0.5},
        "RecallAtPrecision": {"precision": 0.5},
        "SensitivityAtSpecificity": {"specificity": 0.5},
        "SpecificityAtSensitivity": {"sensitivity": 0.5},
        "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
        "AUC": {"num_thresholds": 20},
    }
    without = {"Metric", "Mean", "Sum"}  # They take values, not labels.
    return {
        name: (kinds[name], given.get(name, {}))
        for name in kinds
        if name not in without
    }


@pytest.mark.parametrize("name", metrics_of_keras())
def test_metrics_of_parts_add_up(name):
    """The variables of two parts, added up, make the metric of all rows."""
    from meshwright.tasks.keras.keras_losses import RowMetrics

    kind, given = metrics_of_keras()[name]
    rng = np.random.default_rng(2)
    y_pred = rng.random((12, 3), np.float32)
    y_true = np.eye(3, dtype=np.float32)[rng.integers(0, 3, 12)]
    if "Sparse" in name:
        y_true = rng.integers(0, 3, 12)
    elif name in ("MeanIoU", "IoU"):
        y_pred, y_true = np.round(y_pred), y_true
    rows = RowMetrics([kind(**given)], None, None)
    whole = kind(**given)
    whole.update_state(y_true, y_pred)
    weights = {"metrics": None, "weighted": None}
    parts = [rows.sums(y_true[p], y_pred[p], weights) for p in (slice(5), slice(5, 12))]
    total = parts[0].map(lambda *both: np.add(*both), parts[1])
    got = list(rows.results(dict(total.items_by_path())).values())
    np.testing.assert_allclose(got, np.ravel(whole.result()), rtol=1e-5)


def spectral():
    dense = LAYERS.SpectralNormalization(LAYERS.Dense(10))
    return keras.Sequential([keras.Input([16]), dense])


def half():
    return keras.Sequential(
        [keras.Input([16]), LAYERS.Dense(10, dtype="mixed_float16")]
    )


class Largest(keras.metrics.Metric):
    """Its variable does not add up."""

    def __init__(self):
        super().__init__()
        self.largest = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(y_pred)))

    def result(self):
        return self.largest


class Counter(LAYERS.Layer):
    """A layer that counts its calls."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), dtype="int32", name="count")

    def call(self, x):
        self.count.assign_add(1)
        return x


def counting():
    return keras.Sequential([keras.Input([16]), Counter(), LAYERS.Dense(10)])


def loaded():
    model = classifier()
    model.set_weights([w * 0 for w in map(keras.ops.zeros_like, model.variables)])
    return model


class OwnStep(keras.Sequential):
    """A model with a train step of its own."""

    def train_step(self, data):
        return super().train_step(data)


class WholeLoss(keras.losses.Loss):
    """A loss of a batch, not of its rows."""

    def call(self, y_true, y_pred):
        return keras.ops.max(y_pred)


def weights_of(make=classifier, weight_dims=None, **compiled):
    data = DatasetInput(train=from_arrays(examples()))
    compiled = KerasCompile(**(CROSS_ENTROPY | compiled))
    given = weight_dims or {}
    KerasModel(model=make, data=data, compile=compiled, weight_dims=given).weights()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: weights_of(classifier()),
            "it must be a function that returns",
        ),
        (
            lambda: weights_of(lambda: 3),
            "returns int; it must be a function",
        ),
        (
            lambda: weights_of(lambda: OwnStep([keras.Input([16]), LAYERS.Dense(10)])),
            "has its own train_step, which only fit calls",
        ),
        (lambda: weights_of(spectral), "is trained, and a layer assigns it too"),
        (lambda: weights_of(half), "computes in float16, for which nothing scales"),
        (lambda: weights_of(metrics=[Largest()]), "it is not known whether"),
        (
            lambda: weights_of(loss="sparse_categorial_crossentropy"),
            "loss has .* do you mean 'sparse_categorical_crossentropy'",
        ),
        (
            lambda: weights_of(metrics={"a": ["acuracy"]}),
            r"metrics has 'acuracy'.* do you mean 'accuracy'",
        ),
        (lambda: weights_of(weighted_metrics=["qqq"]), "Keras: see keras.losses and"),
        (
            lambda: weights_of(weight_dims={"nope": ("a",)}),
            r"dims\['nope'\] is in",
        ),
        (
            lambda: weights_of(weight_dims={"dense/kernel": ("a",)}),
            r"names 1 dims, but 'dense/kernel' has shape \(16, 32\)",
        ),
        (
            lambda: weights_of(loaded),
            "assigns 'dense/kernel' a value, such as",
        ),
        (
            lambda: weights_of(counting),
            "counter/count' is int32; a KerasModel",
        ),
    ],
)
def test_what_cannot_be_a_task_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("given", ["kind", "several"])
def test_sample_weights_of_some_outputs_are_refused(given):
    _, (x, y), compiled = CASES["two outputs"]
    weights = np.ones(len(y["kind"]), np.float32)
    weights = {"kind": weights} if given == "kind" else (weights,) * 3
    task = task_of(two_outputs, (x, y, weights), **compiled)
    told = r"\['kind'\]" if given == "kind" else "3 outputs"
    with pytest.raises(
        ValueError, match=rf"weights for {told}, .* outputs \['kind', 'size'\]: give"
    ):
        task.weights()


def test_a_loss_of_all_rows_together_is_refused_in_evaluations():
    task = task_of(classifier, None, examples(), loss=WholeLoss())
    programs = programs_of(task, sgd())
    with pytest.raises(ValueError, match="an evaluation needs the loss of each row"):
        programs.eval  # noqa: B018 (traces it)


def test_activations_follow_the_policy_of_the_model():
    task = task_of(classifier, **CROSS_ENTROPY)
    programs = programs_of(task, sgd(), activation_dtype=tf.bfloat16)
    with pytest.raises(ValueError, match="KerasModel.model set the policy"):
        programs.main  # noqa: B018 (traces it)


def test_a_constraint_leaves_frozen_weights_alone():
    def make():
        how = {"kernel_constraint": "unit_norm", "trainable": False}
        layers = [keras.Input([16]), LAYERS.Dense(8, **how), LAYERS.Dense(10)]
        return keras.Sequential(layers)

    programs = programs_of(task_of(make, **CROSS_ENTROPY), sgd())
    assert_as_keras(programs, batches_of(examples()), sgd(), **CROSS_ENTROPY)


def test_a_policy_of_one_model_is_not_that_of_the_next():
    def make():
        keras.config.set_dtype_policy("mixed_bfloat16")
        return classifier()

    task = task_of(make, **CROSS_ENTROPY)
    assert task._program.model.layers[-1].compute_dtype == "bfloat16"
    task = task_of(classifier, **CROSS_ENTROPY)
    assert task._program.model.layers[-1].compute_dtype == "float32"


def test_what_nothing_trains_stays_as_it_is():
    programs = programs_of(task_of(Unbuilt, **CROSS_ENTROPY), sgd())
    kinds = {p: s.statistic_decay for p, s in programs.weights.items_by_path()}
    names = ("kernel", "bias")
    frozen = {f"unbuilt.dense{part}.{name}" for part in ("", "_1") for name in names}
    assert {path for path, decay in kinds.items() if decay == 1.0} == frozen
    _, before, after = trained(programs)
    for path in frozen:
        np.testing.assert_array_equal(before.get_path(path), after.get_path(path))


def test_names_and_values_do_not_depend_on_what_was_made_before():
    def one():
        return keras.Sequential(
            [keras.Input([16]), LAYERS.Dropout(0.5), LAYERS.Dense(10)]
        )

    runs = []
    for _ in range(2):
        programs = programs_of(task_of(one, **CROSS_ENTROPY), sgd(), seed=3)
        metrics, before, after = trained(programs)
        runs.append((metrics, dict(after.items_by_path())))
        LAYERS.Dense(10)  # Takes a name.
    assert runs[0][1].keys() == {"sequential.dense.kernel", "sequential.dense.bias"}
    assert runs[0][0] == runs[1][0]
    other = programs_of(task_of(one, **CROSS_ENTROPY), sgd(), seed=4)
    assert trained(other)[0][0] != runs[0][0][0]


def test_a_model_of_seven_billion_weights_is_made_without_them():
    hub = pytest.importorskip("keras_hub")

    def llama():
        return hub.models.LlamaBackbone(
            vocabulary_size=32000,
            num_layers=2,
            num_query_heads=64,
            hidden_dim=32768,
            intermediate_dim=22016,
            num_key_value_heads=8,
        )

    def data():
        tokens = tf.TensorSpec([8], tf.int32)
        x = {"token_ids": tokens, "padding_mask": tokens}
        y = tf.TensorSpec([8, 32768], tf.float32)
        return tf.data.Dataset.from_generator(lambda: iter(()), output_signature=(x, y))

    task = KerasModel(
        model=llama,
        data=DatasetInput(train=data),
        compile=KerasCompile(loss="mse"),
    )
    weights = task.weights()
    assert sum(spec.size for spec in weights.leaves()) > 7e9
    assert all(v._value is None for v in task._program.model.variables)
    query = weights.transformer_layer_0.self_attention.query.kernel
    assert query.dims == ("fsdp", "tensor", "other")
    # Two for each multiplication and, times three, forwards and backwards.
    products = 6 * 8 * (sum(s.size for s in weights.leaves()) - 2 * 32000 * 32768)
    assert 0.9 * products < task.train_flops(1) < 1.1 * products
