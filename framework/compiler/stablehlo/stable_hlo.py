"""Small tools for StableHLO modules in MLIR's Python form."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.lowering.sources import Sources, innermost_name
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.placeholders import PREFIX, mesh_text
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.xla_form import ints

INTO_MANUAL, OUT_OF_MANUAL = "auto_to_manual", "manual_to_auto"
NUMBER = "number"
"""The attribute that identifies ops after propagation."""
FRONTEND_ATTRIBUTES = "mhlo.frontend_attributes"
"""XLA's attributes of an op that outlive its passes."""
WHILE = "stablehlo.while"
BRANCHES = ("stablehlo.case", "stablehlo.if")
DimAxes = Sequence[Sequence[str]]
"""For each dim of a tensor the axes that split it."""
_EFFECTS = (
    "stablehlo.infeed",
    "stablehlo.outfeed",
    "stablehlo.recv",
    "stablehlo.send",
)
_HLO_NAMES = {"i1": "pred", "complex<f32>": "c64", "complex<f64>": "c128"}
_COMPLEX_ZEROS = "dense<(0.000000e+00,0.000000e+00)>"
_RESULT = "XLA_Retvals"
_UNSPECIFIED = re.compile(r"unspecified_dims=\[(?P<dims>[\d,]*)\]")
_NAME = re.compile(r'loc\((?:fused\[)?"([^"]+)"')


def walk(op) -> Iterator:
    """The operations in the regions of `op`, outer operations first."""
    for region in op.regions:
        for block in region.blocks:
            for view in list(block.operations):
                inner = view.operation
                yield inner
                if len(inner.regions):  # One generator per op would take twice as long.
                    yield from walk(inner)


def end_of(block) -> Any:
    """The operation that ends a block."""
    return block.operations[len(block.operations) - 1].operation


def operand_places(op) -> list[tuple[Any, int]]:
    """(operation, operand number) where `op`, or an op in it, uses an outside value."""
    places = [(op, number) for number in range(len(op.operands))]
    if not len(op.regions):
        return places
    inside = set(_arguments_inside(op))
    for user in walk(op):  # What an op uses was made before it.
        places += [(user, i) for i, v in enumerate(user.operands) if v not in inside]
        inside.update(user.results)
        inside.update(_arguments_inside(user))
    return places


def _arguments_inside(op) -> Iterator[ir.Value]:
    """The arguments of the blocks of an op's own regions."""
    for region in op.regions:
        for block in region.blocks:
            yield from block.arguments


def operands_of(op) -> list:
    """The values from outside that `op` uses, in its regions too."""
    if not len(op.regions):
        return list(op.operands)
    return [user.operands[i] for user, i in operand_places(op)]


def rows_of(tensor: ir.Value, dim: int, start: int, limit: int) -> ir.Value:
    """A slice of one dim of a tensor, at the current insertion point."""
    limits = list(shape_of(tensor))
    starts, steps = [0] * len(limits), [1] * len(limits)
    starts[dim], limits[dim] = start, limit
    arrays = map(ir.DenseI64ArrayAttr.get, (starts, limits, steps))
    return stablehlo.slice(tensor, *arrays)


def cut_end(tensor: ir.Value, shape: Sequence[int]) -> ir.Value:
    """A tensor cut to `shape` at its dims' ends, at the current insertion point."""
    if shape_of(tensor) == tuple(shape):
        return tensor
    none = [0] * len(shape)
    return stablehlo.slice(tensor, none, list(shape), [1] * len(shape))


def pad_end(
    tensor: ir.Value, shape: Sequence[int], filler: ir.Value | None = None
) -> ir.Value:
    """A tensor filled up to `shape` at its dims' ends, at the current insertion point.

    Args:
      tensor: the tensor.
      shape: the shape that it gets.
      filler: a scalar; zero by default.
    """
    more = [new - old for new, old in zip(shape, shape_of(tensor), strict=True)]
    if not any(more):
        return tensor
    filler = filler or zeros(tensor_type(tensor.type, ()))
    none = [0] * len(more)
    return stablehlo.pad(tensor, filler, none, more, none)


def after(value: ir.Value) -> ir.InsertionPoint:
    """The first point at which a value can be used."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return ir.InsertionPoint.at_block_begin(owner)
    return ir.InsertionPoint.after(owner.operation)


def replace_result(op, value: ir.Value) -> None:
    """Replaces a result by a value, whose op gets the number if it has none."""
    maker, number = value.owner, op.attributes.get(NUMBER)
    has_none = not isinstance(maker, ir.Block) and NUMBER not in maker.attributes
    if number is not None and has_none:
        maker.attributes[NUMBER] = number
    op.results[0].replace_all_uses_with(value)


def op_name(op) -> str:
    """The name of the TF op that an operation came from, `?` if it has none."""
    match = _NAME.search(str(op.location))
    return match[1] if match else "?"


def tf_name(op) -> str:
    """The name as `Source.op_name` has it, of the innermost if ops were merged."""
    return innermost_name(op_name(op))


@dataclasses.dataclass(frozen=True)
class Blame:
    """Names in messages the TF op that an operation came from.

    Args:
      program: the program's name.
      sources: where its ops come from.
    """

    program: str
    sources: Sources

    def error(self, op, what: str) -> LoweringError:
        """`program: op 'stack/attention/mul' (stack.attention, mine.py:12) <what>`."""
        name = op_name(op)
        while name == _RESULT and not isinstance(op.operands[0].owner, ir.Block):
            op = op.operands[0].owner  # A program's results are copies by TF2XLA.
            name = op_name(op)
        return LoweringError(f"{self.program}: {self.sources.text(name)} {what}")


@dataclasses.dataclass(frozen=True)
class Placeholder:
    """A custom call of `framework/sharding/placeholders.py`."""

    kind: str
    config: dict[str, Any]

    @property
    def mesh(self) -> str:
        return self.config["mesh"]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.config["axes"])


def call_target(op) -> str | None:
    """The name that a custom call calls; None for other operations."""
    if op.name != "stablehlo.custom_call":
        return None
    return ir.StringAttr(op.attributes["call_target_name"]).value


def note_cycles(op, cycles: int) -> None:
    """Says what a kernel takes, of which compilers know nothing, see `step_time`."""
    text = ir.StringAttr.get(str(cycles))
    op.attributes[FRONTEND_ATTRIBUTES] = ir.DictAttr.get({"meshwright_cycles": text})


def is_annotation(op) -> bool:
    """Whether an op is an annotation as made by TF."""
    return call_target(op) == "Sharding"


def placeholder_of(op) -> Placeholder | None:
    """The placeholder that `op` is, None if it is no placeholder of ours."""
    target = call_target(op)
    if target is None or not target.startswith(PREFIX):
        return None
    config = json.loads(ir.StringAttr(op.attributes["backend_config"]).value)
    return Placeholder(target.removeprefix(PREFIX), config)


def check_axes(
    blame: Blame,
    op,
    placeholder: Placeholder | None,
    manual: Sequence[str],
    mesh: DeviceMesh,
) -> None:
    """Refuses a collective along an axis that is not manual in its region.

    Raises:
      LoweringError: the op is such a collective.
    """
    if placeholder is not None and not mesh.entire(placeholder.axes) <= set(manual):
        raise blame.error(
            op,
            f"is a collective along {', '.join(placeholder.axes)} in a region manual "
            f"along {', '.join(manual)}",
        )


def has_side_effect(op) -> bool:
    """Whether an op does more than compute its results."""
    if is_annotation(op) or "has_side_effect" not in op.attributes:
        return op.name in _EFFECTS
    return ir.BoolAttr(op.attributes["has_side_effect"]).value


def is_of_region(op) -> bool:
    """Whether an annotation is for a manual region; so far only we put any there."""
    return "manual" in ir.StringAttr(op.attributes["mhlo.sharding"]).value


def border_config(
    mesh: DeviceMesh, axes: Sequence[str], dims: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """The config of a placeholder at the border of a manual region."""
    return {"mesh": mesh_text(mesh), "axes": list(axes), "dims": [[*d] for d in dims]}


def placeholder_call(kind: str, value, result_type, config: dict[str, Any]):
    """A placeholder as TF would have made it, at the current insertion point."""
    call = stablehlo.CustomCallOp(
        [result_type],
        [value],
        call_target_name=PREFIX + kind,
        backend_config=ir.StringAttr.get(json.dumps(config)),
    )
    return call.results[0]


def into_manual(
    value: ir.Value, mesh: DeviceMesh, axes: Sequence[str], dims: DimAxes
) -> ir.Value:
    """A device's shard of a tensor, in a region that is manual along `axes`.

    Args:
      value: the tensor; it is read at the current insertion point.
      mesh: the program's mesh.
      axes: the manual axes of the region.
      dims: for each dim those of them that split it.
    """
    shape = Sharding(mesh, tuple(map(tuple, dims))).shard_shape(shape_of(value))
    config = border_config(mesh, axes, dims)
    return placeholder_call(INTO_MANUAL, value, tensor_type(value.type, shape), config)


def out_of_manual(
    local: ir.Value, mesh: DeviceMesh, axes: Sequence[str], dims: DimAxes
) -> ir.Value:
    """The tensor of which devices have even shards in a manual region.

    Args:
      local: a device's shard; it is read at the current insertion point.
      mesh, axes, dims: see `into_manual`.
    """
    pairs = zip(shape_of(local), dims, strict=True)
    shape = [size * mesh.axes_size(split) for size, split in pairs]
    config = border_config(mesh, axes, dims)
    return placeholder_call(
        OUT_OF_MANUAL, local, tensor_type(local.type, shape), config
    )


def with_sharding(value: ir.Value, sharding: Sharding) -> ir.Value:
    """A tensor with an annotation, at the current insertion point."""
    text = sharding.to_hlo()
    return sharding_call("Sharding", value, value.type, text, sharding.unspecified)


def sharding_call(
    target: str, value, result_type, sharding: str, unspecified: tuple[int, ...] = ()
):
    """A custom call that carries an HLO sharding, at the current insertion point."""
    listed = ",".join(map(str, unspecified))
    call = stablehlo.CustomCallOp(
        [result_type],
        [value],
        call_target_name=target,
        backend_config=ir.StringAttr.get(
            f"unspecified_dims=[{listed}]" if unspecified else ""
        ),
    )
    call.operation.attributes["mhlo.sharding"] = ir.StringAttr.get(sharding)
    return call.results[0]


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """The sizes of a tensor's dims."""
    return tuple(ir.RankedTensorType(value.type).shape)


def short_name(op) -> str:
    """`add` for `stablehlo.add`."""
    return op.name.split(".")[-1]


def element_type(value: ir.Value) -> ir.Type:
    """The type of a tensor's elements."""
    return ir.RankedTensorType(value.type).element_type


def dtype_of(value: ir.Value) -> str:
    """The element type's name, as HLO has it."""
    name = str(element_type(value))
    return _HLO_NAMES.get(name) or name.replace("ui", "u").replace("i", "s").lower()


def location_of(value: ir.Value) -> ir.Location:
    """The location of the op that makes a value."""
    owner = value.owner
    return ir.Location.unknown() if isinstance(owner, ir.Block) else owner.location


def integers(op, name: str) -> list[int]:
    """The numbers of an op's attribute that is an array."""
    return list(ir.DenseI64ArrayAttr(op.attributes[name]))


def dot_dims(op, rank: int) -> tuple[list[list[int]], list[list[int]]]:
    """The batching and the contracting dims of a product, for each operand.

    Args:
      op: the product.
      rank: the rank of its first operand.
    """
    if op.name == "stablehlo.dot":
        return [[], []], [[rank - 1], [0]]
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    return (
        [list(numbers.lhs_batching_dimensions), list(numbers.rhs_batching_dimensions)],
        [
            list(numbers.lhs_contracting_dimensions),
            list(numbers.rhs_contracting_dimensions),
        ],
    )


def reduced_dims(op) -> list[int]:
    """The dims that a `stablehlo.reduce` reduces."""
    return integers(op, "dimensions")


def adds(op, region: int = 0) -> bool:
    """Whether a reduction or a scatter adds up, by the given region of it."""
    block = op.regions[region].blocks[0]
    names = [inner.operation.name for inner in block.operations]
    return names == ["stablehlo.add", "stablehlo.return"]


def constant_of(value: ir.Value) -> float | None:
    """The number that a scalar constant holds, None for other values."""
    while not isinstance(value.owner, ir.Block):
        maker = value.owner
        if maker.name == "stablehlo.constant":
            splat = ir.DenseElementsAttr(maker.attributes["value"]).get_splat_value()
            element = element_type(value)
            is_integer = isinstance(element, ir.IntegerType)
            return float((ir.IntegerAttr if is_integer else ir.FloatAttr)(splat).value)
        if maker.name not in ("stablehlo.convert", "stablehlo.reshape"):
            return None
        value = maker.operands[0]
    return None


def is_constant_zero(op) -> bool:
    """Whether an op is a constant that is 0 everywhere."""
    if op.name != "stablehlo.constant":
        return False
    if isinstance(element_type(op.results[0]), ir.ComplexType):
        return _COMPLEX_ZEROS in str(op)  # Python has no form of the attribute.
    numbers = ir.DenseElementsAttr(op.attributes["value"])
    scalar = numbers.get_splat_value() if numbers.is_splat else None
    return isinstance(scalar, ir.FloatAttr | ir.IntegerAttr) and scalar.value == 0


def tensor_type(like, shape) -> ir.Type:
    """A tensor type of `like`'s element type."""
    element = ir.RankedTensorType(like).element_type
    return ir.RankedTensorType.get(list(shape), element)


def zeros(type_: ir.Type) -> ir.Value:
    """A tensor of zeros, at the current insertion point."""
    element = ir.RankedTensorType(type_).element_type
    if isinstance(element, ir.ComplexType):
        shape = ir.RankedTensorType(type_).shape
        part = zeros(ir.RankedTensorType.get(shape, element.element_type))
        return stablehlo.complex(part, part)
    is_integer = isinstance(element, ir.IntegerType)
    zero = (
        ir.IntegerAttr.get(element, 0) if is_integer else ir.FloatAttr.get(element, 0.0)
    )
    return stablehlo.constant(ir.DenseElementsAttr.get_splat(type_, zero))


def keep_precision(op, product: ir.Value) -> None:
    """Gives a product the precision of the product that it replaces."""
    name = "precision_config"
    if name in op.attributes:
        product.owner.operation.attributes[name] = op.attributes[name]


def copy_floating(
    op,
    is_floating: Callable[[ir.Value], bool],
    copies: dict[ir.Value, ir.Value],
    finish: Callable[[Any], Sequence[ir.Value]],
) -> None:
    """Gives `op`, which is in a manual region, its own copies of floating values.

    Args:
      op: the operation; copies are made at the current insertion point.
      is_floating: whether a value is made of constants only.
      copies: the copies that the region has already, by value.
      finish: makes a copied op part of the region; returns its results.
    """
    for user, i in operand_places(op):
        value = user.operands[i]
        if not is_floating(value):
            continue
        if value not in copies:
            source = value.owner
            copy = source.clone(ir.InsertionPoint.current)
            with ir.InsertionPoint(copy):
                copy_floating(copy, is_floating, copies, finish)
            copies.update(zip(source.results, finish(copy), strict=True))
        user.operands[i] = copies[value]


def requested_sharding(op, mesh: DeviceMesh) -> Sharding:
    """The sharding that TF's annotation requests; see `Sharding.from_hlo`.

    Raises:
      ValueError: the annotation spans other devices than `mesh`.
    """
    text = ir.StringAttr(op.attributes["mhlo.sharding"]).value
    rank = ir.RankedTensorType(op.operands[0].type).rank
    sharding = Sharding.from_hlo(mesh, text, rank)
    config = ir.StringAttr(op.attributes["backend_config"]).value
    match = _UNSPECIFIED.search(config)
    left = tuple(ints(match["dims"])) if match else ()
    return dataclasses.replace(sharding, unspecified=left)
