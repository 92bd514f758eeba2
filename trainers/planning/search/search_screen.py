"""The candidates of a search that may fit, and in which order they are compiled."""

from __future__ import annotations

import collections
import dataclasses

from meshwright.framework.devices.topology import Topology
from meshwright.framework.modeling.recompute import Recompute
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.planning.search.found.finding import Progress
from meshwright.trainers.planning.search.search_cost import rough_seconds
from meshwright.trainers.planning.search.search_memory import MemoryBound
from meshwright.trainers.planning.search.search_space import (
    Candidate,
    NamedPlan,
    Policy,
    candidates,
    dims_of,
    essence,
    is_configured,
    misfit,
    policies,
)
from meshwright.trainers.startup.messages import progress_bar

SAME = "the same program as with another plan"
TOO_LARGE = "state and saved activations alone exceed memory"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The space that is searched.

    Args:
      experiment: the experiment of the user's files and bindings.
      gin_files: the user's files.
      gin_params: the user's bindings.
      torus: the topology.
      plans: the plans to choose from.
      batches: numbers of examples a step to choose from.
      microbatches: pipelines' numbers of microbatches to choose from; empty for those
        that suit each batch.
      more_names: what recomputation may save beside what is configured.
    """

    experiment: Experiment
    gin_files: tuple[str, ...]
    gin_params: tuple[str, ...]
    torus: Topology
    plans: tuple[NamedPlan, ...]
    batches: tuple[int, ...]
    microbatches: tuple[int, ...] = ()
    more_names: tuple[str, ...] = ()

    def candidates(self) -> list[Candidate]:
        """All candidates; of those with equal programs the first is kept.

        The user's configuration is first, then come plans with the fewest dims: plans
        for other models may split dims that this model lacks.
        """
        choices = candidates(
            self.experiment,
            self.plans,
            devices=self.torus.size,
            batches=self.batches,
            microbatches=self.microbatches,
            more_names=self.more_names,
        )
        return sorted(choices, key=self._preference)

    def _preference(self, candidate: Candidate) -> tuple[bool, int]:
        tables = candidate.plan.tables
        dims = len(tables.weights) + len(tables.activations)
        return not is_configured(self.experiment, candidate), dims


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredCandidate:
    """A candidate that may fit.

    Args:
      candidate: the candidate.
      bound: bytes that a device needs at least.
      seconds: a rough guess of its step time, for the order of compiling.
      configured: whether it is the user's configuration.
      propagated: whether it was propagated, and both are from there.
    """

    candidate: Candidate
    bound: float
    seconds: float
    configured: bool
    propagated: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropped:
    """A candidate that is not compiled.

    Args:
      candidate: the candidate.
      reason: why; counted in `Screened.left_out`.
      bound: bytes that a device needs at least, if that is why.
    """

    candidate: Candidate
    reason: str
    bound: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Screened:
    """The result of screening candidates without compiling.

    Args:
      promising: candidates that may fit, most promising first.
      left_out: numbers of dropped candidates, by reason.
      least: the smallest bound of candidates that are too large, and its candidate;
        None if there are none.
      progress: how many plans that no file has were considered; None: none were.
      dropped: the dropped candidates.
      slow: candidates that are compiled only if no promising one fits.
    """

    promising: tuple[ScoredCandidate, ...]
    left_out: dict[str, int]
    least: tuple[float, Candidate] | None
    progress: Progress | None = None
    dropped: tuple[Dropped, ...] = ()
    slow: tuple[ScoredCandidate, ...] = ()


def screen(space: SearchSpace) -> Screened:
    """Drops candidates that will not do, by shapes and memory, and orders the rest."""
    bound, limit = MemoryBound(space.experiment), space.torus.kind.memory
    left_out: collections.Counter[str] = collections.Counter()
    promising: list[ScoredCandidate] = []
    dropped: list[Dropped] = []
    least: tuple[float, Candidate] | None = None
    seen, dims = set(), dims_of(space.experiment)
    made = space.candidates()
    for candidate in progress_bar(len(made), "memory bounds", iterable=made):
        program = essence(candidate, dims)
        try:
            reason = misfit(space.experiment, candidate, space.torus)
            if reason is None and program in seen:
                reason = SAME
            if reason is None:
                bytes_ = bound.state(candidate)
                if bytes_ <= limit:
                    bytes_ += bound.activations(candidate)
        except ValueError as error:  # The plan does not fit the tensors.
            reason = f"{candidate.plan.name}: {str(error).splitlines()[0]}"
        if reason is None and bytes_ > limit:
            reason = TOO_LARGE
            if least is None or bytes_ < least[0]:
                least = (bytes_, candidate)
        seen.add(program)
        if reason is not None:
            left_out[reason] += 1
            most = bytes_ if reason == TOO_LARGE else None
            dropped.append(Dropped(candidate=candidate, reason=reason, bound=most))
            continue
        recomputed = _recomputed(space.experiment, bound, candidate)
        promising.append(
            ScoredCandidate(
                candidate=candidate,
                bound=bytes_,
                seconds=rough_seconds(
                    space.experiment, candidate, space.torus, recomputed
                ),
                configured=is_configured(space.experiment, candidate),
            )
        )
    promising.sort(key=promise)
    return Screened(
        promising=tuple(promising),
        left_out=dict(left_out),
        least=least,
        dropped=tuple(dropped),
    )


def promise(scored: ScoredCandidate) -> tuple[bool, float]:
    """Smaller is better: the user's configuration, then the least time an example."""
    return (not scored.configured, scored.seconds / scored.candidate.batch)


def _recomputed(
    experiment: Experiment, bound: MemoryBound, candidate: Candidate
) -> float:
    """The rough share of the forward pass that is computed twice, by what is saved."""
    if candidate.policy is None or candidate.policy.recompute is Recompute.NOTHING:
        return 0.0
    # The tensors that have names are taken to be all that costs.
    named = [policy for policy in policies(experiment) if policy.saved_names]
    most = max(named, key=lambda policy: len(policy.saved_names), default=None)
    everything = Policy(recompute=Recompute.EVERYTHING)
    if most is None:
        return 1.0
    none, some, all_ = (
        bound.activations(dataclasses.replace(candidate, policy=policy))
        for policy in (everything, candidate.policy, most)
    )
    # Those that save more names than the files do recompute next to nothing.
    return max(0.0, 1.0 - (some - none) / (all_ - none)) if all_ > none else 0.0
