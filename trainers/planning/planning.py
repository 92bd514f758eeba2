"""Planning: memory and time of an experiment's train program, on devices not here."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Sequence

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.memory import MemoryTimeline, memory_timeline
from meshwright.framework.compiler.hlo.out_of_memory import (
    Allocation,
    OutOfMemoryError,
    allocations_of,
)
from meshwright.framework.compiler.hlo.report import collectives_of
from meshwright.framework.compiler.hlo.step_time import StepTime, step_time
from meshwright.framework.compiler.program import Program
from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.framework.devices import topology as topologies
from meshwright.framework.devices.device_order import DeviceOrder, order_of
from meshwright.framework.devices.topology import Topology, topology_devices
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.replication import (
    ReplicatedTensor,
    replicated_state,
)
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.plan_pipelines import (
    PlannedPipeline,
    planned_pipelines,
    recompute_seconds,
)

CPU = "cpu"
"""The name of the topology of virtual cpu devices, as many as the mesh has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveSum:
    """The collectives of one kind, along one axis, in one layer; over one step.

    Args:
      kind: such as "all-gather".
      axis: the mesh axis, or axes joined by "."; "?" for groups that no axes make.
      layer: dotted path; "" outside of layers.
      count: their number.
      bytes: the sum of the bytes of a group's full tensors.
      seconds: the sum of their times; None where there is no estimate.
    """

    kind: str
    axis: str
    layer: str
    count: float
    bytes: float
    seconds: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileReport:
    """The result of `plan`. Bytes are of one device, seconds and FLOPs of one step.

    Args:
      experiment: the planned experiment.
      topology: the topology's name.
      torus: the topology; None on cpu.
      order: where the mesh's devices are on the torus; None on cpu.
      module: the text of the compiled program, parsed; None if there is none.
      program: the compiled program; None if the compiler refused it, for it needs more
        memory than a device has.
      refusal: the compiler's error in that case, else None.
      memory: the memory in use on a device over time, also of a refused program; None
        if its arguments alone do not fit, or the compiler does not report it.
      allocations: the allocations at the peak, largest first; arguments alone where
        there is no `memory`.
      memory_limit: the memory of a device.
      compile_seconds: wall time of tracing and compiling.
      time: estimate for one call of the program, `steps_per_loop` steps; None on cpu
        and for what does not fit.
      pipelines: the task's pipelines.
      recompute_seconds: the part of the time that is recomputation, outside of bubbles;
        None if it is not known.
      collectives: the collectives of a step, longest first; on cpu largest first.
      replicated: the tensors of state and batch that every device holds in full.
      model_flops: FLOPs of a step over all devices, as the task counts them.
    """

    experiment: Experiment
    topology: str
    torus: Topology | None
    order: DeviceOrder | None
    module: HloModule | None
    program: Program | None
    refusal: OutOfMemoryError | None
    memory: MemoryTimeline | None
    allocations: tuple[Allocation, ...]
    memory_limit: int
    compile_seconds: float
    time: StepTime | None
    pipelines: tuple[PlannedPipeline, ...]
    recompute_seconds: float | None
    collectives: tuple[CollectiveSum, ...]
    replicated: tuple[ReplicatedTensor, ...]
    model_flops: float

    @property
    def peak_bytes(self) -> int:
        """Bytes in use on a device at the peak, or those that would be."""
        return self.memory.peak if self.memory else self.refusal.refusal.needed

    @property
    def fits(self) -> bool:
        """Whether a device has `peak_bytes`, and the compiler agrees."""
        return self.program is not None and self.peak_bytes <= self.memory_limit

    @property
    def step_seconds(self) -> float | None:
        """Estimated time of one step."""
        if self.time is None:
            return None
        return self.time.seconds / self.experiment.steps_per_loop

    def of_which(self) -> dict[str, float] | None:
        """Seconds of a step "in bubbles", and "recomputed" outside of them.

        Figures that are not known, or cannot be, are left out. None without time.
        """
        if self.time is None:
            return None
        bubbles = [pipeline.bubble_seconds for pipeline in self.pipelines]
        times = {"recomputed": self.recompute_seconds}
        if bubbles:
            times["in bubbles"] = None if None in bubbles else sum(bubbles)
        steps = self.experiment.steps_per_loop
        return {name: took / steps for name, took in times.items() if took is not None}

    @property
    def peak_flops(self) -> float | None:
        """FLOPs a second of all devices together; None on cpu."""
        if self.torus is None:
            return None
        return self.torus.kind.peak_flops * self.experiment.plan.mesh.size

    @property
    def flops_utilization(self) -> float | None:
        """The model's FLOPs over those that all devices could do in a step's time."""
        if self.step_seconds is None:
            return None
        return self.model_flops / (self.peak_flops * self.step_seconds)


def plan(experiment: Experiment, *, topology: str) -> CompileReport:
    """Compiles the program that the trainer would run, for devices that are not here.

    Args:
      experiment: the experiment to plan.
      topology: name of a TPU topology, such as "v3:32x32", or "cpu".

    Raises:
      ValueError: the topology is unknown, or of another size than the mesh.
      ImportError: libtpu is not installed.
      LoweringError: the program cannot be partitioned.
    """
    mesh, name = experiment.plan.mesh, topology
    torus = None if name == CPU else torus_for(name, mesh)
    set_platform("cpu", mesh.size if torus is None else None)
    devices = None if torus is None else topology_devices(name)
    order = None if torus is None else order_of(mesh, torus)
    programs = StepPrograms(experiment, devices=devices)
    start = time.monotonic()
    program = refusal = module = None
    try:
        program = programs.main
    except OutOfMemoryError as e:
        refusal, memory, allocations = e, e.timeline, e.allocations
    seconds = time.monotonic() - start
    if program is not None:
        text = program.hlo_text()
        module = HloModule(text)
        memory = memory_timeline(text, program.sources, module)
        allocations = allocations_of(memory, program.unpartitioned.signature)
    times = step_time(module, mesh, order) if program and order else None
    pipelines = planned_pipelines(
        experiment.task, times, program.sources if program else None
    )
    return CompileReport(
        experiment=experiment,
        topology=name,
        torus=torus,
        order=order,
        module=module,
        program=program,
        refusal=refusal,
        memory=memory,
        allocations=tuple(allocations),
        memory_limit=_memory_limit(torus, mesh),
        compile_seconds=seconds,
        time=times,
        pipelines=pipelines,
        recompute_seconds=recompute_seconds(experiment.task, times, module, pipelines),
        collectives=_sums(
            program, _sent(module, mesh, times), experiment.steps_per_loop
        ),
        replicated=tuple(replicated_state(programs)),
        model_flops=experiment.task.train_flops(experiment.global_batch),
    )


def torus_for(name: str, mesh: DeviceMesh) -> Topology:
    """The TPU topology of a name, which must have as many devices as the mesh.

    A mesh of one device may also be on a chip that has several cores.

    Raises:
      ValueError: there is no such topology, or it has another size; the message names
        topologies of the mesh's size.
    """
    torus = topologies.topology(name)
    is_core = mesh.size == 1 and math.prod(torus.chips) == 1
    if torus.size != mesh.size and not is_core:
        same = ", ".join(repr(match.name) for match in topologies.of_size(mesh.size))
        raise ValueError(
            f"TPU topology {name!r} has {torus.size} devices, but the device mesh "
            f"({mesh}) has {mesh.size}: set ShardingPlan.mesh_shape to a shape whose "
            f"product is {torus.size}, or choose a topology of {mesh.size} devices"
            + (f", such as {same}" if same else "")
        )
    return torus


def _memory_limit(torus: Topology | None, mesh: DeviceMesh) -> int:
    """Bytes a device; virtual devices share the machine's memory."""
    if torus is not None:
        return torus.kind.memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return machine // mesh.size


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sent:
    """A collective: kind, axes and TF op; trips, bytes a trip, seconds in all."""

    kind: str
    axes: tuple[str, ...] | None
    op_name: str
    count: int
    bytes: int
    seconds: float | None


def _sent(
    module: HloModule | None, mesh: DeviceMesh, times: StepTime | None
) -> list[_Sent]:
    """The collectives of a call of the program; seconds are None without times."""
    if times is not None:
        return [
            _Sent(
                kind=timed.kind,
                axes=timed.collective.axes,
                op_name=timed.collective.op_name,
                count=timed.count,
                bytes=timed.bytes,
                seconds=timed.seconds,
            )
            for timed in times.collectives
        ]
    if module is None:
        return []
    sent = []
    for collective in collectives_of(module, mesh):
        loops = module.loops_around(module.by_name[collective.name].computation)
        sent.append(
            _Sent(
                kind=collective.kind,
                axes=collective.axes,
                op_name=collective.op_name,
                count=math.prod(loop.trips or 1 for loop in loops),
                bytes=collective.bytes,
                seconds=None,
            )
        )
    return sent


def _sums(
    program: Program | None, sent: Sequence[_Sent], steps: int
) -> tuple[CollectiveSum, ...]:
    groups: dict[tuple[str, str, str], list[_Sent]] = {}
    for collective in sent:
        source = program.sources.find(collective.op_name)
        axis = "?" if collective.axes is None else ".".join(collective.axes)
        key = (collective.kind, axis, source.layer if source else "")
        groups.setdefault(key, []).append(collective)
    sums = [
        CollectiveSum(
            kind=kind,
            axis=axis,
            layer=layer,
            count=sum(member.count for member in group) / steps,
            bytes=sum(member.count * member.bytes for member in group) / steps,
            seconds=(
                None
                if group[0].seconds is None
                else sum(member.seconds for member in group) / steps
            ),
        )
        for (kind, axis, layer), group in groups.items()
    ]
    return tuple(sorted(sums, key=lambda total: (-(total.seconds or 0), -total.bytes)))
