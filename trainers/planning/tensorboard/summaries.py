"""What TensorBoard shows about a run."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping

import gin
import numpy as np
import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.plugins.histogram.metadata import create_summary_metadata
from tensorboard.plugins.hparams import summary_v2 as hparams  # Their api has Keras.

from meshwright.framework.compiler.xla.processes import (
    gather_from_processes,
    is_first_process,
)

log = logging.getLogger("absl")


class Summaries:
    """Writes scalars, texts and images below `model_dir`; they are on disk at once.

    Of several processes only the first writes. The first point replaces the points that
    an earlier run wrote from its step on: a run that was killed had gone on after the
    checkpoint that this run starts from. A disk that fills up later costs points, not
    the training: a single warning says so.

    Args:
      model_dir: the run's folder.
      name: sub-folder, such as "train" or "eval": a separate run in TensorBoard.
      flag: the flag that sets the folder, for messages.

    Raises:
      OSError: the folder cannot be written.
    """

    def __init__(self, model_dir: str, name: str, *, flag: str = "--model_dir"):
        self._folder = os.path.join(model_dir, name)
        self._note = os.path.join(self._folder, "complete_step")
        self._is_new, self._has_failed = True, False
        if not is_first_process():
            self._writer, self._is_new = tf.summary.create_noop_writer(), False
            return
        try:
            tf.io.gfile.makedirs(self._folder)
            self._writer = tf.summary.create_file_writer(self._folder)
        except (OSError, tf.errors.OpError) as error:
            raise OSError(
                f"cannot write summaries to {self._folder} ({_brief(error)}): choose "
                f"another {flag}, or free some space"
            ) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One point of each curve, at `step`."""
        with self._writing_points(step):
            for name, value in values.items():
                tf.summary.scalar(name, np.float32(value))

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Histograms by name, each of rows (left edge, right edge, count)."""
        metadata = create_summary_metadata(display_name=None, description=None)
        with self._writing_points(step):
            for name, buckets in values.items():
                # As tf.summary.histogram does, which wants all the values.
                tf.summary.write(name, np.float64(buckets), metadata=metadata)

    def go_back(self) -> None:
        """Lets the next point replace the points at and after its step."""
        self._is_new = is_first_process()

    def note_complete(self, step: int) -> None:
        """Records, for later runs, that the summaries of `step` are complete."""
        if is_first_process():
            with self._failures_as_warnings(), tf.io.gfile.GFile(self._note, "w") as f:
                f.write(str(step))

    def complete_step(self) -> int:
        """The step of the last `note_complete`, of whichever run; 0 if there is none.

        All processes must call it.
        """
        text = ""
        # The writer may have been killed: then there is no file, or half a number.
        if is_first_process() and tf.io.gfile.exists(self._note):
            with self._failures_as_warnings(), tf.io.gfile.GFile(self._note) as f:
                text = f.read()
        return gather_from_processes(int(text) if text.isdecimal() else 0)[0]

    def gin_config(self, step: int, text: str) -> None:
        """The operative gin configuration, in the text tab."""
        self.text(step, "gin config", gin.markdown(text))

    def text(self, step: int, name: str, markdown: str) -> None:
        """Some Markdown, in the text tab."""
        with self._writing(step):
            tf.summary.text(name, markdown)

    def hyperparameters(self, values: Mapping[str, bool | float | str]) -> None:
        """The run's row in the HParams tab."""
        with self._writing(0):
            hparams.hparams(dict(values))

    def images(self, step: int, values: Mapping[str, bytes]) -> None:
        """PNG files, in the images tab by name."""
        decoded = {n: tf.io.decode_png(png, channels=3) for n, png in values.items()}
        self.pictures(step, decoded)

    def pictures(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Arrays of uint8 [height, width, 3], in the images tab by name."""
        if values:
            with self._writing(step):
                for name, pixels in values.items():
                    tf.summary.image(name, pixels[None])

    def heat_maps(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Matrices as pictures, in the images tab: darker is more."""
        maps = {name: heat_map(matrix) for name, matrix in values.items()}
        self.pictures(step, maps)

    def close(self) -> None:
        with self._failures_as_warnings():
            self._writer.close()

    @contextlib.contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        # as_default flushes at its end.
        with self._failures_as_warnings(), self._writer.as_default(step=step):
            yield

    @contextlib.contextmanager
    def _writing_points(self, step: int) -> Iterator[None]:
        with self._writing(step):
            if self._is_new:
                self._drop_points_from(step)
            yield

    @contextlib.contextmanager
    def _failures_as_warnings(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            if not self._has_failed:
                reason = _brief(error)
                log.warning("summaries are lost: %s: %s", self._folder, reason)
            self._has_failed = True

    def _drop_points_from(self, step: int) -> None:
        # TensorBoard takes this for a restart; tf.summary has no function for it.
        start = SessionLog(status=SessionLog.START)
        event = Event(wall_time=time.time(), step=step, session_log=start)
        tf.raw_ops.ImportEvent(
            writer=self._writer._resource, event=event.SerializeToString()
        )
        self._is_new = False


def metric_tags(metrics: Mapping[str, float]) -> dict[str, float]:
    """A task's metrics by tag: the loss, which is first, and the group `metrics`."""
    return {
        name if name == "loss" else f"metrics/{name}": value
        for name, value in metrics.items()
    }


def heat_map(matrix: np.ndarray) -> np.ndarray:
    """uint8 [rows * c, columns * c, 3], from near white for 0 to dark blue.

    c is 16, or less where there are so many columns that it would be over 2048 wide.
    """
    cell = max(1, min(16, 2048 // matrix.shape[1]))
    white, blue = np.array([247.0, 251.0, 255.0]), np.array([8.0, 48.0, 107.0])
    share = np.asarray(matrix, np.float64) / max(np.max(matrix), 1e-30)
    pixels = white + share[:, :, None] * (blue - white)
    return pixels.round().astype(np.uint8).repeat(cell, axis=0).repeat(cell, axis=1)


def _brief(error: Exception) -> str:
    """The reason alone: TF's messages are long, and begin with `path; reason`."""
    return str(error).splitlines()[0].rsplit("; ", 1)[-1]
