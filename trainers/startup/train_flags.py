"""The flags of meshwright-train."""

from __future__ import annotations

from absl import flags

from meshwright.trainers.startup import files, process_flags

MODEL_DIR = flags.DEFINE_string(
    "model_dir",
    None,
    "Folder of checkpoints and TensorBoard events; only --dry_run needs none.",
)
MODE = flags.DEFINE_enum(
    "mode", "train_and_eval", ["train", "eval", "train_and_eval"], "What to do."
)
DRY_RUN = flags.DEFINE_bool(
    "dry_run",
    False,
    "Build the model and trace its training program for the mesh, report on it, "
    "and end: nothing is read, compiled or written.",
)
PLATFORM = flags.DEFINE_enum(
    "platform", "cpu", ["cpu", "cuda", "tpu"], "Which devices to run on."
)
PROFILE_STEPS = flags.DEFINE_list(
    "profile_steps", None, "FIRST,LAST step to trace into model_dir, for xprof."
)
PROGRAM_PAGE = flags.DEFINE_bool(
    "program_page",
    True,
    "Leave the program's plan and page in model_dir, for TensorBoard's tab Meshwright.",
)
STANDSTILL = flags.DEFINE_float(
    "standstill_seconds",
    60.0,
    "Seconds of CPU devices waiting for each other, while none of XLA's threads runs, "
    "after which the process says so and ends; 0: never.",
    lower_bound=0,
)
STOPPED_STATUS = flags.DEFINE_integer(
    "stopped_status",
    0,
    "Exit status of a training that SIGTERM stopped before its last step. Use a "
    "nonzero status with schedulers that do not restart successful jobs.",
    lower_bound=0,
    upper_bound=255,
)


def profile_steps() -> tuple[int, int] | None:
    """First and last step to trace, None for none.

    Raises:
      ValueError: the flag does not have two step numbers.
    """
    if not PROFILE_STEPS.value:
        return None
    try:
        first, last = (int(step) for step in PROFILE_STEPS.value)
    except ValueError:
        first, last = 1, 0
    if not 1 <= first <= last:
        raise ValueError(
            f"--profile_steps={','.join(PROFILE_STEPS.value)} must be FIRST,LAST: two "
            "step numbers, from 1"
        )
    return first, last


def check() -> None:
    """Refuses flags that are wrong, before anything is imported.

    Raises:
      ValueError: see `profile_steps` and `process_flags.check`; or the folder to train
        in is not named or cannot be written, or that to evaluate has no checkpoints.
    """
    if not MODEL_DIR.value and not DRY_RUN.value:
        raise ValueError(
            "--model_dir is required, such as --model_dir=logs/stdlib_tiny; only "
            "--dry_run needs none"
        )
    profile_steps()
    process_flags.check(PLATFORM.value)
    if MODE.value == "eval":
        files.check_saved(MODEL_DIR)
    elif not DRY_RUN.value:
        files.check_folder(MODEL_DIR)
