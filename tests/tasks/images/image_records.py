"""Small TFRecord files of pictures, for tests."""

import pathlib

import numpy as np
import tensorflow as tf

from meshwright.tasks.images.image_files import ImageFiles

SHADES = 20
"""From a picture to the next."""


def gradient(height: int, width: int, shade: int) -> np.ndarray:
    """uint8 [height, width, 3]: red grows downwards, green rightwards, blue is even."""
    rows, columns = np.indices([height, width])
    red, green = rows * 255 // height, columns * 255 // width
    return np.stack([red, green, np.full_like(red, shade)], -1).astype(np.uint8)


def jpeg(image: np.ndarray) -> bytes:
    """Nearly without loss."""
    return tf.io.encode_jpeg(image, quality=100, chroma_downsampling=False).numpy()


def example(**features) -> bytes:
    """Of `encoded` bytes and `label`, by the names that ImageNet's files have."""
    names = {"encoded": "image/encoded", "label": "image/class/label"}
    by_name = {}
    for key, value in features.items():
        if isinstance(value, bytes):
            feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        else:
            feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
        by_name[names[key]] = feature
    features = tf.train.Features(feature=by_name)
    return tf.train.Example(features=features).SerializeToString()


def write(path: pathlib.Path, records: list[bytes]) -> pathlib.Path:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path


def install(folder: pathlib.Path, train: int, held_out: int) -> ImageFiles:
    """So many pictures in two files each: i has shade 20 i and label i % 3 + 1."""
    for name, count in (("train", train), ("validation", held_out)):
        for part, numbers in enumerate(np.array_split(np.arange(count), 2)):
            records = [
                example(encoded=jpeg(gradient(20 + i, 30, SHADES * i)), label=i % 3 + 1)
                for i in map(int, numbers)
            ]
            write(folder / f"{name}-{part:05d}-of-00002", records)
    return files_of(folder)


def files_of(folder: pathlib.Path) -> ImageFiles:
    return ImageFiles(train=f"{folder}/train-*", held_out=f"{folder}/validation-*")
