"""meshwright-train: trains and evaluates what a gin file describes."""

from __future__ import annotations

import sys
import time

import gin
from absl import app, flags, logging

import meshwright.layers
import meshwright.tasks  # noqa: F401 (both register what gin files name)
from meshwright.framework.compiler.jax_bridge import set_platform
from meshwright.trainers import config, loop
from meshwright.trainers.checkpoints import CheckpointError
from meshwright.trainers.experiment import Experiment

_GIN_FILE = flags.DEFINE_multi_string(
    "gin_file", None, "Gin file, by path or by its path under params/; may repeat."
)
_GIN_PARAM = flags.DEFINE_multi_string(
    "gin_param", [], "A gin binding that overrides the files; may repeat."
)
_MODEL_DIR = flags.DEFINE_string(
    "model_dir", None, "Folder of checkpoints and TensorBoard events."
)
_MODE = flags.DEFINE_enum(
    "mode", "train_and_eval", ["train", "eval", "train_and_eval"], "What to do."
)
_PLATFORM = flags.DEFINE_enum(
    "platform", "cpu", ["cpu", "cuda", "tpu"], "Which devices to run on."
)
_DEVICE_COUNT = flags.DEFINE_integer(
    "device_count", None, "Virtual devices on cpu; default: as many as the mesh has."
)
_PROFILE_STEPS = flags.DEFINE_list(
    "profile_steps", None, "FIRST,LAST step to trace into model_dir, for xprof."
)
_TRACEBACK = flags.DEFINE_bool("traceback", False, "Show where an error was raised.")


def build_experiment(
    gin_files: list[str], gin_params: list[str]
) -> tuple[Experiment, str]:
    """The experiment of gin files and bindings, and the configuration in effect.

    Raises:
      ConfigError: see `config.load` and `config.check_all_operative`.
      ValueError: a class refuses its parameters.
    """
    config.load(gin_files, gin_params)
    try:
        experiment = gin.get_configurable(Experiment)()
    except TypeError as error:  # A required parameter that no binding gives.
        raise config.ConfigError(str(error)) from error
    config.check_all_operative()
    return experiment, config.operative_text()


def main(argv: list[str]) -> None:
    """Parses flags and calls."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    try:
        _train(*build_experiment(_GIN_FILE.value, _GIN_PARAM.value))
    except (ValueError, OSError, CheckpointError, loop.TrainingError) as error:
        if _TRACEBACK.value:
            raise
        sys.exit(f"meshwright-train: {error}\n(--traceback shows where)")


def _train(experiment: Experiment, config_text: str) -> None:
    mesh = experiment.plan.mesh
    set_platform(_PLATFORM.value, _DEVICE_COUNT.value or _cpu_devices(mesh.size))
    model_dir = _MODEL_DIR.value
    run = loop.Run(
        model_dir=model_dir,
        config=config_text,
        evaluate=_MODE.value == "train_and_eval",
        profile_steps=_profile_steps(),
    )
    print(f"Mesh: {mesh} ({experiment.partitioner.value}). Logs: {model_dir}")
    for name, value in experiment.task.describe_data().items():
        print(f"  {name}: {value:,.4g}" if value < 1000 else f"  {name}: {value:,.0f}")
    sys.stdout.flush()
    if _MODE.value == "eval":
        print("Held-out:", loop.format_metrics(loop.evaluate_latest(experiment, run)))
        return
    start = time.time()
    result = loop.train_and_evaluate(experiment, run)
    how = "Stopped by a signal and saved" if result.stopped else "Trained"
    print(f"{how} at step {result.step} after {time.time() - start:.0f} s.")
    if result.losses:
        print(f"Training loss: {result.losses[max(result.losses)]:.4f} nats")
    if result.evaluation:
        print("Held-out:", loop.format_metrics(result.evaluation))
    print(f"Logs and checkpoints: {model_dir}\n  tensorboard --logdir {model_dir}")


def _cpu_devices(mesh_size: int) -> int | None:
    return mesh_size if _PLATFORM.value == "cpu" else None


def _profile_steps() -> tuple[int, int] | None:
    if not _PROFILE_STEPS.value:
        return None
    try:
        first, last = (int(step) for step in _PROFILE_STEPS.value)
    except ValueError:
        first, last = 1, 0
    if not 0 <= first <= last:
        raise ValueError(
            f"--profile_steps={','.join(_PROFILE_STEPS.value)} must be FIRST,LAST"
        )
    return first, last


def run() -> None:
    """The console script."""
    flags.mark_flags_as_required(["gin_file", "model_dir"])
    logging.set_verbosity(logging.INFO)
    app.run(main)


if __name__ == "__main__":
    run()
