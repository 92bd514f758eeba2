"""Planning: memory and time of an experiment's train program, on devices not here."""

from __future__ import annotations

import dataclasses
import html
import math
import os
import time
from collections.abc import Sequence

import jax

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.memory import MemoryTimeline, memory_timeline
from meshwright.framework.compiler.hlo.out_of_memory import (
    Allocation,
    OutOfMemoryError,
    allocations_of,
)
from meshwright.framework.compiler.hlo.report import collectives_of
from meshwright.framework.compiler.hlo.roofline import ESTIMATES, roofline
from meshwright.framework.compiler.hlo.step_time import StepTime, step_time
from meshwright.framework.compiler.program import Program, TracedProgram
from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.framework.devices import topology as topologies
from meshwright.framework.devices.device_order import DeviceOrder, order_of
from meshwright.framework.devices.gpu_topology import GpuTopology, gpus_of_size
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
from meshwright.trainers.processes import guarded

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
      pod: the topology; None on cpu.
      order: where the mesh's devices are on a torus of TPUs; None elsewhere.
      module: the text of the compiled program, parsed; None if there is none.
      traced: the program before it was compiled.
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
        and for what the compiler refuses.
      roofline: for GPUs the same by roofline alone, without XLA's own estimates.
      pipelines: the task's pipelines.
      recompute_seconds: the part of the time that is recomputation, outside of bubbles;
        None if it is not known.
      collectives: the collectives of a step, longest first; on cpu largest first.
      replicated: the tensors of state and batch that every device holds in full.
      model_flops: FLOPs of a step over all devices, as the task counts them; None if
        it does not.
    """

    experiment: Experiment
    topology: str
    pod: Topology | GpuTopology | None
    order: DeviceOrder | None
    module: HloModule | None
    traced: TracedProgram
    program: Program | None
    refusal: OutOfMemoryError | None
    memory: MemoryTimeline | None
    allocations: tuple[Allocation, ...]
    memory_limit: int
    compile_seconds: float
    time: StepTime | None
    roofline: StepTime | None
    pipelines: tuple[PlannedPipeline, ...]
    recompute_seconds: float | None
    collectives: tuple[CollectiveSum, ...]
    replicated: tuple[ReplicatedTensor, ...]
    model_flops: float | None

    def _repr_html_(self) -> str:
        """For notebooks: the page that --html_out writes."""
        # Late: matplotlib is only installed for planning.
        from meshwright.trainers.planning import plan_document, plan_html

        page = html.escape(plan_html.page(plan_document.document(self)))
        style = "width: 100%; height: 40rem; border: 1px solid #ccc"
        return f'<iframe srcdoc="{page}" style="{style}"></iframe>'

    @property
    def peak_bytes(self) -> int:
        """Bytes in use on a device at the peak, or those that would be."""
        return self.memory.peak if self.memory else self.refusal.refusal.needed

    @property
    def allocated_bytes(self) -> int | None:
        """Bytes that XLA lays out for a program, gaps included; None but for GPUs."""
        if self.program is None or not isinstance(self.pod, GpuTopology):
            return None
        use = self.program.memory()
        return use.arguments + use.outputs - use.aliased + use.temporaries

    @property
    def fits(self) -> bool:
        """Whether a device has `peak_bytes`, and the compiler agrees."""
        needed = max(self.peak_bytes, self.allocated_bytes or 0)
        return self.program is not None and needed <= self.memory_limit

    @property
    def step_seconds(self) -> float | None:
        """Estimated time of one step."""
        return self._of_step(self.time)

    @property
    def roofline_seconds(self) -> float | None:
        """The time of one step by roofline alone; None but for GPUs."""
        return self._of_step(self.roofline)

    def _of_step(self, time: StepTime | None) -> float | None:
        return None if time is None else time.seconds / self.experiment.steps_per_loop

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
        if self.pod is None:
            return None
        return self.pod.kind.peak_flops * self.experiment.plan.mesh.size

    @property
    def flops_utilization(self) -> float | None:
        """The model's FLOPs over those that all devices could do in a step's time."""
        if self.step_seconds is None or self.model_flops is None:
            return None
        return self.model_flops / (self.peak_flops * self.step_seconds)


def plan(experiment: Experiment, *, topology: str) -> CompileReport:
    """Compiles the program that the trainer would run, for devices that are not here.

    Args:
      experiment: the experiment to plan.
      topology: name of a topology, such as "v3:32x32" or "h100:8", or "cpu".

    Raises:
      ValueError: the topology is unknown, or of another size than the mesh.
      ImportError: libtpu, or for GPUs JAX's CUDA plugin, is not installed.
      LoweringError: the program cannot be partitioned.
    """
    mesh, name = experiment.plan.mesh, topology
    pod = None if name == CPU else pod_for(name, mesh)
    set_platform("cpu", mesh.size if pod is None else None)
    devices = None if pod is None else topology_devices(name)
    order = order_of(mesh, pod) if isinstance(pod, Topology) else None
    programs = StepPrograms(experiment, devices=devices)
    start = time.monotonic()
    program = refusal = None
    try:
        with guarded.compiling():
            program = programs.traced_main.compile(_options(pod))
    except OutOfMemoryError as e:
        refusal = e
    seconds = time.monotonic() - start
    return _report(programs, name, pod, order, program, refusal, seconds)


def report_of(programs: StepPrograms, *, compile_seconds: float) -> CompileReport:
    """The same of a program that was compiled for the devices that are here.

    Args:
      programs: whose main program is compiled.
      compile_seconds: what that took.
    """
    device, main = jax.devices()[0], programs.main
    stats = device.memory_stats() or {}
    return _report(
        programs,
        *(device.platform, None, None, main, None, compile_seconds),
        memory_limit=stats.get("bytes_limit"),
    )


def _report(
    programs: StepPrograms,
    name: str,
    pod: Topology | GpuTopology | None,
    order: DeviceOrder | None,
    program: Program | None,
    refusal: OutOfMemoryError | None,
    seconds: float,
    *,
    memory_limit: int | None = None,
) -> CompileReport:
    experiment, module = programs.experiment, None
    mesh = experiment.plan.mesh
    if refusal is not None:
        memory, allocations = refusal.timeline, refusal.allocations
    else:
        text = program.hlo_text()
        module = HloModule(text)
        memory = memory_timeline(
            text,
            program.sources,
            module,
            reuses_arguments=not isinstance(pod, GpuTopology),
        )
        allocations = allocations_of(memory, program.unpartitioned.signature)
    times, least = _times(module, mesh, pod, order)
    pipelines = planned_pipelines(
        experiment.task, times, program.sources if program else None
    )
    return CompileReport(
        experiment=experiment,
        topology=name,
        pod=pod,
        order=order,
        module=module,
        traced=programs.traced_main,
        program=program,
        refusal=refusal,
        memory=memory,
        allocations=tuple(allocations),
        memory_limit=memory_limit or _memory_limit(pod, mesh),
        compile_seconds=seconds,
        time=times,
        roofline=least,
        pipelines=pipelines,
        recompute_seconds=recompute_seconds(experiment.task, times, module, pipelines),
        collectives=_sums(
            program, _sent(module, mesh, times), experiment.steps_per_loop
        ),
        replicated=tuple(replicated_state(programs)),
        model_flops=experiment.task.train_flops(experiment.global_batch) or None,
    )


def pod_for(name: str, mesh: DeviceMesh) -> Topology | GpuTopology:
    """The topology of a name, which must have as many devices as the mesh.

    A mesh of one device may also be on a TPU chip that has several cores.

    Raises:
      ValueError: there is no such topology, or it has another size; the message names
        topologies of the mesh's size.
    """
    pod = topologies.topology(name)
    is_core = mesh.size == 1 and isinstance(pod, Topology) and math.prod(pod.chips) == 1
    if pod.size != mesh.size and not is_core:
        of_size = gpus_of_size if isinstance(pod, GpuTopology) else topologies.of_size
        same = ", ".join(repr(match.name) for match in of_size(mesh.size))
        raise ValueError(
            f"topology {name!r} has {pod.size} devices, but the device mesh "
            f"({mesh}) has {mesh.size}: set ShardingPlan.mesh_shape to a shape whose "
            f"product is {pod.size}, or choose a topology of {mesh.size} devices"
            + (f", such as {same}" if same else "")
        )
    return pod


def _options(pod: Topology | GpuTopology | None) -> dict[str, bool] | None:
    """XLA's options, by which it tells its own estimates where it has some."""
    has_tables = isinstance(pod, GpuTopology) and pod.kind.has_tables
    return ESTIMATES if has_tables else None


def _times(
    module: HloModule | None,
    mesh: DeviceMesh,
    pod: Topology | GpuTopology | None,
    order: DeviceOrder | None,
) -> tuple[StepTime | None, StepTime | None]:
    """The time of a call of the program, and for GPUs that by roofline alone."""
    if module is None or pod is None:
        return None, None
    if isinstance(pod, Topology):
        return step_time(module, mesh, order), None
    times = roofline(module, mesh, pod, with_estimates=True)
    return times, roofline(module, mesh, pod, with_estimates=False)


def _memory_limit(pod: Topology | GpuTopology | None, mesh: DeviceMesh) -> int:
    """Bytes a device; virtual devices share the machine's memory."""
    if pod is not None:
        return pod.kind.memory
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
                bytes=collective.group_bytes,
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
