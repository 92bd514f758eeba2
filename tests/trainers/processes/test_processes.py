"""Several processes train as one, and end together when one is lost."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import nibabel
import numpy as np
import pytest

from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.not_finite import NotFinite
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.tensorboard.summaries import metric_tags
from meshwright.trainers.processes import peers, processes
from meshwright.trainers.training import loop
from tests.tasks.segmentation.volume_files_on_disk import install
from tests.tasks.text import test_translation
from tests.tasks.text.parallel_files import install_all
from tests.trainers.runs import test_segmentation_run
from tests.trainers.small_run import (
    GIN_FILES,
    GIN_PARAMS,
    ROOT,
    at,
    points,
    saved_steps,
    small_programs,
    train,
)
from tests.trainers.training import (
    poisoned_train,
    stuck_train,
    test_step_histograms,
)

COMMAND = (pathlib.Path(sys.executable).parent / "meshwright-train",)
SMALL_RUN = (
    GIN_FILES,
    (*GIN_PARAMS, "MESH_SHAPE = (2, 4)", "Experiment.summary_interval = 1"),
)
PATIENCE = 600


class Group:
    """So many processes of one training, started together."""

    def __init__(
        self,
        count,
        folder,
        *,
        logs,
        command=COMMAND,
        job=SMALL_RUN,
        params=(),
        flags=(),
        cwds=None,
    ):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.logs = [logs / f"{number}.log" for number in range(count)]
        self.folder = folder
        files = [f"--gin_file={file}" for file in job[0]]
        params = [f"--gin_param={param}" for param in (*job[1], *params)]
        command = [*command, *files, *params, f"--model_dir={folder}", *flags]
        self.processes = []
        for number, log in enumerate(self.logs):
            group = [f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}"]
            group.append(f"--process_id={number}")
            with open(log, "w") as out:
                argv = [str(word).replace("{process}", str(number)) for word in command]
                process = subprocess.Popen(
                    [*argv, *(group if count > 1 else [])],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    cwd=cwds and cwds[number],
                )
            self.processes.append(process)

    def wait(self) -> list[int]:
        """Their exit statuses."""
        return [process.wait(PATIENCE) for process in self.processes]

    def wait_for_checkpoint(self, step) -> None:
        deadline = time.monotonic() + PATIENCE
        while not (self.folder / "checkpoints" / str(step)).exists():
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in self.processes), (
                self.outputs
            )
            time.sleep(0.05)

    def signal(self, number, signum) -> None:
        """To a process: its supervisor and its training."""
        pids = subprocess.run(
            ["pgrep", "-s", str(self.processes[number].pid)],
            capture_output=True,
            text=True,
            check=True,
        )
        for pid in pids.stdout.split():
            # The training may have ended with its supervisor already.
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signum)

    @property
    def outputs(self) -> list[str]:
        return [log.read_text() for log in self.logs]


@pytest.fixture
def start(tmp_path):
    """Starts a group; what is left of it is ended with the test."""
    with contextlib.ExitStack() as stack:

        def begin(count, folder, **how):
            logs = tmp_path / f"logs_{len(list(tmp_path.iterdir()))}"
            logs.mkdir()
            group = Group(count, folder, logs=logs, **how)
            for process in group.processes:
                # What it started ends with it.
                stack.callback(process.kill)
            return group

        yield begin


def assert_same_training(folder, straight):
    """The loss of every step, and the metrics of every evaluation."""
    result, want = straight()
    losses = dict(points(folder, "train")["loss"])
    assert losses == pytest.approx(result.losses, rel=1e-6)
    values = points(folder, "eval")
    for tag, curve in points(want, "eval").items():
        assert dict(values[tag]) == pytest.approx(dict(curve), rel=1e-6)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_train_as_one(straight, start, tmp_path, count):
    params = ["Experiment.histogram_interval = 6"]
    group = start(count, tmp_path / "run", params=params)
    assert group.wait() == [0] * count, group.outputs
    assert_same_training(tmp_path / "run", straight)
    test_step_histograms.assert_of_saved_weights(tmp_path / "run")
    first, *others = group.outputs
    assert "Trained to step 20" in first
    assert not any("Trained" in output or "INFO" in output for output in others)
    assert len(list((tmp_path / "run" / "train").iterdir())) == 1


def test_processes_generate_as_one(straight, start, tmp_path):
    """The first one writes."""
    _, folder = straight()
    generate = [COMMAND[0].with_name("meshwright-generate")]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("de\nimport\nx\n")
    flags = [f"--prompts_file={prompts}", "--temperature=1", "--rows=2"]
    outputs = []
    for count in (1, 2):
        output = tmp_path / f"{count}.jsonl"
        group = start(
            count, folder, command=generate, flags=[*flags, f"--output={output}"]
        )
        assert group.wait() == [0] * count, group.outputs
        outputs.append(output.read_text().splitlines())
    one, two = ([json.loads(line) for line in lines] for lines in outputs)
    assert len(one) == len(two) == 3
    for ours, theirs in zip(two, one, strict=True):
        (ours,), (theirs,) = ours.pop("continuations"), theirs.pop("continuations")
        assert ours["ids"] == theirs["ids"]
        assert ours["score"] == pytest.approx(theirs["score"], rel=1e-4)
    shown = start(2, folder, command=generate, flags=["--prompt=de", "--prompt=x"])
    assert shown.wait() == [0, 0], shown.outputs
    assert [each.count('{"prompt": ') for each in shown.outputs] == [2, 0]


def test_processes_without_prompts_are_refused(start, tmp_path):
    generate = [COMMAND[0].with_name("meshwright-generate")]
    group = start(2, tmp_path, command=generate)
    assert group.wait() == [1, 1], group.outputs
    assert all("give all of them the same --prompt" in each for each in group.outputs)


def test_lost_peer_is_named_and_a_restart_goes_on(straight, start, tmp_path):
    """The second start is of one process, which has all eight devices."""
    folder = tmp_path / "run"
    group = start(2, folder)
    group.wait_for_checkpoint(10)
    group.signal(1, signal.SIGKILL)
    assert group.wait() == [peers.LOST, -signal.SIGKILL], group.outputs
    assert "lost a peer: process 1 of 2 (" in group.outputs[0]
    assert "ended without a word. Start the same command again" in group.outputs[0]
    kept = saved_steps(folder)
    assert 10 in kept
    again = start(1, folder)
    assert again.wait() == [0], again.outputs
    assert f"restoring step {kept[-1]} from" in again.outputs[0]
    assert_same_training(folder, straight)


@pytest.mark.slow
def test_more_processes_on_another_mesh_go_on(straight, start, tmp_path):
    folder = tmp_path / "run"
    params = ["MESH_SHAPE = (4, 1)", "Experiment.num_steps = 10"]
    assert start(1, folder, params=params).wait() == [0]
    group = start(4, folder)
    assert group.wait() == [0] * 4, group.outputs
    assert "restoring step 10 from" in group.outputs[0]
    assert_same_training(folder, straight)


@pytest.mark.slow
def test_all_roll_back_together(start, tmp_path):
    command = [sys.executable, poisoned_train.__file__]
    roll_back = "Experiment.not_finite = %NotFinite.ROLL_BACK"
    group = start(2, tmp_path / "run", command=command, params=[roll_back])
    assert group.wait() == [0, 0], group.outputs
    assert "at step 8: rolled back to step 5" in group.outputs[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "CallBatches", poisoned_train.PoisonedBatches)
        policy = NotFinite.ROLL_BACK
        want = train(at(small_programs(), not_finite=policy), tmp_path / "one").losses
    # Steps 1 to 7 were there twice, with other batches from 6 on.
    losses = dict(points(tmp_path / "run", "train")["loss"])
    assert losses == pytest.approx(want, rel=1e-6)


UNSEEDED = """
import gin
import numpy as np
import tensorflow as tf

def points():
    rng = np.random.default_rng()
    examples = {"point": rng.random([64, 2], "float32"), "arm": np.float32([0, 1] * 32)}
    return tf.data.Dataset.from_tensor_slices(examples)
"""


def test_processes_that_read_different_examples_end(start, tmp_path, monkeypatch):
    examples = ROOT / "docs" / "examples"
    (tmp_path / "unseeded.py").write_text(UNSEEDED)
    monkeypatch.setenv("PYTHONPATH", f"{examples}:{tmp_path}", prepend=os.pathsep)
    files = [examples / "my_task.gin"]
    job = (files, ["DatasetInput.train = @unseeded.points"])
    flags = ["--import=my_task", "--import=unseeded", "--mode=train"]
    group = start(2, tmp_path / "run", job=job, flags=flags)
    assert 0 not in group.wait(), group.outputs
    assert "processes read different examples" in group.outputs[0]
    assert not saved_steps(tmp_path / "run")


def translating(root):
    """Gin files and parameters of a run that decodes; its data go to `root`."""
    install_all(root, {"de": 60, "fr": 40})
    *files, mesh = test_translation.PLANS["dense"]
    source = f"GettextCatalogues.root = '{root}'"
    return files, (mesh, *test_translation.SIZES, source, "Experiment.eval_batches = 1")


def segmenting(root):
    """As `translating`; this one writes what it decodes, too."""
    volumes = install(root, count=5, shape=(20, 10, 8), held=2)
    sizes = (*test_segmentation_run.SMALL, "PATCH = (16, 8, 8)", "MESH_SHAPE = (2, 4)")
    files = ["seg/segmentation.gin", "plans/data_spatial.gin"]
    return files, (*sizes, f"VolumeFiles.path = '{volumes}'", "BatchNorm.decay = 0.5")


@pytest.mark.slow
@pytest.mark.parametrize("task", [translating, segmenting])
def test_all_decode(start, tmp_path, task):
    """Metrics, samples and files of what is decoded; also by who only evaluates."""
    files, params = task(tmp_path / "data")
    params = [*params, "Experiment.decode_batches = None"]
    experiment, _ = build_experiment(files, params)
    alone, folder = tmp_path / "alone", tmp_path / "run"
    run = loop.Run(model_dir=str(alone))
    want = loop.train_and_evaluate(StepPrograms(experiment), run).evaluation
    for mode in ("train", "eval"):
        flags = [f"--mode={mode}"]
        group = start(2, folder, job=(files, params), flags=flags)
        assert group.wait() == [0, 0], group.outputs
    values = points(folder, "eval")
    tags = metric_tags(want)
    metrics = {tag: values[tag][-1][1] for tag in tags}
    assert metrics == pytest.approx(tags, rel=1e-5)
    assert values.get("samples") == points(alone, "eval").get("samples")
    assert predictions(folder) == predictions(alone)


def predictions(folder):
    """The voxels of the volumes that were written, by path."""
    return {
        path.relative_to(folder): np.asarray(nibabel.load(path).dataobj).tobytes()
        for path in folder.glob("predictions/*/*.nii.gz")
    }


@pytest.mark.slow
@pytest.mark.parametrize("what", ["machine", "training"])
@pytest.mark.parametrize("stopped", [0, 1])
def test_stalled_peer_is_named(start, tmp_path, stopped, what):
    group = start(2, tmp_path / "run", flags=["--peer_timeout=30"])
    group.wait_for_checkpoint(5)
    if what == "machine":
        group.signal(stopped, signal.SIGSTOP)
    else:
        (pid,) = children(group.processes[stopped].pid)
        os.kill(int(pid), signal.SIGSTOP)
    other = 1 - stopped
    assert group.processes[other].wait(PATIENCE) == peers.LOST
    assert f"lost a peer: process {stopped}" in group.outputs[other]
    assert "not been heard of for" in group.outputs[other]


@pytest.mark.slow
def test_who_is_stuck_in_a_restore_is_named(start, tmp_path):
    folder = tmp_path / "run"
    assert start(1, folder, params=["Experiment.num_steps = 5"]).wait() == [0]
    command = [sys.executable, stuck_train.__file__]
    group = start(2, folder, command=command, flags=["--peer_timeout=40"])
    assert group.wait() == [peers.LOST] * 2, group.outputs
    for output in group.outputs:
        assert re.search("lost a peer: process 1 of 2 .* has kept the others w", output)


EVALUATING = ("Experiment.eval_interval = 5", "Experiment.eval_batches = None")


@pytest.mark.slow
@pytest.mark.parametrize("params", [(), EVALUATING], ids=["training", "evaluating"])
@pytest.mark.parametrize("signalled", [0, 1])
def test_one_signal_stops_all_at_the_same_place(start, tmp_path, signalled, params):
    folder = tmp_path / "run"
    # Long enough not to end before.
    group = start(2, folder, params=["Experiment.num_steps = 2000", *params])
    group.wait_for_checkpoint(5)
    group.processes[signalled].send_signal(signal.SIGTERM)
    assert group.wait() == [0, 0], group.outputs
    (step,) = re.findall(
        r"Stopped by SIGTERM: saved training to step (\d+)", group.outputs[0]
    )
    assert saved_steps(folder)[-1] == int(step)


@pytest.mark.slow
def test_what_fails_in_one_ends_all(start, tmp_path):
    """A training that is ended by force; its supervisor lives to tell."""
    group = start(2, tmp_path / "run", params=["Experiment.num_steps = 2000"])
    group.wait_for_checkpoint(5)
    # Its training alone, as the kernel does that is short of memory.
    (pid,) = children(group.processes[1].pid)
    os.kill(int(pid), signal.SIGKILL)
    assert group.wait() == [peers.LOST, 128 + signal.SIGKILL], group.outputs
    assert "a peer failed: process 1 of 2 (" in group.outputs[0]
    assert "failed: it got SIGKILL\nWhen that is mended" in group.outputs[0]


def children(pid):
    process = subprocess.run(
        ["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True
    )
    return process.stdout.split()


@pytest.mark.slow  # It waits; test_peers.py has the same without a training.
def test_other_settings_are_refused(start, tmp_path):
    """Said by who is refused; the first one waits for the right one."""
    params = ["Experiment.seed = {process}"]
    flags = ["--start_timeout=40"]
    group = start(2, tmp_path / "run", params=params, flags=flags)
    assert group.wait() == [1, 1], group.outputs
    output = "\n".join(group.outputs)
    assert re.search(r"process (\d) has other settings than process (?!\1)\d", output)
    assert "of 2 processes, these did not come within the start timeout" in output


def test_mesh_that_cannot_be_shared(start, tmp_path):
    group = start(3, tmp_path / "run")
    assert group.wait() == [1, 1, 1], group.outputs
    for output in group.outputs:
        assert "3 processes cannot share the 8 devices of the mesh (X=2, Y=4)" in output


@pytest.mark.slow
def test_folder_that_is_not_shared(start, tmp_path):
    cwds = [tmp_path / "one", tmp_path / "other"]
    for cwd in cwds:
        cwd.mkdir()
    group = start(2, pathlib.Path("run"), cwds=cwds)
    assert group.wait() == [peers.LOST, 1], group.outputs
    assert "process 1 does not see in run what process 0 has made" in group.outputs[1]
    assert "process 1 of 2" in group.outputs[0]


@pytest.mark.parametrize("mark", [None, "5", "7"], ids=["none", "old", "right"])
def test_only_the_mark_of_this_start_is_taken_for_a_shared_folder(
    tmp_path, monkeypatch, mark
):
    """As the second process sees it; 7 is what the first says it has written."""
    if mark is not None:
        (tmp_path / ".shared").write_text(mark)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(processes, "is_first_process", lambda: False)
    monkeypatch.setattr(processes, "gather_from_processes", lambda token: [7, token])
    monkeypatch.setattr(processes, "wait_for_all", lambda what: None)
    monkeypatch.setattr(processes, "_SEEN_SECONDS", 0.0)
    refused = pytest.raises(OSError, match="does not see in .* what process 0 has made")
    with contextlib.nullcontext() if mark == "7" else refused:
        processes.check_shared(str(tmp_path))
