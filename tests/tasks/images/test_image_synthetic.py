"""Pictures made on the machine: always the same, once, of eight classes alike."""

import dataclasses
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from meshwright.tasks.images import synthetic_images
from meshwright.tasks.images.synthetic_images import CLASSES, SyntheticImages, _inside
from meshwright.tasks.input.example_order import Split


@pytest.fixture
def given(tmp_path):
    folder = str(tmp_path / "made")
    return SyntheticImages(folder=folder, train=37, held_out=17, size=24)


def contents(given) -> dict[str, bytes]:
    """Bytes by path, after all were made."""
    synthetic_images._made.cache_clear()
    for split in Split:
        given.records(split)
    folder = pathlib.Path(given.folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def pictures(given, split=Split.TRAIN):
    records = given.records(split)
    return [records.picture(number) for number in range(len(records))]


def test_the_same_settings_make_the_same_files(given, tmp_path):
    again = dataclasses.replace(given, folder=str(tmp_path / "again"))
    assert contents(again) == contents(given)
    assert len(contents(given)) == 2 * 4, "four files for each split; no scratch"


@pytest.mark.parametrize("change", [{"seed": 1}, {"size": 25}, {"noise": 0.2}])
def test_other_settings_make_other_files(given, change):
    before = contents(given)
    more = contents(dataclasses.replace(given, **change))
    new = {name: value for name, value in more.items() if name not in before}
    assert len(new) == 8 and not set(new.values()) & set(before.values())


def test_what_is_missing_is_made_again(given):
    before = contents(given)
    next(pathlib.Path(given.folder).iterdir()).unlink()
    assert contents(given) == before


def test_files_are_in_the_users_cache_unless_a_folder_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    SyntheticImages(train=1, held_out=1, size=8, seed=5).records(Split.TRAIN)
    assert any((tmp_path / "meshwright/images").iterdir())


def test_there_are_as_many_of_each_class(given):
    assert len(pictures(given)) == 37
    labels = [picture.label for picture in pictures(given)]
    assert np.bincount(labels).tolist() == [0, 5, 5, 5, 5, 5, 4, 4, 4]
    assert len(pictures(given, Split.HELD_OUT)) == 17
    images = {picture.encoded for split in Split for picture in pictures(given, split)}
    assert len(images) == 37 + 17, "no picture is in both splits"
    image = tf.io.decode_jpeg(pictures(given)[0].encoded)
    assert image.shape == (24, 24, 3) and image.dtype == tf.uint8


def test_classes_differ_in_shape_and_texture_alone():
    assert len(set(CLASSES)) == 8
    y, x = np.indices([201, 201]) / 100 - 1
    shapes = [_inside(shape, x, y) for shape in synthetic_images._SHAPES]
    for size in shapes:
        assert size[100, 100] and 0.15 < size.mean() < 0.6
        assert not size[np.hypot(x, y) > 1].any(), "all fit into the same circle"
    overlaps = [
        (a & b).sum() / (a | b).sum() for i, a in enumerate(shapes) for b in shapes[:i]
    ]
    assert max(overlaps) < 0.9


def test_colours_tell_nothing():
    """Means of pictures vary more within a class than between classes."""
    kinds = len(CLASSES)
    images = [
        synthetic_images._drawn(np.random.default_rng(seed), seed % kinds, 16, 0.1)
        for seed in range(400)
    ]
    means = np.array(images).mean((1, 2)).reshape(-1, kinds, 3)
    assert means.mean(0).std(0).max() < 0.4 * means.std(0).min()


@pytest.mark.parametrize(
    ("field", "value"),
    [("train", 0), ("held_out", 0), ("size", 7), ("noise", -0.1), ("seed", -1)],
)
def test_fields_out_of_range(field, value):
    message = rf"SyntheticImages\.{field} is {value}; it must be a (whole )?number of"
    with pytest.raises(ValueError, match=message):
        SyntheticImages(**{field: value})
