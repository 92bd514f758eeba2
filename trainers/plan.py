"""meshwright-plan: what a gin file's program does on its mesh, untrained.

With --topology it is compiled for devices that are not here, and with --search
too the mesh, plan and recomputation that train fastest on them are sought. Exit
status: 1 for wrong input, 3 for a program that does not fit into the devices'
memory.

Examples:

  meshwright-plan --gin_file=lm/stdlib_tiny.gin --explain
  meshwright-plan --gin_file=lm/stdlib_tiny.gin --topology=v3:2x2
"""

from __future__ import annotations

import re

from absl import flags

from meshwright.trainers import cli
from meshwright.trainers.processes import guarded
from meshwright.trainers.startup import files, plan_flags, search_flags

_TOPOLOGY = re.compile(r"cpu|\w+:\d+(x\d+)*")
NAME = "meshwright-plan"
REQUIRED = {"gin_file": "lm/stdlib_tiny.gin"}


def main(argv: list[str]) -> int | None:
    """Parses flags and calls; returns the exit status."""
    return cli.call(NAME, argv, _load, check=_check)


def _check() -> None:
    """Refuses flags that do not go together, that are malformed, and files that cannot
    be written.
    """
    if not plan_flags.EXPLAIN.value:
        details = (
            plan_flags.EXPLAIN_MATCH,
            plan_flags.EXPLAIN_AT_LEAST,
            plan_flags.EXPLAIN_AXIS,
            plan_flags.EXPLAIN_WHY,
        )
        _refuse(details, "needs --explain")
        if plan_flags.TOPOLOGY.value is None:
            _refuse((plan_flags.EXPLAIN_HTML,), "needs --explain, or --topology")
    _check_pattern()
    topology = plan_flags.TOPOLOGY.value
    if topology is not None and not _TOPOLOGY.fullmatch(topology):
        raise ValueError(
            f"--topology={topology} is no topology: give cpu, or a kind of TPU and its "
            "chips along each dim, such as v3:32x32, or a kind of GPU, the hosts if "
            "several, and the GPUs of each, such as h100:8 or h100:4x8"
        )
    pages = (plan_flags.JSON, plan_flags.HTML, plan_flags.LOG_DIR)
    if topology is not None:
        _refuse(
            (cli.DEVICE_COUNT,),
            "is for virtual cpu devices: with --topology the mesh says how many",
        )
    if search_flags.SEARCH.value:
        _refuse(
            (plan_flags.EXPLAIN, plan_flags.EXPLAIN_HTML, *pages),
            "shows one plan: give it with the gin file that --search writes, "
            "without --search",
        )
        if topology in (None, "cpu"):
            raise ValueError(
                "--search ranks by estimated step time on a TPU topology: name one, as "
                "in --topology=v3:8x16"
            )
        return
    _refuse(search_flags.OPTIONS, "needs --search")
    if topology is None:
        _refuse(pages, "needs --topology, such as --topology=cpu")
    else:
        _refuse(
            (plan_flags.EXPLAIN,),
            "reads the program for virtual cpu devices: give it without --topology",
        )
    files.output_file(plan_flags.JSON)
    files.output_file(plan_flags.HTML)
    files.output_file(plan_flags.EXPLAIN_HTML)
    files.check_folder(plan_flags.LOG_DIR)


def _refuse(given: tuple[flags.FlagHolder, ...], why: str) -> None:
    for flag in given:
        if flag.value != flag.default:
            raise ValueError(f"--{flag.name} {why}")


def _check_pattern() -> None:
    pattern = plan_flags.EXPLAIN_MATCH.value
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"--explain_match={pattern} is no regular expression ({error}): write \\ "
            "before characters that have a meaning in one"
        ) from None


def _load() -> cli.Command:
    if search_flags.SEARCH.value:
        from meshwright.trainers.planning.search import search_main

        return search_main.COMMAND
    from meshwright.trainers.planning import plan_main

    return plan_main.COMMAND


def _guarded(argv: list[str]) -> int | None:
    """`main`, in a child process where a compiler for other devices could end it."""
    topology = plan_flags.TOPOLOGY.value
    if topology is None or search_flags.SEARCH.value:  # Which has its own processes.
        return main(argv)
    advice = (
        f"a fault of the compiler for {topology}, if nobody ended it. Another kind of "
        "TPU, another mesh shape, by --gin_param='MESH_SHAPE = ...', "
        "--gin_param='Experiment.weight_update_sharding = \"off\"', or, for a task of "
        "Repeat, --gin_param='Repeat.recompute = %Recompute.NOTHING' may avoid it"
    )
    return guarded.call(lambda: main(argv), NAME, advice)


def run() -> None:
    """The console script."""
    cli.run(NAME, _guarded, required=REQUIRED)


if __name__ == "__main__":
    run()
