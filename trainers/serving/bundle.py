"""A bundle: the programs of an experiment for machines without TensorFlow.

Its folder holds the programs as `jax.export` makes them: StableHLO of a version that
later jaxlibs read, not partitioned yet, with the shardings of arguments and results. A
manifest names all inputs and outputs; programs hand arrays to each other by these
names:

    init  seed -> state                    shard   state (logical) -> state (stored)
    main  state, batches -> state, metrics unshard state (stored) -> state (logical)
    gather  state (stored) -> weights      eval    weights, batch -> sums

`run_bundle.py`, which is copied in, runs them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import logging
import pathlib
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

import flatbuffers
import jax
import numpy as np
import tensorflow as tf

from meshwright.framework.compiler.program import TracedProgram
from meshwright.framework.modeling.checks import Checked, bounded
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.stored_form import StoredForm
from meshwright.trainers.experiment.batches import CallBatches, eval_batches
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.serving import run_bundle
from meshwright.trainers.startup.messages import log_line
from meshwright.trainers.training.evaluation import sums_over

PLATFORMS = ("cpu", "cuda", "tpu")

log = logging.getLogger("absl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleOptions(Checked):
    """What goes into a bundle.

    Args:
      platforms: the platforms that its programs are lowered for.
      calls: the number of main-program calls that it has batches for; the number of
        held-out batches is the same.
      expected: whether the programs are run here and their results recorded.
      config: the operative gin configuration as text.
    """

    platforms: Sequence[str] = PLATFORMS
    calls: int = bounded(2, at_least=1)
    expected: bool = True
    config: str = ""

    def __post_init__(self):
        super().__post_init__()
        unknown = [name for name in self.platforms if name not in PLATFORMS]
        if unknown or not self.platforms:
            raise ValueError(
                f"platforms {list(self.platforms)}: some of {', '.join(PLATFORMS)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleBatches:
    """The batches of a bundle.

    Args:
      train: for calls of the main program, from the first step on.
      held_out: for evaluations.
    """

    train: Sequence[NestedMap]
    held_out: Sequence[NestedMap]

    @classmethod
    def read(cls, experiment: Experiment, calls: int) -> BundleBatches:
        """Batches for as many calls, and as many held-out ones at most.

        Raises:
          ValueError: the data are refused.
          OSError: there are no data.
        """
        B = experiment.global_batch
        given = CallBatches(experiment, 0, range(B))
        held_out = eval_batches(experiment, range(B), calls)
        return cls(train=list(itertools.islice(given, calls)), held_out=list(held_out))


class _Traced(StepPrograms):
    """The same programs, traced but not compiled."""

    def compile(self, *args, **how) -> TracedProgram:
        return self._trace(*args, **how)


def export_bundle(
    programs: StepPrograms,
    state: NestedMap | None,
    folder: pathlib.Path,
    options: BundleOptions,
    batches: BundleBatches | None = None,
) -> None:
    """Writes a bundle.

    No weights are made here but those of `state`, and for the expected results.

    Args:
      programs: the experiment's; used if results are to be recorded.
      state: nested map of arrays in logical form, to start from; if None, the bundle's
        runner initialises the state.
      folder: an empty folder to write to.
      options: what goes into the bundle.
      batches: those of `options.calls`; None: they are read here.

    Raises:
      LoweringError: a program cannot be lowered.
      OSError: the bundle cannot be written; or as `BundleBatches.read`.
    """
    experiment = programs.experiment
    batches = batches or BundleBatches.read(experiment, options.calls)
    saved = None if state is None else _save_state(folder, state)
    expected = None  # After the state was saved: the first step may donate it.
    if options.expected:
        expected = _expected(programs, state, batches)
    manifest = {
        "format": run_bundle.FORMAT,
        "versions": _versions(),
        "platforms": list(options.platforms),
        "partitioner": experiment.partitioner.value,
        "mesh": _mesh(experiment),
        "step": _step(programs, options.config),
        **_export_programs(experiment, folder, options.platforms),
        "state": saved,
        "batches": _save_arrays(folder, "batches", _stacked("batches", batches.train)),
        "held_out": {
            **_save_arrays(folder, "held_out", _stacked("batch", batches.held_out)),
            "batches": len(batches.held_out),
        },
        "expected": expected,
    }
    shutil.copyfile(run_bundle.__file__, folder / "run_bundle.py")
    _copy_flatbuffers(folder / run_bundle.LIBRARY)
    # The manifest comes last: a bundle without it was not finished.
    text = json.dumps(manifest, indent=1) + "\n"
    (folder / "manifest.json").write_text(text)


def _export_programs(
    experiment: Experiment, folder: pathlib.Path, platforms: Sequence[str]
) -> dict[str, Any]:
    """Writes the programs; returns what the manifest says about them."""
    traced = _Traced(experiment)
    part = "ema" if "ema" in traced.state_specs else "theta"
    initial, step = traced.initial_layout, traced.step_layout
    gather = traced.conversion(step.part(part), traced.plan_layout.part(part))
    state, seed = ("state",), ("seed",)
    boundary = {
        "init": (traced.init, seed, state),
        "shard": (traced.conversion(initial, step), state, state),
        "main": (traced.traced_main, ("state", "batches"), ("",)),
        "unshard": (traced.conversion(step, traced.saved_layout), state, state),
        "gather": (gather, (f"state.{part}",), ("weights",)),
        "eval": (traced.eval, ("weights", "batch"), ("sums",)),
    }
    (folder / "programs").mkdir()
    programs = {}
    for name, (program, inputs, outputs) in boundary.items():
        start = time.perf_counter()
        artifact = program.export(platforms)
        given = program.written
        programs[name] = {
            **_write(folder, f"programs/{name}.jax_export", artifact),
            "donated": list(program.target.donate),
            "inputs": _leaves(inputs, given.signature.inputs, given.in_forms),
            "outputs": _leaves(outputs, (given.signature.outputs,), given.out_forms),
        }
        log.info(
            "%s: %.1f MB in %.0f s",
            name,
            len(artifact) / 1e6,
            time.perf_counter() - start,
        )
    version = jax.export.deserialize(bytearray(artifact)).calling_convention_version
    return {"calling_convention": version, "programs": programs}


def _leaves(
    names: Sequence[str], nests: Sequence[Any], forms: Sequence[StoredForm | None]
) -> list[dict[str, Any]]:
    """What the manifest says about a program's arguments, or its results."""
    pairs = []
    for name, nest in zip(names, nests, strict=True):
        is_leaf = isinstance(nest, tf.TensorSpec)
        leaves = [("", nest)] if is_leaf else NestedMap(nest).items_by_path()
        pairs += [(".".join(filter(None, (name, p))), spec) for p, spec in leaves]
    return [
        {
            "name": name,
            "shape": list(spec.shape),
            "logical_shape": list(spec.shape if form is None else form.shape),
            "dtype": spec.dtype.name,
            "sharding": "left to the compiler" if form is None else str(form.border),
            "dims": None if form is None else [list(axes) for axes in form.border.dims],
        }
        for (name, spec), form in zip(pairs, forms, strict=True)
    ]


def _copy_flatbuffers(folder: pathlib.Path) -> None:
    """Copies flatbuffers: `jax.export` reads programs with it, but jax does not bring
    it.
    """
    ignored = shutil.ignore_patterns("__pycache__")
    source = pathlib.Path(flatbuffers.__file__).parent
    shutil.copytree(source, folder / "flatbuffers", ignore=ignored)
    terms = importlib.metadata.metadata("flatbuffers")["License"]
    note = f"flatbuffers {flatbuffers.__version__}, {terms}, by Google; as released.\n"
    (folder / "README").write_text(note)


def _stacked(name: str, batches: Sequence[NestedMap]) -> dict[str, np.ndarray]:
    return {
        f"{name}.{path}": np.stack([batch.get_path(path) for batch in batches])
        for path, _ in batches[0].items_by_path()
    }


def _expected(
    programs: StepPrograms,
    logical: NestedMap | None,
    batches: BundleBatches,
) -> dict[str, Any]:
    """The results of the programs on these batches, computed here."""
    if logical is None:
        state = TrainState.initial(programs)
    else:
        state = TrainState(programs, logical)
    log_line(
        "compiling and running the programs on %d batches, for the results that "
        "--check compares with (--noexpected leaves them out)",
        len(batches.train),
    )

    def evaluated() -> dict[str, Any]:
        rows = range(programs.experiment.global_batch)
        totals = sums_over(programs, state.weights(), batches.held_out, rows)
        return {f"sums.{path}": value.tolist() for path, value in totals.items()}

    start, losses = evaluated(), []
    for batch in batches.train:
        out = programs.main(state.stored(), batch)
        state.update(out["state"])
        losses += np.asarray(out["metrics"].loss, np.float64).tolist()
    device = jax.default_backend()
    return {"platform": device, "start": start, "losses": losses, "end": evaluated()}


def _save_state(folder: pathlib.Path, state: NestedMap) -> dict[str, Any]:
    """Writes a file for each leaf, one after another."""
    (folder / "state").mkdir()
    files = {}
    for path, leaf in state.items_by_path():
        file = f"state/state.{path}.npy"
        np.save(folder / file, np.asarray(leaf), allow_pickle=False)
        files[f"state.{path}"] = _entry(folder, file)
    return {"files": files}


def _save_arrays(
    folder: pathlib.Path, name: str, arrays: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    np.savez(folder / f"{name}.npz", **arrays)
    return _entry(folder, f"{name}.npz")


def _write(folder: pathlib.Path, file: str, content: bytes) -> dict[str, Any]:
    (folder / file).write_bytes(content)
    return _entry(folder, file)


def _entry(folder: pathlib.Path, file: str) -> dict[str, Any]:
    """What the manifest says about a file."""
    with (folder / file).open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {"file": file, "bytes": (folder / file).stat().st_size, "sha256": digest}


def _mesh(experiment: Experiment) -> dict[str, Any]:
    mesh = experiment.plan.mesh
    return {
        "axes": list(mesh.axis_names),
        "shape": list(mesh.shape),
        "devices": mesh.size,
        "device_ids": None if mesh.device_ids is None else list(mesh.device_ids),
    }


def _step(programs: StepPrograms, config: str) -> dict[str, Any]:
    """What the manifest says about a step."""
    experiment = programs.experiment
    B = experiment.global_batch
    return {
        "task": type(experiment.task).__name__,
        "seed": programs.seed().tolist(),
        "global_batch": B,
        "steps_per_loop": experiment.steps_per_loop,
        "activation_dtype": experiment.activation_dtype.name,
        "weights": sum(spec.size for spec in programs.weights.leaves()),
        "tokens": experiment.task.tokens(B),
        "model_flops": experiment.task.train_flops(B),
        "config": config,
    }


def _versions() -> dict[str, str]:
    names = ("meshwright", "jax", "jaxlib", "tensorflow", "numpy")
    versions = {"python": platform.python_version()}
    return versions | {name: importlib.metadata.version(name) for name in names}
