"""The programs of an experiment: init, main, eval, and conversions between them.

    init -> (step layout) -> [ main ]* -> (saved layout) -> checkpoint, export
                                |
                          (plan layout) -> eval

Init and checkpoints hold the state in logical shapes, main in the step layout: that is
the plan's, or what weight-update sharding made of it. Evaluation reads weights in the
plan's layout. The trainer and the planner build the same main program here.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence

import jax
import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright.framework.compiler.lowering.captures import refusing_new_variables
from meshwright.framework.compiler.program import (
    Program,
    TracedProgram,
    trace_program,
)
from meshwright.framework.compiler.weight_update_sharding.decide import (
    WeightUpdateSharding,
)
from meshwright.framework.compiler.weight_update_sharding.shard import UpdateSharding
from meshwright.framework.modeling import random
from meshwright.framework.modeling.histograms import histograms_of
from meshwright.framework.modeling.initializers import Constant
from meshwright.framework.modeling.layer import (
    Context,
    Mode,
    WeightSpec,
    annotate_weights,
    initialize,
    weight_specs,
)
from meshwright.framework.modeling.layer_order import LayerOrder
from meshwright.framework.modeling.recompute import names_given
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import NotingPlan
from meshwright.framework.sharding.sharding import Sharding
from meshwright.tasks.task import loss_of
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.gradients import (
    BatchGradients,
    accumulated_gradients,
    batch_gradients,
)
from meshwright.trainers.experiment.not_finite import NotFinite
from meshwright.trainers.experiment.state_layout import StateLayout

log = logging.getLogger("absl")


class StepPrograms:
    """Builds and caches the compiled programs of one experiment.

    The functions (`train_step`, ...) are pure TF over logical shapes; the cached
    properties compile them for the mesh of the experiment's plan.

    Args:
      experiment: the experiment.
      devices: of a topology, to compile for; such programs can be inspected, not run.

    Raises:
      ValueError: the plan does not fit the weights.
    """

    def __init__(
        self, experiment: Experiment, *, devices: Sequence[jax.Device] | None = None
    ):
        self.experiment = experiment
        self.devices = devices
        self.weights = weight_specs(experiment.task)
        self._conversions: dict[str, Program] = {}
        # A plan's errors name weights, not their slots.
        for path, spec in self.weights.items_by_path():
            spec.sharding(experiment.plan, path)

    @functools.cached_property
    def state_specs(self) -> NestedMap:
        """Nested map of `WeightSpec`: step, theta, slots and, if requested, ema."""
        return self._state_specs(self.weights)

    @property
    def layer_orders(self) -> dict[str, LayerOrder]:
        """In which order leaves of the state stack layers, by path, if they do."""
        orders = self.state_specs.map(lambda spec: spec.layer_order)
        return {path: order for path, order in orders.items_by_path() if order}

    @functools.cached_property
    def step_weights(self) -> NestedMap:
        """The specs of the weights in a step: matrices, if the experiment says so."""
        plan = self.experiment.plan
        if not self.experiment.weights_as_matrices:
            return self.weights
        return self.weights.map(lambda spec: spec.as_matrix(plan))

    def _state_specs(self, weights: NestedMap) -> NestedMap:
        step = WeightSpec(shape=(), dims=(), initializer=Constant(0), dtype=tf.int32)
        state = NestedMap(step=step, theta=weights)
        state.slots = self.experiment.optimizer.slots(weights)
        if self.experiment.ema is not None:
            state.ema = weights
        return state

    @functools.cached_property
    def plan_layout(self) -> StateLayout:
        """The layout of the state by the plan."""
        return StateLayout.of_plan(self.state_specs, self.experiment.plan)

    @functools.cached_property
    def initial_layout(self) -> StateLayout:
        """The layout of the state that `init` returns, or a checkpoint restores."""
        return self.plan_layout.even()

    @functools.cached_property
    def step_layout(self) -> StateLayout:
        """The layout in which `main` takes and returns the state; traces `main`."""
        return StateLayout("step", self.traced_main.forms(0))

    @functools.cached_property
    def saved_layout(self) -> StateLayout:
        """The layout in which the state is saved after steps; traces `main`."""
        return self.step_layout.saved(self.initial_layout)

    def abstract_state(self) -> NestedMap:
        """Nested map of `tf.TensorSpec` of the state, logical shapes."""
        return self.state_specs.map(lambda s: tf.TensorSpec(s.shape, s.dtype))

    def abstract_batches(self) -> NestedMap:
        """Nested map of `tf.TensorSpec`: the batches of one main program call."""
        spec = NestedMap(self.experiment.task.batch_spec(self.experiment.global_batch))
        steps = self.experiment.steps_per_loop
        return spec.map(lambda s: tf.TensorSpec([steps, *s.shape], s.dtype))

    def batch_shardings(self) -> NestedMap:
        """Shardings of one batch, by the plan's activation table."""
        plan = self.experiment.plan
        return NestedMap(self.experiment.task.batch_dims()).map_with_path(
            lambda path, dims: plan.activation_sharding(dims, f"batch.{path}")
        )

    def _stacked_batch_shardings(self) -> NestedMap:
        """Shardings of `abstract_batches`."""
        return self.batch_shardings().map(lambda s: Sharding(s.mesh, ((), *s.dims)))

    @property
    def histogram_tags(self) -> list[str]:
        """The TensorBoard tags of `histogram_step`'s results, in their order."""
        weights = [f"weights/{path}" for path, _ in self.weights.items_by_path()]
        return weights + [f"gradients/{path}" for path in self._trained_paths]

    @property
    def _trained_paths(self) -> list[str]:
        """The paths of the weights that are no running statistics."""
        items = self.weights.items_by_path()
        return [path for path, spec in items if not spec.is_statistic]

    def noted_dims(self) -> NotingPlan:
        """The plan, with the dims that activations have, found by tracing the loss."""
        plan = NotingPlan.of(self.experiment.plan)
        programs = StepPrograms(dataclasses.replace(self.experiment, plan=plan))
        programs.batch_shardings()
        programs._loss_graph()
        return plan

    def check_dims_of_plan(self) -> None:
        """Warns of rows for dims that nothing has: plans may have those of others.

        Raises:
          ValueError: see `NotingPlan.check`; for weights before the loss is traced.
        """
        dims = self.check_weights_of_plan()
        for line in self.noted_dims().warnings(dims):
            log.warning("%s", line)

    def check_weights_of_plan(self) -> dict[str, Sequence[str]]:
        """The dims of weights by path; raises ValueError for one that is misspelt."""
        specs = self.weights, self.state_specs  # The weight names its slots' dims.
        dims = {path: spec.dims for of in specs for path, spec in of.items_by_path()}
        NotingPlan.of(self.experiment.plan).check(dims)
        return dims

    def names_given(self) -> tuple[str, ...]:
        """Names by which recomputation could save tensors, found likewise; sorted."""
        return names_given(self._loss_graph())

    def _loss_graph(self) -> tf.Graph:
        eval_step = tf.function(self.eval_step, autograph=False)
        batch = NestedMap(self.experiment.task.batch_spec(self.experiment.global_batch))
        theta = self.abstract_state().theta  # Keras makes its optimizers' variables.
        with refusing_new_variables("eval"):
            return eval_step.get_concrete_function(theta, batch).graph

    def seed(self) -> np.ndarray:
        """The experiment's seed as a random key, uint32 [2]."""
        return random.key_from_seed(self.experiment.seed).numpy()

    def initial_state(self, seed: tf.Tensor) -> NestedMap:
        """The state before step 0, in logical shapes.

        `seed` is an argument so that its value is unknown at compile time: else TF and
        XLA would compute the weights themselves and keep them in the program.
        """
        key = random.fold_in(seed, "weights")
        specs = self.state_specs
        state = NestedMap(step=tf.constant(0), theta=initialize(specs.theta, key))
        state.slots = initialize(specs.slots, key)
        if "ema" in specs:
            state.ema = state.theta
        return state

    def train_step(self, state: NestedMap, batch: NestedMap) -> NestedMap:
        """One step: `state` after it, and `metrics`, float32, scalars but for sums."""
        experiment = self.experiment
        result = self.step_gradients(state, batch)
        update = experiment.optimizer.update(
            state.step, result.gradients, state.theta, state.slots, self.step_weights
        )
        new = NestedMap(step=state.step + 1, theta=update.theta, slots=update.slots)
        if experiment.ema is not None:
            new.ema = experiment.ema.update(
                state.step, state.ema, update.theta, self.step_weights
            )
        metrics = NestedMap(loss=result.loss, sums=result.sums, **update.metrics)
        if experiment.not_finite is NotFinite.SKIP:
            with tf.name_scope("skip"):
                good = tf.math.is_finite(metrics.loss)
                good &= tf.math.is_finite(metrics.grad_norm)
                kept = new.map(lambda updated, old: tf.where(good, updated, old), state)
            kept.step = new.step
            new = kept
        return NestedMap(state=new, metrics=metrics)

    def step_gradients(self, state: NestedMap, batch: NestedMap) -> BatchGradients:
        """The gradients of a step, of a state with `step` and `theta`."""
        experiment = self.experiment
        seed = random.key_from_seed(experiment.seed)
        ctx = Context(
            plan=experiment.plan,
            mode=Mode.TRAIN,
            key=random.fold_in(random.fold_in(seed, "train"), state.step),
            activation_dtype=experiment.activation_dtype,
            gradient_dtype=experiment.gradient_dtype,
        )
        args = experiment.task, ctx, self.step_weights, state.theta, batch
        steps = experiment.gradient_accumulation_steps
        if steps == 1:
            return batch_gradients(*args)
        axes = self.unreduced_gradient_axes
        return accumulated_gradients(*args, steps=steps, unreduced_gradient_axes=axes)

    def train_loop(self, state: NestedMap, batches: NestedMap) -> NestedMap:
        """`steps_per_loop` steps; batches and metrics have a leading dim for them."""
        steps = self.experiment.steps_per_loop
        if steps == 1:
            out = self.train_step(state, batches.map(lambda x: x[0]))
            metrics = out.metrics.map(lambda m: m[None])
            return NestedMap(state=out.state, metrics=metrics)
        specs = tf.nest.map_structure(
            lambda t: tf.TensorSpec(t.shape, t.dtype),
            (state, batches.map(lambda x: x[0])),
        )
        # Traced ahead of the loop, which must know what metrics it will gather.
        step = tf.function(self.train_step, autograph=False)
        step = step.get_concrete_function(*specs)
        metrics = step.structured_outputs["metrics"]

        def body(i, leaves, stores):
            out = step(state.pack(leaves), batches.map(lambda x: x[i]))
            rows = zip(stores, out.metrics.leaves(), strict=True)
            stores = [
                xla.dynamic_update_slice(s, m[None], [i, *[0] * m.shape.rank])
                for s, m in rows
            ]
            return i + 1, out.state.leaves(), stores

        stores = [tf.zeros([steps, *m.shape], m.dtype) for m in metrics.leaves()]
        _, leaves, stores = tf.while_loop(
            lambda i, *_: i < steps, body, (tf.constant(0), state.leaves(), stores)
        )
        return NestedMap(state=state.pack(leaves), metrics=metrics.pack(stores))

    def histogram_step(self, state: NestedMap, batches: NestedMap) -> NestedMap:
        """`histograms_of` the weights, and of their gradients in the first batch.

        Args:
          state: `step` and `theta`.
          batches: of a call of `train_loop`.
        """
        result = self.step_gradients(state, batches.map(lambda x: x[0]))
        gradients = [result.gradients.get_path(path) for path in self._trained_paths]
        return histograms_of([*state.theta.leaves(), *gradients])

    def eval_step(self, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """The task's sums over one held-out batch."""
        return loss_of(self.experiment.task, *self.to_evaluate(theta), batch).sums

    def decode_step(self, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """The predictions of the task's model for one batch of `Decoding.spec`."""
        return self._predictions(self.experiment.task.decoding.decode, theta, batch)

    def serve_step(self, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """The answers of an exported model to a batch of `Serving.spec`."""
        return self._predictions(self.experiment.task.serving.serve, theta, batch)

    def _predictions(self, decode, theta: NestedMap, batch: NestedMap) -> NestedMap:
        ctx, theta = self.to_evaluate(theta)
        # Draws, if there are any, are always the same.
        key = random.fold_in(random.key_from_seed(self.experiment.seed), "decode")
        return decode(dataclasses.replace(ctx, key=key), theta, batch)

    def to_evaluate(self, theta: NestedMap) -> tuple[Context, NestedMap]:
        """The context of a program that trains nothing, and its annotated weights."""
        ctx = Context(
            plan=self.experiment.plan,
            mode=Mode.EVAL,
            activation_dtype=self.experiment.activation_dtype,
        )
        return ctx, annotate_weights(self.experiment.plan, self.weights, theta)

    @functools.cached_property
    def init(self) -> Program:
        """(seed) -> state in the initial layout."""
        return self.compile(
            self.initial_state,
            [tf.TensorSpec([2], tf.uint32)],
            [None],
            self.initial_layout.forms,
            name="init",
        )

    @functools.cached_property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes that split batches."""
        mesh = self.experiment.plan.mesh
        dims = NestedMap(self.experiment.task.batch_dims())
        pairs = zip(dims.leaves(), self.batch_shardings().leaves(), strict=True)
        used = {
            axis
            for names, sharding in pairs
            for name, axes in zip(names, sharding.dims, strict=True)
            for axis in axes
            if name == "batch"
        }
        return tuple(a for a in mesh.axis_names if a in used and mesh.axis_size(a) > 1)

    @property
    def unreduced_gradient_axes(self) -> tuple[str, ...]:
        """The mesh axes along which gradients of microbatches are left unreduced."""
        return self.data_axes

    @functools.cached_property
    def traced_main(self) -> TracedProgram:
        """`main` before it is compiled, its weight updates sharded."""
        mode = self.experiment.weight_update_sharding
        updates = None
        if mode is not WeightUpdateSharding.OFF and self.data_axes:
            updates = UpdateSharding(mode=mode, data_axes=self.data_axes)
        specs = self._state_specs(self.step_weights)
        layout = StateLayout.of_plan(specs, self.experiment.plan)
        return self._trace(
            lambda state, batches: dict(self.train_loop(state, batches)),
            [layout.logical_specs, self.abstract_batches()],
            [layout.forms, self._stacked_batch_shardings()],
            {"state": layout.forms, "metrics": None},
            donate=(0,),
            update_sharding=updates,
            name="train",
        )

    @functools.cached_property
    def main(self) -> Program:
        """(state, batches) -> {state, metrics}, in step layout; donates the state."""
        return self.traced_main.compile()

    @functools.cached_property
    def eval(self) -> Program:
        """(theta in the plan's layout, batch) -> sums."""
        task, experiment = self.experiment.task, self.experiment
        return self.compile(
            self.eval_step,
            [self.abstract_state().theta, task.batch_spec(experiment.global_batch)],
            [self.plan_layout.forms.theta, self.batch_shardings()],
            None,
            name="eval",
        )

    @functools.cached_property
    def decode(self) -> Program:
        """(theta in the plan's layout, batch to decode) -> predictions for each row."""
        task, plan = self.experiment.task, self.experiment.plan
        batch = task.decoding.spec(self.experiment.global_batch)
        known = dict(NestedMap(task.batch_dims()).items_by_path())

        def sharding(path: str, spec: tf.TensorSpec) -> Sharding:
            dims = known.get(path, ("batch", *[None] * (len(spec.shape) - 1)))
            return plan.activation_sharding(dims, f"batch.{path}")

        rows = batch.map_with_path(sharding)
        return self.compile(
            self.decode_step,
            [self.abstract_state().theta, batch],
            [self.plan_layout.forms.theta, rows],
            None,
            name="decode",
        )

    @functools.cached_property
    def histograms(self) -> Program:
        """(step and theta in step layout, batches) -> `histogram_step`.

        A program of its own, so that a run trains to the same bits without histograms.
        """
        forms = self.step_layout.forms
        held = NestedMap(step=forms.step, theta=forms.theta)
        state = held.map(lambda form: tf.TensorSpec(form.shape, form.dtype))
        return self.compile(
            self.histogram_step,
            [state, self.abstract_batches()],
            [held, self._stacked_batch_shardings()],
            None,
            name="histograms",
        )

    @functools.cached_property
    def finite(self) -> Program:
        """State in step layout -> bool [leaves]: whether all of each leaf is finite."""

        def all_finite(x):
            finite = tf.math.is_finite(x) if x.dtype.is_floating else x == x
            return tf.reduce_all(finite)

        # Of the stored arrays, whose padding is zeros: nothing is gathered.
        return self.compile(
            lambda state: tf.stack([all_finite(x) for x in state.leaves()]),
            [self.step_layout.stored_specs],
            [self.step_layout.shardings],
            None,
            name="finite",
        )

    def convert(
        self, state: NestedMap, before: StateLayout, after: StateLayout
    ) -> NestedMap:
        """The state, or a part of it, converted from one layout to another.

        Where both are the same arrays it is `state` itself, and nothing is compiled.
        """
        if before.same_arrays(after):
            return state
        return self.conversion(before, after)(state)

    def conversion(self, before: StateLayout, after: StateLayout) -> Program:
        """The program that `convert` runs; compiled once."""
        name = f"{before.name}_to_{after.name}"
        if name not in self._conversions:
            self._conversions[name] = self.compile(
                lambda state: state.map(
                    lambda x, form: tf.reshape(x, form.shape), after.forms
                ),
                [before.logical_specs],
                [before.onto(after)],
                after.forms,
                name=name,
            )
        return self._conversions[name]

    def compile(self, *args, **how) -> Program:
        """Compiles a function for the mesh, by the experiment's partitioner.

        It takes the function and its arguments, `in_shardings` and `out_shardings`, as
        `trace_program` does, and what else that takes by name.
        """
        return self._trace(*args, **how).compile()

    def _trace(self, fn, args, in_shardings, out_shardings, **how) -> TracedProgram:
        return trace_program(
            fn,
            args,
            self.experiment.plan.mesh,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            partitioner=self.experiment.partitioner,
            devices=self.devices,
            strict=self.experiment.strict,
            check_types=self.experiment.check_types,
            # Programs for a topology are not for the devices of a child.
            in_child=self.experiment.compile_in_child and self.devices is None,
            **how,
        )
