"""From a pure TF function over abstract inputs to an HLO module."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.client import pywrap_tf_session

from meshwright.framework.compiler.sources import Sources

MAX_CONSTANT_BYTES = 1 << 20
_SHARDING_ATTRIBUTE = "_XlaSharding"


class LoweringError(ValueError):
    """The function cannot become one XLA program; the message names the culprit."""


@dataclasses.dataclass(frozen=True, eq=False)
class LoweredFunction:
    """An unpartitioned XLA program and the structure of its inputs and outputs.

    Args:
      name: for messages and profiles.
      hlo: serialized HLO module; annotations are `Sharding` custom calls in it.
      inputs: the arguments, a tuple of nests of `tf.TensorSpec`.
      outputs: the result, a nest of `tf.TensorSpec`.
      sources: where its ops come from.
      rewritten: what took the place of `hlo`, as StableHLO bytecode; None: nothing.
    """

    name: str
    hlo: bytes
    inputs: tuple
    outputs: Any
    sources: Sources
    rewritten: bytes | None = None


def lower(
    fn: Callable[..., Any], args: Sequence[Any], *, name: str | None = None
) -> LoweredFunction:
    """Traces `fn` over abstract arguments and lowers it through TF2XLA.

    Args:
      fn: a pure function of tensors; it returns a nest of tensors.
      args: one nest (lists, tuples, dicts, nested maps) of `tf.TensorSpec` with static
        shapes for each argument.
      name: for messages; the function's own by default.

    Raises:
      LoweringError: a shape is not static; `fn` reads a variable or an array from
        outside, or holds a constant over 1 MiB; or TF2XLA refuses an op of it.
    """
    name = name or getattr(fn, "__name__", "program")
    args = tuple(args)
    flat_specs = argument_specs(name, args)
    outputs = None

    def flat_fn(*flat):
        nonlocal outputs
        outputs = fn(*tf.nest.pack_sequence_as(args, list(flat)))
        return tf.nest.flatten(outputs)

    # TF2XLA compiles for the CPU platform here whatever will run it: the module that
    # comes out is plain HLO, and later PJRT compiles it for its own target.
    compiled = tf.function(flat_fn, jit_compile=True, autograph=False)
    concrete = compiled.get_concrete_function(*flat_specs)
    _check_no_outside_values(name, concrete)
    sources = Sources(concrete)
    _check_no_attributes(name, concrete, sources)
    try:
        ir = compiled.experimental_get_compiler_ir(*flat_specs)
        with _without_constant_folding():
            hlo = ir(stage="hlo_serialized")
    except (tf.errors.OpError, ValueError, TypeError) as e:
        raise LoweringError(f"{name}: TF2XLA cannot compile it: {e}") from e
    _check_no_large_constants(name, hlo)
    specs = [
        tf.TensorSpec(out.shape, out.dtype, name=f"output_{i}")
        for i, out in enumerate(concrete.outputs)
    ]
    outputs = tf.nest.pack_sequence_as(outputs, specs)
    return LoweredFunction(name, hlo, args, outputs, sources)


def argument_specs(name: str, args: Sequence[Any]) -> list[tf.TensorSpec]:
    """The leaves of a program's arguments.

    Raises:
      LoweringError: one is no `tf.TensorSpec`, or its shape is not static.
    """
    leaves = tf.nest.flatten(args)
    for leaf in leaves:
        is_spec = isinstance(leaf, tf.TensorSpec)
        if not is_spec or not leaf.shape.is_fully_defined():
            given = leaf if is_spec else f"of type {type(leaf).__name__}"
            raise LoweringError(
                f"{name}: argument {given} must be a tf.TensorSpec of static shape; "
                "values are given when the program is called"
            )
    return leaves


def _check_no_outside_values(name: str, concrete) -> None:
    outside = [f"variable {v.name!r} of shape {v.shape}" for v in concrete.variables]
    outside += [
        f"{'resource' if t.dtype == tf.resource else 'tensor'} of shape {t.shape}"
        for t in concrete.captured_inputs
    ]
    if outside:
        raise LoweringError(
            f"{name}: the function reads a {outside[0]} from outside; pass it as an "
            "argument"
        )


def nodes_of(graph: graph_pb2.GraphDef) -> list[node_def_pb2.NodeDef]:
    """A graph's nodes, with those of its functions."""
    return [*graph.node, *(n for f in graph.library.function for n in f.node_def)]


def _check_no_attributes(name: str, concrete, sources: Sources) -> None:
    """Refuses annotations as TF's own functions make them by default: as attributes.

    TF2XLA puts one on all that the op becomes, of whatever shape, or on nothing at all;
    and XLA heeds what is left under GSPMD alone.
    """
    for node in nodes_of(concrete.graph.as_graph_def()):
        if _SHARDING_ATTRIBUTE in node.attr and node.op != "XlaSharding":
            source = sources.find(node.name)
            raise LoweringError(
                f"{name}: op {node.name!r}{f' ({source})' if source else ''} carries "
                "its sharding as an attribute, which would be dropped: annotate by "
                "mesh_split, or pass TF's own functions use_sharding_op=True"
            )


def _check_no_large_constants(name: str, hlo: bytes) -> None:
    for computation in hlo_pb2.HloModuleProto.FromString(hlo).computations:
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
    """Else TF computes beforehand what depends on no argument, such as masks and index
    tables, and bakes up to 10 MiB of each into the program.
    """
    before = pywrap_tf_session.TF_GetXlaConstantFoldingDisabled()
    pywrap_tf_session.TF_SetXlaConstantFoldingDisabled(True)
    try:
        yield
    finally:
        pywrap_tf_session.TF_SetXlaConstantFoldingDisabled(before)
