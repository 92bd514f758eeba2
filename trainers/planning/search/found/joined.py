"""Candidates of plan files, joined by those with plans that were found."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.framework.compiler.stablehlo.shardy.named_module import OnePlanError
from meshwright.trainers.experiment import config
from meshwright.trainers.planning.search import plan_cache
from meshwright.trainers.planning.search.found.finding import Point, Progress
from meshwright.trainers.planning.search.found.found_plans import PlanFinder
from meshwright.trainers.planning.search.found.propagated import Priced
from meshwright.trainers.planning.search.plan_cache import PlanCache
from meshwright.trainers.planning.search.search_screen import (
    ScoredCandidate,
    Screened,
    SearchSpace,
    promise,
)
from meshwright.trainers.planning.search.search_space import (
    AS_CONFIGURED,
    Candidate,
    NamedPlan,
    built,
    microbatch_counts,
    misfit,
    policies,
)
from meshwright.trainers.startup.messages import log_line, told_bar

log = logging.getLogger("absl")

SLOWER = "slower by propagation than the fastest by more than its error"
# How far the second sieve's times lie from the compiler's, see
# docs/reference/planning/search.md.
MARGIN = 0.15
# More plans than are ever compiled, as some will be refused.
_KEPT = 24

Known = dict[Point, Priced | None]


def with_found(
    space: SearchSpace, screened: Screened, cache: PlanCache, most: int
) -> Screened:
    """The candidates of a space, joined by found ones; all are priced by propagation.

    Costs are kept in the cache, also if it is interrupted, and not computed again.

    Args:
      space: the space.
      screened: its candidates from plan files, which are starting points.
      cache: where costs are kept.
      most: how many plans are propagated at most.
    """
    starts = [scored.candidate for scored in screened.promising]
    with contextlib.ExitStack() as stack:
        try:
            finder = stack.enter_context(kept_finder(space, cache))
        except OnePlanError as error:
            reason = str(error).splitlines()[0]
            log.warning(
                "search: plan files alone, as the model has no other: %s", reason
            )
            return screened
        log_line(
            "search: up to %d plans are propagated; --search_propagated sets how many",
            most,
        )
        with told_bar(most, "propagating") as bar:
            finder.find(
                starts, most=most, tell=lambda made: made.show(bar, "ms/example")
            )
        files = [_priced(finder, scored) for scored in screened.promising]
        found = list(_found(space, finder, files))
    files = [_in_turn(scored, found) for scored in files]
    scored = sorted([*files, *found], key=promise)
    return _without_slow(screened, scored, finder.finder.progress)


@contextlib.contextmanager
def kept_finder(space: SearchSpace, cache: PlanCache) -> Iterator[PlanFinder]:
    """A finder of a space's plans that knows the costs in the cache, and adds its own.

    They are added at the end of the context, also if it is interrupted.

    Raises:
      OnePlanError: the step cannot be traced for all plans at once.
    """
    key = _key(space)
    known = _read(cache.cached(key))
    finder = _finder(space, known)
    try:
        yield finder
    finally:
        cache.store(key, {"plans": _written(known)})


def _key(space: SearchSpace) -> dict[str, str]:
    built(space.gin_files, space.bindings)
    made = [str(_choice(candidate)) for candidate in choices(space)]
    parts = plan_cache.key_parts(config.operative_text(), space.torus.name)
    return {**parts, "propagated": json.dumps(made)}


def choices(space: SearchSpace) -> list[Candidate]:
    """A candidate for each of what may be recomputed, batches and microbatches."""
    plan = space.experiment.plan
    given = NamedPlan(name=AS_CONFIGURED, gin_file=None, tables=plan)
    return [
        Candidate(
            mesh=tuple(plan.mesh_shape),
            plan=given,
            policy=policy,
            batch=batch,
            microbatches=count,
        )
        for batch in space.batches
        for count in microbatch_counts(space.experiment, batch, space.microbatches)
        for policy in policies(space.experiment, space.more_names)
    ]


def _choice(candidate: Candidate) -> tuple:
    return candidate.policy, candidate.batch, candidate.microbatches


def _finder(space: SearchSpace, known: Known) -> PlanFinder:
    made = choices(space)
    with told_bar(len(made), "tracing") as bar:
        return PlanFinder(
            space.experiment,
            made,
            space.torus,
            known=known,
            tell=lambda count: bar.update(count - bar.n),
        )


def _priced(finder: PlanFinder, scored: ScoredCandidate) -> ScoredCandidate:
    """A candidate of a file by its propagated cost; as it is if it has none."""
    found = finder.look_up(scored.candidate)
    return scored if found is None else _by(found.priced, scored)


def _by(priced: Priced, scored: ScoredCandidate) -> ScoredCandidate:
    return dataclasses.replace(
        scored, bound=priced.memory, seconds=priced.seconds, propagated=True
    )


def _in_turn(
    scored: ScoredCandidate, found: Sequence[ScoredCandidate]
) -> ScoredCandidate:
    """A file's candidate among those found, which have another order than time's."""
    seconds = scored.seconds_per_example
    faster = sum(candidate.seconds_per_example < seconds for candidate in found)
    return dataclasses.replace(scored, turn=faster)


def _found(
    space: SearchSpace, finder: PlanFinder, files: Sequence[ScoredCandidate]
) -> Iterator[ScoredCandidate]:
    """The best plans found, but those that are a file's, with names that do nothing."""
    known = [finder.look_up(scored.candidate) for scored in files]
    for turn, (candidate, plan) in enumerate(finder.candidates(_KEPT)):
        like = (
            file
            for file in known
            if file is not None
            and (file.point.step, file.point.shape)
            == (plan.point.step, plan.point.shape)
        )
        if any(file.priced.same(plan.priced) for file in like):
            continue
        if misfit(space.experiment, candidate, space.torus) is None:
            scored = ScoredCandidate(
                space=space,
                candidate=candidate,
                bound=0.0,
                seconds=0.0,
                configured=False,
                turn=turn,
            )
            yield _by(plan.priced, scored)


def _without_slow(
    screened: Screened, scored: list[ScoredCandidate], progress: Progress
) -> Screened:
    """Puts off what is slower than the fastest that fits, by more than the error."""
    best = float("inf") if progress.best is None else progress.best
    fast, slow = [], []
    for one in scored:
        is_slow = one.seconds_per_example > (1 + MARGIN) * best
        waits = is_slow and one.propagated and not one.configured
        (slow if waits else fast).append(one)
    left_out = dict(screened.left_out)
    if slow:
        left_out[SLOWER] = len(slow)
    return dataclasses.replace(
        screened,
        promising=tuple(fast),
        left_out=left_out,
        progress=progress,
        slow=tuple(slow),
    )


def _read(entry: Mapping[str, Any] | None) -> Known:
    return {
        Point(step, tuple(shape), tuple(masks)): priced and Priced(**priced)
        for step, shape, masks, priced in (entry or {}).get("plans", ())
    }


def _written(known: Known) -> list:
    return list(_rows(known))


def _rows(known: Known) -> Iterator[list]:
    for point, priced in known.items():
        costs = priced and dataclasses.asdict(priced)
        yield [point.step, point.shape, point.masks, costs]
