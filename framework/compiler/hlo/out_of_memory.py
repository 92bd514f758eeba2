"""Programs that do not fit into a device's memory: by how much, and what fills it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import jax
import tensorflow as tf
from tensorflow.python.util import nest

from meshwright.framework.compiler.hlo.memory import (
    Buffer,
    Kind,
    MemoryTimeline,
)
from meshwright.framework.compiler.lowering.lower import LoweringError, Signature
from meshwright.framework.compiler.lowering.sources import program_name
from meshwright.framework.devices.hardware import tpu_kind_of
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sizes import bytes_text

_SIZE = r"([\d.]+)([KMGT]?)"
# The messages of libtpu, from inside the compiler and at its end. Arguments count in
# all three, even in what it calls temporaries.
_REFUSALS = (
    re.compile(rf"required for HLO temporaries \({_SIZE}\) exceeds .*? \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} \w+\. Exceeded"),
    re.compile(r"Allocation \(size=(\d+)()\) would exceed memory \(size=(\d+)()\)"),
)
REMEDY = (
    "split more dims over the mesh, save less for the backward part, or take a smaller "
    "batch or more devices"
)
"""What to do about a program that does not fit."""
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """The compiler's refusal of a program that does not fit. Bytes are of one device.

    Args:
      needed: what the program needs, arguments included.
      available: on a device.
    """

    needed: int
    available: int

    @property
    def over(self) -> int:
        return self.needed - self.available


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocation:
    """Memory of a device, and what it is for.

    Args:
      bytes: the bytes on one device.
      what: what it is for, such as "saved activation".
      name: an argument's path; otherwise the op that it was lowered from.
      type: element type and shape of the shard, as HLO writes them.
      layer: dotted path; "" if unknown.
      source: file and line of the user's code; "" if unknown.
    """

    bytes: int
    what: str
    name: str
    type: str
    layer: str = ""
    source: str = ""

    def __str__(self) -> str:
        where = f"{self.layer or self.name}{f' ({self.source})' if self.source else ''}"
        return f"{bytes_text(self.bytes)} {self.what} {self.type} of {where}"


class OutOfMemoryError(LoweringError):
    """A program needs more memory than a device has.

    Args:
      name: the program's.
      refusal: the refusal, which says by how much.
      allocations: what fills the memory, largest first: the arguments if they alone do
        not fit; () if the compiler does not reveal it.
      timeline: the memory that would be alive over time; None if it is not known.
    """

    def __init__(
        self,
        name: str,
        refusal: Refusal,
        allocations: Sequence[Allocation] = (),
        timeline: MemoryTimeline | None = None,
    ):
        self.refusal = refusal
        self.allocations = tuple(allocations)
        self.timeline = timeline
        largest = "; ".join(map(str, self.allocations[:3]))
        over, available, needed = map(
            bytes_text, (refusal.over, refusal.available, refusal.needed)
        )
        super().__init__(
            f"{name}: {over} more than fit: a device has {available} and would need "
            f"{needed}"
            f"{'' if timeline or not allocations else ' for its arguments alone'}. "
            + (f"Most takes: {largest}. " if largest else "")
            + REMEDY[0].upper()
            + REMEDY[1:]
        )
        self._name = name

    def __reduce__(self):
        given = (self._name, self.refusal, self.allocations, self.timeline)
        return type(self), given


def parse_refusal(message: str) -> Refusal | None:
    """Reads a TPU compiler's RESOURCE_EXHAUSTED message; None for other messages."""
    for pattern in _REFUSALS:
        if match := pattern.search(message):
            needed, available = _bytes(*match.groups()[:2]), _bytes(*match.groups()[2:])
            return Refusal(needed=needed, available=available)
    return None


def allocations_of(timeline: MemoryTimeline, signature: Signature) -> list[Allocation]:
    """What is alive at the peak of a program, largest first."""
    paths = _paths(signature)
    return [_allocation(buffer, paths) for buffer in timeline.at_peak]


def check_arguments_fit(
    signature: Signature,
    mesh: DeviceMesh,
    shardings: Sequence[Sharding | None],
    device: jax.Device,
) -> None:
    """Refuses, before compiling it, a program whose arguments alone do not fit.

    An argument without a sharding counts as split over all devices, and padding by the
    compiler does not count: the compiler would refuse every program that this does.

    Args:
      signature: the program's; its arguments in stored form.
      mesh: the device mesh.
      shardings: the shardings of the arguments' leaves; None if left to completion.
      device: one that the program is for; all but TPUs are taken to be large enough.

    Raises:
      OutOfMemoryError: the arguments do not fit.
    """
    kind = tpu_kind_of(device)
    if kind is None:
        return
    paths, specs = _paths(signature), tf.nest.flatten(signature.inputs)
    arguments = [
        _argument(path, spec, sharding, mesh)
        for path, spec, sharding in zip(paths, specs, shardings, strict=True)
    ]
    needed = sum(argument.bytes for argument in arguments)
    if needed > kind.memory:
        arguments.sort(key=lambda argument: -argument.bytes)
        refusal = Refusal(needed=needed, available=kind.memory)
        raise OutOfMemoryError(signature.name, refusal, arguments)


def _argument(
    path: str, spec: tf.TensorSpec, sharding: Sharding | None, mesh: DeviceMesh
) -> Allocation:
    shape = tuple(spec.shape)
    if sharding is None:
        size = -(-math.prod(shape) // mesh.size)
    else:
        shape = sharding.shard_shape(shape)
        size = math.prod(shape)
    return Allocation(
        bytes=size * spec.dtype.size,
        what=Kind.ARGUMENT.value,
        name=path,
        type=f"{spec.dtype.name}{list(shape)}",
    )


def _allocation(buffer: Buffer, paths: Sequence[str]) -> Allocation:
    is_argument = buffer.argument is not None
    return Allocation(
        bytes=buffer.bytes,
        what=buffer.kind.value,
        name=paths[buffer.argument] if is_argument else program_name(buffer.op_name),
        type=buffer.type.partition("{")[0],
        layer=buffer.layer,
        source=str(buffer.source) if buffer.source and buffer.source.file else "",
    )


def _paths(signature: Signature) -> list[str]:
    leaves = nest.flatten_with_joined_string_paths(signature.inputs, separator=".")
    return [path for path, _ in leaves]


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * 1024 ** _POWERS[unit])
