"""Splitting a function into a forward and a backward part that recomputes.

TF's own gradient of a loop saves every intermediate, and `tf.recompute_grad` saves none.
Here the function is traced once together with its gradient; the tensors to save are then
a cut through that graph: the backward part is the gradient pruned at the saved tensors,
so whatever they do not give is recomputed from the inputs.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Sequence

import gin
import tensorflow as tf
from tensorflow.compiler.xla import xla_data_pb2

_TAG = "saved."
_TAGGED = re.compile(r"saved\.(?P<name>[a-z_]+[a-z])(_\d+)?")
# Ops that only rename, rearrange or slice: saving their first input serves as well.
_VIEWS = frozenset(
    {"Identity", "Reshape", "Transpose", "ExpandDims", "Squeeze", "Unpack", "SplitV"}
)


@gin.constants_from_enum
class Recompute(enum.Enum):
    """What the backward part computes again instead of reading it from memory."""

    EVERYTHING = "everything"
    NOTHING = "nothing"
    ALL_BUT_NAMED = "all_but_named"


def save_name(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Names an intermediate, for `Recompute.ALL_BUT_NAMED` to save."""
    return tf.identity(tensor, name=_TAG + name)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A tensor that the forward part hands to the backward part.

    Args:
      spec: its shape and dtype.
      sharding: serialized OpSharding it was annotated with, or None.
    """

    spec: tf.TensorSpec
    sharding: bytes | None


@dataclasses.dataclass(frozen=True)
class SplitFunction:
    """A function and its gradient, cut at the saved tensors. All sequences are flat.

    Args:
      forward: (*inputs, *constants) -> [*outputs, *saved].
      backward: (*inputs, *constants, *saved, *output gradients) -> input gradients.
      outputs: what `forward` returns first.
      saved: what it returns then.
    """

    forward: Callable[..., Sequence[tf.Tensor]]
    backward: Callable[..., Sequence[tf.Tensor]]
    outputs: tuple[Saved, ...]
    saved: tuple[Saved, ...]


def split_function(
    fn: Callable[..., Sequence[tf.Tensor]],
    inputs: Sequence[tf.TensorSpec],
    constants: Sequence[tf.TensorSpec],
    *,
    recompute: Recompute,
    names: Sequence[str] = (),
) -> SplitFunction:
    """Traces `fn` with its gradient and cuts it.

    Args:
      fn: (*inputs, *constants) -> flat list of outputs.
      inputs: what it is differentiated by; floating point.
      constants: what it is not: masks, random keys.
      recompute: where to cut.
      names: for `ALL_BUT_NAMED`, the `save_name` names to save.

    Raises:
      ValueError: a name in `names` that `fn` gives to no tensor; names the known ones.
    """
    specs = [tf.TensorSpec(s.shape, s.dtype) for s in (*inputs, *constants)]
    n = len(inputs)
    parts: dict[str, list[tf.Tensor]] = {}

    def trace(*args):
        outputs = list(fn(*args))
        cotangents = [tf.compat.v1.placeholder(y.dtype, y.shape) for y in outputs]
        before = set(tf.compat.v1.get_default_graph().get_operations())
        gradients = tf.gradients(
            outputs, list(args[:n]), cotangents, unconnected_gradients="zero"
        )
        parts.update(args=list(args), outputs=outputs, cotangents=cotangents)
        parts.update(gradients=gradients, forward_ops=before)
        return outputs

    wrapped = tf.compat.v1.wrap_function(trace, specs)
    args, outputs = parts["args"], parts["outputs"]
    saved = _cut(wrapped.graph, parts, n, recompute, names)
    # A saved tensor may be an output or an input too; feeds must be distinct.
    forward = wrapped.prune(args, [*outputs, *saved])
    backward = wrapped.prune([*args, *saved, *parts["cotangents"]], parts["gradients"])
    return SplitFunction(
        forward=_flat_call(forward),
        backward=_flat_call(backward),
        outputs=tuple(_saved(y) for y in outputs),
        saved=tuple(_saved(t) for t in saved),
    )


def _flat_call(function) -> Callable[..., list[tf.Tensor]]:
    return lambda *args: tf.nest.flatten(function(*args))


def _cut(graph, parts, n, recompute, names) -> list[tf.Tensor]:
    if recompute is Recompute.EVERYTHING:
        return []
    forward_ops, args = parts["forward_ops"], parts["args"]
    if recompute is Recompute.ALL_BUT_NAMED:
        tagged = _tagged(forward_ops)
        for name in names:
            if name not in tagged:
                raise ValueError(
                    f"recompute policy saves {name!r}, but the layer names no such "
                    f"tensor; it names {sorted(tagged)}"
                )
        return [t for name in names for t in tagged[name]]
    # What follows from weights and keys alone is cheaper to compute than to save.
    varying = _downstream(forward_ops, args[:1])
    given = {t.ref() for t in args}
    cut = {}
    for op in graph.get_operations():
        if op in forward_ops:
            continue
        for tensor in op.inputs:
            if tensor.op in varying and tensor.dtype.is_floating:
                root = _root(tensor)
                if root.ref() not in given:
                    # `prune` can cut an op only as a whole.
                    cut.update((out.ref(), out) for out in root.op.outputs)
    return list(cut.values())


def _tagged(ops) -> dict[str, list[tf.Tensor]]:
    tagged: dict[str, list[tf.Tensor]] = {}
    for op in sorted(ops, key=lambda op: op.name):
        match = _TAGGED.fullmatch(op.name.rsplit("/", 1)[-1])
        if op.type == "Identity" and match:
            tagged.setdefault(match["name"], []).append(_root(op.outputs[0]))
    return tagged


def _downstream(ops, tensors) -> set:
    """Those of `ops` that depend on `tensors`."""
    reached: set = set()
    pending = [op for t in tensors for op in t.consumers()]
    while pending:
        op = pending.pop()
        if op in ops and op not in reached:
            reached.add(op)
            pending.extend(user for out in op.outputs for user in out.consumers())
    return reached


def _root(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor of which `tensor` is a view; for an annotated one, what went in."""
    while tensor.op.type in _VIEWS or tensor.op.type == "IdentityN":
        op = tensor.op
        tensor = op.inputs[tensor.value_index if op.type == "IdentityN" else 0]
    return tensor.op.inputs[0] if tensor.op.type == "XlaSharding" else tensor


def _saved(tensor: tf.Tensor) -> Saved:
    if tensor.op.type == "XlaSharding":
        annotations = [tensor.op]
    else:
        annotations = [op for op in tensor.consumers() if op.type == "XlaSharding"]
    return Saved(
        spec=tf.TensorSpec(tensor.shape, tensor.dtype),
        sharding=annotations[0].get_attr("sharding") if annotations else None,
    )


def stacked_sharding(serialized: bytes) -> bytes:
    """The OpSharding of a stack, along a new leading dim, of tensors sharded so."""
    proto = xla_data_pb2.OpSharding.FromString(serialized)
    if proto.type == xla_data_pb2.OpSharding.OTHER:
        proto.tile_assignment_dimensions.insert(0, 1)
    return proto.SerializeToString()
