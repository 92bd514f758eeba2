"""A rough guess of a candidate's step time, to decide what to compile first.

It knows weights and tables alone, not the program: each weight matrix is a product of
activations [tokens, a] with weights [a, b] to [tokens, b], forward and backward. Its
errors cost compiles, not the right answer: candidates are ranked by the
estimates of their compiled programs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from meshwright.framework.devices.device_order import device_orders
from meshwright.framework.devices.network import LINK_EFFICIENCY
from meshwright.framework.devices.topology import Topology
from meshwright.framework.modeling.layer import STACK_DIM, STAGE_DIM, WeightSpec
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan, as_axes
from meshwright.tasks.task import Task
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.stacks import pipelines
from meshwright.trainers.planning.search.search_space import Candidate

# Share of the peak that large matrix products with all around them reach.
_EFFICIENCY = 0.6


def rough_seconds(
    experiment: Experiment, candidate: Candidate, torus: Topology, recomputed: float
) -> float:
    """The rough time of a step.

    Args:
      experiment: the experiment of the user's files.
      candidate: the candidate.
      torus: the topology.
      recomputed: the share of the forward pass that is computed twice.
    """
    experiment = candidate.of(experiment)
    plan = experiment.plan
    flops = experiment.task.train_flops(candidate.batch) * (1 + recomputed / 3)
    flops *= 1 + _bubbles(experiment.task)
    seconds = flops / (_EFFICIENCY * torus.kind.peak_flops * torus.size)
    speed = LINK_EFFICIENCY * torus.kind.link_bandwidth
    sent = bytes_passed(experiment, recomputed)
    carried = min(
        sum(sent[axis] * n for axis, n in zip(plan.mesh_axes, order.loads, strict=True))
        for order in device_orders(candidate.mesh, torus)
    )
    return seconds + carried / 2 / speed


def _bubbles(task: Task) -> float:
    """The work of bubbles over all other work, in proportion to weights."""
    weights = task.weights()
    total = sum(spec.size for spec in weights.leaves())
    extra = 0.0
    for path, pipeline in pipelines(task).items():
        inside = sum(spec.size for spec in weights.get_path(path).leaves())
        share = pipeline.schedule.bubble_fraction
        extra += inside / total * share / (1 - share)
    return extra


def bytes_passed(experiment: Experiment, recomputed: float) -> dict[str, float]:
    """Bytes that a device passes on in a step along each axis, to gather and to reduce.

    Along an axis that splits the batch, weights are gathered for the forward and the
    backward pass and their gradients reduced; in a pipeline for each microbatch. Along
    other axes, activations on the smaller side of a product are gathered, if the plan
    splits both sides; else those on the side that it does not split are reduced.
    """
    task, itemsize = experiment.task, experiment.activation_dtype.size
    mesh = experiment.plan.mesh
    sent = dict.fromkeys(mesh.axis_names, 0.0)
    for path, spec in task.weights().items_by_path():
        if not spec.is_matrix:
            continue
        use = _use(experiment, path, spec)
        sides = _sides(spec)
        by_weight = _axes(use.plan.weights, spec.dims) - use.stage_axes
        by_side = [_axes(use.plan.activations, dims) - use.data for dims, _ in sides]
        weight = spec.size / use.stacked / mesh.axes_size(sorted(by_weight - use.data))
        wide = [
            use.rows * size / mesh.axes_size(sorted(axes))
            for (_, size), axes in zip(sides, by_side, strict=True)
        ]
        for axis in set(mesh.axis_names) - use.stage_axes:
            n = mesh.axis_size(axis)
            split = [axis in axes for axes in by_side]
            if axis in use.data:
                passes = 3 + recomputed if axis in by_weight else 2
                size = passes * weight
            elif all(split):
                size = (3 + recomputed) * min(wide) * n
            elif any(split):
                size = 2 * wide[split.index(False)]
            else:
                size = (3 + recomputed) * weight * n if axis in by_weight else 0
            sent[axis] += use.times * itemsize * size * (n - 1) / n
    return sent


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Use:
    """A device's use of a weight in a step.

    Args:
      stacked: the number of layers whose weights it stacks; experts are of one layer.
      times: the number of the device's products with a layer's weight.
      rows: tokens in each of these products.
      plan: the plan of these products.
      data: axes that split their tokens.
      stage_axes: axes that split the stages of a pipeline around the weight.
    """

    stacked: int
    times: int
    rows: float
    plan: ShardingPlan
    data: frozenset[str]
    stage_axes: frozenset[str] = frozenset()


def _use(experiment: Experiment, path: str, spec: WeightSpec) -> _Use:
    task, plan = experiment.task, experiment.plan
    names = {dim for dims in NestedMap(task.batch_dims()).leaves() for dim in dims}
    names.discard(None)
    tokens = task.tokens(experiment.global_batch)
    stages: tuple[str, ...] = ()
    around = (p for at, p in pipelines(task).items() if path.startswith(f"{at}."))
    pipeline = next(around, None)
    if pipeline is not None:
        (stages,) = plan.weight_sharding([STAGE_DIM]).dims
        plan = plan.inside_pipeline(stages)
        tokens /= pipeline.num_microbatches
    layers = [dim in (STACK_DIM, STAGE_DIM) for dim in spec.dims[: spec.stack_rank]]
    stacked = math.prod(spec.shape[: sum(layers)])
    times = stacked
    if pipeline is not None:
        times //= pipeline.num_repeats * plan.mesh.axes_size(stages)
        times *= pipeline.schedule.iterations
    data = _axes(plan.activations, sorted(names))
    return _Use(
        stacked=stacked,
        times=times,
        rows=tokens / plan.mesh.axes_size(sorted(data)),
        plan=plan,
        data=frozenset(data),
        stage_axes=frozenset(stages),
    )


def _sides(spec: WeightSpec) -> list[tuple[tuple[str, ...], int]]:
    """The two sides of a weight matrix, dims and size, in the most even division."""
    dims, shape = spec.dims[spec.stack_rank :], spec.shape[spec.stack_rank :]
    divisions = [
        [(dims[:i], math.prod(shape[:i])), (dims[i:], math.prod(shape[i:]))]
        for i in range(1, len(dims))
    ]
    return min(divisions, key=lambda pair: abs(math.log(pair[0][1] / pair[1][1])))


def _axes(table: Mapping, dims: Sequence[str]) -> set[str]:
    return {axis for dim in dims for axis in as_axes(table.get(dim))}
