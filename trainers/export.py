"""meshwright-export: a SavedModel for TensorFlow, a bundle for machines with jax alone.

The SavedModel has canonical weights and takes batches of any size. The bundle holds the
training's own programs, sharded for the experiment's mesh, and a runner for them that
needs jax and numpy alone.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
import time

import numpy as np
from absl import flags

from meshwright.framework.compiler.xla.jax_bridge import jax_mesh
from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.framework.nested_map import NestedMap
from meshwright.trainers import cli
from meshwright.trainers.checkpoints.checkpoints import (
    Access,
    CheckpointError,
    Checkpoints,
)
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.exporting.bundle import PLATFORMS, BundleOptions, export_bundle
from meshwright.trainers.exporting.saved_model import ExportError, export_saved_model
from meshwright.trainers.training import loop

SAVED_MODEL, BUNDLE = "saved_model", "bundle"

_MODEL_DIR = flags.DEFINE_string(
    "model_dir",
    None,
    "Folder of the training whose checkpoint is exported; a bundle can do without.",
    allow_override=True,  # meshwright-train has one too.
)
_STEP = flags.DEFINE_integer("step", None, "Of the checkpoint; default: the newest.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder to make and to write to.")
_WHAT = flags.DEFINE_list(
    "what", [SAVED_MODEL, BUNDLE], "What to export: saved_model, bundle or both."
)
_PLATFORMS = flags.DEFINE_list(
    "platforms", [*PLATFORMS], "Platforms that the bundle's programs are lowered for."
)
_CALLS = flags.DEFINE_integer(
    "calls", 2, "How many calls of the main program the bundle has batches for."
)
_EXPECTED = flags.DEFINE_bool(
    "expected",
    True,
    "Train on the bundle's batches here, for the runner's --check to compare with.",
)


def main(argv: list[str]) -> int | None:
    """Parses flags and calls; returns the exit status."""
    errors = (CheckpointError, ExportError, ImportError)
    return cli.call("meshwright-export", argv, _run, errors)


def _run(experiment: Experiment, config_text: str) -> None:
    wanted, output = _wanted(), _output()
    options = BundleOptions(
        platforms=_PLATFORMS.value,
        calls=_CALLS.value,
        expected=_EXPECTED.value,
        config=config_text,
    )
    mesh = experiment.plan.mesh
    set_platform("cpu", cli.DEVICE_COUNT.value or mesh.size)
    jax_mesh(mesh)  # Too large a mesh is told of at once.
    programs = StepPrograms(experiment)
    state = None if _MODEL_DIR.value is None else _restored(programs)
    # Whole or not at all: written elsewhere, then renamed.
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=".export", dir=output.parent))
    try:
        if SAVED_MODEL in wanted:
            start = time.time()
            export_saved_model(experiment, _weights(state), scratch / SAVED_MODEL)
            _tell(SAVED_MODEL, scratch, output, start)
        if BUNDLE in wanted:
            start = time.time()
            (scratch / BUNDLE).mkdir()
            export_bundle(programs, state, scratch / BUNDLE, options)
            _tell(BUNDLE, scratch, output, start)
        scratch.chmod(0o755)
        os.rename(scratch, output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if BUNDLE in wanted:
        print(f"  python {output / BUNDLE / 'run_bundle.py'} --steps=10")


def _wanted() -> list[str]:
    """What to export.

    Raises:
      ValueError: something else, or no weights for it.
    """
    wanted, known = _WHAT.value, (SAVED_MODEL, BUNDLE)
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ValueError(
            f"--what={','.join(wanted)} must be {SAVED_MODEL}, {BUNDLE} or both"
        )
    if SAVED_MODEL in wanted and _MODEL_DIR.value is None:
        raise ValueError(
            "a SavedModel has weights: give the training's --model_dir, or "
            f"--what={BUNDLE}, which can initialise them where it runs"
        )
    return wanted


def _output() -> pathlib.Path:
    """The folder to make, in one that can be written.

    Raises:
      ValueError: it is there already, or cannot be made.
    """
    path = pathlib.Path(_OUTPUT.value).expanduser().absolute()
    if path.exists():
        raise ValueError(f"--output={_OUTPUT.value} is there already: name another one")
    if reason := cli.writable(path.parent):
        raise ValueError(
            f"--output={_OUTPUT.value} cannot be made ({reason}): name another one"
        )
    return path


def _restored(programs: StepPrograms) -> NestedMap:
    """The state of the checkpoint that the flags name, in logical form."""
    folder = loop.Run(model_dir=_MODEL_DIR.value).checkpoint_dir
    with Checkpoints(folder, access=Access.READ) as checkpoints:
        return checkpoints.restore(_STEP.value, TrainState.abstract(programs))


def _weights(state: NestedMap) -> NestedMap:
    """Host arrays of the weights that evaluation reads."""
    return (state.ema if "ema" in state else state.theta).map(np.asarray)


def _tell(what: str, scratch: pathlib.Path, output: pathlib.Path, start: float) -> None:
    files = [path for path in (scratch / what).rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    print(f"{output / what}: {size:,.1f} MB in {time.time() - start:.0f} s", flush=True)


def run() -> None:
    """The console script."""
    cli.run(main, ["gin_file", "output"])


if __name__ == "__main__":
    run()
