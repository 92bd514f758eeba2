"""The search's winner beside the best of all plans, on models small enough for that.

    python -m benchmarks.search.planted [--models=0,1] [--budget=4] [--anew]

Of each of 20 small models, drawn from a seed, every plan was compiled for TPUs, and its
step estimated: tests/data/planted_plans.json keeps the seconds. The search propagates
plans, and takes the fastest of the few that it compiles. `--anew` compiles what is not
kept, or all that is named with `--models`, and keeps it. That wants libtpu.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator

import numpy as np
from absl import app, flags

from benchmarks.search.planted_models import Planted, planted_models
from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.framework.devices.topology import topology
from meshwright.trainers.planning.search.found.alike import distinct
from meshwright.trainers.planning.search.found.finding import (
    Finder,
    Found,
    Point,
)
from meshwright.trainers.planning.search.found.function_plans import (
    compiled_plan,
    function_plan,
)
from meshwright.trainers.planning.search.found.named_function import NamedFunction

KEPT = pathlib.Path(__file__).parents[2] / "tests" / "data" / "planted_plans.json"

Seconds = dict[str, float | None]
"""By plan, as `key` writes it; None: it does not fit."""


def define_flags() -> None:
    """Called only by this program."""
    flags.DEFINE_list("models", [], "Numbers of models; none: all that are kept.")
    flags.DEFINE_integer("budget", 4, "Plans that a search compiles.", lower_bound=1)
    flags.DEFINE_bool("anew", False, "Compile what is not kept.")


def key(point: Point) -> str:
    """A plan as text, such as `4,2: 1 0 2`."""
    masks = " ".join(map(str, point.masks))
    return f"{','.join(map(str, point.shape))}: {masks}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What a search found.

    Args:
      plans: how many plans there are.
      best: seconds of the best of all, compiled.
      worst: seconds of the worst that fits.
      first: compiled seconds of the plan that propagation has first.
      winner: those of the fastest of the few that the search compiles.
      apart: the mean distance of propagated from compiled seconds.
    """

    plans: int
    best: float
    worst: float
    first: float
    winner: float
    apart: float


class Searched:
    """A model, searched.

    Args:
      model: the model.
    """

    def __init__(self, model: Planted):
        self.model, self.torus = model, topology(model.topology)
        self.named = NamedFunction(model.step, model.args, model.results_like)
        # More axes would have too many plans to compile.
        self.finder = Finder([self.named.step], [1.0], self.torus, most_axes=1)

    def points(self) -> Iterator[Point]:
        """All plans, but those that split two dims of an argument by one axis."""
        for shape in self.finder.shapes:
            rough = self.finder.rough(0, shape)
            masks = np.array(list(itertools.product(*rough.allowed)))
            for row in masks[rough.evaluate(masks).clashes == 0]:
                yield Point(0, shape, tuple(map(int, row)))

    def compiled(self, point: Point) -> float | None:
        """The estimate of a plan's compiled program; None if it does not fit."""
        found = Found(point=point, priced=self.finder.look_up(point).priced)
        plan = function_plan(self.named, self.finder, found)
        compiled = compiled_plan(self.model.step, plan, self.torus)
        return None if compiled is None else compiled.seconds

    def row(self, seconds: Seconds, budget: int) -> Row:
        """The outcome of a search by the seconds of all plans."""
        finder = self.finder
        finder.run([], most=len(seconds))
        ranked = distinct(finder, len(seconds))
        fits = [s for s in seconds.values() if s is not None]
        tried = [seconds[key(found.point)] for found in ranked[:budget]]
        errors = [
            abs(found.priced.seconds / seconds[key(found.point)] - 1)
            for found in ranked
            if seconds[key(found.point)] is not None
        ]
        return Row(
            plans=len(seconds),
            best=min(fits),
            worst=max(fits),
            first=tried[0] or float("inf"),
            winner=min((s for s in tried if s is not None), default=float("inf")),
            apart=float(np.mean(errors)),
        )


def kept() -> dict[str, Seconds]:
    """Compiled seconds of all plans, by the model's name and topology."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def name_of(model: Planted) -> str:
    return f"{model.name} on {model.topology}"


def _compile_all(searched: Searched, seconds: Seconds) -> Iterator[None]:
    for point in searched.points():
        if key(point) not in seconds:
            seconds[key(point)] = searched.compiled(point)
            yield


def main(_) -> None:
    """Prints a row for each model."""
    set_platform("cpu")
    all_kept, models = kept(), planted_models()
    numbers = map(int, flags.FLAGS.models or range(len(models)))
    print("model                                     plans   best us worst first  won")
    for number in numbers:
        model = models[number]
        seconds = all_kept.get(name_of(model), {})
        if flags.FLAGS.anew and flags.FLAGS.models:
            seconds = {}
        if not seconds and not flags.FLAGS.anew:
            continue
        searched = Searched(model)
        if flags.FLAGS.anew:
            all_kept[name_of(model)] = seconds
            for _ in _compile_all(searched, seconds):
                KEPT.write_text(json.dumps(all_kept, indent=0) + "\n")
        row = searched.row(seconds, flags.FLAGS.budget)
        print(
            f"{number:<3}{name_of(model):<40}{row.plans:4}{1e6 * row.best:10.1f}"
            f"{row.worst / row.best:6.1f}{row.first / row.best - 1:+7.1%}"
            f"{row.winner / row.best - 1:+7.1%}  apart {row.apart:.0%}",
            flush=True,
        )


if __name__ == "__main__":
    define_flags()
    app.run(main)
