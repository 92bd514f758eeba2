"""Tensors and state that a traced function reads from outside.

Small tensors become constants, as in TF's own jit. State does not: a program is a pure
function, and a variable would be baked in with its value at tracing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import traceback
from collections.abc import Iterator, Sequence

import tensorflow as tf
from tensorflow.python.trackable.resource import CapturableResource

from meshwright.framework.compiler.lowering.errors import LoweringError
from meshwright.framework.compiler.lowering.sources import (
    Sources,
    called_graphs,
    frame_text,
    inner_prefix,
)
from meshwright.framework.sharding.origins import noted_layer
from meshwright.framework.sizes import bytes_text

MAX_CONSTANT_BYTES = 1 << 20
_HANDLES = (tf.resource, tf.variant)
_BY_ARGUMENT = (
    "pass its value as an argument, and return its new value as a result, or use "
    "mw.function, which keeps variables"
)


def keep_small_tensors(graph) -> None:
    """Makes constants of tensors of up to 1 MiB that a function reads from outside.

    Args:
      graph: the function's, which is about to be traced. TF would make arguments of
        captured tensors, where shapes and axes must be constants.
    """
    capture = graph.capture
    constants: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}

    @functools.wraps(capture)
    def keep_or_capture(tensor, name=None, shape=None):
        if not _is_small(tensor):
            return capture(tensor, name, shape)
        if id(tensor) not in constants:
            with tf.control_dependencies(None):
                constant = tf.constant(tensor.numpy(), tensor.dtype)
            constants[id(tensor)] = tensor, constant
        constant = constants[id(tensor)][1]
        # As TF's own captures do: a tape may watch the tensor outside.
        constant._record_tape(tensor)
        return constant

    graph.capture = keep_or_capture


def captured_as(
    graph, outside: Sequence[tf.Tensor], inside: Sequence[tf.Tensor]
) -> None:
    """Gives a function that reads `outside` tensors those of its graph in their place.

    Args:
      graph: the function's, which is about to be traced.
      outside: tensors that it captures.
      inside: for each a tensor of the graph.
    """
    capture, by_id = graph.capture, dict(zip(map(id, outside), inside, strict=True))

    @functools.wraps(capture)
    def replace_or_capture(tensor, name=None, shape=None):
        if id(tensor) in by_id:
            return by_id[id(tensor)]
        return capture(tensor, name, shape)

    graph.capture = replace_or_capture


def _is_small(tensor) -> bool:
    eager = isinstance(tensor, tf.__internal__.EagerTensor)
    return (
        eager and tensor.dtype not in _HANDLES and _bytes(tensor) <= MAX_CONSTANT_BYTES
    )


def _bytes(tensor: tf.Tensor) -> int:
    return tensor.shape.num_elements() * max(tensor.dtype.size, 1)


@contextlib.contextmanager
def refusing_new_variables(name: str) -> Iterator[None]:
    """Refuses variables that are made while a function is traced.

    Args:
      name: the program's.

    Raises:
      LoweringError: there is one; the message names the layer that makes it, the line,
        and what to do instead.
    """

    def refuse(make, **how):
        where = filter(None, (_current_layer(), frame_text(traceback.extract_stack())))
        raise LoweringError(
            f"{name}: a tf.Variable is created while the program is traced, by "
            f"{', '.join(where) or 'its function'}: programs are pure functions. "
            "Describe a weight by a WeightSpec in the layer's weights() and read it "
            "from theta in fprop; for values that never change use tf.constant"
        )

    with tf.variable_creator_scope(refuse):
        yield


def _current_layer() -> str:
    """`layer 'stack.attention'`, or the name scopes; "" outside any."""
    graph = tf.compat.v1.get_default_graph()
    scope = graph.get_name_scope()
    while graph is not None:
        if layer := noted_layer(graph, f"{scope}/variable"):
            return f"layer {layer!r}"
        # The body of a loop or a call is a graph inside another.
        graph = getattr(graph, "outer_graph", None)
        scope = graph.get_name_scope() if graph is not None else ""
    return ""


def refuse_captures(
    name: str, concrete, sources: Sources, *, allowed: Sequence[tf.Tensor] = ()
) -> None:
    """Refuses a traced function that reads anything from outside but `allowed`.

    Raises:
      LoweringError: it does; the message names what, where, and what to do.
    """
    known = set(map(id, allowed))
    for outside, inside in concrete.graph.captures:
        if id(outside) in known:
            continue
        reader = _reader(inside)
        where = f", at {sources.text(reader)}" if reader else ""
        what, remedy = _described(outside, concrete)
        raise LoweringError(f"{name}: the function reads {what}{where}: {remedy}")


def _described(outside: tf.Tensor, concrete) -> tuple[str, str]:
    """What is read, and what to do about it."""
    if not isinstance(outside, tf.__internal__.EagerTensor):
        return (
            f"{outside.name!r}, a symbolic tensor of the function "
            f"{outside.graph.name!r}",
            "return it from there and pass it as an argument",
        )
    if outside.dtype not in _HANDLES:
        shape, size = list(outside.shape), bytes_text(_bytes(outside))
        return (
            f"a tensor {outside.dtype.name}{shape} from outside, whose {size} are over "
            f"the {bytes_text(MAX_CONSTANT_BYTES)} of a constant",
            "pass it as an argument or compute it inside the function",
        )
    variables = [v for v in concrete.variables if v.handle is outside]
    for owner in [*variables, *owners(outside)]:
        if isinstance(owner, tf.Variable):
            what = f"a variable {owner.name!r} of shape {owner.shape} from outside"
            return what, _BY_ARGUMENT
        if isinstance(owner, CapturableResource):
            return (
                f"a {type(owner).__name__} from outside",
                "look up on the host, such as in the input pipeline, and pass the "
                "results as an argument",
            )
        return (
            "an iterator of a tf.data.Dataset from outside",
            "take its next element outside, and pass that as an argument",
        )
    return f"a {outside.dtype.name} from outside", _BY_ARGUMENT


def owners(handle) -> Iterator:
    """What holds a resource in Python, of which TF keeps no record.

    Returns:
      Variables, tables and the like, and iterators of `tf.data`.
    """
    for holder in gc.get_referrers(handle):
        if isinstance(holder, dict):  # Of an object's attributes, if Python has it.
            yield from (o for o in gc.get_referrers(holder) if _is_held(o, handle))
        elif _is_held(holder, handle):
            yield holder


def _is_held(owner, handle) -> bool:
    kinds = tf.Variable, CapturableResource, tf.data.Iterator
    return isinstance(owner, kinds) and any(
        value is handle for value in getattr(owner, "__dict__", {}).values()
    )


def _reader(tensor: tf.Tensor) -> str | None:
    """The program's name for the op that reads an input of the function first."""
    prefix = ""
    while consumers := tensor.consumers():
        op = consumers[0]
        number = next(i for i, operand in enumerate(op.inputs) if operand is tensor)
        called = called_graphs(op)
        inner = (g.inputs[number - first] for g, first in called if number >= first)
        tensor_inside = next((t for t in inner if t.consumers()), None)
        if tensor_inside is None:
            return prefix + op.name
        tensor, prefix = tensor_inside, inner_prefix(op, prefix)
    return None
