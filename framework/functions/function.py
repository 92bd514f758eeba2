"""TF functions with variables, partitioned over a mesh."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.eager import record
from tensorflow.python.framework.composite_tensor import CompositeTensor
from tensorflow.python.util import nest

from meshwright.framework.compiler.boundary.form_notes import FormNotes
from meshwright.framework.compiler.lowering.captures import captured_as
from meshwright.framework.compiler.lowering.errors import (
    LoweringError,
    check_not_eager,
    no_elements,
)
from meshwright.framework.compiler.lowering.garbage import garbage_later
from meshwright.framework.compiler.program import (
    FunctionOptions,
    Program,
    trace_program,
    tracing_for_devices,
)
from meshwright.framework.compiler.weight_update_sharding.decide import (
    WeightUpdateSharding,
)
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.compiler.xla.processes import to_host
from meshwright.framework.functions.agreement import (
    check_before_call,
    check_before_tracing,
    check_constants,
)
from meshwright.framework.functions.change_forms import change_forms
from meshwright.framework.functions.layouts.layout import Layout, LayoutTable
from meshwright.framework.functions.mesh_variable import (
    LOCK,
    host_shapes,
    interrupts_later,
    is_ours,
    mark_as_ours,
    note_readers,
    value_of,
)
from meshwright.framework.functions.progress import told_if_long
from meshwright.framework.functions.traced import (
    TRACING,
    Traced,
    argument_paths,
    converted,
    trace,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.stored_form import StoredForm

_OPTIONS = tuple(FunctionOptions.__annotations__)
_SWITCHES = ("strict", "check_types", "in_child")


@dataclasses.dataclass(frozen=True, eq=False)
class _Compiled:
    """A function, compiled for arguments of certain shapes.

    Args:
      program: takes the values of the variables that the function writes, those of the
        variables that it only reads, its large constants, and its tensors; returns a
        dict of "state", the new values, "values", the function's results, and
        "violated", the number of the first check that does not hold, if it makes any.
      traced: the function.
      constants: its large constants, on the mesh.
      calls: numbers the calls, from 1.
    """

    program: Program
    traced: Traced
    constants: list[jax.Array]
    calls: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))


class MeshFunction:
    """A TF function that runs on a mesh; made by `function`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: DeviceMesh,
        *,
        layout: Layout,
        name: str,
        options: Mapping[str, Any],
    ):
        """See `function`."""
        functools.update_wrapper(self, fn, updated=())
        self.mesh = mesh
        self.name = name
        self._fn = fn
        self._layout = layout
        self._options = options
        self._compiled: dict[Hashable, _Compiled] = {}

    @property
    def variables(self) -> list[tf.Variable]:
        """Those of each of its programs, one program after another."""
        traced = [compiled.traced for compiled in self._compiled.values()]
        own = {id(variable) for of in traced for variable in of.checks.variables}
        return [v for of in traced for v in of.variables if id(v) not in own]

    def __repr__(self) -> str:
        return f"<MeshFunction {self.name!r} for the mesh ({self.mesh})>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function on the mesh.

        Args:
          *args, **kwargs: nests of tensors, arrays of logical shape, and Python values.
            As for a `tf.function`, other shapes, dtypes and Python values are another
            program, which is traced and compiled when it is first called.

        Returns:
          What the function returns; its tensors are on the host.

        Raises:
          LoweringError: see `compile_program`; the function reads a resource that is no
            variable; or a gradient tape is recording.
          tf.errors.InvalidArgumentError: an assertion of the function, or a check of
            numerics, does not hold. What the call wrote to variables is there.
          TypeError: a variable of it cannot be kept on a mesh.
          ValueError: a row of the layout fits no variable of it; or one of several
            processes calls it with something else.
          RuntimeError: one of several processes does not call it.
        """
        if not tf.executing_eagerly():
            return self._traced_in_place(args, kwargs)
        if record.could_possibly_record():
            raise LoweringError(
                f"{self.name} is called within a tf.GradientTape, which does not see "
                "what runs on a mesh: compute gradients inside the function, or call "
                "it within tape.stop_recording()"
            )
        leaves = tf.nest.flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if _spec(leaf) is not None]
        compiled = self._find(args, kwargs, leaves)
        program, traced = compiled.program, compiled.traced
        with LOCK:
            values = [value_of(variable) for variable in traced.variables]
            check_before_call(self.name, next(compiled.calls), values, tensors)
            change_forms(values, program)
            taken = [value.take(program, i) for i, value in enumerate(values)]
            state, read = traced.by_path(taken)
            with interrupts_later():
                out = program(state, read, compiled.constants, tensors)
                for i, array in enumerate(out["state"].values()):
                    values[i].update(array, program.arguments.forms[i])
            for value in values[len(state) :]:
                value.leave_host()
        for number in out["violated"]:
            traced.checks.tell(self.name, int(to_host(number)))
        return traced.packed([*map(to_host, out["values"])])

    def _traced_in_place(self, args: tuple, kwargs: dict) -> Any:
        """The result in the graph of another function that is being traced."""
        if not is_ours(tf.compat.v1.get_default_graph()):
            raise LoweringError(
                f"{self.name} runs on a mesh, and is called by a tf.function, which "
                "runs on one device: call it from Python, or make the caller an "
                "mw.function too"
            )
        return converted(self._fn)(*args, **kwargs)

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The program for such arguments, for `explain` and reports.

        Args:
          *args, **kwargs: as of a call; `tf.TensorSpec`s may take the place of tensors.
        """
        return self._find(args, kwargs, tf.nest.flatten((args, kwargs))).program

    def _find(self, args: tuple, kwargs: dict, leaves: Sequence[Any]) -> _Compiled:
        check_not_eager(self.name)
        structure = nest.map_structure(lambda _: 0, (args, kwargs))
        places = tuple(path for path, _ in nest.flatten_with_tuple_paths(structure))
        key = (str(structure), places, *map(_key, leaves))
        try:
            known = key in self._compiled
        except TypeError:  # An argument cannot be part of a key.
            known = False
        if not known:
            paths = argument_paths(self._fn, args, kwargs)
            _check_arguments(self.name, paths, leaves)
            with TRACING, garbage_later(), told_if_long(self.name) as begin:
                if key not in self._compiled:
                    specs = [_spec(leaf) or leaf for leaf in leaves]
                    of = _shapes_text(specs)
                    begin(f"tracing, once for each shape of its arguments, {of}")
                    check_before_tracing(self.name, self.mesh, specs)
                    options = self._options
                    by = Partitioner(options.get("partitioner", Partitioner.SHARDY))
                    with tracing_for_devices(options.get("devices"), by, self.mesh):
                        traced = trace(
                            self._fn,
                            (args, kwargs),
                            specs,
                            paths=paths,
                            name=self.name,
                            keeps=self._layout.keeps,
                        )
                    begin(f"compiling for the mesh ({self.mesh}), {of}")
                    with LOCK:
                        self._compiled[key] = self._compile(traced)
        return self._compiled[key]

    def _compile(self, traced: Traced) -> _Compiled:
        variables = traced.variables
        _check_shapes(variables, self.name)
        self._layout.check(variables, self.name)
        note_readers(variables)

        def pure(state, read, constants, tensors):
            graph = tf.compat.v1.get_default_graph()
            mark_as_ours(graph)
            captured_as(graph, traced.constants, constants)
            given = [*state.values(), *read.values()]
            for variable, value in zip(variables, given, strict=True):
                variable.assign(value, read_value=False)
            traced.checks.begin()
            values = traced.call(tensors)
            state, _ = traced.by_path([v.read_value() for v in variables])
            violated = traced.checks.first_violated()
            return {"state": state, "values": values, "violated": violated}

        specs = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
        state, read = traced.by_path(specs)
        state_forms, read_forms = traced.by_path([*map(self._form, variables)])
        constants = [tf.TensorSpec(c.shape, c.dtype) for c in traced.constants]
        reasons = [self._layout.reason(v, self.mesh) for v in variables]
        notes, graph = FormNotes(texts=reasons), traced.concrete.graph

        def compiled(**options):
            return trace_program(
                pure,
                [state, read, constants, traced.specs],
                self.mesh,
                in_shardings=[state_forms, read_forms, None, None],
                out_shardings={"state": state_forms, "values": None, "violated": None},
                donate=[0],
                name=self.name,
                carried=len(traced.written),
                variables=[*variables, *traced.checks.variables],
                notes=notes,
                **options,
            ).compile()

        with host_shapes(variables), self._layout.compiling(graph, traced.specs):
            program = self._sharding_updates(compiled)
        self._layout.report(variables, program.arguments.forms)
        check_constants(self.name, traced.constants)
        first = len(variables)
        placed = [
            program.arguments.put(first + i, constant.numpy())
            for i, constant in enumerate(traced.constants)
        ]
        return _Compiled(program, traced, placed)

    def _sharding_updates(self, compiled: Callable[..., Program]) -> Program:
        """The program, its weight updates sharded as the options say, if they do."""
        updates = self._options.get("update_sharding")
        try:
            program = compiled(**self._options)
        except LoweringError as error:
            if getattr(updates, "mode", None) is not WeightUpdateSharding.AUTO:
                raise
            program = compiled(**{**self._options, "update_sharding": None})
            logging.warning(
                "%s: each device updates all weights, as the program does not compile "
                "otherwise: %s",
                self.name,
                error,
            )
        if program.updates is not None:
            logging.info("%s: %s", self.name, program.updates.summary())
        return program

    def _form(self, variable: tf.Variable) -> Sharding | StoredForm | None:
        """How a program takes a variable; None where completion decides."""
        sharding = self._layout.sharding_of(variable, self.mesh)
        value = value_of(variable)
        form = value.form if value.stays_placed else None
        if sharding is None and form is not None and form.border.mesh == self.mesh:
            return StoredForm(  # As before a program split its update.
                form.shape, form.dtype, form.sharding, kept_from=value.given_by
            )
        return sharding


def _check_shapes(variables: Sequence[tf.Variable], name: str) -> None:
    for variable in variables:
        if not variable.shape.is_fully_defined():
            raise LoweringError(
                f"{name}: variable {variable.name!r} has the shape {variable.shape}: "
                "make it without `shape=`, so that it has that of its initial value"
            )


def _spec(leaf: Any) -> tf.TensorSpec | None:
    """Of a tensor or an array; None for what is a constant of the program."""
    if isinstance(leaf, tf.TensorSpec):
        return leaf
    if not isinstance(leaf, (tf.Tensor, np.ndarray, np.generic, jax.Array)):
        return None
    try:
        return tf.TensorSpec(leaf.shape, tf.as_dtype(leaf.dtype))
    except TypeError:  # Of times, and others that are no numbers.
        return None


def _shapes_text(specs: Sequence[Any]) -> str:
    """The tensors among arguments, as `float32[4,20], int64[4]`; at most four."""
    tensors = [spec for spec in specs if isinstance(spec, tf.TensorSpec)]
    texts = [
        f"{spec.dtype.name}[{','.join(map(str, spec.shape))}]" for spec in tensors[:4]
    ]
    more = [f"and {len(tensors) - 4} more"] if len(tensors) > 4 else []
    return ", ".join([*texts, *more]) or "none of them a tensor"


def _key(leaf: Any) -> Hashable:
    """What tells programs apart: of a tensor its shape and dtype."""
    spec = _spec(leaf)
    if spec is not None:
        return spec.shape, spec.dtype
    if isinstance(leaf, tf.Variable):
        return leaf.ref()
    return type(leaf), leaf


def _check_arguments(name: str, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Refuses arguments that are neither tensors that XLA has nor parts of a key."""
    for path, leaf in zip(paths, leaves, strict=True):
        spec, fault = _spec(leaf), ""
        if isinstance(leaf, CompositeTensor) and not isinstance(leaf, tf.Variable):
            fault = (
                f"is a {type(leaf).__name__}: pass its components, which are tensors, "
                "and put them together in the function"
            )
        elif spec is not None:
            fault = no_elements(spec.dtype)
        elif isinstance(leaf, (np.ndarray, np.generic)):
            fault = f"is an array of {leaf.dtype}, which TF has not: pass numbers"
        elif not isinstance(leaf, tf.Variable) and not _has_hash(leaf):
            fault = (
                f"of type {type(leaf).__name__} is neither a tensor nor hashable: pass "
                "a tensor or an array, or have the function read it itself"
            )
        if fault:
            raise LoweringError(f"{name}: argument {path} {fault}")


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def function(
    fn: Callable[..., Any] | None = None,
    mesh: DeviceMesh | None = None,
    *,
    layout: Mapping[str, Sequence[Any]] | Layout | None = None,
    name: str | None = None,
    **options: Unpack[FunctionOptions],
) -> Any:
    """Runs a TF function on a mesh, as `tf.function(jit_compile=True)` on one device.

    The function may read, write and create variables, compute gradients and apply
    optimizers. Variables that it captures live on the mesh between calls; whatever
    reads or writes them elsewhere sees their values, which are moved when that happens.

    Args:
      fn: the function, with some tensors annotated. Without it, a decorator is made.
      mesh: the device mesh.
      layout: by regular expression, which is searched for in a variable's name, or in
        its path if it is Keras's, what `mesh_split` takes as `dims_mapping`. The first
        row that fits applies; other variables are left to completion, or stay as
        another function keeps them. Or another `Layout`.
      name: for messages and profiles.
      **options: of `trace_program`: `partitioner`, `update_sharding`, `strict`,
        `check_types`, `devices`, `in_child`.

    Returns:
      A `MeshFunction`.

    Raises:
      TypeError: the function, the mesh, the layout or an option is none.
      ValueError: a row of the layout could be that of no variable.
    """
    if fn is None:
        return functools.partial(
            function, mesh=mesh, layout=layout, name=name, **options
        )
    name = name or getattr(fn, "__name__", "function").strip("<>")
    if not callable(fn):
        raise TypeError(f"{name}: {fn!r} is no function: pass the function to run")
    for option in options.keys() - _OPTIONS:
        raise TypeError(
            f"{name}: function has no option {option!r}; it has {', '.join(_OPTIONS)}"
        )
    check_switches(name, options)
    check_mesh(mesh, name)
    if layout is None or isinstance(layout, Mapping):
        layout = LayoutTable(layout or {}, name)
    if not isinstance(layout, Layout):
        raise TypeError(
            f"{name}: the layout is {layout!r}; pass a table from regular expressions "
            "to the mesh axes of each dim, such as {'kernel$': [None, 'model']}"
        )
    return MeshFunction(fn, mesh, layout=layout, name=name, options=options)


def check_mesh(mesh: Any, name: str) -> None:
    """Raises TypeError if the mesh of a function or model is none."""
    if not isinstance(mesh, DeviceMesh):
        if type(mesh).__module__.startswith("keras") and hasattr(mesh, "axis_names"):
            raise TypeError(
                f"{name}: the mesh is a keras.distribution.DeviceMesh; pass "
                f"mw.DeviceMesh({tuple(mesh.axis_names)}, {tuple(mesh.shape)})"
            )
        raise TypeError(
            f"{name}: the mesh is {mesh!r}; pass a DeviceMesh, such as "
            'DeviceMesh(("data", "model"), (2, 4))'
        )


def check_switches(name: str, options: Mapping[str, Any]) -> None:
    """Raises TypeError for an option that is to be True or False and is not."""
    for option in _SWITCHES:
        value = options.get(option, False)
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name}: {option} is {value!r}; pass True or False")
