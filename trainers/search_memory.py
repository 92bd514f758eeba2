"""The least memory that a candidate of a search can take, found without compiling.

Counted is what must be in memory together while gradients are computed:

  state         weights, optimizer's slots and averages, as the plan stores them
  gradients     of repeated layers, which the backward loop fills
  activations   what repeated layers save for it and it reads

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

from meshwright.framework.compiler.sources import Annotation
from meshwright.framework.modeling import random
from meshwright.framework.modeling.layer import Context, Mode, WeightSpec
from meshwright.framework.modeling.recompute import Saved
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.layers import repeat
from meshwright.trainers.experiment import Experiment
from meshwright.trainers.programs import Programs
from meshwright.trainers.search_space import (
    Candidate,
    NamedPlan,
    Policy,
    map_repeats,
    repeats,
)

# Ops that ask of a tensor what is known before it is there.
_STATIC = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stack:
    """A tensor that each layer of a stack saves: `count` times `spec`."""

    spec: tf.TensorSpec
    sharding: Sharding | None
    count: int

    def bytes(self, mesh: DeviceMesh) -> float:
        """At least so many on a device of this mesh."""
        shape, whole = tuple(self.spec.shape), self.spec.dtype.size * self.count
        if self.sharding is None or self.sharding.unspecified:
            # Completion may split it over all devices.
            return whole * math.prod(shape) / mesh.size
        sharding = Sharding(mesh, self.sharding.dims)
        return whole * math.prod(sharding.shard_shape(shape))


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
        stacks = self._saved(plan, candidate.policy, candidate.batch)
        mesh = candidate.plan.on(candidate.mesh).mesh
        return sum(stack.bytes(mesh) for stack in stacks)

    def _state(self, plan: _ByName, mesh: tuple[int, ...]) -> float:
        placed = plan.plan.on(mesh)
        programs = Programs(dataclasses.replace(self.experiment, plan=placed))
        specs, shardings = programs.state_specs, programs.state_shardings()
        total = sum(map(WeightSpec.shard_bytes, specs.leaves(), shardings.leaves()))
        loop = repeat.Unroll.LOOP
        if all(one.unroll is loop for one in repeats(self.experiment.task)):
            stacks = [spec for spec in specs.theta.leaves() if spec.stack_rank]
            total += sum(spec.shard_bytes(spec.sharding(placed)) for spec in stacks)
        return total

    def _trace(self, plan: _ByName, policy: Policy, batch: int) -> list[_Stack]:
        found: list[_Stack] = []
        # Shardings are read back by axis, so that they hold for any shape of the mesh;
        # an axis of one device would be lost.
        placed = plan.plan.on((2,) * len(plan.plan.tables.mesh_axes))

        def noting(one: repeat.Repeat) -> _NotingRepeat:
            fields = {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
            fields |= dataclasses.asdict(policy)
            return _NotingRepeat(**fields, found=found, mesh=placed.mesh)

        experiment = dataclasses.replace(
            self.experiment,
            plan=placed,
            global_batch=batch,
            task=map_repeats(self.experiment.task, noting),
        )
        tf.function(_loss(experiment), autograph=False).get_concrete_function(
            Programs(experiment).abstract_state().theta,
            NestedMap(experiment.task.batch_spec(batch)),
        )
        return found


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
        stack = repeat._Stack(self, ctx, theta, x, constants)
        split, outputs = stack.split, stack.body.outputs
        weights = [leaf[0] for leaf in theta.leaves()]
        layer = stack._arguments(0, tf.nest.flatten(x), weights, stack.shared)
        given = [*layer, *split.saved, *split.outputs]
        read = _read(split.backward, [_spec(one) for one in given])
        n, m = len(outputs), len(layer)
        # A layer's inputs are kept like its outputs.
        kept = [*outputs, *split.saved]
        for saved, is_read in zip(
            kept, [*read[:n], *read[m : m + len(split.saved)]], strict=True
        ):
            if is_read:
                self._find(saved)
        return super().fprop(ctx, theta, x, **constants)

    def _find(self, saved: Saved) -> None:
        sharding = None
        if saved.sharding is not None:
            asked = Annotation(
                op_sharding=saved.sharding, unspecified_dims=saved.unspecified_dims
            )
            sharding = asked.sharding(self.mesh, saved.spec.shape.rank)
        self.found.append(
            _Stack(spec=saved.spec, sharding=sharding, count=self.count)
        )


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


def _spec(one: tf.Tensor | Saved) -> tf.TensorSpec:
    if isinstance(one, Saved):
        return one.spec
    return tf.TensorSpec(one.shape, one.dtype)
