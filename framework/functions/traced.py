"""A TF function, traced with the variables that it captures."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.function.polymorphism.function_cache import FunctionContext
from tensorflow.python.eager.polymorphic_function import function_context
from tensorflow.python.framework.auto_control_deps_utils import (
    get_read_only_resource_input_indices_graph,
)
from tensorflow.python.framework.composite_tensor import CompositeTensor
from tensorflow.python.ops.op_selector import UnliftableError
from tensorflow.python.ops.resource_variable_ops import default_variable_creator_v2
from tensorflow.python.util import nest

from meshwright.framework.compiler.lowering.captures import (
    keep_small_tensors,
    owners,
    refuse_captures,
)
from meshwright.framework.compiler.lowering.constant_sizes import fold_clamps
from meshwright.framework.compiler.lowering.errors import (
    LoweringError,
    first_line,
    no_elements,
)
from meshwright.framework.compiler.lowering.sources import Sources
from meshwright.framework.compiler.lowering.variables import handle_of
from meshwright.framework.functions.assertions import Checks
from meshwright.framework.functions.layouts.layout import by_path, note_keras_paths
from meshwright.framework.functions.mesh_variable import is_ours, mark_as_ours
from meshwright.framework.sharding.origins import keras_names
from meshwright.framework.sharding.vectorize import our_rules

TRACING = threading.RLock()
"""Held while a function is traced, and taken before the locks of `tf.function`s in it,
before that of values too: a thread that traces such a function may wait for a value."""
_SAME_VALUES = ("Identity", "PlaceholderWithDefault", "Reshape", "XlaSharding")
_READINGS = (
    "'SymbolicTensor' object has no attribute 'numpy'",
    "numpy() is only available when eager execution is enabled",  # A variable's.
    "Cannot convert a symbolic tf.Tensor",
)
_TRACES = itertools.count(-1, -1)  # No object's `id`, which TF puts in their place.


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Traced:
    """A function, traced for arguments of certain shapes.

    Args:
      concrete: takes the tensors among the arguments.
      specs: of these.
      written: the variables that it writes, by path.
      read: the variables that it only reads, by path.
      constants: the tensors outside that are too large to be part of a program.
      checks: its assertions and checks of numerics.
    """

    concrete: Any
    specs: Sequence[tf.TensorSpec]
    written: Mapping[str, tf.Variable]
    read: Mapping[str, tf.Variable]
    constants: Sequence[tf.Tensor]
    checks: Checks

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables: those that are written come first."""
        return [*self.written.values(), *self.read.values()]

    def by_path(self, values: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What belongs to the variables, by path: those written, and those only read.

        Args:
          values: in the order of `variables`.
        """
        count = len(self.written)
        written = dict(zip(self.written, values[:count], strict=True))
        return written, dict(zip(self.read, values[count:], strict=True))

    def call(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors of the result, in a graph."""
        leaves = tf.nest.flatten(self.concrete(*tensors))
        return [leaf for leaf in leaves if tf.is_tensor(leaf)]

    def packed(self, values: Sequence[Any]) -> Any:
        """The result of the function, of arrays of its tensors."""
        left = iter(values)
        return tf.nest.map_structure(
            lambda leaf: tf.constant(next(left)) if tf.is_tensor(leaf) else leaf,
            self.concrete.structured_outputs,
        )


def trace(
    fn: Callable[..., Any],
    structure: tuple,
    leaves: Sequence[Any],
    *,
    paths: Sequence[str],
    name: str,
    keeps: Callable[[Sequence[tf.Variable]], bool] | None = None,
) -> Traced:
    """Traces a function as TF does: it may create variables when it is first called.

    Args:
      fn: the function; AutoGraph converts it.
      structure: its arguments: a tuple of a tuple and a dict by name.
      leaves: of the structure: a `tf.TensorSpec` for each tensor, Python values.
      paths: of the leaves, for messages.
      name: for messages.
      keeps: whether variables that the function makes are known to be there for the
        next call. TF traces a function again where variables are made, to find that
        out; a trace whose variables are all kept is the last. None: it is not known.

    Raises:
      LoweringError: Python code of it reads a tensor's value; it reads a resource that
        is no variable, returns something else than tensors of numbers, cuts the
        imaginary part off an argument, or makes a variable whose initial value depends
        on arguments.
    """
    fn, checks = converted(fn), Checks()

    made: list[tf.Variable] = []

    def of_tensors(*tensors):
        graph = tf.compat.v1.get_default_graph()
        mark_as_ours(graph)
        keep_small_tensors(graph)
        given = iter(tensors)
        filled = [next(given) if _is_spec(leaf) else leaf for leaf in leaves]
        args, kwargs = tf.nest.pack_sequence_as(structure, filled)
        with our_rules(), _traced_apart(), checks.noted(graph), making(), keras_names():
            results = fn(*args, **kwargs)
        fold_clamps(graph)
        return results

    specs = [leaf for leaf in leaves if _is_spec(leaf)]
    making = contextlib.nullcontext
    if keeps is not None:
        making = functools.partial(_made_outside, made)
    try:
        concrete = _concrete(of_tensors, specs)
        if made and not keeps(made):
            making = contextlib.nullcontext
            concrete = _concrete(of_tensors, specs)
    except UnliftableError as error:
        raise LoweringError(
            f"{name}: the function makes a variable whose initial value depends on its "
            f"arguments, or on tensors that it computes: {first_line(error)}. Give the "
            "variable a value that is known outside, such as zeros, and assign it"
        ) from error
    except (AttributeError, NotImplementedError) as error:
        _refuse_reading(name, error)
        raise
    _check_results(name, concrete.structured_outputs)
    _check_casts(
        name,
        concrete,
        [p for p, leaf in zip(paths, leaves, strict=True) if _is_spec(leaf)],
    )
    note_keras_paths()
    written, read = _variables_of(concrete.graph)
    captured = [outside for outside, _ in concrete.graph.captures]
    constants = [
        c
        for c in captured
        if c.dtype not in (tf.resource, tf.variant)
        and isinstance(c, tf.__internal__.EagerTensor)
    ]
    variables = [*written.values(), *read.values(), *checks.variables]
    allowed = [*constants, *map(handle_of, variables)]
    refuse_captures(name, concrete, Sources(concrete), allowed=allowed)
    return Traced(
        concrete=concrete,
        specs=specs,
        written=written,
        read=read,
        constants=constants,
        checks=checks,
    )


def _refuse_reading(name: str, error: Exception) -> None:
    """Raises LoweringError if TF's error is that Python code reads a tensor's value."""
    if any(message in str(error) for message in _READINGS):
        raise LoweringError(
            f"{name}: Python code reads the value of a tensor or variable, by .numpy() "
            "or a NumPy function, while the function is traced, when it has none yet: "
            "use TF ops, or in a Keras layer keras.ops. TF's error: "
            f"{str(error).strip()}"
        ) from error


def _check_results(name: str, results: Any) -> None:
    for path, leaf in nest.flatten_with_joined_string_paths(results):
        if isinstance(leaf, (CompositeTensor, tf.TensorArray)):
            raise LoweringError(
                f"{name}: the function returns a {type(leaf).__name__} as result "
                f"{path or 0}; return its components, which are tensors"
            )
        if tf.is_tensor(leaf) and (fault := no_elements(leaf.dtype)):
            raise LoweringError(f"{name}: result {path or 0} {fault}")


def _check_casts(name: str, concrete, paths: Sequence[str]) -> None:
    """Refuses complex arguments that become real, of which TF only warns.

    Keras casts inputs and targets to the types of a model's.
    """
    for path, tensor in zip(paths, concrete.inputs, strict=False):
        pending = [tensor] if tensor.dtype.is_complex else []
        while pending:
            for op in pending.pop().consumers():
                if op.type in _SAME_VALUES:
                    pending.append(op.outputs[0])
                elif op.type == "Cast" and not op.outputs[0].dtype.is_complex:
                    raise LoweringError(
                        f"{name}: argument {path} is {tensor.dtype.name}, and "
                        f"{Sources(concrete).text(op.name)} makes it "
                        f"{op.outputs[0].dtype.name} without its imaginary part: pass "
                        "real numbers, or take tf.math.real of it in the function"
                    )


def _variables_of(graph) -> tuple[dict[str, tf.Variable], dict[str, tf.Variable]]:
    """The variables that a graph writes, and those that it only reads.

    Of those that ops take by their handles alone, as Keras 2's optimizers give their
    slots, TF's list of a graph's variables has none.
    """
    by_handle = {id(handle_of(v)): v for v in graph.variables}
    read_only = {
        id(graph.inputs[i]) for i in get_read_only_resource_input_indices_graph(graph)
    }
    written, read = [], []
    for outside, inside in graph.captures:
        variable = by_handle.get(id(outside))
        if variable is None:
            variable = _owner(outside)
        if variable is not None:
            (read if id(inside) in read_only else written).append(variable)
    written, read = map(by_path, (written, read))
    return dict(sorted(written.items())), dict(sorted(read.items()))


def _owner(handle: tf.Tensor) -> tf.Variable | None:
    if handle.dtype != tf.resource:
        return None
    held = (owner for owner in owners(handle) if isinstance(owner, tf.Variable))
    return next(held, None)


def argument_paths(fn: Callable[..., Any], args: tuple, kwargs: dict) -> list[str]:
    """For each leaf of a function's arguments its name and place, as `batch/x/0`."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # One made in C++.
        parameters = []
    names = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    structure = nest.map_structure(lambda _: 0, (args, kwargs))
    paths = []
    for (in_kwargs, first, *rest), _ in nest.flatten_with_tuple_paths(structure):
        is_named = not in_kwargs and first < len(names)
        paths.append("/".join(map(str, (names[first] if is_named else first, *rest))))
    return paths


def converted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function with Python's control flow as TF's, by AutoGraph."""
    status = tf.__internal__.autograph.control_status_ctx()
    return tf.__internal__.autograph.tf_convert(fn, status)


def _concrete(fn: Callable[..., Any], specs: Sequence[tf.TensorSpec]):
    # TF makes loops otherwise where XLA compiles them: sizes of lists are constants.
    traced = tf.function(fn, autograph=False, jit_compile=True)
    return traced.get_concrete_function(*specs)


@contextlib.contextmanager
def _made_outside(made: list[tf.Variable]) -> Iterator[None]:
    """Has variables made outside of the graph that is traced, and lists them in `made`.

    Those whose initial value needs tensors of the graph are made as by TF.
    """

    def make(next_creator, **how):
        try:
            with tf.init_scope():
                variable = default_variable_creator_v2(**how)
        except (TypeError, ValueError, tf.errors.OpError):
            return next_creator(**how)
        made.append(variable)
        return variable

    with tf.variable_creator_scope(make):
        yield


@contextlib.contextmanager
def _traced_apart() -> Iterator[None]:
    """Has TF keep traces made in the context apart from all others.

    A `tf.function` that is called in a program and elsewhere would else have a single
    trace, which reads the variables' copies on the host.
    """
    make, trace = function_context.make_function_context, next(_TRACES)

    def make_apart(scope_type=None):
        made = make(scope_type)
        if not is_ours(tf.compat.v1.get_default_graph()):  # Of another thread.
            return made
        return FunctionContext(made.context._replace(xla_context_id=trace), scope_type)

    function_context.make_function_context = make_apart
    try:
        yield
    finally:
        function_context.make_function_context = make


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, tf.TensorSpec)
