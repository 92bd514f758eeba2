"""Notes logged once at the start of a run, which nothing else would report."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Iterator

from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.sharding.sharding import Sharding
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.startup.messages import log_line

log = logging.getLogger("absl")

_BATCH = "batch"


def start_notes(programs: StepPrograms) -> list[str]:
    """Lines about padding, and about schedules that do not end by the last step.

    Logs a warning of a batch that is padded, which another batch size avoids.
    """
    notes = []
    padded = dict.fromkeys(_padded_dims(programs))
    if batch := next((each for each in padded if each.name == _BATCH), None):
        _warn_of_padded_batch(programs.experiment, batch)
    if padded := [str(each) for each in padded if each.name != _BATCH]:
        notes.append(
            "padded, as the mesh axes do not divide them (devices compute on the "
            f"padding too): {', '.join(padded)}"
        )
    experiment = programs.experiment
    if extras := experiment.task.loss_extras:
        notes.append(f"the training loss is with {extras}, the held-out loss without")
    for name, end in _ends(experiment.optimizer):
        if end > experiment.num_steps:
            notes.append(
                f"Experiment.num_steps = {experiment.num_steps} ends the training "
                f"before {name} = {end}: the schedule does not reach its end"
            )
    return notes


def _warn_of_padded_batch(experiment: Experiment, batch: _Padded) -> None:
    unit = math.prod(map(experiment.plan.mesh.axis_size, batch.axes))
    unit *= experiment.gradient_accumulation_steps
    below = batch.size // unit * unit
    log.warning(
        "the batch is padded, as the mesh axes do not divide it: %s; devices compute "
        "on the padding too, %.1f%% of the rows: set Experiment.global_batch to %s, or "
        "to another multiple of %d",
        batch,
        100 * (1 - batch.size / batch.padded),
        " or ".join(str(size) for size in (below, below + unit) if size),
        unit,
    )


def trace(programs: StepPrograms) -> None:
    """Traces the training program, and logs it: nothing else does meanwhile.

    Raises:
      ValueError: the plan has a misspelt dim, see `StepPrograms.check_dims_of_plan`.
    """
    programs.check_dims_of_plan()
    log_line("tracing the training program: Python runs it, perhaps for minutes")
    start = time.perf_counter()
    programs.traced_main  # noqa: B018
    log_line("traced in %.0f s", time.perf_counter() - start)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Padded:
    """A dim of batch or weights that is padded; its `str` is `heads 3 to 4 over Y`."""

    name: str
    size: int
    padded: int
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.size} to {self.padded} over {', '.join(self.axes)}"


def _padded_dims(programs: StepPrograms) -> Iterator[_Padded]:
    experiment = programs.experiment
    batch = NestedMap(experiment.task.batch_spec(experiment.global_batch))
    dims = NestedMap(experiment.task.batch_dims())
    shardings = programs.batch_shardings()
    for path, spec in batch.items_by_path():
        names, sharding = dims.get_path(path), shardings.get_path(path)
        yield from _padded(names, tuple(spec.shape), sharding)
    forms = programs.plan_layout.forms
    for path, spec in programs.state_specs.items_by_path():
        yield from _padded(spec.dims, spec.shape, forms.get_path(path).sharding)


def _padded(dims, shape: tuple[int, ...], sharding: Sharding) -> Iterator[_Padded]:
    stored = sharding.padded_shape(shape)
    for name, size, padded, axes in zip(
        dims, shape, stored, sharding.dims, strict=True
    ):
        if size != padded:
            yield _Padded(name=name, size=size, padded=padded, axes=tuple(axes))


def _ends(config: object) -> Iterator[tuple[str, float]]:
    """Name and value of each `end_step` of the schedules that an optimizer has."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _ends(value)
        elif field.name == "end_step" and value is not None:
            yield f"{type(config).__name__}.{field.name}", value


def warn_of_no_plan(plan: ShardingPlan, devices: int) -> None:
    """Warns if no plan was given, and most of `devices` do nothing."""
    if plan == ShardingPlan() and devices > 1:
        log.warning(
            "no sharding plan is given, so that one of %d devices is used: include a "
            "plan, such as plans/data_tensor.gin, and set MESH_SHAPE",
            devices,
        )
