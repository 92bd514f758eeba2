"""meshwright-plan: what a gin file's program does on its mesh, untrained.

With --topology it is compiled for devices that are not here, and with --search
too the mesh, plan and recomputation that train fastest on them are sought. Exit
status: 1 for wrong input, 3 for a program that does not fit into the devices'
memory.
"""

from __future__ import annotations

import json
import re
import sys

from absl import flags

from meshwright.framework.compiler.explaining.explain import explain
from meshwright.framework.compiler.xla.jax_bridge import jax_mesh
from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.trainers import cli
from meshwright.trainers.experiment import replication
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.sharding_text import sharding_text
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.plan_document import document
from meshwright.trainers.planning.plan_text import plan_text
from meshwright.trainers.planning.planning import plan
from meshwright.trainers.search.search import NothingFitsError
from meshwright.trainers.search.search_main import OPTIONS, SEARCH, search_main

_EXPLAIN = flags.DEFINE_bool(
    "explain",
    False,
    "Compile the training program for virtual cpu devices and print the sharding, "
    "source and collectives of its tensors.",
)
_EXPLAIN_MATCH = flags.DEFINE_string(
    "explain_match",
    "",
    "With --explain: a regular expression; show only, and all of, the tensors in whose "
    "layer, name or source it occurs, such as attention.",
)
_EXPLAIN_AT_LEAST = flags.DEFINE_integer(
    "explain_at_least",
    0,
    "With --explain: show only tensors of so many bytes.",
    lower_bound=0,
)
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "Compile the training program for these devices, such as v3:32x32 or cpu, and "
    "print what it needs and takes.",
)
_JSON = flags.DEFINE_string("json_out", None, "With --topology: a file for it as JSON.")
_HTML = flags.DEFINE_string(
    "html_out", None, "With --topology: a file for it as a page with pictures."
)
_LOG_DIR = flags.DEFINE_string(
    "log_dir",
    None,
    "With --topology: a folder to show it from in TensorBoard.",
    allow_override=True,  # absl's own is for log files, which nobody here writes.
)

DOES_NOT_FIT = 3
"""Exit status."""


def main(argv: list[str]) -> int | None:
    """Parses flags and calls; returns the exit status."""
    return cli.call("meshwright-plan", argv, _run, errors=(ImportError,))


def _run(experiment: Experiment, config_text: str) -> int | None:
    if not _EXPLAIN.value:
        _refuse((_EXPLAIN_MATCH, _EXPLAIN_AT_LEAST), "needs --explain")
    _check_pattern()
    if _TOPOLOGY.value is not None:
        _refuse(
            (cli.DEVICE_COUNT,),
            "is for virtual cpu devices: with --topology the mesh says how many",
        )
    if SEARCH.value:
        _refuse(
            (_EXPLAIN, _JSON, _HTML, _LOG_DIR),
            "shows one plan: give it with the gin file that --search writes, "
            "without --search",
        )
        return _search(experiment)
    _refuse(OPTIONS, "needs --search")
    if _TOPOLOGY.value is not None:
        return _plan(experiment, config_text)
    _refuse((_JSON, _HTML, _LOG_DIR), "needs --topology, such as --topology=cpu")
    programs, mesh = StepPrograms(experiment), experiment.plan.mesh
    set_platform("cpu", cli.DEVICE_COUNT.value or mesh.size)
    jax_mesh(mesh)  # Too large a mesh is told of at once.
    if _EXPLAIN.value:
        shown = {"match": _EXPLAIN_MATCH.value, "at_least": _EXPLAIN_AT_LEAST.value}
        print(explain(programs.main).text(**shown))
        return None
    print(sharding_text(experiment))
    replicated = replication.replicated_state(programs)
    print("\n".join(replication.report_lines(programs, replicated)))
    return None


def _refuse(given: tuple[flags.FlagHolder, ...], why: str) -> None:
    for flag in given:
        if flag.value != flag.default:
            raise ValueError(f"--{flag.name} {why}")


def _check_pattern() -> None:
    try:
        re.compile(_EXPLAIN_MATCH.value)
    except re.error as error:
        raise ValueError(
            f"--explain_match={_EXPLAIN_MATCH.value} is no regular expression ({error})"
            ": write \\ before characters that have a meaning in one"
        ) from None


def _search(experiment: Experiment) -> int | None:
    try:
        search_main(experiment, topology=_TOPOLOGY.value)
    except NothingFitsError as error:
        print(f"meshwright-plan: {error}", file=sys.stderr)
        return DOES_NOT_FIT
    return None


def _plan(experiment: Experiment, config_text: str) -> int | None:
    _refuse(
        (_EXPLAIN,),
        "reads the program for virtual cpu devices: give it without --topology",
    )
    if _HTML.value or _LOG_DIR.value:
        # matplotlib is only there for planning; told before anything is compiled.
        from meshwright.trainers.planning import plan_html, plan_tensorboard
    json_out, html_out = map(cli.output_file, (_JSON, _HTML))
    found = document(
        plan(experiment, topology=_TOPOLOGY.value), config_text=config_text
    )
    print(plan_text(found), end="", flush=True)
    if json_out:
        json_out.write_text(json.dumps(found, indent=2) + "\n")
    if html_out:
        html_out.write_text(plan_html.page(found))
    if _LOG_DIR.value:
        plan_tensorboard.write(found, _LOG_DIR.value)
    return None if found["fits"] else DOES_NOT_FIT


def run() -> None:
    """The console script."""
    cli.run(main, ["gin_file"])


if __name__ == "__main__":
    run()
