"""Checks of a TF function that its program does not make.

TF2XLA leaves out assertions and checks of numerics. Checks that TF itself decides while
it traces need no program: they raise there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from meshwright.framework.compiler.lowering.sources import (
    Sources,
    called_graphs,
    inner_prefix,
)

CHECKS = frozenset({"Assert", "CheckNumerics", "CheckNumericsV2"})
"""Types of the TF ops that only check."""
MADE = "_meshwright_made"
"""The attribute of such an op whose check the program makes by other ops."""
_LOOPS = ("While", "StatelessWhile")
_LISTED = 5


def unchecked_assertions(concrete, sources: Sources) -> list[str]:
    """The checks of a traced function that may fail, and that its program drops.

    Args:
      concrete: the traced function.
      sources: where its ops come from.

    Returns:
      The name, layer and line of each op, for messages.
    """
    names = _checks(concrete.graph, prefix="", caller=None)
    return [sources.text(name) for name in dict.fromkeys(names)]


def is_unchecked(node: node_def_pb2.NodeDef) -> bool:
    """Whether an op only checks, and no other op does so in its place."""
    return node.op in CHECKS and MADE not in node.attr


def unchecked_text(name: str, checks: Sequence[str]) -> str:
    """The text of a warning or an error about `checks`; `name` is the program's."""
    listed = ", ".join(checks[:_LISTED])
    more = f" and {len(checks) - _LISTED} more" if len(checks) > _LISTED else ""
    return (
        f"{name}: a compiled program makes no checks, so these of the function have no "
        f"effect: {listed}{more}. Use mw.function, which makes them, or return "
        "the condition, such as tf.reduce_all(tf.math.is_finite(x)), as a result"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Caller:
    """The op that calls a function, to follow tensors from inside to its caller."""

    op: tf.Operation
    first_input: int
    caller: _Caller | None


def _checks(graph: tf.Graph, *, prefix: str, caller: _Caller | None) -> Iterator[str]:
    """The names of the checks in a graph and in the graphs that its ops call."""
    for op in graph.get_operations():
        if is_unchecked(op.node_def) and not _always_holds(op, caller):
            yield prefix + op.name
        for inner, first in called_graphs(op):
            yield from _checks(
                inner,
                prefix=inner_prefix(op, prefix),
                caller=_Caller(op, first, caller),
            )


def _always_holds(op: tf.Operation, caller: _Caller | None) -> bool:
    """Whether an assertion depends on no argument, and holds.

    TF keeps such assertions, mostly of shapes, though it has checked them already.
    """
    if op.type != "Assert":
        return False
    condition = _followed(op.inputs[0], caller)
    if not _is_constant(condition):
        return False
    no_gpu = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    with tf.compat.v1.Session(graph=condition.graph, config=no_gpu) as session:
        return bool(session.run(condition).all())


def _followed(tensor: tf.Tensor, caller: _Caller | None) -> tf.Tensor:
    """The caller's tensor that a called function has as an input, if it is one."""
    while caller is not None and tensor.op.type == "Placeholder":
        inputs = [id(placeholder) for placeholder in tensor.graph.inputs]
        if caller.op.type in _LOOPS or id(tensor) not in inputs:
            break
        tensor = caller.op.inputs[caller.first_input + inputs.index(id(tensor))]
        caller = caller.caller
    return tensor


def _is_constant(tensor: tf.Tensor) -> bool:
    """Whether a tensor is computed from constants alone."""
    pending, seen = [tensor.op], set()
    while pending:
        op = pending.pop()
        if op.type == "Placeholder" or op.op_def.is_stateful:
            return False
        if op not in seen:
            seen.add(op)
            pending += [operand.op for operand in op.inputs]
    return True
