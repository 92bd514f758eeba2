"""The least memory that a candidate of a search can take, found without compiling.

Counted is what must be in memory together while gradients are computed:

  state         weights, optimizer's slots and averages, as the plan stores them
  gradients     of repeated layers, which the backward loop fills
  activations   what repeated layers save for it and it reads; in a pipeline for each
                iteration, bubbles too, and the gradient of its input

Left out are the padding of tiles, all that lives within one layer or outside of the
stacks (logits, gathered weights), the batch, and what compilers add. So no candidate
that fits is lost; most that do not fit are found by compiling alone.
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
from meshwright.framework.modeling.layer import STAGE_DIM, Context, Mode, WeightSpec
from meshwright.framework.modeling.recompute import Saved
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.plan import ShardingPlan, as_axes
from meshwright.framework.sharding.sharding import Sharding
from meshwright.layers.stacks import pipeline, repeat
from meshwright.layers.stacks.pipeline import Pipeline
from meshwright.layers.stacks.stacked_body import Constants, StackedBody
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.stacks import Stack, map_stacks, pipelines, repeats
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.search.search_space import Candidate, NamedPlan, Policy

# Ops that ask of a tensor what is known before it is there.
_STATIC = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stack:
    """A tensor that each layer of a stack saves: `count` times `spec`.

    In a pipeline each of `stages` does, which `stage_axes` split.
    """

    spec: tf.TensorSpec
    sharding: Sharding | None
    count: int
    stages: int = 1
    stage_axes: tuple[str, ...] = ()

    def bytes(self, mesh: DeviceMesh) -> float:
        """At least so many on a device of this mesh."""
        shape, whole = tuple(self.spec.shape), self.spec.dtype.size * self.count
        if self.sharding is None or self.sharding.unspecified:
            # Completion may split it over all devices.
            return whole * self.stages * math.prod(shape) / mesh.size
        sharding = Sharding(mesh, self.sharding.dims)
        stages = self.stages // mesh.axes_size(self.stage_axes)
        return whole * stages * math.prod(sharding.shard_shape(shape))


class MemoryBound:
    """Lower bounds for the candidates of one experiment.

    Args:
      experiment: of the user's files.
    """

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        self._saved = functools.cache(self._trace)
        self._kept = functools.cache(self._state)

    def state(self, candidate: Candidate) -> float:
        """Bytes a device: state and gradients of repeated layers; nothing is traced.

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
        specs, shardings = programs.state_specs, programs.state_shardings()
        total = sum(map(WeightSpec.shard_bytes, specs.leaves(), shardings.leaves()))
        loop = repeat.Unroll.LOOP
        if all(one.unroll is loop for one in repeats(self.experiment.task)):
            stacks = [spec for spec in specs.theta.leaves() if spec.stack_rank]
            total += sum(spec.shard_bytes(spec.sharding(placed)) for spec in stacks)
        return total

    def _trace(
        self, plan: _ByName, policy: Policy, batch: int, microbatches: int | None
    ) -> list[_Stack]:
        found: list[_Stack] = []
        candidate = Candidate(
            mesh=_traced_mesh(self.experiment, plan.plan.tables),
            plan=plan.plan,
            policy=policy,
            batch=batch,
            microbatches=microbatches,
        )
        experiment = candidate.of(self.experiment)
        mesh = experiment.plan.mesh

        def noting(_: str, one: Stack) -> Stack:
            fields = {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
            kind = _NotingPipeline if isinstance(one, Pipeline) else _NotingRepeat
            return kind(**fields, found=found, mesh=mesh)

        experiment = dataclasses.replace(
            experiment, task=map_stacks(experiment.task, noting)
        )
        tf.function(_loss(experiment), autograph=False).get_concrete_function(
            StepPrograms(experiment).abstract_state().theta,
            NestedMap(experiment.task.batch_spec(batch)),
        )
        return found


def _traced_mesh(experiment: Experiment, plan: ShardingPlan) -> tuple[int, ...]:
    """A shape from which shardings are read back by axis, to hold for any other.

    An axis of one device would be lost; but none in a pipeline has the stages' axes,
    which must divide the stages.
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
class _NotingRepeat(repeat.Repeat):
    """A stack that notes what it saves when it is traced."""

    found: list[_Stack]
    mesh: DeviceMesh

    def fprop(self, ctx: Context, theta: NestedMap, x: Any, **constants: Any) -> Any:
        body = repeat._Stack(self, ctx, theta, x, constants).body
        shared = Constants(constants)
        rest = map(_spec, (*shared.shared, *shared.fixed))
        for saved in _kept(body, [*rest, *_key(ctx)]):
            sharding = _sharding(saved, self.mesh)
            self.found.append(
                _Stack(spec=saved.spec, sharding=sharding, count=self.count)
            )
        return _like_result(body, x, self.count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _NotingPipeline(pipeline.Pipeline):
    """The same of a pipeline."""

    found: list[_Stack]
    mesh: DeviceMesh

    def fprop(self, ctx: Context, theta: NestedMap, x: Any, **constants: Any) -> Any:
        run = pipeline._Run(self, ctx, theta, x, constants)
        rest = [_spec(one[0]) for one in (*run.shared, *run.fixed)]
        kept = _kept(run.body, [*rest, *_key(ctx)])
        saved = [(one, self.schedule.iterations * run.in_a_row) for one in kept]
        # The gradient of the input, by microbatch.
        saved += [(one, self.schedule.slots) for one in run.body.outputs]
        for one, count in saved:
            self.found.append(
                _Stack(
                    spec=one.spec,
                    sharding=_sharding(one, self.mesh),
                    count=count,
                    stages=self.num_stages,
                    stage_axes=run.stages.axes,
                )
            )
        return _like_result(run.body, x, self.stack.count)


def _kept(body: StackedBody, rest: Sequence[tf.TensorSpec]) -> list[Saved]:
    """What is saved of a layer, and read: its inputs, and intermediates.

    `rest` are specs of its arguments that are neither input nor weights.
    """
    weights = [tf.TensorSpec(one.shape, one.dtype) for one in body.specs.leaves()]
    layer = [*tf.nest.flatten(body.x), *weights, *rest]
    split = body.split
    given = [*layer, *(one.spec for one in (*split.saved, *split.outputs))]
    read = _read(split.backward, given)
    n, m = len(body.outputs), len(layer)
    # A layer's inputs are kept like its outputs.
    kept = [*body.outputs, *split.saved]
    is_read = [*read[:n], *read[m : m + len(split.saved)]]
    return [one for one, reads in zip(kept, is_read, strict=True) if reads]


def _like_result(body: StackedBody, x: Any, count: int) -> Any:
    """What a stack returns, but for the values: nothing is computed with them."""
    aux = [tf.zeros([count, *spec.shape], spec.dtype) for spec in body.aux]
    return body.result(tf.nest.flatten(x), aux)


def _key(ctx: Context) -> list[tf.TensorSpec]:
    return [] if ctx.key is None else [_spec(ctx.key)]


def _sharding(saved: Saved, mesh: DeviceMesh) -> Sharding | None:
    if saved.sharding is None:
        return None
    asked = Annotation(
        op_sharding=saved.sharding, unspecified_dims=saved.unspecified_dims
    )
    return asked.sharding(mesh, saved.spec.shape.rank)


def _loss(experiment: Experiment) -> Callable[[NestedMap, NestedMap], tf.Tensor]:
    """(theta, batch) -> loss, in training."""

    def loss(theta: NestedMap, batch: NestedMap) -> tf.Tensor:
        ctx = Context(
            plan=experiment.plan,
            mode=Mode.TRAIN,
            key=random.key_from_seed(experiment.seed),
            activation_dtype=experiment.activation_dtype,
        )
        return experiment.task.loss(ctx, theta, batch).loss

    return loss


def _read(
    fn: Callable[..., Sequence[tf.Tensor]], specs: Sequence[tf.TensorSpec]
) -> list[bool]:
    """Which arguments a function, that is a call of one graph, needs the values of."""
    traced = tf.function(fn, autograph=False).get_concrete_function(*specs)
    (call,) = (op for op in traced.graph.get_operations() if "Call" in op.type)
    library = traced.graph.as_graph_def().library.function
    name = call.get_attr("f").name
    (body,) = (one for one in library if one.signature.name == name)
    used = {
        tensor.split(":")[0]
        for node in body.node_def
        if node.op not in _STATIC
        for tensor in node.input
    } | {tensor.split(":")[0] for tensor in body.ret.values()}
    numbers = {t.name: i for i, t in enumerate(traced.inputs)}
    read = [False] * len(specs)
    for argument, tensor in zip(body.signature.input_arg, call.inputs, strict=True):
        read[numbers[tensor.name]] = argument.name in used
    return read


def _spec(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)
