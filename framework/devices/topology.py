"""Devices to compile for without having them: TPU pods as libtpu describes them."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import math
import os
import re
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import topologies

from meshwright.framework.devices.gpu_topology import (
    GpuTopology,
    gpu_devices,
    gpu_topology,
)
from meshwright.framework.devices.hardware import (
    GPU_KINDS,
    TPU_KINDS,
    TpuKind,
    tpu_kind_of,
)

# libtpu asks the network what machine this is, and locks itself for one process.
_NO_TPU_HERE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v3-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# libtpu's compiler works in threads of 64 KiB of stack. It weighs the costs of products
# that are fused one into another, such as those of attention with dropout, by recursion
# that overflows them (0.0.42.1): the process ends by SIGSEGV.
_STACK_FLAG = "--fibers_default_thread_stack_size"
_STACK_BYTES = 2**20

# libtpu expects full hosts of 2 x 2 chips, unless a smaller host is specified.
_CHIPS_OF_A_HOST = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """A box of linked chips.

    Args:
      kind: the kind of its TPUs.
      chips: the number of chips along each dim of the box, x first.
    """

    kind: TpuKind
    chips: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name, such as "v3:32x32"."""
        return f"{self.kind.name}:{'x'.join(map(str, self.chips))}"

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.chips) * self.kind.cores

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Which dims have their ends linked."""
        return self.kind.wraps(self.chips)

    @property
    def positions(self) -> np.ndarray:
        """The position of each device, in the order of `topology_devices`.

        Returns:
          int [devices, dims + 1]: (x, y, ..., core on chip).
        """
        grid = np.indices((*reversed(self.chips), self.kind.cores))
        flat = grid.reshape(len(grid), -1).T
        return np.concatenate([flat[:, -2::-1], flat[:, -1:]], axis=1)


def topology(name: str) -> Topology | GpuTopology:
    """The topology of a name: kind and chips along each dim, such as "v3:32x32".

    GPU topologies have kind, hosts and GPUs of each, such as "h100:4x8".

    Raises:
      TypeError: the name is no str.
      ValueError: an unknown kind, or a size that the kind does not come in.
    """
    if not isinstance(name, str):
        raise TypeError(f"topology is {name!r}: pass a name, such as 'v5e:2x4'")
    kind_name, _, size = name.partition(":")
    if kind_name in GPU_KINDS:
        return gpu_topology(GPU_KINDS[kind_name], name)
    kind = TPU_KINDS.get(kind_name)
    if kind is None:
        raise ValueError(
            f"topology {name!r} is of an unknown kind: one of {', '.join(TPU_KINDS)}, "
            "then the chips along each dim, as in 'v3:16x16'; or of "
            f"{', '.join(GPU_KINDS)}, then the GPUs of a host, as in 'h100:8', or of "
            f"each of several, as in 'h100:4x8'{_near(name)}"
        )
    well_formed = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size)
    example = f"{kind.name}:" + "x".join(map(str, kind.largest))
    if size and not well_formed:
        raise ValueError(
            f"TPU topology {name!r}: give the chips along each dim as numbers from 1, "
            f"joined by 'x', as in {example!r}{_near(name)}"
        )
    chips = tuple(int(n) for n in size.split("x")) if well_formed else ()
    if len(chips) != len(kind.largest) or any(
        n > most for n, most in zip(sorted(chips), sorted(kind.largest), strict=True)
    ):
        raise ValueError(
            f"TPU topology {name!r}: {kind.name} pods have {len(kind.largest)} dims "
            f"and go up to {example!r}"
        )
    return Topology(kind=kind, chips=chips)


# What else Google Cloud calls its kinds in names of types of machines.
_CLOUD_NAMES = {"v5litepod": "v5e", "v5lite": "v5e", "v6": "v6e"}


def _near(name: str) -> str:
    """For a message: the topology of a name in other letters, or of a machine's type.

    "V5E:2x4", "tpu-v5e:2x4" and "v5e-8" are all near to "v5e:2x4".
    """
    match = re.fullmatch(r"([a-z0-9-]+?)[-:]([1-9]\d*(?:x[1-9]\d*)*)", name.lower())
    if match is None:
        return ""
    kind, size = match[1].removeprefix("tpu-"), match[2]
    kind = _CLOUD_NAMES.get(kind, kind)
    for known in difflib.get_close_matches(kind, (*TPU_KINDS, *GPU_KINDS), cutoff=0.75):
        if near := _of_kind(known, size):
            return f"; did you mean {near!r}?"
    return ""


def _of_kind(kind: str, size: str) -> str:
    """The topology of a kind with a size, or with so many devices; "" if none is."""
    if kind in GPU_KINDS or "x" in size:
        with contextlib.suppress(ValueError):
            return topology(f"{kind}:{size}").name
        return ""
    # Names of machines count the two cores of a chip, which are one device.
    devices = int(size) // 2 if kind in ("v4", "v5p") else int(size)
    boxes = [box for box in of_size(devices) if box.kind.name == kind]
    return boxes[0].name if boxes else ""


def of_size(size: int) -> list[Topology]:
    """The most square topology of `size` devices, for each kind that has one.

    From four chips on it has entire hosts, so that the chips along x and y are even.
    """
    boxes_found = []
    for kind in TPU_KINDS.values():
        boxes = (
            Topology(kind=kind, chips=chips)
            for chips in itertools.product(*map(_halvings, sorted(kind.largest)))
        )
        fitting = [box for box in boxes if box.size == size and _has_entire_hosts(box)]
        if fitting:
            boxes_found.append(
                min(fitting, key=lambda box: (sum(box.chips), box.chips))
            )
    return boxes_found


def _has_entire_hosts(box: Topology) -> bool:
    x, y = box.chips[:2]
    return math.prod(box.chips) < _CHIPS_OF_A_HOST or (x % 2 == 0 and y % 2 == 0)


def _halvings(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**i for i in range(most.bit_length())]


def topology_devices(name: str) -> list[jax.Device]:
    """The devices of a topology, for `compile_program`; none of them is needed.

    Args:
      name: kind and chips along each dim, such as "v3:32x32", the 2048 cores of the
        GSPMD and GShard papers: a chip of v2, v3 or tpu7x is two devices, of other
        kinds one. Or a kind of GPU and its hosts, such as "h100:4x8".

    Returns:
      The devices row by row: by (z, y, x, core on chip), the last running fastest.
      GPUs come host by host.

    Raises:
      ValueError: an unknown kind, or a size that it does not come in.
      ImportError: libtpu, or for GPUs JAX's CUDA plugin, is not installed.
    """
    box, options = topology(name), {}
    if isinstance(box, GpuTopology):
        return gpu_devices(box)
    give_compiler_stack()
    if box.kind.chip_config is not None:
        options["chip_config_name"] = box.kind.chip_config
    if math.prod(box.chips) < _CHIPS_OF_A_HOST:
        options["chips_per_host_bounds"] = (*box.chips, 1, 1)[:3]
    if jax.default_backend() != "tpu":
        for variable, value in _NO_TPU_HERE.items():
            os.environ.setdefault(variable, value)
    try:
        devices = topologies.get_topology_desc(name, platform="tpu", **options).devices
    except jax.errors.JaxRuntimeError as e:
        raise ValueError(_no_such_box(box, str(e))) from e
    except RuntimeError as e:
        raise ImportError(
            f"TPU topology {name!r} needs libtpu, which is not installed: "
            "pip install 'meshwright[plan]'"
        ) from e
    return sorted(devices, key=place_on_torus)


def expect_no_tpu() -> None:
    """Has libtpu log no errors of TPUs that are not here; before JAX looks for them.

    Where JAX sees no chip when it is imported, it sets the first of these variables.
    What the environment says of the others stays.
    """
    first, *_ = _NO_TPU_HERE
    if os.environ.get(first) == "1":
        for variable, value in _NO_TPU_HERE.items():
            os.environ.setdefault(variable, value)


def give_compiler_stack() -> None:
    """Has libtpu's compiler take threads with enough stack; before it is loaded.

    What the environment says of them stays.
    """
    options = os.environ.get("LIBTPU_INIT_ARGS", "")
    if _STACK_FLAG not in options:
        options = f"{options} {_STACK_FLAG}={_STACK_BYTES}".strip()
        os.environ["LIBTPU_INIT_ARGS"] = options


def _no_such_box(box: Topology, reason: str) -> str:
    """The message on a box that libtpu refuses, with boxes near to it."""
    if "not divisible" not in reason:
        return f"TPU topology {box.name!r}: {reason}"
    x, y, *rest = (*box.chips, 1)[: max(len(box.chips), 2)]
    near = {
        dataclasses.replace(box, chips=(*pair, *rest)).name
        for pair in itertools.product(*({n - n % 2 or 2, n + n % 2} for n in (x, y)))
    }
    return (
        f"there is no TPU topology {box.name!r}: a host has 2 x 2 chips, so that the "
        f"numbers of chips along x and y are even: give {' or '.join(sorted(near))}"
    )


def topology_of(devices: Sequence[jax.Device]) -> Topology | None:
    """The topology that these TPU devices fill, None if they fill no box of one kind.

    Args:
      devices: in any order.
    """
    kind = tpu_kind_of(devices[0])
    if kind is None:
        return None
    coords = np.array([d.coords for d in devices])
    chips = tuple(int(n) for n in np.ptp(coords, axis=0) + 1)[: len(kind.largest)]
    box = Topology(kind=kind, chips=chips)
    return box if box.size == len(devices) else None


def place_on_torus(device: jax.Device) -> tuple[int, ...]:
    """(..., y, x, core on chip): devices are numbered in this order."""
    return (*reversed(device.coords), device.core_on_chip)
