"""A `tf.Variable` whose value lives on a mesh between the calls of programs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import re
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function.concrete_function import (
    ConcreteFunction,
)
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from meshwright.framework.compiler.boundary.wide_elements import wide_elements
from meshwright.framework.compiler.lowering.variables import handle_of
from meshwright.framework.compiler.program import Program
from meshwright.framework.compiler.xla.processes import check_same, to_host
from meshwright.framework.functions.layouts.layout import path_of
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.plan import as_axes
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.stored_form import StoredForm

LOCK = threading.RLock()
"""Held while values move between TF and a mesh."""
_TOLD: weakref.WeakSet = weakref.WeakSet()
_SILENT = threading.local()
_OURS = "_meshwright_traced"
_VALUE = "_meshwright_value"
_WRITES = ("assign", "assign_add", "assign_sub")
_SCRATCH = "scratch_graph"
_BY_KERAS = (
    "multi_step_on_iterator",
    "one_step_on_data",
    "one_step_on_data_distributed",
    "multi_step_on_data",
)
# Of what is in place of a value that is on the mesh: no variable has it.
_STALE_SHAPE = (1, 1, 1, 1, 1, 1, 1, 1, 1, 2)


@dataclasses.dataclass(eq=False)
class MeshValue:
    """Where the value of a variable is.

    Args:
      variable: the variable.
      array: its value on the mesh, in stored form; None before a program used it.
      form: the stored form of `array`; None: its logical shape.
      mesh: of the program that took it last.
      given_by: name of the program that gave it its sharding, "" if completion did.
      on_host: whether TF's own copy is the value.
      on_mesh: whether `array` is the value.
      was_read: whether `array` was copied to the host since a program made it.
      stays_placed: whether a program that is compiled next keeps the form where its
        layout does not say.
      readers: graphs of other functions that captured the variable: they read and write
        TF's own copy whenever they run.
      told: names of readers that a warning has named.
    """

    variable: weakref.ref
    array: jax.Array | None = None
    form: StoredForm | None = None
    mesh: DeviceMesh | None = None
    given_by: str = ""
    on_host: bool = True
    on_mesh: bool = False
    was_read: bool = False
    stays_placed: bool = True
    readers: weakref.WeakSet = dataclasses.field(default_factory=weakref.WeakSet)
    told: set[str] = dataclasses.field(default_factory=set)

    def take(self, program: Program, number: int) -> jax.Array:
        """The value as a program takes it.

        Args:
          program: the program.
          number: of the leaf among the program's arguments.

        Raises:
          RuntimeError: see `to_host`.
        """
        form = program.arguments.forms[number]
        sharding = program.arguments.shardings[number]
        if not self.stays_on_mesh or stored_as(self.form) != stored_as(form):
            self.array = program.arguments.put(number, self.host_value())
        elif not self.array.sharding.is_equivalent_to(sharding, self.array.ndim):
            with wide_elements():
                self.array = jax.device_put(self.array, sharding)
        self.form, self.mesh, self.on_mesh = form, program.mesh, True
        self.stays_placed = True
        self.given_by = (form.kept_from or program.name) if form else ""
        return self.array

    @property
    def sharding(self) -> Sharding:
        """How the programs keep the value, once one has placed it."""
        if self.form is not None:
            return self.form.border
        whole = Sharding.replicated(self.mesh, self.array.ndim).dims
        if self.array.sharding.is_fully_replicated:
            return Sharding(self.mesh, whole)
        # JAX may leave out the last dims if they are whole.
        dims = tuple(map(as_axes, self.array.sharding.spec))
        return Sharding(self.mesh, dims + whole[len(dims) :])

    @property
    def stays_on_mesh(self) -> bool:
        """Whether a program may take the value from the mesh."""
        # A program that failed may have taken it, or other readers written since.
        return self.on_mesh and not self.array.is_deleted() and not self.readers

    def host_value(self) -> np.ndarray:
        """The value, of logical shape."""
        self.to_host()
        variable = self.variable()
        handle, dtype = handle_of(variable), variable.dtype
        with context.eager_mode():
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype).numpy()

    def to_host(self) -> None:
        """Makes TF's own copy the value.

        Raises:
          RuntimeError: something wrote to the copy while the value was on the mesh; or
            the value is lost; or one of several processes does not read it.
          ValueError: one of several processes does something else.
        """
        with LOCK:
            if not self.on_host:
                variable = self.variable()
                if self.is_lost:
                    raise RuntimeError(
                        f"the value of variable {path_of(variable)!r} was lost when a "
                        "program that writes it failed: assign it, load weights or "
                        "restore a checkpoint"
                    )
                was_written = self._was_written()
                self._copy_to_host()
                if was_written:
                    raise RuntimeError(
                        f"variable {path_of(variable)!r} was written through a handle "
                        "that was taken before a program ran on a mesh, and that value "
                        "is lost: take variable.handle anew after each call of a "
                        "program. The variable has the value that the last program "
                        "gave it"
                    )

    @property
    def is_lost(self) -> bool:
        """Whether a program that failed had taken over the memory of the value."""
        return not self.on_host and self.array.is_deleted()

    def begin_anew(self) -> None:
        """Makes TF's own copy the value, without numbers, if the value is lost."""
        with LOCK:
            if self.is_lost:
                variable = self.variable()
                _assign(variable, _nothing(variable.dtype, variable.shape))
                self.on_host, self.on_mesh = True, False

    def first_read(self) -> np.ndarray | None:
        """The value for the first who reads it since a program made it; else None.

        That read leaves no copy behind, so that a model that is saved has one variable
        after another on the host. What is read again gets TF's own copy, which stays;
        so it does where several processes, of which some read once, have to read.
        """
        if self.on_host or self.was_read or self.is_lost or self._was_written():
            return None
        if not self._is_here:
            return None
        self.was_read = True
        return self._logical_value()

    def _was_written(self) -> bool:
        """Whether something wrote to TF's own copy while the value was elsewhere."""
        return _host_shape(self.variable()) != _STALE_SHAPE

    @property
    def _is_here(self) -> bool:
        """Whether this process has all parts of the value."""
        return self.array.is_fully_addressable or self.array.is_fully_replicated

    def _logical_value(self) -> np.ndarray:
        if not self._is_here:
            check_same(f"reading variable {path_of(self.variable())!r}", {})
        value = to_host(self.array)
        return value if self.form is None else self.form.unpad(value)

    def _copy_to_host(self) -> None:
        _assign(self.variable(), self._logical_value())
        self.on_host = self.was_read = True

    def update(self, array: jax.Array, form: StoredForm | None) -> None:
        """Takes a program's result as the value, on the mesh alone."""
        self.array, self.form, self.on_mesh, self.was_read = array, form, True, False
        if self.readers:
            self._copy_to_host()
        self.leave_host()

    def leave_host(self) -> None:
        """Keeps the value on the mesh alone, unless other functions read TF's copy."""
        if self.on_host and not self.readers:
            self.on_host = False
            self.drop_host_copy()

    def drop_host_copy(self) -> None:
        """Frees TF's own copy; whatever reads it then fails, or gets NaN."""
        variable = self.variable()
        _assign(variable, _nothing(variable.dtype, _STALE_SHAPE))


def stored_as(form: StoredForm | None) -> tuple | None:
    """What tells apart arrays of one variable; None: of its logical shape."""
    if form is None or (form.is_logical and form.combined is None):
        return None
    return form.stored_shape, form.combined


def _nothing(dtype: tf.DType, shape: Sequence[int]) -> np.ndarray:
    """What is in place of a value: NaN if the type has it."""
    stale = np.nan if dtype.is_floating or dtype.is_complex else 0
    return np.full(shape, stale, dtype.as_numpy_dtype)


def _host_shape(variable: tf.Variable) -> tuple[int, ...]:
    with context.eager_mode():
        return tuple(tf.raw_ops.VariableShape(input=handle_of(variable)).numpy())


def _assign(variable: tf.Variable, value) -> None:
    # Another function may be being traced, or a graph made that is none's: in that
    # tf.init_scope would stay, as when Keras exports a seed.
    with context.eager_mode():
        tf.raw_ops.AssignVariableOp(
            resource=handle_of(variable),
            value=tf.convert_to_tensor(value, variable.dtype),
            validate_shape=False,
        )


def placed(variable: Any) -> MeshValue | None:
    """A variable's value, once a program has placed it on a mesh; None for all else."""
    value = getattr(variable, "__dict__", {}).get(_VALUE)
    return value if value is not None and value.array is not None else None


def value_of(variable: tf.Variable) -> MeshValue:
    """The variable's value, for programs; from now on it may be on a mesh.

    Raises:
      TypeError: the variable is of a kind that cannot be.
    """
    value = variable.__dict__.get(_VALUE)
    if value is None:
        kind = _on_mesh_class(type(variable))
        value = MeshValue(weakref.ref(variable))
        variable.__dict__[_VALUE] = value
        variable.__class__ = kind
    return value


@functools.cache
def _on_mesh_class(kind: type) -> type:
    """A subclass of a variable's class that brings the value back when it is read."""
    if not issubclass(kind, BaseResourceVariable):
        raise TypeError(
            f"a variable of type {kind.__name__} cannot be kept on a mesh: pass a "
            "tf.Variable, made outside of a tf.distribute strategy"
        )

    def handle(self):
        value = self.__dict__[_VALUE]
        if tf.executing_eagerly():
            if value.is_lost:  # What restores a checkpoint asks for the handle.
                logging.error("variable %r is used after it was lost", path_of(self))
                value.begin_anew()
            value.to_host()
            value.on_mesh = False  # An op may write through the handle.
        elif not is_ours(tf.compat.v1.get_default_graph()):
            _note_reader(value, tf.compat.v1.get_default_graph())
        return handle_of(self)

    def set_handle(self, handle):
        vars(self)["_handle"] = handle

    def read(self, *args, **kwargs):
        value = self.__dict__[_VALUE]
        if not tf.executing_eagerly():
            return kind._read_variable_op(self, *args, **kwargs)
        with LOCK:  # Another thread may run a program.
            if not record.could_possibly_record():  # Else a tape watches the variable.
                copy = value.first_read()
                if copy is not None:
                    return tf.convert_to_tensor(copy, self.dtype)
            value.to_host()
            before = value.on_mesh
            try:
                return kind._read_variable_op(self, *args, **kwargs)
            finally:
                value.on_mesh = before

    def result_of_write(self, op):
        # TF's own keeps the handle, and would read the copy later.
        return self if tf.executing_eagerly() else kind._lazy_read(self, op)

    members = {
        # Not `handle`, which returns it: eager ops read this attribute in C++.
        "_handle": property(handle, set_handle),
        "_read_variable_op": read,
        "_lazy_read": result_of_write,
        **{name: _write(getattr(kind, name)) for name in _WRITES},
        "__module__": kind.__module__,
    }
    return type(kind.__name__, (kind,), members)


def _write(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that writes a variable, while no other thread runs a program."""

    @functools.wraps(method)
    def write(self, *args, **kwargs):
        if not tf.executing_eagerly():
            return method(self, *args, **kwargs)
        with LOCK:
            if method.__name__ == "assign":
                self.__dict__[_VALUE].begin_anew()
            return method(self, *args, **kwargs)

    return write


def mark_as_ours(graph: FuncGraph) -> None:
    """Notes that a graph, which is being traced, will be a program."""
    setattr(graph, _OURS, True)


def is_ours(graph) -> bool:
    """Whether a graph, or a graph around it, will be a program."""
    while graph is not None:
        if getattr(graph, _OURS, False):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def note_readers(variables: Iterable[tf.Variable]) -> None:
    """Finds other functions that captured the variables before they were on a mesh."""
    by_handle = {id(handle_of(variable)): value_of(variable) for variable in variables}
    gc.collect()  # TF's function that initialized them is garbage, and a cycle.
    # By `type`: `isinstance` asks a proxy for the class of an object that may be gone.
    objects = gc.get_objects()
    functions = (f for f in objects if issubclass(type(f), ConcreteFunction))
    callable_ids = {id(function.graph) for function in functions}
    for graph in objects:
        if issubclass(type(graph), FuncGraph) and not is_ours(graph):
            for outside, _ in graph.captures:
                if id(outside) in by_handle and _can_run(graph, callable_ids):
                    _note_reader(by_handle[id(outside)], graph)


def _can_run(graph: FuncGraph, callable_ids: set[int]) -> bool:
    """Whether a function lives that runs a graph, or a graph around it.

    TF's registry of gradients keeps the graph of a function with a `tf.custom_gradient`
    for ever.

    Args:
      graph: the graph.
      callable_ids: `id`s of the graphs that functions have.
    """
    while isinstance(graph, FuncGraph):
        # Keras's scratch graphs only give shapes, and look as if they were unfinished.
        is_scratch = graph.name.startswith(_SCRATCH)
        is_unfinished = graph.structured_outputs is None and not graph.outputs
        is_being_traced = is_unfinished and not is_scratch
        if id(graph) in callable_ids or is_being_traced:
            return True
        graph = graph.outer_graph
    return False


def _note_reader(value: MeshValue, graph) -> None:
    name = _name_of(graph)
    # Keras makes its functions anew for each `compile` and export.
    kind = re.sub(r"_\d+$", "", name)
    if getattr(_SILENT, "is_on", False):
        value.readers.add(graph)
        value.to_host()
        return
    if graph not in _TOLD and kind not in value.told:
        remedy = "Make it an mw.function too, or drop it"
        if name in _BY_KERAS:
            remedy = (
                "Keras compiled it before mw.keras.distribute: drop what still holds "
                "it, such as a name for model.train_function"
            )
        logging.warning(
            "the function %r reads variable %r and perhaps others, and does not run on "
            "the mesh: their values are copied to the host after each call of a "
            "program. %s",
            *(name, path_of(value.variable()), remedy),
        )
    _TOLD.add(graph)
    value.told.add(kind)
    value.readers.add(graph)
    value.to_host()


def _name_of(graph) -> str:
    """The name of a graph's function, not of a branch in it."""
    while isinstance(getattr(graph, "outer_graph", None), FuncGraph):
        graph = graph.outer_graph
    return getattr(graph, "name", "of a graph")


@contextlib.contextmanager
def silent_readers() -> Iterator[None]:
    """Functions that are made in this context to be written to a file: no warning.

    At its end Python collects them, so that they read no variable any more.
    """
    _SILENT.is_on = True
    try:
        yield
    finally:
        _SILENT.is_on = False
        gc.collect()


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Has Ctrl-C wait for the end of the context.

    A program takes over the memory of the variables that it writes: an exception before
    they have their new values would lose both.
    """
    received = []
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(before):  # It is ignored, or not Python's.
        yield
        return
    signal.signal(signal.SIGINT, lambda *args: received.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            before(*received[-1])


@contextlib.contextmanager
def host_shapes(variables: Iterable[tf.Variable]) -> Iterator[None]:
    """Gives TF's own copies the variables' shapes, which TF2XLA reads, if not values.

    The memory is not written to, so that the system does not provide it.
    """
    away = [v for v in variables if not value_of(v).on_host]
    for v in away:
        with tf.init_scope():
            _assign(v, tf.raw_ops.Empty(shape=v.shape, dtype=v.dtype, init=False))
    try:
        yield
    finally:
        for v in away:
            value_of(v).drop_host_copy()
