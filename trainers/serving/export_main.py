"""What meshwright-export does once TensorFlow is imported."""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
import time

import numpy as np

from meshwright.framework.compiler.xla.jax_mesh import jax_mesh
from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.keras.keras_model import KerasModel
from meshwright.trainers import cli
from meshwright.trainers.checkpoints.checkpoints import (
    Access,
    CheckpointError,
    Checkpoints,
)
from meshwright.trainers.checkpoints.published.published_export import (
    export_published,
)
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.serving.bundle import (
    BundleBatches,
    BundleOptions,
    export_bundle,
)
from meshwright.trainers.serving.saved_model import ExportError, export_saved_model
from meshwright.trainers.startup import compile_cache, export_flags, files
from meshwright.trainers.startup.export_flags import (
    BUNDLE,
    KERAS,
    SAFETENSORS,
    SAVED_MODEL,
)
from meshwright.trainers.training import loop
from meshwright.trainers.training.saved_config import warn_of_other_rows


def _run(experiment: Experiment, config_text: str) -> None:
    wanted, output = export_flags.wanted(), _output()
    options = BundleOptions(
        platforms=export_flags.PLATFORMS.value,
        calls=export_flags.CALLS.value,
        expected=export_flags.EXPECTED.value,
        config=config_text,
    )
    mesh = experiment.plan.mesh
    compile_cache.use(cli.COMPILE_CACHE.value)
    set_platform("cpu", cli.DEVICE_COUNT.value or mesh.size)
    jax_mesh(mesh)  # Too large a mesh fails at once.
    programs = StepPrograms(experiment)
    is_trained = export_flags.MODEL_DIR.value is not None
    state = _restored(programs, config_text) if is_trained else None
    # What the data refuse is said before anything is written.
    batches = _batches(experiment, options.calls) if BUNDLE in wanted else None
    # All or nothing: written elsewhere, then renamed.
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=".export", dir=output.parent))
    try:
        if SAVED_MODEL in wanted:
            start = time.time()
            export_saved_model(
                experiment,
                _weights(state),
                scratch / SAVED_MODEL,
                file_bytes=_file_bytes(),
            )
            _tell(SAVED_MODEL, scratch, output, start)
        if KERAS in wanted:
            _save_keras(experiment, _weights(state), scratch)
            print(output / "model.keras", flush=True)
        if SAFETENSORS in wanted:
            start = time.time()
            _save_safetensors(experiment, _weights(state), scratch / SAFETENSORS)
            _tell(SAFETENSORS, scratch, output, start)
        if BUNDLE in wanted:
            start = time.time()
            (scratch / BUNDLE).mkdir()
            export_bundle(programs, state, scratch / BUNDLE, options, batches)
            _tell(BUNDLE, scratch, output, start)
        scratch.chmod(0o755)
        os.rename(scratch, output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if BUNDLE in wanted:
        print(f"  python {output / BUNDLE / 'run_bundle.py'} --steps=10")


def _batches(experiment: Experiment, calls: int) -> BundleBatches:
    try:
        return BundleBatches.read(experiment, calls)
    except (ValueError, OSError) as error:
        raise ExportError(
            f"a bundle has batches of the task's data: {error}; or export "
            f"--what={SAVED_MODEL} --model_dir=FOLDER, which needs no data but the "
            "checkpoint of a training"
        ) from error


def _save_keras(
    experiment: Experiment, weights: NestedMap, folder: pathlib.Path
) -> None:
    """Writes a KerasModel's model with its weights as `model.keras`.

    Raises:
      ExportError: the task is of another kind.
    """
    task = experiment.task
    if not isinstance(task, KerasModel):
        raise ExportError(
            f"{type(task).__name__} is no KerasModel, so that --what=keras has nothing "
            "to write: export a saved_model or a bundle"
        )
    task.filled(weights).save(folder / "model.keras")


def _save_safetensors(
    experiment: Experiment, weights: NestedMap, folder: pathlib.Path
) -> None:
    folder.mkdir()
    export_published(
        experiment.task,
        weights,
        folder,
        family=export_flags.FAMILY.value,
        mapping=export_flags.MAPPING.value,
        dtype=export_flags.DTYPE.value,
        file_bytes=_file_bytes(),
    )


def _file_bytes() -> int:
    return export_flags.FILE_MEGABYTES.value * 10**6


def _output() -> pathlib.Path:
    """The folder to make, whose parent can be written.

    Raises:
      ValueError: the folder exists already, or cannot be made.
    """
    path = pathlib.Path(export_flags.OUTPUT.value).expanduser().absolute()
    if path.exists():
        raise ValueError(
            f"--output={export_flags.OUTPUT.value} is there already: name another "
            "folder"
        )
    if reason := files.writable(path.parent):
        raise ValueError(
            f"--output={export_flags.OUTPUT.value} cannot be made ({reason}): name "
            "another folder"
        )
    return path


def _restored(programs: StepPrograms, config_text: str) -> NestedMap:
    """The state of the checkpoint that the flags name, in logical form."""
    folder = loop.Run(model_dir=export_flags.MODEL_DIR.value).checkpoint_dir
    how = {"orders": programs.layer_orders, "config": config_text}
    with Checkpoints(folder, access=Access.READ, **how) as checkpoints:
        state = checkpoints.restore(
            export_flags.STEP.value, TrainState.abstract(programs)
        )
        task = programs.experiment.task
        metadata = checkpoints.metadata(int(np.asarray(state.step)))
        warn_of_other_rows(task, metadata)
        # Where texts start and end is part of what decodes them.
        vocabulary = getattr(task, "subwords", None)
        if vocabulary is not None and vocabulary.model_file:
            task.check_vocabulary(metadata.get("batches") or {})
        return state


def _weights(state: NestedMap) -> NestedMap:
    """Host arrays of the weights that evaluation reads."""
    return (state.ema if "ema" in state else state.theta).map(np.asarray)


def _tell(what: str, scratch: pathlib.Path, output: pathlib.Path, start: float) -> None:
    files = [path for path in (scratch / what).rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    print(f"{output / what}: {size:,.1f} MB in {time.time() - start:.0f} s", flush=True)


COMMAND = cli.Command(run=_run, errors=(CheckpointError, ExportError, ImportError))
