"""What one device computes and sends in a program that Shardy has completed.

The program has its collectives as ops of Shardy's (`NamedModule.complete`). What XLA
makes of it differs: it fuses, and may prefer other collectives. So this is for choosing
what to compile.
"""

from __future__ import annotations

import dataclasses
import math
import re

from jax.extend.mlir import ir
from jaxlib.mlir.dialects import sdy

from meshwright.framework.compiler.stablehlo.constraints import SHARDING_ATTRIBUTE
from meshwright.framework.compiler.stablehlo.dataflow.known_values import KnownValues
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    BRANCHES,
    WHILE,
    dot_dims,
    shape_of,
)
from meshwright.framework.sharding.mesh import DeviceMesh

_AXIS = re.compile(r'"([^"]+)"(:\(\d+\)\d+)?')
_BITS = re.compile(r"\d+")
# The dims of a convolution: "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]".
_NUMBERS = re.compile(r"\[([^\]]*)\]")
# Shardy's collectives, and their attribute with the axes.
_COLLECTIVES = {
    "sdy.all_gather": ("all-gather", "gathering_axes"),
    "sdy.all_reduce": ("all-reduce", "reduction_axes"),
    "sdy.reduce_scatter": ("reduce-scatter", "reduce_scatter_axes"),
    "sdy.all_to_all": ("all-to-all", "params"),
    "sdy.collective_permute": ("collective-permute", "out_sharding"),
}
_SLICE = "sdy.all_slice"
DOTS = ("stablehlo.dot_general", "stablehlo.dot")
_CONVOLUTION = "stablehlo.convolution"
# XLA for TPU v3 fuses an all-reduce with a slice of more columns (Tables 2 and 3).
_COLUMNS = 128
# Elements that a TPU pads the last dim of a table's rows to.
_LANES = 128
# Their operands or results are arrays in memory, whatever XLA fuses.
_MOVES = (
    "dynamic_slice",
    "transpose",
    "concatenate",
    "pad",
    "sort",
    "reduce_window",
    "select_and_scatter",
)
# They load the full table, padded, if a TPU's vector memory holds it.
_ROWS = ("gather", "scatter")
_HELD = 2**24
# They take no time, or are part of what reads them.
_FREE = (
    "constant",
    "iota",
    "reshape",
    "broadcast_in_dim",
    "bitcast_convert",
    "return",
    "convert",
    "slice",
    "optimization_barrier",
    "compare",
    "partition_id",
)


@dataclasses.dataclass(frozen=True)
class Product:
    """Products of matrices on one device, [rows, inner] x [inner, columns].

    Args:
      rows, inner, columns: sizes.
      count: how many there are in one call of the program.
      moved: bytes of operands and result of one of them.
    """

    rows: float
    inner: float
    columns: float
    count: float
    moved: float

    @property
    def flops(self) -> float:
        return 2 * self.rows * self.inner * self.columns * self.count


@dataclasses.dataclass(frozen=True)
class Sent:
    """A collective.

    Args:
      kind: as HLO names it.
      axes: the mesh axes, or parts of them, along which it is.
      bytes: those of one group's full tensor.
      count: how often it runs in one call of the program.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    count: float


@dataclasses.dataclass(kw_only=True)
class DeviceWork:
    """The work of one device in one call of a program.

    Attributes:
      products: products of matrices; convolutions as such.
      sent: collectives.
      elements: results of all other ops, counted by element.
      moved: bytes of arrays that other ops read or write.
      memory: bytes that are alive together, roughly, when most are.
    """

    products: list[Product] = dataclasses.field(default_factory=list)
    sent: list[Sent] = dataclasses.field(default_factory=list)
    elements: float = 0.0
    moved: float = 0.0
    memory: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs of products."""
        return sum(product.flops for product in self.products)


def work_of(module: ir.Operation, mesh: DeviceMesh) -> DeviceWork:
    """The work of a module that `NamedModule.complete` gave.

    Raises:
      ValueError: it has a loop whose trips are not known.
    """
    walk = _Walk(mesh)
    main = ir.SymbolTable(module)["main"].operation
    block = main.regions[0].blocks[0]
    for argument, sharding in zip(block.arguments, shardings_of(main), strict=True):
        walk.note(argument, sharding)
    arguments = sum(map(walk.bytes, block.arguments))
    walk.work.memory = arguments + walk.block(block, 1.0)
    return walk.work


def shardings_of(op) -> list[ir.Attribute | None]:
    """Shardy's sharding of each result of an op, or of each argument of a function."""
    attributes = op.attributes
    if op.name == "func.func":
        arguments = op.regions[0].blocks[0].arguments
        if "arg_attrs" not in attributes:
            return [None] * len(arguments)
        dicts = map(ir.DictAttr, ir.ArrayAttr(attributes["arg_attrs"]))
        return [
            {n.name: n.attr for n in given}.get(SHARDING_ATTRIBUTE) for given in dicts
        ]
    for name in (SHARDING_ATTRIBUTE, "out_sharding", "sharding"):
        if name in attributes and len(op.results):
            attribute = attributes[name]
            if sdy.TensorShardingPerValueAttr.isinstance(attribute):
                return list(sdy.TensorShardingPerValueAttr(attribute).shardings)
            return [attribute]
    return [None] * len(op.results)


def loop_trips(condition) -> int:
    """The trips of a loop by its condition's block; its counter starts at 0.

    Raises:
      ValueError: they are not known.
    """
    known, bounds = KnownValues(), []
    for op in condition.operations:
        if op.operation.name == "stablehlo.compare":
            bound = known.of(op.operation.operands[1])
            bounds += [] if bound is None or bound.ndim else [int(bound)]
    if not bounds:
        raise ValueError("a loop has no bound that is known")
    return max(1, min(bounds))


class _Walk:
    """Goes through a module once.

    Of each value it notes the number of shards of each dim.
    """

    def __init__(self, mesh: DeviceMesh):
        self.mesh, self.work = mesh, DeviceWork()
        self._splits: dict[ir.Value, tuple[int, ...]] = {}
        self._parsed: dict[ir.Attribute, tuple[int, ...]] = {}
        self._gathered: dict[tuple, ir.Value] = {}
        self._reduced: dict[ir.Value, int] = {}

    def note(self, value: ir.Value, sharding: ir.Attribute | None) -> None:
        """Notes the sharding of a value; None: nothing splits it."""
        if sharding is not None:
            self._splits[value] = self._of(sharding)

    def _of(self, attribute: ir.Attribute) -> tuple[int, ...]:
        """The shards of each dim."""
        if attribute not in self._parsed:
            self._parsed[attribute] = tuple(
                self.mesh.axes_size(axes_in(str(dim)))
                for dim in sdy.TensorShardingAttr(attribute).dimension_shardings
            )
        return self._parsed[attribute]

    def splits(self, value: ir.Value) -> tuple[int, ...]:
        """The number of shards of each dim."""
        return self._splits.get(value) or (1,) * len(shape_of(value))

    def local(self, value: ir.Value) -> list[int]:
        """A device's shape of a value."""
        pairs = zip(shape_of(value), self.splits(value), strict=True)
        return [-(-size // shards) for size, shards in pairs]

    def bytes(self, value: ir.Value) -> float:
        """A device's bytes of a value."""
        return math.prod(self.local(value)) * itemsize(value)

    def _padded(self, value: ir.Value) -> float:
        """A device's bytes of a value, with rows padded to a TPU's lanes."""
        *others, last = self.local(value) or [1]
        return math.prod(others) * -(-last // _LANES) * _LANES * itemsize(value)

    def _rows(self, op) -> float:
        """The bytes that a gather or a scatter of rows moves."""
        table, result = self._padded(op.operands[0]), op.results[0]
        loaded = table if table <= _HELD else 0
        if op.name == "stablehlo.gather":
            return loaded + 2 * self._padded(result)
        return loaded + 2 * self._padded(op.operands[2]) + self._padded(result)

    def block(self, block, times: float) -> float:
        """Adds the work of a block that runs so many times.

        Returns:
          Bytes alive together in it, without its arguments.
        """
        live = _Live(self, block)
        for position, op in enumerate(block.operations):
            op = op.operation
            inside = self.op(op, times)
            live.after(position, op, inside)
        return live.peak

    def op(self, op, times: float) -> float:
        """Adds the work of an op; the bytes alive within it."""
        self._note_results(op)
        if op.name == WHILE:
            return self._loop(op, times)
        if op.name in BRANCHES:
            blocks = [region.blocks[0] for region in op.regions]
            return max(self.block(block, times / len(blocks)) for block in blocks)
        if op.name == _SLICE:
            self._slice(op, times)
        elif op.name in _COLLECTIVES:
            self._collective(op, times)
        elif op.name in DOTS:
            self._product(op, times)
        elif op.name == _CONVOLUTION:
            self._convolution(op, times)
        elif len(op.results):
            self._other(op, times)
        return 0.0

    def _note_results(self, op) -> None:
        for result, sharding in zip(op.results, shardings_of(op), strict=True):
            self.note(result, sharding)

    def _loop(self, op, times: float) -> float:
        condition, body = (region.blocks[0] for region in op.regions)
        for number, result in enumerate(op.results):
            if result in self._splits:
                for block in (condition, body):
                    self._splits[block.arguments[number]] = self._splits[result]
        return self.block(body, times * loop_trips(condition))

    def _collective(self, op, times: float) -> None:
        kind, name = _COLLECTIVES[op.name]
        operand, result = op.operands[0], op.results[0]
        key = (operand, op.attributes["out_sharding"], op.name)
        if key in self._gathered:  # XLA has equal ones once.
            return
        self._gathered[key] = result
        axes = tuple(axes_in(str(op.attributes[name])))
        size = self.bytes(result if kind == "all-gather" else operand)
        self._reduced[result] = len(self.work.sent)
        self.work.sent.append(Sent(kind, axes, size, times))

    def _slice(self, op, times: float) -> None:
        """What keeps its slice of an all-reduce is a reduce-scatter along its axes.

        Not where a slice has few columns: there XLA for TPUs keeps the two apart. Any
        other slice is read and written.
        """
        operand, result = op.operands[0], op.results[0]
        number = self._reduced.get(operand)
        if number is None or self.work.sent[number].kind != "all-reduce":
            self.work.moved += 2 * times * self.bytes(result)
            return
        is_minor = self.splits(result)[-1:] != self.splits(operand)[-1:]
        if is_minor and self.local(result)[-1] <= _COLUMNS:
            return
        reduced = self.work.sent[number]
        kept = tuple(axes_in(str(op.attributes["slicing_axes"])))
        scattered = tuple(axis for axis in reduced.axes if axis in kept)
        rest = tuple(axis for axis in reduced.axes if axis not in kept)
        if not scattered:
            return
        self.work.sent[number] = dataclasses.replace(
            reduced, kind="reduce-scatter", axes=scattered
        )
        self._reduced[result] = number
        if rest:
            size = reduced.bytes / self.mesh.axes_size(scattered)
            self.work.sent.append(dataclasses.replace(reduced, axes=rest, bytes=size))

    def _add_up(self, op) -> None:
        """What is reduced and then added up XLA adds up first: one is left."""
        first, second = (self._reduced.get(operand) for operand in op.operands)
        if first is None or second is None or first == second:
            return
        sent = self.work.sent
        if sent[first] == sent[second] and "reduce" in sent[first].kind:
            sent[second] = dataclasses.replace(sent[second], count=0)
            self._reduced[op.results[0]] = first

    def _product(self, op, times: float) -> None:
        left, right = op.operands
        batching, contracting = dot_dims(op, len(shape_of(left)))
        sizes, others = self.local(left), self.local(right)
        batch = math.prod(sizes[d] for d in batching[0])
        inner = math.prod(sizes[d] for d in contracting[0])
        rows = math.prod(sizes) / max(1, batch * inner)
        columns = math.prod(others) / max(1, batch * inner)
        moved = sum(map(self.bytes, (left, right, op.results[0]))) / max(1, batch)
        self.work.products.append(Product(rows, inner, columns, times * batch, moved))

    def _convolution(self, op, times: float) -> None:
        image, kernel = op.operands
        numbers = str(op.attributes["dimension_numbers"])
        dims = [found.split(", ") for found in _NUMBERS.findall(numbers)]
        output = dims[1].index("o")
        result, taps = self.local(op.results[0]), self.local(kernel)
        columns = taps[output]
        inner = math.prod(taps) / max(1, columns)
        rows = math.prod(result) / max(1, columns)
        moved = sum(map(self.bytes, (image, kernel, op.results[0])))
        self.work.products.append(Product(rows, inner, columns, times, moved))
        self._halos(op, times, dims)

    def _halos(self, op, times: float, dims: list[list[str]]) -> None:
        """What windows reach of neighbours' parts of the image is sent, and joined."""
        image, kernel = op.operands
        window, output = (
            dict(zip(names, shape_of(value), strict=True))
            for names, value in zip(dims[1:], (kernel, op.results[0]), strict=True)
        )
        sizes, splits = self.local(image), self.splits(image)
        for name, size, shards in zip(dims[0], sizes, splits, strict=True):
            halo = min(window[name], output[name]) - 1 if name.isdigit() else 0
            if halo > 0 and shards > 1:
                sent = self.bytes(image) * halo / size
                self.work.sent.append(Sent("collective-permute", (), sent, times))
                self.work.moved += 2 * times * self.bytes(image)

    def _other(self, op, times: float) -> None:
        name = op.name.rpartition(".")[2]
        if name in _FREE:
            if len(op.operands) == 1 and op.operands[0] in self._reduced:
                self._reduced[op.results[0]] = self._reduced[op.operands[0]]
            return
        if name == "add":
            self._add_up(op)
        if name == "dynamic_update_slice":
            self.work.moved += 2 * times * self.bytes(op.operands[1])
        elif name in _ROWS:
            self.work.moved += times * self._rows(op)
        elif name in _MOVES:
            self.work.moved += 2 * times * sum(map(self.bytes, op.results))
        elif name == "reduce":
            half = len(op.operands) // 2
            for operand in list(op.operands)[:half]:
                self.work.elements += times * math.prod(self.local(operand))
        else:
            sizes = (math.prod(self.local(result)) for result in op.results)
            self.work.elements += times * sum(sizes)


class _Live:
    """Counts what is alive in a block, op by op.

    Of what is computed element by element nothing is counted: most of it is fused into
    what reads it.
    """

    def __init__(self, walk: _Walk, block):
        self._walk = walk
        self._last: dict[ir.Value, int] = {}
        self._sources: dict[ir.Value, ir.Value] = {}
        self._sizes: dict[ir.Value, float] = {}
        self._ends: dict[int, list[ir.Value]] = {}
        self.now = self.peak = 0.0
        outside = list(block.arguments)
        self._kept = set(outside)
        for position, op in enumerate(block.operations):
            op = op.operation
            for operand in op.operands:
                self._last[self._source(operand)] = position
            for region in op.regions:
                self._read_inside(region, position)
            if len(op.results) and op.name.rpartition(".")[2] in _ALIASES:
                self._sources[op.results[0]] = self._source(op.operands[0])
        for value, position in self._last.items():
            self._ends.setdefault(position, []).append(value)

    def _source(self, value: ir.Value) -> ir.Value:
        return self._sources.get(value, value)

    def _read_inside(self, region, position: int) -> None:
        for block in region.blocks:
            for op in block.operations:
                for operand in op.operation.operands:
                    self._last[self._source(operand)] = position
                for inner in op.operation.regions:
                    self._read_inside(inner, position)

    def after(self, position: int, op, inside: float) -> None:
        """Counts an op, within which so many bytes are alive."""
        self.peak = max(self.peak, self.now + inside)
        if _is_stored(op):
            for result in op.results:
                self._sizes[result] = self._walk.bytes(result)
                self.now += self._sizes[result]
            if op.name == WHILE or op.name.endswith("dynamic_update_slice"):
                self._take_over(position, op)
        self.peak = max(self.peak, self.now)
        for value in self._ends.get(position, ()):
            self.now -= self._sizes.pop(value, 0.0)

    def _take_over(self, position: int, op) -> None:
        """The op's results lie where operands lay that nothing reads any more."""
        for operand in list(op.operands)[: len(op.results)]:
            source = self._source(operand)
            if self._last.get(source) == position:
                self.now -= self._sizes.pop(source, 0.0)
                if source in self._kept:
                    self.now -= self._walk.bytes(source)
                    self._kept.discard(source)


_ALIASES = ("reshape", "optimization_barrier", "reshard", "bitcast_convert")
_STORED = (
    WHILE,
    *BRANCHES,
    *DOTS,
    _CONVOLUTION,
    *_COLLECTIVES,
    "stablehlo.dynamic_update_slice",
)


def _is_stored(op) -> bool:
    return op.name in _STORED


def axes_in(text: str) -> list[str]:
    """The mesh axes, or parts of them, that a text of Shardy's names."""
    return [axis + part for axis, part in _AXIS.findall(text)]


def itemsize(value: ir.Value) -> float:
    element = str(ir.RankedTensorType(value.type).element_type)
    bits = _BITS.search(element)
    size = max(8, int(bits[0])) / 8 if bits else 4
    return 2 * size if element.startswith("complex") else size
