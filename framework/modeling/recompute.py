"""Splitting a function into a forward and a backward part that recomputes.

TF's own gradient of a loop saves every intermediate, `tf.recompute_grad` saves none.
Here the function is traced once together with its gradient; the tensors to save are a
cut through that graph: the backward part is the gradient cut at the saved tensors,
so whatever does not follow from them is recomputed from the inputs.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Sequence

import gin
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright.framework.modeling.subgraphs import Subgraphs
from meshwright.framework.sharding.annotations import annotate_serialized, stacked

_TAGGED = re.compile(r"saved\.(?P<name>\w+)\.(_\d+)?")
# Ops that only rename, rearrange or slice: saving their first input serves as well.
_VIEWS = frozenset(
    {"Identity", "Reshape", "Transpose", "ExpandDims", "Squeeze", "Unpack", "SplitV"}
)
_PRODUCTS = frozenset(
    {"MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "XlaDotV2"}
)
# Ops between a product and a gradient that follows from a sum of products as well.
_LINEAR = _VIEWS - {"Unpack", "SplitV"} | {"Cast", "XlaSharding"}
# Ops that read nothing of a tensor but its shape, which is known statically.
_STATIC = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"})


@gin.constants_from_enum
class Recompute(enum.Enum):
    """What the backward part computes again instead of reading it from memory."""

    EVERYTHING = "everything"
    NOTHING = "nothing"
    ALL_BUT_NAMED = "all_but_named"


def save_name(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Names an intermediate, for `Recompute.ALL_BUT_NAMED` to save.

    Raises:
      ValueError: the name is not an identifier.
    """
    if not name.isidentifier():
        raise ValueError(f"name {name!r} of a tensor to save is not an identifier")
    # The dot at the end divides the name from the number by which TF makes it unique.
    return tf.identity(tensor, name=f"saved.{name}.")


def names_given(graph: tf.Graph) -> tuple[str, ...]:
    """The names that `save_name` gave tensors of a graph or its loops, sorted."""
    definition = graph.as_graph_def()
    bodies = (function.node_def for function in definition.library.function)
    found = (
        _TAGGED.fullmatch(node.name.rsplit("/", 1)[-1])
        for nodes in (definition.node, *bodies)
        for node in nodes
    )
    return tuple(sorted({match["name"] for match in found if match}))


def computed_once(*tensors: tf.Tensor) -> Sequence[tf.Tensor]:
    """Keeps XLA from computing tensors again in each fusion that reads them.

    XLA fuses elementwise ops with what reads them, products on TPUs too, and counts
    their cost little. Its CPU compiler drops the barrier. Gradients pass as they are.
    """
    if tf.executing_eagerly():
        return tensors

    @tf.custom_gradient
    def barred(*tensors):
        return xla.optimization_barrier(*tensors), lambda *dy: dy

    return barred(*tensors)


def gradient_computed_once(x: tf.Tensor) -> tf.Tensor:
    """`x`, of which the gradient is `computed_once`."""

    @tf.custom_gradient
    def barred(x):
        return tf.identity(x), lambda dy: computed_once(dy)[0]

    return barred(x)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A tensor that the forward part passes to the backward part.

    Args:
      spec: its shape and dtype.
      sharding: the serialized OpSharding that it was annotated with, or None.
      unspecified_dims: dims that the annotation leaves to propagation.
    """

    spec: tf.TensorSpec
    sharding: bytes | None
    unspecified_dims: tuple[int, ...] = ()

    def annotate(self, tensor: tf.Tensor) -> tf.Tensor:
        """`tensor`, of the same rank, annotated as this tensor was."""
        if self.sharding is None:
            return tensor
        return annotate_serialized(tensor, self.sharding, self.unspecified_dims)

    def annotate_stack(self, stack: tf.Tensor) -> tf.Tensor:
        """A stack of such tensors, along a new leading dim, annotated accordingly."""
        if self.sharding is None:
            return stack
        unspecified = [dim + 1 for dim in self.unspecified_dims]
        return annotate_serialized(stack, stacked(self.sharding), unspecified)


@dataclasses.dataclass(frozen=True)
class DeferredProducts:
    """Gradients of weights that are products, cut off the backward part.

    Their factors may be kept, and the products of several uses be computed at once.

    Args:
      weights: for each weight, whether its gradient is cut off.
      backward: as of `SplitFunction`, without those gradients, and with the factors
        that are `made` after all others.
      made: the factors that are neither inputs nor saved.
      factors: the number of each factor among [*inputs, *saved, *made].
      multiply: (*factors) -> products, of which those of several uses add up.
      finish: (*products) -> gradients.
    """

    weights: tuple[bool, ...]
    backward: Callable[..., Sequence[tf.Tensor]]
    made: tuple[Saved, ...]
    factors: tuple[int, ...]
    multiply: Callable[..., Sequence[tf.Tensor]]
    finish: Callable[..., Sequence[tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class SplitFunction:
    """A function and its gradient, cut at the saved tensors. All sequences are flat.

    Args:
      forward: (*inputs, *weights, *shared, *constants) -> [*outputs, *saved].
      backward: (*inputs, *weights, *shared, *constants, *saved, *output gradients) ->
        [*input gradients, *weight gradients, *shared gradients].
      outputs: the outputs, which `forward` returns first.
      saved: the saved tensors, which it returns after them.
      reads: for inputs, then saved tensors, whether `backward` needs their values.
      deferred: the same with products cut off, if that was requested.
    """

    forward: Callable[..., Sequence[tf.Tensor]]
    backward: Callable[..., Sequence[tf.Tensor]]
    outputs: tuple[Saved, ...]
    saved: tuple[Saved, ...]
    reads: tuple[bool, ...]
    deferred: DeferredProducts | None = None


def split_function(
    fn: Callable[..., Sequence[tf.Tensor]],
    inputs: Sequence[tf.TensorSpec],
    weights: Sequence[tf.TensorSpec],
    constants: Sequence[tf.TensorSpec],
    *,
    shared: Sequence[tf.TensorSpec] = (),
    recompute: Recompute,
    names: Sequence[str] = (),
    defer: Sequence[bool] = (),
) -> SplitFunction:
    """Traces `fn` with its gradient and cuts it.

    Args:
      fn: (*inputs, *weights, *shared, *constants) -> flat list of outputs.
      inputs: floating-point tensors to differentiate by. Tensors that follow from only
        one of the other kinds (masks, random bits, cast weights) are never saved by
        `Recompute.NOTHING`: they are cheaper to compute than to keep.
      weights: tensors to differentiate by too.
      constants: tensors not to differentiate by: masks, random keys.
      shared: tensors to differentiate by that are the same in every use: the memory of
        cross-attention. Tensors that follow from them and weights are saved.
      recompute: where to cut.
      names: for `ALL_BUT_NAMED`, the `save_name` names to save.
      defer: for each weight, whether its gradient is to be cut off, if it is a product
        of tensors that are not weights or constants; () for no weight.

    Raises:
      ValueError: `fn` gives a name in `names` to no tensor; the message names those
        that it gives.
    """
    groups = (inputs, weights, shared, constants)
    specs = [tf.TensorSpec(s.shape, s.dtype) for group in groups for s in group]
    n = len(specs) - len(constants)
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
    ends = (len(inputs), len(inputs) + len(weights), n)
    saved = _cut(wrapped.graph, parts, ends, recompute, names)
    subgraphs = Subgraphs(wrapped)
    forward = subgraphs.cut(args, [*outputs, *saved])
    taken = [*args, *saved]
    backward = subgraphs.cut([*taken, *parts["cotangents"]], parts["gradients"])
    deferred = _deferred(subgraphs, parts, ends, saved, defer) if any(defer) else None
    return SplitFunction(
        forward=_flat_call(forward),
        backward=_flat_call(backward),
        outputs=tuple(_saved(y) for y in outputs),
        saved=tuple(_saved(t) for t in saved),
        reads=_reads(backward, [*range(len(inputs)), *range(len(args), len(taken))]),
        deferred=deferred,
    )


def forward_function(
    fn: Callable[..., Sequence[tf.Tensor]], specs: Sequence[tf.TensorSpec]
) -> SplitFunction:
    """A function without a gradient, for which nothing is saved.

    Args:
      fn: (*tensors) -> flat list of outputs.
      specs: its tensors.
    """

    def no_backward(*_):
        raise ValueError("a function without a gradient has no backward part")

    outputs: list[tf.Tensor] = []

    def trace(*args):
        outputs.extend(fn(*args))
        return list(outputs)

    return SplitFunction(
        forward=_flat_call(tf.compat.v1.wrap_function(trace, specs)),
        backward=no_backward,
        outputs=tuple(map(_saved, outputs)),
        saved=(),
        reads=(),
    )


def _deferred(subgraphs, parts, ends, saved, defer) -> DeferredProducts:
    args, gradients = parts["args"], parts["gradients"]
    first, last, end = ends
    others = {t.ref() for t in args[first:]}
    given = [*args[:first], *saved]
    numbers = {t.ref(): number for number, t in enumerate(given)}
    products: dict[int, tf.Tensor] = {}
    factors = {}
    for weight in range(first, last):
        product = _product(gradients[weight]) if defer[weight - first] else None
        if product is None:
            continue
        roots = [_root(factor) for factor in product.op.inputs]
        if not others & {root.ref() for root in roots}:
            products[weight] = product
            for factor, root in zip(product.op.inputs, roots, strict=True):
                number = numbers.setdefault(root.ref(), len(numbers))
                factors[_entry(factor, root).ref()] = number
    made = [ref.deref() for ref in numbers][len(given) :]
    kept = [g for n, g in enumerate(gradients[:end]) if n not in products]
    taken = [*args, *saved, *parts["cotangents"]]
    backward = subgraphs.cut(taken, [*kept, *made])
    multiply = subgraphs.cut([ref.deref() for ref in factors], list(products.values()))
    finish = subgraphs.cut(list(products.values()), [gradients[n] for n in products])
    return DeferredProducts(
        weights=tuple(weight in products for weight in range(first, last)),
        backward=_flat_call(backward),
        made=tuple(map(_saved, made)),
        factors=tuple(factors.values()),
        multiply=_flat_call(multiply),
        finish=_flat_call(finish),
    )


def _product(gradient: tf.Tensor) -> tf.Tensor | None:
    """The product that a gradient is, but for its form; None if it is none."""
    while gradient.op.type not in _PRODUCTS:
        op = gradient.op
        if op.type == "IdentityN":
            gradient = op.inputs[gradient.value_index]
        elif op.type in _LINEAR:
            gradient = op.inputs[0]
        else:
            return None
    return gradient


def _reads(function, numbers: Sequence[int]) -> tuple[bool, ...]:
    """Whether a function needs the values of its arguments of these numbers."""
    returned = {t.ref() for t in function.outputs}
    return tuple(
        argument.ref() in returned
        or any(op.type not in _STATIC for op in argument.consumers())
        for argument in (function.inputs[number] for number in numbers)
    )


def _flat_call(function) -> Callable[..., list[tf.Tensor]]:
    def call(*args: tf.Tensor) -> list[tf.Tensor]:
        if tf.executing_eagerly():
            # Else a tape would differentiate it at once, barriers too, for nothing:
            # callers have a gradient of their own.
            args = [tf.stop_gradient(x) for x in args]
        return tf.nest.flatten(function(*args))

    return call


def _cut(graph, parts, ends: Sequence[int], recompute, names) -> list[tf.Tensor]:
    """The tensors to save; none of them is an argument.

    Inputs, weights and shared tensors end at `ends` among the arguments.
    """
    forward_ops, args = parts["forward_ops"], parts["args"]
    if recompute is Recompute.EVERYTHING:
        wanted = []
    elif recompute is Recompute.ALL_BUT_NAMED:
        wanted = _tagged(forward_ops, names)
    else:
        bounds = zip((0, *ends), ends, strict=False)
        inputs, weights, shared = (
            _downstream(forward_ops, args[start:end]) for start, end in bounds
        )
        varying = inputs | (weights & shared)
        # Integers are left out: most of them are shapes, which must stay static.
        wanted = [
            tensor
            for op in graph.get_operations()
            if op not in forward_ops
            for tensor in op.inputs
            if tensor.op in varying
            and (tensor.dtype.is_floating or tensor.dtype == tf.bool)
        ]
    given = {t.ref() for t in args}
    cut = {}
    for root in map(_root, wanted):
        # All outputs of an op are cut; the history that a TF loop keeps for its
        # own gradient is no tensor, and what has no known rank, such as what fused
        # normalization reserves, no loop can keep.
        siblings = root.op.outputs
        if root.ref() not in given and all(
            t.dtype != tf.variant and t.shape.rank is not None for t in siblings
        ):
            cut.update((t.ref(), t) for t in siblings)
    return list(cut.values())


def _tagged(ops, names: Sequence[str]) -> list[tf.Tensor]:
    tagged: dict[str, list[tf.Tensor]] = {}
    for op in sorted(ops, key=lambda op: op.name):
        match = _TAGGED.fullmatch(op.name.rsplit("/", 1)[-1])
        if op.type == "Identity" and match:
            tagged.setdefault(match["name"], []).append(op.outputs[0])
    for name in names:
        if name not in tagged:
            raise ValueError(
                f"recompute policy saves {name!r}, but the layer names no such "
                f"tensor; it names {sorted(tagged)}"
            )
    return [tensor for name in names for tensor in tagged[name]]


def _downstream(ops, tensors) -> set:
    """The ops among `ops` that depend on `tensors`."""
    reached: set = set()
    pending = [op for t in tensors for op in t.consumers()]
    while pending:
        op = pending.pop()
        if op in ops and op not in reached:
            reached.add(op)
            pending.extend(user for out in op.outputs for user in out.consumers())
    return reached


def _root(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor of which `tensor` is a view; without its annotation, if it has one."""
    while tensor.op.type in _VIEWS or tensor.op.type == "IdentityN":
        op = tensor.op
        tensor = op.inputs[tensor.value_index if op.type == "IdentityN" else 0]
    if tensor.op.type == "XlaSharding":
        annotated = _identical(tensor.op.inputs[0])
        # What is annotated twice is sent in between: it is saved as it arrives.
        if annotated.op.type != "XlaSharding":
            return annotated
    return tensor


def _entry(tensor: tf.Tensor, root: tf.Tensor) -> tf.Tensor:
    """Where the value of a factor's root enters: behind ops that have other inputs."""
    while tensor.ref() != root.ref() and tensor.op.type != "IdentityN":
        tensor = tensor.op.inputs[0]
    return tensor


def _identical(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor before ops that have the arguments of its gradient too."""
    while tensor.op.type == "IdentityN":
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _saved(tensor: tf.Tensor) -> Saved:
    spec = tf.TensorSpec(tensor.shape, tensor.dtype)
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    if tensor.op.type == "XlaSharding":
        annotations = [tensor.op]
    else:
        annotations = [op for op in tensor.consumers() if op.type == "XlaSharding"]
    if not annotations:
        return Saved(spec=spec, sharding=None)
    return Saved(
        spec=spec,
        sharding=annotations[0].get_attr("sharding"),
        unspecified_dims=tuple(annotations[0].get_attr("unspecified_dims")),
    )
