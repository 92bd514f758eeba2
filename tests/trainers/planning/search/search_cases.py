"""Spaces of the small language model to search, and what might be found."""

from meshwright.framework.devices.topology import topology
from meshwright.framework.modeling.recompute import Recompute
from meshwright.trainers.planning.search import search_screen
from meshwright.trainers.planning.search.search import RankedCandidate, SearchResult
from meshwright.trainers.planning.search.search_result import Result
from meshwright.trainers.planning.search.search_screen import (
    ScoredCandidate,
    Screened,
    SearchSpace,
)
from meshwright.trainers.planning.search.search_space import (
    Candidate,
    Policy,
    built,
    is_configured,
    named_plans,
)
from tests.trainers.small_run import GIN_FILES

NAMES = ("query", "key", "value", "context", "hidden", "feed_forward_out")
NAMED = (
    "Repeat.recompute = %Recompute.ALL_BUT_NAMED",
    f"Repeat.saved_names = {NAMES}",
)
ALL = Policy(recompute=Recompute.ALL_BUT_NAMED, saved_names=NAMES)
EVERYTHING = Policy(recompute=Recompute.EVERYTHING)
NOTHING = Policy(recompute=Recompute.NOTHING)


PLANS = ("plans/attempt1.gin", "plans/attempt2.gin", "plans/finalized.gin")


def space(*params, name="v3:2x2", batches=(8,), files=GIN_FILES, plans=PLANS):
    params = ("MESH_SHAPE = (2, 4)", *params)
    experiment = built(files, params)
    return SearchSpace(
        experiment=experiment,
        gin_files=tuple(files),
        gin_params=params,
        torus=topology(name),
        plans=tuple(named_plans(experiment, files, params, plans)),
        batches=tuple(batches),
    )


def candidate(where, mesh=(2, 4), plan="finalized", policy=EVERYTHING, batch=8):
    (named,) = (p for p in where.plans if p.name == plan)
    return Candidate(mesh=mesh, plan=named, policy=policy, batch=batch)


def promising(where, *, bound=1e9, seconds=1.0, propagated=False, **changes):
    default = candidate(where, **changes)
    return ScoredCandidate(
        space=where,
        candidate=default,
        bound=bound,
        seconds=seconds,
        configured=is_configured(where.experiment, default),
        propagated=propagated,
    )


def searched(where):
    """As if some candidates had been compiled."""
    rows = [
        RankedCandidate(
            promising=promising(where, mesh=mesh, plan=plan, policy=policy),
            result=Result(seconds=s, peak=7 * 2**30, utilization=0.4),
        )
        for mesh, plan, policy, s in (
            ((4, 2), "attempt2", ALL, 0.5),
            ((2, 4), "finalized", ALL, 1.0),
        )
    ]
    lost = RankedCandidate(
        promising=promising(where, mesh=(8, 1), policy=NOTHING),
        result=Result(refusal="RESOURCE_EXHAUSTED: " + "so much too large " * 9),
    )
    left = promising(where, mesh=(2, 4))
    return SearchResult(
        candidates=60,
        ranked=tuple(rows),
        refused=(lost,),
        screened=Screened(
            promising=(*(row.promising for row in [*rows, lost]), left),
            left_out={
                search_screen.TOO_LARGE: 3,
                "more shards than there are 'heads'": 15,
            },
        ),
    )
