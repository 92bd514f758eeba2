"""Flags of a search, and what meshwright-plan calls for them."""

from __future__ import annotations

import pathlib
import sys

from absl import flags

from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.framework.devices import topology as topologies
from meshwright.trainers import cli
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.stacks import pipelines
from meshwright.trainers.planning.planning import CPU
from meshwright.trainers.search import search_text
from meshwright.trainers.search.plan_cache import PlanCache, default_folder
from meshwright.trainers.search.search import SearchSpace, search
from meshwright.trainers.search.search_space import check_unscoped, named_plans

SEARCH = flags.DEFINE_bool(
    "search",
    False,
    "Search for the mesh shape, plan, recomputation and microbatches that train "
    "fastest on --topology, and write them as a gin file.",
)
_PLANS = flags.DEFINE_list(
    "search_plans",
    [],
    "Gin files of the plans to choose from; default: the configured one and those "
    "under params/plans that have its mesh axes.",
)
_BATCH = flags.DEFINE_list(
    "search_batch", [], "Global batches to choose from; default: the configured one."
)
_MICROBATCHES = flags.DEFINE_list(
    "search_microbatches",
    [],
    "Counts of microbatches for pipelines to choose from; default: the configured one "
    "and powers of two, 1 to 16 a stage.",
)
_BUDGET = flags.DEFINE_integer(
    "search_budget", 16, "Candidates to compile at most.", lower_bound=1
)
_JOBS = flags.DEFINE_integer(
    "search_jobs", 2, "Compilers at once; each takes some 2 GB.", lower_bound=1
)
_OUTPUT = flags.DEFINE_string(
    "search_output", "winner.gin", "Where to write the best candidate."
)
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "Write --search_output even if it is there."
)
_CACHE_DIR = flags.DEFINE_string(
    "cache_dir",
    None,
    "What was compiled before; default: meshwright/plans in the user's cache.",
)


OPTIONS = (
    _PLANS,
    _BATCH,
    _MICROBATCHES,
    _BUDGET,
    _JOBS,
    _OUTPUT,
    _OVERWRITE,
    _CACHE_DIR,
)
"""Flags that say how to search."""


def search_main(experiment: Experiment, *, topology: str | None) -> None:
    """Searches as the flags say, prints the table and writes the winner.

    Args:
      experiment: of --gin_file and --gin_param.
      topology: name of a TPU topology.

    Raises:
      ValueError: there is no TPU topology, a batch is no number, there are no pipelines
        for microbatches, the user's files bind for a scope what is searched, the file
        to write is there already or a folder, or no candidate fits.
      ConfigError: a plan is not there.
      ImportError: libtpu is not installed.
    """
    if topology is None or topology == CPU:
        raise ValueError(
            "--search ranks by estimated step time on a TPU topology: name one, as in "
            "--topology=v3:8x16"
        )
    torus = topologies.topology(topology)
    output = _output()
    check_unscoped(cli.GIN_FILE.value, cli.gin_params())
    microbatches = _counts(_MICROBATCHES)
    if microbatches and not pipelines(experiment.task):
        raise ValueError(
            "--search_microbatches is for pipelines, and the task has none: see "
            "params/layers/pipeline.gin"
        )
    space = SearchSpace(
        experiment=experiment,
        gin_files=tuple(cli.GIN_FILE.value),
        gin_params=tuple(cli.gin_params()),
        torus=torus,
        plans=tuple(
            named_plans(experiment, cli.GIN_FILE.value, cli.gin_params(), _PLANS.value)
        ),
        batches=tuple(_counts(_BATCH)) or (experiment.global_batch,),
        microbatches=tuple(microbatches),
    )
    set_platform("cpu")
    topologies.topology_devices(topology)  # Without libtpu nothing can be compiled.
    folder = pathlib.Path(_CACHE_DIR.value or default_folder())
    if reason := cli.writable(folder):
        raise ValueError(
            f"what is compiled cannot be kept in {folder} ({reason}): name another "
            "folder with --cache_dir"
        )
    try:
        found = search(
            space,
            cache=PlanCache(folder=folder),
            budget=_BUDGET.value,
            jobs=_JOBS.value,
        )
    except KeyboardInterrupt:
        print(
            f"what was compiled is kept in {folder}: the same command goes on from "
            "there",
            file=sys.stderr,
        )
        raise
    print(search_text.table(space, found))
    output.write_text(search_text.winner(space, found))
    print(f"wrote {output}: meshwright-train --gin_file={output}")


def _output() -> pathlib.Path:
    """The file to write, in a folder that is there."""
    output = cli.output_file(_OUTPUT)
    if output.exists() and not _OVERWRITE.value:
        raise ValueError(
            f"{output} is there already: name another file with --search_output, or "
            "replace it with --overwrite"
        )
    return output


def _counts(flag: flags.FlagHolder) -> list[int]:
    texts = flag.value
    if not all(text.isdecimal() and int(text) for text in texts):
        given = ",".join(texts)
        raise ValueError(f"--{flag.name}={given}: must be whole numbers >= 1")
    return sorted({int(text) for text in texts})
