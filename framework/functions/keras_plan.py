"""A step of `fit`: its layout, its variables, what it takes on machines not here."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import numbers
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from meshwright.framework.compiler.explaining.texts.screen import on_screen
from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.roofline import roofline
from meshwright.framework.compiler.hlo.step_errors import error_text
from meshwright.framework.compiler.hlo.step_time import StepTime, step_time
from meshwright.framework.compiler.lowering.lower import nodes_of
from meshwright.framework.compiler.lowering.sources import ANNOTATION, shown_name
from meshwright.framework.compiler.program import Program
from meshwright.framework.compiler.repair.check import reported_to
from meshwright.framework.compiler.repair.repaired import Repair
from meshwright.framework.devices.device_order import order_of
from meshwright.framework.devices.gpu_topology import GpuTopology
from meshwright.framework.devices.hardware import GpuKind, TpuKind
from meshwright.framework.devices.topology import topology
from meshwright.framework.functions.keras_files import are_of_keras, variables_of
from meshwright.framework.functions.keras_layouts import NAMED
from meshwright.framework.functions.layouts.layout import Layout, by_path, layout_notes
from meshwright.framework.functions.mesh_variable import placed
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.stored_form import StoredForm
from meshwright.framework.sizes import bytes_text

STEPS = {"train": "train_step", "test": "test_step", "predict": "predict_step"}
"""The methods of a Keras model of which it makes the functions that it runs."""
BATCH = "batch"
"""The scope of the ops that split the rows of a batch."""


@dataclasses.dataclass(frozen=True, eq=False)
class StepLayout(Layout):
    """The layout of a model, for one of its steps.

    Args:
      layout: of the model's variables.
      model: the Keras model.
      mesh: the device mesh.
      method: that makes the step.
      rows: how many devices split the rows of a batch.
      is_told: whether what it does was logged.
      told_uneven: whether a warning was of a batch that they do not divide.
    """

    layout: Layout
    model: Any
    mesh: DeviceMesh
    method: str
    rows: int
    told_uneven: threading.Event
    is_told: threading.Event = dataclasses.field(default_factory=threading.Event)

    def sharding_of(self, variable: tf.Variable, mesh: DeviceMesh) -> Sharding | None:
        """The layout's."""
        return self.layout.sharding_of(variable, mesh)

    def reason(self, variable: tf.Variable, mesh: DeviceMesh) -> str:
        """The layout's."""
        return self.layout.reason(variable, mesh)

    def check(self, variables: Sequence[tf.Variable], name: str) -> None:
        """Compares a table with all variables, which the train step has built.

        The model's come before the optimizer's, so that an error names a weight rather
        than its slots.
        """
        if self.method == "train_step":
            known = variables_of(self.model)
            self.layout.check(known, self.model.name)
            for variable in known:
                self.layout.sharding_of(variable, self.mesh)

    def keeps(self, variables: Sequence[tf.Variable]) -> bool:
        """Whether optimizer and metrics made them, of a model of Keras's own parts."""
        return are_of_keras(self.model, variables)

    def report(
        self, variables: Sequence[tf.Variable], forms: Sequence[StoredForm | None]
    ) -> None:
        """Logs once what the layout does to the weights of the train step."""
        if self.method != "train_step" or self.is_told.is_set():
            return
        self.is_told.set()
        order = {id(v): number for number, v in enumerate(variables_of(self.model))}
        pairs = sorted(
            zip(variables, forms, strict=False),
            key=lambda pair: order.get(id(pair[0]), len(order)),
        )
        variables, forms = [v for v, _ in pairs], [form for _, form in pairs]
        notes, is_lacking = layout_notes(self.layout, self.mesh, variables, forms)
        level = logging.WARNING if is_lacking else logging.INFO
        logging.log(level, "%s: %s", self.model.name, notes)
        if lacking := self.layout.lacking(variables, forms, self.mesh):
            logging.warning("%s: %s", self.model.name, lacking)

    def compiling(
        self, graph: tf.Graph, specs: Sequence[tf.TensorSpec]
    ) -> contextlib.AbstractContextManager[None]:
        """Has repairs reported with the remedy of Keras, if there is one.

        Of a batch of uneven rows it is the batch size. Of a layout given by name, in a
        model that annotates nothing, no shardings are the user's to change: there it is
        information.
        """
        sizes = [spec.shape[0] for spec in specs if spec.shape.rank]
        uneven = next((size for size in sizes if size % self.rows), None)
        is_named = isinstance(self.layout, NAMED)

        def report(name: str, repairs: Sequence[Repair]) -> Sequence[Repair]:
            if uneven is not None:
                repairs = self._report_uneven(name, repairs, uneven)
            # The graph is only looked at if there is something to report.
            if not repairs or not is_named or _has_annotations(graph):
                return repairs
            for repair in repairs:
                logging.info("%s: %s: %s", self.model.name, name, repair)
            return []

        return reported_to(report)

    def _report_uneven(
        self, name: str, repairs: Sequence[Repair], uneven: int
    ) -> Sequence[Repair]:
        """Tells of repairs for a batch of uneven rows, and returns the others.

        Those of ops that split no multiple of these rows unevenly have another cause.
        """
        of_rows = [r for r in repairs if any(n % uneven == 0 for n in r.uneven)]
        if of_rows:
            is_told = self.told_uneven.is_set()
            one = repr(shown_name(of_rows[0].op_name))
            several = f"{len(of_rows)} ops, such as {one}"
            self.told_uneven.set()
            logging.log(
                logging.INFO if is_told else logging.WARNING,
                "%s: %s has a batch of %d rows, which %d devices do not divide: "
                "more is communicated for %s, which XLA gets wrong in uneven "
                "shards. Numbers are right. To save time, pass a batch_size, and "
                "so many rows (of validation_data too), that %d divides them",
                *(self.model.name, name, uneven, self.rows),
                *(one if len(of_rows) == 1 else several, self.rows),
            )
        return [repair for repair in repairs if repair not in of_rows]


def _has_annotations(graph: tf.Graph) -> bool:
    """Whether a step annotates more than the rows of its batch, which we do."""
    return any(
        node.op == ANNOTATION and not node.name.startswith(f"{BATCH}/")
        for node in nodes_of(graph.as_graph_def())
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitPlan:
    """A step of `fit` on a topology; its `str` is to be read.

    Args:
      topology: the topology's name.
      program: the step, compiled for it; for `explain` and `why` too.
    """

    topology: str
    program: Program

    @property
    def memory(self) -> int:
        """Bytes of a device at the peak, as XLA compiled the step."""
        return self.program.memory().peak

    @property
    def kind(self) -> TpuKind | GpuKind:
        """What the topology's devices are."""
        return topology(self.topology).kind

    @property
    def memory_limit(self) -> int:
        """Bytes that a device has."""
        return self.kind.memory

    @functools.cached_property
    def time(self) -> StepTime:
        """The estimate of a step; for GPUs by roofline alone."""
        pod, mesh = topology(self.topology), self.program.mesh
        module = HloModule(self.program.hlo_text())
        if isinstance(pod, GpuTopology):
            return roofline(module, mesh, pod, with_estimates=False)
        return step_time(module, mesh, order_of(mesh, pod))

    def __str__(self) -> str:
        held, limit = bytes_text(self.memory), bytes_text(self.memory_limit)
        lines = [
            f"{self.program.name} on {self.topology}, mesh {self.program.mesh}",
            f"  memory of a device, compiled: {held} of {limit}",
            f"  step, estimated: {self.time}",
            f"    {error_text(self.kind)}",
        ]
        groups: dict[str, list[int]] = collections.defaultdict(list)
        for sent in self.program.collectives():
            along = "?" if sent.axes is None else ", ".join(sent.axes)
            groups[f"{sent.kind} along {along}"].append(sent.bytes)
        for name, sizes in sorted(groups.items(), key=lambda item: -sum(item[1])):
            lines.append(f"  {name}: {len(sizes)}, {bytes_text(sum(sizes))}")
        return on_screen(lines, self.program.mesh)


def batch_of(data: Any, spec: Any = None) -> tuple[Any, tuple[bool, ...]]:
    """A batch, and whether Keras's own step knows the number of rows of each tensor.

    Keras weighs the losses of several outputs by the batch's size if it is known while
    the step is traced, and counts batches alike if it is not.

    Args:
      data: of Keras's iterator; None takes the place of an empty
        `tf.experimental.Optional`.
      spec: `tf.TensorSpec`s of the iterator, in the same structure.
    """
    data = tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )
    count = len(tf.nest.flatten(data))
    if spec is None:
        return data, (False,) * count
    shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(spec)]
    return data, tuple(
        shape is not None and (shape.rank is None or shape[:1] == [None])
        for shape in shapes
    )


def as_of_fit(model: Any, method: str, data: Any) -> Any:
    """The batch of `train_on_batch`, `(x, y, None)`, as `fit` has it, `(x, y)`.

    So both run one program. A step of the user's may tell the two apart.
    """
    if not isinstance(data, tuple) or len(data) != 3 or data[2] is not None:
        return data  # With weights and no `y`, Keras's packing would lose them.
    import keras

    is_own = getattr(getattr(model, method), "__func__", None) is not getattr(
        keras.Model, method
    )
    return data if is_own else keras.utils.pack_x_y_sample_weight(*data[:2])


def returned(model: Any, method: str, data: Any) -> Any:
    """What a step of a Keras model returned for a batch.

    Args:
      model: the Keras model.
      method: that makes the step.
      data: the batch.

    Raises:
      TypeError: it is None, which Keras would take for the end of the data; or of a
        step that trains or evaluates no dict.
    """
    result = getattr(model, method)(data)
    predicts = method == "predict_step"
    if result is None or not (predicts or isinstance(result, Mapping)):
        kind = "a tensor" if tf.is_tensor(result) else f"a {type(result).__name__}"
        logs = "a dict of logs, names to values, such as {'loss': loss}"
        raise TypeError(
            f"{model.name}: {method} returned {'None' if result is None else kind}; "
            f"it must return {'the predictions' if predicts else logs}"
        )
    return result


def first_batch(
    model: Any, x: Any, y: Any, sample_weight: Any, batch_size: int | None
) -> tuple[Any, tuple[bool, ...]]:
    """The first batch of data as `fit` reads them, or a batch of specs; see `batch_of`.

    Args:
      model: the Keras model.
      x, y, sample_weight, batch_size: see `mw.keras.program`.

    Raises:
      TypeError: the batch size is no int.
      ValueError: the data have no batches, or different numbers of rows; a spec lacks a
        size, or there are specs and a batch size; or that is less than 1.
    """
    from keras.src.backend.tensorflow.trainer import TFEpochIterator
    from keras.utils import pack_x_y_sample_weight

    if batch_size is not None:
        is_int = isinstance(batch_size, numbers.Integral)
        if not is_int or isinstance(batch_size, bool):
            raise TypeError(f"{model.name}: batch_size is {batch_size!r}; pass an int")
        if batch_size < 1:
            raise ValueError(
                f"{model.name}: batch_size is {batch_size}; pass 1 or more"
            )
    check_rows(model.name, x=x, y=y, sample_weight=sample_weight)
    specs = [leaf for leaf in tf.nest.flatten((x, y, sample_weight)) if _is_spec(leaf)]
    if specs and batch_size is not None:
        raise ValueError(
            f"{model.name}: specs are of one batch, and batch_size is {batch_size}: "
            "leave it out, and give the specs that number of rows"
        )
    if specs:
        check_sizes(model.name, specs)
        data = pack_x_y_sample_weight(x, y, sample_weight)
        # The shapes of what `fit` reads of arrays.
        return batch_of(data, tf.nest.map_structure(_of_any_rows, data))
    batches = TFEpochIterator(
        x=x,
        y=y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        distribute_strategy=model.distribute_strategy,
    )
    _, _, iterator = next(iter(batches))
    data = next(iterator, None)
    if data is None:
        raise ValueError(f"{model.name}: the data have no batches: pass those of fit")
    return batch_of(data, iterator.element_spec)


def check_sizes(name: str, specs: Sequence[tf.TensorSpec]) -> None:
    """Raises ValueError for a spec of a batch that lacks a size."""
    for spec in specs:
        if not spec.shape.is_fully_defined():
            raise ValueError(
                f"{name}: a program is compiled for a batch of known sizes, not "
                f"{spec.shape}: give the spec its number of rows too"
            )


def check_rows(name: str, **data: Any) -> None:
    """Raises ValueError for arrays, or specs, that differ in their numbers of rows."""
    rows = {}
    for argument, nest in data.items():
        leaves = [leaf for leaf in tf.nest.flatten(nest) if hasattr(leaf, "shape")]
        shapes = [tf.TensorShape(leaf.shape) for leaf in leaves]
        sizes = {shape[0] for shape in shapes if shape.rank} - {None}
        if sizes:
            rows[argument] = sorted(sizes)
    if len({size for sizes in rows.values() for size in sizes}) > 1:
        listed = ", ".join(
            f"{argument} has {' and '.join(map(str, sizes))}"
            for argument, sizes in rows.items()
        )
        raise ValueError(
            f"{name}: numbers of rows differ: {listed}; pass the same number in all"
        )


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, tf.TensorSpec)


def _of_any_rows(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def check_can_train(model: Any, x: Any, asker: str) -> None:
    """Raises ValueError for `asker` if a train step lacks data, a loss or an optimizer.

    Args:
      model: the Keras model.
      x: its data.
      asker: the function that needs them, for messages.
    """
    if x is None:
        raise ValueError(
            f"{model.name}: a program is compiled for a batch, and there are no data: "
            f"pass x, and y, as to fit, to {asker}, such as x=x, y=y, batch_size=32"
        )
    if not model.compiled:
        raise ValueError(
            f"{model.name} is not compiled, and a train step has a loss and an "
            f"optimizer: call model.compile() before {asker}"
        )


def is_distributed(model: Any) -> bool:
    """Whether a Keras model is on a mesh."""
    return "make_train_function" in vars(model)  # Which `distribute` replaces.


def check_is_distributed(model: Any) -> None:
    """Raises ValueError if a Keras model, whose program is wanted, is on no mesh."""
    if not is_distributed(model):
        raise ValueError(
            f"{model.name} is on no mesh: call mw.keras.distribute(model, mesh, "
            "layout) before mw.keras.program"
        )


def check_topology(name: str | None, mesh: DeviceMesh) -> None:
    """Raises an error for a topology that is unknown, or of another size than the mesh.

    Raises:
      TypeError: it is None.
      ValueError: it is unknown, or of another size.
    """
    if name is None:
        raise TypeError(
            "mw.keras.plan needs a topology, such as topology='v5e:2x4' or 'h100:8'"
        )
    size = topology(name).size
    if size != mesh.size:
        raise ValueError(
            f"topology {name!r} has {size} devices, but the mesh ({mesh}) has "
            f"{mesh.size}: give the mesh a shape whose product is {size}"
        )


def placed_variables(model: Any) -> dict[str, Sharding | None]:
    """The shardings of a Keras model's variables; see `mw.keras.shardings`.

    Args:
      model: the Keras model.

    Raises:
      ValueError: no program has used a variable yet.
    """
    own = {id(variable._value) for variable in model.variables}
    known = _used_variables(model)
    known = {key: v for key, v in known.items() if key in own or placed(v)}
    if not any(map(placed, known.values())):
        raise ValueError(
            f"{model.name}: no program has placed its variables yet: call "
            "mw.keras.distribute, and fit, evaluate or predict, before "
            "mw.keras.shardings"
        )
    values = {path: placed(v) for path, v in by_path(known.values()).items()}
    return {path: value and value.sharding for path, value in values.items()}


def drop_placements(model: Any) -> None:
    """Leaves to the next programs where a Keras model's variables go; values stay."""
    for variable in _used_variables(model).values():
        if value := placed(variable):
            value.stays_placed = False


def _used_variables(model: Any) -> dict[int, tf.Variable]:
    """By `id`: variables of the model, its optimizer, and of its steps besides."""
    known = {id(v): v for v in variables_of(model)}
    made = (getattr(model, f"{name}_function", None) for name in STEPS)
    for step in (f.step for f in made if hasattr(f, "step")):
        known |= {id(v): v for v in step.variables if id(v) not in known}
    return known
