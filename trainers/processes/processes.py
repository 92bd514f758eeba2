"""How several processes that run a command come together, as its flags say."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Iterator

import jax
import tensorflow as tf
from absl import logging
from etils import epath

from meshwright.framework.compiler.xla.processes import (
    ProcessGroup,
    gather_from_processes,
    is_first_process,
    join_processes,
    process_group_of_environment,
    telling_arrivals,
    wait_for_all,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.trainers.processes.peer_channel import Channel
from meshwright.trainers.processes.peers import Peers
from meshwright.trainers.processes.supervisor import start_supervised
from meshwright.trainers.startup import process_flags

_SEEN_SECONDS = 60.0
_GRACE_SECONDS = 15.0


def process_group(platform: str) -> ProcessGroup | None:
    """The group of processes that the flags name; None for a process by itself.

    Args:
      platform: "cpu", "cuda" or "tpu".

    Raises:
      ValueError: the flags do not go together, or the environment names no group.
    """
    coordinator, count = (
        process_flags.COORDINATOR.value,
        process_flags.NUM_PROCESSES.value,
    )
    process = process_flags.PROCESS_ID.value
    process_flags.check(platform)
    if coordinator == process_flags.AUTO:
        return _of_environment()
    if coordinator is None:
        # A worker of a pod can do nothing by itself.
        return process_group_of_environment() if platform == "tpu" else None
    return ProcessGroup(coordinator=coordinator, count=count, process=process)


def _of_environment() -> ProcessGroup:
    group = process_group_of_environment()
    if group is None:
        raise ValueError(
            "--coordinator=auto, but the environment is none of a TPU pod, SLURM, "
            "Kubernetes or Open MPI: give --coordinator=HOST:PORT, --num_processes "
            "and --process_id"
        )
    return group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
    """This process's place among those of a training.

    Args:
      group: the processes of the training.
      channel: the channel to this process's supervisor.
    """

    group: ProcessGroup
    channel: Channel


def start(platform: str) -> Membership | None:
    """Starts this process as a member of the flags' group; None if it is by itself.

    The process that returns is a child of the one that was started (`supervisor`). To
    be called before TensorFlow or JAX have started any thread.

    Args:
      platform: "cpu", "cuda" or "tpu".

    Raises:
      ValueError, PeerError: see `process_group`, `start_supervised`.
    """
    group = process_group(platform)
    if group is None or group.count == 1:
        return None
    channel = start_supervised(
        group,
        start_timeout=process_flags.START_TIMEOUT.value,
        timeout=process_flags.PEER_TIMEOUT.value,
    )
    if group.process != 0:
        # Process 0 logs what all do.
        logging.set_verbosity(logging.WARNING)
    return Membership(group=group, channel=channel)


def devices_each(
    mesh: DeviceMesh, membership: Membership | None, platform: str, given: int | None
) -> int | None:
    """Virtual devices of each process; None if the platform brings its devices.

    Args:
      mesh: what the processes share.
      membership: this process's; None for a process by itself.
      platform: "cpu", "cuda" or "tpu".
      given: what a flag says, or None.

    Raises:
      ValueError: the processes do not divide the mesh's devices.
    """
    if given or platform != "cpu":
        return given
    count = membership.group.count if membership else 1
    if mesh.size % count:
        raise ValueError(
            f"{count} processes cannot share the {mesh.size} devices of the mesh "
            f"({mesh}) evenly: change --num_processes or the mesh's shape"
        )
    return mesh.size // count


@contextlib.contextmanager
def together(membership: Membership | None, settings: str) -> Iterator[Peers | None]:
    """Waits for all processes, and makes their devices one set.

    An error within the context ends the other processes too.

    Args:
      membership: this process's; None for a process by itself.
      settings: text that must be the same in all processes.

    Raises:
      PeerError: see `Peers`.
    """
    if membership is None:
        yield None
        return
    group = membership.group
    peers = Peers(
        membership.channel,
        group.count,
        group.process,
        settings=settings,
        versions=f"jax {jax.__version__}, tensorflow {tf.__version__}",
        # The supervisor gives up first: it knows how process 0 fares.
        start_timeout=process_flags.START_TIMEOUT.value + _GRACE_SECONDS,
    )
    try:
        join_processes(group, timeout=process_flags.PEER_TIMEOUT.value)
        with telling_arrivals(peers.arrive):
            yield peers
    except BaseException as error:
        is_interrupt = isinstance(error, KeyboardInterrupt)
        peers.failed(f"{type(error).__name__}: {error}", at_once=is_interrupt)
        raise
    peers.close(process_flags.PEER_TIMEOUT.value)


def check_shared(folder: str) -> None:
    """Checks that all processes see the same folder; all of them call this.

    Raises:
      OSError: this process does not see the file that the first one has made there.
    """
    if not jax.distributed.is_initialized():
        return
    mark = epath.Path(folder) / ".shared"
    # A mark that an earlier run has left does not count.
    token = str(gather_from_processes(secrets.randbits(31))[0])
    if is_first_process():
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(token)
    wait_for_all("shared folder made")
    # Files of other processes show late on some network file systems.
    deadline = time.monotonic() + _SEEN_SECONDS
    while not mark.exists() or mark.read_text() != token:
        if time.monotonic() > deadline:
            raise OSError(
                f"process {jax.process_index()} does not see in {folder} what process "
                "0 has made there: give a folder that all machines share, by its full "
                "path"
            )
        time.sleep(0.5)
    wait_for_all("shared folder seen")
    if is_first_process():
        mark.unlink()
