"""Labelled volumes from files: grids, orientations, intensities, and what is wrong."""

import dataclasses
import gzip
import pathlib

import nibabel
import numpy as np
import pytest

from meshwright.tasks.input.example_order import Split
from meshwright.tasks.segmentation.volume_files import (
    Case,
    Intensities,
    VolumeFiles,
    grid,
    load,
    save,
)
from tests.tasks.segmentation.volume_files_on_disk import (
    CLASSES,
    affine_of,
    boxes,
    image_of,
    install,
    patched,
    write,
    write_list,
)

SHAPE = (12, 10, 8)


def a_case(folder, affine=None, *, image=None, label=None, unit="mm"):
    """Writes an image and its label; either may be given."""
    label = boxes(SHAPE) if label is None else label
    image = image_of(label) if image is None else image
    return Case(
        "a",
        write(folder / "a.nii.gz", image, affine, unit),
        write(folder / "a_label.nii.gz", label, affine, unit),
    )


def loaded(case, spacing=None, intensities=None, classes=CLASSES):
    intensities = Intensities() if intensities is None else intensities
    return load(case, classes, spacing=spacing, intensities=intensities)


def stored(path):
    return np.asanyarray(nibabel.load(path).dataobj)


def askew(spacing=(1.0, 1.0, 1.0), degrees=20):
    """An affine whose axes are turned about the third."""
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    turn = np.array([[c, -s, 0, 5], [s, c, 0, -7], [0, 0, 1, 11], [0, 0, 0, 1]])
    return turn @ np.diag([*spacing, 1])


# Lists.


def test_a_list_that_says_what_is_held_out(tmp_path):
    files = VolumeFiles(path=str(install(tmp_path, count=3, held=1)))
    assert files.classes() == CLASSES
    train, held_out = (files.read(split) for split in Split)
    assert [case.name for case in train] == ["0", "1"]
    assert held_out == [
        Case(
            "2",
            str(tmp_path / "imagesTr/2.nii.gz"),
            str(tmp_path / "labelsTr/2.nii.gz"),
        )
    ]


def entries(folder, names):
    for name in names:
        (folder / name).touch()
    return [{"image": f"./{name}", "label": name} for name in names]


def test_a_hash_of_names_holds_out(tmp_path):
    (tmp_path / "more").mkdir()
    names = [f"case{i:02d}.nii" for i in range(60)]
    by_folder = {}
    for folder, listed in ((tmp_path, names[:40]), (tmp_path / "more", names)):
        path = write_list(folder, entries(folder, listed))
        files = VolumeFiles(path=str(path), held_out_one_in=4)
        by_folder[folder] = {s: {case.name for case in files.read(s)} for s in Split}
    few, many = by_folder.values()
    assert len(few[Split.TRAIN]) + len(few[Split.HELD_OUT]) == 40
    assert 4 <= len(few[Split.HELD_OUT]) <= 16
    for split in Split:
        assert few[split] <= many[split], "more cases move no other"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": {"0": "a", "2": "b"}}, '"labels" .* name each value from 0 on'),
        ({"labels": {"a": 0, "b": 1}}, '"labels" .* name each value from 0 on'),
        ({"labels": ["a", "b"]}, '"labels"'),
        ({"labels": {"0": "a"}}, "two at least"),
        ({"labels": {"0": "a", "1": [2]}}, '"labels"'),
        ({"training": []}, '"training" .*list objects with "image" and "label"'),
        ({"training": "x"}, "\"training\" 'x'"),
        ({"validation": {}}, '"validation" {}'),
        ({"training": [{"image": "0.nii"}]}, r'"training"\[0\] .*a path as "label"'),
        ({"training": ["0.nii"]}, r'"training"\[0\] is \'0.nii\''),
        ({"training": [{"image": 3}]}, r'"training"\[0\] .*a path as "image"'),
        ({"training": [{"image": "x.png", "label": "x.png"}]}, "does not end in .nii"),
    ],
)
def test_what_is_wrong_in_a_list_is_named(tmp_path, change, message):
    (tmp_path / "x.png").touch()
    right = entries(tmp_path, ["0.nii", "1.nii.gz"])
    path = write_list(tmp_path, **{"training": right, **change})
    with pytest.raises(ValueError, match=message):
        VolumeFiles(path=str(path)).read(Split.TRAIN)


def test_a_name_that_is_there_twice(tmp_path):
    (tmp_path / "b").mkdir()
    twice = entries(tmp_path, ["0.nii"]) + entries(tmp_path, ["b/0.nii.gz"])
    path = write_list(tmp_path, twice[:1], validation=twice[1:])
    with pytest.raises(
        ValueError, match=r"two images '0', .*0\.nii and .*b/0\.nii\.gz"
    ):
        VolumeFiles(path=str(path)).classes()


@pytest.mark.parametrize("key", ["image", "label"])
def test_a_file_of_a_list_that_is_not_there(tmp_path, key):
    entry = entries(tmp_path, ["0.nii"])[0] | {key: "gone.nii"}
    path = write_list(tmp_path, [entry])
    with pytest.raises(FileNotFoundError, match=r"\[0\] names \'gone.nii\', and there"):
        VolumeFiles(path=str(path)).read(Split.TRAIN)


def test_an_empty_split(tmp_path):
    path = write_list(tmp_path, entries(tmp_path, ["0.nii"]))
    files = VolumeFiles(path=str(path))
    with pytest.raises(ValueError, match="lists no (train|held_out) case: add some"):
        _ = [files.read(split) for split in Split]


def test_what_is_no_list(tmp_path):
    for text, message in (
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"3", "no obj"),
        (b"[" * 10**5, "not JSON .*recursion"),
        (b"9" * 5000, "not JSON .*digits"),
    ):
        path = tmp_path / f"{len(text)}{text[:1].hex()}.json"
        path.write_bytes(text)
        with pytest.raises(ValueError, match=message):
            VolumeFiles(path=str(path)).read(Split.TRAIN)
    with pytest.raises(ValueError, match="is a folder: set VolumeFiles.path to the"):
        VolumeFiles(path=str(tmp_path)).read(Split.TRAIN)
    with pytest.raises(FileNotFoundError, match="no data set /no/x.json: set Volume"):
        VolumeFiles(path="/no/x.json").read(Split.TRAIN)
    with pytest.raises(ValueError, match="VolumeFiles.held_out_one_in is 1"):
        VolumeFiles(path="x", held_out_one_in=1)


# Grids.


@pytest.mark.parametrize("codes", ["RAS", "LPS", "SRA", "PIL"])
@pytest.mark.parametrize("unit", ["mm", "micron"])
def test_a_voxel_keeps_its_place_in_the_world(tmp_path, codes, unit):
    """Right, front and up are the axes, and the same voxels are at the same places."""
    factor = {"mm": 1, "micron": 1000}[unit]
    affine = affine_of(codes, (1, 2, 3), (-20, 30, 7))
    label = np.zeros(SHAPE, np.uint8)
    label[2, 7, 5] = 2
    in_file = np.diag([factor, factor, factor, 1]) @ affine
    got = loaded(a_case(tmp_path, in_file, label=label, unit=unit))
    assert nibabel.aff2axcodes(got.affine) == tuple("RAS")
    (marker,) = np.argwhere(got.label == 2)
    np.testing.assert_array_equal(np.argmax(got.image), np.argmax(got.label))
    np.testing.assert_allclose(
        got.affine @ [*marker, 1], affine @ [2, 7, 5, 1], rtol=1e-5
    )
    assert got.image.dtype == np.float32
    assert got.label.dtype == np.int32
    assert got.affine.dtype == np.float64
    assert got.image.shape == (*got.label.shape, 1)


def test_resampling_keeps_places_and_sizes(tmp_path):
    """The middle of a ball, and its volume in mm3, from voxels of 1 x 2 x 3 mm."""
    affine = askew((1.0, 2.0, 3.0))
    shape = np.array([30, 16, 11])
    places = np.moveaxis(np.indices(shape), 0, -1) @ np.diag([1.0, 2.0, 3.0])
    ball = np.linalg.norm(places - [12, 14, 17], axis=-1) < 9
    image = np.where(ball, 80, 20).astype(np.int16)
    case = a_case(tmp_path, affine, image=image, label=ball.astype(np.uint8))
    got = loaded(case, spacing=(1.5, 1.5, 1.5))
    sizes = np.linalg.norm(got.affine[:3, :3], axis=0)
    np.testing.assert_allclose(sizes, 1.5, rtol=1e-6)
    assert got.label.shape == (20, 21, 22), "30 x 32 x 33 mm"
    inside = np.argwhere(got.label == 1)
    middle = got.affine @ [*inside.mean(axis=0), 1]
    wanted = affine @ [*np.argwhere(ball).mean(axis=0), 1]
    np.testing.assert_allclose(middle, wanted, atol=0.2)
    assert len(inside) * 1.5**3 == pytest.approx(ball.sum() * 6, rel=0.03)
    bright = np.argwhere(got.image[..., 0] > 0)
    middle = got.affine @ [*bright.mean(axis=0), 1]
    np.testing.assert_allclose(middle, wanted, atol=0.2)


def test_images_are_resampled_linearly_and_labels_are_not(tmp_path):
    """A ramp stays one, up to the last voxels' middles; it ends flat, not dark."""
    ramp = np.broadcast_to(np.arange(8.0)[:, None, None], (8, 4, 4)).copy()
    label = 2 * (ramp >= 4).astype(np.uint8)
    got = loaded(a_case(tmp_path, image=ramp, label=label), spacing=(0.5, 1, 1))
    line = got.image[:, 0, 0, 0].astype(np.float64)
    steps = np.diff(line) / np.diff(line)[5]
    np.testing.assert_allclose(steps[1:-1], 1, rtol=1e-4)
    np.testing.assert_allclose(steps[[0, -1]], 0.5, rtol=1e-4)
    np.testing.assert_array_equal(got.label[:, 0, 0], np.repeat([0, 2], 8))


def test_thick_voxels_of_one_slice(tmp_path):
    label = np.ones([6, 6, 1], np.uint8)
    case = a_case(tmp_path, affine_of("RAS", (1, 1, 0.2)), label=label)
    assert loaded(case, spacing=(1, 1, 2)).label.shape == (6, 6, 1)


def test_a_case_without_labels(tmp_path):
    case = dataclasses.replace(a_case(tmp_path), label=None)
    assert loaded(case, spacing=(2, 2, 2)).label is None


# Intensities.


def test_channels_are_normalized_apart_and_clipped(tmp_path):
    label = boxes(SHAPE)
    image = image_of(label, channels=3)
    image[..., 1] = 50 * image[..., 1] + 7
    image[..., 2] = 0.1
    got = loaded(a_case(tmp_path, image=image, label=label)).image
    assert got.shape == (*SHAPE, 3)
    np.testing.assert_allclose(got.mean(axis=(0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(got.std(axis=(0, 1, 2)), [1, 1, 0], atol=1e-5)
    assert not got[..., 2].any(), "a constant channel becomes zeros"
    clipped = Intensities(clip=[0, 50]).normalized(image)
    assert len(np.unique(clipped[..., 0][label == 2])) == 1, "all were above 50"
    assert not Intensities(clip=(200.0, 300)).normalized(image[..., 2:]).any()


def test_a_files_scale_counts(tmp_path):
    """Clipping is in the image's units, not in those that are stored."""
    case = a_case(tmp_path, image=np.arange(960, dtype=np.int16).reshape(SHAPE))
    path = pathlib.Path(case.image)
    scl_slope_inter = patched(112, 0.5, -100, dtype="<f4")
    path.write_bytes(scl_slope_inter(gzip.decompress(path.read_bytes())))
    got = loaded(case, intensities=Intensities(clip=(0, 100))).image[..., 0]
    wanted = np.clip(np.arange(960).reshape(SHAPE) / 2 - 100, 0, 100)
    wanted = (wanted - wanted.mean()) / wanted.std()
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


def test_equal_numbers_become_zeros():
    for seed in range(5):
        value = np.float32(np.random.default_rng(seed).uniform(0, 1000))
        image = np.full([77, 13, 3, 1], value)
        assert not Intensities().normalized(image).any()


@pytest.mark.parametrize("clip", [(1, 1), (2, 1), (0,), (0, float("nan"))])
def test_a_clip_that_clips_all(clip):
    with pytest.raises(ValueError, match="Intensities.clip is"):
        Intensities(clip=clip)


# Saving.


@pytest.mark.parametrize("codes", ["RAS", "SRA", "PIL", "askew"])
@pytest.mark.parametrize("spacing", [None, (1.5, 0.7, 2.0)])
def test_headers_tell_the_size(tmp_path, codes, spacing):
    affine = askew((1, 2, 3)) if codes == "askew" else affine_of(codes, (1, 2, 3))
    values = np.arange(7 * 6 * 5 * 2, dtype=np.float32).reshape(7, 6, 5, 2)
    case = a_case(tmp_path, affine, image=values, label=np.zeros([7, 6, 5], np.uint8))
    assert grid(case, spacing=spacing) == loaded(case, spacing).image.shape


@pytest.mark.parametrize("affine", ["LPS", "SRA", "PIR", "askew"])
@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_what_is_loaded_and_saved_is_the_same(tmp_path, affine, ending):
    spacing = (0.7, 1.3, 2.1)
    affine = askew(spacing) if affine == "askew" else affine_of(affine, spacing)
    case = a_case(tmp_path, affine)
    image = nibabel.load(case.image)
    image.header["cal_max"] = 300  # What viewers show as white.
    nibabel.save(nibabel.Nifti1Image(image.get_fdata(), None, image.header), case.image)
    got = loaded(case)
    path = str(tmp_path / "out" / f"b{ending}")
    save(path, got.label, like=case, volume=got)
    np.testing.assert_array_equal(stored(path), stored(case.label))
    new, old = nibabel.load(path), nibabel.load(case.image)
    np.testing.assert_array_equal(new.affine, old.affine)
    assert new.get_data_dtype() == np.uint8
    assert new.header["cal_max"] == 0
    assert new.header.get_xyzt_units() == ("mm", "unknown")
    for code in ("sform_code", "qform_code"):
        assert new.header[code] == old.header[code]
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"b{ending}"]
    assert (pathlib.Path(path).read_bytes()[:2] == b"\x1f\x8b") == (ending != ".nii")


def test_what_is_resampled_and_saved_is_nearly_the_same(tmp_path):
    affine = affine_of("LIP", (0.8, 0.9, 2.5), (5, 6, 7))
    label = boxes((40, 36, 16))
    case = a_case(tmp_path, affine, label=label)
    got = loaded(case, spacing=(1, 1, 1))
    assert got.label.shape == (32, 40, 32)
    path = str(tmp_path / "b.nii.gz")
    save(path, got.label, like=case, volume=got)
    form = stored(path)
    for value in (1, 2):
        both = ((form == value) & (label == value)).sum()
        dice = 2 * both / ((form == value).sum() + (label == value).sum())
        assert dice > 0.95, value


def test_a_prediction_reaches_the_borders(tmp_path):
    """Up to half of a large voxel beyond its middle."""
    case = a_case(tmp_path, affine_of("LPS"))
    got = loaded(case, spacing=(4, 5, 4))
    path = str(tmp_path / "b.nii.gz")
    save(path, np.ones_like(got.label), like=case, volume=got)
    assert got.label.shape == (3, 2, 2)
    assert stored(path).shape == SHAPE
    assert stored(path).all()


def test_many_classes_are_saved(tmp_path):
    case = a_case(tmp_path)
    got = loaded(case)
    values = np.arange(960).reshape(SHAPE)
    save(str(tmp_path / "b.nii.gz"), values, like=case, volume=got)
    assert stored(tmp_path / "b.nii.gz").dtype == np.uint16
    np.testing.assert_array_equal(stored(tmp_path / "b.nii.gz"), values)


def test_labels_of_an_image_with_channels_have_none(tmp_path):
    case = a_case(tmp_path, image=image_of(boxes(SHAPE), channels=2))
    got = loaded(case)
    save(str(tmp_path / "b.nii.gz"), got.label, like=case, volume=got)
    np.testing.assert_array_equal(stored(tmp_path / "b.nii.gz"), boxes(SHAPE))


@pytest.mark.parametrize(
    ("values", "name", "message"),
    [
        (np.zeros([12, 10, 7], int), "b.nii", r"shape \[12, 10, 7\] .*\[12, 10, 8\]"),
        (np.zeros(SHAPE), "b.nii", "of type float64 .* give the classes' numbers"),
        (-np.ones(SHAPE, int), "b.nii", "int64 from -1 on"),
        (np.zeros(SHAPE, int), "b.mgz", "b.mgz does not end in .nii.gz or .nii"),
    ],
)
def test_labels_that_cannot_be_saved(tmp_path, values, name, message):
    case = a_case(tmp_path)
    with pytest.raises(ValueError, match=message):
        save(str(tmp_path / "out" / name), values, like=case, volume=loaded(case))
    assert not (tmp_path / "out").exists()


# Files that do not do.


@pytest.mark.parametrize("key", ["image", "label"])
def test_a_file_that_is_gone_or_no_volume(tmp_path, key):
    case = a_case(tmp_path)
    with pytest.raises(
        FileNotFoundError, match="there is no .*x.nii: correct the list"
    ):
        loaded(dataclasses.replace(case, **{key: str(tmp_path / "x.nii")}))
    with pytest.raises(ValueError, match="x.mha does not end in .nii.gz or .nii"):
        loaded(dataclasses.replace(case, **{key: str(tmp_path / "x.mha")}))


@pytest.mark.parametrize("shape", [(6, 6), (6, 6, 4, 2, 3)])
def test_other_than_3_or_4_dims(tmp_path, shape):
    case = a_case(tmp_path, image=np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match=f"a.nii.gz has {len(shape)} dims, .*write"):
        loaded(case)


def test_voxels_that_are_no_number(tmp_path):
    image = image_of(boxes(SHAPE))
    image[0, 0, :3] = [np.nan, np.inf, -np.inf]
    with pytest.raises(ValueError, match="a.nii.gz has 3 voxels, of 960, that are no"):
        loaded(a_case(tmp_path, image=image))


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (3, np.uint8, "no class: 3 in 2 voxels, 1 such"),
        (-1, np.int16, "no class: -1 in 2 voxels, 1 such"),
        (0.5, np.float32, "no class: 0.5 in 2 voxels, 1 such"),
        (np.nan, np.float32, "no class: nan in 2 voxels, 1 such"),
        (2**32, np.float64, "no class: 4294967296.0 in 2 voxels, 1 such"),
    ],
)
def test_labels_that_are_no_class(tmp_path, value, dtype, message):
    label = boxes(SHAPE).astype(dtype)
    case = a_case(tmp_path, label=label, image=image_of(boxes(SHAPE)))
    assert loaded(case).label.max() == 2, "whole floats are fine"
    label[0, 0, :2] = value
    write(pathlib.Path(case.label), label)
    with pytest.raises(
        ValueError, match=f"{case.label} .*{message}.* 1 liver, 2 tumour"
    ):
        loaded(case)


def test_a_label_on_another_grid(tmp_path):
    label = boxes(SHAPE)
    case = a_case(tmp_path, label=label)
    write(pathlib.Path(case.label), label[:-1])
    with pytest.raises(ValueError, match=r"shape \[11, 10, 8\], and .*a.nii.gz, which"):
        loaded(case)
    moved = np.eye(4)
    moved[0, 3] = 0.05
    write(pathlib.Path(case.label), label, moved)
    loaded(case)
    moved[0, 3] = 0.5
    write(pathlib.Path(case.label), label, moved)
    with pytest.raises(ValueError, match="a_label.nii.gz and .* a corner 0.5 voxels"):
        loaded(case)
    write(pathlib.Path(case.label), label, affine_of("LPS"))
    with pytest.raises(ValueError, match="have affines that place a corner"):
        loaded(case)


@pytest.mark.parametrize("look", [loaded, grid])
def test_a_volume_that_would_fill_all_memory(tmp_path, look):
    case = a_case(tmp_path, affine=np.diag([1e3, 1e3, 1e4, 1]))
    with pytest.raises(
        ValueError, match=r"a.nii.gz is resampled to \[12000.0, .* more"
    ):
        look(case, spacing=(1.0, 1.0, 1.0))


@pytest.mark.parametrize("spacing", [(1, 1), (1, 1, 0), (1, float("inf"), 1)])
def test_a_spacing_that_is_none(tmp_path, spacing):
    with pytest.raises(ValueError, match="spacing is"):
        loaded(a_case(tmp_path), spacing=spacing)
