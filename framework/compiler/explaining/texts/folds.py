"""What a line of a report stands for: tensors that are told with one of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from meshwright.framework.sizes import counted

if TYPE_CHECKING:
    from meshwright.framework.compiler.explaining.explain import (
        RematerializedTensor,
        TensorReport,
    )

T = TypeVar("T")

RANDOM_BITS = "u32"
"""The dtype of random bits."""
_SMALL = 1024
_BYTES = operator.attrgetter("bytes")
"""Bytes of a collective's part that is told with the others."""


def folded(
    tensors: Iterable[TensorReport], *, by_reason: bool = False
) -> list[list[TensorReport]]:
    """Tensors of which one is shown, and of the others how many there are.

    They are the slots of a weight; small parts of a collective that XLA combined; and
    random bits of one line, the largest first: the generator takes some hundred ops on
    the bits of a dropout's mask.

    Args:
      tensors: in the order of the program.
      by_reason: whether those of a line and type too, left replicated for one reason.
    """
    tensors = list(tensors)
    weights = _weights_of_slots(tensors)
    groups: dict[tuple, list[TensorReport]] = {}
    for tensor in sorted(tensors, key=lambda t: id(t) in weights):
        key: tuple = (weights.get(id(tensor), id(tensor)),)
        if not tensor.annotated and tensor.kind.value == "inside":
            key = _inside_key(tensor, by_reason=by_reason) or key
        groups.setdefault(key, []).append(tensor)
    return [
        _largest_first(group, _BYTES) if group[0].dtype == RANDOM_BITS else group
        for group in groups.values()
    ]


def folded_bits(tensors: Iterable[TensorReport]) -> list[list[TensorReport]]:
    """Like `folded`, of random bits alone."""

    def key(tensor: TensorReport) -> tuple:
        is_alone = tensor.annotated or tensor.collectives
        return () if is_alone else _bits_key(tensor)

    return grouped(tensors, key, _BYTES)


def grouped(
    tensors: Iterable[T], key: Callable[[T], tuple], size: Callable[[T], int]
) -> list[list[T]]:
    """Tensors of one key together, the largest first, and those of the key () alone."""
    groups: dict[tuple, list[T]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor) or (id(tensor),), []).append(tensor)
    return [_largest_first(group, size) for group in groups.values()]


def _largest_first(tensors: Iterable[T], size: Callable[[T], int]) -> list[T]:
    return sorted(tensors, key=lambda tensor: -size(tensor))


def settled_results(tensors: Sequence[TensorReport]) -> set[int]:
    """The ids of results that lie as the arguments do whose new values they are.

    Programs return state in the place "state" of their results, with the paths that it
    has in the nest of its argument: `0.theta.w` becomes `state.theta.w`.
    """

    def how(tensor: TensorReport) -> tuple:
        return tensor.op_name.partition(".")[2], *_lies(tensor)

    arguments = {how(t) for t in tensors if t.kind.value == "argument"}
    results = [t for t in tensors if t.kind.value == "result"]
    state = [t for t in results if t.op_name.startswith("state.")]
    return {id(t) for t in state if how(t) in arguments}


def other_lines(folded: Sequence[TensorReport]) -> Iterator[str]:
    """What is folded into the tensor of the lines before."""
    if not folded:
        return
    first, count = folded[0], len(folded)
    if first.kind.value == "argument":
        yield f"      and its {'slot' if count == 1 else f'{count} slots'} alike"
    elif first.collectives:
        (part,) = first.collectives
        more = counted(count, "more small part")
        yield f"      and {more} of this {part.kind}, at other ops"
    elif first.dtype == RANDOM_BITS:
        place = "line" if str(first.source) else "layer"
        more = counted(count, f"more {RANDOM_BITS} tensor")
        yield f"      and {more} of this {place}"
    else:
        yield f"      and {count} more of this type, for the same reason"


def _inside_key(tensor: TensorReport, *, by_reason: bool) -> tuple:
    """What tensors that are folded have in common; () of one that is shown."""
    if tensor.collectives:
        one, *more = tensor.collectives
        is_small = one.own_bytes is not None and one.own_bytes <= _SMALL
        return (one.name,) if one.shared_by > 1 and is_small and not more else ()
    if (key := _bits_key(tensor)) or not by_reason:
        return key
    return *_how(tensor), type_text(tensor), tensor.layer.split(".")[0]


def _bits_key(tensor: TensorReport) -> tuple:
    """What random bits of a line have in common; () of other tensors."""
    is_bits = tensor.source is not None and tensor.dtype == RANDOM_BITS
    return (*_how(tensor), tensor.kind, tensor.layer) if is_bits else ()


def _how(tensor: TensorReport) -> tuple:
    return str(tensor.source), str(tensor.sharding), tensor.why_replicated


def _weights_of_slots(tensors: Iterable[TensorReport]) -> dict[int, int]:
    """By the id of a slot that lies as its weight does that of the weight.

    The slots of `0.block/up/kernel` are such as `0.adam/block_up_kernel_momentum`, and
    those of `0.theta.block.w` such as `0.slots.block.w.m`.
    """
    weights: dict[tuple, TensorReport] = {}
    slots: list[tuple[TensorReport, str, str]] = []
    for tensor in tensors:
        if tensor.kind.value != "argument":
            continue
        path = tensor.op_name.partition(".")[2]
        if "/" in path:
            weights[path.replace("/", "_"), *_lies(tensor)] = tensor
            slots += [(tensor, path.partition("/")[2], "_")] * (path.count("/") == 1)
        elif path.startswith("theta."):
            weights[path.removeprefix("theta."), *_lies(tensor)] = tensor
        elif path.startswith("slots."):
            slots.append((tensor, path.removeprefix("slots."), "."))
    found = {}
    for slot, name, mark in slots:
        while name := name.rpartition(mark)[0]:
            if weight := weights.get((name, *_lies(slot))):
                found[id(slot)] = id(weight)
                break
    return found


def _lies(tensor: TensorReport) -> tuple:
    return type_text(tensor), str(tensor.sharding), tensor.logical_shape


def type_text(tensor: TensorReport | RematerializedTensor) -> str:
    """`f32[600,600]`."""
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
