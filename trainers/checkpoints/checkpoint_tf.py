"""Reads checkpoints of `tf.train`: TF 2's of objects, TF 1's of names, SavedModels'."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from meshwright.trainers.checkpoints.checkpoint_digests import CheckpointError
from meshwright.trainers.checkpoints.checkpoint_manifest import ArraySpec

# tf.train.Checkpoint puts this behind the path of every variable.
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_T5X_STEP, _MOST_NAMED = "checkpoint_", 5
_T5X_REMEDY = (
    "which is not read: convert it to safetensors, with the names of Hugging Face's "
    "Transformers, and say by InitializeFrom.rules which weights they are here"
)


def tf_checkpoint(path: str) -> str | None:
    """The prefix of TensorFlow's checkpoint at `path`; None if there is none.

    The path is a prefix, a folder of some, or a SavedModel, whose variables are one.

    Raises:
      CheckpointError: there is a checkpoint of T5X, or a folder of some.
    """
    if _is_t5x(path):
        raise CheckpointError(f"{path} is a checkpoint of T5X, {_T5X_REMEDY}")
    variables = os.path.join(path, "variables", "variables")
    for prefix in (path, tf.train.latest_checkpoint(path), variables):
        # Format V1, written by old savers, is a single file of that name.
        if prefix and (
            tf.io.gfile.exists(f"{prefix}.index")
            or (tf.io.gfile.exists(prefix) and not tf.io.gfile.isdir(prefix))
        ):
            return prefix
    names = tf.io.gfile.listdir(path) if tf.io.gfile.isdir(path) else []
    steps = sorted(name.rstrip("/") for name in names if name.startswith(_T5X_STEP))
    if steps := [name for name in steps if _is_t5x(os.path.join(path, name))]:
        named = ", ".join(steps[:_MOST_NAMED]) + ", ..." * (len(steps) > _MOST_NAMED)
        raise CheckpointError(
            f"{path} is a folder of checkpoints of T5X ({named}), each of {_T5X_REMEDY}"
        )
    return None


def read_tf_checkpoint(
    prefix: str, choose: Callable[[dict[str, ArraySpec]], Iterable[str]]
) -> dict[str, np.ndarray]:
    """Some variables of a checkpoint; TensorFlow checks the digest of each.

    Args:
      prefix: as returned by `tf_checkpoint`.
      choose: takes the forms of all variables by name, and returns the names of those
        to read. `tf.train.Checkpoint`'s are paths of attributes, such as
        `model/dense/kernel`.

    Raises:
      CheckpointError: the checkpoint is damaged, or is not TensorFlow's.
    """
    try:
        reader = tf.train.load_checkpoint(prefix)
        shapes = reader.get_variable_to_shape_map()
        dtypes = reader.get_variable_to_dtype_map()
    # Damage surfaces as IndexError, RuntimeError, tf.errors.DataLossError, ...
    except Exception as error:
        raise _unreadable(prefix, error) from error
    keys = {name.removesuffix(_VALUE): name for name in shapes}
    forms = {
        name: ArraySpec(tuple(shapes[key]), dtypes[key].name)
        for name, key in keys.items()
        if dtypes[key] != tf.string  # Such as the graph of objects.
    }
    names = choose(forms)
    try:
        return {name: reader.get_tensor(keys[name]) for name in names}
    except Exception as error:
        raise _unreadable(prefix, error) from error


def _is_t5x(path: str) -> bool:
    file = os.path.join(path, "checkpoint")
    if not tf.io.gfile.exists(file) or tf.io.gfile.isdir(file):
        return False
    with tf.io.gfile.GFile(file, "rb") as opened:
        return opened.read(1) >= b"\x80"  # T5X's is in msgpack, TensorFlow's is text.


def _unreadable(prefix: str, error: Exception) -> CheckpointError:
    text = " ".join(str(error).split())
    return CheckpointError(
        f"the TensorFlow checkpoint {prefix} cannot be read ({text[:300]}): use "
        "another checkpoint"
    )
