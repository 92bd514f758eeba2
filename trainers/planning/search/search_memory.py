"""The least memory that a candidate of a search can take, without compiling it.

The bound counts what must be in memory together while gradients are computed:

  state         weights, optimizer's slots and averages, as the plan stores them
  gradients     of repeated layers, which the backward loop fills
  activations   what repeated layers save for that loop to read; in a pipeline for each
                iteration, bubbles too, and the gradient of its input

It leaves out the padding of tiles, all that lives within a layer or outside of the
stacks (logits, gathered weights), the batch, and what compilers add. So no candidate
that fits is lost; most that do not fit are detected by compiling alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from meshwright.framework.compiler.lowering.sources import Annotation
from meshwright.framework.modeling import random
from meshwright.framework.modeling.layer import (
    STAGE_DIM,
    Context,
    Layer,
    Mode,
    WeightSpec,
)
from meshwright.framework.modeling.recompute import Saved
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.plan import ShardingPlan, as_axes
from meshwright.framework.sharding.sharding import Sharding
from meshwright.layers.stacks.repeat import Unroll
from meshwright.layers.stacks.stacked_body import SavedStack
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.stacks import Stack, map_stacks, pipelines, repeats
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.search.search_space import (
    Candidate,
    NamedPlan,
    Policy,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedTensors:
    """Tensors that a stack saves, and how the traced plan shards each."""

    stack: SavedStack
    sharding: Sharding | None

    def bytes(self, mesh: DeviceMesh) -> float:
        """The least bytes that they take on a device of this mesh."""
        stack, spec = self.stack, self.stack.tensor.spec
        shape, size = tuple(spec.shape), spec.dtype.size * stack.count
        if self.sharding is None or self.sharding.unspecified:
            # Completion may split it over all devices.
            return size * stack.stages * math.prod(shape) / mesh.size
        sharding = Sharding(mesh, self.sharding.dims)
        stages = stack.stages // mesh.axes_size(stack.stage_axes)
        return size * stages * math.prod(sharding.shard_shape(shape))


class MemoryBound:
    """Lower bounds for the candidates of one experiment.

    Args:
      experiment: the experiment of the user's files.
    """

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        self._saved = functools.cache(self._trace)
        self._kept = functools.cache(self._state)

    def state(self, candidate: Candidate) -> float:
        """Bytes a device of state and gradients of repeated layers; nothing is traced.

        Raises:
          ValueError: the plan does not fit the weights.
        """
        return self._kept(_ByName(candidate.plan), candidate.mesh)

    def activations(self, candidate: Candidate) -> float:
        """Bytes a device of saved activations; traces the task once for each plan.

        Raises:
          ValueError: the plan does not fit the activations.
        """
        if candidate.policy is None:
            return 0.0
        plan = _ByName(candidate.plan)
        stacks = self._saved(
            plan, candidate.policy, candidate.batch, candidate.microbatches
        )
        mesh = candidate.plan.on(candidate.mesh).mesh
        return sum(stack.bytes(mesh) for stack in stacks)

    def _state(self, plan: _ByName, mesh: tuple[int, ...]) -> float:
        placed = plan.plan.on(mesh)
        programs = StepPrograms(dataclasses.replace(self.experiment, plan=placed))
        specs, shardings = programs.state_specs, programs.plan_layout.shardings
        total = sum(map(WeightSpec.shard_bytes, specs.leaves(), shardings.leaves()))
        if all(s.unroll is Unroll.LOOP for s in repeats(self.experiment.task)):
            stacks = [spec for spec in specs.theta.leaves() if spec.stack_rank]
            total += sum(spec.shard_bytes(spec.sharding(placed)) for spec in stacks)
        return total

    def _trace(
        self, plan: _ByName, policy: Policy, batch: int, microbatches: int | None
    ) -> list[SavedTensors]:
        candidate = Candidate(
            mesh=_traced_mesh(self.experiment, plan.plan.tables),
            plan=plan.plan,
            policy=policy,
            batch=batch,
            microbatches=microbatches,
        )
        return saved_tensors(candidate.of(self.experiment))


def saved_tensors(experiment: Experiment) -> list[SavedTensors]:
    """What an experiment's stacks save until the backward pass; traces the task."""
    saved: list[SavedStack] = []
    task = map_stacks(
        experiment.task, lambda _, stack: _Noting(stack=stack, note=saved.extend)
    )
    experiment = dataclasses.replace(experiment, task=task)
    tf.function(_loss(experiment), autograph=False).get_concrete_function(
        StepPrograms(experiment).abstract_state().theta,
        NestedMap(experiment.task.batch_spec(experiment.global_batch)),
    )
    mesh = experiment.plan.mesh
    return [
        SavedTensors(stack=stack, sharding=_sharding(stack.tensor, mesh))
        for stack in saved
    ]


def _traced_mesh(experiment: Experiment, plan: ShardingPlan) -> tuple[int, ...]:
    """A mesh from which shardings are read back by axis, to hold for any other mesh.

    An axis of one device would be lost; but no tensor in a pipeline has the stages'
    axes, which must divide the stages.
    """
    stage_axes = as_axes(plan.weights.get(STAGE_DIM))
    if not pipelines(experiment.task):
        stage_axes = ()
    return tuple(1 if axis in stage_axes else 2 for axis in plan.mesh_axes)


@dataclasses.dataclass(frozen=True)
class _ByName:
    """A plan as a key: its tables have no hash."""

    plan: NamedPlan

    def __hash__(self) -> int:
        return hash((self.plan.name, self.plan.gin_file))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Noting(Layer):
    """Stands in for a stack: notes what it saves, and computes nothing."""

    stack: Stack
    note: Callable[[Sequence[SavedStack]], None]

    def weights(self) -> NestedMap:
        return self.stack.weights()

    def fprop(self, ctx: Context, theta: NestedMap, x: Any, **constants: Any) -> Any:
        saved = self.stack.saved(ctx, x, **constants)
        self.note(saved.stacks)
        return tf.nest.map_structure(
            lambda spec: tf.zeros(spec.shape, spec.dtype), saved.result
        )


def _sharding(saved: Saved, mesh: DeviceMesh) -> Sharding | None:
    if saved.sharding is None:
        return None
    annotation = Annotation(
        op_sharding=saved.sharding, unspecified_dims=saved.unspecified_dims
    )
    return annotation.sharding(mesh, saved.spec.shape.rank)


def _loss(experiment: Experiment) -> Callable[[NestedMap, NestedMap], tf.Tensor]:
    """The function (theta, batch) -> loss, in training."""

    def loss(theta: NestedMap, batch: NestedMap) -> tf.Tensor:
        ctx = Context(
            plan=experiment.plan,
            mode=Mode.TRAIN,
            key=random.key_from_seed(experiment.seed),
            activation_dtype=experiment.activation_dtype,
        )
        return experiment.task.loss(ctx, theta, batch).loss

    return loss
