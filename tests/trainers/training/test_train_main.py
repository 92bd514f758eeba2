"""meshwright-train as a user meets it: what it prints, and how it fails."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import TracedProgram
from meshwright.tasks.text.language_model import LanguageModel
from meshwright.tasks.text.text_input import TextFiles
from meshwright.trainers import cli
from meshwright.trainers import train as main_module
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.training import training_main
from tests.trainers import small_run
from tests.trainers.small_run import (
    GIN_FILES,
    GIN_PARAMS,
    MESH,
    at,
    points,
    saved_steps,
    small_programs,
    train,
)


def call_main(model_dir, *params, **more_flags):
    given = {"model_dir": str(model_dir), "device_count": "8"}
    return small_run.call_main(main_module, *params, **given, **more_flags)


def error_of(model_dir, *params, **more):
    with pytest.raises(SystemExit) as info:
        call_main(model_dir, *params, **more)
    assert str(info.value.code).startswith("meshwright-train: ")
    return info.value.code


@pytest.fixture
def compiled(monkeypatch):
    """The main uses programs that other tests have compiled too."""

    def programs(experiment):
        other = at(small_programs())
        other.experiment = experiment
        return other

    monkeypatch.setattr(training_main, "StepPrograms", programs)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (["Experimnt.seed = 1"], r"'Experimnt'.\n.*line 1\n.*\n  Did you mean Exper"),
        (["Experiment.sed = 1"], r"'Experiment' .*'sed'(.|\n)*Did you mean seed"),
        (
            ["Experiment.not_finite = SKIP"],
            "'SKIP' cannot be read as a value: quote a string",
        ),
        (["Experiment.not_finite = %NotFinite.SKIPP"], "mean %NotFinite.SKIP"),
        (["Adafactor.beta1 = 0.5"], "Adafactor.beta1 = 0.5\n.*built no Adafactor"),
        (
            ["NUM_LAYERS = 'two'"],
            "Repeat.num_layers is 'two'; it must be a whole number, such as 2\n"
            "  It is bound by `Repeat.num_layers = %NUM_LAYERS`",
        ),
        (["NUM_LAYER = 3"], r"to %NUM_LAYER\n  Did you mean %NUM_LAYERS"),
        (
            ["Experiment.optimizer = @SGD()"],
            "SGD.learning_rate must be set: .*--gin_param='SGD.learning_rate = ...'",
        ),
        (
            ["Experiment.optimizer = @Adam"],
            r"must be of class Optimizer, such as @Adam\(\): write @Adam\(\) for",
        ),
        (
            ["Experiment.activation_dtype = 'float17'"],
            "is 'float17'; it must be of class DType, such as %bfloat16",
        ),
        (["Experiment.plan = 3"], "plan is 3; it must be of class ShardingPlan"),
        (["Experiment.num_steps = '9'"], "num_steps is '9'; it must be a whole number"),
        (["Experiment.num_steps = 9.0"], "num_steps is 9.0; it must be a whole number"),
        (["Experiment.seed = 18446744073709551616"], f"at least 0 and below {2**64}"),
        (["Experiment.eval_batches = 0"], "eval_batches is 0; .* at least 1"),
        (["Experiment.steps_per_loop = 3"], "num_steps = 20 is no multiple of"),
        (
            ["Experiment.steps_per_loop = 5", "Experiment.histogram_interval = 6"],
            "histogram_interval = 6 is no multiple of steps_per_loop = 5, "
            ".*: set it to 10, or steps_per_loop to a divisor of 6",
        ),
        (["MESH_SHAPE = (4, 4)"], "needs 16 devices but 8 cpu devices exist"),
        (["MESH_SHAPE = (2, 2, 2)"], r"is \(2, 2, 2\); it must be 2 numbers, one"),
        (
            ["MESH_SHAPE = 8"],
            "sequence .*\n  It is bound by `.*mesh_shape = %MESH_SHAPE",
        ),
        (
            ["Experiment.partitioner = 'shardy'"],
            r"one of Partitioner.SHARDY, Partitioner.GSPMD \(with % before it in a gin",
        ),
        (
            ["ShardingPlan.weights = {'model': 'X', 'heads': 'X'}"],
            r"'stack.attention.w_k' \(.*mesh axis 'X' is used twice in one tensor",
        ),
        (["ShardingPlan.weights = {'model': 'Z'}"], "'model'.*'Z', but the mesh has"),
        (["TextFiles.root = '/none'"], "there is no folder '/none': .*TextFiles.root"),
        (["TextFiles.pattern = '*.c'"], r"match '\*.c': .*TextFiles.pattern"),
    ],
)
def test_bad_parameter(tmp_path, params, message):
    assert re.search(message, error_of(tmp_path / "run", *params))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more_flags", "message"),
    [
        ({"gin_files": ["lm/stdlib_tny"]}, "'lm/stdlib_tny'.*\n.*mean lm/stdlib_tiny"),
        ({"gin_files": GIN_FILES[:2]}, "Experiment.optimizer must be set: bind it"),
        ({"profile_steps": "a,b"}, "--profile_steps=a,b must be FIRST,LAST"),
        ({"profile_steps": "3"}, "--profile_steps=3 must be"),
        ({"profile_steps": "0,3"}, "=0,3 must be .* from 1"),
        ({"profile_steps": "5,4"}, "=5,4 must be"),
        ({"mode": "eval"}, "no checkpoint in .*run/checkpoints: name the folder of"),
    ],
)
def test_bad_flag(tmp_path, more_flags, message):
    assert re.search(message, error_of(tmp_path / "run", **more_flags))
    assert not (tmp_path / "run").exists()


def test_weights_to_start_from_that_are_not_there(tmp_path, monkeypatch):
    """Told before anything is traced; a run that has a checkpoint needs none."""
    start = ["Experiment.initialize_from = @InitializeFrom()"]
    start.append(f"InitializeFrom.checkpoint = '{tmp_path}/gone'")
    with monkeypatch.context() as patched:
        patched.setattr(training_main, "StepPrograms", None)
        error = error_of(tmp_path / "run", *start)
        (tmp_path / "gone").mkdir()
        (tmp_path / "gone/checkpoint").write_bytes(b"\x81\xa7version\x03")
        of_t5x = error_of(tmp_path / "run", *start)
        (tmp_path / "gone").rename(tmp_path / "checkpoint_30")
        start[1] = f"InitializeFrom.checkpoint = '{tmp_path}'"
        above = error_of(tmp_path / "run", *start)
        (tmp_path / "empty").mkdir()
        start[1] = f"InitializeFrom.checkpoint = '{tmp_path}/empty'"
        empty = error_of(tmp_path / "run", *start)
        (tmp_path / "other/checkpoints/300").mkdir(parents=True)
        start[1] = f"InitializeFrom.checkpoint = '{tmp_path}/other/checkpoints/300'"
        step = error_of(tmp_path / "run", *start)
    assert f"train first; it is step 300 of the run {tmp_path}/other\n" in step
    assert (
        f"{tmp_path} is a folder of checkpoints of T5X (checkpoint_30), each" in above
    )
    assert f"there is no checkpoint in {tmp_path}/empty: name the folder of" in empty
    assert f"checkpoint is {tmp_path}/gone, and nothing is there: name the" in error
    assert f"{tmp_path}/gone is a checkpoint of T5X, which is not read" in of_t5x


def test_a_refused_run_leaves_no_folder(tmp_path, monkeypatch):
    """Nor folders above it that were made for it."""

    def refuse(programs):
        assert (tmp_path / "new/run/checkpoints").is_dir()
        raise ValueError("the model is refused")

    monkeypatch.setattr(training_main.loop, "trace", refuse)
    assert "the model is refused" in error_of(tmp_path / "new/run")
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_that_cannot_be_reached_is_a_line_with_a_remedy(tmp_path, monkeypatch):
    where = "when reading metadata of gs://none/run/checkpoint"

    def exists(path):
        raise tf.errors.FailedPreconditionError(None, None, f"no host\n\t {where}")

    monkeypatch.setattr(tf.io.gfile, "exists", exists)
    start = "Experiment.initialize_from = @InitializeFrom()"
    source = "InitializeFrom.checkpoint = 'gs://none/run'"
    error = error_of(tmp_path / "run", start, source)
    message = (
        "gs://none/run/checkpoint cannot be reached: check its name, the network, "
    )
    assert f"{message}and the rights" in error and f"no host {where}\n" in error
    with pytest.raises(tf.errors.FailedPreconditionError):
        call_main(tmp_path / "run", start, source, traceback="true")
    where = (
        "see https://www.tensorflow.org/guide"
        # Of another error nothing is hidden.
    )
    with pytest.raises(tf.errors.FailedPreconditionError, match="no host"):
        call_main(tmp_path / "run", start, source)


def test_traceback_on_demand(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        call_main(tmp_path, "TextFiles.root = '/none'", traceback="true")


@pytest.mark.parametrize("folder", ["/proc/x", "{tmp}/file"])
def test_unwritable_model_dir(tmp_path, folder):
    (tmp_path / "file").write_text("precious")
    error = error_of(folder.format(tmp=tmp_path))
    assert re.search("--model_dir=.* cannot be written .*another folder", error)
    assert (tmp_path / "file").read_text() == "precious"


def test_checkpoint_of_another_model(straight, tmp_path, monkeypatch):
    """Told before anything is traced, as is a dim of weights that is misspelt."""
    shutil.copytree(straight()[1], tmp_path / "run")
    monkeypatch.setattr(training_main.loop, "trace", None)
    with monkeypatch.context() as patched:
        patched.setattr(StepPrograms, "noted_dims", None)
        misspelt = "ShardingPlan.weights = {'modell': 'X'}"
        assert "do you mean model?" in error_of(tmp_path / "none", misspelt)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    error = error_of(tmp_path / "run", "MODEL_DIMS = 32")
    assert "checkpoint step 20 in " in error
    expected = "scale is float32[16] in the checkpoint, float32[32] in this model"
    assert f"theta.final_norm.{expected}" in error
    assert "\nconfigured when it was saved -> now:\n  " in error
    error = error_of(tmp_path / "run", "MODEL_DIMS = 32", mode="eval")
    assert "is of another model" in error
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_replaced_optimizer_sets_its_bindings_aside(compiled, tmp_path, caplog):
    """The files bind Adam and its schedule; neither must be taken back by hand."""
    caplog.set_level("INFO", logger="absl")
    sgd = ["Experiment.optimizer = @SGD()", "SGD.learning_rate = 0.1"]
    error_of(tmp_path, *sgd, "Experiment.num_steps = 0")
    cli.build_experiment(list(GIN_FILES), [*GIN_PARAMS, MESH, *sgd])
    assert "no effect" not in caplog.text  # It is usual to replace a file's defaults.
    twice = ["Adam.weight_decay = 0.5", *sgd]
    cli.build_experiment(list(GIN_FILES), [*GIN_PARAMS, MESH, *twice])
    assert re.search(r"no effect, as .*; they can go: Adam\.weight_decay$", caplog.text)
    # What is bound afterwards must take effect.
    error = error_of(tmp_path, *sgd, "Adam.weight_decay = 0.5")
    assert "Adam.weight_decay = 0.5\n" in error
    assert "LinearWarmup" not in error


def test_later_files_and_parameters_win(tmp_path):
    files = [*GIN_FILES, "plans/attempt1.gin"]
    params = [*GIN_PARAMS, MESH, "Experiment.seed = 1", "Experiment.seed = 2"]
    experiment, text = cli.build_experiment(files, params)
    assert experiment.plan.activations["model"] == "X"  # Finalized has Y.
    assert "batch" not in experiment.plan.activations
    assert experiment.seed == 2
    assert "Experiment.seed = 2" in text


def test_train_then_eval(compiled, tmp_path, capsys):
    assert call_main(tmp_path, "Experiment.num_steps = 5", mode="train") is None
    out = capsys.readouterr().out
    assert re.search(r"Mesh: X=2, Y=4 \(shardy\)", out)
    assert re.search(r"training files: \d+\n", out)
    assert re.search(r"Trained to step 5 in \d+ s.\nTraining loss: \d.\d+ nats\n", out)
    assert f"tensorboard --logdir {tmp_path}" in out
    assert "Held-out" not in out
    assert points(tmp_path, "eval") == {}
    assert call_main(tmp_path, mode="eval") is None
    held_out = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"Held-out: loss [\d.]+, bits_per_byte [\d.]+", held_out)
    assert [step for step, _ in points(tmp_path, "eval")["loss"]] == [5]
    assert saved_steps(tmp_path) == [5]
    # Training on evaluates the new state, and says what eval mode says.
    assert call_main(tmp_path, "Experiment.num_steps = 6") is None
    assert "Held-out: loss" in capsys.readouterr().out
    ((_, text),) = points(tmp_path, "train")["gin config"][1:]
    assert "Experiment.num_steps = 6" in text
    assert call_main(tmp_path, "Experiment.num_steps = 6", mode="train") is None
    assert (
        "This run trained nothing: step 6 is the last already. Raise "
        "Experiment.num_steps to go on.\n"
    ) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("signum", "num_steps", "status"),
    [
        (signal.SIGTERM, 20, 75),
        (signal.SIGTERM, 10, None),  # All steps were made.
        (signal.SIGINT, 20, 130),
    ],
)
def test_status_after_a_signal(
    compiled, tmp_path, monkeypatch, capsys, signum, num_steps, status
):
    evaluate = training_main.loop.evaluate

    def stop(*args):
        signal.raise_signal(signum)
        return evaluate(*args)

    monkeypatch.setattr(training_main.loop, "evaluate", stop)
    steps = f"Experiment.num_steps = {num_steps}"
    assert call_main(tmp_path, steps, stopped_status="75") == status
    assert f"Stopped by {signum.name}: saved training to step 10 in" in (
        capsys.readouterr().out
    )


def test_a_signal_before_the_first_step(compiled, tmp_path, monkeypatch, capfd):
    """One of several processes stops where the others stop too."""

    def stop(programs):
        signal.raise_signal(signal.SIGTERM)
        return []

    monkeypatch.setattr(training_main, "_leave", None)
    monkeypatch.setattr(training_main.loop, "start_notes", stop)
    monkeypatch.delattr(training_main.loop._Loop, "_compiled_main")
    assert call_main(tmp_path, stopped_status="75") == 75
    out, err = capfd.readouterr()
    assert "Stopped by SIGTERM before step 1: this run trained nothing.\n" in out
    assert "SIGTERM: stopping with nothing to save; Ctrl-C quits at once\n" in err
    assert saved_steps(tmp_path) == []


def test_interrupt_outside_of_the_loop(tmp_path, monkeypatch, capsys):
    def interrupt(experiment):
        raise KeyboardInterrupt

    monkeypatch.setattr(training_main, "StepPrograms", interrupt)
    assert call_main(tmp_path) == 130
    assert capsys.readouterr().err == "meshwright-train: interrupted\n"


def test_a_dry_run_reads_compiles_and_writes_nothing(tmp_path, monkeypatch, capsys):
    def never(*args, **kwargs):
        raise AssertionError("a dry run does not do that")

    monkeypatch.setattr(TracedProgram, "compile", never)
    monkeypatch.setattr(TextFiles, "read", never)
    monkeypatch.setattr(LanguageModel, "describe_data", never)
    monkeypatch.chdir(tmp_path)
    assert call_main("", dry_run="true") is None
    out = capsys.readouterr().out
    assert out.startswith("Mesh: X=2, Y=4 (shardy).\n  LanguageModel: ")
    assert "batch.ids: int32 [" in out
    assert out.endswith("Nothing was read, compiled or written.\n")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_is_wrong(tmp_path):
    too_large = error_of(tmp_path, "MESH_SHAPE = (4, 4)", dry_run="true")
    assert "needs 16 devices but 8 cpu devices exist" in too_large


def test_a_dry_run_refuses_misspelt_dims_of_the_plan(tmp_path):
    plan = "ShardingPlan.weights = {'haeds': 'Y', 'hiden': 'Y'}"
    error = error_of(tmp_path, plan, dry_run="true")
    assert (
        "weights splits dim 'haeds', which no weight has; do you mean heads?" in error
    )
    assert "splits dim 'hiden', which no weight has; do you mean hidden?" in error
    assert "Write 'heads': 'Y' in place of 'haeds': 'Y', for 'theta." in error


def start(model_dir, *params, device_count):
    """Starts the installed command, as from a shell."""
    command = [
        str(pathlib.Path(sys.executable).parent / "meshwright-train"),
        f"--model_dir={model_dir}",
        f"--device_count={device_count}",
        *(f"--gin_file={file}" for file in GIN_FILES),
        *(f"--gin_param={param}" for param in (*GIN_PARAMS, *params)),
    ]
    ours = ("XLA_FLAGS", "PJRT_NPROC")
    env = {k: v for k, v in os.environ.items() if k not in ours}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def test_command_fails_with_one_message(tmp_path):
    process = start(tmp_path / "run", MESH, device_count=4)
    out, err = process.communicate()
    assert (process.returncode, out) == (1, "")
    assert err == (
        "meshwright-train: device mesh (X=2, Y=4) needs 8 devices but 4 cpu devices "
        "exist (no device 4); use a smaller mesh, in gin files by "
        "ShardingPlan.mesh_shape and .device_ids, or, on CPU, more virtual devices: "
        'mw.set_platform("cpu", device_count=8) in Python, for a command '
        "--device_count=8\n(--traceback shows where)\n"
    )
    assert not (tmp_path / "run").exists()


def test_command_ended_by_sigterm_before_its_first_step(tmp_path):
    process = start(tmp_path, "MESH_SHAPE = (2, 1)", device_count=2)
    try:
        while "tracing the training program" not in process.stderr.readline():
            assert process.poll() is None
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 0
    assert time.monotonic() - begin < 2
    assert out.endswith(
        "\nStopped by SIGTERM before the first step: this run trained nothing.\n"
    )
    assert saved_steps(tmp_path) == []


def test_command_ended_by_sigterm_goes_on_later(tmp_path):
    params = ("MESH_SHAPE = (2, 1)", "Experiment.num_steps = 1000000")
    process = start(tmp_path, *params, device_count=2)
    try:
        while process.poll() is None and not (tmp_path / "checkpoints/5").exists():
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 0, err
    step = int(re.search("Stopped by SIGTERM: saved training to step (.*) in", out)[1])
    assert saved_steps(tmp_path)[-1] == step
    # Nothing but our own lines and the bar.
    ours = r"\d\d:\d\d:\d\d INFO .*|(training|saving|evaluating) .*|SIGTERM: .*|(  .*)?"
    for line in re.split(r"[\r\n]", err):
        assert re.fullmatch(ours, line), line
    result = train(small_programs(), tmp_path, num_steps=step + 2)
    assert list(result.losses) == [step + 1, step + 2]
