"""Where the ops of a compiled program come from: layer, TF op, line of user code."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib.util
import os
import pathlib
import re
import traceback
from collections.abc import Iterator, Sequence

import tensorflow as tf
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.python.framework import op_def_registry

from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.origins import (
    noted_dims,
    noted_layer,
    noted_weight,
    original_of,
    original_op,
)
from meshwright.framework.sharding.sharding import Sharding

ANNOTATION = "XlaSharding"
"""Type of the TF op that carries an annotation."""
PLACEHOLDER = "XlaCustomCallV2"
"""Type of the TF op that stands for an op that TF lacks, in a scope of its name."""


class Kind(enum.Enum):
    """What a tensor is to its program."""

    ARGUMENT = "argument"
    RESULT = "result"
    INSIDE = "inside"


_FRAMEWORK = pathlib.Path(__file__).parents[2]
_LAYERS = _FRAMEWORK.with_name("layers")
# Frames of these are not the user's. The two packages that `tf.keras` may be are looked
# for and not imported: an import takes a second, and few programs use them.
_LIBRARIES = (
    *(
        os.path.dirname(spec.origin) + os.sep
        for name in ("tensorflow", "keras", "tf_keras")
        if (spec := importlib.util.find_spec(name)) is not None
    ),
    f"{_FRAMEWORK}{os.sep}",
)
# The frame in which `mw.function` traces; see `functions.traced`.
_TRACED = (str(_FRAMEWORK / "functions" / "traced.py"), "of_tensors")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# Ops whose first inputs are not passed to the functions that they call: how many.
_FIRST_INPUTS = dict.fromkeys(("If", "StatelessIf", "Case", "StatelessCase"), 1)
# JAX's scope, and the name of a called computation that XLA puts before it.
_PREFIX = re.compile(r"^(?:jit\([^)]*\)/)?(?:tf_program/?)?(?:call\.\d+/)?")
# Ops of gradients, an input of theirs, and the kind of op that reads it too.
_READERS = {
    "Conv2DBackpropFilter": (0, "Conv2D"),
    "Conv2DBackpropInput": (1, "Conv2D"),
    "Conv3DBackpropFilterV2": (0, "Conv3D"),
    "Conv3DBackpropInputV2": (1, "Conv3D"),
    "UnsortedSegmentSum": (1, "GatherV2"),
}
_SAME_ELEMENTS = ("Reshape", "Identity", "ExpandDims")
_TF_GRADIENT = re.compile(r"(?:.*/)?gradients/(?P<op>.+)_grad(?:/.*)?")
_TAPE_GRADIENT = re.compile(r"(?:.*/)?gradient_tape/(?P<scope>.+)/[^/]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Annotation:
    """The sharding that an annotation requests, as its TF op holds it.

    Args:
      op_sharding: a serialized OpSharding.
      unspecified_dims: numbers of the dims that completion decides.
    """

    op_sharding: bytes
    unspecified_dims: tuple[int, ...]

    def sharding(self, mesh: DeviceMesh, rank: int) -> Sharding:
        """The sharding over a program's mesh; see `Sharding.from_op_sharding`."""
        proto = xla_data_pb2.OpSharding.FromString(self.op_sharding)
        sharding = Sharding.from_op_sharding(mesh, proto, rank)
        return dataclasses.replace(sharding, unspecified=self.unspecified_dims)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Where a TF op was made.

    Args:
      op_name: the op's name in the program: calls around it, then scopes, then its own.
      op_type: TF's, such as "MatMul".
      layer: dotted path of the layer it is in, or of its name scopes outside any layer;
        for a weight's annotation the weight's path.
      file: of the user's code; "" if no frame is the user's.
      line: in the file.
      is_gradient: whether the op belongs to the gradient of the line's code.
      shapes: of its outputs, None for those that are not static.
      annotation: the requested sharding if it is an annotation, else None.
      dims: of an annotation by a plan the names of the dims, else ().
    """

    op_name: str
    op_type: str
    layer: str
    file: str
    line: int
    is_gradient: bool
    shapes: tuple[tuple[int, ...] | None, ...]
    annotation: Annotation | None = None
    dims: tuple[str, ...] = ()

    def __str__(self) -> str:
        """`folder/file.py:12`; a layer's file with all folders of the package.

        "" if no line of the user's code is known.
        """
        return place_text(self.file, self.line) if self.file else ""


class Sources:
    """The sources of a traced function's ops.

    The function is only kept, and read at the first lookup: reading the call stacks of
    the default job's 2,900 ops takes 0.16 s, a tenth of what tracing takes. The graphs
    that stay are 18 MB for all of its programs.

    Args:
      function: the traced function; with it its graphs stay alive.
    """

    def __init__(self, function):
        self._function = function

    def find(self, op_name: str, shape: tuple[int, ...] | None = None) -> Source | None:
        """The source of an op, by its name in compiled programs.

        Args:
          op_name: `op_name` of HLO metadata, or a StableHLO location. The bodies of
            different loops may share a name.
          shape: of the op's output, to tell such ops apart.
        """
        # XLA joins the names of ops that it merges; the last is the innermost.
        for part in reversed(op_name.split(";")):
            if sources := self._by_name.get(program_name(part)):
                exact = (source for source in sources if shape in source.shapes)
                return next(exact, sources[0])
        return None

    def full_name(self, node: str) -> str | None:
        """`Source.op_name` of an op that TF2XLA names without the calls around it."""
        names = self._by_name
        if node in names:
            return node
        return next((name for name in names if name.endswith(f"/{node}")), None)

    def text(self, op_name: str) -> str:
        """`op 'stack/attention/mul' (stack.attention, mine.py:12)`, for messages."""
        source = self.find(op_name)
        if source is None:
            return f"op {shown_name(op_name)!r}"
        made = ", ".join(filter(None, (source.layer, str(source))))
        return f"op {shown_name(source.op_name)!r}{f' ({made})' if made else ''}"

    @functools.cached_property
    def order(self) -> dict[str, int]:
        """By an op's `Source.op_name` its number in the order of tracing.

        Ops of a gradient come after the ops that it is the gradient of.
        """
        return {name: number for number, name in enumerate(self._by_name)}

    @functools.cached_property
    def _by_name(self) -> dict[str, list[Source]]:
        by_name: dict[str, list[Source]] = {}
        for source in _Walk().visit(self._function.graph, _Place()):
            by_name.setdefault(source.op_name, []).append(source)
        return by_name


def frame_text(frames: Sequence[traceback.FrameSummary]) -> str:
    """`folder/file.py:12` of the innermost frame of the user's code; "" without one."""
    file, line = _user_frame(frames)
    return place_text(file, line) if file else ""


def place_text(file: str, line: int) -> str:
    """`folder/file.py:12`; a layer's file with all folders of the package."""
    path = pathlib.Path(file)
    parts = path.parts[-2:]
    if path.is_relative_to(_LAYERS):
        parts = path.relative_to(_LAYERS.parent).parts
    return f"{'/'.join(parts)}:{line}"


def program_name(op_name: str) -> str:
    """An op's name without what JAX and XLA put before it."""
    return _PREFIX.sub("", op_name)


def shown_name(op_name: str) -> str:
    """An op's name as texts print it: without the call that holds the whole program.

    Keras and `tf.function` put it around the program; calls inside of it keep theirs.
    """
    head, slash, rest = op_name.partition("/")
    return rest if slash and head in _CALLS else op_name


def innermost_name(op_name: str) -> str:
    """The TF op; of ops that XLA merged the last one, which is the innermost."""
    return program_name(op_name.split(";")[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a graph is called.

    Args:
      prefix: what TF2XLA puts before the names of its ops.
      scope: the name scope that TF put around them for the same purpose.
      layer: of the call.
    """

    prefix: str = ""
    scope: str = ""
    layer: str = ""


class _Walk:
    """A walk over a graph and the graphs that its ops call."""

    def __init__(self):
        self._layers: dict[int, str] = {}

    def visit(self, graph: tf.Graph, place: _Place) -> Iterator[Source]:
        original = original_of(graph)
        # A backward part is outside the layer's scope, and its forward part comes
        # first: both are cut from the same graph.
        layer = self._layers.setdefault(id(original), place.layer) or place.layer
        place = dataclasses.replace(place, layer=layer)
        for op in graph.get_operations():
            source = _source(op, original, place)
            yield source
            for inner, _ in called_graphs(op):
                inner_place = _Place(
                    prefix=inner_prefix(op, place.prefix),
                    scope="" if op.type in _CALLS else f"{op.name}/",
                    layer=source.layer,
                )
                yield from self.visit(inner, inner_place)


@functools.cache
def _calls(op_type: str) -> bool:
    """Whether ops of a type have functions among their attributes."""
    definition = op_def_registry.get(op_type)
    return definition is not None and any("func" in a.type for a in definition.attr)


def _called(op: tf.Operation) -> list[str]:
    if not _calls(op.type):  # Making `node_def` would take many times as long.
        return []
    attributes = op.node_def.attr.values()
    single = [a.func.name for a in attributes if a.HasField("func")]
    return single + [f.name for a in attributes for f in a.list.func]


def called_graphs(op: tf.Operation) -> list[tuple[tf.Graph, int]]:
    """The graphs that an op calls, and which of its inputs is the first of each."""
    functions = map(op.graph._get_function, _called(op))
    # TF1's `Defun`, which `tf.nn.ctc_loss` still uses, keeps no graph.
    graphs = [getattr(function, "graph", None) for function in functions]
    first = _FIRST_INPUTS.get(op.type, 0)
    return [(graph, first) for graph in graphs if graph]


def inner_prefix(op: tf.Operation, prefix: str) -> str:
    """The prefix of the names of ops in the graphs that `op` calls.

    TF2XLA compiles calls in place, and gives loops and branches computations of their
    own, where names start anew.
    """
    return f"{prefix}{op.name}/" if op.type in _CALLS else ""


def _source(op: tf.Operation, original: tf.Graph, place: _Place) -> Source:
    forward = _forward_op(original_op(op, original))
    # The placeholders that TF adds to the conditions of loops have no call stack.
    file, line = _user_frame(forward.traceback or ())
    return Source(
        op_name=place.prefix + op.name,
        op_type=op.type,
        layer=_layer(forward, place),
        file=file,
        line=line,
        is_gradient=_is_gradient(op.name),
        shapes=tuple(
            tuple(t.shape) if t.shape.is_fully_defined() else None for t in op.outputs
        ),
        annotation=_annotation(op),
        dims=noted_dims(forward.graph, forward.name),
    )


def _annotation(op: tf.Operation) -> Annotation | None:
    if op.type != ANNOTATION:
        return None
    return Annotation(
        op_sharding=op.get_attr("sharding"),
        unspecified_dims=tuple(op.get_attr("unspecified_dims")),
    )


def _is_gradient(op_name: str) -> bool:
    return not {"gradients", "gradient_tape"}.isdisjoint(op_name.split("/"))


def _forward_op(op: tf.Operation) -> tf.Operation:
    """For an op of a gradient the op that it is the gradient of, if known.

    It is known by its name, or by a tensor that it reads.
    """
    if match := _TF_GRADIENT.fullmatch(op.name):
        candidates = [match["op"]]
    elif match := _TAPE_GRADIENT.fullmatch(op.name):
        # The tape names the scope in which the op was made: for most, the op's own.
        # In a layer's scope there may be several of a type, which nothing tells apart.
        among = f"{match['scope']}/{op.type}"
        candidates = [match["scope"]]
        candidates += [] if _named(op.graph, f"{among}_1") else [among]
    else:
        candidates = []
    for name in candidates:
        forward = _named(op.graph, name)
        # An annotation is made in no scope: this one only has a gradient's number by
        # chance.
        if forward is not None and forward.type != ANNOTATION:
            return forward
    return _forward_reader(op) if _is_gradient(op.name) else op


def _named(graph: tf.Graph, op_name: str) -> tf.Operation | None:
    with contextlib.suppress(KeyError):
        return graph.get_operation_by_name(op_name)
    return None


def _forward_reader(op: tf.Operation) -> tf.Operation:
    """For some ops of gradients the only op of its kind that reads the same tensor."""
    number, kind = _READERS.get(op.type, (None, ""))
    if number is None:
        return op
    tensor = op.inputs[number]
    while tensor.op.type in _SAME_ELEMENTS and _is_gradient(tensor.op.name):
        tensor = tensor.op.inputs[0]
    readers = {
        reader.name: reader
        for reader in tensor.consumers()
        if reader.type == kind and not _is_gradient(reader.name)
    }
    return next(iter(readers.values())) if len(readers) == 1 else op


def _layer(op: tf.Operation, place: _Place) -> str:
    # Of a gradient whose op is not known, the tape has the scope of that in its name.
    for name in dict.fromkeys((op.name, op.name.rpartition("gradient_tape/")[2])):
        if (noted := noted_layer(op.graph, name)) is not None:
            return noted
    if weight := noted_weight(op.graph, op.name):
        scopes = [weight]
    else:
        name = op.name.removeprefix(place.scope)
        name = name.removesuffix(f"/{PLACEHOLDER}")
        scopes = [part for part in name.split("/")[:-1] if part != "gradient_tape"]
    return ".".join(part for part in (place.layer, *scopes) if part)


def _user_frame(frames: Sequence[traceback.FrameSummary]) -> tuple[str, int]:
    """The innermost frame of the user's code in the function that is traced.

    What is around it, such as the call of `fit`, made all ops alike.
    """
    for frame in reversed(frames):  # TF makes a frame as it is asked for it.
        if (frame.filename, frame.name) == _TRACED:
            break
        if not frame.filename.startswith(_LIBRARIES):
            return frame.filename, frame.lineno
    return "", 0
