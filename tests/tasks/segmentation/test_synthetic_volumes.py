"""Volumes made on the machine: always the same, once, of shapes in millimetres."""

import dataclasses
import math
import pathlib

import nibabel
import numpy as np
import pytest

from meshwright.tasks.input.example_order import Split
from meshwright.tasks.segmentation import synthetic_volumes
from meshwright.tasks.segmentation.synthetic_volumes import SyntheticVolumes
from meshwright.tasks.segmentation.volume_files import Intensities, load


@pytest.fixture
def given(tmp_path):
    synthetic_volumes._made.cache_clear()
    return SyntheticVolumes(folder=str(tmp_path / "made"), volumes=4, size=(24, 24, 16))


def cases(given):
    return [case for split in Split for case in given.read(split)]


def contents(given):
    """Bytes by path below the folder."""
    folder = pathlib.Path(given.folder)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def loaded(given):
    return [
        load(case, given.classes(), spacing=None, intensities=Intensities())
        for case in cases(given)
    ]


def test_files_are_in_the_users_cache_unless_a_folder_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    SyntheticVolumes(volumes=2, size=(8, 8, 8), seed=5).read(Split.TRAIN)
    assert any((tmp_path / "meshwright/volumes").iterdir())


def test_the_same_settings_make_the_same_files(given, tmp_path):
    cases(given)
    again = dataclasses.replace(given, folder=str(tmp_path / "again"))
    cases(again)
    assert contents(again) == contents(given)
    assert len(contents(given)) == 2 * 4 + 1, "images, labels, a list; no scratch"


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"size": (25, 24, 16)},
        {"spacing": (1.0, 1.0, 2.0)},
        {"noise": 0.3},
        {"bias_field": 0.2},
    ],
)
def test_other_settings_make_other_files(given, change):
    other = dataclasses.replace(given, volumes=2, **change)
    mine, others = cases(given)[0], cases(other)[0]
    assert mine.name != others.name
    assert (
        pathlib.Path(mine.label).read_bytes() != pathlib.Path(others.label).read_bytes()
    )
    assert pathlib.Path(mine.image).is_file()


def test_more_volumes_keep_those_there_are(given):
    first = {case.name for case in cases(given)}
    before = contents(given)
    more = dataclasses.replace(given, volumes=6)
    assert first < {case.name for case in cases(more)}
    assert before.items() <= contents(more).items()


def test_a_half_made_folder_is_completed(given):
    made = cases(given)
    content = contents(given)
    stamps = {case.name: pathlib.Path(case.image).stat().st_mtime_ns for case in made}
    pathlib.Path(made[0].image).unlink()
    pathlib.Path(made[1].label).unlink()
    synthetic_volumes._made.cache_clear()
    assert cases(given) == made
    assert contents(given) == content
    after = {case.name: pathlib.Path(case.image).stat().st_mtime_ns for case in made}
    kept = {name for name in stamps if stamps[name] == after[name]}
    assert kept == {case.name for case in made[2:]}


def test_one_in_so_many_is_held_out(given):
    other = dataclasses.replace(given, volumes=6, held_out_one_in=3)
    held_out = [case.name[-4:] for case in other.read(Split.HELD_OUT)]
    train = [case.name[-4:] for case in other.read(Split.TRAIN)]
    assert held_out == ["0000", "0003"]
    assert train == ["0001", "0002", "0004", "0005"]


def test_each_class_can_be_seen_and_told_apart(given):
    """Its share of voxels, and its mean intensity against noise and light."""
    other = dataclasses.replace(given, volumes=12, size=(40, 40, 28))
    shares = []
    for volume in loaded(other):
        label = volume.label
        shares.append(np.bincount(label.ravel(), minlength=3) / label.size)
        means = [volume.image[label == value].mean() for value in range(3)]
        assert means == sorted(means)
    shares = np.array(shares)
    assert shares[:, 1:].min() > 0.005
    assert np.median(shares[:, 1:]) > 0.02
    assert shares[:, 0].min() > 0.7


def test_grids_differ_and_some_are_askew(given):
    other = dataclasses.replace(given, volumes=12)
    files = [nibabel.load(case.image) for case in cases(other)]
    codes = {nibabel.aff2axcodes(file.affine) for file in files}
    assert tuple("RAS") in codes
    assert len(codes) > 3
    assert len({file.shape for file in files}) > 6
    for volume in loaded(other):
        size = np.array(volume.label.shape)
        spacing = np.linalg.norm(volume.affine[:3, :3], axis=0)
        # Reoriented, they are as wide as was asked for.
        assert (abs(size / [24, 24, 16] - 1) <= 0.1 + 0.5 / 16).all()
        assert (abs(spacing / [1, 1, 1.5] - 1) <= 0.2 + 1e-5).all()
        turned = volume.affine[:3, :3] / spacing
        assert np.diag(turned).min() > math.cos(math.radians(10)) - 1e-5


def test_shapes_are_of_millimetres():
    """An ellipsoid, and a straight tube, have the volume that was drawn."""
    spacing = np.array([0.8, 1.1, 1.9])
    places = synthetic_volumes._places(np.array([60, 48, 30]), spacing)
    rng = np.random.default_rng(0)
    radii = np.array([6.0, 9.0, 13.0])
    rotation = synthetic_volumes._rotation(rng, math.pi)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-12)
    middle = np.array([2.0, -1.0, 3.0])
    inside = synthetic_volumes._ellipsoid(places, middle, radii, rotation)
    size = inside.sum() * spacing.prod()
    assert size == pytest.approx(4 / 3 * math.pi * radii.prod(), rel=0.02)
    np.testing.assert_allclose(places[inside].mean(axis=0), middle, atol=0.2)
    # Its longest radius is along the last column of the rotation.
    along = (places[inside] - middle) @ rotation
    np.testing.assert_allclose(np.abs(along).max(axis=0), radii, rtol=0.12)

    curve = np.linspace(-12, 12, 256)[:, None] * rotation[:, 0]
    tube = synthetic_volumes._tube(places, curve, 4.0)
    capsule = math.pi * 4**2 * 24 + 4 / 3 * math.pi * 4**3
    assert tube.sum() * spacing.prod() == pytest.approx(capsule, rel=0.03)


def test_light_and_noise_are_as_strong_as_asked_for(given):
    dark = dataclasses.replace(given, noise=0.0, bias_field=0.0, volumes=2)
    for volume in loaded(dark):
        values = [np.ptp(volume.image[volume.label == value]) for value in range(3)]
        assert max(values) < 1e-3
    field = synthetic_volumes._smooth(
        np.random.default_rng(0),
        np.random.default_rng(1).uniform(-0.5, 0.5, (9, 9, 9, 3)),
    )
    assert np.abs(field).max() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"volumes": 1}, "SyntheticVolumes.volumes is 1"),
        ({"size": (48, 48)}, r"SyntheticVolumes.size is \(48, 48\): give 3"),
        ({"size": (48, 48, 7)}, "SyntheticVolumes.size is 7; .* at least 8"),
        ({"spacing": (1.0, 1.0, 0.0)}, "SyntheticVolumes.spacing is 0.0; .* above 0"),
        ({"spacing": (1.0,)}, "SyntheticVolumes.spacing"),
        ({"noise": -0.1}, "SyntheticVolumes.noise is -0.1"),
        ({"bias_field": 1.0}, "SyntheticVolumes.bias_field is 1.0"),
        ({"held_out_one_in": 1}, "SyntheticVolumes.held_out_one_in is 1"),
    ],
)
def test_wrong_settings(change, message):
    with pytest.raises(ValueError, match=message):
        SyntheticVolumes(**change)
