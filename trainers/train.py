"""meshwright-train: trains and evaluates what a gin file describes."""

from __future__ import annotations

import signal
import sys
import time

from absl import flags

from meshwright.framework.compiler.jax_bridge import jax_mesh, set_platform
from meshwright.trainers import loop, mains
from meshwright.trainers.checkpoints import CheckpointError
from meshwright.trainers.experiment import Experiment
from meshwright.trainers.programs import Programs

_MODEL_DIR = flags.DEFINE_string(
    "model_dir", None, "Folder of checkpoints and TensorBoard events."
)
_MODE = flags.DEFINE_enum(
    "mode", "train_and_eval", ["train", "eval", "train_and_eval"], "What to do."
)
_PLATFORM = flags.DEFINE_enum(
    "platform", "cpu", ["cpu", "cuda", "tpu"], "Which devices to run on."
)
_PROFILE_STEPS = flags.DEFINE_list(
    "profile_steps", None, "FIRST,LAST step to trace into model_dir, for xprof."
)


def main(argv: list[str]) -> int | None:
    """Parses flags and calls; returns the exit status."""
    errors = (CheckpointError, loop.TrainingError, ImportError)
    return mains.call("meshwright-train", argv, _run, errors)


def _run(experiment: Experiment, config_text: str) -> int | None:
    mesh = experiment.plan.mesh
    set_platform(_PLATFORM.value, mains.DEVICE_COUNT.value or _cpu_devices(mesh.size))
    jax_mesh(mesh)  # Too large a mesh is told of at once.
    programs = Programs(experiment)
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
        print("Held-out:", loop.format_metrics(loop.evaluate_latest(programs, run)))
        return None
    start = time.time()
    result = loop.train_and_evaluate(programs, run)
    _print_result(result, time.time() - start)
    return mains.INTERRUPTED if result.stop == signal.SIGINT else None


def _print_result(result: loop.TrainResult, seconds: float) -> None:
    how = "Trained"
    if result.stop is not None:
        how = f"Stopped by {signal.Signals(result.stop).name}: saved training"
    print(f"{how} to step {result.step} in {seconds:.0f} s.")
    if result.losses:
        print(f"Training loss: {result.losses[result.step]:.4f} nats")
    if result.evaluation and result.stop is None:
        print("Held-out:", loop.format_metrics(result.evaluation))
    model_dir = _MODEL_DIR.value
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
    if not 1 <= first <= last:
        raise ValueError(
            f"--profile_steps={','.join(_PROFILE_STEPS.value)} must be FIRST,LAST: two "
            "step numbers, from 1"
        )
    return first, last


def run() -> None:
    """The console script."""
    mains.run(main, ["gin_file", "model_dir"])


if __name__ == "__main__":
    run()
