"""Plans that were found, as candidates; and plan files as starting points."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from meshwright.framework.devices.topology import Topology
from meshwright.framework.modeling.layer import STACK_DIM
from meshwright.framework.sharding.plan import (
    SequenceAttention,
    ShardingPlan,
    as_axes,
)
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.planning.search.found.alike import all_plainest, distinct
from meshwright.trainers.planning.search.found.finding import (
    Finder,
    Found,
    Point,
    Progress,
)
from meshwright.trainers.planning.search.found.named_step import (
    ACTIVATIONS,
    DimName,
    NamedStep,
    named_step,
    names_of,
)
from meshwright.trainers.planning.search.found.propagated import AXES, Priced
from meshwright.trainers.planning.search.search_space import (
    Candidate,
    NamedPlan,
)

# A name that is split like another one if a table has no entry for it.
_FOLLOWS = {"stream": "sequence", "microbatch": "batch"}


class PlanFinder:
    """Finds plans for an experiment.

    Args:
      experiment: the experiment of the user's files.
      choices: candidates that differ in all but plan and mesh: recomputation, batch and
        microbatches.
      torus: the topology.
      known: costs of an earlier search, see `Finder`.

    Raises:
      OnePlanError: a step cannot be traced for all plans at once.
    """

    def __init__(
        self,
        experiment: Experiment,
        choices: Sequence[Candidate],
        torus: Topology,
        *,
        known: dict[Point, Priced | None],
        tell: Callable[[int], None] = lambda count: None,
    ):
        self.experiment, self.choices = experiment, choices
        names = names_of(experiment)
        steps: list[NamedStep] = []
        for choice in choices:
            steps.append(named_step(choice.of(experiment), names))
            tell(len(steps))
        self.names = names
        self.finder = Finder(
            steps,
            [choice.batch for choice in choices],
            torus,
            most_axes=min(max(2, len(experiment.plan.mesh_axes)), len(AXES)),
            known=known,
        )

    def find(
        self,
        starts: Sequence[Candidate],
        *,
        most: int,
        tell: Callable[[Progress], None],
    ) -> None:
        """Propagates `most` plans; those of `starts` first."""
        points = map(self.point_of, starts)
        self.finder.run([p for p in points if p is not None], most=most, tell=tell)

    def point_of(self, candidate: Candidate) -> Point | None:
        """A candidate as a point of the space; None if it is none."""
        plan = candidate.plan.on(candidate.mesh)
        if _says_more(plan):
            return None
        sizes = dict(zip(plan.mesh_axes, plan.mesh_shape, strict=True))
        axes = sorted((a for a in sizes if sizes[a] > 1), key=lambda a: -sizes[a])
        shape = tuple(sizes[axis] for axis in axes)
        if shape not in self.finder.shapes:
            return None
        bits = {axis: 1 << i for i, axis in enumerate(axes)}
        masks = tuple(
            sum(bits.get(axis, 0) for axis in _axes_of(plan, name))
            for name in self.names
        )
        key = _choice(candidate)
        steps = [i for i, one in enumerate(self.choices) if _choice(one) == key]
        return Point(steps[0], shape, masks) if steps else None

    def look_up(self, candidate: Candidate) -> Found | None:
        """What propagation says of a candidate; None if it says nothing."""
        point = self.point_of(candidate)
        return None if point is None else self.finder.look_up(point)

    def candidates(self, most: int) -> Iterator[tuple[Candidate, Found]]:
        """The best plans found, as candidates, without names that do not matter."""
        finder = self.finder
        ranked = distinct(finder, most)
        for number, plain in enumerate(all_plainest(finder, ranked), 1):
            choice = self.choices[plain.point.step]
            tables = self.tables(plain.point)
            plan = NamedPlan(name=f"found {number}", gin_file=None, tables=tables)
            shape = plain.point.shape
            yield dataclasses.replace(choice, mesh=shape, plan=plan), plain

    def tables(self, point: Point) -> ShardingPlan:
        """A plan of the space."""
        tables: dict[str, dict[str, tuple[str, ...]]] = {"weights": {}, ACTIVATIONS: {}}
        by_name = dict(zip(self.names, point.masks, strict=True))
        for name, mask in by_name.items():
            axes = tuple(a for i, a in enumerate(AXES) if mask >> i & 1)
            followed = DimName(ACTIVATIONS, _FOLLOWS.get(name.dim, ""))
            says_more = name.table == ACTIVATIONS and mask != by_name.get(
                followed, mask
            )
            if axes or says_more:
                tables[name.table][name.dim] = axes
        return dataclasses.replace(
            self.experiment.plan,
            mesh_axes=AXES[: len(point.shape)],
            mesh_shape=point.shape,
            device_ids=None,
            unreduced_gradient_axes=(),
            sequence_attention=SequenceAttention.GATHER,
            **tables,
        )


def _says_more(plan: ShardingPlan) -> bool:
    """Whether a plan does what none of the space does."""
    return (
        bool(plan.unreduced_gradient_axes)
        or bool(as_axes(plan.weights.get(STACK_DIM)))
        or plan.sequence_attention is not SequenceAttention.GATHER
    )


def _axes_of(plan: ShardingPlan, name: DimName) -> tuple[str, ...]:
    table: Mapping = getattr(plan, name.table)
    dim = name.dim
    if name.table == ACTIVATIONS and dim not in table:
        dim = _FOLLOWS.get(dim, dim)
    return as_axes(table.get(dim))


def _choice(candidate: Candidate) -> tuple:
    return candidate.policy, candidate.batch, candidate.microbatches


def table_text(plan: ShardingPlan) -> list[str]:
    """A plan as lines of a table: each name, and what splits it in either table."""
    names = dict.fromkeys([*plan.weights, *plan.activations])
    width = max(map(len, [*names, "name"]))
    lines = [f"{'name':<{width}}  {'weights':<9}activations"]
    for name in sorted(names):
        both = (plan.weights, plan.activations)
        split = [
            "" if name not in table else ".".join(as_axes(table[name])) or "-"
            for table in both
        ]
        lines.append(f"{name:<{width}}  {split[0]:<9}{split[1]}".rstrip())
    return lines
