"""What four devices hold of tensors, computed by hand: an oracle for sharding types.

It knows no rules. It tries every way in which each device could do an op on what it
holds, or on a part cut from that as another operand is cut, and looks whether some type
says what comes out.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from meshwright.framework.compiler.sharding_types.tensor_type import (
    PartialValue,
    TensorType,
)
from tests.framework.types.typed import MESH

AXES = MESH.axis_names
DEVICES = list(np.ndindex(*MESH.shape))
_COMBINE = {"sum": np.add, "max": np.maximum}


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An op on whole tensors and on devices' parts alike.

    Args:
      text: in StableHLO, of operands %0, %1.
      shape: of the result.
      compute: of arrays and the shape wanted; None or ValueError: it cannot be done.
    """

    text: str
    shape: tuple[int, ...]
    compute: Callable[..., np.ndarray | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """A tensor, and what each device has of it."""

    type: TensorType
    whole: np.ndarray
    parts: dict

    @classmethod
    def of(cls, type_: TensorType, tensor: np.ndarray, random) -> "Held":
        """Of any parts that a partial sum may have: large ones, of both signs."""
        pending = [n for n, axis in enumerate(AXES) if type_.partial_along(axis)]
        sums = {(): tensor}
        for number in pending:
            for place in list(sums):
                rest = sums.pop(place)
                for i in range(1, MESH.shape[number]):
                    sums[*place, i] = random.integers(-(10**9), 10**9, rest.shape)
                    rest = rest - sums[*place, i]
                sums[*place, 0] = rest
        parts = {
            device: cut(sums[tuple(device[n] for n in pending)], type_.dims, device)
            for device in DEVICES
        }
        return cls(type_, tensor, parts)

    def forms(self, axes) -> list[dict]:
        """What devices have of it, or could cut from that along these axes."""
        unsplit = [
            axis
            for axis in axes
            if not self.type.splits(axis) and not self.type.partial_along(axis)
        ]
        forms = []
        for steps in _cuts(unsplit, self.whole.ndim):
            form = {d: _cut_further(self.parts[d], steps, d) for d in DEVICES}
            if all(part is not None for part in form.values()):
                forms.append(form)
        return forms


def plain(shape, dims, **how):
    return TensorType(mesh=MESH, element="f32", shape=shape, dims=dims, **how)


def cut(part, dims, device):
    """The shard that a device has of an array."""
    for dim, axes in enumerate(dims):
        for axis in axes:
            number = AXES.index(axis)
            size = part.shape[dim] // MESH.shape[number]
            start = device[number] * size
            part = part.take(range(start, start + size), axis=dim)
    return part


def shard_shape(type_):
    sizes = [MESH.axes_size(axes) for axes in type_.dims]
    return tuple(n // size for n, size in zip(type_.shape, sizes, strict=True))


def says(type_, parts, tensor):
    """Whether a type tells how these parts make up this tensor."""
    if any(parts[device].shape != shard_shape(type_) for device in DEVICES):
        return False
    for number, axis in enumerate(AXES):
        kind = type_.partial_along(axis)
        kept = {}
        for device in parts:
            first = (*device[:number], 0, *device[number + 1 :])
            if kind is not None:
                had = kept.get(first)
                part = parts[device]
                kept[first] = part if had is None else _COMBINE[kind.kind](had, part)
            elif type_.splits(axis):
                kept[device] = parts[device]
            elif not np.array_equal(parts[device], parts[first]):
                return False
            else:
                kept[first] = parts[first]
        parts = kept
    return all(
        np.array_equal(part, cut(tensor, type_.dims, device))
        for device, part in parts.items()
    )


def can_do(op: Op, operands: Sequence[Held], type_: TensorType) -> bool:
    """Whether devices can compute a result of this type, each its own part alone."""
    result = op.compute(*(operand.whole for operand in operands), shape=op.shape)
    axes = [axis for axis in AXES if any(o.type.splits(axis) for o in operands)]
    for chosen in itertools.product(*(operand.forms(axes) for operand in operands)):
        parts = _on_devices(op, chosen, shard_shape(type_))
        if parts is not None and says(type_, parts, result):
            return True
    return False


def possible_type(op: Op, operands: Sequence[Held]) -> TensorType | None:
    """A type of which devices can compute the result, if any is."""
    return next((t for t in _all_types(op.shape) if can_do(op, operands, t)), None)


def _on_devices(op: Op, chosen: Sequence[dict], shape) -> dict | None:
    parts = {}
    for device in DEVICES:
        try:
            part = op.compute(*(form[device] for form in chosen), shape=shape)
        except ValueError:
            return None
        if part is None or part.shape != shape:
            return None
        parts[device] = part
    return parts


def _cuts(axes, rank):
    """Ways to split dims further by some of the axes; their order counts in one dim."""
    for count in range(len(axes) + 1):
        for chosen in itertools.permutations(axes, count):
            for dims in itertools.product(range(rank), repeat=count):
                if len(set(dims)) < count or list(chosen) == sorted(chosen):
                    yield list(zip(chosen, dims, strict=True))


def _cut_further(part, steps, device):
    for axis, dim in steps:
        if part.shape[dim] % MESH.axis_size(axis):
            return None
        dims = [(axis,) if i == dim else () for i in range(part.ndim)]
        part = cut(part, dims, device)
    return part


@functools.cache
def _all_types(shape) -> list[TensorType]:
    """All types without anything reduced."""
    states = [*range(len(shape)), "whole", "sum", "max"]
    types = []
    for order in itertools.permutations(AXES):
        for chosen in itertools.product(states, repeat=len(AXES)):
            of = dict(zip(order, chosen, strict=True))
            dims = tuple(
                tuple(axis for axis in order if of[axis] == dim)
                for dim in range(len(shape))
            )
            partial = tuple(
                PartialValue(axis=axis, kind=of[axis])
                for axis in AXES
                if of[axis] in ("sum", "max")
            )
            counts = [MESH.axes_size(axes) for axes in dims]
            even = all(n % k == 0 for n, k in zip(shape, counts, strict=True))
            # A maximum of sums is no sum of maxima: there is no type for both.
            if even and len({combined.kind for combined in partial}) < 2:
                types.append(plain(shape, dims, partial=partial))
    return list(dict.fromkeys(types))


def elementwise(name, function, shape, count):
    return Op(
        f"stablehlo.{name} {', '.join(f'%{i}' for i in range(count))} : "
        f"{_tensor(shape)}",
        shape,
        lambda *parts, shape: (
            function(*parts) if len({part.shape for part in parts}) == 1 else None
        ),
    )


def transposed(shape, order):
    new = tuple(shape[dim] for dim in order)
    text = f"stablehlo.transpose %0, dims = {list(order)} : {_arrow([shape], new)}"
    return Op(text, new, lambda x, shape: x.transpose(order))


def reshaped(old, new):
    text = f"stablehlo.reshape %0 : {_arrow([old], new)}"
    return Op(text, new, lambda x, shape: x.reshape(shape))


def broadcast(old, size, leading):
    new = (size, *old) if leading else (*old, size)
    added = 0 if leading else len(old)
    dims = [dim for dim in range(len(new)) if dim != added]
    text = f"stablehlo.broadcast_in_dim %0, dims = {dims} : {_arrow([old], new)}"

    def compute(x, **_):
        return np.repeat(x[None] if leading else x[..., None], size, added)

    return Op(text, new, compute)


def reduced(shape, dims, adds):
    new = tuple(size for dim, size in enumerate(shape) if dim not in dims)
    name, init = ("add", "0.0") if adds else ("maximum", "0xFF800000")
    text = (
        f"stablehlo.constant dense<{init}> : tensor<f32>\n"
        f"%r = stablehlo.reduce(%0 init: %init) applies stablehlo.{name} across "
        f"dimensions = {list(dims)} : ({_tensor(shape)}, tensor<f32>) -> {_tensor(new)}"
    )
    function = np.sum if adds else np.max
    return Op(text, new, lambda x, shape: function(x, axis=tuple(dims)))


def contracted(left, right, batch, summed):
    """`batch` and `summed` are pairs of dims of the two operands."""
    letters = dict(zip(range(len(left)), "abcdef", strict=False))
    second = dict(zip(range(len(right)), "uvwxyz", strict=False))
    second |= {j: letters[i] for i, j in (*batch, *summed)}
    taken = {i for i, _ in (*batch, *summed)}
    result = [letters[i] for i, _ in batch]
    result += [letters[i] for i in range(len(left)) if i not in taken]
    taken = {j for _, j in (*batch, *summed)}
    result += [second[j] for j in range(len(right)) if j not in taken]
    equation = f"{''.join(letters[i] for i in range(len(left)))},"
    equation += "".join(second[j] for j in range(len(right)))
    equation += f"->{''.join(result)}"
    sizes = dict(zip(equation.replace(",", ""), (*left, *right), strict=False))
    shape = tuple(sizes[letter] for letter in result)

    def listed(pairs, side):
        return [pair[side] for pair in pairs]

    text = (
        "stablehlo.dot_general %0, %1, "
        f"batching_dims = {listed(batch, 0)} x {listed(batch, 1)}, "
        f"contracting_dims = {listed(summed, 0)} x {listed(summed, 1)} : "
        f"{_arrow([left, right], shape)}"
    )
    return Op(text, shape, lambda x, y, shape: np.einsum(equation, x, y))


def joined(shape, dim):
    new = tuple(2 * n if i == dim else n for i, n in enumerate(shape))
    text = f"stablehlo.concatenate %0, %1, dim = {dim} : {_arrow([shape, shape], new)}"
    return Op(text, new, lambda x, y, shape: np.concatenate([x, y], dim))


def halved(shape, dim):
    new = tuple(n // 2 if i == dim else n for i, n in enumerate(shape))
    ranges = ", ".join(f"0:{n}" for n in new)
    text = f"stablehlo.slice %0 [{ranges}] : {_arrow([shape], new)}"

    def compute(x, **_):
        is_whole = x.shape[dim] == shape[dim]
        return x.take(range(new[dim]), axis=dim) if is_whole else None

    return Op(text, new, compute)


def module_text(op: Op, operands: Sequence[Held]) -> str:
    given = ", ".join(
        f"%{i}: {_tensor(operand.type.shape)}" for i, operand in enumerate(operands)
    )
    name = "%init" if "%init" in op.text else "%r"
    return (
        f"func.func @main({given}) -> {_tensor(op.shape)} {{\n"
        f"{name} = {op.text}\nreturn %r : {_tensor(op.shape)}\n}}"
    )


def _tensor(shape):
    return f"tensor<{''.join(f'{size}x' for size in shape)}f32>"


def _arrow(operands, result):
    return f"({', '.join(map(_tensor, operands))}) -> {_tensor(result)}"


def factorings(count, most=3):
    """Shapes of so many elements, of even sizes."""
    if most == 0:
        return [()] if count == 1 else []
    shapes = [()] if count == 1 else []
    for size in range(2, count + 1, 2):
        if count % size == 0:
            shapes += [(size, *rest) for rest in factorings(count // size, most - 1)]
    return shapes


def elements(shape):
    return math.prod(shape)
