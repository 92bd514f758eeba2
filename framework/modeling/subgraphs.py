"""Functions that are cut out of the graph of a traced function."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.eager.wrap_function import WrappedFunction
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.handle_data_util import copy_handle_data

from meshwright.framework.sharding.origins import note_original


class Subgraphs:
    """Cuts functions out of a traced function, like its method `prune`.

    TF's copies op by op in Python, which takes most of the time in which a stack of
    layers is traced; here TF's C++ imports the ops.

    Args:
      traced: the result of `tf.compat.v1.wrap_function`.
    """

    def __init__(self, traced: WrappedFunction):
        self._traced = traced
        definition = traced.graph.as_graph_def()
        self._versions = definition.versions
        self._nodes = {node.name: node for node in definition.node}
        for node in definition.node:  # Gradients are placed where other ops are.
            node.attr.pop("_class", None)

    def cut(
        self, given: Sequence[tf.Tensor], wanted: Sequence[tf.Tensor]
    ) -> WrappedFunction:
        """The function from some tensors of the traced function to others.

        Args:
          given: its arguments, all outputs of their ops among them.
          wanted: its results, which follow from `given` and from what is captured.

        Raises:
          ValueError: they need another argument of the traced function.
        """
        captures = self._traced.graph.captures
        sources = {t.name: t for t in [*given, *(inner for _, inner in captures)]}
        nodes = self._needed({t.op.name for t in sources.values()}, wanted)
        part = FuncGraph("pruned")
        with part.as_default():
            fed = {name: _placeholder(t) for name, t in sources.items()}
            for function in self._traced.graph._functions.values():
                part._add_function(function)
            made = [t.name for t in wanted if t.name not in fed]
            copies = tf.graph_util.import_graph_def(
                graph_pb2.GraphDef(node=nodes, versions=self._versions),
                input_map=_read_by(nodes, fed),
                return_elements=made,
                name="",
            )
        results = fed | dict(zip(made, copies, strict=True))
        part.inputs.extend(fed[t.name] for t in given)
        part.outputs.extend(results[t.name] for t in wanted)
        part.structured_outputs = list(part.outputs)
        for outer, inner in captures:
            part.add_capture(outer, fed[inner.name])
        note_original(part, self._traced)
        function = WrappedFunction(part, variable_holder=self._traced._variable_holder)
        function._num_positional_args = len(given)
        function._arg_keywords = [t.op.name for t in given]
        return function

    def _needed(
        self, ends: set[str], wanted: Sequence[tf.Tensor]
    ) -> list[node_def_pb2.NodeDef]:
        """The nodes from which `wanted` follow, without those named in `ends`."""
        pending = [(t.op.name, t.op.name) for t in wanted]
        needed = set(ends)
        while pending:
            name, user = pending.pop()
            if name in needed:
                continue
            if self._nodes[name].op == "Placeholder":
                raise ValueError(f"{user!r} needs {name!r}, which is not given")
            needed.add(name)
            pending.extend((_op_of(text), name) for text in self._nodes[name].input)
        needed -= ends
        return [node for name, node in self._nodes.items() if name in needed]


def _read_by(
    nodes: Sequence[node_def_pb2.NodeDef], fed: dict[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
    """The tensors of `fed` that `nodes` read, by the names under which they do."""
    after = {f"^{_op_of(name)}": tensor for name, tensor in fed.items()}
    sources = {name.removesuffix(":0"): tensor for name, tensor in fed.items()} | after
    read = {text for node in nodes for text in node.input}
    return {name: tensor for name, tensor in sources.items() if name in read}


def _op_of(text: str) -> str:
    """The op that an input of a node is of, or that it comes after."""
    return text.removeprefix("^").partition(":")[0]


def _placeholder(tensor: tf.Tensor) -> tf.Tensor:
    name = tensor.op.name
    copy = tf.compat.v1.placeholder(tensor.dtype, tensor.shape, name=name)
    copy_handle_data(tensor, copy)
    return copy
