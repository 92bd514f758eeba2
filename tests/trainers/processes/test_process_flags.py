"""What the flags of several processes say, and what clusters' environments do."""

import pytest
from absl import flags
from absl.testing import flagsaver

from meshwright.framework.compiler.xla import jax_bridge
from meshwright.framework.compiler.xla.processes import ProcessGroup
from meshwright.trainers.processes import processes

SLURM = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_NODELIST": "node[07-08],other",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "3",
}


def group(platform="cpu", **values):
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(**values):
        return processes.process_group(platform)


def test_one_process_by_itself():
    assert group() is None


def test_addressed():
    want = ProcessGroup(coordinator="h:12", count=3, process=2)
    assert group(coordinator="h:12", num_processes=3, process_id=2) == want


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_processes": 2}, "--num_processes without --coordinator=HOST:PORT"),
        ({"peer_timeout": 9.0}, "--peer_timeout without --coordinator=HOST:PORT"),
        ({"coordinator": "h:1"}, "h:1 without --num_processes or --process_id: give"),
        (
            {"coordinator": "h:1", "num_processes": 2, "process_id": 2},
            "--process_id=2 of --num_processes=2: they count from 0 to 1",
        ),
        ({"coordinator": "h"}, "--coordinator=h is no HOST:PORT"),
        (
            {"coordinator": "auto"},
            "is none of a TPU pod, SLURM, Kubernetes or Open MPI",
        ),
        (
            {"coordinator": "auto", "process_id": 0},
            "--coordinator=auto takes --num_processes and --process_id from",
        ),
    ],
)
def test_flags_that_do_not_go_together(values, message):
    with pytest.raises(ValueError, match=message):
        group(**values)


def test_slurm_says_it_all(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    joined = group(coordinator="auto")
    assert joined.coordinator.startswith("node07:")
    assert (joined.count, joined.process, joined.local_devices) == (3, 1, None)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1,2(x2)")
    assert group(coordinator="auto").local_devices == [0]
    assert group() is None  # Unless asked for.


def test_pod_says_it_all(monkeypatch):
    expected = ("10.0.0.1:8482", 4, 3, None)
    monkeypatch.setattr(jax_bridge, "detected_cluster", lambda: expected)
    want = ProcessGroup(coordinator="10.0.0.1:8482", count=4, process=3)
    assert group("tpu") == want
    monkeypatch.setattr(jax_bridge, "detected_cluster", lambda: (None,) * 4)
    assert group("tpu") is None
