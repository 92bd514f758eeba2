"""What propagation alone says of the papers' plans, beside what the compiler says.

    python -m benchmarks.search.propagated_rows [--table=2 --table=3]

The second sieve of a search prices plans without compiling them
(docs/reference/planning/search.md, Search). Here it prices those of GSPMD's tables; the
compiled estimates are those that tests/data/paper_rows.json keeps. Seconds are of one
core.
"""

from __future__ import annotations

import json
import pathlib
import time

from absl import app, flags

from benchmarks.search.found_rows import SLICES
from meshwright.framework.devices.topology import topology
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.planning.search.found.found_plans import PlanFinder
from meshwright.trainers.planning.search.found.propagated import propagated
from meshwright.trainers.planning.search.search_space import configured

TABLE = flags.DEFINE_multi_enum("table", ["2", "3"], ["2", "3", "4", "7"], "Tables.")
KEPT = pathlib.Path(__file__).parents[2] / "tests" / "data" / "paper_rows.json"


def main(_) -> None:
    """Prints a row for each of the tables'."""
    print("table row        s/step compiled  error    GiB compiled  trace  plan")
    errors = []
    for row in json.loads(KEPT.read_text()):
        if row["table"] not in TABLE.value:
            continue
        file = f"paper/table{row['table']}_{row['row']}.gin"
        experiment, _ = build_experiment([file], [])
        candidate = configured(experiment)
        torus = topology(f"v3:{SLICES[experiment.plan.mesh.size]}")
        begun = time.process_time()
        finder = PlanFinder(experiment, [candidate], torus, known={})
        traced = time.process_time()
        point = finder.point_of(candidate)
        found = propagated(finder.finder.steps[0], point.shape, point.masks, torus)
        done = time.process_time()
        compiled = row["ours"]["step_s"]
        errors.append(found.seconds / compiled - 1)
        print(
            f"{row['table']:<6}{row['row']:<9}{found.seconds:8.2f}{compiled:9.2f}"
            f"{errors[-1]:8.1%}{found.memory / 2**30:7.1f}{row['ours']['peak_gb']:9.1f}"
            f"{traced - begun:7.1f}{done - traced:6.2f}",
            flush=True,
        )
    mean = sum(errors) / len(errors)
    spread = [abs((1 + error) / (1 + mean) - 1) for error in errors]
    print(
        f"mean {mean:+.1%}; around it {sum(spread) / len(spread):.1%}, worst ", end=""
    )
    print(f"{max(spread):.1%}")


if __name__ == "__main__":
    app.run(main)
