"""Step times of Meshwright, of hand-written JAX and of TF's compiler, in turns.

    python benchmarks/step_times/step_time.py [--settings=tiny,large,long]
      [--meshes=1x1,2x1,2x4] [--pages=small,huge] [--programs=meshwright,jax_scan]
      [--rounds=6] [--steps=N]

Every program trains the language model of `lm/stdlib_tiny.gin` in a process of its own:
with the same maths, initial weights, tokens, shardings, and steps per compiled call,
and a donated state. `reference_jax.py` is the JAX program, twice: with its layers in a
`lax.scan`, as Meshwright's are in a loop, and one after another. TF's program runs on
one device only. Each program runs with malloc's memory in small pages, as Python
programs have it, and in huge ones, as `meshwright-train` arranges it.

The programs of a mesh take turns, so that other load of the machine meets them alike. A
ratio is Meshwright's time over another program's in the same round, with pages of the
same kind, or of its own with huge pages over small ones; the table has medians over
rounds, and below 1 Meshwright is faster. Faults are pages that a step touches and the
process does not have. On a busy machine trust CPU seconds more than the clock. Programs
that do not train alike are not compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence

from absl import app, flags
from interleave import (
    Turn,
    Worker,
    conditions,
    loss_difference,
    median_ratios,
    table_row,
    take_turns,
)

from meshwright.trainers.startup.huge_pages import TUNABLE

VARIANTS = pathlib.Path(__file__).with_name("variants.py")
OURS = "meshwright"
LABELS = {
    OURS: "Meshwright",
    "jax_scan": "JAX, scan",
    "jax_unrolled": "JAX, unrolled",
    "tf_jit": "TF jit_compile",
}
"""The variants, and their names in the table."""
PAGES = {"small": "0", "huge": "1"}
"""Kinds of pages, and the value that asks malloc for them."""
CHECKED_STEPS = 4
LOSS_TOLERANCE = 1e-4  # Relative.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A size of the model.

    Args:
      bindings: bindings that override those of `lm/stdlib_tiny.gin`.
      steps: steps of a turn, enough for seconds.
    """

    bindings: Sequence[str]
    steps: int


SETTINGS = {
    "tiny": Setting(bindings=(), steps=10),
    # About a second per step on one device of two cores.
    "large": Setting(
        bindings=(
            "MODEL_DIMS = 512",
            "HIDDEN_DIMS = 2048",
            "NUM_HEADS = 8",
            "HEAD_DIM = 64",
            "NUM_LAYERS = 6",
            "Experiment.global_batch = 8",
            "Experiment.steps_per_loop = 1",
        ),
        steps=1,
    ),
    # Its attention is in blocks, as the layer chooses; the other programs' is of all
    # pairs of tokens at once.
    "long": Setting(
        bindings=(
            "SEQUENCE_LENGTH = 4096",
            "MODEL_DIMS = 256",
            "HIDDEN_DIMS = 1024",
            "NUM_HEADS = 4",
            "HEAD_DIM = 64",
            "NUM_LAYERS = 2",
            "Experiment.global_batch = 2",
            "Experiment.steps_per_loop = 1",
        ),
        steps=1,
    ),
    # For the test of this file.
    "smallest": Setting(
        bindings=(
            "MODEL_DIMS = 16",
            "HIDDEN_DIMS = 32",
            "HEAD_DIM = 4",
            "NUM_LAYERS = 2",
            "SEQUENCE_LENGTH = 16",
            "Experiment.global_batch = 4",
            "Experiment.steps_per_loop = 1",
        ),
        steps=1,
    ),
}

_ROUNDS = flags.DEFINE_integer("rounds", 6, "Turns of each program.", lower_bound=1)
_STEPS = flags.DEFINE_integer(
    "steps", None, "Steps of a turn, rounded up to full calls.", lower_bound=1
)
_SETTINGS = flags.DEFINE_list(
    "settings", ["tiny", "large", "long"], "Sizes of the model."
)
_PAGES = flags.DEFINE_list("pages", [*PAGES], "Kinds of pages of malloc's memory.")
_PROGRAMS = flags.DEFINE_list("programs", [*LABELS], "Programs, ours among them.")
_MESHES = flags.DEFINE_list("meshes", ["1x1", "2x1", "2x4"], "Meshes of CPU devices.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The measurements of one setting on one mesh.

    Args:
      turns: turns of each variant with each kind of pages, by round.
      loss_difference: the largest relative difference between our losses and another's.
      versions: versions of the libraries.
    """

    turns: Mapping[tuple[str, str], Sequence[Turn]]
    loss_difference: float
    versions: Mapping[str, str]


def compare(
    setting: str, mesh: str, pages: Sequence[str], rounds: int, steps: int | None
) -> Comparison:
    """Starts a worker for each variant, checks that they train alike, times them.

    Raises:
      ValueError: the losses differ.
      RuntimeError: a worker ended.
    """
    size = SETTINGS[setting]
    bindings = [*size.bindings, f"MESH_SHAPE = ({mesh.replace('x', ', ')})"]
    arguments = [str(CHECKED_STEPS), "lm/stdlib_tiny.gin", *bindings]
    variants = [
        (variant, kind)
        for variant in _PROGRAMS.value
        for kind in pages
        if variant != "tf_jit" or mesh == "1x1"
    ]
    with contextlib.ExitStack() as stack:
        workers = []
        for variant, kind in variants:
            command = [sys.executable, str(VARIANTS), variant, *arguments]
            tunables = {"GLIBC_TUNABLES": f"{TUNABLE}={PAGES[kind]}"}
            worker = Worker(f"{variant}, {setting}, {mesh}", command, tunables)
            workers.append(stack.enter_context(worker))
        facts = {v: w.facts() for v, w in zip(variants, workers, strict=True)}
        difference = loss_difference(
            {f"{LABELS[v]}, {kind}": f["losses"] for (v, kind), f in facts.items()},
            LOSS_TOLERANCE,
        )
        turns = take_turns(workers, rounds=rounds, steps=steps or size.steps)
    return Comparison(
        turns=dict(zip(variants, turns, strict=True)),
        loss_difference=difference,
        versions=facts[variants[0]]["versions"],
    )


HEADER = f"""\
{"":36}  {"seconds a step":^16}  {"faults":>8}  {"Meshwright / program":^20}
{"setting":9}{"mesh":6}{"pages":6}{"program":15}  {"CPU":>7}  {"wall":>7}  \
{"a step":>8}  {"CPU":>9}  {"wall":>9}
{"-" * 86}"""


def table_rows(
    setting: str, mesh: str, turns: Mapping[tuple[str, str], Sequence[Turn]]
) -> list[str]:
    """The lines below `HEADER` for one comparison: medians.

    With both kinds of pages, the last ones are the ratios of huge to small.
    """
    rows = []
    for pages, variant in itertools.product(PAGES, LABELS):
        if (variant, pages) in turns:
            first = None if variant == OURS else turns[OURS, pages]
            own = turns[variant, pages]
            faults = statistics.median(turn.faults for turn in own)
            cells = table_row("", own) + f"  {faults:8.0f}"
            if first is not None:
                ratios = median_ratios(first, own)
                cells += "".join(f"  {ratio:9.2f}" for ratio in ratios)
            rows.append((pages, variant, cells))
    for variant in LABELS:
        small, huge = (turns.get((variant, pages)) for pages in PAGES)
        if small and huge:
            ratios = median_ratios(huge, small)
            rows.append(("ratio", variant, "".join(f"  {r:7.2f}" for r in ratios)))
    lines, above = [], None
    for pages, variant, cells in rows:
        begin = f"{'' if above else setting:9}{'' if above else mesh:6}"
        begin += f"{'' if above == pages else pages:6}"
        lines.append(f"{begin}{LABELS[variant]:15}{cells}")
        above = pages
    return lines


def main(argv: Sequence[str]) -> None:
    """Measures and prints."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    given = ((_SETTINGS, SETTINGS), (_PAGES, PAGES), (_PROGRAMS, LABELS))
    for flag, known in given:
        unknown = [name for name in flag.value if name not in known]
        if unknown:
            raise app.UsageError(
                f"--{flag.name}: unknown {unknown[0]!r}: one of {[*known]}"
            )
    if OURS not in _PROGRAMS.value:
        raise app.UsageError(f"--programs: {OURS} is not among them: add it")
    difference = None
    for setting in _SETTINGS.value:
        for mesh in _MESHES.value:
            try:
                comparison = compare(
                    setting, mesh, _PAGES.value, _ROUNDS.value, _STEPS.value
                )
            except (RuntimeError, ValueError) as error:
                sys.exit(f"step_time.py: {error}")
            if difference is None:
                print(conditions(comparison.versions, _ROUNDS.value))
                print(HEADER)
            difference = max(difference or 0.0, comparison.loss_difference)
            print(*table_rows(setting, mesh, comparison.turns), sep="\n", flush=True)
    print(f"Losses of the first {CHECKED_STEPS} steps agree within {difference:.0e}.")


if __name__ == "__main__":
    app.run(main)
