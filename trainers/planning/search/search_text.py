"""The outcome of a search, as a table and as a gin file."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator

from meshwright.framework.compiler.hlo.step_errors import too_near_text
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.sharding.plan import as_axes
from meshwright.framework.sizes import bytes_text
from meshwright.trainers.experiment.bindings.outside_names import imported
from meshwright.trainers.planning.plan_units import share_text
from meshwright.trainers.planning.search import plan_cache
from meshwright.trainers.planning.search.found.found_plans import table_text
from meshwright.trainers.planning.search.search import RankedCandidate, SearchResult
from meshwright.trainers.planning.search.search_result import Result
from meshwright.trainers.planning.search.search_screen import (
    ScoredCandidate,
    SearchSpace,
)
from meshwright.trainers.planning.search.search_space import Candidate, portable

_WIDTH = 80
_BEST = 10
_PLAN = 13
_LEAST_PLAN = 4
_INDENT = 50
_REASON = 150
_VERSIONS = ("jax", "libtpu", "tensorflow")
INTERRUPTED = "# Of an interrupted search"
"""Begins the winner's file if more was to be compiled."""


def table(space: SearchSpace, outcome: SearchResult) -> str:
    """The best candidates, then those refused and left out; 80 columns."""
    return "\n".join(_lines(space, outcome))


def winner(space: SearchSpace, outcome: SearchResult) -> str:
    """A gin file of the best candidate, over the user's files and bindings."""
    best = outcome.ranked[0]
    comment = [
        f"Found by meshwright-plan --search for TPU topology {space.torus.name}: "
        f"{_estimate(best, space)}.",
        f"Searched: {outcome.candidates} candidates of plans "
        f"{', '.join(plan.name for plan in space.plans)}; batches "
        f"{', '.join(map(str, space.batches))};{_found(outcome)} "
        f"{len(outcome.screened.promising)} could fit, "
        f"{len(outcome.ranked) + len(outcome.refused)} were compiled, "
        f"{len(outcome.ranked)} did fit. {_order(space)}",
        "With "
        + ", ".join(f"{n} {plan_cache.versions()[n]}" for n in _VERSIONS)
        + f". {_needed()}",
    ]
    lines = [f"# {line}" for text in comment for line in textwrap.wrap(text, 78)]
    if outcome.is_interrupted:
        lines = [f"{INTERRUPTED}, which goes on by the same command.", *lines]
    if best.promising.candidate.plan.is_found:
        table = table_text(best.promising.candidate.plan.tables)
        lines += ["#", *(f"#   {line}" for line in table)]
    lines += ["", *(f"include '{portable(file)}'" for file in space.gin_files)]
    lines += ["", *space.gin_params] if space.gin_params else []
    lines += ["", *best.bindings()]
    if changes := list(_changes(best.promising.space)):
        lines += ["", *changes]
    return "\n".join(lines) + "\n"


def reasons(lines: Iterable[str]) -> str:
    """What `why_not` says of each plan; 80 columns."""
    wrapped = (_wrapped(f"why not {line}", indent=0, hanging=4) for line in lines)
    return "\n".join(part for parts in wrapped for part in parts)


def import_flags() -> str:
    """What a command needs for the modules that this search imported, or ""."""
    return "".join(f" --import={name}" for name in imported())


def _needed() -> str:
    if flags := import_flags():
        return f"Must be given:{flags}; nothing else must be set."
    return "Nothing must be set."


def _order(space: SearchSpace) -> str:
    kind = space.torus.kind.name
    return f"Times are of TPU {kind}: on CPUs and GPUs another plan may be fastest."


def _found(outcome: SearchResult) -> str:
    progress = outcome.screened.progress
    if progress is None:
        return ""
    return (
        f" {progress.considered} plans by names, {progress.propagated} of them "
        "propagated;"
    )


def _changes(space: SearchSpace) -> Iterator[str]:
    """What a variant changes of the user's configuration, and what comes of it."""
    if any("stack" in line or "Pipeline" in line for line in space.changes):
        yield "# Weights have the shapes of these stages: a checkpoint of others is for"
        yield "# Experiment.initialize_from."
    if any("group_size" in line for line in space.changes):
        yield "# Other tokens compete for slots than with the configured groups."
    yield from space.changes


def _utilization(result: Result) -> str:
    share = result.utilization
    if share is None:
        return "-"
    return f"{share:.0%}" if share >= 0.1 else share_text(share)


def _estimate(row: RankedCandidate, space: SearchSpace) -> str:
    return (
        f"{1e3 * row.seconds_per_example:.4g} ms an example, "
        f"{row.result.seconds:.4g} s a step, {bytes_text(row.result.peak)} of "
        f"{bytes_text(space.torus.kind.memory)} a device, "
        f"{_utilization(row.result)} of peak FLOPs"
    )


def _lines(space: SearchSpace, outcome: SearchResult) -> Iterator[str]:
    yield (
        f"{'ms/example':>12}{'s/step':>10}{'memory':>10}{'util':>7}  "
        f"{'mesh':<9}{'plan':<{_PLAN + 1}}{'recompute':<11}{'batch':>5}"
    )
    shown = [
        row
        for i, row in enumerate(outcome.ranked)
        if i < _BEST or row.promising.configured
    ]
    for row in shown:
        result = row.result
        mark = "*" if row.promising.configured else " "
        mark += " " if result.device_ids is None else "+"
        yield (
            f"{mark}{1e3 * row.seconds_per_example:10.4g}{result.seconds:10.4g}"
            f"{bytes_text(result.peak):>10}{_utilization(result):>7}  "
            f"{_names(row.promising)}"
        )
    yield f"  {_order(space)}"
    yield from _wrapped(_too_near(space, outcome))
    if any(row.promising.configured for row in shown):
        given = space.experiment.plan.device_ids is not None
        yield "* as configured" + (", but for its device order" if given else "")
    if any(row.result.device_ids for row in shown):
        yield "+ in a device order other than the trainer's"
    if any(row.promising.candidate.microbatches is not None for row in shown):
        yield "  batch: examples a step / microbatches of pipelines"
    variants = {
        part
        for row in (*shown, *outcome.refused)
        for part in row.promising.space.variant.split()
    }
    yield from (f"  {text}" for text in _legend(variants))
    policies = dict.fromkeys(row.promising.candidate.policy for row in shown)
    for policy in policies:
        if policy and policy.recompute is Recompute.ALL_BUT_NAMED:
            yield from _wrapped(f"{policy}: {', '.join(policy.saved_names)}")
    best = shown[0].promising.candidate.plan
    if best.is_found:
        yield f"{best.name}:"
        yield from (f"    {line}" for line in table_text(best.tables))
    if idle := _idle_axes(shown[0].promising.candidate):
        yield from _wrapped(
            f"The fastest splits nothing over {', '.join(idle)} of the mesh, where "
            "devices repeat each other's work."
        )
    yield from _by_propagation(outcome)
    for row in outcome.refused:
        yield f"{'refused':>12}{'':29}{_names(row.promising)}".rstrip()
        yield from _wrapped(textwrap.shorten(row.result.refusal, _REASON), indent=4)
    rest = len(outcome.ranked) - len(shown)
    if rest > 0:
        yield f"{rest:6} more that fit"
    if outcome.is_interrupted:
        yield f"{outcome.not_compiled:6} more might fit: the search was interrupted"
    elif outcome.not_compiled:
        yield f"{outcome.not_compiled:6} more might fit: raise --search_budget"
    for reason, count in sorted(outcome.screened.left_out.items(), key=_most_first):
        text = _wrapped(f"left out: {reason}", indent=7)
        yield f"{count:6} {next(text).strip()}"
        yield from text


def _too_near(space: SearchSpace, outcome: SearchResult) -> str:
    """Whether the configuration or a file's plan may be as fast as one found; or ""."""
    best, *others = outcome.ranked
    if not best.promising.candidate.plan.is_found:
        return ""
    given = (row for row in others if not row.promising.candidate.plan.is_found)
    nearest = next(given, None)
    if nearest is None:
        return ""
    more = nearest.seconds_per_example / best.seconds_per_example - 1
    text = too_near_text(space.torus.kind, more)
    name = nearest.promising.candidate.plan.name
    return text and f"The first takes less than the plan {name}. {text}"


def _idle_axes(candidate: Candidate) -> list[str]:
    """The mesh axes of several devices that no entry of the plan names, with sizes."""
    plan = candidate.plan.tables
    entries = [*plan.weights.values(), *plan.activations.values()]
    named = {axis for entry in entries for axis in as_axes(entry)}
    sizes = zip(plan.mesh_axes, candidate.mesh, strict=True)
    return [f"{axis} ({n})" for axis, n in sizes if n > 1 and axis not in named]


def _legend(variants: Collection[str]) -> Iterator[str]:
    """What stands after the names of plans."""
    if any(part[0].isdecimal() for part in variants):
        yield "after a plan's name: stages x repeats of pipelines"
    if any(part[0] == "g" for part in variants):
        yield "gN after a plan's name: groups of N tokens for experts"
    for mode in sorted({"auto", "off"} & set(variants)):
        yield f"{mode} after a plan's name: with weight-update sharding {mode!r}"


def _by_propagation(outcome: SearchResult) -> Iterator[str]:
    """What the search over plans by names says of its estimates."""
    progress = outcome.screened.progress
    if progress is None:
        return
    names = "plans by names"
    if any(scored.space.stages for scored in outcome.screened.promising):
        names += ", without a pipeline,"
    considered = f"{progress.considered} {names} were considered"
    if progress.best is None:
        yield from _wrapped(
            f"{considered}, and of {progress.propagated} propagated none seems to fit"
        )
        return
    by_that = (row for row in outcome.ranked if row.promising.propagated)
    first = next(by_that, None)
    compiled = ""
    if first is not None:
        compiled = (
            f", where the {1e3 * first.seconds_per_example:.4g} of the fastest above "
            "are of a compiled program"
        )
    yield from _wrapped(
        f"{considered}, {progress.propagated} propagated: the fastest "
        f"{1e3 * progress.best:.4g} ms/example by that{compiled}, and none takes less "
        f"than {1e3 * progress.floor:.4g}. Propagation's times are for models whose "
        "time is in products and large collectives; of others they only rank."
    )


def _names(scored: ScoredCandidate) -> str:
    candidate, variant = scored.candidate, scored.space.variant
    mesh = "x".join(map(str, candidate.mesh))
    batch = str(candidate.batch)
    if candidate.microbatches is not None:
        batch += f"/{candidate.microbatches}"
    policy = "" if candidate.policy is None else str(candidate.policy)
    # The plan's name gives way to a long batch, and to its stages and the like.
    width = max(_LEAST_PLAN, _PLAN - max(0, len(batch) - 5))
    left = width - len(variant) - 1 if variant else width
    below = left < _LEAST_PLAN
    plan = candidate.plan.name
    if len(plan) > (left := width if below else left):
        plan = f"{plan[: left - 1]}~"
    if not below:
        plan = f"{plan} {variant}".strip()
    row = f"{mesh:<8} {plan:<{width}} {policy:<10} {batch:>5}"
    return f"{row}\n{'':{_INDENT}}{variant}" if below else row


def _most_first(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]


def _wrapped(text: str, indent: int = 2, hanging: int = 0) -> Iterator[str]:
    first, others = " " * indent, " " * (indent + hanging)
    yield from textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=others
    )
