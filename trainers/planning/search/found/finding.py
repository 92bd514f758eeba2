"""Looking for plans: many by bounds, the promising ones by propagation.

Two searches take turns. On each mesh a crowd of plans, by rough costs, changes one name
at a time to the best of its choices. What is best there, on all meshes, waits to be
propagated; and whatever propagation finds fast has all its neighbours wait, at its own
cost and the rough difference. What seems fastest is propagated next, so that the search
can end at any time.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tqdm

from meshwright.framework.compiler.stablehlo.shardy.named_module import CompletionError
from meshwright.framework.devices.device_order import device_order
from meshwright.framework.devices.topology import Topology
from meshwright.trainers.planning.search.found.named_step import NamedStep
from meshwright.trainers.planning.search.found.propagated import (
    AXES,
    Priced,
    propagated,
)
from meshwright.trainers.planning.search.found.rough_plans import RoughPlans

_CROWD = 64
_SWEEPS = 4
_KEPT = 12
# So many of the best of each crowd are propagated whatever else promises.
_FIRST = 2
_NEIGHBOURS = 60
_MINOR = 0.02
# Neighbours wait for the plans that are among so many of the fastest.
_BEAM = 12
# What propagation counts is some 10% off the compiler's memory.
_SLACK = 1.1
# A clash, or a device's memory once too much, is worse than any time.
_CLASH, _TOO_LARGE = 1e9, 1e6


@dataclasses.dataclass(frozen=True, order=True)
class Point:
    """A plan in the space.

    Args:
      step: which of the steps it is for.
      shape: the mesh's shape, largest axis first.
      masks: for each name the axes that split it; see `rough_plans`.
    """

    step: int
    shape: tuple[int, ...]
    masks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A plan that was propagated.

    Args:
      point: the plan.
      priced: its cost.
    """

    point: Point
    priced: Priced


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a search is.

    Args:
      considered: plans whose bounds are known.
      propagated: plans that were completed.
      best: seconds of the fastest that fits; None if none does.
      floor: seconds that no plan of the space takes less than.
    """

    considered: int
    propagated: int
    best: float | None
    floor: float

    def show(self, bar: tqdm.tqdm, unit: str) -> None:
        """Moves a bar of the plans propagated.

        Args:
          bar: the bar.
          unit: what the times are, in thousandths.
        """
        best = "none fits"
        if self.best is not None:
            best = f"best {1e3 * self.best:.4g} {unit}"
        # A narrow terminal cuts off the end.
        bar.set_postfix_str(
            f"{best}, none below {1e3 * self.floor:.4g}, {self.considered} considered",
            refresh=False,
        )
        bar.update(self.propagated - bar.n)


class Finder:
    """Searches the plans of some steps, which differ in all but the plan.

    Args:
      steps: the steps, of the same names.
      weights: for each step by what its seconds are divided to compare them, such as
        its batch.
      torus: the topology.
      most_axes: mesh axes at most.
      known: costs of an earlier search by point, to which those of this one are added;
        None for what cannot be completed.
    """

    def __init__(
        self,
        steps: Sequence[NamedStep],
        weights: Sequence[float],
        torus: Topology,
        *,
        most_axes: int = 2,
        known: dict[Point, Priced | None] | None = None,
    ):
        self.steps, self.weights, self.torus = steps, weights, torus
        self.shapes = mesh_shapes(torus, most_axes)
        self.known = {} if known is None else known
        self.found: list[Found] = []
        self.considered = 0
        self._limit = torus.kind.memory
        self._rough: dict[tuple[int, tuple[int, ...]], RoughPlans] = {}
        self._crowds: dict[tuple[int, ...], np.ndarray] = {}
        self._waiting: list[tuple[float, Point]] = []
        self._turn = True
        self._crowded: list[tuple[int, float, Point]] = []
        self._waited: set[Point] = set()
        self._taken: set[Point] = set()
        self._around: set[Point] = set()

    @property
    def progress(self) -> Progress:
        best = self.best()
        floors = [
            rough.floor / self.weights[step] for (step, _), rough in self._rough.items()
        ]
        return Progress(
            considered=self.considered,
            propagated=len(self.found),
            best=None if best is None else self.cost(best),
            floor=min(floors, default=0.0),
        )

    def rough(self, step: int, shape: tuple[int, ...]) -> RoughPlans:
        """Bounds of a step's plans on a mesh."""
        key = step, shape
        if key not in self._rough:
            self._rough[key] = RoughPlans(self.steps[step], shape, self.torus)
        return self._rough[key]

    def cost(self, found: Found) -> float:
        """What plans are compared by."""
        return found.priced.seconds / self.weights[found.point.step]

    def rank(self, found: Found) -> tuple[bool, float]:
        """Smaller is better: what fits, then the fastest."""
        return not self.fits(found), self.cost(found)

    def fits(self, found: Found) -> bool:
        """Whether a device seems to have the memory for it."""
        return found.priced.memory <= _SLACK * self._limit

    def best(self) -> Found | None:
        """The fastest that seems to fit."""
        fits = [found for found in self.found if self.fits(found)]
        return min(fits, key=self.cost, default=None)

    def ranked(self) -> list[Found]:
        """All that was propagated, best first; of equally good ones the plainest."""
        plain = sorted(self.found, key=lambda f: sum(map(bool, f.point.masks)))
        return sorted(plain, key=self.rank)

    def run(
        self,
        starts: Sequence[Point],
        *,
        most: int,
        tell: Callable[[Progress], None] = lambda progress: None,
        until: float = float("inf"),
    ) -> None:
        """Searches.

        Args:
          starts: plans to begin with.
          most: how many are propagated at most.
          tell: told of the progress now and then.
          until: when to end, by `time.monotonic`.
        """
        for start in starts:
            self._wait(start, -1.0)
        for step, shape in itertools.product(range(len(self.steps)), self.shapes):
            if time.monotonic() > until:
                break
            self._crowd(step, shape)
            tell(self.progress)
        while len(self.found) < most and time.monotonic() < until:
            point = self._next()
            if point is None:
                break
            found = self.look_up(point)
            if found is not None:
                self.found.append(found)
                if self._is_good(found):
                    self._wait_around(found)
            tell(self.progress)

    def _next(self) -> Point | None:
        """The plan to propagate next; None if there is none.

        The best of each crowd take turns with what waits: a rough cost is no measure
        beside one that propagation corrected, nor beside that of another mesh.
        """
        for queue in (self._waiting, self._crowded):
            while queue and queue[0][-1] in self._taken:
                heapq.heappop(queue)
        is_start = self._waiting and self._waiting[0][0] < 0
        has_turn = self._turn and self._crowded and self._crowded[0][0] < _FIRST
        self._turn = not has_turn
        if self._crowded and not is_start and (has_turn or not self._waiting):
            return self._take(self._crowded)
        if not self._waiting and not self._widen():
            return None
        return self._take(self._waiting)

    def _take(self, queue: list[tuple]) -> Point:
        """The first of a queue. It may wait in the other too, with another cost."""
        point = heapq.heappop(queue)[-1]
        self._taken.add(point)
        return point

    def _widen(self) -> bool:
        """Has the neighbours of the best other plan wait; whether there are any."""
        for found in self.ranked():
            if found.point not in self._around:
                self._wait_around(found)
            if self._waiting:
                return True
        return False

    def _is_good(self, found: Found) -> bool:
        if len(self.found) <= _BEAM:
            return True
        ranks = heapq.nsmallest(_BEAM, map(self.rank, self.found))
        return self.rank(found) <= ranks[-1]

    def _wait(self, point: Point, cost: float) -> None:
        if point not in self._waited and point not in self._taken:
            self._waited.add(point)
            heapq.heappush(self._waiting, (cost, point))

    def look_up(self, point: Point) -> Found | None:
        """A plan with its cost; None if it cannot be completed."""
        if point not in self.known:
            step = self.steps[point.step]
            try:
                self.known[point] = propagated(
                    step, point.shape, point.masks, self.torus
                )
            except CompletionError:
                self.known[point] = None
        priced = self.known[point]
        return priced and Found(point=point, priced=priced)

    def score(self, rough: RoughPlans, step: int, masks: np.ndarray) -> np.ndarray:
        """Rough costs of plans, [plans]; what is none, or does not fit, comes last."""
        self.considered += len(masks)
        bounds = rough.evaluate(masks)
        excess = np.maximum(bounds.memory / self._limit - 1, 0)
        cost = bounds.seconds / self.weights[step]
        return cost + _CLASH * bounds.clashes + _TOO_LARGE * excess

    def _crowd(self, step: int, shape: tuple[int, ...]) -> None:
        """Improves a crowd of plans on a mesh by rough costs; the best then wait."""
        rough = self.rough(step, shape)
        random = np.random.default_rng([step, *shape])
        if shape in self._crowds:  # Of another step.
            crowd, sweeps = self._crowds[shape], 1
        else:
            columns = [random.choice(allowed, _CROWD) for allowed in rough.allowed]
            crowd, sweeps = np.stack(columns, axis=1), _SWEEPS
            crowd = crowd * (random.random(crowd.shape) < random.random((_CROWD, 1)))
        groups = [(name,) for name in range(len(rough.allowed))] + rough.clashing
        for _ in range(sweeps):
            before = crowd.copy()
            for number in random.permutation(len(groups)):
                crowd = self._improved(rough, step, crowd, groups[number])
            if (crowd == before).all():
                break
        crowd = np.unique(crowd, axis=0)
        self._crowds.setdefault(shape, crowd)
        scores = self.score(rough, step, crowd)
        for rank, i in enumerate(np.argsort(scores, kind="stable")[:_KEPT]):
            point = Point(step, shape, tuple(map(int, crowd[i])))
            if scores[i] < _TOO_LARGE:
                heapq.heappush(self._crowded, (rank, scores[i], point))

    def _improved(self, rough, step: int, crowd: np.ndarray, names) -> np.ndarray:
        """Each of a crowd with the best choice for a name, or for two."""
        choices = list(itertools.product(*(rough.allowed[name] for name in names)))
        if len(choices) == 1:
            return crowd
        tried = np.repeat(crowd[None], len(choices), axis=0)
        tried[:, :, list(names)] = np.array(choices)[:, None]
        scores = self.score(rough, step, tried.reshape(-1, crowd.shape[1]))
        # In doubt as it is.
        scores = scores.reshape(len(choices), -1)
        same = (tried == crowd).all(axis=2)
        best = np.where(same, scores * (1 - 1e-9), scores).argmin(axis=0)
        return tried[best, np.arange(len(crowd))]

    def _wait_around(self, found: Found) -> None:
        """Has the neighbours of a plan wait.

        They are its best by rough cost with another choice for a name or for two that
        clash, those with another choice for a name that products lack, those in which
        two mesh axes change places, and the same plan for another step.
        """
        point = found.point
        self._around.add(point)
        rough = self.rough(point.step, point.shape)
        masks = np.array([point.masks, *_neighbours(point.masks, rough)])
        scores = self.score(rough, point.step, masks)
        # What propagation says more than the rough cost is taken to be the same there.
        own = scores[0] if scores[0] < _TOO_LARGE else self.cost(found)
        more = self.cost(found) - own
        for i in np.argsort(scores[1:], kind="stable")[:_NEIGHBOURS] + 1:
            if scores[i] < _TOO_LARGE:
                # What makes no difference to products waits for what does.
                minor = _MINOR * self.cost(found) * (scores[i] == scores[0])
                other = dataclasses.replace(point, masks=tuple(map(int, masks[i])))
                self._wait(other, scores[i] + more + minor)
        for exchanged in _exchanged(point, rough):
            score = self.score(rough, point.step, np.array([exchanged.masks]))[0]
            if score < _TOO_LARGE:
                self._wait(exchanged, score + more)
        for step in range(len(self.steps)):
            if step != point.step:
                score = self.score(self.rough(step, point.shape), step, masks[:1])[0]
                if score < _TOO_LARGE:
                    self._wait(dataclasses.replace(point, step=step), score + more)


def _neighbours(masks: Sequence[int], rough: RoughPlans) -> Iterator[tuple[int, ...]]:
    """Plans with another choice for a name, or for two that clash.

    And those in which a name takes axes from all names that it clashes with: in a
    mixture of experts, the stream's model dim from its sequence and the capacity.
    """
    for names in [*((name,) for name in range(len(masks))), *rough.clashing]:
        for choice in itertools.product(*(rough.allowed[name] for name in names)):
            changed = list(masks)
            for name, mask in zip(names, choice, strict=True):
                changed[name] = mask
            if all(changed[name] != masks[name] for name in names):
                yield tuple(changed)
    for name, allowed in enumerate(rough.allowed):
        others = {n for pair in rough.clashing if name in pair for n in pair} - {name}
        for mask in allowed:
            losing = [n for n in others if masks[n] & mask]
            if mask != masks[name] and len(losing) > 1:  # One is a pair, see above.
                changed = list(masks)
                changed[name] = mask
                for other in losing:
                    left = masks[other] & ~mask
                    changed[other] = left if left in rough.allowed[other] else 0
                yield tuple(changed)


def _exchanged(point: Point, rough: RoughPlans) -> Iterator[Point]:
    """The plan with two mesh axes of other sizes in each other's place.

    No changes of single names lead there but by worse plans.
    """
    for i, j in itertools.combinations(range(len(point.shape)), 2):
        both = 1 << i | 1 << j
        masks = tuple(
            mask ^ both if mask & both not in (0, both) else mask
            for mask in point.masks
        )
        allowed = all(
            mask in choices for mask, choices in zip(masks, rough.allowed, strict=True)
        )
        if allowed and point.shape[i] != point.shape[j]:
            yield dataclasses.replace(point, masks=masks)


def mesh_shapes(torus: Topology, most_axes: int) -> list[tuple[int, ...]]:
    """Mesh shapes that can be laid onto a topology, largest axis first.

    Axes' names mean nothing, so their order is no other mesh.
    """
    shapes = []
    for count in range(1, min(most_axes, len(AXES)) + 1):
        for shape in _descending(torus.size, count, torus.size):
            try:
                device_order(shape, torus)
            except ValueError:
                continue
            shapes.append(shape)
    return shapes


def _descending(number: int, count: int, most: int) -> list[tuple[int, ...]]:
    if count == 1:
        return [(number,)] if 1 < number <= most else []
    return [
        (first, *rest)
        for first in range(min(number, most), 1, -1)
        if number % first == 0
        for rest in _descending(number // first, count - 1, first)
    ]
