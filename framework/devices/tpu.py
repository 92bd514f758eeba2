"""Facts about each kind of TPU: the one table that estimates rest on.

Peaks, memory and links are as published; cycles are the compiler's. What it takes a
cycle for was checked by compiling an 8192-cube bfloat16 product for each kind: the
`flops_per_cycle` here is the next multiple of one 128 x 128 matrix unit above what the
compiler's `estimated_cycles` gave (32219, 63497, 117756, 115044, 236349, 369231,
422142), and clock x flops_per_cycle is the published peak.
"""

from __future__ import annotations

import dataclasses
from typing import Any

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuKind:
    """One kind of TPU. A device is what JAX calls one: a core, or a whole chip.

    Args:
      name: as in names of topologies.
      jax_name: the `device_kind` of its devices.
      cores: devices on a chip.
      clock: cycles a second.
      flops_per_cycle: bfloat16 FLOPs a cycle on a device.
      memory: bytes that the compiler lets a program have on a device; a little less
        than is built in.
      memory_bandwidth: bytes a second of a device.
      link_bandwidth: bytes a second through one link, in each direction.
      largest: chips along the dims of the largest pod.
      wraps_from: chips along a dim from which its ends are linked.
      cubes: whether ends are linked in every dim, if all come in such multiples.
      source: where the figures are published.
    """

    name: str
    jax_name: str
    cores: int
    clock: float
    flops_per_cycle: int
    memory: int
    memory_bandwidth: float
    link_bandwidth: float
    largest: tuple[int, ...]
    wraps_from: int
    cubes: bool = False
    source: str

    @property
    def peak_flops(self) -> float:
        """bfloat16 FLOPs a second of a device."""
        return self.clock * self.flops_per_cycle

    def wraps(self, chips: tuple[int, ...]) -> tuple[bool, ...]:
        """Which dims of a slice of this size have their ends linked."""
        if self.cubes:
            whole = all(n % self.wraps_from == 0 for n in chips)
            return (whole,) * len(chips)
        return tuple(n >= self.wraps_from for n in chips)


_CACM = "Jouppi et al., CACM 63(7), 2020, table 3"
_ISCA = "Jouppi et al., ISCA 2023, table 4"
_CLOUD = "docs.cloud.google.com/tpu/docs/"

TPU_KINDS = {
    kind.name: kind
    for kind in (
        TpuKind(
            name="v2",
            jax_name="TPU v2",
            cores=2,
            clock=0.70e9,
            flops_per_cycle=2 * 128 * 128,
            memory=int(7.48 * _GIB),
            memory_bandwidth=350e9,
            link_bandwidth=62e9,
            largest=(16, 16),
            wraps_from=16,
            source=_CACM,
        ),
        TpuKind(
            name="v3",
            jax_name="TPU v3",
            cores=2,
            clock=0.94e9,
            flops_per_cycle=2 * 2 * 128 * 128,
            memory=int(15.48 * _GIB),
            memory_bandwidth=450e9,
            link_bandwidth=82e9,
            largest=(32, 32),
            wraps_from=32,
            source=_CACM,
        ),
        # libtpu describes the two cores of a chip as two devices.
        TpuKind(
            name="v4",
            jax_name="TPU v4",
            cores=2,
            clock=1.05e9,
            flops_per_cycle=4 * 2 * 128 * 128,
            memory=int(15.25 * _GIB),
            memory_bandwidth=600e9,
            link_bandwidth=50e9,
            largest=(16, 16, 16),
            wraps_from=4,
            cubes=True,
            source=_ISCA,
        ),
        TpuKind(
            name="v5e",
            jax_name="TPU v5 lite",
            cores=1,
            clock=1.50e9,
            flops_per_cycle=4 * 2 * 128 * 128,
            memory=int(15.75 * _GIB),
            memory_bandwidth=819e9,
            link_bandwidth=50e9,
            largest=(16, 16),
            wraps_from=16,
            source=_CLOUD + "v5e",
        ),
        TpuKind(
            name="v5p",
            jax_name="TPU v5",
            cores=1,
            clock=1.75e9,
            flops_per_cycle=8 * 2 * 128 * 128,
            memory=int(95.74 * _GIB),
            memory_bandwidth=2765e9,
            link_bandwidth=100e9,
            largest=(16, 20, 28),
            wraps_from=4,
            cubes=True,
            source=_CLOUD + "v5p",
        ),
        TpuKind(
            name="v6e",
            jax_name="TPU v6 lite",
            cores=1,
            clock=1.75e9,
            flops_per_cycle=4 * 2 * 256 * 256,
            memory=int(31.25 * _GIB),
            memory_bandwidth=1638e9,
            link_bandwidth=100e9,
            largest=(16, 16),
            wraps_from=16,
            source=_CLOUD + "v6e",
        ),
        TpuKind(
            name="tpu7x",
            jax_name="TPU7x",
            cores=2,
            clock=2.20e9,
            flops_per_cycle=4 * 2 * 256 * 256,
            memory=int(94.75 * _GIB),
            memory_bandwidth=3690e9,
            link_bandwidth=100e9,
            largest=(16, 24, 24),
            wraps_from=4,
            cubes=True,
            source=_CLOUD + "tpu7x",
        ),
    )
}

_BY_JAX_NAME = {kind.jax_name: kind for kind in TPU_KINDS.values()}


def kind_of(device: Any) -> TpuKind | None:
    """The kind of a JAX device, None if it is not of a TPU."""
    return _BY_JAX_NAME.get(getattr(device, "device_kind", None))
