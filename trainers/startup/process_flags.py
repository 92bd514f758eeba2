"""Flags of a command that several processes run together."""

from __future__ import annotations

from absl import flags

COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "HOST:PORT of process 0, if several processes train together; or auto: from the "
    "environment, of a TPU pod, SLURM, Kubernetes or Open MPI.",
)
NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "How many processes train together.", lower_bound=1
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
