"""From a pure TF function over abstract inputs to an HLO module."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import logging
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.client import pywrap_tf_session

from meshwright.framework.compiler.lowering.captures import (
    MAX_CONSTANT_BYTES,
    keep_small_tensors,
    refuse_captures,
    refusing_new_variables,
)
from meshwright.framework.compiler.lowering.constant_sizes import fold_clamps
from meshwright.framework.compiler.lowering.dynamic_sizes import (
    drop_bounds,
    first_maker,
    is_dynamic,
    maker_of_result,
    result_shapes,
)
from meshwright.framework.compiler.lowering.errors import (
    LoweringError,
    leaves_of,
    needs_constant,
    no_elements,
    of_tf2xla,
    unknown_size,
)
from meshwright.framework.compiler.lowering.sources import Sources
from meshwright.framework.compiler.lowering.unchecked import (
    is_unchecked,
    unchecked_assertions,
    unchecked_text,
)
from meshwright.framework.compiler.lowering.variables import drop_variables, handle_of
from meshwright.framework.sharding.vectorize import our_rules

_SHARDING_ATTRIBUTE = "_XlaSharding"
_FOLDING = threading.RLock()
"""Held while constant folding, which TF sets for the process, is off or is needed."""
_LIST_WRITE, _GROWS = "TensorListSetItem", "resize_if_index_out_of_bounds"


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """What a program is called, takes and returns, and where its ops come from.

    Args:
      name: for messages and profiles.
      inputs: the arguments, a tuple of nests of `tf.TensorSpec`.
      outputs: the result, a nest of `tf.TensorSpec`.
      sources: where its ops come from.
    """

    name: str
    inputs: tuple
    outputs: Any
    sources: Sources


@dataclasses.dataclass(frozen=True, eq=False)
class LoweredFunction:
    """An unpartitioned XLA program as TF2XLA makes it.

    Args:
      signature: its name, the structure of its arguments and its result, and sources.
      hlo: serialized HLO module; annotations are `Sharding` custom calls in it.
      unknown_size: name of an op that makes a size which depends on values, or None.
    """

    signature: Signature
    hlo: bytes
    unknown_size: str | None = None


def lower(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    name: str | None = None,
    strict: bool = False,
    variables: Sequence[tf.Variable] = (),
) -> LoweredFunction:
    """Traces `fn` over abstract arguments and lowers it through TF2XLA.

    Args:
      fn: a pure function of tensors; it returns a nest of tensors.
      args: for each argument a nest (lists, tuples, dicts, nested maps) of
        `tf.TensorSpec` with static shapes.
      name: for messages; the function's own by default.
      strict: whether checks that a program does not make are an error, not a warning.
      variables: those that `fn` may capture: it assigns each before it reads it.

    Raises:
      LoweringError: a shape is not static; `fn` makes a variable, reads one or an array
        over 1 MiB from outside, or holds a constant of that size; the size of a result
        depends on values; or TF2XLA refuses an op of it.
    """
    name = name or getattr(fn, "__name__", "program")
    args = tuple(args)
    flat_specs = argument_specs(name, args)
    outputs = None

    def flat_fn(*argument):  # TF names its placeholders argument_0, argument_1, ...
        nonlocal outputs
        graph = tf.compat.v1.get_default_graph()
        keep_small_tensors(graph)
        with refusing_new_variables(name), our_rules():
            outputs = fn(*tf.nest.pack_sequence_as(args, list(argument)))
        fold_clamps(graph)
        return tf.nest.flatten(outputs)

    # TF2XLA compiles for the CPU platform here whatever will run the program: the
    # result is plain HLO, and later PJRT compiles it for its own target.
    compiled = tf.function(flat_fn, jit_compile=True, autograph=False)
    concrete = compiled.get_concrete_function(*flat_specs)
    for (path, _), leaf in zip(leaves_of(outputs), concrete.outputs, strict=True):
        if leaf.dtype == tf.string:
            raise LoweringError(f"{name}: result {path or 0} {no_elements(tf.string)}")
    sources = Sources(concrete)
    handles = [handle_of(variable) for variable in variables]
    refuse_captures(name, concrete, sources, allowed=handles)
    nodes = nodes_of(concrete.graph.as_graph_def())
    _check_no_attributes(name, nodes, sources)
    _check_no_growing_lists(name, nodes, sources)
    if any(map(is_unchecked, nodes)):
        _tell_unchecked(name, concrete, sources, strict)
    try:
        hlo = _hlo(compiled.experimental_get_compiler_ir(*flat_specs))
    except (tf.errors.OpError, ValueError, TypeError) as e:
        raise of_tf2xla(name, e, args, concrete, sources) from e
    module = hlo_pb2.HloModuleProto.FromString(hlo)
    changed = drop_bounds(module)
    if variables:
        read = drop_variables(module, len(flat_specs), len(concrete.outputs))
        _check_none_read(name, [concrete.captured_inputs[i] for i in read], variables)
        changed = True
    if changed:
        hlo = module.SerializeToString()
    _check_no_large_constants(name, module)
    specs = _result_specs(name, concrete, outputs, module, sources)
    outputs = tf.nest.pack_sequence_as(outputs, specs)
    signature = Signature(name, args, outputs, sources)
    return LoweredFunction(signature, hlo, unknown_size=first_maker(module))


def _check_none_read(name: str, handles, variables: Sequence[tf.Variable]) -> None:
    """Refuses variables that the function reads before it assigns them."""
    for variable in variables:
        if any(handle is handle_of(variable) for handle in handles):
            raise LoweringError(
                f"{name} reads variable {variable.name!r} before it assigns it: pass "
                "its value as an argument and assign that first, or use "
                "mw.function"
            )


def _hlo(ir: Callable[..., bytes]) -> bytes:
    """The HLO of a traced function, if possible without TF's constant folding."""
    with _FOLDING:
        try:
            with _without_constant_folding():
                return ir(stage="hlo_serialized")
        except ValueError as e:
            if not needs_constant(e):
                raise
            # Folding finds some shapes that TF2XLA alone does not, such as ragged ones.
            return ir(stage="hlo_serialized")


def _tell_unchecked(name: str, concrete, sources: Sources, strict: bool) -> None:
    if checks := unchecked_assertions(concrete, sources):
        text = unchecked_text(name, checks)
        if strict:
            raise LoweringError(text)
        logging.warning("%s", text)


def _result_specs(
    name: str, concrete, outputs: Any, module, sources: Sources
) -> list[tf.TensorSpec]:
    """The results' shapes, some of which HLO knows and TF does not."""
    specs = []
    leaves = zip(leaves_of(outputs), concrete.outputs, strict=True)
    for number, (((path, _), out), shape) in enumerate(
        zip(leaves, result_shapes(module), strict=True)
    ):
        if is_dynamic(shape):
            where = sources.text(maker_of_result(module, number))
            what = f"result {path or number} of at most {list(shape.dimensions)}"
            raise unknown_size(name, where, what=what)
        known = out.shape.is_fully_defined()
        dims = out.shape if known else tf.TensorShape(shape.dimensions)
        specs.append(tf.TensorSpec(dims, out.dtype, name=f"output_{number}"))
    return specs


def argument_specs(name: str, args: Sequence[Any]) -> list[tf.TensorSpec]:
    """The leaves of a program's arguments.

    Raises:
      LoweringError: a leaf is no `tf.TensorSpec`, its shape is not static, or XLA has
        no type for its elements.
    """
    paths = leaves_of(args)
    for path, leaf in paths:
        is_spec = isinstance(leaf, tf.TensorSpec)
        if not is_spec or not leaf.shape.is_fully_defined():
            given = leaf if is_spec else f"of type {type(leaf).__name__}"
            raise LoweringError(
                f"{name}: argument {given} must be a tf.TensorSpec of static shape; "
                "values are given when the program is called"
            )
        if fault := no_elements(leaf.dtype):
            raise LoweringError(f"{name}: argument {path} {fault}")
    return [leaf for _, leaf in paths]


def nodes_of(graph: graph_pb2.GraphDef) -> list[node_def_pb2.NodeDef]:
    """A graph's nodes, with those of its functions."""
    return [*graph.node, *(n for f in graph.library.function for n in f.node_def)]


def _check_no_attributes(
    name: str, nodes: Sequence[node_def_pb2.NodeDef], sources: Sources
) -> None:
    """Refuses annotations as TF's own functions make them by default: as attributes.

    TF2XLA puts the attribute on all ops that an op becomes, of whatever shape, or on
    none; and XLA heeds the rest under GSPMD alone.
    """
    for node in nodes:
        if _SHARDING_ATTRIBUTE in node.attr and node.op != "XlaSharding":
            raise LoweringError(
                f"{name}: {sources.text(node.name)} carries "
                "its sharding as an attribute, which would be dropped: annotate by "
                "mesh_split, or pass TF's own functions use_sharding_op=True"
            )


def _check_no_growing_lists(
    name: str, nodes: Sequence[node_def_pb2.NodeDef], sources: Sources
) -> None:
    """Refuses lists that grow: TF2XLA drops writes past the end."""
    for node in nodes:
        if node.op == _LIST_WRITE and node.attr[_GROWS].b:
            raise LoweringError(
                f"{name}: {sources.text(node.name)} writes to a tf.TensorArray of "
                "dynamic_size=True, which XLA does not grow: give its final size, and "
                "leave dynamic_size out"
            )


def _check_no_large_constants(name: str, module: hlo_pb2.HloModuleProto) -> None:
    for computation in module.computations:
        for op in computation.instructions:
            size = op.literal.ByteSize()
            if size > MAX_CONSTANT_BYTES:
                raise LoweringError(
                    f"{name}: op {op.metadata.op_name!r} has a constant of shape "
                    f"{list(op.shape.dimensions)} that takes {size} bytes; pass it as "
                    "an argument or compute it inside the function"
                )


@contextlib.contextmanager
def _without_constant_folding() -> Iterator[None]:
    """Keeps TF from computing beforehand tensors that depend on no argument, such as
    masks and index tables, and baking up to 10 MiB of each into the program.
    """
    before = pywrap_tf_session.TF_GetXlaConstantFoldingDisabled()
    pywrap_tf_session.TF_SetXlaConstantFoldingDisabled(True)
    try:
        yield
    finally:
        pywrap_tf_session.TF_SetXlaConstantFoldingDisabled(before)
