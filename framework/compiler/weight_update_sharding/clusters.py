"""Finds the weight updates of a program (weight-update sharding 3.2).

A cluster is a set of ops around one or more gradient reductions that all replicas
compute alike, and could compute on shards instead: mostly elementwise ops, followed
from the reductions through loops to the state that the step returns.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.hlo.hlo_text import itemsize
from meshwright.framework.compiler.stablehlo.dataflow.carried import Carried, Use
from meshwright.framework.compiler.stablehlo.shardy.op_rules import OpRules
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    BRANCHES,
    WHILE,
    dtype_of,
    shape_of,
    walk,
)
from meshwright.framework.compiler.weight_update_sharding.carried_state import (
    frequency,
    joined,
    trips,
)
from meshwright.framework.compiler.weight_update_sharding.redundancy import Redundancy
from meshwright.framework.compiler.weight_update_sharding.shardable import (
    Place,
    dim_map,
)

_ENDS = ("func.func", "func.return", "stablehlo.return", WHILE, *BRANCHES)


class Groups:
    """Disjoint sets of hashable things."""

    def __init__(self):
        self._parent: dict = {}

    def find(self, item):
        root = item
        while self._parent.get(root, root) != root:
            root = self._parent[root]
        while self._parent.get(item, item) != root:
            self._parent[item], item = root, self._parent[item]
        self._parent.setdefault(root, root)
        return root

    def join(self, a, b) -> None:
        self._parent[self.find(a)] = self.find(b)


def bytes_of(value: ir.Value) -> int:
    """Bytes of the full tensor."""
    type_ = ir.RankedTensorType(value.type)
    return math.prod(type_.shape) * itemsize(dtype_of(value))


@dataclasses.dataclass(eq=False)
class Cluster:
    """One weight update.

    Args:
      links: the state that is kept in shards, and the links of loops that carry it.
      ops: the ops to compute on shards.
      values: tensors that the ops read or make, and those of the links.
      state: numbers of the program's arguments that it updates.
      steps: the loops over steps, which carry the state.
    """

    links: list[Carried] = dataclasses.field(default_factory=list)
    ops: list[ir.Operation] = dataclasses.field(default_factory=list)
    values: list[ir.Value] = dataclasses.field(default_factory=list)
    state: Sequence[int] = ()
    steps: set[ir.Operation] = dataclasses.field(default_factory=set)

    def __post_init__(self):
        # Tells ops too: their own hash is of their operands, which rewriting changes.
        self._made: set[ir.Value] = set()

    def made_inside(self, value: ir.Value) -> bool:
        """Whether one of its ops or links makes a value."""
        return value in self._made or any(value in link.values for link in self.links)

    def inside(self, use: Use) -> bool:
        """Whether one of its ops or links makes this use of a value."""
        made = use[0].results
        by_op = len(made) > 0 and made[0] in self._made
        return by_op or any(use in link.uses for link in self.links)

    def add(self, op: ir.Operation) -> None:
        """Adds an op on its values."""
        self.ops.append(op)
        self._made.update(op.results)

    def grow(self, op: ir.Operation) -> None:
        """Adds an op and its values."""
        self.add(op)
        new = [v for v in (*op.operands, *op.results) if shape_of(v)]
        self.values += [value for value in new if value not in self.values]

    def entries(self) -> list[ir.Value]:
        """Tensors from outside that it reads."""
        return [
            value
            for value in self.values
            if not self.made_inside(value) and any(map(self.inside, uses_of(value)))
        ]

    def exits(self) -> dict[ir.Value, list[Use]]:
        """Its tensors that ops outside read, with these uses."""
        exits = {}
        for value in self.values:
            if self.made_inside(value):
                outside = [use for use in uses_of(value) if not self.inside(use)]
                if outside:
                    exits[value] = outside
        return exits


def uses_of(value: ir.Value) -> list[Use]:
    """All uses of a value."""
    return [(use.owner.operation, use.operand_number) for use in value.uses]


class Dims:
    """Which dims of the values of a program are split alike or not at all.

    Args:
      ops: the ops that may be computed on shards.
      links: the links whose values are.
      rules: the rules of the module's ops.
    """

    def __init__(
        self, ops: Sequence[ir.Operation], links: Sequence[Carried], rules: OpRules
    ):
        self.rules = rules
        self.places, self.values = Groups(), Groups()
        self.whole: set[Place] = set()
        self.keeps_shape: set[Place] = set()
        for op in ops:
            self.add(op)
        for link in links:
            for value in (*link.values[1:], *link.entering()):
                for dim in range(len(shape_of(value))):
                    self._join((link.values[0], dim), (value, dim))

    def add(self, op: ir.Operation) -> None:
        """Adds an op that is computed on shards."""
        dims = dim_map(op, self.rules)
        for place, same in dims.same:
            self._join(place, same)
        self.whole.update(dims.whole)
        if dims.keeps_shape:
            values = (*op.operands, *op.results)
            self.keeps_shape.update(
                (value, dim) for value in values for dim in range(len(shape_of(value)))
            )

    def _join(self, place: Place, same: Place) -> None:
        self.places.join(place, same)
        self.values.join(place[0], same[0])


def find_clusters(
    main: ir.Operation, redundancy: Redundancy, links: Sequence[Carried]
) -> tuple[list[Cluster], Dims]:
    """The weight updates in a program, and how their dims correspond."""
    ops = [op for op in walk(main) if op.name not in _ENDS]
    alike = [link for link in links if _is_alike(link, redundancy)]
    updating = {op for op in ops if _is_updating(op, redundancy)}
    updating |= _feeding(ops, redundancy, updating, alike)
    updated = {
        link
        for group in joined(alike)
        if any(_is_updated(c, redundancy, updating) for c in group)
        for link in group
    }
    tied = [link for link in alike if link in updated]
    ordered = [op for op in ops if op in updating]
    dims = Dims(ordered, tied, redundancy.rules)
    return _grouped(ordered, tied, dims), dims


def _is_updating(op, redundancy: Redundancy) -> bool:
    depends = any(value in redundancy.updates for value in op.operands)
    return depends and _can_shard(op, redundancy)


def _feeding(ops, redundancy: Redundancy, updating, links) -> set[ir.Operation]:
    """Ops that only weight updates use, such as a slot's decay, and sums to scalars."""
    ends = {use for link in links for use in link.uses}
    feeding: set[ir.Operation] = set()
    for op in reversed(ops):
        if op in updating or not _can_shard(op, redundancy):
            continue
        ranked = [result for result in op.results if shape_of(result)]
        uses = [use for result in ranked for use in uses_of(result)]
        if all(use[0] in updating or use[0] in feeding or use in ends for use in uses):
            feeding.add(op)
    return feeding


def _can_shard(op, redundancy: Redundancy) -> bool:
    """Whether an op that replicas compute alike could be computed on shards."""
    values = [*op.operands, *op.results]
    ranked = any(shape_of(value) for value in values)
    alike = ranked and all(redundancy.alike.get(value) for value in values)
    summed = op in redundancy.added
    summed |= any(result in redundancy.reduced for result in op.results)
    # A product's dims are put in order before it is reduced.
    summed |= op.name == "stablehlo.transpose" and op.operands[0] in redundancy.reduced
    return alike and not summed and dim_map(op, redundancy.rules) is not None


def _is_alike(link: Carried, redundancy: Redundancy) -> bool:
    values = [*link.values, *link.entering()]
    return all(redundancy.alike.get(value) for value in values)


def _is_updated(link: Carried, redundancy: Redundancy, updating) -> bool:
    """Whether the values that a link ties depend on gradients."""
    return any(
        value in redundancy.updates
        or (not isinstance(value.owner, ir.Block) and value.owner in updating)
        for value in link.entering()
    )


def _grouped(ops, links, dims: Dims) -> list[Cluster]:
    clusters: dict[ir.Value, Cluster] = collections.defaultdict(Cluster)
    seen: dict[ir.Value, None] = {}
    for link in links:
        clusters[dims.values.find(link.values[0])].links.append(link)
        seen.update(dict.fromkeys((*link.values, *link.entering())))
    for op in ops:
        ranked = [v for v in (*op.operands, *op.results) if shape_of(v)]
        seen.update(dict.fromkeys(ranked))
        for root in {dims.values.find(value) for value in ranked}:
            clusters[root].add(op)
    for value in seen:
        clusters[dims.values.find(value)].values.append(value)
    for cluster in clusters.values():
        arguments = [link.argument for link in cluster.links]
        cluster.state = [number for number in arguments if number is not None]
        cluster.steps = _steps(cluster.links)
    return [cluster for cluster in clusters.values() if cluster.state]


def _steps(links: Sequence[Carried]) -> set[ir.Operation]:
    """The loops over steps, which carry the program's state."""
    groups = [g for g in joined(links) if any(link.argument is not None for link in g)]
    return {link.op for group in groups for link in group if link.is_loop}


def how_often(cluster: Cluster, ops: Sequence[ir.Operation]) -> float:
    """How often in a step the most frequent op runs; below 1 if in rare branches."""
    return max(_runs(op, cluster.steps) for op in ops)


def _runs(op, steps) -> float:
    often = 1.0
    while op.parent is not None:
        outer = op.parent.operation
        if outer.name in BRANCHES:
            blocks = [region.blocks[0] for region in outer.regions]
            often *= frequency(outer, blocks.index(op.block))
        elif outer.name == WHILE and outer not in steps:
            often *= trips(outer)
        op = outer
    return often


def gathered_bytes(cluster: Cluster, value: ir.Value, uses: Sequence[Use]) -> float:
    """Bytes a step to gather a value for some uses."""
    return bytes_of(value) * how_often(cluster, [op for op, _ in uses]) if uses else 0.0


def block_of(value: ir.Value):
    """The block that a value belongs to."""
    owner = value.owner
    return owner if isinstance(owner, ir.Block) else owner.operation.block
