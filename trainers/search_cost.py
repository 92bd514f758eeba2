"""A rough guess of a candidate's step time, to decide what to compile first.

It knows weights and tables alone, not the program: each weight matrix is a product of
activations [tokens, a] with weights [a, b] to [tokens, b], forward and backward. What
it gets wrong costs compiles, not the right answer: candidates are ranked by the
estimates of their compiled programs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshwright.framework.compiler.device_order import device_orders
from meshwright.framework.compiler.step_time import LINK_EFFICIENCY
from meshwright.framework.compiler.topology import Topology
from meshwright.framework.modeling.layer import STACK_DIM, WeightSpec
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan, as_axes
from meshwright.trainers.experiment import Experiment
from meshwright.trainers.search_space import Candidate

# Share of the peak that large matrix products with all around them reach.
_EFFICIENCY = 0.6


def rough_seconds(
    experiment: Experiment, candidate: Candidate, torus: Topology, recomputed: float
) -> float:
    """About how long a step takes.

    Args:
      experiment: of the user's files.
      candidate: over it.
      torus: the topology.
      recomputed: the share of the forward pass that is computed twice.
    """
    flops = experiment.task.train_flops(candidate.batch) * (1 + recomputed / 3)
    seconds = flops / (_EFFICIENCY * torus.kind.peak_flops * torus.size)
    plan = candidate.plan.on(candidate.mesh)
    speed = LINK_EFFICIENCY * torus.kind.link_bandwidth
    sent = bytes_passed(experiment, plan, candidate.batch, recomputed)
    carried = min(
        sum(sent[axis] * n for axis, n in zip(plan.mesh_axes, one.loads, strict=True))
        for one in device_orders(candidate.mesh, torus)
    )
    return seconds + carried / 2 / speed


def bytes_passed(
    experiment: Experiment, plan: ShardingPlan, batch: int, recomputed: float
) -> dict[str, float]:
    """Bytes that a device passes on in a step along each axis, to gather and to reduce.

    Along an axis that splits the batch, weights are gathered for the forward and the
    backward pass and their gradients reduced. Along another, the activations on the
    smaller side of a product are, if the plan splits both sides; else those on the side
    that it does not split are reduced.
    """
    task, mesh = experiment.task, plan.mesh
    names = {dim for dims in NestedMap(task.batch_dims()).leaves() for dim in dims}
    data = _axes(plan.activations, sorted(names))
    rows = task.tokens(batch) / mesh.axes_size(sorted(data))
    itemsize = experiment.activation_dtype.size
    sent = dict.fromkeys(mesh.axis_names, 0.0)
    for spec in task.weights().leaves():
        if not spec.is_matrix:
            continue
        # A token meets all layers, and of the experts one or two.
        layers = spec.dims[: spec.stack_rank].count(STACK_DIM)
        count = math.prod(spec.shape[:layers])
        sides = _sides(spec)
        by_weight = _axes(plan.weights, spec.dims)
        by_side = [_axes(plan.activations, dims) - data for dims, _ in sides]
        weight = spec.size / count / mesh.axes_size(sorted(by_weight - data))
        wide = [
            rows * size / mesh.axes_size(sorted(axes))
            for (_, size), axes in zip(sides, by_side, strict=True)
        ]
        for axis in mesh.axis_names:
            n = mesh.axis_size(axis)
            split = [axis in axes for axes in by_side]
            if axis in data:
                passes = 3 + recomputed if axis in by_weight else 2
                size = passes * weight
            elif all(split):
                size = (3 + recomputed) * min(wide) * n
            elif any(split):
                size = 2 * wide[split.index(False)]
            else:
                size = (3 + recomputed) * weight * n if axis in by_weight else 0
            sent[axis] += count * itemsize * size * (n - 1) / n
    return sent


def _sides(spec: WeightSpec) -> list[tuple[tuple[str, ...], int]]:
    """The two sides of a weight matrix, dims and size: the most even division."""
    dims, shape = spec.dims[spec.stack_rank :], spec.shape[spec.stack_rank :]
    divisions = [
        [(dims[:i], math.prod(shape[:i])), (dims[i:], math.prod(shape[i:]))]
        for i in range(1, len(dims))
    ]
    return min(divisions, key=lambda two: abs(math.log(two[0][1] / two[1][1])))


def _axes(table: Mapping, dims: Sequence[str]) -> set[str]:
    return {axis for dim in dims for axis in as_axes(table.get(dim))}
