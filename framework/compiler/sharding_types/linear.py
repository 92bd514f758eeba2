"""The operands in which ops are linear: the table of type checker and compiler.

A tensor that is unreduced along k mesh axes is carried with k leading dims, each split
by one of them, and is its sum over these: every device holds its own part, under both
partitioners and in loops too. The compiled program costs the same as with Shardy's own
`unreduced`, which was tried: that is a promise about the op before it that nothing
checks, wrong by a factor where this op is a conversion or an addition, and it ends the
process where dims are uneven or in manual regions. GSPMD has no sound word for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.repair.convolutions.conv_rewrite import (
    convolution_of,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    adds,
    element_type,
    is_annotation,
    is_constant_zero,
    short_name,
)

_FIRST, _BOTH, _EITHER = [(0,)], [(0, 1)], [(0,), (1,)]
_CHOICES = {
    "negate": _FIRST,
    "real": _FIRST,
    "imag": _FIRST,
    "reduce_precision": _FIRST,
    "transpose": _FIRST,
    "reshape": _FIRST,
    "broadcast_in_dim": _FIRST,
    "slice": _FIRST,
    "reverse": _FIRST,
    "dynamic_slice": _FIRST,
    "gather": _FIRST,
    "set_dimension_size": _FIRST,
    "complex": _BOTH,
    "add": _BOTH,
    "subtract": _BOTH,
    "dynamic_update_slice": _BOTH,
    "multiply": _EITHER,
    "dot": _EITHER,
    "dot_general": _EITHER,
    "select": [(1, 2)],
}

_KEEP_ZERO = ("broadcast_in_dim", "convert", "reshape")


def choices(op: ir.Operation) -> Sequence[tuple[int, ...]]:
    """Sets of an op's operands in which, taken together, it is linear.

    The operands of a set are unreduced or zeros. The others are no partial sums.
    """
    rule = _RULES.get(short_name(op))
    return rule(op) if rule else _CHOICES.get(short_name(op), [])


def why_not(op: ir.Operation) -> str:
    """What a message adds where an op that looks linear is not; "" for other ops."""
    if short_name(op) != "convert" or not _is_whole(op.operands[0]):
        return ""
    return ", as a part may wrap around, or be rounded, where their sum is not"


def converts_exactly(op: ir.Operation) -> bool:
    """Whether a conversion that is linear rounds no part either.

    A sum that a program declares unreduced may be cast to fewer bits, which halves what
    is sent, as for sums of bfloat16 products: each part is then rounded. Passes that
    move sums where no program declares them unreduced also require exactness.
    """
    if _is_whole(op.operands[0]):
        return True
    before, after = (_floating(v) for v in (op.operands[0], op.results[0]))
    return before == after or before.width < after.width


def _convert(op):
    """Linear up to rounding; integers modulo 2^n, as their parts may wrap around."""
    (before,), (after,) = op.operands, op.results
    if _is_whole(before) != _is_whole(after):
        return []
    if not _is_whole(before):
        return _FIRST
    # A conversion to a truth value is a comparison.
    fewer = 1 < element_type(after).width <= element_type(before).width
    return _FIRST if fewer else []


def _is_whole(value: ir.Value) -> bool:
    return isinstance(element_type(value), ir.IntegerType)


def _floating(value: ir.Value) -> ir.Type:
    """The type of floating-point numbers, or of a complex number's two."""
    element = element_type(value)
    is_complex = isinstance(element, ir.ComplexType)
    return element.element_type if is_complex else element


def _divide(op):
    return [] if _is_whole(op.results[0]) else _FIRST


def _from_zero(op):
    """A pad or a reduction is linear if it adds nothing but zeros."""
    return _FIRST if is_zero(op.operands[1]) else []


def _reduce(op):
    return _from_zero(op) if len(op.results) == 1 and adds(op) else []


def _scatter(op):
    return [(0, 2)] if len(op.operands) == 3 and adds(op) else []


def _convolution(op):
    """Linear where channels are in no groups: parts join the channels, or the batch."""
    return _EITHER if convolution_of(op).groups == 1 else []


_RULES = {
    "concatenate": lambda op: [tuple(range(len(op.operands)))],
    "convert": _convert,
    "convolution": _convolution,
    "divide": _divide,
    "optimization_barrier": lambda op: _FIRST if len(op.operands) == 1 else [],
    "pad": _from_zero,
    "reduce": _reduce,
    "scatter": _scatter,
}


def is_zero(value: ir.Value) -> bool:
    """Whether all of a tensor is a constant 0, annotated or not."""
    while not isinstance(value.owner, ir.Block):
        op = value.owner
        if short_name(op) not in _KEEP_ZERO and not is_annotation(op):
            return is_constant_zero(op)
        value = op.operands[0]
    return False
