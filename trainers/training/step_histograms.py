"""Histograms of a step's weights and gradients, for TensorBoard."""

from __future__ import annotations

import logging

import numpy as np

from meshwright.framework.compiler.xla.processes import to_host
from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.tensorboard.summaries import Summaries

log = logging.getLogger("absl")


def write_histograms(
    programs: StepPrograms, summaries: Summaries, state: TrainState, batches: NestedMap
) -> None:
    """Writes histograms of the step that `state` and the first of `batches` begin.

    Values that are not finite are left out, with a warning that names their tensors.
    All processes must call it.
    """
    step, held = state.step + 1, state.stored()
    out = programs.histograms(NestedMap(step=held.step, theta=held.theta), batches)
    out, tags = out.map(to_host), programs.histogram_tags
    rows = np.stack([out.edges[:, :-1], out.edges[:, 1:], out.counts], axis=-1)
    summaries.histograms(step, dict(zip(tags, rows, strict=True)))
    bad = zip(tags, out.not_finite, strict=True)
    named = [f"{count:.0f} of {tag}" for tag, count in bad if count]
    if named:
        rest = f" and of {len(named) - 3} more" if len(named) > 3 else ""
        log.warning(
            "step %d: histograms leave out values that are not finite: %s%s",
            step,
            ", ".join(named[:3]),
            rest,
        )
