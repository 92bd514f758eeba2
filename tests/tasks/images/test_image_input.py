"""Batches of pictures: each once, the same again, the parts asked for; bad files."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from meshwright.tasks.images.image_files import ImageFiles
from meshwright.tasks.images.image_input import ImageInput, _middle, _random_part
from meshwright.tasks.input.example_order import Split
from tests.tasks.images.image_records import (
    SHADES,
    example,
    files_of,
    gradient,
    install,
    jpeg,
    write,
)

TRAIN, HELD_OUT = 11, 5


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return install(tmp_path_factory.mktemp("pictures"), TRAIN, HELD_OUT)


def an_input(files, **kwargs) -> ImageInput:
    return ImageInput(files=files, **{"size": 8, "num_classes": 3, **kwargs})


def trained_on(given, count, start=0, B=4, rows=None):
    batches = given.train_batches(
        start, global_batch=B, rows=range(B) if rows is None else rows
    )
    return [batch.map(lambda t: t.numpy()) for batch in batches.take(count)]


def held_out(given, B=4, rows=None, max_batches=None):
    batches = given.held_out_batches(
        global_batch=B,
        rows=range(B) if rows is None else rows,
        max_batches=max_batches,
    )
    return [batch.map(lambda t: t.numpy()) for batch in batches]


def numbers_in(batches) -> list[int]:
    """Which pictures are there, by their shades."""
    shades = [i[..., 2].mean() / SHADES for batch in batches for i in batch.image]
    np.testing.assert_allclose(shades, np.rint(shades), atol=0.15)
    return [int(n) for n in np.rint(shades)]


def shown(number: int) -> np.ndarray:
    """What a file's picture of that number shows."""
    encoded = jpeg(gradient(20 + number, 30, SHADES * number))
    return tf.io.decode_jpeg(encoded).numpy()


def test_each_picture_is_read_once_an_epoch_with_its_label(files):
    given = an_input(files)
    batches = trained_on(given, 9, B=3)
    # 11 pictures in batches of 3: the first 11 rows are an epoch.
    numbers = numbers_in(batches)
    epochs = [numbers[:11], numbers[11:22]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(TRAIN))] * 2
    assert epochs[0] != epochs[1]
    labels = [int(label) for batch in batches for label in batch.label]
    assert labels == [n % 3 for n in numbers]
    spec = given.element_spec(3)
    assert batches[0].map(lambda a: (a.shape, a.dtype)) == spec.map(
        lambda s: (tuple(s.shape), s.dtype.as_numpy_dtype)
    )


def test_a_batch_follows_from_its_step_alone_whoever_reads_it(files):
    given = an_input(files)
    straight = trained_on(given, 5)

    def equal(ours, theirs):
        ours.map(np.testing.assert_array_equal, theirs)

    for ours, theirs in zip(trained_on(given, 2, start=3), straight[3:], strict=True):
        equal(ours, theirs)
    parts = [trained_on(given, 5, rows=rows) for rows in (range(2), range(2, 4))]
    for first, second, all_rows in zip(*parts, straight, strict=True):
        equal(first.map(lambda a, b: np.concatenate([a, b]), second), all_rows)
    other = trained_on(dataclasses.replace(given, seed=1), 5)
    assert numbers_in(other) != numbers_in(straight)


def test_the_same_picture_is_cut_differently_in_each_epoch(files):
    given = an_input(files, mirrored=0.0)
    seen = {}
    for batch in trained_on(given, 3, B=TRAIN):
        for number, image in zip(numbers_in([batch]), batch.image, strict=True):
            seen.setdefault(number, set()).add(image.tobytes())
    assert all(len(images) == 3 for images in seen.values())


@pytest.mark.parametrize("mirrored", [0.0, 1.0])
def test_pictures_are_mirrored_and_never_turned(files, mirrored):
    given = an_input(files, mirrored=mirrored, area=(0.5, 1.0))
    (batch,) = trained_on(given, 1, B=TRAIN)
    downwards = np.diff(batch.image[..., 0].astype(int).mean(2), axis=1)
    rightwards = np.diff(batch.image[..., 1].astype(int).mean(1), axis=1)
    assert (downwards > 0).all()
    assert (rightwards < 0).all() if mirrored else (rightwards > 0).all()


def test_a_part_is_the_one_that_the_draw_says(files):
    """All of a picture at its own size comes out as it went in."""
    full = an_input(files, size=20, area=(1.0, 1.0), aspect=(1.5, 1.5), mirrored=0.0)
    batch = trained_on(full, 1, B=TRAIN)[0]
    place = numbers_in([batch]).index(0)  # That picture has 20 rows of 30.
    want = tf.image.resize(shown(0), [20, 20])
    np.testing.assert_allclose(batch.image[place], want, atol=0.5)


@pytest.mark.parametrize("size", [(100, 80), (40, 200), (7, 9)])
def test_random_parts_have_areas_and_aspects_within_bounds(size):
    rng = np.random.default_rng(0)
    draw = functools.partial(_random_part, rng, size, (0.2, 0.9), (0.5, 2.0))
    parts = np.array([draw() for _ in range(400)])
    top, left, height, width = parts.T
    assert (top >= 0).all() and (top + height <= size[0]).all()
    assert (left >= 0).all() and (left + width <= size[1]).all()
    some = parts[(height < size[0]) | (width < size[1])]
    share = some[:, 2] * some[:, 3] / np.prod(size)
    rounded = 1 / min(size)
    assert share.min() > 0.2 - rounded and share.max() < 0.9 + rounded
    by_height = some[:, 3] / some[:, 2]
    assert by_height.min() > 0.5 - rounded and by_height.max() < 2.0 + 3 * rounded
    assert len(some) > 200 and np.ptp(share) > 0.1


def test_where_no_part_fits_all_is_taken():
    rng = np.random.default_rng(0)
    assert _random_part(rng, (4, 400), (1.0, 1.0), (1.0, 1.0)) == (0, 0, 4, 400)


def test_held_out_pictures_come_once_in_order_cut_alike(files):
    given = an_input(files, middle=0.5)
    batches = held_out(given)
    assert numbers_in(batches)[:HELD_OUT] == list(range(HELD_OUT))
    labels = np.concatenate([batch.label for batch in batches]).tolist()
    assert labels == [0, 1, 2, 0, 1, -1, -1, -1]
    assert not batches[1].image[1:].any()
    for i, image in enumerate(batches[0].image):  # The middle 0.5 of the shorter side.
        side = round(0.5 * (20 + i))
        top, left = (20 + i - side) // 2, (30 - side) // 2
        part = shown(i)[top : top + side, left : left + side]
        want = tf.image.resize(part, [8, 8])
        np.testing.assert_allclose(image, want, atol=0.5)
    assert _middle((7, 3), 0.1) == (3, 1, 1, 1)


def test_some_held_out_batches_are_spread_evenly(files):
    batches = held_out(an_input(files), B=1, max_batches=2)
    assert numbers_in(batches) == [0, 2]
    second = held_out(an_input(files), rows=range(1, 2))
    assert numbers_in(second)[:1] == [1] and len(second) == 2


def test_fingerprints_tell_files_apart(files, tmp_path):
    def fingerprint(files):
        return files.records(Split.TRAIN).fingerprint()

    again = install(tmp_path, TRAIN, HELD_OUT)
    assert fingerprint(again) == fingerprint(files), "wherever they are"
    (tmp_path / "more").mkdir()
    assert fingerprint(install(tmp_path / "more", TRAIN + 1, 2)) != fingerprint(files)


# Bad files.


GOOD = {"encoded": jpeg(gradient(9, 9, 0)), "label": 1}


def first_batch(folder, records, **kwargs):
    for name in ("train-0", "validation-0"):
        write(folder / name, records)
    return trained_on(an_input(files_of(folder), **kwargs), 1, B=len(records))


def test_no_such_files(tmp_path):
    message = r"no file matches '.*/train-\*': set ImageFiles.train to a pattern of TF"
    with pytest.raises(FileNotFoundError, match=message):
        files_of(tmp_path).records(Split.TRAIN)
    with pytest.raises(FileNotFoundError, match=r"set ImageFiles\.held_out to"):
        files_of(tmp_path).records(Split.HELD_OUT)


@pytest.mark.parametrize("content", [b"no records at all, but text", b"short"])
def test_no_tfrecord_file(tmp_path, content):
    (tmp_path / "train-0").write_bytes(content)
    message = (
        r"record 0 of .*/train-0: the file is no TFRecord file, or not as it was w"
    )
    with pytest.raises(ValueError, match=message):
        files_of(tmp_path).records(Split.TRAIN)


def test_a_file_that_ends_too_soon(tmp_path):
    path = write(tmp_path / "train-0", [example(**GOOD)] * 3)
    path.write_bytes(path.read_bytes()[:-5])
    message = r"record 2 of .*/train-0: the file ends within it: copy the file anew"
    with pytest.raises(ValueError, match=message):
        files_of(tmp_path).records(Split.TRAIN)


def test_a_picture_in_which_a_bit_flipped(tmp_path):
    """JPEG itself notices few of these."""
    path = write(tmp_path / "train-0", [example(**GOOD)] * 2)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    records = files_of(tmp_path).records(Split.TRAIN)
    assert records.picture(0).label == GOOD["label"]
    with pytest.raises(ValueError, match="record 1 of .*/train-0 is not as it was wr"):
        records.picture(1)


def test_files_without_records(tmp_path):
    write(tmp_path / "train-0", [])
    with pytest.raises(ValueError, match=r"no record is in the files of .*train-\*'"):
        files_of(tmp_path).records(Split.TRAIN)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"\x0a\xd4\xff", "is no tf.train.Example with the features .*can't decode"),
        (b"no example", "is no tf.train.Example with the features image/encoded"),
        (example(label=1), "has no 'image/encoded': write the file as TensorFlow's Im"),
        (example(encoded=GOOD["encoded"]), "has no 'image/class/label': write"),
        (
            example(**{**GOOD, "label": b"cat"}),
            "is no tf.train.Example with the features",
        ),
        (
            example(**{**GOOD, "label": 4}),
            "has label 4, but there are 3 classes, from 1 on: set ImageInput.num_cla",
        ),
        (example(**{**GOOD, "label": 0}), "has label 0, but there are 3 classes"),
        (
            example(**{**GOOD, "encoded": b"GIF89a"}),
            r"is no JPEG file, or not all of one \(",
        ),
        (
            example(**{**GOOD, "encoded": GOOD["encoded"][:-40]}),
            r"is no JPEG file, or not all of one \(.*Invalid JPEG .*\): write it anew",
        ),
    ],
    ids=["no text", "none", "no image", "no label", "text", "4", "0", "gif", "cut"],
)
def test_a_bad_record_is_named(tmp_path, record, message):
    records = [example(**GOOD), record]
    with pytest.raises(tf.errors.OpError, match=f"record 1 of .*/train-0 {message}"):
        first_batch(tmp_path, records, area=(1.0, 1.0), aspect=(1.0, 1.0))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("size", 0, "must be a whole number of at least 1"),
        ("num_classes", 1, "must be a whole number of at least 2"),
        ("area", (0.5, 1.5), "give the least and the largest, above 0 and at most 1"),
        ("area", 0.5, "give the least and the largest"),
        ("aspect", (2.0, 0.5), "give the least and the largest, above 0"),
        ("mirrored", 1.5, "must be a number of at least 0 and at most 1"),
        ("middle", 0.0, "must be a number above 0 and at most 1"),
        ("seed", -1, "must be a whole number of at least 0"),
    ],
)
def test_fields_out_of_range(field, value, message):
    with pytest.raises(ValueError, match=rf"ImageInput\.{field} is .*{message}"):
        an_input(ImageFiles(train="", held_out=""), **{field: value})
