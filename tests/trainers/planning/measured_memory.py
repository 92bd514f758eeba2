"""A process that trains a few steps on 8 CPU devices and measures what that takes.

    python -m tests.trainers.planning.measured_memory GIN_FILE... -- GIN_PARAM...

Prints one number: bytes that the process has in memory at most during a step, less
those that it has with neither state nor batch, over the number of devices. Devices of
the CPU backend have no counters of their own. The backend takes its buffers from
malloc, so each large one should be mapped, and unmapped when it is freed: THRESHOLD.
"""

from __future__ import annotations

import ctypes
import gc
import pathlib
import sys
import time

import jax
import numpy as np
import tensorflow as tf

from meshwright.framework import set_platform
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms

THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""To add to the environment."""
STEPS = 3


def measured(programs: StepPrograms) -> int:
    """Bytes a device: the most of a step of the training program."""
    main = programs.main  # Compiling takes memory of its own.
    state = TrainState.initial(programs).stored()
    batches = programs.abstract_batches().map(
        lambda spec: np.ones(tuple(spec.shape), spec.dtype.as_numpy_dtype)
    )
    most = 0
    for _ in range(STEPS):
        jax.block_until_ready(state.leaves())
        _settled()
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # Forgets the high water.
        out = main(state, batches)
        jax.block_until_ready(tf.nest.flatten(out))
        most = max(most, _status("VmHWM"))
        state = out["state"]
    # Code and threads that the first step brought stay and count for nothing.
    del state, batches, out
    return (most - _settled()) // programs.experiment.plan.mesh.size


def _settled() -> int:
    """Bytes in memory; waits for what a call frees after its results are ready."""
    gc.collect()
    known = [0]
    while len(known) < 3 or min(known[-3:]) != max(known[-3:]):
        time.sleep(0.3)
        ctypes.CDLL(None).malloc_trim(0)
        # In MiB: some pages come and go.
        known.append(_status("VmRSS") >> 20)
    return known[-1] << 20


def _status(name: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    split = sys.argv.index("--")
    set_platform("cpu", 8)
    experiment, _ = build_experiment(sys.argv[1:split], sys.argv[split + 1 :])
    print(measured(StepPrograms(experiment)))
