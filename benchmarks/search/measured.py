"""Steps measured on eight virtual CPU devices: a search's winner and the shipped plan.

    python -m benchmarks.search.measured [--jobs=lm/stdlib_tiny.gin] [--rounds=8]

The search is for eight cores of a TPU, as it prices no CPU: with propagation and
`--budget` compiled programs, as `meshwright-plan --search`. Both plans then train on
random numbers in one process, in turns, two calls of `steps_per_loop` steps each; a
ratio is the winner's seconds over the shipped plan's in the same round. On a busy
machine trust CPU seconds more than the clock. Wants libtpu.
"""

from __future__ import annotations

import pathlib
import statistics
import time
from collections.abc import Callable

import numpy as np
from absl import app, flags

from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.framework.devices.topology import topology
from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.search.plan_cache import PlanCache, default_folder
from meshwright.trainers.planning.search.search import RankedCandidate, search
from meshwright.trainers.planning.search.search_screen import SearchSpace
from meshwright.trainers.planning.search.search_space import configured

_JOBS = ["lm/stdlib_tiny.gin", "rec/synthetic_ncf.gin", "image/synthetic_resnet.gin"]
_ON = "v3:2x2"
_CALLS = 2


def define_flags() -> None:
    """Called only by this program."""
    flags.DEFINE_list("jobs", _JOBS, "Gin files.")
    flags.DEFINE_integer("rounds", 8, "Turns of each program.", lower_bound=1)
    flags.DEFINE_integer("propagated", 300, "Plans propagated.", lower_bound=1)
    flags.DEFINE_integer("budget", 4, "Programs compiled.", lower_bound=1)
    flags.DEFINE_string("cache_dir", None, "Of compiled results, as of a search.")


def winner_of(job: str, experiment: Experiment) -> RankedCandidate:
    """The winner of a search for a job, on as many cores of a TPU."""
    space = SearchSpace(
        experiment=experiment,
        gin_files=(job,),
        gin_params=(),
        torus=topology(_ON),
        plans=(configured(experiment).plan,),
        batches=(experiment.global_batch,),
    )
    cache = PlanCache(folder=pathlib.Path(flags.FLAGS.cache_dir or default_folder()))
    budget, most = flags.FLAGS.budget, flags.FLAGS.propagated
    return search(space, cache=cache, budget=budget, jobs=1, propagated=most).ranked[0]


def trained(experiment: Experiment) -> Callable[[], np.ndarray]:
    """A call of a training program on random numbers; it returns losses."""
    programs = StepPrograms(experiment)
    state, random = TrainState.initial(programs), np.random.default_rng(0)

    def numbers(spec):
        ints = random.integers(0, 2, spec.shape)
        values = random.random(spec.shape) if spec.dtype.is_floating else ints
        return values.astype(spec.dtype.as_numpy_dtype)

    batches: NestedMap = programs.abstract_batches().map(numbers)

    def call() -> np.ndarray:
        out = programs.main(state.stored(), batches)
        state.update(out["state"])
        return np.asarray(out["metrics"].loss)

    return call


def ratios(
    winner: Callable[[], object], shipped: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """Ratios of CPU seconds, and of seconds by the clock, of each round."""
    cpu, wall = [], []
    for number in range(rounds):
        took = {}
        pair = [("winner", winner), ("shipped", shipped)]
        for name, call in pair if number % 2 else pair[::-1]:
            before = time.process_time(), time.monotonic()
            for _ in range(_CALLS):
                call()
            took[name] = time.process_time() - before[0], time.monotonic() - before[1]
        for kind, into in enumerate((cpu, wall)):
            into.append(took["winner"][kind] / took["shipped"][kind])
    return cpu, wall


def main(_) -> None:
    """Prints a row for each job."""
    set_platform("cpu", 8)
    print("job                       estimate, of TPUs     CPU s  range        clock")
    for job in flags.FLAGS.jobs:
        experiment, _ = build_experiment([job], [])
        found = winner_of(job, experiment)
        best, _ = build_experiment([job], list(found.bindings()))
        calls = trained(best), trained(experiment)
        losses = [call() for call in calls]
        cpu, wall = ratios(*calls, flags.FLAGS.rounds)
        print(
            f"{job:<26}{found.promising.candidate}: {1e3 * found.result.seconds:.3g} ms"
            f"  {statistics.median(cpu):.3f}  {min(cpu):.3f} to {max(cpu):.3f}"
            f"  {statistics.median(wall):.3f}  first losses {losses[0].flat[0]:.4f},"
            f" {losses[1].flat[0]:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    define_flags()
    app.run(main)
