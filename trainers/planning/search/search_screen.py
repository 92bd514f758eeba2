"""The candidates of a search that may fit, and in which order they are compiled."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

from meshwright.framework.devices.topology import Topology
from meshwright.framework.modeling.recompute import Recompute
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.stacks import pipelines
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
      changes: bindings of a variant, which come last; see `search_variants`.
      changed: what they change, but for stages, in a few letters.
    """

    experiment: Experiment
    gin_files: tuple[str, ...]
    gin_params: tuple[str, ...]
    torus: Topology
    plans: tuple[NamedPlan, ...]
    batches: tuple[int, ...]
    microbatches: tuple[int, ...] = ()
    more_names: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    changed: str = ""

    @property
    def bindings(self) -> tuple[str, ...]:
        """The user's bindings, and the variant's."""
        return (*self.gin_params, *self.changes)

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

    def is_configured(self, candidate: Candidate) -> bool:
        """Whether a candidate is the user's configuration."""
        return not self.changes and is_configured(self.experiment, candidate)

    @property
    def stages(self) -> str:
        """Stages of its pipelines, times their repeats; "" without pipelines."""
        made = {
            str(each.num_stages) + f"x{each.num_repeats}" * (each.num_repeats > 1)
            for each in pipelines(self.experiment.task).values()
        }
        return ", ".join(sorted(made))

    @property
    def variant(self) -> str:
        """Its stages and what is bound otherwise, for a table."""
        return " ".join(filter(None, (self.stages, self.changed)))

    def _preference(self, candidate: Candidate) -> tuple[bool, int]:
        tables = candidate.plan.tables
        dims = len(tables.weights) + len(tables.activations)
        return not self.is_configured(candidate), dims


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfSpace:
    """A candidate, and the space that it is of."""

    space: SearchSpace
    candidate: Candidate

    @property
    def text(self) -> str:
        """The candidate, with its stages and the like."""
        variant = f", {self.space.variant}" if self.space.variant else ""
        return f"{self.candidate}{variant}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredCandidate(_OfSpace):
    """A candidate that may fit.

    Args:
      space: the space that it is of.
      candidate: the candidate.
      bound: bytes that a device needs at least.
      seconds: a rough guess of its step time, for the order of compiling.
      configured: whether it is the user's configuration.
      propagated: whether it was propagated, and both are from there.
      turn: how many are compiled before it, of those with a pipeline or of those
        without.
    """

    bound: float
    seconds: float
    configured: bool
    propagated: bool = False
    turn: int = 0

    @property
    def seconds_per_example(self) -> float:
        """The guess by which candidates of several batches compare."""
        return self.seconds / self.candidate.batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropped(_OfSpace):
    """A candidate that is not compiled.

    Args:
      space: the space that it is of.
      candidate: the candidate.
      reason: why; counted in `Screened.left_out`.
      bound: bytes that a device needs at least, if that is why.
    """

    reason: str
    bound: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Screened:
    """The result of screening candidates without compiling.

    Args:
      promising: candidates that may fit, most promising first.
      left_out: numbers of dropped candidates, by reason.
      progress: how many plans that no file has were considered; None: none were.
      dropped: the dropped candidates.
      slow: candidates that are compiled only if no promising one fits.
    """

    promising: tuple[ScoredCandidate, ...]
    left_out: dict[str, int]
    progress: Progress | None = None
    dropped: tuple[Dropped, ...] = ()
    slow: tuple[ScoredCandidate, ...] = ()

    @property
    def least(self) -> Dropped | None:
        """The candidate that is too large by the smallest bound."""
        large = (dropped for dropped in self.dropped if dropped.bound is not None)
        return min(large, key=lambda dropped: dropped.bound, default=None)


def screen(space: SearchSpace, tell: Callable[[], object] = lambda: None) -> Screened:
    """Drops candidates that will not do, by shapes and memory, and orders the rest.

    Args:
      space: the space.
      tell: called for each candidate.

    Raises:
      ValueError: the model cannot be traced.
    """
    bound, limit = MemoryBound(space.experiment), space.torus.kind.memory
    left_out: collections.Counter[str] = collections.Counter()
    promising: list[ScoredCandidate] = []
    dropped: list[Dropped] = []
    seen, dims = set(), dims_of(space.experiment)
    for candidate in space.candidates():
        tell()
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
        seen.add(program)
        if reason is not None:
            left_out[reason] += 1
            most = bytes_ if reason == TOO_LARGE else None
            dropped.append(
                Dropped(space=space, candidate=candidate, reason=reason, bound=most)
            )
            continue
        recomputed = _recomputed(space.experiment, bound, candidate)
        promising.append(
            ScoredCandidate(
                space=space,
                candidate=candidate,
                bound=bytes_,
                seconds=rough_seconds(
                    space.experiment, candidate, space.torus, recomputed
                ),
                configured=space.is_configured(candidate),
            )
        )
    promising.sort(key=promise)
    return Screened(
        promising=tuple(promising),
        left_out=dict(left_out),
        dropped=tuple(dropped),
    )


def joined_spaces(parts: Sequence[Screened]) -> Screened:
    """What was screened of several spaces, as of a single one.

    The rough times of pipelines hardly compare with times by propagation, so the most
    promising candidates with and without pipelines take turns.
    """
    turns: collections.Counter[bool] = collections.Counter()
    promising = []
    for scored in sorted((s for part in parts for s in part.promising), key=promise):
        kind = bool(scored.space.stages)
        promising.append(dataclasses.replace(scored, turn=turns[kind]))
        turns[kind] += 1
    left_out: collections.Counter[str] = collections.Counter()
    for part in parts:
        left_out.update(part.left_out)
    return Screened(
        promising=tuple(sorted(promising, key=promise)),
        left_out=dict(left_out),
        progress=_joined_progress([p.progress for p in parts if p.progress]),
        dropped=tuple(dropped for part in parts for dropped in part.dropped),
        slow=tuple(scored for part in parts for scored in part.slow),
    )


def _joined_progress(parts: Sequence[Progress]) -> Progress | None:
    if not parts:
        return None
    return Progress(
        considered=sum(part.considered for part in parts),
        propagated=sum(part.propagated for part in parts),
        best=min((p.best for p in parts if p.best is not None), default=None),
        floor=min(part.floor for part in parts),
    )


def promise(scored: ScoredCandidate) -> tuple[bool, int, float]:
    """Smaller is better: the configuration, then the turn, then the time an example."""
    return (not scored.configured, scored.turn, scored.seconds_per_example)


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
