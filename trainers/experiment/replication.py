"""Replicated tensors: the report at start-up, and their budget."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence

from meshwright.framework.compiler.explaining.explain import (
    Explanation,
    TensorReport,
    explain,
)
from meshwright.framework.compiler.explaining.texts.explain_text import (
    rematerialized_lines,
    tensor_name,
)
from meshwright.framework.compiler.lowering.sources import Kind
from meshwright.framework.compiler.program import Program
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sizes import bytes_text
from meshwright.trainers.experiment.step_programs import StepPrograms

log = logging.getLogger("absl")

_LARGEST = 3
_SMALL = 2**20  # Bytes of a tensor that needs no line of its own in the report.
_WIDTH = 80


class ReplicationError(ValueError):
    """More is left replicated than the experiment allows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicatedTensor:
    """A tensor that every device holds in full.

    Args:
      name: path in the state or the batch; layer, op and line of an activation.
      shape: logical shape.
      dtype: name of the element type.
      bytes: bytes on each device.
      why: the reason that no axis splits it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    why: str

    def __str__(self) -> str:
        """One line, or two if one is too wide; both are indented."""
        shape = ",".join(map(str, self.shape))
        what = f"  {bytes_text(self.bytes)} {self.dtype}[{shape}] {self.name}:"
        line = f"{what} {self.why}"
        return line if len(line) <= _WIDTH else f"{what}\n    {self.why}"


def replicated_state(programs: StepPrograms) -> list[ReplicatedTensor]:
    """Tensors of state and batch, largest first; the program is traced, not compiled.

    Empty on a mesh of one device.
    """
    experiment = programs.experiment
    if experiment.plan.mesh.size == 1:
        return []
    weights = programs.state_specs.items_by_path()
    tensors = [
        _tensor(path, spec.shape, spec.dtype, spec.dims, form.sharding, "weights")
        for (path, spec), form in zip(
            weights, programs.step_layout.forms.leaves(), strict=True
        )
        if form.border.is_replicated()
    ]
    batch = NestedMap(experiment.task.batch_spec(experiment.global_batch))
    dims = NestedMap(experiment.task.batch_dims())
    tensors += [
        _tensor(
            f"batch.{path}",
            tuple(spec.shape),
            spec.dtype,
            dims.get_path(path),
            sharding,
            "activations",
        )
        for (path, spec), sharding in zip(
            batch.items_by_path(), programs.batch_shardings().leaves(), strict=True
        )
        if sharding.is_replicated()
    ]
    return _sorted(tensors)


def replicated_activations(explanation: Explanation) -> list[ReplicatedTensor]:
    """Tensors inside of a program, largest first, each op's tensor once.

    XLA may fuse some of them away: their sum is an upper bound.
    """
    return [
        ReplicatedTensor(
            name=_name(tensor),
            shape=tensor.shape,
            dtype=tensor.dtype,
            bytes=tensor.bytes,
            why=tensor.why_text,
        )
        for tensor in explanation.replicated()
        if tensor.kind is Kind.INSIDE
    ]


def report_lines(
    programs: StepPrograms, tensors: Sequence[ReplicatedTensor]
) -> list[str]:
    """A few lines on what of state and batch is left replicated.

    The tensors' own lines are of large ones only: those of norms are in every model.
    """
    mesh = programs.experiment.plan.mesh
    if mesh.size == 1:
        return ["replicated: nothing, the mesh has one device"]
    total = bytes_text(sum(tensor.bytes for tensor in tensors))
    first = (
        f"replicated on each of {mesh.size} devices: {len(tensors)} tensors of state "
        f"and batch, {total}"
    )
    large = [tensor for tensor in tensors if tensor.bytes >= _SMALL]
    if not large:
        below = f"  each is below {bytes_text(_SMALL)}"
        return [first, below] if tensors else [first]
    lines = "\n".join(map(str, large[:_LARGEST])).splitlines()
    if (more := len(tensors) - len(large[:_LARGEST])) > 0:
        lines.append(f"  {more} more")
    return [first, *lines]


def report_text(tensors: Sequence[ReplicatedTensor]) -> str:
    """The tensors as a Markdown table."""
    rows = [
        f"| {bytes_text(tensor.bytes)} | {tensor.dtype} {list(tensor.shape)} | "
        f"{tensor.name} | {tensor.why} |"
        for tensor in tensors
    ]
    return "\n".join(["| bytes | type | tensor | why |", "|---|---|---|---|", *rows])


def check_budget(tensors: Sequence[ReplicatedTensor], budget: int | None) -> None:
    """Compares what is left replicated with the budget, bytes on each device.

    Raises:
      ReplicationError: they exceed it; the message names the largest tensors, why, and
        the remedy.
    """
    total = sum(tensor.bytes for tensor in tensors)
    if budget is None or total <= budget:
        return
    largest = "".join(f"\n{tensor}" for tensor in _sorted(tensors)[:_LARGEST])
    raise ReplicationError(
        f"what is left replicated takes {bytes_text(total)} ({total} bytes) on each "
        f"device, more than Experiment.replicated_budget = {budget}; the largest of "
        f"{len(tensors)} tensors:{largest}\n"
        "Name mesh axes for these dims in ShardingPlan.weights or "
        "ShardingPlan.activations, annotate the tensors where they are made, or raise "
        "the budget"
    )


def _name(tensor: TensorReport) -> str:
    path = ".".join(part for part in (tensor.layer, tensor_name(tensor)) if part)
    line = str(tensor.source or "")
    return f"{path} ({line})" if line else path


def _tensor(name, shape, dtype, dims, sharding: Sharding, table: str):
    return ReplicatedTensor(
        name=name,
        shape=shape,
        dtype=dtype.name,
        bytes=math.prod(shape) * dtype.size,
        why=_why(dims, sharding, table),
    )


def _why(dims: Sequence[str], sharding: Sharding, table: str) -> str:
    if not dims:
        return "a scalar"
    if any(sharding.dims):
        return f"its axes {sharding} have one device each"
    return f"ShardingPlan.{table} names no axis for its dims ({', '.join(dims)})"


def _sorted(tensors: Sequence[ReplicatedTensor]) -> list[ReplicatedTensor]:
    return sorted(tensors, key=lambda tensor: -tensor.bytes)


def check_activations(
    programs: StepPrograms, main: Program, budget: int | None
) -> None:
    """Checks a budget with activations too; compiles a second time, but more briefly.

    Args:
      programs: the programs of a run.
      main: its main program.
      budget: as in `check_budget`; None: nothing is compiled.

    Raises:
      ReplicationError: see `check_budget`.
    """
    if budget is None or main.mesh.size == 1:
        return
    explanation = explain(main)
    for reshard in explanation.rematerialized():
        lines = "\n".join(rematerialized_lines(reshard))
        log.warning("a tensor is gathered in full on every device:\n%s", lines)
    tensors = [*replicated_state(programs), *replicated_activations(explanation)]
    check_budget(tensors, budget)
