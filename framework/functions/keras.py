"""Keras 3 models on a mesh, where `fit`, `evaluate` and `predict` are Keras's own.

The model stays as it is. Only the functions that Keras makes of its `train_step`,
`test_step` and `predict_step` are programs for a mesh.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax
import tensorflow as tf
from absl import logging

from meshwright.framework.compiler.program import FunctionOptions, Program
from meshwright.framework.compiler.weight_update_sharding.decide import (
    WeightUpdateSharding,
)
from meshwright.framework.compiler.weight_update_sharding.shard import UpdateSharding
from meshwright.framework.compiler.xla.jax_mesh import jax_mesh
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.compiler.xla.processes import check_child
from meshwright.framework.devices.topology import topology_devices
from meshwright.framework.functions.function import (
    MeshFunction,
    check_mesh,
    check_switches,
    function,
)
from meshwright.framework.functions.keras_files import (
    backup,
    check_model,
    end_at_once,
    is_built,
    share_files,
    shorten_tracebacks,
    under_strategy,
    variables_of,
)
from meshwright.framework.functions.keras_layouts import (
    data_axes_of,
    layout_of,
    table_of,
)
from meshwright.framework.functions.keras_plan import (
    BATCH,
    STEPS,
    FitPlan,
    StepLayout,
    as_of_fit,
    batch_of,
    check_can_train,
    check_is_distributed,
    check_topology,
    drop_placements,
    first_batch,
    is_distributed,
    placed_variables,
    returned,
)
from meshwright.framework.functions.layouts.layout import Layout, LayoutTable
from meshwright.framework.sharding.annotations import mesh_split, sizes_of
from meshwright.framework.sharding.mesh import DeviceMesh, did_you_mean
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.sharding.sharding import Sharding

__all__ = ["backup", "distribute", "plan", "program", "rows", "shardings"]

_SLOT = "momentum|velocity|accumulator|average|^.?(adam|sgd|rmsprop|ada|nadam|lion)"
_OPTIONS = (
    "data_axes",
    "weight_update_sharding",
    # Which axes an update sharding is for, `distribute` knows.
    *(name for name in FunctionOptions.__annotations__ if name != "update_sharding"),
)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Distributed:
    """What makes the programs of a model.

    Args:
      model: the Keras model.
      mesh: the device mesh.
      data_axes: the axes that split a batch.
      layout: of its variables.
      updates: how the train step's weight updates are to be sharded; None: not at all.
      options: of `function`.
      told_uneven: see `StepLayout`.
    """

    model: Any
    mesh: DeviceMesh
    data_axes: Sequence[str]
    layout: Layout
    updates: UpdateSharding | None
    options: Mapping[str, Any]
    told_uneven: threading.Event = dataclasses.field(default_factory=threading.Event)

    def steps(self, method: str) -> Callable[[Iterator[Any]], Any]:
        """What Keras calls to train, or to evaluate, with the batches of one call."""
        step = self.step(method)

        def run(iterator):
            self._check_is_here()
            logs, spec = None, getattr(iterator, "element_spec", None)
            for data in itertools.islice(iterator, self.model.steps_per_execution):
                data = as_of_fit(self.model, method, data)
                logs = step(*batch_of(data, spec))
            if logs is None:
                raise StopIteration
            return logs

        run.step = step
        return run

    def predict(self) -> Callable[[Sequence[Any]], Any]:
        """What Keras calls to predict, with the batches of one call."""
        step = self.step("predict_step")

        def run(batches):
            self._check_is_here()
            outputs = [step(*batch_of(data)) for data in batches]
            return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

        run.step = step
        return run

    def step(self, method: str) -> MeshFunction:
        """A program for each shape of batch that the model's method is called with.

        Raises:
          ValueError: the model is to run eagerly; or, when the train step is traced, a
            row of the layout fits neither a variable of the model nor of its optimizer.
          TypeError: when a step is traced, it returned None, or no dict of logs.
        """
        self._check_runs_compiled()

        def step(data, any_batch):
            with tf.name_scope(BATCH):  # For reports, in which no line is theirs.
                leaves = [*map(self._split, tf.nest.flatten(data), any_batch)]
            data = tf.nest.pack_sequence_as(data, leaves)
            with sizes_of(self.mesh):
                return returned(self.model, method, data)

        return function(
            step,
            self.mesh,
            layout=StepLayout(
                layout=self.layout,
                model=self.model,
                mesh=self.mesh,
                method=method,
                rows=self.mesh.axes_size(self.data_axes),
                told_uneven=self.told_uneven,
            ),
            name=method,
            update_sharding=self.updates if method == "train_step" else None,
            **self.options,
        )

    def check(self) -> None:
        """Finds at once what would else end `fit`; see `distribute` for what it raises.

        Rows are compared with variables only if there are variables.
        """
        name, devices = self.model.name, self.options.get("devices")
        self._check_runs_compiled()
        jax_mesh(self.mesh, devices)
        Partitioner(self.options.get("partitioner", Partitioner.SHARDY))
        if self.options.get("in_child"):
            check_child(name, devices)
        if isinstance(self.layout, LayoutTable):
            self.layout.check_axes(self.mesh, name)
        if not is_built(self.model):
            return
        layout = dataclasses.replace(self.layout)  # Layers may be added before `fit`.
        hint = self._find_slots(layout) if isinstance(layout, LayoutTable) else ""
        variables = variables_of(self.model)
        for variable in variables:
            layout.sharding_of(variable, self.mesh)
        if isinstance(layout, LayoutTable):
            check = layout.check if self.model.compiled else layout.check_matches
            check(variables, name, hint)

    def warn_of_idle_devices(self) -> None:
        """Unless the mesh is of devices that are planned with."""
        count = jax.device_count()
        if self.options.get("devices") is None and self.mesh.size < count:
            logging.warning(
                "%s: the mesh (%s) has %d of %d devices; the others are idle",
                *(self.model.name, self.mesh, self.mesh.size, count),
            )

    def _find_slots(self, layout: LayoutTable) -> str:
        """Has the optimizer make its slots, as `fit` would, if a row could be theirs.

        Returns:
          What to do if there is no optimizer yet, else "".
        """
        model, known = self.model, variables_of(self.model)
        if not model.compiled:
            if any(re.search(_SLOT, row) for row in layout.unused(known)):
                return (
                    "; for rows of optimizer slots call compile() before distribute()"
                )
            return ""
        in_doubt = layout.unused(known) or layout.undecided(known)
        if in_doubt and not getattr(model.optimizer, "built", True):
            model.optimizer.build(model.trainable_variables)
        return ""

    def _check_runs_compiled(self) -> None:
        if tf.distribute.has_strategy():
            raise ValueError(
                f"{self.model.name} is used in the scope of a tf.distribute."
                f"{type(tf.distribute.get_strategy()).__name__}, which splits batches "
                "in place of the mesh: leave the scope"
            )
        optimizer = getattr(self.model, "optimizer", None)
        made_under = getattr(optimizer, "_distribution_strategy", None)
        if made_under not in (None, tf.distribute.get_strategy()):
            what = f"the optimizer of {self.model.name}"
            raise ValueError(under_strategy(what, made_under))
        if self.model.run_eagerly:
            raise ValueError(
                f"{self.model.name}: run_eagerly is True, and a model on a mesh is "
                "compiled: leave it out of compile(), or do not distribute the model"
            )

    def _check_is_here(self) -> None:
        """Raises ValueError if the model is on devices that are planned with only."""
        devices = self.options.get("devices")
        if devices is not None and not {*devices} <= {*jax.devices()}:
            raise ValueError(
                f"{self.model.name} was planned last, for {len(devices)} devices of "
                f"{devices[0].device_kind}, which are not here: to train it here, call "
                "mw.keras.distribute(model, mesh, layout), with the mesh and the "
                "layout of the plan if it is to be that one"
            )

    def _split(self, leaf: Any, any_batch: bool) -> Any:
        """A tensor of a batch, its rows divided over the devices.

        Args:
          leaf: the tensor, or None.
          any_batch: whether Python code is not to see how many rows there are.
        """
        if leaf is None or leaf.shape.rank == 0:
            return leaf
        rest = range(1, leaf.shape.rank)
        dims = [self.data_axes or None, *(None for _ in rest)]
        leaf = mesh_split(leaf, self.mesh, dims, unspecified_dims=rest)
        if any_batch:
            return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])
        return leaf


def distribute(
    model: Any,
    mesh: DeviceMesh,
    layout: str | Mapping[str, Any] | ShardingPlan = "data",
    *,
    data_axes: str | Sequence[str] | None = None,
    weight_update_sharding: WeightUpdateSharding | str = WeightUpdateSharding.AUTO,
    **options: Unpack[FunctionOptions],
) -> Any:
    """Has a Keras model train, evaluate and predict on a mesh.

    After it `compile`, `fit`, `evaluate`, `predict`, callbacks, `save` and the rest are
    used as ever. Numbers are those of one device: a last batch with fewer rows is
    another program, without padding. Another call replaces the former; values stay.

    Args:
      model: a Keras 3 model of the TensorFlow backend; built or not, compiled or not.
      mesh: the device mesh.
      layout: "data": all weights replicated; "fsdp": each weight and its optimizer
        state split along `data_axes`; "tensor": weights of attention, feed-forward
        layers and embeddings split along the mesh's last axis; or a table from regular
        expressions, searched for in variables' paths, to the mesh axes of each dim: a
        dict, as `mw.function` takes it, or Keras's LayoutMap. Variables without
        a row are left to completion. Or a plan of this mesh, whose table of weights
        names dims: "tensor" is the dim that the layout "tensor" splits, "fsdp" the
        largest other one of a weight of two dims or more, "other" any other.
      data_axes: the mesh axes, or the axis, that split a batch; by default all for
        "data" and "fsdp", all but the last for "tensor", the first for a table, and of
        a plan those of the activations' "batch".
      weight_update_sharding: "auto", "off" or "all": which weight updates, that the
        data axes would repeat, are divided among the devices, with the optimizer state
        that goes with them; see docs/explanations/weight_updates.md.
      **options: `partitioner`, `strict`, `check_types`, `devices`, `in_child`, as of
        `mw.function`.

    Returns:
      The model.

    Raises:
      TypeError: it is no Keras model of the TensorFlow backend; an unknown option, or
        one of another type.
      ValueError: it was made in the scope of a `tf.distribute` strategy; an unknown
        layout; a mesh of more devices than exist; a row that is for no axis of the
        mesh; or, if the model is built, a row of another rank than its variable's, or
        one that fits no variable. If it is not built, such rows end the first `fit`.
    """
    check_model(model)
    _check_options(model, options)
    check_mesh(mesh, model.name)
    axes = data_axes_of(model, mesh, layout, data_axes)
    made = _Distributed(
        model=model,
        mesh=mesh,
        data_axes=axes,
        layout=layout_of(model, mesh, layout, axes),
        updates=_updates(model, mesh, axes, weight_update_sharding),
        options=options,
    )
    made.check()
    if is_distributed(model):
        drop_placements(model)
    for name, method in STEPS.items():
        _replace(made, name, method)
    share_files(model)
    end_at_once(model)
    shorten_tracebacks()
    made.warn_of_idle_devices()
    return model


def rows(
    model: Any,
    mesh: DeviceMesh,
    layout: str | Mapping[str, Any] | ShardingPlan = "data",
    *,
    data_axes: str | Sequence[str] | None = None,
) -> dict[str, list[Any]]:
    """The table of what a layout splits: to be printed, changed, and distributed by.

    Args:
      model, mesh, layout, data_axes: as of `distribute`; the model is built.

    Returns:
      By a regular expression of its whole path, the mesh axes of the dims of each
      weight that the layout decides about. A table's rows for none are left out.

    Raises:
      TypeError: the model, mesh or axes are none that `distribute` takes.
      ValueError: likewise, or the layout; the model is not built; or the layout treats
        two weights of one path differently.
    """
    check_model(model)
    check_mesh(mesh, model.name)
    return table_of(model, mesh, layout, data_axes)


def shardings(model: Any) -> dict[str, Sharding | None]:
    """How the programs of a model have placed its variables.

    Args:
      model: a Keras model.

    Returns:
      By path, the sharding of each variable of the model, in Keras's order, and then of
      each variable of optimizers or metrics that a program has used. It is None for a
      variable of the model that no program has used yet. Of variables with the same
      path, the second has ":1" behind it, the third ":2".

    Raises:
      TypeError: it is no Keras model of the TensorFlow backend.
      ValueError: no program has used any of its variables yet.
    """
    check_model(model)
    return placed_variables(model)


def program(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    sample_weight: Any = None,
    batch_size: int | None = None,
) -> Program:
    """The program of a train step, as `fit` runs it; for `explain` and reports.

    It is compiled for the first batch, and `fit` does not compile it again.

    Args:
      model: a Keras model that was distributed and compiled.
      x, y, sample_weight, batch_size: as of `fit`; or `tf.TensorSpec`s of a batch, and
        no batch size.

    Raises:
      ValueError: no data; the model is not distributed or compiled; see `distribute`.
      LoweringError: see `compile_program`.
    """
    check_model(model)
    check_is_distributed(model)
    check_can_train(model, x, "mw.keras.program")
    model.make_train_function()
    batch = first_batch(model, x, y, sample_weight, batch_size)
    return model.train_function.step.program(*batch)


def plan(
    model: Any,
    mesh: DeviceMesh,
    layout: str | Mapping[str, Any] | ShardingPlan = "data",
    *,
    topology: str | None = None,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    **options: Any,
) -> FitPlan:
    """Memory, time and collectives of a step of `fit` on machines that are not here.

    The model may have its own `train_step`. Nothing is trained. After it the model is
    on the topology's devices: call `distribute` to train it here.

    Args:
      model: a Keras model that is compiled.
      mesh, layout: as of `distribute`; the mesh has as many devices as the topology.
      topology: such as "v5e:2x4" or "h100:8", see `topology_devices`; has to be given.
      x, y, batch_size: as of `program`; of data a batch is read.
      **options: of `distribute`, but for `devices`.

    Raises:
      TypeError: see `distribute`; no topology.
      ValueError: see `distribute` and `program`; an unknown topology, or of another
        size than the mesh.
      ImportError: libtpu, or for GPUs JAX's CUDA plugin, is not installed.
      OutOfMemoryError: the step does not fit into a device's memory.
      LoweringError: see `compile_program`.
    """
    check_model(model)
    _check_options(model, options, "plan", ("topology", "x", "y", "batch_size"))
    check_mesh(mesh, model.name)
    check_topology(topology, mesh)
    check_can_train(model, x, "mw.keras.plan")
    batch = first_batch(model, x, y, None, batch_size)
    distribute(model, mesh, layout, devices=topology_devices(topology), **options)
    model.make_train_function()
    step = model.train_function.step.program(*batch)
    return FitPlan(topology=topology, program=step)


def _check_options(
    model: Any,
    options: Mapping[str, Any],
    taker: str = "distribute",
    more: Sequence[str] = (),
) -> None:
    """Refuses what is no option of `distribute`, nor one of `more` of the `taker`."""
    known = (*more, *_OPTIONS)
    for option in options.keys() - {*known}:
        raise TypeError(
            f"{model.name}: {taker} has no option {option!r}"
            f"{did_you_mean(option, known)}; it has {', '.join(known)}"
        )
    check_switches(model.name, options)


def _updates(
    model: Any, mesh: DeviceMesh, axes: Sequence[str], mode: WeightUpdateSharding | str
) -> UpdateSharding | None:
    try:
        mode = WeightUpdateSharding(mode)
    except ValueError:
        known = ", ".join(repr(mode.value) for mode in WeightUpdateSharding)
        raise ValueError(
            f"{model.name}: weight_update_sharding is {mode!r}; it must be one of "
            f"{known}"
        ) from None
    axes = [axis for axis in axes if mesh.axis_size(axis) > 1]
    if mode is WeightUpdateSharding.OFF or not axes:
        return None
    return UpdateSharding(mode=mode, data_axes=axes)


def _replace(made: _Distributed, name: str, method: str) -> None:
    """Gives the model another way to make the function that Keras runs."""
    attribute = f"{name}_function"

    def make(force: bool = False) -> None:
        if force or getattr(made.model, attribute) is None:
            run = made.predict() if name == "predict" else made.steps(method)
            setattr(made.model, attribute, run)

    delattr(made.model, attribute)  # Keras's own, that TF tracks until it is deleted.
    setattr(made.model, attribute, None)
    setattr(made.model, f"make_{attribute}", make)


def __dir__() -> list[str]:
    return __all__
