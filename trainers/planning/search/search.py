"""Search for the mesh, plan and recomputation that train fastest on a topology.

    plan files -> memory bound --------v
    names of dims -> bounds -> propagation -> compile, in processes -> rank
                     (10^5)    (10^3)         (15, cached by content)

The compiled programs are those that the trainer would run, so the ranking rests on the
same estimates as a plan of one configuration. Each counts in its best device order.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence

from meshwright.framework.sizes import bytes_text
from meshwright.trainers.experiment import config
from meshwright.trainers.experiment.bindings.outside_names import imported
from meshwright.trainers.planning.search import plan_cache, search_worker
from meshwright.trainers.planning.search.found.joined import with_found
from meshwright.trainers.planning.search.plan_cache import PlanCache
from meshwright.trainers.planning.search.search_result import Result
from meshwright.trainers.planning.search.search_screen import (
    ScoredCandidate,
    Screened,
    SearchSpace,
    joined_spaces,
    promise,
    screen,
)
from meshwright.trainers.planning.search.search_space import Candidate, built
from meshwright.trainers.planning.search.search_variants import with_other_updates
from meshwright.trainers.startup.messages import told_bar

log = logging.getLogger("absl")

_LOG = "log.txt"


class NothingFitsError(ValueError):
    """No candidate has a program that fits."""


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
      candidates: how many there were of plan files.
      is_interrupted: whether the search was, so that more is to be compiled.
    """

    ranked: tuple[RankedCandidate, ...]
    refused: tuple[RankedCandidate, ...]
    screened: Screened
    candidates: int
    is_interrupted: bool = False

    @property
    def not_compiled(self) -> int:
        """Promising candidates for which the budget did not last."""
        compiled = {id(row.promising) for row in (*self.ranked, *self.refused)}
        return sum(id(each) not in compiled for each in self.screened.promising)


def search(
    space: SearchSpace,
    *,
    cache: PlanCache,
    budget: int,
    jobs: int,
    propagated: int = 0,
    others: Sequence[SearchSpace] = (),
) -> SearchResult:
    """Compiles the promising candidates and ranks them by time an example.

    The fastest is also compiled with or without weight-update sharding, as is not
    configured. Ctrl-C while candidates are compiled ends it with those that fit so far.

    Args:
      space: what to choose from.
      cache: results of earlier searches, to which those of this search are added.
      budget: how many are compiled at most before that, cached results included.
      jobs: how many are compiled at once.
      propagated: how many plans that no file has are propagated at most; 0: those of
        the space's files alone.
      others: variants of the space, with other stages or groups of experts.

    Raises:
      NothingFitsError: no candidate fits; the message says what the smallest needs.
      ValueError: no candidate can be laid out; the message says why.
      KeyboardInterrupt: it came before any candidate was compiled that fits.
    """
    spaces = (space, *others)
    total = sum(len(each.candidates()) for each in spaces)
    with told_bar(total, "memory bounds") as bar:
        parts = [
            (each, part) for each in spaces if (part := _screened(each, bar.update))
        ]
    # Pipelines have the plans of files alone.
    plain = sum(not each.stages for each, _ in parts)
    screened = joined_spaces(
        [
            with_found(each, part, cache, math.ceil(propagated / plain))
            if propagated and not each.stages
            else part
            for each, part in parts
        ]
    )
    if not screened.promising:
        raise _no_candidate(space, screened)
    rows, is_interrupted = [], False
    try:  # In place: what Ctrl-C cuts short leaves the rows that it had.
        rows += _compiled(screened.promising, cache, budget, jobs)
        if screened.slow and not _fit(rows):
            rows += _compiled(screened.slow, cache, budget - len(rows), jobs)
        fit = _fit(rows)
        if fit and (other := with_other_updates(min(fit, key=_rank).promising)):
            rows += _compiled(other, cache, len(other), jobs)
    except KeyboardInterrupt:
        if not _fit(rows):
            raise
        is_interrupted = True
    ranked = _fit(rows)
    refused = [row for row in rows if row.result.refusal is not None]
    if not ranked:
        raise NothingFitsError(_all_refused(refused, screened, budget))
    return SearchResult(
        ranked=tuple(sorted(ranked, key=_rank)),
        refused=tuple(refused),
        screened=screened,
        candidates=total,
        is_interrupted=is_interrupted,
    )


def _fit(rows: Sequence[RankedCandidate]) -> list[RankedCandidate]:
    return [row for row in rows if row.result.refusal is None]


def _screened(space: SearchSpace, tell: Callable[[], object]) -> Screened | None:
    """What was screened of a space; None, and a warning, for a variant that is none."""
    try:
        return screen(space, tell)
    except ValueError as error:
        if not space.changes:
            raise
        reason = " ".join(str(error).split())
        log.warning("search: left out: %s: %s", "; ".join(space.changes), reason)
        return None


def _rank(row: RankedCandidate) -> tuple[float, int]:
    """Fastest first; of equally fast candidates the smallest."""
    return row.seconds_per_example, row.result.peak


def _compiled(
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
    # Bounds of propagated candidates, which are estimates, compare among themselves.
    refused_bounds = {True: float("inf"), False: float("inf")}
    best, started = float("inf"), 0
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(
            told_bar(min(budget, len(waiting)), "compiling", smoothing=0)
        )
        stack.callback(lambda: [compile_.stop() for _, compile_ in running])
        while waiting or running:
            while waiting and started < budget and len(running) < jobs:
                scored = min(
                    waiting,
                    key=lambda scored: (
                        scored.bound >= refused_bounds[scored.propagated]
                        and not scored.configured,
                        promise(scored),
                    ),
                )
                waiting.remove(scored)
                started += 1
                running.append((scored, Compile(scored.space, scored.candidate, cache)))
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
                bound = refused_bounds[scored.propagated]
                refused_bounds[scored.propagated] = min(bound, scored.bound)
            elif result.refusal is None:
                best = min(best, row.seconds_per_example)
                bar.set_postfix_str(f"best {1e3 * best:.4g} ms/example", refresh=False)
            bar.update()
            yield row


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
        # A variant's bindings are the last, as a plan's file may bind the same.
        params = [*space.gin_params, *candidate.bindings(), *space.changes]
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
    bound, smallest = screened.least.bound, screened.least.text
    return NothingFitsError(
        f"no candidate fits TPU topology {name!r}: the smallest, {smallest}, needs at "
        f"least {bytes_text(bound)} a device, {bytes_text(bound - limit)} "
        f"more than there is; choose a larger topology or a smaller batch "
        f"(--search_batch):{counts}"
    )


def _all_refused(
    refused: Sequence[RankedCandidate], screened: Screened, budget: int
) -> str:
    least = min(refused, key=lambda row: row.promising.bound)
    rest = len(screened.promising) + len(screened.slow) - len(refused)
    more = (
        f"; {rest} were not compiled: raise --search_budget above {budget}"
        if rest
        else "; choose a larger topology or a smaller batch (--search_batch)"
    )
    return (
        f"no candidate fits: all {len(refused)} that were compiled were refused. The "
        f"smallest, {least.promising.text}, needs at least "
        f"{bytes_text(least.promising.bound)} a device, and was refused as "
        f"{least.result.refusal}{more}"
    )
