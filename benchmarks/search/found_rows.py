"""The best plan found from no plan file, beside the paper's compiled the same way.

    python -m benchmarks.search.found_rows --rows=3_32x8 [--propagated=1000]
        [--budget=4] [--print_only]

For a row of GSPMD's tables the space is built from the model alone, and searched at the
paper's batch and on as many cores; the paper's plan is no starting point. The best are
compiled, and the paper's beside them, each in its best device order. Beside pipelines
come plans for the same layers without a pipeline. What comes out is
kept in tests/data/found_rows.json. Wants libtpu; seconds of search are CPU seconds,
without those of plans that the cache knew before.
"""

from __future__ import annotations

import json
import pathlib
import resource
import time
from collections.abc import Iterator
from typing import Any

from absl import app, flags

from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.framework.devices.topology import topology
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.planning.search.found.found_plans import (
    PlanFinder,
    table_text,
)
from meshwright.trainers.planning.search.found.joined import kept_finder
from meshwright.trainers.planning.search.plan_cache import PlanCache, default_folder
from meshwright.trainers.planning.search.search import Compile
from meshwright.trainers.planning.search.search_screen import SearchSpace
from meshwright.trainers.planning.search.search_space import (
    AS_CONFIGURED,
    Candidate,
    NamedPlan,
    configured,
    misfit,
    more_names,
)
from meshwright.trainers.planning.search.search_variants import staged

KEPT = pathlib.Path(__file__).parents[2] / "tests" / "data" / "found_rows.json"
# Of so many times the plans that are to be compiled some may be too large.
_REFUSED = 4
SLICES = {
    2: "1x1",
    4: "1x2",
    8: "2x2",
    16: "2x4",
    32: "4x4",
    64: "4x8",
    128: "8x8",
    256: "8x16",
    512: "16x16",
    2048: "32x32",
}


def define_flags() -> None:
    """Called only by this program."""
    flags.DEFINE_list("rows", [], "Rows, as in params/paper/tableROW.gin.")
    flags.DEFINE_integer("propagated", 1000, "Plans propagated.", lower_bound=1)
    flags.DEFINE_integer("budget", 4, "Found plans compiled, that fit.", lower_bound=1)
    flags.DEFINE_string("cache_dir", None, "Of compiled results, as of a search.")
    flags.DEFINE_bool("print_only", False, "Print what is kept.")


def space_of(row: str) -> SearchSpace:
    """The space of a row: its own batch, on as many cores of TPU v3."""
    file = f"paper/table{row}.gin"
    experiment, _ = build_experiment([file], [])
    plan = NamedPlan(name=AS_CONFIGURED, gin_file=None, tables=experiment.plan)
    return SearchSpace(
        experiment=experiment,
        gin_files=(file,),
        gin_params=(),
        torus=topology(f"v3:{SLICES[experiment.plan.mesh.size]}"),
        plans=(plan,),
        batches=(experiment.global_batch,),
        more_names=more_names(experiment),
    )


def compiled(space: SearchSpace, candidate: Candidate, cache: PlanCache) -> dict:
    """What is kept of a compiled candidate."""
    result = Compile(space, candidate, cache).result()
    tables = candidate.plan.on(candidate.mesh)
    return {
        "mesh": list(candidate.mesh),
        "recomputed": str(candidate.policy),
        "plan": table_text(tables),
        "s": result.seconds,
        "gb": result.peak and result.peak / 2**30,
        "refusal": result.refusal,
    }


def searched(row: str, most: int, budget: int, cache: PlanCache) -> dict[str, Any]:
    """Searches for a row's plan; without a pipeline where the paper has one."""
    papers_space, begun = space_of(row), _cpu()
    space = papers_space
    if papers_space.stages:
        (space,) = staged(papers_space, stages=(1,), repeats=(1,))
    clock = time.monotonic()
    # What was propagated is kept before anything is compiled.
    with kept_finder(space, cache) as finder:
        known = len(finder.finder.known)
        finder.find([], most=most, tell=lambda progress: None)
    took = _cpu() - begun
    progress = finder.finder.progress
    found: list[dict[str, Any]] = []
    for candidate, plan in finder.candidates(_REFUSED * budget):
        if sum(program["s"] is not None for program in found) == budget:
            break
        if misfit(space.experiment, candidate, space.torus) is None:
            made = compiled(space, candidate, cache)
            found.append({**made, "propagated_s": plan.priced.seconds})
    paper = configured(papers_space.experiment)
    papers = None if papers_space.stages else finder.look_up(paper)
    return {
        "row": row,
        "topology": space.torus.name,
        "considered": progress.considered,
        "propagated": progress.propagated,
        "known_before": known,
        "propagation_cpu_s": round(took, 1),
        "cpu_s": round(_cpu() - begun, 1),
        "wall_s": round(time.monotonic() - clock, 1),
        "best": list(_best(finder)),
        "found": found,
        "paper": {
            **compiled(papers_space, paper, cache),
            "propagated_s": papers and papers.priced.seconds,
        },
    }


def _best(finder: PlanFinder) -> Iterator[dict[str, Any]]:
    """By propagation the best that fits of each mesh and recomputation."""
    seen = set()
    for found in finder.finder.ranked():
        key = found.point.step, found.point.shape
        if key not in seen and finder.finder.fits(found):
            seen.add(key)
            yield {
                "mesh": list(found.point.shape),
                "recomputed": str(finder.choices[found.point.step].policy),
                "s": round(found.priced.seconds, 4),
                "gb": round(found.priced.memory / 2**30, 1),
            }


def best_of(kept: dict[str, Any]) -> dict[str, Any] | None:
    """The fastest of the compiled plans of a row; None if all were refused."""
    timed = [found for found in kept["found"] if found["s"] is not None]
    return min(timed, key=lambda found: found["s"], default=None)


def table_line(kept: dict[str, Any]) -> str:
    """The row's line in docs/reference/planning/search.md."""
    best, paper = best_of(kept), kept["paper"]["s"]
    if best is None:
        found, gain, plan = "none fits", "", ""
    else:
        gain = f"{1 - best['s'] / paper:.1%}"
        found, plan = f"{best['s']:.3f}", _in_words(best)
    cells = [
        kept["row"].replace("_", ": ", 1),
        f"{kept['considered']:,}",
        kept["propagated"],
        len(kept["found"]) + 1,
        f"{kept['cpu_s']:.0f}" + " and more" * bool(kept.get("known_before")),
        found,
        f"{paper:.3f}",
        gain,
        plan,
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _in_words(found: dict[str, Any]) -> str:
    """A compiled plan in a line: its mesh, recomputation and tables."""
    head, *rows = found["plan"]
    middle = head.index("weights"), head.index("activations")
    tables = {"weights": {}, "activations": {}}
    for row in rows:
        name = row.split()[0]
        cells = row[middle[0] : middle[1]].strip(), row[middle[1] :].strip()
        for table, axes in zip(tables.values(), cells, strict=True):
            if axes:
                table.setdefault(axes, []).append(name)
    parts = [
        f"{table} "
        + ", ".join(f"{'/'.join(n)} {axes}" for axes, n in sorted(by.items()))
        for table, by in tables.items()
    ]
    mesh = ",".join(map(str, found["mesh"]))
    return f"({mesh}), {found['recomputed']}: {'; '.join(parts)}"


def _cpu() -> float:
    """CPU seconds of this process and of those that compiled for it."""
    both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, both))


def print_row(kept: dict[str, Any]) -> None:
    """A line for the row, one for each compiled plan, and the best one's table."""
    paper = kept["paper"]
    print(
        f"{kept['row']} on {kept['topology']}: {kept['considered']} considered, "
        f"{kept['propagated']} propagated in {kept['propagation_cpu_s']} s, "
        f"{len(kept['found'])} compiled; {kept['cpu_s']} CPU s, {kept['wall_s']} s"
    )
    for best in kept["best"][:6]:
        print(
            f"  by propagation {best['mesh']!s:<14}{best['recomputed']:<12}"
            f"{best['s']:8.3f} s, {best['gb']:.1f} GiB"
        )
    for one in [paper, *kept["found"]]:
        name = "paper" if one is paper else "found"
        price = one["propagated_s"] and f"{one['propagated_s']:8.3f}"
        if one["s"] is None:
            print(f"  {name} {one['mesh']} {one['recomputed']}: {one['refusal']}")
            continue
        print(
            f"  {name} {one['mesh']!s:<14}{one['recomputed']:<12}{one['s']:8.3f} s "
            f"({one['s'] / paper['s'] - 1:+.1%}), propagated {price}, "
            f"{one['gb']:.1f} GiB"
        )
    if best := best_of(kept):
        print("\n".join(best["plan"]))


def main(_) -> None:
    """Searches for the rows of the flag, keeps and prints them."""
    set_platform("cpu")
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    cache = PlanCache(folder=pathlib.Path(flags.FLAGS.cache_dir or default_folder()))
    for row in flags.FLAGS.rows or kept:
        if not flags.FLAGS.print_only:
            given = flags.FLAGS.propagated, flags.FLAGS.budget
            kept[row] = searched(row, *given, cache)
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")
        print_row(kept[row])


if __name__ == "__main__":
    define_flags()
    app.run(main)
