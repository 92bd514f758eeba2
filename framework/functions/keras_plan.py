"""Where `fit` has its variables, and what a step takes on machines not here."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.roofline import roofline
from meshwright.framework.compiler.hlo.step_errors import error_text
from meshwright.framework.compiler.hlo.step_time import StepTime, step_time
from meshwright.framework.compiler.program import Program
from meshwright.framework.devices.device_order import order_of
from meshwright.framework.devices.gpu_topology import GpuTopology
from meshwright.framework.devices.hardware import GpuKind, TpuKind
from meshwright.framework.devices.topology import topology
from meshwright.framework.functions.function import MeshFunction
from meshwright.framework.functions.keras_files import variables_of
from meshwright.framework.functions.layout import by_path
from meshwright.framework.functions.mesh_variable import placed
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sizes import bytes_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitPlan:
    """A step of `fit` on a topology; its `str` is to be read.

    Args:
      topology: the topology's name.
      program: the step, compiled for it; for `explain` and `why` too.
    """

    topology: str
    program: Program

    @property
    def memory(self) -> int:
        """Bytes of a device at the peak, as XLA compiled the step."""
        return self.program.memory().peak

    @property
    def kind(self) -> TpuKind | GpuKind:
        """What the topology's devices are."""
        return topology(self.topology).kind

    @property
    def memory_limit(self) -> int:
        """Bytes that a device has."""
        return self.kind.memory

    @functools.cached_property
    def time(self) -> StepTime:
        """The estimate of a step; for GPUs by roofline alone."""
        pod, mesh = topology(self.topology), self.program.mesh
        module = HloModule(self.program.hlo_text())
        if isinstance(pod, GpuTopology):
            return roofline(module, mesh, pod, with_estimates=False)
        return step_time(module, mesh, order_of(mesh, pod))

    def __str__(self) -> str:
        held, limit = bytes_text(self.memory), bytes_text(self.memory_limit)
        lines = [
            f"{self.program.name} on {self.topology}, mesh {self.program.mesh}",
            f"  memory of a device, compiled: {held} of {limit}",
            f"  step, estimated: {self.time}",
            f"    {error_text(self.kind)}",
        ]
        groups: dict[str, list[int]] = collections.defaultdict(list)
        for sent in self.program.collectives():
            along = "?" if sent.axes is None else ", ".join(sent.axes)
            groups[f"{sent.kind} along {along}"].append(sent.bytes)
        for name, sizes in sorted(groups.items(), key=lambda item: -sum(item[1])):
            lines.append(f"  {name}: {len(sizes)}, {bytes_text(sum(sizes))}")
        return "\n".join(lines)


def check_topology(name: str, mesh: DeviceMesh) -> None:
    """Raises ValueError for an unknown topology, or of another size than the mesh."""
    size = topology(name).size
    if size != mesh.size:
        raise ValueError(
            f"topology {name!r} has {size} devices, but the mesh ({mesh}) has "
            f"{mesh.size}: give the mesh a shape whose product is {size}"
        )


def placed_variables(
    model: Any, steps: Sequence[MeshFunction]
) -> dict[str, Sharding | None]:
    """The shardings of a Keras model's variables; see `mw.keras.shardings`.

    Args:
      model: the Keras model.
      steps: its steps, that may have variables which are not the model's.

    Raises:
      ValueError: no program has used a variable yet.
    """
    own = {id(variable._value) for variable in model.variables}
    known = {id(v): v for v in variables_of(model)}
    for step in steps:
        known |= {id(v): v for v in step.variables if id(v) not in known}
    known = {key: v for key, v in known.items() if key in own or placed(v)}
    if not any(map(placed, known.values())):
        raise ValueError(
            f"{model.name}: no program has placed its variables yet: call "
            "mw.keras.distribute, and fit, evaluate or predict, before "
            "mw.keras.shardings"
        )
    values = {path: placed(v) for path, v in by_path(known.values()).items()}
    return {path: value and value.sharding for path, value in values.items()}
