"""The candidates of a search that may fit, and in which order they are compiled."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence

import gin

from meshwright.framework.compiler.weight_update_sharding.decide import (
    WeightUpdateSharding,
)
from meshwright.framework.devices.topology import Topology
from meshwright.framework.modeling.recompute import Recompute
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.stacks import pipelines
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.search.found.finding import Progress
from meshwright.trainers.planning.search.search_cost import rough_seconds
from meshwright.trainers.planning.search.search_memory import MemoryBound
from meshwright.trainers.planning.search.search_space import (
    Candidate,
    NamedPlan,
    Policy,
    built,
    candidates,
    dims_of,
    essence,
    is_configured,
    misfit,
    policies,
)

log = logging.getLogger("absl")

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
      changed: what `staged`, `grouped` or `with_other_updates` bound otherwise than the
        user's files, but for stages, in a few letters; None if nothing is.
    """

    experiment: Experiment
    gin_files: tuple[str, ...]
    gin_params: tuple[str, ...]
    torus: Topology
    plans: tuple[NamedPlan, ...]
    batches: tuple[int, ...]
    microbatches: tuple[int, ...] = ()
    more_names: tuple[str, ...] = ()
    changed: str | None = None

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
        return self.changed is None and is_configured(self.experiment, candidate)

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


_REPEATS = (1, 2, 4)


def staged(
    space: SearchSpace, stages: Sequence[int] = (), repeats: Sequence[int] = ()
) -> list[SearchSpace]:
    """The spaces of a pipelined model with other stages, or without its pipelines.

    The shapes of its weights depend on its stages, so each has its own experiment.

    Args:
      space: the space as configured.
      stages: numbers of stages to choose from, 1 for no pipeline; empty for 1 and the
        powers of two that divide the layers, up to the number of devices.
      repeats: how often a microbatch may pass each stage; empty for 1, 2, 4 and the
        configured numbers.
    """
    given = pipelines(space.experiment.task)
    if not given:
        return []
    counts = [pipeline.stack.count for pipeline in given.values()]
    most = min(*counts, space.torus.size)
    numbers = stages or [2**n for n in range(most.bit_length())]
    kept = repeats or {*_REPEATS, *(each.num_repeats for each in given.values())}
    made = []
    for number, times in itertools.product(sorted(set(numbers)), sorted(set(kept))):
        if number == 1 and times == min(kept):
            made += _without_pipelines(space)
        divides = all(count % (number * times) == 0 for count in counts)
        if number > 1 and (divides or (stages and repeats)):
            lines = f"Pipeline.num_stages = {number}", f"Pipeline.num_repeats = {times}"
            made += _with_bindings(space, lines)
    return [each for each in made if each.stages != space.stages]


def grouped(space: SearchSpace, sizes: Sequence[int]) -> list[SearchSpace]:
    """The spaces of a mixture of experts with groups of other numbers of tokens.

    Tokens compete for slots within their group, so each trains another model.

    Raises:
      ConfigError: `MoE.group_size` has no effect, as another binding overrides it.
    """
    made = []
    for size in sizes:
        line = f"MoE.group_size = {size}"
        built(space.gin_files, [*space.gin_params, line])
        made += _with_bindings(space, [line], f"g{size}")
    return [each for each in made if each.experiment != space.experiment]


def with_other_updates(scored: ScoredCandidate) -> list[ScoredCandidate]:
    """A candidate with and without automatic weight-update sharding, but as it is.

    None where each matrix is split by all axes of the batch already.
    """
    space, candidate = scored.space, scored.candidate
    programs = StepPrograms(candidate.of(space.experiment))
    shardings = programs.plan_layout.shardings.theta.leaves()
    weights = zip(programs.state_specs.theta.leaves(), shardings, strict=True)
    data = set(programs.data_axes)
    split = [set().union(*s.dims) for spec, s in weights if spec.is_matrix]
    if all(data <= axes for axes in split):
        return []
    made = []
    for mode in (WeightUpdateSharding.AUTO, WeightUpdateSharding.OFF):
        if mode is not space.experiment.weight_update_sharding:
            line = f'Experiment.weight_update_sharding = "{mode.value}"'
            made += _with_bindings(space, [line], mode.value)
    return [dataclasses.replace(scored, space=each, configured=False) for each in made]


def _with_bindings(
    space: SearchSpace, lines: Sequence[str], what: str = ""
) -> Iterator[SearchSpace]:
    """The space with more bindings; none if nothing can be built of them."""
    params = (*space.gin_params, *lines)
    try:
        experiment = built(space.gin_files, params)
    except ValueError as error:
        log.info("search: left out: %s: %s", "; ".join(lines), error)
        return
    yield dataclasses.replace(
        space,
        experiment=experiment,
        gin_params=params,
        changed=" ".join(filter(None, (space.changed, what))),
    )


def _without_pipelines(space: SearchSpace) -> Iterator[SearchSpace]:
    """The space with the stacks of its pipelines in their places, if gin can say so."""
    built(space.gin_files, space.gin_params)  # Loads what is queried.
    lines = []
    for path in pipelines(space.experiment.task):
        *parents, field = path.split(".")
        holder = space.experiment.task
        for name in parents:
            holder = holder[int(name)] if name.isdecimal() else getattr(holder, name)
        bound = f"{type(holder).__name__}.{field}"
        try:
            pipeline = gin.query_parameter(bound)
            stack = _stack_of(pipeline.scoped_selector.split("/"))
        except (ValueError, AttributeError):
            log.info("search: no plan without pipelines, as nothing binds %s", bound)
            return
        lines.append(f"{bound} = {stack!r}")
    yield from _with_bindings(space, lines)


def _stack_of(pipeline: Sequence[str]) -> object:
    """What a pipeline's stack is bound to, in its scopes or around them."""
    try:
        return gin.query_parameter(f"{'/'.join(pipeline)}.stack")
    except ValueError:
        if len(pipeline) == 1:
            raise
        return _stack_of(pipeline[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredCandidate:
    """A candidate that may fit.

    Args:
      space: the space that it is of.
      candidate: the candidate.
      bound: bytes that a device needs at least.
      seconds: a rough guess of its step time, for the order of compiling.
      configured: whether it is the user's configuration.
      propagated: whether it was propagated, and both are from there.
      turn: how many are more promising, of those with a pipeline or of those without.
    """

    space: SearchSpace
    candidate: Candidate
    bound: float
    seconds: float
    configured: bool
    propagated: bool = False
    turn: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropped:
    """A candidate that is not compiled.

    Args:
      space: the space that it is of.
      candidate: the candidate.
      reason: why; counted in `Screened.left_out`.
      bound: bytes that a device needs at least, if that is why.
    """

    space: SearchSpace
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


def screen(space: SearchSpace, tell: Callable[[], object] = lambda: None) -> Screened:
    """Drops candidates that will not do, by shapes and memory, and orders the rest.

    Args:
      space: the space.
      tell: called for each candidate.
    """
    bound, limit = MemoryBound(space.experiment), space.torus.kind.memory
    left_out: collections.Counter[str] = collections.Counter()
    promising: list[ScoredCandidate] = []
    dropped: list[Dropped] = []
    least: tuple[float, Candidate] | None = None
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
            if least is None or bytes_ < least[0]:
                least = (bytes_, candidate)
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
        least=least,
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
    smallest = [part.least for part in parts if part.least is not None]
    return Screened(
        promising=tuple(sorted(promising, key=promise)),
        left_out=dict(left_out),
        least=min(smallest, key=lambda least: least[0], default=None),
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
    """Smaller is better: the user's configuration, then the least time an example."""
    seconds = scored.seconds / scored.candidate.batch
    return (not scored.configured, scored.turn, seconds)


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
