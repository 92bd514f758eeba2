"""NIfTI files: broken ones are named, whole ones written, units become millimetres."""

import gzip
import pathlib
import sys

import nibabel
import numpy as np
import pytest

from meshwright.tasks.segmentation.nifti import (
    millimetre_affine,
    read_nifti,
    stem,
    write_nifti,
)
from tests.tasks.segmentation.volume_files_on_disk import (
    boxes,
    image_of,
    patched,
    write,
)

# 2 MiB that become 2 GiB: gzip joins what parts it is given.
BOMB = gzip.compress(bytes(2**24)) * 128


def truncated(content):
    return gzip.compress(content)[:-200]


def flipped(content):
    """One bit among the voxels, which deflate itself does not notice."""
    stream = bytearray(gzip.compress(content, compresslevel=0))
    stream[-100] ^= 1
    return bytes(stream)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda content: b"", r"has 0 bytes"),
        (lambda content: b"some text\n", r"\(Not a gzipped file \(b'so'\)\)"),
        (lambda content: content, "Not a gzipped file"),
        (lambda content: gzip.compress(b"some text"), "begins with b'some tex'"),
        (lambda content: gzip.compress(b"\x89PNG" * 99), "begins with b'.x89PNG"),
        (lambda content: gzip.compress(content[:-7]), "has 4185 bytes of 4192"),
        (truncated, "end-of-stream"),
        (flipped, "CRC check failed"),
        (patched(40, 3, 12, 0, 8), r"its shape \[12, 0, 8\] has no voxel"),
        (patched(40, 3, -12), r"its shape \[-12, 10, 8\] has no voxel"),
        (patched(40, 3, 30000, 30000, 30000), "more than 2147483648 voxels"),
        (patched(40, 3, 1000, 1000, 1000), "has 4192 bytes of 4000000352"),
        (lambda content: BOMB, "begins with"),
        (
            lambda content: gzip.compress(content) + BOMB,
            "it goes on after its 4192 bytes",
        ),
        (patched(108, np.inf, dtype="<f4"), "float infinity"),
        (patched(108, np.nan, dtype="<f4"), "NaN"),
        (patched(70, 9999), "data code 9999"),
        (patched(70, 32, 64), r"its voxels are complex64, no real"),
        (patched(280, *[0] * 12, dtype="<f4"), "affine .* is singular"),
        (patched(280, *[np.nan] * 4, dtype="<f4"), "affine .* is singular"),
        (patched(280, 1e-30, dtype="<f4"), "affine .* is singular"),
    ],
)
def test_a_broken_file_is_named(tmp_path, broken, message):
    path = tmp_path / "a.nii.gz"
    write(path, image_of(boxes()))
    path.write_bytes(broken(gzip.decompress(path.read_bytes())))
    with pytest.raises(ValueError, match=f"(?s){path} is no NIfTI file.*{message}"):
        read_nifti(str(path))


@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_both_kinds_are_read_in_either_byte_order(tmp_path, kind, ending, order):
    values = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    header = kind.header_class(endianness=order)
    header.set_data_dtype(np.int16)
    path = str(tmp_path / f"a{ending}")
    write_nifti(path, kind(values, np.diag([2.0, 3, 4, 1]), header))
    image = read_nifti(path)
    assert type(image) is kind
    assert image.header.endianness == order
    np.testing.assert_array_equal(image.get_fdata(), values)
    np.testing.assert_array_equal(millimetre_affine(image), np.diag([2.0, 3, 4, 1]))


@pytest.mark.parametrize(("code", "factor"), [(0, 1), (1, 1e3), (2, 1), (3, 1e-3)])
def test_units_of_length(tmp_path, code, factor):
    path = tmp_path / "a.nii.gz"
    write(path, boxes())
    unit = patched(123, code + 5 * 8, dtype="u1")  # And one of time, that is none.
    path.write_bytes(unit(gzip.decompress(path.read_bytes())))
    spacing = np.diag(millimetre_affine(read_nifti(str(path))))
    np.testing.assert_allclose(spacing, [factor, factor, factor, 1])


def test_a_file_that_is_not_written_whole_is_not_there(tmp_path, monkeypatch):
    image = nibabel.Nifti1Image(boxes(), np.eye(4))

    def fail(image, path):
        pathlib.Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(nibabel, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        write_nifti(str(tmp_path / "b.nii.gz"), image)
    assert not list(tmp_path.iterdir())


def test_names():
    assert stem("x/a.b.nii.gz") == stem("a.b.nii") == "a.b"
    for wrong in ("a.gz", "x/.nii", "a.nii.gz/b", "a.NRRD"):
        with pytest.raises(ValueError, match=f"{wrong} does not end in .nii.gz or .n"):
            stem(wrong)


def test_without_nibabel_it_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(
        ImportError, match=r"nibabel .* pip install 'meshwright\[seg\]'"
    ):
        read_nifti("a.nii")
