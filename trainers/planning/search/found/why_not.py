"""Why a search did not choose a plan of a file."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.framework.sizes import bytes_text
from meshwright.trainers.planning.search.search import RankedCandidate, SearchResult
from meshwright.trainers.planning.search.search_screen import (
    SAME,
    Dropped,
    ScoredCandidate,
    SearchSpace,
)
from meshwright.trainers.planning.search.search_space import Candidate


def why_not(space: SearchSpace, outcome: SearchResult) -> Iterator[str]:
    """A line for each plan of the space but the winner, at its best mesh.

    It is slower by so much, as fast, too large by so much, or not allowed.
    """
    winner = outcome.ranked[0]
    for plan in space.plans:
        if plan.name != winner.promising.candidate.plan.name:
            yield f"{plan.name}: {_reason(space, outcome, winner, plan.name)}"


def _reason(
    space: SearchSpace, outcome: SearchResult, winner: RankedCandidate, name: str
) -> str:
    def mine(candidate: Candidate) -> bool:
        return candidate.plan.name == name

    compiled = [r for r in outcome.ranked if mine(r.promising.candidate)]
    if compiled:
        best = compiled[0]
        more = best.seconds_per_example / winner.seconds_per_example - 1
        return _slower(best.promising, more, "compiled")
    if refused := [r for r in outcome.refused if mine(r.promising.candidate)]:
        row = refused[0]
        return f"refused at {_at(row.promising)}: {row.result.refusal}"
    screened = outcome.screened
    timed = [s for s in (*screened.promising, *screened.slow) if mine(s.candidate)]
    if timed:
        best = min(timed, key=lambda s: (not s.propagated, s.seconds_per_example))
        if best.propagated and not winner.promising.propagated:
            each = f"{1e3 * best.seconds_per_example:.4g} ms an example by propagation"
            return f"was not compiled at {_at(best)}; {each}"
        if not best.propagated:
            return f"was not compiled at {_at(best)}, nor propagated"
        more = best.seconds_per_example / winner.promising.seconds_per_example - 1
        return _slower(best, more, "by propagation")
    dropped = [d for d in screened.dropped if mine(d.candidate)]
    if large := [d for d in dropped if d.bound is not None]:
        least = min(large, key=lambda d: d.bound)
        over = bytes_text(least.bound - space.torus.kind.memory)
        return f"does not fit by {over} or more, at {_at(least)}"
    return _not_allowed(dropped)


def _not_allowed(dropped: list[Dropped]) -> str:
    if not dropped:
        return "was not looked at"
    reasons = [d.reason for d in dropped if d.reason != SAME]
    if not reasons:
        return "is the same program as another plan of the space"
    reason = max(reasons, key=reasons.count)
    if same := [d for d in dropped if d.reason == SAME]:
        at = _at(same[0])
        return f"the same program as another plan at {at}; elsewhere {reason}"
    return f"not allowed: {reason}"


def _slower(scored: ScoredCandidate, more: float, how: str) -> str:
    at = _at(scored)
    if abs(more) < 5e-4:
        return f"as fast as the winner at {at}, {how}"
    if more > 1:
        return f"takes {1 + more:.1f} times as long at {at}, {how}"
    word = "slower" if more > 0 else "faster"
    return f"{abs(more):.1%} {word} at {at}, {how}"


def _at(scored: ScoredCandidate | Dropped) -> str:
    candidate, variant = scored.candidate, scored.space.variant
    mesh = "x".join(map(str, candidate.mesh))
    policy = "" if candidate.policy is None else f", recompute {candidate.policy}"
    with_variant = f" {variant}" if variant else ""
    return f"{mesh}{with_variant}{policy}, batch {candidate.batch}"
