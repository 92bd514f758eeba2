"""The sharding of every tensor that an experiment keeps or reads, as text."""

from __future__ import annotations

from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.step_programs import StepPrograms


def sharding_text(experiment: Experiment) -> str:
    """Sorted lines `path shape dtype sharding` of state and batch; needs no device.

    A trailing `padded to ...` marks a dim that its mesh axes do not divide.
    """
    programs = StepPrograms(experiment)
    lines = [
        _line(path, spec.shape, spec.dtype.name, sharding)
        for (path, spec), sharding in zip(
            programs.state_specs.items_by_path(),
            programs.plan_layout.shardings.leaves(),
            strict=True,
        )
    ]
    batch = experiment.task.batch_spec(experiment.global_batch)
    lines += [
        _line(f"batch.{path}", tuple(spec.shape), spec.dtype.name, sharding)
        for (path, spec), sharding in zip(
            batch.items_by_path(), programs.batch_shardings().leaves(), strict=True
        )
    ]
    mesh = f"mesh {experiment.plan.mesh}"
    return "\n".join([mesh, *sorted(lines)]) + "\n"


def _line(path: str, shape: tuple[int, ...], dtype: str, sharding) -> str:
    text = f"{path} {_dims(shape)} {dtype} {sharding}"
    padded = sharding.padded_shape(shape)
    return text if padded == shape else f"{text} padded to {_dims(padded)}"


def _dims(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
