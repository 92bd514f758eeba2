"""Notes on where a graph's ops come from, which TF does not keep itself.

They are written while a function is traced, and read when a compiled program is
explained: an op's name alone does not distinguish a layer from one of TF's scopes, and
a graph cut out of another has lost the lines that made it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

_LAYERS = "_meshwright_layers"
_OPENED = "_meshwright_keras_scopes"
_CALLERS = "_meshwright_keras_callers"
_WEIGHTS = "_meshwright_weights"
_DIMS = "_meshwright_dims"
_ORIGINAL = "_meshwright_original"
_LOCK = threading.Lock()
# Of `keras_names`: the threads that are in it, and what it replaced meanwhile.
_naming: list[int] = []
_kept: list[Callable[[Any], Any]] = []


def note_layer(scope: str, path: str) -> None:
    """Notes that ops under the name scope `scope` ("a/b/") are of the layer `path`."""
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        _noted(graph, _LAYERS)[scope] = path


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
    Here a layer has a single scope in a graph, in which TF numbers the ops. This
    concerns only what the thread makes in the context.
    """
    backend = sys.modules.get("keras.src.backend")
    if backend is None or backend.backend() != "tensorflow":
        yield
        return
    scope, thread = backend.name_scope, threading.get_ident()
    with _LOCK:
        if not _naming:
            _kept.append(scope.__enter__)
            scope.__enter__ = _enter_and_note(scope.__enter__)
        _naming.append(thread)
    try:
        yield
    finally:
        with _LOCK:
            _naming.remove(thread)
            if not _naming:
                scope.__enter__ = _kept.pop()


def _enter_and_note(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What Keras's name scopes do in `keras_names`, in place of `enter`."""
    from keras.src.backend.common.global_state import get_global_attribute
    from keras.src.backend.common.name_scope import current_path

    def enter_and_note(self):
        if tf.executing_eagerly() or threading.get_ident() not in _naming:
            return enter(self)
        graph = tf.compat.v1.get_default_graph()
        opened = _noted(graph, _OPENED)
        # A scope of the user's may have the name of a layer, and layers that of others.
        key = graph.get_name_scope(), self.name, id(self.caller)
        if key in opened:
            self._tf_name_scope = tf.name_scope(opened[key])
        entered = enter(self)
        if self._pop_on_exit:  # Not within itself.
            opened[key] = f"{graph.get_name_scope()}/"
            names = [scope.name for scope in get_global_attribute("name_scope_stack")]
            _note_keras_path(graph, opened[key], current_path(), self.caller, names)
        return entered

    return enter_and_note


def _note_keras_path(
    graph: tf.Graph, scope: str, path: str, caller: Any, names: Sequence[str]
) -> None:
    """Notes a layer's path; of layers with the same one all names around each.

    Models that were made apart may each have a layer `dense`, and be called in another.
    """
    callers = _noted(graph, _CALLERS).setdefault(path, {})
    callers.setdefault(id(caller), {})[scope] = ".".join(names)
    if len(callers) == 1:
        note_layer(scope, path.replace("/", "."))
        return
    for scopes in callers.values():
        for each, around in scopes.items():
            note_layer(each, around)


def note_weight(tensor: tf.Tensor, path: str) -> tf.Tensor:
    """Notes that the op of `tensor` annotates the weight `path`; returns `tensor`."""
    if not tf.executing_eagerly():
        _noted(tensor.graph, _WEIGHTS)[tensor.op.name] = path
    return tensor


def noted_weight(graph: tf.Graph, op_name: str) -> str | None:
    """The path of the weight that an op annotates, or None."""
    return getattr(graph, _WEIGHTS, {}).get(op_name)


def note_dims(tensor: tf.Tensor, dims: Sequence[str | None]) -> tf.Tensor:
    """Notes the names of the dims that the op of `tensor` annotates; returns `tensor`.

    None, or "", is a dim without a name.
    """
    if not tf.executing_eagerly():
        noted = tuple(dim or "" for dim in dims)
        _noted(tensor.graph, _DIMS)[tensor.op.name] = noted
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


def _noted(graph: tf.Graph, kind: str) -> dict:
    """The notes of one kind on a graph, which may be added to."""
    if not hasattr(graph, kind):
        setattr(graph, kind, {})
    return getattr(graph, kind)
