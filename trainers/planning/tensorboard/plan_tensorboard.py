"""A plan in TensorBoard: the figures of its sections, and their pictures."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from meshwright.framework.compiler.program import TracedProgram
from meshwright.trainers.planning.plan_plots import png
from meshwright.trainers.planning.plan_sections import sections
from meshwright.trainers.planning.tensorboard import program_files
from meshwright.trainers.planning.tensorboard.summaries import Summaries


def write(document: Mapping[str, Any], log_dir: str, traced: TracedProgram) -> None:
    """Writes a plan as the run `plan` below a folder, a training run's for example.

    Args:
      document: the result of `plan_document.document`.
      log_dir: the folder.
      traced: the program, of which a page is written.

    Raises:
      OSError: the folder cannot be written.
    """
    plots = [plot for section in sections(document) for plot in section.plots]
    with contextlib.closing(Summaries(log_dir, "plan", flag="--log_dir")) as summaries:
        summaries.scalars(0, scalars(document))
        program_files.write(os.path.join(log_dir, "plan"), document, traced)
        summaries.images(0, {f"plan/{plot.name}": png(plot) for plot in plots})


def scalars(document: Mapping[str, Any]) -> dict[str, float]:
    """All known scalars, by tag: bytes of one device, seconds of one step."""
    return {
        tag: value
        for section in sections(document)
        for tag, value in section.scalars.items()
        if value is not None
    }
