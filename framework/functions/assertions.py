"""Assertions and checks of numerics, which a program makes and a call tells of.

TF2XLA leaves such ops out. A variable takes their place, which keeps the number of the
first check that fails: loops, branches and functions hand it on as they do any other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.framework.func_graph import FuncGraph

from meshwright.framework.compiler.lowering.sources import frame_text
from meshwright.framework.compiler.lowering.unchecked import CHECKS, MADE

_GUARD = "AssertGuard_false"
"""In the name of the branch into which `tf.debugging.Assert` puts its op."""
_OF_LOOP_GRADIENT = "internal_capture_to_output"
"""What TF's graph of the gradient of a loop's body has, and no other."""
_NONE = -1


class Checks:
    """The checks of one traced function."""

    def __init__(self):
        self._ops: list[tf.Operation] = []
        self._failed = tf.Variable(_NONE, trainable=False, name="failed")

    @property
    def variables(self) -> list[tf.Variable]:
        """What keeps the number of the first check that fails; empty without checks."""
        return [self._failed] if self._ops else []

    @contextlib.contextmanager
    def noted(self, graph: FuncGraph) -> Iterator[None]:
        """Has the checks that are traced in the context made by the program.

        Args:
          graph: of the function, which is being traced.
        """
        create = FuncGraph._create_op_internal

        @functools.wraps(create)
        def create_and_note(self_, op_type, *args, **kwargs):
            op = create(self_, op_type, *args, **kwargs)
            if op_type in CHECKS and _is_within(self_, graph):
                self._note(op)
            return op

        FuncGraph._create_op_internal = create_and_note
        try:
            yield
        finally:
            FuncGraph._create_op_internal = create

    def _note(self, op: tf.Operation) -> None:
        """Makes a check by other ops, beside the op that TF2XLA leaves out."""
        graph, tested = op.graph, op.inputs[0]
        while op.type == "Assert" and _GUARD in graph.name:
            graph, tested = graph.outer_graph, _outside(tested)
        handle = self._handle(graph)
        if handle is None:
            return
        op._set_attr(MADE, attr_value_pb2.AttrValue(b=True))
        with graph.as_default():
            holds = tested if op.type == "Assert" else tf.math.is_finite(tested)
            # By raw ops: `tf.custom_gradient` minds variables that are read.
            before = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int32)
            fails = tf.logical_not(tf.reduce_all(holds))
            number = tf.where(fails & (before == _NONE), len(self._ops), before)
            tf.raw_ops.AssignVariableOp(resource=handle, value=number)
        self._ops.append(op)

    def _handle(self, graph) -> tf.Tensor | None:
        """The variable's handle for ops of a graph; None if they cannot have it."""
        while graph is not None and not hasattr(graph, _OF_LOOP_GRADIENT):
            graph = getattr(graph, "outer_graph", None)
        if graph is None:
            return self._failed.handle
        # The gradient of a loop takes resources by way of the loop.
        inside = [inside for _, inside in graph._forward_graph.captures]
        return next((x for x in inside if _root(x) is self._failed.handle), None)

    def begin(self) -> None:
        """In a program: no check has failed yet."""
        for variable in self.variables:
            variable.assign(_NONE, read_value=False)

    def first_violated(self) -> list[tf.Tensor]:
        """In a program: the number of the first check that failed."""
        return [variable.read_value() for variable in self.variables]

    def tell(self, name: str, number: int) -> None:
        """Tells of a check that failed.

        Args:
          name: the program's.
          number: what `first_violated` is after the call.

        Raises:
          tf.errors.InvalidArgumentError: one did.
        """
        if number == _NONE:
            return
        op = self._ops[number]
        line = frame_text(op.traceback or ())
        at = f" ({line})" if line else ""
        raise tf.errors.InvalidArgumentError(
            None,
            None,
            f"{name}: op {op.name!r}{at} failed: {_message(op)}. The call has run to "
            "its end: what it wrote to variables is there",
        )


def _is_within(graph, outer) -> bool:
    while graph is not None and graph is not outer:
        graph = getattr(graph, "outer_graph", None)
    return graph is outer


def _outside(tensor: tf.Tensor) -> tf.Tensor:
    """What a graph captures as `tensor`; the tensor itself if it is no capture."""
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return tensor
    for outside, inside in getattr(tensor.graph, "captures", ()):
        if inside is tensor:
            return outside
    return tensor


def _root(tensor: tf.Tensor) -> tf.Tensor:
    """What is captured as `tensor` in the outermost graph that captures it."""
    while (outside := _outside(tensor)) is not tensor:
        tensor = outside
    return tensor


def _message(op: tf.Operation) -> str:
    """What the check says itself; values that it would print are not known."""
    if op.type != "Assert":
        text = op.get_attr("message").decode()
        return f"{text}: a tensor {op.inputs[0].shape} has a NaN or an infinity"
    texts = []
    for tensor in map(_root, op.inputs[1:]):
        if tensor.dtype == tf.string and tensor.op.type == "Const":
            texts.append(np.asarray(tf.get_static_value(tensor)).item().decode())
        elif texts:  # Before a value comes its name, as `x (Mean:0) = `.
            texts[-1] = texts[-1].rstrip(" =:")
    return " ".join(filter(None, texts)) or "its condition is false"
