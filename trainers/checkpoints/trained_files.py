"""Files that a trained model needs besides its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping

import tensorflow as tf

from meshwright.framework.compiler.xla.processes import is_first_process


def write_files(folder: str, contents: Mapping[str, bytes]) -> None:
    """Writes files into a training's folder; of several processes the first does.

    Args:
      folder: the folder, which is made.
      contents: by name; `Task.trained_files`.

    Raises:
      OSError: the folder cannot be written.
    """
    if not is_first_process():
        return
    for name, content in contents.items():
        path = os.path.join(folder, name)
        try:
            tf.io.gfile.makedirs(folder)
            with tf.io.gfile.GFile(f"{path}.new", "wb") as file:
                file.write(content)
            tf.io.gfile.rename(f"{path}.new", path, overwrite=True)
        except tf.errors.OpError as error:
            raise OSError(
                f"cannot write {path} ({error.message}): choose another --model_dir, "
                "or free some space"
            ) from error
