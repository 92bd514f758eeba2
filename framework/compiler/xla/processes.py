"""The processes that run one program together, by JAX's distributed runtime."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshwright.framework.compiler.xla import jax_bridge
from meshwright.framework.compiler.xla.jax_mesh import jax_mesh
from meshwright.framework.sharding.mesh import DeviceMesh

# At the end the processes wait for each other for so long.
_SHUTDOWN_SECONDS = 60
# Before what they do together: they may read their data, or trace, at different speed.
_MEETING_SECONDS = 300.0
# While a file is read or written; JAX ends this process if another one dies.
_WORK_SECONDS = 7 * 24 * 3600.0

_tell_arrival: Callable[[], None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """The processes that run one program, and which of them this is.

    Args:
      coordinator: "host:port" of process 0.
      count: how many.
      process: this process's number, from 0.
      local_devices: numbers of the devices on this machine that belong to this process,
        or None for all.
    """

    coordinator: str
    count: int
    process: int
    local_devices: Sequence[int] | None = None


def process_group_of_environment() -> ProcessGroup | None:
    """The group that SLURM, a TPU pod, Kubernetes or Open MPI has set up, or None."""
    coordinator, count, process, devices = jax_bridge.detected_cluster()
    if None in (coordinator, count, process):
        return None
    # JAX gives each task one device, even a task that has a machine to itself.
    devices = devices if _tasks_on_a_machine() > 1 else None
    return ProcessGroup(
        coordinator=coordinator, count=count, process=process, local_devices=devices
    )


def _tasks_on_a_machine() -> int:
    """The most that SLURM or Open MPI has started on one machine; 1 without them."""
    names = ("SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    # Such as "2(x3),1": two on each of three machines, one on a fourth.
    counts = ",".join(os.environ.get(name, "1") for name in names)
    return max(int(count) for count in re.findall(r"(?:^|,)(\d+)", counts))


def join_processes(group: ProcessGroup, *, timeout: float) -> None:
    """Makes the devices of all processes one set; call it before `set_platform`.

    Args:
      group: the processes.
      timeout: seconds to wait for the others.

    Raises:
      RuntimeError: devices are in use already.
    """
    # The service would handle SIGTERM itself, and only take note of it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        group.coordinator,
        group.count,
        group.process,
        local_device_ids=group.local_devices,
        # Nothing else is to be guessed.
        cluster_detection_method="deactivate",
        initialization_timeout=math.ceil(timeout),
        # It ends a process by an abort that names no peer: it is the last resort.
        heartbeat_timeout_seconds=math.ceil(2 * timeout),
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )


def check_takes_part(mesh: DeviceMesh) -> None:
    """Checks that the devices of `mesh` exist, and each process has some of them.

    Raises:
      ValueError: devices do not exist, or a process has none of them.
    """
    used = {device.process_index for device in jax_mesh(mesh).devices.flat}
    idle = sorted(set(range(jax.process_count())) - used)
    if idle:
        raise ValueError(
            f"device mesh ({mesh}) has {mesh.size} of {jax.device_count()} devices, "
            f"none of them in process {', '.join(map(str, idle))}: use all, or start "
            "fewer processes"
        )


def is_first_process() -> bool:
    """Whether this process is the one that writes for all."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


@contextlib.contextmanager
def telling_arrivals(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` each time before this process waits for all others to arrive.

    The wait cannot be interrupted, so who is late must be known beforehand.
    """
    global _tell_arrival
    _tell_arrival = tell
    try:
        yield
    finally:
        _tell_arrival = None


def arrive() -> None:
    """Has to be called by each process's main thread before all processes meet."""
    is_main = threading.current_thread() is threading.main_thread()
    if _tell_arrival is not None and is_main:
        _tell_arrival()


def wait_for_all(what: str) -> None:
    """Waits until all processes have called this with the same words."""
    arrive()
    multihost_utils.sync_global_devices(what)


def gather_from_processes(value: int) -> Sequence[int]:
    """Every process's `value`, which is below 2**31; all processes must call it."""
    if jax.process_count() == 1:
        return [value]
    arrive()
    values = multihost_utils.process_allgather(np.asarray(value, np.int32))
    return [int(value) for value in values]


def check_same(
    what: str,
    facts: Mapping[str, str],
    *,
    remedy: str = "each process passes the same whole arrays, and seeds its random "
    "numbers alike (keras.utils.set_random_seed)",
) -> None:
    """Checks that all processes do the same; all of them call this.

    Args:
      what: they do, for messages.
      facts: by name of a thing what is to be the same in all of them.
      remedy: what to do if a fact differs.

    Raises:
      ValueError: one of them does something else, or a fact differs.
      RuntimeError: one of them does not come.
    """
    if jax.process_count() == 1:
        return
    arrive()
    texts = jax_bridge.exchange(
        json.dumps([what, dict(facts)]), seconds=_MEETING_SECONDS
    )
    if None in texts:
        raise RuntimeError(
            f"{what}: process {texts.index(None)} of {len(texts)} has not come within "
            f"{_MEETING_SECONDS:g} s: all processes run the same script, with the same "
            "calls in the same order"
        )
    (first, wanted), *others = map(json.loads, texts)
    for process, (other, given) in enumerate(others, start=1):
        if other != first:
            raise ValueError(
                f"process {process} is at {other}, process 0 at {first}: all "
                "processes run the same script, with the same calls in the same order"
            )
        for name in (*wanted, *given):
            here, there = wanted.get(name, "not set"), given.get(name, "not set")
            if here != there:
                raise ValueError(
                    f"{what}: {name} is {here} in process 0, and {there} in process "
                    f"{process}: {remedy}"
                )


def do_together(what: str, do: Callable[[], Any], *, by_first: bool) -> None:
    """Does something that fails in all processes if it does in one; all call this.

    Args:
      what: it is, for messages.
      do: is called, and does nothing together with other processes.
      by_first: whether process 0 does it alone, while the others wait.

    Raises:
      RuntimeError: it failed in another process. Where it failed the error is its own.
    """
    failure = ""
    try:
        if not by_first or is_first_process():
            do()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        # A process that is interrupted ends, and JAX ends the others.
        if not isinstance(sys.exception(), (KeyboardInterrupt, SystemExit)):
            arrive()
            failures = jax_bridge.exchange(failure, seconds=_WORK_SECONDS)
    for process, text in enumerate(failures):
        if text:
            raise RuntimeError(f"{what} failed in process {process}: {text}")


def to_host(array: jax.Array) -> np.ndarray:
    """The values of a device array; all processes that hold it must call this."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    arrive()
    return multihost_utils.process_allgather(array, tiled=True)


def check_child(name: str, devices: Sequence[jax.Device] | None) -> None:
    """Refuses to compile in a child process where that is not possible.

    Args:
      name: the program's.
      devices: those of a topology, or None.

    Raises:
      ValueError: the devices are not CPU devices, belong to a topology, or are
        spread over several processes.
    """
    why = None
    if devices is not None:
        why = "it is compiled for a topology"
    elif jax.process_count() > 1:
        why = f"its devices belong to {jax.process_count()} processes"
    elif jax.default_backend() != "cpu":
        why = f"its {jax.default_backend()} devices are this process's alone"
    if why:
        raise ValueError(
            f"{name}: a child process compiles for the cpu devices of one process, and "
            f"{why}: do not set in_child (for a run, compile_in_child)"
        )
