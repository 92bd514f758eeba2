"""Runs a search by meshwright-plan, once TensorFlow is imported."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import sys
from collections.abc import Iterator

from absl import flags

from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.framework.devices import topology as topologies
from meshwright.framework.devices.gpu_topology import GpuTopology
from meshwright.trainers import cli
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.stacks import has_experts, pipelines
from meshwright.trainers.planning.search import search_text
from meshwright.trainers.planning.search.found.why_not import why_not
from meshwright.trainers.planning.search.plan_cache import PlanCache, default_folder
from meshwright.trainers.planning.search.search import NothingFitsError, search
from meshwright.trainers.planning.search.search_screen import SearchSpace
from meshwright.trainers.planning.search.search_space import (
    check_unscoped,
    more_names,
    named_plans,
)
from meshwright.trainers.planning.search.search_variants import grouped, staged
from meshwright.trainers.startup import files, plan_flags, search_flags


def search_main(experiment: Experiment, *, topology: str) -> None:
    """Searches as the flags say, prints the table and writes the winner.

    Args:
      experiment: the experiment of --gin_file and --gin_param.
      topology: name of a TPU topology.

    Raises:
      ValueError: there is no such TPU topology, a batch is no number, there are no
        pipelines or experts for what a flag chooses, the user's files bind for a scope
        what is searched, the file to write exists already or is a folder, or no
        candidate fits.
      ConfigError: a plan does not exist.
      ImportError: libtpu is not installed.
    """
    torus = topologies.topology(topology)
    if isinstance(torus, GpuTopology):
        raise ValueError(
            f"--search orders devices along the links of TPUs, and {topology!r} has "
            "GPUs: name a TPU topology, or plan for it without --search"
        )
    output = _output()
    check_unscoped(cli.GIN_FILE.value, cli.gin_params())
    microbatches, stages, repeats = map(_counts, search_flags.OF_PIPELINES)
    for flag in search_flags.OF_PIPELINES:
        if flag.value and not pipelines(experiment.task):
            raise ValueError(
                f"--{flag.name} is for pipelines, and the task has none: see "
                "params/layers/pipeline.gin"
            )
    groups = _counts(search_flags.GROUP_SIZES)
    if groups and not has_experts(experiment.task):
        raise ValueError(
            "--search_group_sizes is for mixtures of experts, and the task has none: "
            "see params/layers/moe.gin"
        )
    space = SearchSpace(
        experiment=experiment,
        gin_files=tuple(cli.GIN_FILE.value),
        gin_params=tuple(cli.gin_params()),
        torus=torus,
        plans=tuple(
            named_plans(
                experiment,
                cli.GIN_FILE.value,
                cli.gin_params(),
                search_flags.PLANS.value,
            )
        ),
        batches=tuple(_counts(search_flags.BATCH)) or (experiment.global_batch,),
        microbatches=tuple(microbatches),
        more_names=more_names(experiment),
    )
    bases = [space, *grouped(space, groups)]
    others = bases[1:] + [
        each for base in bases for each in staged(base, stages, repeats)
    ]
    set_platform("cpu")
    topologies.topology_devices(topology)  # Without libtpu nothing can be compiled.
    folder = pathlib.Path(search_flags.CACHE_DIR.value or default_folder())
    if reason := files.writable(folder):
        raise ValueError(
            f"compiled results cannot be kept in {folder} ({reason}): name another "
            "folder with --cache_dir"
        )
    try:
        with _sigterm_interrupts():
            result = search(
                space,
                cache=PlanCache(folder=folder),
                budget=search_flags.BUDGET.value,
                jobs=search_flags.JOBS.value,
                propagated=search_flags.PROPAGATED.value,
                others=others,
            )
    except KeyboardInterrupt:
        _say_how_to_go_on(folder)
        raise
    output.write_text(search_text.winner(space, result))
    print(search_text.table(space, result))
    if lines := not result.is_interrupted and search_text.reasons(
        why_not(space, result)
    ):
        print(lines)
    flags_needed = search_text.import_flags()
    print(f"wrote {output}: meshwright-train{flags_needed} --gin_file={output}")
    if result.is_interrupted:
        _say_how_to_go_on(folder)
        raise KeyboardInterrupt


def _say_how_to_go_on(folder: pathlib.Path) -> None:
    print(
        f"compiled results are kept in {folder}: the same command goes on from there",
        file=sys.stderr,
    )


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Has SIGTERM do what Ctrl-C does, where libtpu, once loaded, prints its stack."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:  # libtpu's own handler, which Python does not know, is not put back.
        signal.signal(signal.SIGTERM, before)


def _output() -> pathlib.Path:
    """The file to write, in a folder that exists.

    That of an interrupted search is written again, as the search goes on.
    """
    output = files.output_file(search_flags.OUTPUT)
    is_taken = output.exists() and not output.read_bytes().startswith(
        search_text.INTERRUPTED.encode()
    )
    if is_taken and not search_flags.OVERWRITE.value:
        raise ValueError(
            f"{output} exists already: name another file with --search_output, or "
            "replace it with --overwrite"
        )
    return output


def _counts(flag: flags.FlagHolder) -> list[int]:
    texts = flag.value
    if not all(text.isdecimal() and int(text) for text in texts):
        given = ",".join(texts)
        raise ValueError(f"--{flag.name}={given}: must be whole numbers >= 1")
    return sorted({int(text) for text in texts})


def _run(experiment: Experiment, config_text: str) -> int | None:
    try:
        search_main(experiment, topology=plan_flags.TOPOLOGY.value)
    except NothingFitsError as error:
        print(f"meshwright-plan: {error}", file=sys.stderr)
        return cli.DOES_NOT_FIT
    return None


COMMAND = cli.Command(run=_run, errors=(ImportError,))
