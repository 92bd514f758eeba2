"""What a run leaves of its program, beside its events: its plan and its page."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.program import TracedProgram
from meshwright.framework.showing.page import page_text

log = logging.getLogger("absl")

FOLDER, PLAN, PAGE = "meshwright", "plan.json", "program.html"


def write(run: str, document: Mapping[str, Any], traced: TracedProgram) -> None:
    """Writes both files, from which the plugin for TensorBoard shows the program.

    The page is by propagation alone. There is none for a mesh of one device.

    Args:
      run: folder of the run, in which `FOLDER` is made.
      document: the result of `plan_document.document`.
      traced: the program.

    Raises:
      OSError: the files cannot be written.
    """
    folder = os.path.join(run, FOLDER)
    page, page_file = None, os.path.join(folder, PAGE)
    if _has_page(traced):
        try:
            page = page_text(traced)
        except LoweringError as error:
            log.warning("there is no page of the program: %s", error)
    try:
        tf.io.gfile.makedirs(folder)
        if page is not None:
            _write(page_file, page)
        elif tf.io.gfile.exists(page_file):  # Of an earlier program.
            tf.io.gfile.remove(page_file)
        write_plan(run, document)  # Last: by it TensorBoard knows the run.
    except tf.errors.OpError as error:
        raise OSError(f"cannot write to {folder} ({error}): free some space") from error


def write_plan(run: str, document: Mapping[str, Any]) -> None:
    """Writes the plan alone, beside the page of its program."""
    _write(os.path.join(run, FOLDER, PLAN), json.dumps(document))


def kept_plan(run: str, digest: str, traced: TracedProgram) -> dict[str, Any] | None:
    """The plan with this digest, if a run's folder has all files of its program."""
    folder = os.path.join(run, FOLDER)
    try:
        with tf.io.gfile.GFile(os.path.join(folder, PLAN)) as file:
            document = json.load(file)
        page = tf.io.gfile.exists(os.path.join(folder, PAGE))
        is_of = document.get("digest") == digest and page == _has_page(traced)
        return document if is_of else None
    except (tf.errors.OpError, ValueError, AttributeError):
        return None  # There is none, or it is damaged.


def _has_page(traced: TracedProgram) -> bool:
    return traced.written.mesh.size > 1


def _write(path: str, text: str) -> None:
    """Writes a file as a whole: a run that is to stop may end at any moment."""
    with tf.io.gfile.GFile(f"{path}.new", "w") as file:
        file.write(text)
    tf.io.gfile.rename(f"{path}.new", path, overwrite=True)
