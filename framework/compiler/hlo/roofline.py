"""How long a step of a GPU program takes, without a GPU: a roofline, nothing fitted.

An op takes as long as its FLOPs need at the published peak, or the bytes of its
operands and results at the memory's bandwidth, whichever is more. A collective takes
its bytes at the bandwidth of the links that its groups span (`network.GpuNetwork`);
where it has a start and an end, the ops between them hide it.

XLA has estimates of its own, the "sol" costs in a program's text (`ESTIMATES`): of
products and collectives interpolated from tables that its authors measured, of other
ops from their bytes. Where one is longer than the roofline, the op takes that. Of
products whose types are in no table XLA's are left out: it then counts dims in bytes,
64 times the FLOPs of a float32 product of bfloat16 (jaxlib 0.10.2).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from meshwright.framework.compiler.hlo.hlo_text import (
    HloModule,
    Instruction,
    arrays_of,
    itemsize,
    type_bytes,
)
from meshwright.framework.compiler.hlo.liveness import ELEMENTWISE, UPDATES
from meshwright.framework.compiler.hlo.report import Collective
from meshwright.framework.compiler.hlo.step_time import StepTime, TimePart, Walk
from meshwright.framework.devices.gpu_topology import GpuTopology
from meshwright.framework.devices.network import GpuNetwork
from meshwright.framework.sharding.mesh import DeviceMesh

ESTIMATES = {"xla_gpu_collect_cost_model_stats": True}
"""XLA's options for a program with its estimates, on a kind that `has_tables`."""

_ESTIMATE = re.compile(r'"exec_time_us":([^,]+),[^{}]*"name":"sol"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_GEMM_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^]]*)\]')
_KERNEL = re.compile(r"dim_labels=\w+_(\w+)->")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# Where a convolution's result and kernel are: the result itself, or an operand.
_CONVOLUTIONS = {
    "__cudnn$convBackwardInput": (0, 1),
    "__cudnn$convBackwardFilter": (1, None),
}
# Ops that take no time of a GPU, or run within those of others.
_FREE_OPS = """
    after-all bitcast constant copy-start get-tuple-element opt-barrier parameter
    partition-id replica-id tuple
"""
_FREE = frozenset(_FREE_OPS.split())
# Types of products in XLA's tables, of the operands and the result.
_IN_TABLES = ({"bf16"}, {"f32"})
_SLICES = frozenset({"dynamic-slice", "gather", "slice"})
_IN_ORDER = ELEMENTWISE | {"bitcast"}


def roofline(
    module: HloModule, mesh: DeviceMesh, gpus: GpuTopology, *, with_estimates: bool
) -> StepTime:
    """Estimates one call of an optimized, scheduled GPU program.

    Args:
      module: the program of one device.
      mesh: the device mesh.
      gpus: the topology that it was compiled for.
      with_estimates: whether XLA's own estimates count where they are longer.

    Raises:
      ValueError: a loop whose trips cannot be read.
    """
    return _GpuWalk(module, mesh, gpus, with_estimates).step_time()


class _GpuWalk(Walk):
    def __init__(
        self,
        module: HloModule,
        mesh: DeviceMesh,
        gpus: GpuTopology,
        with_estimates: bool,
    ):
        super().__init__(module, mesh)
        self.kind = gpus.kind
        self.network = GpuNetwork(mesh=mesh, gpus=gpus)
        self.with_estimates = with_estimates

    def op(self, op: Instruction, trips: int) -> tuple[float, TimePart] | None:
        if op.opcode in _FREE or op.opcode.endswith("-done"):
            return None
        work = product_flops(self.module, op)
        seconds = max(
            work / self.kind.peak_flops,
            moved_bytes(self.module, op) / self.kind.memory_bandwidth,
            0.0 if work and not self._in_tables(op) else self._estimate(op),
        )
        return seconds, TimePart.MATRIX if work else TimePart.MEMORY

    def sending(
        self, op: Instruction, collective: Collective, kind: str, size: int
    ) -> tuple[float, float]:
        groups, axes = collective.groups, collective.axes
        (phase,) = self.network.collective(kind, groups, axes, size)
        seconds = max(phase.seconds, self._estimate(op))
        return seconds, seconds if phase.is_waiting else 0.0

    def _in_tables(self, op: Instruction) -> bool:
        """Whether XLA's tables have products of these types."""
        parts = self.module.inside[op.called[0]] if op.opcode == "fusion" else [op]
        return all(
            # A call's result is a tuple with its workspace.
            {arrays_of(part.type)[0][0], *(x.dtype for x in self.module.operands(part))}
            in _IN_TABLES
            for part in parts
            if product_flops(self.module, part)
        )

    def _estimate(self, op: Instruction) -> float:
        """Seconds by XLA's estimate; 0 if it has none."""
        match = self.with_estimates and _ESTIMATE.search(op.backend_config)
        return 1e-6 * float(match[1]) if match else 0.0


def product_flops(module: HloModule, op: Instruction) -> float:
    """The FLOPs of an op's matrix products and convolutions, as many as of bfloat16.

    Tensor cores do half as many in float32 (as TF32), and twice as many in 8 bits.
    """
    if op.opcode == "fusion":
        inner = module.inside[op.called[0]]
        return sum(product_flops(module, part) for part in inner)
    if not op.attributes:
        return 0.0
    target = _TARGET.search(op.attributes)
    name = target[1] if target else ""
    if kernel := _KERNEL.search(op.attributes):
        return _convolution_flops(module, op, name, kernel[1])
    match = _CONTRACTED.search(op.attributes)
    if name.startswith("__cublas"):
        match = _GEMM_CONTRACTED.search(op.backend_config)
    if match is None:
        return 0.0
    left = module.by_name[op.operands[0]]
    contracted = [int(n) for n in re.findall(r"\d+", match[1])]
    depth = math.prod(left.shape[dim] for dim in contracted)
    result = math.prod(arrays_of(op.type)[0][1])
    return 2.0 * result * depth * _slowness(left.dtype)


def _convolution_flops(
    module: HloModule, op: Instruction, target: str, labels: str
) -> float:
    """Each element of the forward result takes a kernel of its output channel."""
    given = [arrays_of(operand.type)[0] for operand in module.operands(op)]
    own = arrays_of(op.type)[0]
    result, kernel = _CONVOLUTIONS.get(target, (None, 1))
    _, result_shape = own if result is None else given[result]
    _, kernel_shape = own if kernel is None else given[kernel]
    window = math.prod(kernel_shape) / kernel_shape[labels.index("o")]
    return 2.0 * math.prod(result_shape) * window * _slowness(given[0][0])


def _slowness(dtype: str) -> float:
    return {1: 0.5, 2: 1.0}.get(itemsize(dtype), 2.0)


def moved_bytes(
    module: HloModule, op: Instruction, *, size: Callable[[str], int] = type_bytes
) -> int:
    """Bytes that an op reads from memory and writes to it.

    Of a tensor of which it reads slices, or that it updates in place, the slices count.

    Args:
      module: the op's program.
      op: an instruction.
      size: gives the bytes of a type's text, such as "bf16[8,128]{1,0}".
    """
    return _Traffic(module, size).of(op)


class _Traffic:
    def __init__(self, module: HloModule, size: Callable[[str], int]):
        self.module = module
        self.size = size

    def of(self, op: Instruction) -> int:
        module = self.module
        if op.opcode == "fusion":
            inner = module.inside[op.called[0]]
            parameters = [part for part in inner if part.opcode == "parameter"]
            root = next(part for part in inner if part.is_root)
            parts = module.operands(root) if root.opcode == "tuple" else [root]
            return sum(map(self.read, parameters)) + sum(map(self.written, parts))
        if op.opcode == "async-start":
            inner = module.inside[op.called[0]]
            return sum(self.of(part) for part in inner if part.opcode not in _FREE)
        written = self.written(op)
        if op.opcode in _SLICES or op.opcode in UPDATES:
            return 2 * written
        operands = (module.by_name[name] for name in set(op.operands))
        return written + sum(self.size(operand.type) for operand in operands)

    def read(self, parameter: Instruction) -> int:
        """Bytes that a fusion reads of an operand: the slices, if it only takes slices.

        It computes no more of elementwise ops than what is sliced of them.
        """
        total, same, whole = 0, [parameter], self.size(parameter.type)
        for op in same:
            for user in self.module.users.get(op.name, ()):
                if user.opcode in _SLICES and user.operands[0] == op.name:
                    total += math.prod(user.shape) * itemsize(parameter.dtype)
                elif user.opcode in UPDATES and user.operands[0] == op.name:
                    continue
                elif user.is_root or user.opcode not in _IN_ORDER:
                    return whole
                elif user not in same:
                    same.append(user)
        return min(total, whole)

    def written(self, op: Instruction) -> int:
        """Bytes that an op writes, or a fusion as this part of its result."""
        while op.opcode == "bitcast":
            (op,) = self.module.operands(op)
        if op.opcode in UPDATES:
            op = self.module.by_name[op.operands[UPDATES[op.opcode]]]
        return self.size(op.type)
