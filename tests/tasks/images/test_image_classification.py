"""Image classification: its sums and loss, metrics, input, and what it refuses."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Mode, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.convolutions.resnet import ResNet
from meshwright.tasks.images.image_classification import (
    ImageClassification,
    picture_sums,
)
from meshwright.tasks.images.image_files import ImageFiles
from meshwright.tasks.images.image_input import UNLABELLED, ImageInput
from tests.tasks.images.image_records import files_of, install

K = 7
NETWORK = ResNet(num_classes=3, blocks=(1, 1), widths=(2, 3), zero_last_scale=False)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return install(tmp_path_factory.mktemp("pictures"), 6, 5)


def a_task(files, network=NETWORK, given=None, **kwargs) -> ImageClassification:
    given = {"size": 16, "num_classes": 3, **(given or {})}
    pictures = ImageInput(files=files, **given)
    return ImageClassification(pictures=pictures, network=network, **kwargs)


# Sums and loss.


def case_of_rows(kind):
    """Logits [40, K] and labels, some of which fill up."""
    rng = np.random.default_rng(3)
    logits = 2 * rng.standard_normal([40, K])
    label = rng.integers(0, K, 40)
    label[rng.random(40) < 0.3] = UNLABELLED
    if kind == "ties":
        logits = np.round(logits / 3)
        best = np.sort(logits)[:, -2:]
        assert (best[:, 0] == best[:, 1]).sum() > 9
    if kind == "large":
        logits *= 100
    if kind == "nothing":
        label[...] = UNLABELLED
    return logits, label.astype(np.int32)


@pytest.mark.parametrize("kind", ["plain", "ties", "large", "nothing"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sums_are_those_of_plain_numpy(kind, smoothing):
    logits, label = case_of_rows(kind)
    sums = picture_sums(tf.constant(logits, tf.float32), tf.constant(label), smoothing)
    z, y = logits[label != UNLABELLED], label[label != UNLABELLED]
    largest = z.max(-1, keepdims=True)
    log_chance = z - largest - np.log(np.exp(z - largest).sum(-1, keepdims=True))
    truth = np.eye(K)[y]
    smoothed = (1 - smoothing) * truth + smoothing / K
    order = np.argsort(-z, axis=-1, kind="stable")  # Of equals the first comes first.
    want = {
        "loss": -(smoothed * log_chance).sum(),
        "nats": -(truth * log_chance).sum(),
        "first": (order[:, 0] == y).sum(),
        "among_five": (order[:, :5] == y[:, None]).sum(),
        "pictures": len(y),
    }
    assert set(sums) == set(want)
    for name, value in want.items():
        assert sums[name].dtype == tf.float32
        np.testing.assert_allclose(sums[name], value, rtol=1e-5, err_msg=name)
    assert kind == "nothing" or 0 < want["first"] < want["among_five"] < len(y)


def loss_and_gradient(task, logits, label, monkeypatch):
    """Of logits that the model is to have given."""
    monkeypatch.setattr(ImageClassification, "logits", lambda *_: logits)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        batch = NestedMap(image=None, label=tf.constant(label))
        result = task.loss(Context(), NestedMap(), batch)
    return result, tape.gradient(result.loss, logits)


@pytest.mark.parametrize("kind", ["plain", "large", "nothing"])
def test_loss_and_gradient_are_those_of_keras(files, kind, monkeypatch):
    task = a_task(files, label_smoothing=0.1)
    logits, label = case_of_rows(kind)
    result, gradient = loss_and_gradient(
        task, tf.constant(logits, tf.float32), label, monkeypatch
    )
    exact, counts = tf.constant(logits), label != UNLABELLED
    keras = tf.keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=0.1, reduction="sum"
    )
    with tf.GradientTape() as tape:
        tape.watch(exact)
        truth = tf.one_hot(label[counts], K, dtype=tf.float64)
        want = keras(truth, tf.boolean_mask(exact, counts)) / max(counts.sum(), 1)
    want_gradient = tf.convert_to_tensor(tape.gradient(want, exact))
    np.testing.assert_allclose(result.loss, want, rtol=1e-5)
    np.testing.assert_allclose(gradient, want_gradient, rtol=1e-4, atol=1e-7)
    assert not np.any(gradient.numpy()[~counts])


# The task.


def initial(task) -> NestedMap:
    return initialize(task.weights(), key_from_seed(0))


def arrays(sums) -> dict[str, np.ndarray]:
    return {path: np.asarray(value) for path, value in sums.items_by_path()}


def test_loss_trains_all_weights(files):
    task = a_task(files)
    theta, spec = initial(task), task.batch_spec(4)
    batch = next(iter(task.train_batches(0, global_batch=4, rows=range(4))))
    assert batch.map(lambda t: (t.shape, t.dtype)) == spec.map(
        lambda s: (s.shape, s.dtype)
    )
    assert {name: len(dims) for name, dims in task.batch_dims().items()} == {
        name: tensor.shape.rank for name, tensor in spec.items()
    }
    leaves = theta.leaves()
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        result = task.loss(Context(mode=Mode.TRAIN), theta.pack(leaves), batch)
    for gradient in tape.gradient(result.loss, leaves):
        assert gradient is not None and np.any(gradient)
    evaluated = task.loss(Context(), theta, batch)
    assert evaluated.loss != result.loss, "norms have running statistics"
    metrics = task.metrics(arrays(evaluated.sums))
    np.testing.assert_allclose(metrics["loss"], evaluated.loss, rtol=1e-6)
    assert metrics["top_5"] == 1, "of three classes"
    assert task.train_flops(4) == 12 * NETWORK.flops((16, 16))
    assert task.tokens(4) == 4


def test_pictures_are_normalized_by_channel(files, monkeypatch):
    task = a_task(files, mean=(1.0, 2.0, 3.0), deviation=(2.0, 4.0, 8.0))
    seen = []
    monkeypatch.setattr(ResNet, "fprop", lambda self, ctx, theta, x: seen.append(x))
    image = np.random.default_rng(0).integers(0, 256, [2, 16, 16, 3], np.uint8)
    ctx = Context(activation_dtype=tf.bfloat16)
    task.logits(ctx, NestedMap(network=None), tf.constant(image))
    want = (image - np.array([1.0, 2.0, 3.0])) / [2.0, 4.0, 8.0]
    assert seen[0].dtype == tf.bfloat16
    np.testing.assert_allclose(tf.cast(seen[0], tf.float32), want, rtol=2**-8)


def test_an_evaluation_counts_each_held_out_picture_once(files, monkeypatch):
    """A model that says class 1: two of five have it, whatever the batch."""
    task = a_task(files, label_smoothing=0.1)
    logits = tf.one_hot([1] * 4, 3)
    monkeypatch.setattr(ImageClassification, "logits", lambda *_: logits)
    totals = {}
    for batch in task.eval_batches(global_batch=4, rows=range(4)):
        for name, value in arrays(task.loss(Context(), None, batch).sums).items():
            totals[name] = totals.get(name, 0.0) + value
    metrics = task.metrics(totals)
    assert totals["pictures"] == 5
    nats = np.log(np.e + 2) - 2 / 5
    np.testing.assert_allclose(metrics["cross_entropy"], nats, rtol=1e-6)
    np.testing.assert_allclose(metrics["top_1"], 2 / 5)
    assert metrics["top_5"] == 1
    smooth = nats + 0.1 * (2 / 5 - 1 / 3)
    np.testing.assert_allclose(metrics["loss"], smooth, rtol=1e-6)


def test_what_is_said_of_the_data(files):
    lines = a_task(files).describe_data()
    assert lines == {"training pictures": 6, "held-out pictures": 5}


def test_a_resumed_run_compares_what_batches_follow_from(files, tmp_path):
    task = a_task(files)
    before = task.data_fingerprint()

    def changed(tensor):
        now = tensor.data_fingerprint()
        return {name for name in before if now[name] != before[name]}

    for field, value in {
        "size": 8,
        "area": (0.5, 1.0),
        "aspect": (1.0, 1.0),
        "mirrored": 0.0,
        "seed": 1,
    }.items():
        other = a_task(files, given={field: value})
        assert changed(other) == {f"ImageInput.{field}"}
    assert changed(a_task(files, given={"middle": 0.5})) == set()
    assert changed(a_task(install(tmp_path, 7, 5))) == {"pictures"}


def test_planning_touches_no_file():
    task = a_task(ImageFiles(train="/nowhere/train-*", held_out="/nowhere/val-*"))
    assert task.batch_spec(8).image.shape == [8, 16, 16, 3]
    assert task.weights() and task.batch_dims() and task.train_flops(8) > 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"network": dataclasses.replace(NETWORK, num_classes=4)},
            r"ResNet\.num_classes is 4, but the pictures' is 3: set it to that",
        ),
        (
            {"network": dataclasses.replace(NETWORK, in_channels=1)},
            r"ResNet\.in_channels is 1, but the pictures' is 3",
        ),
        (
            {"label_smoothing": 1.0},
            r"ImageClassification\.label_smoothing is 1\.0; it must be a number of at",
        ),
        (
            {"mean": (1.0, 2.0)},
            r"ImageClassification\.mean is \(1\.0, 2\.0\): give a number for red, gre",
        ),
        (
            {"deviation": (1.0, 0.0, 1.0)},
            r"deviation is \(1\.0, 0\.0, 1\.0\): give a number .* each, above 0",
        ),
    ],
)
def test_what_does_not_fit_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        a_task(files_of("/nowhere"), **kwargs)
