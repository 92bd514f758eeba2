"""Notes on where a graph's ops come from, which TF does not keep itself.

They are written while a function is traced, and read when a compiled program is
explained: an op's name alone does not distinguish a layer from one of TF's scopes, and
a graph cut out of another has lost the lines that made it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import tensorflow as tf

_LAYERS = "_meshwright_layers"
_WEIGHTS = "_meshwright_weights"
_DIMS = "_meshwright_dims"
_ORIGINAL = "_meshwright_original"


def note_layer(scope: str, path: str) -> None:
    """Notes that ops under the name scope `scope` ("a/b/") are of the layer `path`."""
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        layers = getattr(graph, _LAYERS, {})
        layers[scope] = path
        setattr(graph, _LAYERS, layers)


def noted_layer(graph: tf.Graph, op_name: str) -> str | None:
    """The path of the innermost noted layer around an op, or None."""
    scopes = getattr(graph, _LAYERS, {})
    while "/" in op_name:
        op_name = op_name.rsplit("/", 1)[0]
        if f"{op_name}/" in scopes:
            return scopes[f"{op_name}/"]
    return None


@contextlib.contextmanager
def keras_names() -> Iterator[None]:
    """Has ops that Keras's layers make have the layers' names, and paths in reports.

    Keras opens the scope of a layer twice, to build it and to call it, and once more
    for each other call; TF puts a number behind the name of a scope that it has seen.
    Here the same scope is entered again, and TF numbers the ops in it.
    """
    backend = sys.modules.get("keras.src.backend")
    if backend is None or backend.backend() != "tensorflow":
        yield
        return
    from keras.src.backend.common.name_scope import current_path

    enter = backend.name_scope.__enter__

    def enter_and_note(self):
        if tf.executing_eagerly():
            return enter(self)
        graph = tf.compat.v1.get_default_graph()
        around = graph.get_name_scope()
        self._tf_name_scope = tf.name_scope(f"{around}/{self.name}/".lstrip("/"))
        entered = enter(self)
        note_layer(f"{graph.get_name_scope()}/", current_path().replace("/", "."))
        return entered

    backend.name_scope.__enter__ = enter_and_note
    try:
        yield
    finally:
        backend.name_scope.__enter__ = enter


def note_weight(tensor: tf.Tensor, path: str) -> tf.Tensor:
    """Notes that the op of `tensor` annotates the weight `path`; returns `tensor`."""
    if not tf.executing_eagerly():
        weights = getattr(tensor.graph, _WEIGHTS, {})
        weights[tensor.op.name] = path
        setattr(tensor.graph, _WEIGHTS, weights)
    return tensor


def noted_weight(graph: tf.Graph, op_name: str) -> str | None:
    """The path of the weight that an op annotates, or None."""
    return getattr(graph, _WEIGHTS, {}).get(op_name)


def note_dims(tensor: tf.Tensor, dims: Sequence[str | None]) -> tf.Tensor:
    """Notes the names of the dims that the op of `tensor` annotates; returns `tensor`.

    None, or "", is a dim without a name.
    """
    if not tf.executing_eagerly():
        noted = getattr(tensor.graph, _DIMS, {})
        noted[tensor.op.name] = tuple(dim or "" for dim in dims)
        setattr(tensor.graph, _DIMS, noted)
    return tensor


def noted_dims(graph: tf.Graph, op_name: str) -> tuple[str, ...]:
    """The names of the dims that an op annotates; () if they are not known."""
    return getattr(graph, _DIMS, {}).get(op_name, ())


def note_original(copy: tf.Graph, original) -> None:
    """Notes that the ops of `copy` were copied, by name, from a function's graph."""
    setattr(copy, _ORIGINAL, original)


def original_of(graph: tf.Graph) -> tf.Graph:
    """The graph in which the ops of `graph` were first made; mostly `graph` itself."""
    original = getattr(graph, _ORIGINAL, None)
    if original is not None:
        return original.graph
    noted = map(_noted_by_tf, graph.get_operations())
    sources = {op.graph for op in noted if op is not None} - {graph}
    return original_of(sources.pop()) if len(sources) == 1 else graph


def original_op(op: tf.Operation, original: tf.Graph) -> tf.Operation:
    """The op of `original` (see `original_of`) that `op` was made from.

    Mostly `op` itself; for an op of a gradient, perhaps the differentiated op.
    """
    op = _noted_by_tf(op) or op
    while True:
        try:
            return original.get_operation_by_name(op.name)
        except KeyError:  # An argument of the copy, or vectorized more than once.
            noted = _noted_by_tf(op)
        if noted is None:
            return op
        op = noted


def _noted_by_tf(op: tf.Operation) -> tf.Operation | None:
    """The op that `op` was vectorized from (`tf.vectorized_map`) or differentiates."""
    return getattr(op, "_original_op", None)
