"""Counts the products of a TensorFlow graph."""

from __future__ import annotations

import math
from collections.abc import Iterator

import tensorflow as tf

from meshwright.framework.compiler.lowering.sources import called_graphs

_LOOPS = ("While", "StatelessWhile")
_DEPTHWISE = "DepthwiseConv2dNative"
_CONVOLUTIONS = ("Conv2D", "Conv3D", _DEPTHWISE)


def product_flops(graph: tf.Graph) -> float:
    """FLOPs of matrix products and convolutions: two for each multiplication.

    Returns:
      0 if there are some in a loop, of which the graph does not say how often it runs.
    """
    return max(2.0 * sum(_multiplications(graph, in_loop=False)), 0.0)


def _multiplications(graph: tf.Graph, *, in_loop: bool) -> Iterator[float]:
    for op in graph.get_operations():
        for inner, _ in called_graphs(op):
            yield from _multiplications(inner, in_loop=in_loop or op.type in _LOOPS)
        if count := _of_op(op):
            yield -math.inf if in_loop else count


def _of_op(op: tf.Operation) -> float:
    """The multiplications of an op; 0 if it is no product."""
    if op.type == "Einsum":
        inputs = op.get_attr("equation").decode().split("->")[0].split(",")
        return _einsum(inputs, [x.shape for x in op.inputs])
    if op.type in _CONVOLUTIONS:
        kernel = op.inputs[1].shape
        each = kernel[:-2] if op.type == _DEPTHWISE else kernel[:-1]
        return op.outputs[0].shape.num_elements() * each.num_elements()
    if op.type.startswith("BatchMatMul") or op.type == "MatMul":
        names = ("adj_x",) if op.type.startswith("Batch") else ("transpose_a",)
        transposed = any(op.get_attr(name) for name in names)
        depth = op.inputs[0].shape[-2 if transposed else -1]
        return op.outputs[0].shape.num_elements() * depth
    return 0.0


def _einsum(inputs: list[str], shapes: list[tf.TensorShape]) -> float:
    if len(inputs) < 2:
        return 0.0
    sizes: dict[str, int] = {}
    for labels, shape in zip(inputs, shapes, strict=True):
        named = labels.replace("...", "")
        before = labels.find("...") if "..." in labels else len(labels)
        after = len(named) - before
        known = [*shape[:before], *(shape[len(shape) - after :] if after else [])]
        sizes |= dict(zip(named, known, strict=True))
        if "..." in labels:
            rest = shape[before : len(shape) - after]
            sizes["..."] = max(sizes.get("...", 1), math.prod(rest))
    return float(math.prod(sizes.values()))
