"""Flags of a command that several processes run together."""

from __future__ import annotations

from absl import flags

AUTO = "auto"
COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "HOST:PORT of process 0, if several processes run together; or auto: from the "
    "environment, of a TPU pod, SLURM, Kubernetes or Open MPI.",
)
NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "How many processes run together.", lower_bound=1
)
PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "Number of this process, from 0.", lower_bound=0
)
START_TIMEOUT = flags.DEFINE_float(
    "start_timeout", 600.0, "Seconds to wait for all processes to start.", lower_bound=1
)
PEER_TIMEOUT = flags.DEFINE_float(
    "peer_timeout",
    300.0,
    "Seconds after which a process that is silent, or keeps the rest waiting, is "
    "taken for lost, and all end.",
    lower_bound=1,
)


def check(platform: str) -> None:
    """Refuses flags that do not go together.

    Args:
      platform: "cpu", "cuda" or "tpu".

    Raises:
      ValueError: they do not; the message says which to give.
    """
    coordinator, count = COORDINATOR.value, NUM_PROCESSES.value
    process = PROCESS_ID.value
    dependent = (NUM_PROCESSES, PROCESS_ID, START_TIMEOUT, PEER_TIMEOUT)
    given = [f"--{flag.name}" for flag in dependent if flag.value != flag.default]
    if coordinator is None:
        if given and platform != "tpu":
            raise ValueError(
                f"{' and '.join(given)} without --coordinator=HOST:PORT, the address "
                "of process 0: give that too"
            )
        return
    if coordinator == AUTO:
        if (count, process) != (None, None):
            raise ValueError(
                "--coordinator=auto takes --num_processes and --process_id from the "
                "environment too: leave them out"
            )
        return
    split_address(coordinator)
    if count is None or process is None:
        raise ValueError(
            f"--coordinator={coordinator} without --num_processes or --process_id: "
            "give both, or --coordinator=auto on a cluster"
        )
    if process >= count:
        raise ValueError(
            f"--process_id={process} of --num_processes={count}: they count from 0 to "
            f"{count - 1}"
        )


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port".

    Raises:
      ValueError: `address` is something else.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"--coordinator={address} is no HOST:PORT: give the address of process 0, "
            "and a port there that is free"
        )
    return host.strip("[]"), int(port)
