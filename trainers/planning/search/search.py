"""Search for the mesh, plan and recomputation that train fastest on a topology.

    candidates -> memory bound -> rough order -> compile, in processes -> rank
                  (drops)         (budget)       (cached by content)

The compiled programs are those that the trainer would run, so the ranking rests on the
same estimates as a plan of one configuration. Each counts in its best device order.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence

import tqdm

from meshwright.framework.devices.topology import Topology
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.sizes import bytes_text
from meshwright.trainers.experiment import config
from meshwright.trainers.experiment.bindings.outside_names import imported
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.planning.search import plan_cache, search_worker
from meshwright.trainers.planning.search.plan_cache import PlanCache
from meshwright.trainers.planning.search.search_cost import rough_seconds
from meshwright.trainers.planning.search.search_memory import MemoryBound
from meshwright.trainers.planning.search.search_result import Result
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

_LOG = "log.txt"
SAME = "the same program as with another plan"
TOO_LARGE = "state and saved activations alone exceed memory"


class NothingFitsError(ValueError):
    """No candidate has a program that fits."""


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
    """

    experiment: Experiment
    gin_files: tuple[str, ...]
    gin_params: tuple[str, ...]
    torus: Topology
    plans: tuple[NamedPlan, ...]
    batches: tuple[int, ...]
    microbatches: tuple[int, ...] = ()

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
    """

    candidate: Candidate
    bound: float
    seconds: float
    configured: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Screened:
    """The result of screening candidates without compiling.

    Args:
      promising: candidates that may fit, most promising first.
      left_out: numbers of dropped candidates, by reason.
      least: the smallest bound of candidates that are too large, and its candidate;
        None if there are none.
    """

    promising: tuple[ScoredCandidate, ...]
    left_out: dict[str, int]
    least: tuple[float, Candidate] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankedCandidate:
    """A candidate that was compiled, or refused."""

    promising: ScoredCandidate
    result: Result

    @property
    def seconds_per_example(self) -> float:
        """The estimate by which candidates are ranked."""
        return self.result.seconds / self.promising.candidate.batch

    def bindings(self) -> tuple[str, ...]:
        """Lines of gin, to be read after the user's files and bindings."""
        lines = self.promising.candidate.bindings()
        if self.result.device_ids is None:
            return lines
        ids = textwrap.indent(textwrap.fill(str(self.result.device_ids), 76), " " * 4)
        return (*lines, f"ShardingPlan.device_ids = \\\n{ids}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Args:
      ranked: candidates whose programs fit, best first.
      refused: compiled candidates without such a program.
      screened: the result of screening.
    """

    ranked: tuple[RankedCandidate, ...]
    refused: tuple[RankedCandidate, ...]
    screened: Screened

    @property
    def not_compiled(self) -> int:
        """Promising candidates for which the budget did not last."""
        return len(self.screened.promising) - len(self.ranked) - len(self.refused)


def search(
    space: SearchSpace, *, cache: PlanCache, budget: int, jobs: int
) -> SearchResult:
    """Compiles the promising candidates and ranks them by time an example.

    Args:
      space: what to choose from.
      cache: results of earlier searches, to which those of this search are added.
      budget: how many are compiled at most, cached results included.
      jobs: how many are compiled at once.

    Raises:
      NothingFitsError: no candidate fits; the message says what the smallest needs.
      ValueError: no candidate can be laid out; the message says why.
    """
    screened = screen(space)
    if not screened.promising:
        raise _no_candidate(space, screened)
    rows = list(_compiled(space, screened.promising, cache, budget, jobs))
    ranked = [row for row in rows if row.result.refusal is None]
    refused = [row for row in rows if row.result.refusal is not None]
    if not ranked:
        raise NothingFitsError(_all_refused(refused, screened, budget))
    return SearchResult(
        ranked=tuple(sorted(ranked, key=_rank)),
        refused=tuple(refused),
        screened=screened,
    )


def screen(space: SearchSpace) -> Screened:
    """Drops candidates that will not do, by shapes and memory, and orders the rest."""
    bound, limit = MemoryBound(space.experiment), space.torus.kind.memory
    left_out: collections.Counter[str] = collections.Counter()
    promising: list[ScoredCandidate] = []
    least: tuple[float, Candidate] | None = None
    seen, dims = set(), dims_of(space.experiment)
    bar = tqdm.tqdm(space.candidates(), desc="memory bounds", dynamic_ncols=True)
    for candidate in bar:
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
    promising.sort(key=_promise)
    return Screened(promising=tuple(promising), left_out=dict(left_out), least=least)


def _rank(row: RankedCandidate) -> tuple[float, int]:
    """Fastest first; of equally fast candidates the smallest."""
    return row.seconds_per_example, row.result.peak


def _promise(scored: ScoredCandidate) -> tuple[bool, float]:
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
    return 1.0 - (some - none) / (all_ - none) if all_ > none else 0.0


def _compiled(
    space: SearchSpace,
    promising: Sequence[ScoredCandidate],
    cache: PlanCache,
    budget: int,
    jobs: int,
) -> Iterator[RankedCandidate]:
    """Compiles up to `budget` candidates, `jobs` at once.

    Candidates that need at least as much memory as a refused candidate wait for the
    rest. Results are taken in the order of their start, and which candidate is next
    depends on those results alone: the same search compiles the same candidates,
    however long each takes.
    """
    waiting, running = list(promising), collections.deque()
    refused_bound, best, started = float("inf"), float("inf"), 0
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(_bar(min(budget, len(waiting))))
        stack.callback(lambda: [compile_.stop() for _, compile_ in running])
        while waiting or running:
            while waiting and started < budget and len(running) < jobs:
                scored = min(
                    waiting,
                    key=lambda scored: (
                        scored.bound >= refused_bound and not scored.configured,
                        _promise(scored),
                    ),
                )
                waiting.remove(scored)
                started += 1
                running.append((scored, Compile(space, scored.candidate, cache)))
            if not running:
                return
            scored, compile_ = running[0]
            while not compile_.is_done(within=1):
                bar.update(0)  # Updates the clock.
            result = compile_.result()
            running.popleft()
            # Cached results tell nothing of how long the rest take.
            bar.initial += compile_.was_cached
            row = RankedCandidate(promising=scored, result=result)
            if result.too_large:
                refused_bound = min(refused_bound, scored.bound)
            elif result.refusal is None:
                best = min(best, row.seconds_per_example)
                bar.set_postfix_str(f"best {1e3 * best:.4g} ms/example", refresh=False)
            bar.update()
            yield row


def _bar(total: int) -> tqdm.tqdm:
    """A live bar on a terminal, a line now and then in a log file."""
    return tqdm.tqdm(
        total=total,
        desc="compiling",
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 15.0,
        miniters=0,
        smoothing=0,
        bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} "
        "[{elapsed}<{remaining}{postfix}]",
    )


class Compile:
    """A candidate that is compiled in a separate process, unless it is cached.

    Args:
      space: has the user's files and the topology.
      candidate: the candidate.
      cache: where its result is looked up and kept.

    Attributes:
      was_cached: whether its result was cached.
    """

    def __init__(self, space: SearchSpace, candidate: Candidate, cache: PlanCache):
        self._cache, self.was_cached = cache, False
        params = [*space.gin_params, *candidate.bindings()]
        try:
            built(space.gin_files, params)
        except ValueError as error:
            self._known = Result(refusal=" ".join(str(error).split()))
            return
        self._key = plan_cache.key_parts(config.operative_text(), space.torus.name)
        cached = cache.cached(self._key)
        self.was_cached = cached is not None
        self._known = Result.of(cached) if self.was_cached else None
        if not self.was_cached:
            self._start(space, params)

    def _start(self, space: SearchSpace, params: Sequence[str]) -> None:
        request = {
            "gin_files": list(space.gin_files),
            "gin_params": list(params),
            "topology": space.torus.name,
            "imports": list(imported()),
        }
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-search-")
        folder = pathlib.Path(self._folder.name)
        (folder / search_worker.REQUEST).write_text(json.dumps(request))
        with (folder / _LOG).open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", search_worker.__name__, str(folder)],
                stdin=subprocess.PIPE,  # Closed by the end of this process.
                stdout=log,
                stderr=log,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                start_new_session=True,  # Ctrl-C is for the search to handle.
            )

    def is_done(self, *, within: float) -> bool:
        """Whether it is done, or will be within so many seconds."""
        if self._known is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(within)
                return True
        return self._known is not None

    def result(self) -> Result:
        """Waits for the result; of failures, only want of memory is cached."""
        if self._known is None:
            status = self._process.wait()
            self._process.stdin.close()
            self._known = self._read(status)
            if self._known.is_final:
                self._cache.store(self._key, dataclasses.asdict(self._known))
            self._folder.cleanup()
        return self._known

    def stop(self) -> None:
        """Keeps the result if there is one, else ends the process."""
        if self._known is None:
            if self._process.poll() is None:
                self._process.kill()
            self.result()

    def _read(self, status: int) -> Result:
        folder = pathlib.Path(self._folder.name)
        if status == 0:
            return Result.of(json.loads((folder / search_worker.RESULT).read_text()))
        how = f"with status {status}"
        if status < 0:
            how = f"by signal {signal.Signals(-status).name}"
        lines = (folder / _LOG).read_text(errors="replace").strip().splitlines()
        last = f": {lines[-1].strip()}" if lines else ""
        return Result(refusal=f"its process ended {how}{last}")


def _no_candidate(space: SearchSpace, screened: Screened) -> ValueError:
    name, limit = space.torus.name, space.torus.kind.memory
    counts = "".join(f"\n  {n} {why}" for why, n in screened.left_out.items())
    if screened.least is None:
        return ValueError(
            f"no candidate can be laid out on TPU topology {name!r}: choose other "
            "batches (--search_batch), microbatches (--search_microbatches) or plans "
            f"(--search_plans); left out:{counts}"
        )
    bytes_, candidate = screened.least
    return NothingFitsError(
        f"no candidate fits TPU topology {name!r}: the smallest, {candidate}, needs at "
        f"least {bytes_text(bytes_)} a device, {bytes_text(bytes_ - limit)} "
        f"more than there is; choose a larger topology or a smaller batch "
        f"(--search_batch):{counts}"
    )


def _all_refused(
    refused: Sequence[RankedCandidate], screened: Screened, budget: int
) -> str:
    least = min(refused, key=lambda row: row.promising.bound)
    rest = len(screened.promising) - len(refused)
    more = (
        f"; {rest} were not compiled: raise --search_budget above {budget}"
        if rest
        else "; choose a larger topology or a smaller batch (--search_batch)"
    )
    return (
        f"no candidate fits: all {len(refused)} that were compiled were refused. The "
        f"smallest, {least.promising.candidate}, needs at least "
        f"{bytes_text(least.promising.bound)} a device, and was refused as "
        f"{least.result.refusal}{more}"
    )
