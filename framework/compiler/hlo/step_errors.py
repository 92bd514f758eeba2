"""How far estimated step times are from published ones, by kind of model.

The steps are those of the GSPMD paper's Tables 2 to 8, on TPU v3
(docs/reference/planning/step_times.md).
One constant of the estimate was fitted to dense Transformers: each of their errors is
that of a row that was left out of the fit. Rows of other kinds are in no fit.
"""

from __future__ import annotations

import dataclasses
import enum

from meshwright.framework.devices.hardware import GpuKind, TpuKind

MEASURED_KIND = "v3"
"""The only kind of TPU on which steps of all kinds of models were measured."""


class ModelKind(enum.Enum):
    """A kind of model whose steps the paper measured, by its name in texts."""

    DENSE = "dense Transformers"
    PIPELINED = "pipelined Transformers"
    CONFORMER = "pipelined Conformers"
    EXPERTS = "mixtures of experts"
    UNET = "3D U-Nets"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepError:
    """The relative errors of some published steps' estimates.

    Args:
      steps: how many steps there are.
      mean: the mean of the errors' sizes.
      worst: the size of the largest.
    """

    steps: int
    mean: float
    worst: float


STEP_ERRORS = {
    ModelKind.DENSE: StepError(steps=13, mean=0.045, worst=0.080),
    ModelKind.PIPELINED: StepError(steps=5, mean=0.196, worst=0.227),
    ModelKind.CONFORMER: StepError(steps=6, mean=0.133, worst=0.168),
    ModelKind.EXPERTS: StepError(steps=8, mean=0.122, worst=0.243),
    ModelKind.UNET: StepError(steps=7, mean=0.082, worst=0.313),
}
"""By kind; `tests/benchmarks/test_paper_tables.py` takes them from the tables' rows."""

_COUNT = sum(error.steps for error in STEP_ERRORS.values())

ALL_STEPS = StepError(
    steps=_COUNT,
    mean=sum(error.steps * error.mean for error in STEP_ERRORS.values()) / _COUNT,
    worst=max(error.worst for error in STEP_ERRORS.values()),
)
"""Those of all kinds together."""

SEEN_ERRORS = {
    "v5e": StepError(steps=1, mean=0.855, worst=0.855),
    "v5p": StepError(steps=1, mean=0.160, worst=0.160),
}
"""Of dense Transformers on other kinds of TPU, by the kind: too few for an error bar.

The steps are MaxText's (`benchmarks/papers/maxtext_rows.py`); nothing was fitted to
them.
"""

RATIO_ERROR = 0.047
"""The worst error of the ratio of two steps of one model on different meshes.

Those of Table 3, the only dense Transformer with rows for several meshes; estimates
that differ by less may be in another order on TPU v3. None were measured on others.
"""


def too_near_text(kind: TpuKind, slower: float) -> str:
    """That an estimate does not tell two programs of a model apart; "" if it does.

    Args:
      kind: of the devices.
      slower: by which share one takes longer than the other.
    """
    if slower >= RATIO_ERROR:
        return ""
    text = (
        f"The estimate does not tell {slower:.1%} apart: of the published TPU "
        f"{MEASURED_KIND} steps of one model the ratio of two was off by up to "
        f"{RATIO_ERROR:.1%}"
    )
    if kind.name != MEASURED_KIND:
        text += f", and on {kind.name} none were compared"
    return text + ". Either may be the faster: measure both, or take the simpler one."


def seen_text(tpu: str, steps: int, worst: float) -> str:
    """What is known of estimates for a kind of TPU with steps in `SEEN_ERRORS`."""
    which = (
        f"the worst of the {steps} published TPU {tpu} steps that were compared, all"
        if steps > 1
        else f"the only published TPU {tpu} step that was compared,"
    )
    return f"error unknown; {which} of dense Transformers, is off by {worst:.1%}"


def error_text(kind: TpuKind | GpuKind) -> str:
    """How far an estimate for a kind of device may be off, for any kind of model."""
    if isinstance(kind, GpuKind):
        return "by roofline, which real steps exceed; no step was compared"
    if kind.name == MEASURED_KIND:
        return (
            f"published TPU v3 steps are off by {ALL_STEPS.mean:.0%} on average, by "
            f"{ALL_STEPS.worst:.0%} at worst"
        )
    if kind.name in SEEN_ERRORS:
        seen = SEEN_ERRORS[kind.name]
        return seen_text(kind.name, seen.steps, seen.worst)
    return "error unknown, as no measured step of such devices was compared"
