"""Batches of patches: their order and places, mirrors and tiles; what is refused."""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.segmentation import segmentation_input
from meshwright.tasks.segmentation.patches import Patches
from meshwright.tasks.segmentation.segmentation_input import Crop, SegmentationInput
from meshwright.tasks.segmentation.segmentation_loss import IGNORED
from meshwright.tasks.segmentation.volume_files import Case, VolumeFiles
from tests.tasks.segmentation.volume_files_on_disk import (
    CLASSES,
    boxes,
    image_of,
    install,
    write,
    write_list,
)

PATCH = (5, 4, 3)
SHAPES = ((12, 10, 8), (9, 4, 7), (5, 6, 3))


def listed(folder, labels, held=1, channels=1) -> VolumeFiles:
    """Files of these labels, the last of them held out; images are mostly noise."""
    entries = []
    for i, label in enumerate(labels):
        entry = {"image": f"./images/{i}.nii", "label": f"./labels/{i}.nii"}
        write(folder / entry["image"], image_of(label, channels, seed=i))
        write(folder / entry["label"], label)
        entries.append(entry)
    split = len(entries) - held
    path = write_list(folder, entries[:split], validation=entries[split:])
    return VolumeFiles(path=str(path))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Four volumes to train on and two held out, of three sizes."""
    labels = [boxes(shape, seed=i) for i, shape in enumerate(SHAPES * 2)]
    return listed(tmp_path_factory.mktemp("volumes"), labels, held=2)


def an_input(files, **kwargs) -> SegmentationInput:
    return SegmentationInput(
        files=files, **{"patch": PATCH, "num_classes": 3, **kwargs}
    )


def patches(given, labelled=PATCH, overlap=0.0) -> Patches:
    return Patches(volumes=given, labelled=labelled, overlap=overlap)


def trained_on(given, count, start=0, B=4, rows=None, labelled=None):
    """Image and label of so many training batches, as arrays."""
    batches = patches(given, labelled or given.patch).train_batches(
        start, global_batch=B, rows=range(B) if rows is None else rows
    )
    return [(batch.image.numpy(), batch.label.numpy()) for batch in batches.take(count)]


def rows_of(batches):
    """Pairs of an image and its label."""
    return [pair for image, label in batches for pair in zip(image, label, strict=True)]


def assert_equal(batches, others):
    for ours, theirs in zip(batches, others, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def found_in(given, image) -> tuple[str, tuple[int, ...]]:
    """The only case and place of which this is the image."""
    size, places = image.shape[:3], []
    for case in given.cases(Split.TRAIN):
        full = given.volume(case).image
        for at in zip(*np.nonzero(full[..., 0] == image[0, 0, 0, 0]), strict=True):
            part = full[tuple(slice(i, i + n) for i, n in zip(at, size, strict=True))]
            if np.array_equal(part, image):
                places.append((case, tuple(map(int, at))))
    assert len(places) == 1
    return places[0]


def test_patches_are_parts_of_volumes_each_read_once_an_epoch(files):
    given = an_input(files, flips=())
    batches = trained_on(given, 6, B=2)
    cases, starts = [], set()
    for image, label in rows_of(batches):
        case, at = found_in(given, image)
        place = tuple(slice(i, i + n) for i, n in zip(at, PATCH, strict=True))
        np.testing.assert_array_equal(label, given.volume(case).label[place])
        cases.append(case.name)
        starts.add((case.name, at))
    epochs = [tuple(cases[i : i + 4]) for i in range(0, 12, 4)]
    assert {tuple(sorted(epoch)) for epoch in epochs} == {("0", "1", "2", "3")}
    assert len(set(epochs)) > 1, "each epoch has an order of its own"
    assert len(starts) > 8, "and other places"
    spec = patches(given).element_spec(2)
    assert spec.map(lambda s: (tuple(s.shape), s.dtype)) == NestedMap(
        image=((2, *PATCH, 1), tf.float32), label=((2, *PATCH), tf.int32)
    )
    assert (batches[0][0].shape, batches[0][1].shape) == (
        (2, *PATCH, 1),
        (2, *PATCH),
    )


def test_a_batch_follows_from_its_step_alone(files):
    given = an_input(files)
    straight = trained_on(given, 5)
    assert_equal(trained_on(given, 2, start=3), straight[3:])
    parts = [trained_on(given, 5, rows=rows) for rows in (range(1), range(1, 4))]
    for (image, label), *shares in zip(straight, *parts, strict=True):
        np.testing.assert_array_equal(np.concatenate([s[0] for s in shares]), image)
        np.testing.assert_array_equal(np.concatenate([s[1] for s in shares]), label)
    others = trained_on(dataclasses.replace(given, seed=1), 5)
    assert not all(
        np.array_equal(a[0], b[0]) for a, b in zip(straight, others, strict=True)
    )


@pytest.mark.parametrize("flips", [(1,), (0, 2)])
def test_half_of_the_patches_are_mirrored_labels_too(files, flips):
    """Along each dim of its own, at the places that they have without."""
    straight = rows_of(trained_on(an_input(files, flips=()), 10))
    mirrored = rows_of(trained_on(an_input(files, flips=flips), 10))
    ways = [w for n in range(len(flips) + 1) for w in itertools.combinations(flips, n)]
    counts = dict.fromkeys(ways, 0)
    for (image, label), (other, other_label) in zip(straight, mirrored, strict=True):
        matches = [w for w in ways if np.array_equal(np.flip(image, w), other)]
        assert len(matches) == 1
        np.testing.assert_array_equal(np.flip(label, matches[0]), other_label)
        counts[matches[0]] += 1
    assert min(counts.values()) >= 0.5 * 40 / len(ways)


@pytest.mark.parametrize(
    ("foreground", "least", "most"), [(1.0, 80, 80), (0.5, 30, 60)]
)
def test_patches_around_a_class(tmp_path, foreground, least, most):
    """A rare one as often as a common one."""
    label = np.zeros([16, 14, 12], np.uint8)
    label[1:6, 1:6, 1:6], label[15, 13, 11] = 1, 2
    given = an_input(
        listed(tmp_path, [label, label]), foreground=foreground, patch=(2, 2, 2)
    )
    labels = [label for _, label in rows_of(trained_on(given, 10, B=8))]
    assert least <= sum(label.any() for label in labels) <= most
    rare = sum((label == 2).any() for label in labels)
    assert 0.3 * 80 * foreground <= rare <= 0.7 * 80 * foreground


def test_without_a_class_patches_are_anywhere(tmp_path):
    nothing = np.zeros([6, 6, 6], np.uint8)
    given = an_input(listed(tmp_path, [nothing, nothing]), foreground=1.0, flips=())
    places = {found_in(given, image)[1] for image, _ in rows_of(trained_on(given, 4))}
    assert len(places) > 4


@pytest.mark.parametrize("patch", [(6, 6, 6), (14, 10, 6), (24, 18, 28)])
def test_the_middle_is_labelled_and_images_are_mirrored_beyond_ends(tmp_path, patch):
    labelled = (2, 4, 2)
    shape = (7, 5, 2)  # The margins of the last patch are wider than that.
    given = an_input(
        listed(tmp_path, [boxes(shape, seed=3)] * 2), patch=patch, flips=()
    )
    volume = given.volume(given.cases(Split.TRAIN)[0])
    margins = [(n - m) // 2 for n, m in zip(patch, labelled, strict=True)]
    wide = np.pad(volume.image, [(m, m) for m in margins] + [(0, 0)], mode="reflect")
    middle = tuple(slice(m, m + n) for m, n in zip(margins, labelled, strict=True))
    starts = set()
    for image, label in rows_of(trained_on(given, 6, labelled=labelled)):
        _, at = found_in(given, image[middle])
        starts.add(at)
        place = [slice(i, i + n) for i, n in zip(at, patch, strict=True)]
        np.testing.assert_array_equal(image, wide[tuple(place)])
        place = [slice(i, i + n) for i, n in zip(at, labelled, strict=True)]
        np.testing.assert_array_equal(label, volume.label[tuple(place)])
    assert len(starts) > 4


def test_whole_volumes_are_padded(files):
    given = an_input(files, crop=Crop.WHOLE, patch=(12, 10, 8), flips=())
    for image, label in rows_of(trained_on(given, 1)):
        inside = label != IGNORED
        size = tuple(int(np.nonzero(inside)[dim].max()) + 1 for dim in range(3))
        center = tuple(map(slice, size))
        case, at = found_in(given, image[center])
        assert at == (0, 0, 0) and inside.sum() == np.prod(size)
        np.testing.assert_array_equal(label[center], given.volume(case).label)
    (batch,) = held_out(given, given.patch, B=3)
    voxels = [np.prod(shape) for shape in SHAPES[1:]]
    assert (batch.label != IGNORED).sum(axis=(1, 2, 3)).tolist() == [*voxels, 0]


def held_out(given, labelled, overlap=0.0, B=4, rows=None, **kwargs):
    rows = range(B) if rows is None else rows
    batches = patches(given, labelled, overlap).held_out_batches(
        global_batch=B, rows=rows, **kwargs
    )
    return [batch.map(lambda t: t.numpy()) for batch in batches]


@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("labelled", [PATCH, (3, 4, 1)])
def test_tiles_count_each_voxel_once(files, labelled, overlap):
    given = an_input(files)
    volumes = [given.volume(case) for case in given.cases(Split.HELD_OUT)]
    tiles = patches(given, labelled, overlap).tiles()
    counted = [np.zeros(volume.label.shape, int) for volume in volumes]
    numbers = []
    for batch in held_out(given, labelled, overlap):
        for number, label in zip(batch.tile, batch.label, strict=True):
            if number < 0:
                assert (label == IGNORED).all()
                continue
            numbers.append(int(number))
            tile = tiles[number]
            place = tuple(
                slice(i, i + n) for i, n in zip(tile.start, labelled, strict=True)
            )
            counted[tile.case][place] += label != IGNORED
            truth = volumes[tile.case].label[place]
            assert ((label == truth) | (label == IGNORED)).all()
    assert numbers == list(range(len(tiles)))
    assert all((counts == 1).all() for counts in counted)


def test_overlapping_tiles_have_that_share_in_common(files):
    starts = {t.start[0] for t in patches(an_input(files), (4, 4, 3), 0.5).tiles()}
    assert starts == {0, 1, 3, 5}  # 2 apart at most, in 9 voxels; and in 5.
    starts = {tile.start[0] for tile in patches(an_input(files), (4, 4, 3)).tiles()}
    assert starts == {0, 1, 2, 5}  # 4 apart at most.


def test_a_part_of_the_held_out_batches(files):
    given = an_input(files)
    full = held_out(given, PATCH, B=2)
    some = held_out(given, PATCH, B=2, max_batches=2)
    assert len(full) == 4
    assert [batch.tile[0] for batch in some] == [0, 4]
    every = {int(batch.tile[0]): batch for batch in full}
    for batch in some:
        batch.map(np.testing.assert_array_equal, every[int(batch.tile[0])])
    parts = [held_out(given, PATCH, B=2, rows=range(i, i + 1)) for i in range(2)]
    for batch, *shares in zip(full, *parts, strict=True):
        batch.map(
            lambda a, *b: np.testing.assert_array_equal(a, np.concatenate(b)), *shares
        )


def test_two_channels(tmp_path):
    labels = [boxes((6, 6, 6), seed=i) for i in range(2)]
    files = listed(tmp_path, labels, channels=2)
    (image, _), *_ = trained_on(an_input(files, channels=2), 1)
    assert image.shape == (4, *PATCH, 2)
    assert not np.array_equal(image[..., 0], image[..., 1])
    with pytest.raises(ValueError, match=r"1\.nii has 2 channels, but .*channels is 1"):
        patches(an_input(files)).tiles()


def count_loads(monkeypatch) -> list[str]:
    """The names of what is loaded from now on."""
    loaded, load = [], segmentation_input.load

    def counting(case, *args, **kwargs):
        loaded.append(case.name)
        return load(case, *args, **kwargs)

    monkeypatch.setattr(segmentation_input, "load", counting)
    return loaded


def test_volumes_beyond_the_cache_are_read_again(files, monkeypatch):
    loaded = count_loads(monkeypatch)
    # Arguments that no other test has: inputs that are equal share their volumes.
    kept = trained_on(an_input(files, cache_bytes=10**6), 6)
    assert sorted(loaded) == ["0", "1", "2", "3"]
    loaded.clear()
    assert_equal(trained_on(an_input(files, cache_bytes=0), 6), kept)
    # Some are read ahead; each row asks for its volume once.
    assert 12 <= len(loaded) <= 4 * 30


def test_the_cache_drops_what_was_longest_unused(files, monkeypatch):
    given = an_input(files)
    size = {case.name: 8 * given.volume(case).label.size for case in cases_of(given)}
    given = an_input(files, cache_bytes=size["0"] + size["1"] + size["2"])
    loaded = count_loads(monkeypatch)
    by_name = {case.name: case for case in cases_of(given)}
    for name in "0120":
        given.volume(by_name[name])
    assert loaded == ["0", "1", "2"]
    given.volume(by_name["5"])  # As large as 2: 1 has to go for it, 2 need not.
    for name in "0251":
        given.volume(by_name[name])
    assert loaded == ["0", "1", "2", "5", "1"]


def cases_of(given):
    return [case for split in Split for case in given.cases(split)]


# What is refused.


def test_volumes_too_small_for_a_patch(files):
    given = an_input(files, patch=(5, 5, 3))
    message = (
        r"4\.nii has \(9, 4, 7\) voxels, less than the \(5, 5, 3\) that are "
        r"labelled of a patch \(axes .*\): lower SegmentationInput.patch, narrow its "
        "spacing, or use Crop.WHOLE"
    )
    with pytest.raises(ValueError, match=message):
        patches(given, (5, 5, 3)).tiles()
    with pytest.raises(tf.errors.OpError, match=message.replace("4", "1", 1)):
        trained_on(given, 1)


def test_volumes_too_large_to_be_whole(files):
    given = an_input(files, patch=(11, 10, 8), crop=Crop.WHOLE)
    message = (
        r"[03]\.nii has \(12, 10, 8\) voxels, more than the \(11, 10, 8\) that "
        r"whole volumes are labelled at \(axes .*\): raise "
        "SegmentationInput.patch"
    )
    with pytest.raises(tf.errors.OpError, match=message):
        trained_on(given, 1)
    patches(given, (11, 10, 8)).tiles()  # Those held out are smaller.


def test_a_broken_file_is_named(tmp_path):
    install(tmp_path, count=3, shape=(6, 6, 6), held=1)
    given = an_input(VolumeFiles(path=str(tmp_path / "dataset.json")))
    image = tmp_path / "imagesTr" / "1.nii.gz"
    image.write_bytes(image.read_bytes()[:-9])
    message = r"ValueError: .*/1\.nii\.gz is no NIfTI file .*leave it out"
    with pytest.raises(tf.errors.OpError, match=message):
        trained_on(given, 2)


def test_other_classes_than_those_of_the_files(files):
    message = "num_classes is 4, but the files have 3 classes: background, liver, tum"
    with pytest.raises(ValueError, match=message):
        patches(an_input(files, num_classes=4)).tiles()


def test_a_volume_that_nobody_labelled(tmp_path):
    class Files:
        def classes(self):
            return CLASSES

        def read(self, split):
            return [Case("a", write(tmp_path / "a.nii", image_of(boxes((6, 6, 6)))))]

    with pytest.raises(ValueError, match=r"a\.nii has no label: name one"):
        patches(an_input(Files())).tiles()


def test_rows_outside_the_batch(files):
    with pytest.raises(ValueError, match="not part of a global batch of 4"):
        trained_on(an_input(files), 1, rows=range(2, 6))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("patch", (8, 8), "three whole numbers above 0"),
        ("patch", (8, 8, 0), "three whole numbers above 0"),
        ("patch", (8, 8, 7.5), "three whole numbers above 0"),
        ("patch", 8, "three whole numbers above 0"),
        ("spacing", (1.0, 1.0), "three numbers above 0, or None"),
        ("spacing", (1.0, 1.0, -1.0), "three numbers above 0, or None"),
        ("spacing", (1.0, 1.0, float("inf")), "three numbers above 0, or None"),
        ("flips", (3,), "some of 0, 1 and 2, each once"),
        ("flips", (1, 2, 3), "some of 0, 1 and 2, each once"),
        ("flips", (0, 0), "some of 0, 1 and 2, each once"),
        ("flips", 0, "some of 0, 1 and 2, each once"),
        ("num_classes", 1, "at least 2"),
        ("channels", 0, "at least 1"),
        ("foreground", -0.1, "at least 0"),
        ("foreground", 1.1, "at least 0 and at most 1"),
        ("overlap", 1.0, "at least 0 and below 1"),
        ("cache_bytes", -1, "at least 0"),
        ("seed", -1, "at least 0"),
        ("crop", "whole", "one of Crop.PATCHES, Crop.WHOLE"),
    ],
)
def test_fields_out_of_range(field, value, message):
    with pytest.raises(ValueError, match=rf"SegmentationInput\.{field} is .*{message}"):
        an_input(VolumeFiles(path="none"), **{field: value})
