"""The products of a program, with the names by which their dims are split.

From them follows roughly, and for many plans at once, what a plan computes and sends.
"""

from __future__ import annotations

import dataclasses
import enum

from jax.extend.mlir import ir
from jaxlib.mlir.dialects import sdy

from meshwright.framework.compiler.stablehlo.shardy.device_work import (
    DOTS,
    axes_in,
    itemsize,
    loop_trips,
    shardings_of,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    WHILE,
    dot_dims,
    shape_of,
)


class Side(enum.Enum):
    """Where a dim of a product lies."""

    BATCH = enum.auto()  # In both operands and the result.
    ROWS = enum.auto()  # In the first operand and the result.
    COLUMNS = enum.auto()  # In the second operand and the result.
    INNER = enum.auto()  # In both operands, summed over.


@dataclasses.dataclass(frozen=True)
class NamedDim:
    """A dim of a product.

    Args:
      side: where it lies.
      size: its size.
      left, right, out: names that split it in the operands and the result.
    """

    side: Side
    size: int
    left: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    out: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class NamedProduct:
    """A product of two tensors.

    Args:
      dims: its dims.
      itemsizes: bytes of an element of both operands and the result.
      count: how often it is computed in one call of the program.
    """

    dims: tuple[NamedDim, ...]
    itemsizes: tuple[float, float, float]
    count: int


def named_products(module: ir.Operation) -> list[NamedProduct]:
    """The products of a module that `NamedModule.named` gave."""
    main = ir.SymbolTable(module)["main"].operation
    block = main.regions[0].blocks[0]
    names = {}
    for value, attribute in zip(block.arguments, shardings_of(main), strict=True):
        if attribute is not None:
            names[value] = _names(attribute)
    return list(_of_block(block, 1, names))


def _names(attribute) -> tuple[tuple[str, ...], ...]:
    dims = sdy.TensorShardingAttr(attribute).dimension_shardings
    return tuple(tuple(axes_in(str(dim))) for dim in dims)


def _of_block(block, count, names):
    for op in block.operations:
        op = op.operation
        for result, attribute in zip(op.results, shardings_of(op), strict=True):
            if attribute is not None:
                names[result] = _names(attribute)
        if op.name == WHILE:
            condition, body = (region.blocks[0] for region in op.regions)
            for argument, result in zip(body.arguments, op.results, strict=True):
                names[argument] = names.get(result)
            yield from _of_block(body, count * loop_trips(condition), names)
        elif op.name in DOTS:
            yield _product(op, count, names)
        else:
            for region in op.regions:
                for inner in region.blocks:
                    yield from _of_block(inner, count, names)


def _product(op, count, names) -> NamedProduct:
    left, right = op.operands
    (out,) = op.results
    shapes = shape_of(left), shape_of(right)
    of = [
        names.get(value) or ((),) * len(shape_of(value)) for value in (left, right, out)
    ]
    batching, contracting = dot_dims(op, len(shapes[0]))
    dims, place = [], 0
    for i, j in zip(*batching, strict=True):
        dims.append(
            NamedDim(Side.BATCH, shapes[0][i], of[0][i], of[1][j], of[2][place])
        )
        place += 1
    for number, side in enumerate((Side.ROWS, Side.COLUMNS)):
        for d, size in enumerate(shapes[number]):
            if d in batching[number] or d in contracting[number]:
                continue
            mine = of[number][d]
            both = (mine, ()) if number == 0 else ((), mine)
            dims.append(NamedDim(side, size, *both, of[2][place]))
            place += 1
    for i, j in zip(*contracting, strict=True):
        dims.append(NamedDim(Side.INNER, shapes[0][i], of[0][i], of[1][j]))
    sizes = itemsize(left), itemsize(right), itemsize(out)
    return NamedProduct(tuple(dims), sizes, count)
