"""The peak that meshwright-plan predicts, against a process that trains."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.trainers.planning.measured_memory import THRESHOLD
from tests.trainers.planning.test_plan_main import MESH, call_main
from tests.trainers.small_run import GIN_FILES, ROOT

# Some 100 MB a device: the process's own ups and downs are few of 800.
WIDE = (
    "NUM_LAYERS = 2",
    "MODEL_DIMS = 512",
    "HIDDEN_DIMS = 2048",
    "HEAD_DIM = 64",
    "SEQUENCE_LENGTH = 128",
    "Experiment.global_batch = 64",
)


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/clear_refs").exists(),
    reason="the high water of a process's memory is read from Linux's /proc",
)
@pytest.mark.slow
def test_the_predicted_peak_is_what_training_takes(tmp_path):
    path = tmp_path / "plan.json"
    assert call_main(*WIDE, topology="cpu", json_out=str(path)) is None
    predicted = json.loads(path.read_text())["peak_bytes"]
    module = "tests.trainers.planning.measured_memory"
    ran = subprocess.run(
        [sys.executable, "-m", module, *GIN_FILES, "--", MESH, *WIDE],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **THRESHOLD},
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 80e6
    assert predicted == pytest.approx(int(ran.stdout), rel=0.1)
