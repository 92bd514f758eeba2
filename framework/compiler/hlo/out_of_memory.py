"""Programs that do not fit into a device's memory: by how much, and what takes it."""

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
from meshwright.framework.compiler.lowering.lower import LoweredFunction, LoweringError
from meshwright.framework.devices.hardware import tpu_kind_of
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sizes import bytes_text

_SIZE = r"([\d.]+)([KMGT]?)"
# What libtpu says, on its way through the compiler and at its end. Arguments count in
# all three, also in what it calls temporaries.
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
    """What the compiler says of a program that does not fit. Bytes are of one device.

    Args:
      needed: what the program needs, arguments included.
      available: what a device has for it.
    """

    needed: int
    available: int

    @property
    def over(self) -> int:
        return self.needed - self.available


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocation:
    """What takes memory of a device.

    Args:
      bytes: of one device.
      what: what it is for, such as "saved activation".
      name: of an argument its path; else the op that it was lowered from.
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
      refusal: by how much.
      allocations: what takes the memory, largest first; of the arguments alone if they
        alone do not fit, () if the compiler does not let it be known.
      timeline: what would be alive when; None if it does not come to that.
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
    """Reads a TPU compiler's RESOURCE_EXHAUSTED message; None if it is no such one."""
    for pattern in _REFUSALS:
        if found := pattern.search(message):
            needed, available = _bytes(*found.groups()[:2]), _bytes(*found.groups()[2:])
            return Refusal(needed=needed, available=available)
    return None


def allocations_of(
    timeline: MemoryTimeline, function: LoweredFunction
) -> list[Allocation]:
    """What is alive at the peak of a program, largest first."""
    paths = _paths(function)
    return [_allocation(one, paths) for one in timeline.at_peak]


def check_arguments_fit(
    function: LoweredFunction,
    mesh: DeviceMesh,
    shardings: Sequence[Sharding | None],
    device: jax.Device,
) -> None:
    """Refuses what cannot fit before it is compiled: by its arguments alone.

    What no sharding is given for counts as if split over all devices, and padding by
    the compiler not at all: what this refuses, the compiler would.

    Args:
      function: the program; its arguments in stored form.
      mesh: the device mesh.
      shardings: of the arguments' leaves; None if left to completion.
      device: one of those that it is for; all but TPUs are taken to be large enough.

    Raises:
      OutOfMemoryError: they do not.
    """
    kind = tpu_kind_of(device)
    if kind is None:
        return
    specs = tf.nest.flatten(function.inputs)
    found = [
        _argument(path, spec, sharding, mesh)
        for path, spec, sharding in zip(_paths(function), specs, shardings, strict=True)
    ]
    needed = sum(one.bytes for one in found)
    if needed > kind.memory:
        found.sort(key=lambda one: -one.bytes)
        refusal = Refusal(needed=needed, available=kind.memory)
        raise OutOfMemoryError(function.name, refusal, found)


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


def _allocation(one: Buffer, paths: Sequence[str]) -> Allocation:
    return Allocation(
        bytes=one.bytes,
        what=one.kind.value,
        name=one.op_name if one.argument is None else paths[one.argument],
        type=one.type.partition("{")[0],
        layer=one.layer,
        source=str(one.source) if one.source and one.source.file else "",
    )


def _paths(function: LoweredFunction) -> list[str]:
    leaves = nest.flatten_with_joined_string_paths(function.inputs, separator=".")
    return [path for path, _ in leaves]


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * 1024 ** _POWERS[unit])
