"""Segmentation: its sums and loss, metrics, predictions, and what it refuses."""

import dataclasses

import nibabel
import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Mode, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.convolutions.convolution import Padding
from meshwright.layers.convolutions.unet3d import UNet3D
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.segmentation.segmentation import Segmentation
from meshwright.tasks.segmentation.segmentation_input import Crop, SegmentationInput
from meshwright.tasks.segmentation.segmentation_loss import IGNORED, voxel_sums
from meshwright.tasks.segmentation.volume_files import Intensities, VolumeFiles
from tests.tasks.segmentation.volume_files_on_disk import (
    affine_of,
    boxes,
    write,
    write_list,
)

K = 3
NETWORK = UNet3D(in_channels=1, num_classes=K, analysis=((2,), (2,)), synthesis=((2,),))
VALID = dataclasses.replace(NETWORK, padding=Padding.VALID)
SHAPE = (12, 10, 8)
COUNT = 4
AFFINE = affine_of("LPS", spacing=(1.5, 1.0, 2.0), origin=(30.0, -20.0, 5.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Volumes without noise, the last two of four held out: axes run left and back."""
    folder, entries = tmp_path_factory.mktemp("volumes"), []
    for i in range(COUNT):
        entry = {"image": f"./images/{i}.nii.gz", "label": f"./labels/{i}.nii.gz"}
        label = boxes(SHAPE, seed=i)
        write(folder / entry["image"], 100.0 * label.astype(np.float32), AFFINE)
        write(folder / entry["label"], label, AFFINE)
        entries.append(entry)
    write_list(folder, entries[:2], validation=entries[2:])
    return folder


def a_task(folder, network=NETWORK, task=None, **kwargs) -> Segmentation:
    kwargs = {"patch": (8, 6, 4), "num_classes": K, **kwargs}
    files = VolumeFiles(path=str(folder / "dataset.json"))
    volumes = SegmentationInput(files=files, **kwargs)
    return Segmentation(volumes=volumes, network=network, **(task or {}))


# Sums and loss.


def case_of_voxels(kind, dtype=np.float64):
    """Logits [2, 4, 3, 2, K] and labels, some of them to be ignored."""
    rng = np.random.default_rng(3)
    logits = 3 * rng.standard_normal([2, 4, 3, 2, K])
    label = rng.integers(0, K, logits.shape[:-1])
    label[rng.random(label.shape) < 0.3] = IGNORED
    if kind == "ties":
        logits = np.round(logits / 3)
        assert (np.sort(logits)[..., -1] == np.sort(logits)[..., -2]).sum() > 9
    if kind == "large":
        logits *= 100
    if kind == "bfloat16":
        logits = tf.cast(tf.cast(logits, tf.bfloat16), tf.float64).numpy()
    if kind == "nothing":
        label[...] = IGNORED
    return logits.astype(dtype), label.astype(np.int32)


@pytest.mark.parametrize("kind", ["plain", "ties", "large", "bfloat16", "nothing"])
def test_sums_are_those_of_plain_numpy(kind):
    logits, label = case_of_voxels(kind)
    dtype = tf.bfloat16 if kind == "bfloat16" else tf.float32
    sums = voxel_sums(tf.cast(logits, dtype), tf.constant(label))
    z, y = logits[label != IGNORED], label[label != IGNORED]
    largest = z.max(-1, keepdims=True)
    log_chance = z - largest - np.log(np.exp(z - largest).sum(-1, keepdims=True))
    chance, truth = np.exp(log_chance), np.eye(K)[y]
    labels = np.eye(K)[z.argmax(-1)]
    want = {
        "nats": -(log_chance * truth).sum(),
        "voxels": len(y),
        "chance": chance.sum(0),
        "right": (chance * truth).sum(0),
        "found": labels.sum(0),
        "overlap": (labels * truth).sum(0),
        "truth": truth.sum(0),
    }
    assert set(sums) == set(want)
    for name, value in want.items():
        assert sums[name].dtype == tf.float32
        np.testing.assert_allclose(
            sums[name], value, rtol=1e-5, atol=1e-6, err_msg=name
        )
    assert kind == "nothing" or 0 < want["overlap"].sum() < len(y)


def plain_loss(logits, label, task):
    """Of float64 logits, by TF's own cross-entropy."""
    counts = label != IGNORED
    z, y = tf.boolean_mask(logits, counts), tf.boolean_mask(label, counts)
    truth = tf.one_hot(y, K, dtype=tf.float64)
    nats = tf.nn.softmax_cross_entropy_with_logits(labels=truth, logits=z)
    chance = tf.nn.softmax(z)
    both = tf.reduce_sum(chance, 0) + tf.reduce_sum(truth, 0)
    soft = (2 * tf.reduce_sum(chance * truth, 0) + 1) / (both + 1)
    loss = task.cross_entropy_weight * tf.reduce_mean(nats)
    return loss + task.dice_weight * (1 - (soft[1] + soft[2]) / 2)


def loss_and_gradient(task, logits, label, monkeypatch):
    """Of logits that the model is to have given."""
    monkeypatch.setattr(Segmentation, "logits", lambda self, ctx, theta, image: logits)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        batch = NestedMap(image=None, label=tf.constant(label))
        result = task.loss(Context(), NestedMap(), batch)
    return result, tape.gradient(result.loss, logits)


@pytest.mark.parametrize("kind", ["plain", "ties", "large"])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.5, 2.0), (0.0, 1.0)])
def test_loss_and_gradients_are_those_of_plain_tf(folder, kind, weights, monkeypatch):
    names = ("cross_entropy_weight", "dice_weight")
    task = a_task(folder, task=dict(zip(names, weights, strict=True)))
    logits, label = case_of_voxels(kind)
    result, gradient = loss_and_gradient(
        task, tf.constant(logits, tf.float32), label, monkeypatch
    )
    exact = tf.constant(logits)
    with tf.GradientTape() as tape:
        tape.watch(exact)
        want = plain_loss(exact, label, task)
    want_gradient = tape.gradient(want, exact)
    np.testing.assert_allclose(result.loss, want, rtol=1e-5)
    scale = np.abs(want_gradient).max()
    np.testing.assert_allclose(gradient, want_gradient, rtol=0, atol=1e-5 * scale)
    assert (np.abs(gradient[label == IGNORED]) == 0).all()
    voxels = (label != IGNORED).sum()
    np.testing.assert_allclose(result.sums.loss, want * voxels, rtol=1e-5)


def test_a_batch_of_nothing_teaches_nothing(folder, monkeypatch):
    task = a_task(folder)
    logits, label = case_of_voxels("nothing", np.float32)
    result, gradient = loss_and_gradient(task, tf.constant(logits), label, monkeypatch)
    assert result.loss == 0 and not np.any(gradient)
    assert set(task.metrics(arrays(result.sums))) == {"loss", "cross_entropy"}


def arrays(sums) -> dict[str, np.ndarray]:
    return {path: np.asarray(value) for path, value in sums.items_by_path()}


# The task.


def initial(task) -> NestedMap:
    return initialize(task.weights(), key_from_seed(0))


def first_batch(task, B=2) -> NestedMap:
    return next(iter(task.train_batches(0, global_batch=B, rows=range(B))))


@pytest.mark.parametrize("network", [NETWORK, VALID])
def test_loss_trains_all_weights(folder, network):
    patch = (12, 14, 12) if network is VALID else (8, 6, 4)
    task = a_task(folder, network, patch=patch)
    theta, batch = initial(task), first_batch(task)
    spec = task.batch_spec(2)
    assert batch.map(lambda t: (t.shape, t.dtype)) == spec.map(
        lambda s: (s.shape, s.dtype)
    )
    assert task.labelled == ((4, 6, 4) if network is VALID else patch)
    assert set(task.batch_dims()) == set(batch)
    trained = [spec.is_statistic for spec in task.weights().leaves()]
    leaves = theta.leaves()
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        result = task.loss(Context(mode=Mode.TRAIN), theta.pack(leaves), batch)
    gradients = tape.gradient(result.loss, leaves)
    for gradient, statistic in zip(gradients, trained, strict=True):
        assert gradient is not None and (statistic or np.any(gradient))
    evaluated = task.loss(Context(), theta, batch)
    assert evaluated.loss != result.loss, "norms have running statistics"
    metrics = task.metrics(arrays(evaluated.sums))
    np.testing.assert_allclose(metrics["loss"], evaluated.loss, rtol=1e-6)
    assert metrics["loss"] > metrics["cross_entropy"] > 0
    assert evaluated.sums.voxels == task.tokens(2)
    assert (task.loss_unit, task.token_name) == ("", "voxels")
    assert task.train_flops(4) == 2 * task.train_flops(2) > 0
    assert task.train_flops(2) == 6 * network.flops(patch)


def test_metrics_are_of_all_batches_together(folder, monkeypatch):
    """A perfect model has 1, and one that finds nothing 0."""
    task = a_task(folder)
    batches = list(task.eval_batches(global_batch=4, rows=range(4)))
    assert set(batches[0]) == {"image", "label"}

    def metrics(logits_of):
        totals = dict.fromkeys(("loss", "nats", "voxels"), 0.0)
        for batch in batches:
            logits = logits_of(batch.label)
            monkeypatch.setattr(Segmentation, "logits", lambda *_, made=logits: made)
            for name, value in arrays(task.loss(Context(), None, batch).sums).items():
                totals[name] = totals.get(name, 0.0) + value
        return task.metrics(totals)

    perfect = metrics(lambda label: 30 * tf.one_hot(label, K))
    scores = {name: value for name, value in perfect.items() if "dice" in name}
    assert scores == dict.fromkeys(("dice", "dice/liver", "dice/tumour"), 1.0)
    assert 0 <= perfect["loss"] < 1e-6
    none = metrics(lambda label: tf.one_hot(0 * label, K))
    assert none["dice"] == 0 and none["loss"] > 1
    liver = metrics(lambda label: tf.one_hot(tf.minimum(label, 1), K))
    truth = [boxes(SHAPE, seed=i) for i in (2, 3)]
    first, two = (sum((label == k).sum() for label in truth) for k in (1, 2))
    np.testing.assert_allclose(liver["dice/liver"], 2 * first / (2 * first + two))
    assert liver["dice"] == liver["dice/liver"] / 2 and liver["dice/tumour"] == 0


def what_the_image_shows(task, batch) -> NestedMap:
    """Chances of what a tile's middle has, told by its brightness alone."""
    given = task.volumes
    tiles = task.overlapping.tiles()
    sizes = zip(given.patch, task.labelled, strict=True)
    middle = tuple(slice((n - m) // 2, (n + m) // 2) for n, m in sizes)
    chances = []
    for image, tile in zip(batch.image, batch.tile, strict=True):
        case = given.cases(Split.HELD_OUT)[tiles[tile].case]
        volume = given.volume(case)
        values = [volume.image[volume.label == k].mean() for k in range(K)]
        label = np.abs(image[middle] - values).argmin(-1)
        chances.append(np.moveaxis(np.eye(K, dtype=np.float32)[label], -1, 0))
    return NestedMap(chances=np.stack(chances))


def decoded(task, folder, max_batches=None, B=4):
    batches = task.decoding.batches(global_batch=B, max_batches=max_batches)
    pairs = ((batch, what_the_image_shows(task, batch)) for batch in batches)
    return task.decoding.score(pairs, folder)


@pytest.mark.parametrize(
    ("network", "kwargs"),
    [
        (NETWORK, {}),
        (NETWORK, {"overlap": 0.0, "patch": (12, 10, 3)}),
        (NETWORK, {"crop": Crop.WHOLE, "patch": (14, 10, 9)}),
        (VALID, {"patch": (14, 12, 16)}),
        (VALID, {"crop": Crop.WHOLE, "patch": (24, 20, 18)}),
    ],
    ids=["tiles", "no overlap", "whole", "valid tiles", "valid whole"],
)
def test_whole_volumes_are_scored_and_written(folder, tmp_path, network, kwargs):
    """All of it right, on the grid of files whose axes run left and back."""
    task = a_task(folder, network, task={"pictures": 1}, **kwargs)
    result = decoded(task, tmp_path / "predictions")
    assert result.metrics == dict.fromkeys(
        ("volume_dice", "volume_dice/liver", "volume_dice/tumour"), 1.0
    )
    assert set(result.pictures) == {"2"}
    written = sorted((tmp_path / "predictions").iterdir())
    assert [path.name for path in written] == ["2.nii.gz", "3.nii.gz"]
    for path in written:
        made = nibabel.load(path)
        np.testing.assert_array_equal(made.affine, AFFINE)
        truth = nibabel.load(folder / "labels" / path.name)
        np.testing.assert_array_equal(made.dataobj, truth.dataobj)


def test_predictions_go_back_from_other_voxels(folder, tmp_path):
    task = a_task(folder, spacing=(1.5, 1.0, 1.0))
    result = decoded(task, tmp_path)
    assert result.metrics["volume_dice"] > 0.8  # Its images are blurred.
    made = nibabel.load(tmp_path / "2.nii.gz")
    truth = nibabel.load(folder / "labels" / "2.nii.gz")
    assert made.shape == SHAPE
    np.testing.assert_array_equal(made.affine, AFFINE)
    assert (np.asarray(made.dataobj) == np.asarray(truth.dataobj)).mean() > 0.9


def test_a_part_is_of_the_first_volumes(folder, tmp_path, caplog):
    """So that some are whole; if none is, it is said."""
    task = a_task(folder)
    half = len(task.overlapping.tiles()) // 4
    batches = list(task.decoding.batches(global_batch=half, max_batches=2))
    assert [batch.tile.tolist() for batch in batches] == [
        list(range(half)),
        list(range(half, 2 * half)),
    ]
    result = decoded(task, tmp_path, max_batches=2, B=half)
    assert result.metrics["volume_dice"] == 1 and set(result.pictures) == {"2"}
    assert not caplog.records
    assert decoded(task, tmp_path, max_batches=1, B=2 * half - 1).metrics == {}
    assert "no held-out volume was decoded completely" in caplog.text


def test_rows_that_fill_up_say_nothing(folder, tmp_path):
    task = a_task(folder)
    B = len(task.overlapping.tiles())
    batch = NestedMap(image=None, tile=np.full([B], -1))
    out = NestedMap(chances=np.ones([B, K, *task.labelled], np.float32))
    assert task.decoding.score([(batch, out)], tmp_path).metrics == {}


@pytest.mark.parametrize(
    ("network", "patch"), [(NETWORK, (8, 6, 4)), (VALID, (14, 12, 12))]
)
def test_what_is_decoded(folder, network, patch):
    task = a_task(folder, network, patch=patch)
    total = len(task.overlapping.tiles())
    *_, last = task.decoding.batches(global_batch=5)
    rest = total % 5 or 5
    assert last.tile.tolist() == [*range(total - rest, total), *[-1] * (5 - rest)]
    spec = task.decoding.spec(5)
    assert last.map(lambda a: (tf.TensorShape(a.shape), tf.as_dtype(a.dtype))) == (
        spec.map(lambda s: (s.shape, s.dtype))
    )
    out = task.decoding.decode(Context(), initial(task), last.map(tf.constant))
    assert out.chances.shape == (5, K, *task.labelled)
    np.testing.assert_allclose(tf.reduce_sum(out.chances, 1), 1, rtol=1e-5)
    assert task.decoding


def test_what_is_said_of_the_data(folder):
    assert a_task(folder, patch=(6, 5, 4)).describe_data() == {
        "training volumes": 2,
        "held-out volumes": 2,
        "tiles of held-out volumes": 16,
    }


def test_a_resumed_run_compares_what_batches_follow_from(folder, tmp_path):
    patch = (12, 10, 10)
    task = a_task(folder, patch=patch)
    before = task.data_fingerprint()

    def changed(tensor):
        now = tensor.data_fingerprint()
        return {name for name in before if now[name] != before[name]}

    for field, value in {
        "patch": (12, 10, 6),
        "crop": Crop.WHOLE,
        "spacing": (1.0, 1.0, 1.0),
        "intensities": Intensities(clip=(0, 1)),
        "flips": (0,),
        "foreground": 0.5,
        "seed": 1,
    }.items():
        other = changed(a_task(folder, **{"patch": patch, field: value}))
        assert f"SegmentationInput.{field}" in other, field
    assert changed(a_task(folder, VALID, patch=patch)) == {"UNet3D.labelled"}
    for same in ({"overlap": 0.0}, {"cache_bytes": 1}):
        assert not changed(a_task(folder, patch=patch, **same))
    entry = {"image": "0.nii", "label": "0.nii"}
    write(tmp_path / "0.nii", boxes(SHAPE))
    write_list(tmp_path, [entry], validation=[entry | {"image": "1.nii"}])
    write(tmp_path / "1.nii", boxes(SHAPE))
    assert changed(a_task(tmp_path, patch=patch)) == {"volumes"}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"channels": 2}, "UNet3D.in_channels is 1, but .*Input.channels is 2"),
        ({"num_classes": 4}, "UNet3D.num_classes is 3, but .*num_classes is 4"),
        (
            {"network": VALID, "patch": (12, 12, 8)},
            r"Padding.VALID cannot take a volume of \(12, 12, 8\): .* are 10,",
        ),
        ({"task": {"dice_weight": -1}}, "Segmentation.dice_weight is -1"),
        ({"task": {"cross_entropy_weight": "1"}}, "cross_entropy_weight is '1'"),
        ({"task": {"pictures": -1}}, "Segmentation.pictures is -1"),
    ],
)
def test_wrong_configurations(folder, kwargs, message):
    with pytest.raises(ValueError, match=message):
        a_task(folder, **kwargs)
