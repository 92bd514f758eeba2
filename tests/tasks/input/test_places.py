"""Inputs read text in buckets, or refuse them: `ram://` is one without a network."""

import os

import pytest
import tensorflow as tf

from meshwright.tasks.images.image_files import ImageFiles
from meshwright.tasks.input.dataset_input import DatasetInput
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.recommendation.interactions import RatingsFile
from meshwright.tasks.segmentation.volume_files import VolumeFiles
from meshwright.tasks.speech.speech_manifest import Manifest
from meshwright.tasks.text.parallel_text import TsvFiles
from meshwright.tasks.text.text_input import TextFiles, TextInput

TEXTS = {
    "a.txt": b"one",
    "part/b.txt": b"two words",
    "part/deep/c.txt": b"three",
    "part/d.md": b"of another pattern",
    "left_out/e.txt": b"of another folder",
}


def written(root):
    for path, text in TEXTS.items():
        tf.io.gfile.makedirs(os.path.dirname(f"{root}/{path}"))
        with tf.io.gfile.GFile(f"{root}/{path}", "wb") as file:
            file.write(text)
    return root


def of(root, **given):
    return TextFiles(root=root, pattern="*.txt", excluded_dirs=("left_out",), **given)


@pytest.mark.parametrize("end", ["", "/"])
def test_texts_in_a_bucket_are_those_of_a_folder(tmp_path, end):
    local = of(written(f"{tmp_path}/texts") + end)
    remote = of(written(f"ram://{tmp_path.name}/texts") + end)
    assert remote.paths() == ["a.txt", "part/b.txt", "part/deep/c.txt"] == local.paths()
    for path in local.paths():
        assert remote.read(path) == local.read(path) == TEXTS[path]
        assert remote.split_of(path) is local.split_of(path)


def test_batches_of_a_bucket(tmp_path):
    both = [
        TextInput(
            files=of(written(root), held_out_one_in=10**9), sequence_length=8, seed=1
        )
        for root in (f"{tmp_path}/texts", f"ram://{tmp_path.name}/texts")
    ]
    local, remote = (
        next(iter(each.train_batches(0, global_batch=2, rows=range(2))))
        for each in both
    )
    for path, tensor in local.items_by_path():
        assert tensor.numpy().tolist() == remote.get_path(path).numpy().tolist()
    assert both[0].statistics().sha256 == both[1].statistics().sha256


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ("ram://nothing/here", "there is no folder 'ram://nothing/here': set TextFil"),
        (
            "nope://a/b",
            r"cannot read 'nope://a/b' \(File system scheme 'nope' not ",
        ),
    ],
)
def test_a_bucket_without_texts_is_named(root, message):
    with pytest.raises(OSError, match=message):
        of(root).paths()


def test_a_file_of_a_bucket_that_is_gone_is_named(tmp_path):
    files = of(written(f"ram://{tmp_path.name}"))
    with pytest.raises(OSError, match="cannot read 'ram://.*/gone.txt'"):
        files.read("gone.txt")


def test_a_dataset_may_read_from_a_bucket(tmp_path):
    path = f"ram://{tmp_path.name}/numbers.txt"
    tf.io.gfile.makedirs(os.path.dirname(path))
    with tf.io.gfile.GFile(path, "w") as file:
        file.write("1\n2\n3\n4\n")

    def numbers():
        return tf.data.TextLineDataset(path).map(tf.strings.to_number)

    batches = DatasetInput(train=numbers).train_batches(
        0, global_batch=4, rows=range(4)
    )
    assert next(iter(batches)).x.numpy().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("field", "read"),
    [
        (
            "TsvFiles.root",
            lambda p: TsvFiles(root=p, languages=("de",)).pairs(Split.TRAIN),
        ),
        ("Manifest.path", lambda p: Manifest(path=p).read(Split.TRAIN)),
        ("VolumeFiles.path", lambda p: VolumeFiles(path=p).classes()),
        ("RatingsFile.path", lambda p: RatingsFile(path=p).read()),
        (
            "ImageFiles.train",
            lambda p: ImageFiles(train=p, held_out=p).records(Split.TRAIN),
        ),
    ],
)
def test_inputs_that_read_disks_alone_refuse_a_bucket(field, read):
    message = f"{field} is 'gs://bucket/x', in a bucket, which this input does not"
    with pytest.raises(ValueError, match=message):
        read("gs://bucket/x")
