"""Facts about each kind of device: the only table that estimates rest on.

For TPUs peaks, memory and links are as published; cycles are the compiler's. Their
meaning was checked by compiling an 8192-cube bfloat16 product for each kind: the
`flops_per_cycle` here is the next multiple of a 128 x 128 matrix unit above what the
compiler's `estimated_cycles` gave (32219, 63497, 243060, 115044, 236349, 369231,
422142), and clock x flops_per_cycle is the published peak within 2%.
"""

from __future__ import annotations

import dataclasses

import jax

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """A kind of device. A device is what JAX calls a device.

    Args:
      jax_name: the beginning of its devices' `device_kind`.
      memory_bandwidth: bytes a second of a device.
      link_bandwidth: bytes a second that it sends to others; for a TPU, through one
        link in each direction.
      latency: seconds that a collective takes at least; for a TPU, those of each link
        that its data passes, one after the other.
      source: where the figures are published.
    """

    jax_name: str
    memory_bandwidth: float
    link_bandwidth: float
    latency: float
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuKind(Hardware):
    """A kind of GPU, of which a host has several.

    Args:
      name: its name in those of topologies.
      peak_flops: bfloat16 FLOPs a second, dense.
      memory: bytes of a device, as its driver reports them.
      host_bandwidth: bytes a second that it sends to other hosts, by a NIC of its own.
      host_size: GPUs of a host, each linked to each.
      has_tables: whether XLA has tables of products and collectives measured on its
        generation, and so estimates of its own.
    """

    name: str
    peak_flops: float
    memory: int
    host_bandwidth: float
    host_size: int = 8
    has_tables: bool = True
    latency: float = 20e-6  # A guess: no GPU was measured.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuKind(Hardware):
    """A kind of TPU. A device is a core, or an entire chip.

    Args:
      name: its name in those of topologies.
      cores: devices on a chip.
      clock: cycles a second.
      flops_per_cycle: bfloat16 FLOPs a cycle on a device.
      memory: bytes of a device that the compiler lets a program use; a little less than
        is built in.
      largest: chips along the dims of the largest pod.
      wraps_from: the number of chips along a dim from which its ends are linked.
      cubes: whether ends are linked in all dims, if all are multiples of `wraps_from`.
      chip_config: the name by which libtpu is asked for devices as a machine has them;
        None if it describes these by itself.
    """

    name: str
    cores: int
    clock: float
    flops_per_cycle: int
    memory: int
    largest: tuple[int, ...]
    wraps_from: int
    cubes: bool = False
    chip_config: str | None = None
    # "Typically around 1us" a link, of no kind in particular, by "How To Scale Your
    # Model" (jax-ml.github.io/scaling-book), part 3. That v2 and v3 are as fast, and
    # that the way to a chip's other core takes nothing, are guesses.
    latency: float = 1e-6

    @property
    def peak_flops(self) -> float:
        """bfloat16 FLOPs a second of a device."""
        return self.clock * self.flops_per_cycle

    def wraps(self, chips: tuple[int, ...]) -> tuple[bool, ...]:
        """Which dims of a slice of this size have their ends linked."""
        if self.cubes:
            are_linked = all(n % self.wraps_from == 0 for n in chips)
            return (are_linked,) * len(chips)
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
        # A machine shows the two cores of a chip as one device, a "megacore".
        TpuKind(
            name="v4",
            jax_name="TPU v4",
            cores=1,
            clock=1.05e9,
            flops_per_cycle=8 * 2 * 128 * 128,
            memory=int(30.75 * _GIB),
            memory_bandwidth=1200e9,
            link_bandwidth=50e9,
            largest=(16, 16, 16),
            wraps_from=4,
            cubes=True,
            chip_config="megacore",
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

_NVIDIA = "www.nvidia.com/en-us/data-center/"
# Links are NVLink's one way: half of what is published. NICs are those of NVIDIA's own
# hosts of eight, docs.nvidia.com/dgx; memory is as in the target configurations of
# github.com/openxla/xla, xla/backends/gpu/target_config/specs.
GPU_KINDS = {
    kind.name: kind
    for kind in (
        GpuKind(
            name="a100",
            jax_name="NVIDIA A100",
            peak_flops=312e12,
            memory=85_100_068_864,
            memory_bandwidth=2.04e12,
            link_bandwidth=300e9,
            host_bandwidth=25e9,
            has_tables=False,
            source=_NVIDIA + "a100",
        ),
        GpuKind(
            name="h100",
            jax_name="NVIDIA H100",
            peak_flops=989e12,
            memory=84_942_979_072,
            memory_bandwidth=3.35e12,
            link_bandwidth=450e9,
            host_bandwidth=50e9,
            source=_NVIDIA + "h100",
        ),
        GpuKind(
            name="h200",
            jax_name="NVIDIA H200",
            peak_flops=989e12,
            memory=151_397_597_184,
            memory_bandwidth=4.8e12,
            link_bandwidth=450e9,
            host_bandwidth=50e9,
            source=_NVIDIA + "h200",
        ),
        GpuKind(
            name="b200",
            jax_name="NVIDIA B200",
            peak_flops=2250e12,
            memory=191_514_411_008,
            memory_bandwidth=8.0e12,
            link_bandwidth=900e9,
            host_bandwidth=50e9,
            source=_NVIDIA + "hgx",
        ),
    )
}
# Measured on one of eight busy virtual devices on two cores, which share a memory:
# Adam's update, an all-gather's tensor, the smallest collective.
CPU = Hardware(
    jax_name="cpu",
    memory_bandwidth=4e9,
    link_bandwidth=2e9,
    latency=200e-6,
    source="measured",
)

_TPU_BY_JAX_NAME = {
    **{kind.jax_name: kind for kind in TPU_KINDS.values()},
    # Names of other versions of the runtime.
    "TPU v5e": TPU_KINDS["v5e"],
    "TPU v5p": TPU_KINDS["v5p"],
}


def tpu_kind_of(device: jax.Device) -> TpuKind | None:
    """The kind of a TPU; None for other devices."""
    return _TPU_BY_JAX_NAME.get(getattr(device, "device_kind", None))


def platform_of(device: jax.Device) -> str:
    """The name that platforms have for `set_platform` and for JAX's lowering."""
    return "cuda" if device.platform == "gpu" else device.platform


def kind_name(device: jax.Device) -> str:
    """The name of a TPU's kind, such as "v5e"; of other devices the platform."""
    tpu = tpu_kind_of(device)
    return platform_of(device) if tpu is None else tpu.name


def hardware_of(device: jax.Device) -> Hardware:
    """The kind of a device; an accelerator of an unknown kind is taken for an H100."""
    if device.platform == "cpu":
        return CPU
    return tpu_kind_of(device) or _gpu_kind_of(device) or GPU_KINDS["h100"]


def peak_flops(device_count: int) -> float | None:
    """bfloat16 FLOPs a second of the devices in use; None for an unknown kind.

    That of a CPU, whose virtual devices share it, is unknown too.
    """
    device = jax.devices()[0]
    tpu = tpu_kind_of(device)
    if tpu is not None:
        return tpu.peak_flops * device_count
    gpu = _gpu_kind_of(device)
    return None if gpu is None else gpu.peak_flops * device_count


def _gpu_kind_of(device: jax.Device) -> GpuKind | None:
    name = device.device_kind
    kinds = (kind for kind in GPU_KINDS.values() if name.startswith(kind.jax_name))
    return next(kinds, None)
