"""What TensorBoard shows of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping

import gin
import numpy as np
import tensorflow as tf


class Summaries:
    """Writes scalars and texts below `model_dir`.

    Args:
      model_dir: the run's folder.
      name: sub-folder, "train" or "eval": a run of its own in TensorBoard.

    Raises:
      OSError: the folder cannot be written.
    """

    def __init__(self, model_dir: str, name: str):
        folder = os.path.join(model_dir, name)
        try:
            os.makedirs(folder, exist_ok=True)
            self._writer = tf.summary.create_file_writer(folder)
        except (OSError, tf.errors.OpError) as e:
            raise OSError(
                f"cannot write summaries to {folder}: {e}; choose another --model_dir"
            ) from e

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One point of each curve, at `step`."""
        with self._writer.as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(name, np.float32(value))

    def gin_config(self, step: int, text: str) -> None:
        """The operative gin configuration, in the text tab."""
        with self._writer.as_default(step=step):
            tf.summary.text("gin config", gin.markdown(text))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
