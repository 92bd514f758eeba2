"""Hosts of NVIDIA GPUs to compile for without having them, by JAX's CUDA plugin."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import string

import jax
from jax.experimental import topologies

from meshwright.framework.devices.hardware import GPU_KINDS, GpuKind

# The facts by which XLA chooses among programs, from github.com/openxla/xla,
# xla/backends/gpu/target_config/specs/{a100_sxm_80,h100_sxm,h200,b200}.txtpb. Versions
# and the rates of units are left out: an H100's program is the same without.
_TARGET = string.Template("""
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  device_memory_size: $memory
  name: "$name"
  $facts
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "$name"
""")
_HOPPER = """
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  l2_cache_size: 52428800
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  device_interconnect_info { active_links: 18 }
"""
# By kind the name that its driver reports, and the facts that are its own.
_TARGETS = {
    "a100": (
        "NVIDIA A100-SXM4-80GB",
        """
  cuda_compute_capability { major: 8 }
  core_count: 108
  fpus_per_core: 64
  clock_rate_ghz: 1.41
  l2_cache_size: 41943040
  shared_memory_per_core: 167936
  shared_memory_per_block_optin: 166912
  memory_bandwidth: 2039040000000
""",
    ),
    "h100": ("NVIDIA H100 80GB HBM3", _HOPPER + "  memory_bandwidth: 3352320000000"),
    "h200": ("NVIDIA H200 141GB HBM3e", _HOPPER + "  memory_bandwidth: 4800000000000"),
    "b200": (
        "NVIDIA B200",
        """
  cuda_compute_capability { major: 10 feature_extension: ACCELERATED_FEATURES }
  core_count: 148
  fpus_per_core: 128
  clock_rate_ghz: 1.965
  l2_cache_size: 132644864
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  memory_bandwidth: 7672320000000
  device_interconnect_info { active_links: 18 }
""",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTopology:
    """Hosts of GPUs, all of one kind.

    Args:
      kind: the kind of its GPUs.
      hosts: the number of hosts.
      per_host: the number of GPUs that each has.
    """

    kind: GpuKind
    hosts: int
    per_host: int

    @property
    def name(self) -> str:
        """The name, such as "h100:4x8", or "h100:8" of a single host."""
        hosts = f"{self.hosts}x" if self.hosts > 1 else ""
        return f"{self.kind.name}:{hosts}{self.per_host}"

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.hosts * self.per_host


def gpu_topology(kind: GpuKind, name: str) -> GpuTopology:
    """The topology of a name: `kind`, hosts if several, and GPUs of each: "h100:4x8".

    Raises:
      ValueError: a size that the kind does not come in.
    """
    _, _, size = name.partition(":")
    match = re.fullmatch(r"(?:(?P<hosts>[1-9]\d*)x)?(?P<gpus>[1-9]\d*)", size)
    if match is None or int(match["gpus"]) > kind.host_size:
        most = f"{kind.name}:{kind.host_size}"
        raise ValueError(
            f"GPU topology {name!r}: hosts have up to {kind.host_size} GPUs, as in "
            f"{most!r}; several hosts are {kind.name + f':4x{kind.host_size}'!r}"
        )
    return GpuTopology(
        kind=kind, hosts=int(match["hosts"] or 1), per_host=int(match["gpus"])
    )


def gpus_of_size(size: int) -> list[GpuTopology]:
    """The topology of `size` devices on the fewest hosts, for each kind if even."""
    return [
        GpuTopology(kind=kind, hosts=hosts, per_host=size // hosts)
        for kind in GPU_KINDS.values()
        if size % (hosts := -(-size // kind.host_size)) == 0
    ]


def gpu_devices(gpus: GpuTopology) -> list[jax.Device]:
    """The devices of a GPU topology, for `compile_program`; no GPU or driver is needed.

    Returns:
      The devices host by host.

    Raises:
      ImportError: JAX's CUDA plugin is not installed.
      ValueError: JAX found the plugin when no platform was chosen.
    """
    try:
        description = topologies.get_topology_desc(
            gpus.name,
            platform="cuda",
            target_config=target_config(gpus.kind),
            topology=f"{gpus.hosts}x1x{gpus.per_host}",
        )
    except NotImplementedError as e:
        if importlib.util.find_spec("jax_cuda12_plugin") is None:
            raise ImportError(
                f"GPU topology {gpus.name!r} needs JAX's CUDA plugin, which is not "
                "installed: pip install 'meshwright[plan_gpu]'"
            ) from e
        raise ValueError(
            f"GPU topology {gpus.name!r}: JAX started its CUDA plugin for GPUs that "
            "are not here; call set_platform('cpu') first thing in the process"
        ) from e
    return sorted(description.devices, key=lambda device: device.id)


def target_config(kind: GpuKind) -> str:
    """What XLA has to know of a GPU: a GpuTargetConfigProto as text."""
    name, facts = _TARGETS[kind.name]
    return _TARGET.substitute(name=name, facts=facts.strip(), memory=kind.memory)
