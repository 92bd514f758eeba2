"""TFRecords with a feature "text" as a language model's documents."""

import dataclasses
import functools

import gin
import tensorflow as tf

from meshwright.tasks import TextFiles
from meshwright.tasks.input.example_order import Split


@functools.cache
def texts(file):
    """The texts of a file, bytes; `file` may be in a bucket."""
    spec = {"text": tf.io.FixedLenFeature([], tf.string)}
    records = tf.data.TFRecordDataset(file).as_numpy_iterator()
    return [tf.io.parse_single_example(r, spec)["text"].numpy() for r in records]


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRecords(TextFiles):
    """`root` has train-*.tfrecord and validation-*.tfrecord; each text is a document.

    As of `TextFiles`, every process reads all text into its memory.
    """

    def paths(self):
        files = sorted(tf.io.gfile.glob(f"{self.root}/*.tfrecord"))
        if not files:
            raise FileNotFoundError(f"TextRecords.root: no *.tfrecord in {self.root}")
        return [f"{file}#{i}" for file in files for i in range(len(texts(file)))]

    def split_of(self, path):
        name = path.rpartition("/")[2]
        return Split.HELD_OUT if name.startswith("validation-") else Split.TRAIN

    def read(self, path):
        file, _, number = path.rpartition("#")
        return texts(file)[int(number)]
