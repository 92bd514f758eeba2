"""The type checker against devices simulated by hand, on random programs.

What it accepts, each device can compute on what it holds, and the type says what comes
out. What it refuses, no device could compute so, whatever type one gave the result;
but for reduced axes, which are about gradients, and for products of sums that are
unreduced along different axes, which nothing compiles.
"""

import dataclasses

import hypothesis
import numpy as np
from hypothesis import strategies as st
from jax.extend.mlir import ir
from jax.interpreters import mlir

from meshwright.framework.compiler.sharding_types.checker import Checker
from meshwright.framework.compiler.sharding_types.op_dims import op_dims
from meshwright.framework.compiler.sharding_types.tensor_type import PartialValue
from meshwright.framework.compiler.stablehlo.shardy.op_rules import OpRules
from meshwright.framework.compiler.stablehlo.stable_hlo import Blame, walk
from tests.framework.types import devices_by_hand as by_hand
from tests.framework.types.typed import MESH

SHAPES = [(4,), (4, 4), (8, 4), (2, 4, 4)]
MOST = 64
NOT_OF_DEVICES = ("reduced", "a product of two partial sums")
"""Of reasons to refuse an op."""


class NoSources:
    def text(self, op_name):
        return f"op {op_name!r}"


@st.composite
def held(draw, shape, random):
    """A tensor of random numbers and of a random type; or a constant."""
    kind = draw(st.sampled_from(["typed"] * 6 + ["constant", "zero"]))
    dims, partial, reduced = [[] for _ in shape], [], []
    if kind == "typed":
        for axis in draw(st.permutations(by_hand.AXES)):
            state = draw(st.sampled_from([*range(len(shape)), *"WUUR"]))
            if state == "U":
                partial.append(PartialValue(axis=axis, decided=True))
            elif state == "R":
                reduced.append(axis)
            elif state != "W" and shape[state] % MESH.axes_size([*dims[state], axis]):
                continue
            elif state != "W":
                dims[state].append(axis)
    type_ = by_hand.plain(
        shape,
        tuple(map(tuple, dims)),
        partial=tuple(partial),
        reduced=tuple(reduced),
        free=kind != "typed",
        zero=kind == "zero",
    )
    return of_any_numbers(type_, random)


def of_any_numbers(type_, random):
    """Of no more structure than the type says."""
    array = random.integers(1, 1000, type_.shape) * random.choice([-1, 1], type_.shape)
    return by_hand.Held.of(type_, np.zeros_like(array) if type_.zero else array, random)


@st.composite
def step(draw, had, random):
    """An op and its operands, the first of them `had`."""
    shape = had.type.shape
    dims = range(len(shape))
    makers = {
        "unary": lambda: by_hand.elementwise(
            *draw(st.sampled_from([("negate", np.negative), ("abs", np.abs)])), shape, 1
        ),
        "transpose": lambda: by_hand.transposed(shape, draw(st.permutations(dims))),
        "reshape": lambda: by_hand.reshaped(
            shape, draw(st.sampled_from(by_hand.factorings(by_hand.elements(shape))))
        ),
    }
    if shape:
        makers["reduce"] = lambda: by_hand.reduced(
            shape,
            draw(st.lists(st.sampled_from(dims), unique=True, min_size=1)),
            draw(st.booleans()),
        )
    if by_hand.elements(shape) * 2 <= MOST and len(shape) < 3:
        makers["broadcast"] = lambda: by_hand.broadcast(shape, 2, draw(st.booleans()))
    if shape and max(shape) > 2:
        makers["slice"] = lambda: by_hand.halved(shape, int(np.argmax(shape)))
    pairs = {
        "binary": lambda: by_hand.elementwise(
            *draw(
                st.sampled_from(
                    [
                        ("add", np.add),
                        ("subtract", np.subtract),
                        ("multiply", np.multiply),
                        ("maximum", np.maximum),
                    ]
                )
            ),
            shape,
            2,
        ),
        "dot": lambda: _contraction(draw, shape),
    }
    if shape and by_hand.elements(shape) * 2 <= MOST:
        pairs["join"] = lambda: by_hand.joined(shape, draw(st.sampled_from(dims)))
    name = draw(st.sampled_from([*makers, *pairs, *pairs]))
    if name in makers:
        return makers[name](), [had]
    operands = [had, draw(held(shape, random))]
    return pairs[name](), operands if draw(st.booleans()) else operands[::-1]


def _contraction(draw, shape):
    roles = [draw(st.sampled_from(["batch", "sum", "free"])) for _ in shape]
    free = [size for size, role in zip(shape, roles, strict=True) if role == "free"]
    if by_hand.elements(shape) * by_hand.elements(free) > MOST:
        roles = ["sum" if role == "free" else role for role in roles]
    pairs = {
        role: [(dim, dim) for dim, part in enumerate(roles) if part == role]
        for role in ("batch", "sum")
    }
    return by_hand.contracted(shape, shape, pairs["batch"], pairs["sum"])


def checked(op, operands):
    """The type that the checker gives the result, and its error."""
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(by_hand.module_text(op, operands))
        main = ir.SymbolTable(module.operation)["main"].operation
        block = main.regions[0].blocks[0]
        rules = OpRules(module.operation)
        checker = Checker(MESH, Blame("program", NoSources()), rules)
        for value, operand in zip(block.arguments, operands, strict=True):
            checker.types[value] = operand.type
        checker.visit(block)
        (value,) = block.operations[len(block.operations) - 1].operands
        errors = [str(error) for group in checker.errors.values() for error in group]
        return checker.types[value], "".join(errors)


def decided(draw, type_):
    """An annotation: what is unreduced is said to be so, or is combined."""
    partial = tuple(
        PartialValue(axis=p.axis, decided=True)
        for p in type_.partial
        if p.decided or (p.kind == "sum" and draw(st.booleans()))
    )
    return dataclasses.replace(type_, partial=partial)


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_devices_can_compute_what_is_accepted_and_nothing_that_is_refused(data):
    random = np.random.default_rng(0)
    operand = data.draw(held(data.draw(st.sampled_from(SHAPES)), random))
    for _ in range(4):
        op, operands = data.draw(step(operand, random))
        type_, error = checked(op, operands)
        text = f"{op.text} of {', '.join(str(each.type) for each in operands)}"
        if not error:
            assert by_hand.can_do(op, operands, type_), (text, str(type_))
            operand = of_any_numbers(decided(data.draw, type_), random)
        elif not any(reason in error for reason in NOT_OF_DEVICES):
            assert by_hand.possible_type(op, operands) is None, (text, error)


def test_a_reshape_sums_over_nothing():
    """Dims that become parts of others have no label in its result."""
    text = """
      func.func @main(%x: tensor<4x6x8xf32>) -> tensor<24x8xf32> {
        %y = stablehlo.reshape %x : (tensor<4x6x8xf32>) -> tensor<24x8xf32>
        return %y : tensor<24x8xf32>
      }
    """
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(text).operation
        reshape = next(op for op in walk(module) if op.name == "stablehlo.reshape")
        dims = op_dims(reshape, OpRules(module))
    assert dims.all_combined() == []
    ((first, second, last),), ((merged, result),) = dims.operands, dims.results
    assert (first, second, merged) == (None, None, None)
    assert last == result is not None


def test_an_op_keeps_its_rule_when_its_operands_change():
    text = """
      func.func @main(%x: tensor<4x6xf32>, %y: tensor<4x6xf32>) -> tensor<4xf32> {
        %z = stablehlo.constant dense<0.0> : tensor<f32>
        %s = stablehlo.reduce(%x init: %z) applies stablehlo.add across dimensions = [1]
          : (tensor<4x6xf32>, tensor<f32>) -> tensor<4xf32>
        return %s : tensor<4xf32>
      }
    """
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(text).operation
        main = ir.SymbolTable(module)["main"].operation
        rules = OpRules(module)
        total = next(op for op in walk(module) if op.name == "stablehlo.reduce")
        total.operands[0] = main.regions[0].blocks[0].arguments[1]
        assert len(op_dims(total, rules).all_combined()) == 1
