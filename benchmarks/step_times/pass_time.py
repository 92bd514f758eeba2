"""How often programs are parsed, completed and lowered before XLA compiles them.

    python benchmarks/step_times/pass_time.py [--programs=plain,updates,typed,unet]
        [--rounds=3]

Compiles the trainer's step of four experiments for eight virtual CPU devices: the
default job, `lm/stdlib_tiny.gin` ("plain"); its Transformer under data parallelism,
with all weight updates sharded ("updates"), or with gradients of two microbatches that
are unreduced between them ("typed"); and the 3D U-Net of `seg/synthetic_unet.gin`
("unet").

Counted are the modules that are parsed, completions by Shardy's propagation in this
process, and programs that JAX lowers. Seconds are CPU seconds of all threads, medians
over rounds, each in a new process: up to the program as JAX lowered it, TF's tracing
included, and up to the compiled program. To compare two versions, run each in turns.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from unittest import mock

import jax
from absl import app, flags
from jax.extend.mlir import ir

from meshwright import framework as mw
from meshwright.framework.compiler.stablehlo.shardy.propagation import Propagated
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.step_programs import StepPrograms

_DATA = ["lm/stdlib_tiny.gin", "plans/data.gin"], "MESH_SHAPE = (8,)"
PROGRAMS = {
    "plain": (["lm/stdlib_tiny.gin"], []),
    "updates": (_DATA[0], [_DATA[1], 'Experiment.weight_update_sharding = "all"']),
    "typed": (
        _DATA[0],
        [
            _DATA[1],
            "Experiment.gradient_accumulation_steps = 2",
            'Experiment.weight_update_sharding = "off"',
        ],
    ),
    "unet": (["seg/synthetic_unet.gin"], []),
}
"""Gin files and bindings of the experiments."""
# JAX notifies listeners of this event when the module is lowered and XLA is next.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


@dataclasses.dataclass
class Counts:
    """What has happened on the way to XLA.

    Args:
      parsed: modules that were parsed.
      completed: completions by Shardy's propagation.
      lowered_at: for each program that JAX lowered this process's CPU seconds then.
    """

    parsed: int = 0
    completed: int = 0
    lowered_at: list[float] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Counts what happens within, in this process."""
    counts = Counts()
    parse, complete = ir.Module.parse, Propagated.__init__

    def counting_parse(*args, **kwargs):
        counts.parsed += 1
        return parse(*args, **kwargs)

    def counting_complete(*args, **kwargs):
        counts.completed += 1
        complete(*args, **kwargs)

    def note(event: str, *_, **__) -> None:
        if event == _LOWERED:
            counts.lowered_at.append(time.process_time())

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        with (
            mock.patch.object(ir.Module, "parse", staticmethod(counting_parse)),
            mock.patch.object(Propagated, "__init__", counting_complete),
        ):
            yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile:
    """One compile.

    Args:
      parsed: modules that were parsed.
      completed: completions by Shardy's propagation.
      lowered: programs that JAX lowered.
      before: CPU seconds up to the program as JAX lowered it.
      all: CPU seconds up to the compiled program.
    """

    parsed: int
    completed: int
    lowered: int
    before: float
    all: float


def measure(name: str) -> Compile:
    """Compiles the train step of an experiment, in a process of its own."""
    mw.set_platform("cpu", 8)
    experiment, _ = build_experiment(*PROGRAMS[name])
    programs = StepPrograms(experiment)
    with counting() as counts:
        start = time.process_time()
        programs.main  # noqa: B018  Compiles it.
        end = time.process_time()
    return Compile(
        parsed=counts.parsed,
        completed=counts.completed,
        lowered=len(counts.lowered_at),
        before=counts.lowered_at[-1] - start,
        all=end - start,
    )


HEADER = """\
program  parsed  completed  lowered  before XLA s  all s
--------------------------------------------------------"""


def table_row(name: str, compiles: Sequence[Compile]) -> str:
    """The line below `HEADER`: counts of the first compile, medians of seconds."""
    first = compiles[0]
    before, everything = (
        statistics.median(getattr(c, field) for c in compiles)
        for field in ("before", "all")
    )
    return (
        f"{name:8} {first.parsed:6}  {first.completed:9}  {first.lowered:7}  "
        f"{before:12.2f}  {everything:5.1f}"
    )


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    spawn = multiprocessing.get_context("spawn")
    print(HEADER)
    for name in flags.FLAGS.programs:
        compiles = []
        for _ in range(flags.FLAGS.rounds):
            with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
                compiles.append(pool.submit(measure, name).result())
        print(table_row(name, compiles), flush=True)


if __name__ == "__main__":
    flags.DEFINE_list("programs", [*PROGRAMS], "Programs to compile.")
    flags.DEFINE_integer("rounds", 3, "Compiles of each.", lower_bound=1)
    app.run(main)
