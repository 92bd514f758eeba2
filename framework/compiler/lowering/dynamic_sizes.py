"""Tensors whose size depends on values, in HLO as TF2XLA makes it.

TF's own jit runs them padded to a bound. Shardy refuses a program with one in it, and
GSPMD refuses it or ends the process once such a tensor is split.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2

MAKER = "set-dimension-size"
"""The opcode that every such size begins with."""


def result_shapes(module: hlo_pb2.HloModuleProto) -> list[xla_data_pb2.ShapeProto]:
    """The shapes of a program's results, in order."""
    result = module.host_program_shape.result
    is_tuple = result.element_type == xla_data_pb2.TUPLE
    return list(result.tuple_shapes) if is_tuple else [result]


def is_dynamic(shape: xla_data_pb2.ShapeProto) -> bool:
    """Whether a size of an array is not known, but for a bound."""
    return any(shape.is_dynamic_dimension)


def maker_of_result(module: hlo_pb2.HloModuleProto, number: int) -> str:
    """The name of the op that makes the unknown size of a result."""
    entry = _by_id(module)[module.entry_computation_id]
    by_id = {one.id: one for one in entry.instructions}
    one = by_id[entry.root_id]
    while one.opcode in ("tuple", "get-tuple-element"):
        picked = number if one.opcode == "tuple" else 0
        one = by_id[one.operand_ids[picked]]
    return _maker(one, by_id)


def first_maker(module: hlo_pb2.HloModuleProto) -> str | None:
    """The name of an op that makes an unknown size which the results depend on."""
    for computation in _used(module):
        by_id = {one.id: one for one in computation.instructions}
        for one in _alive(computation, by_id):
            if is_dynamic(one.shape):
                return _maker(one, by_id)
    return None


def _maker(one: hlo_pb2.HloInstructionProto, by_id) -> str:
    while True:
        operands = (by_id[number] for number in one.operand_ids)
        before = next((op for op in operands if is_dynamic(op.shape)), None)
        if before is None:
            return one.metadata.op_name or one.name
        one = before


def _alive(computation, by_id) -> Iterator[hlo_pb2.HloInstructionProto]:
    pending, seen = [computation.root_id], set()
    while pending:
        number = pending.pop()
        if number not in seen:
            seen.add(number)
            yield by_id[number]
            pending += by_id[number].operand_ids


def _used(module: hlo_pb2.HloModuleProto) -> Iterator[hlo_pb2.HloComputationProto]:
    """The computations that the results depend on."""
    by_id = _by_id(module)
    pending, seen = [module.entry_computation_id], set()
    while pending:
        number = pending.pop()
        if number in seen:
            continue
        seen.add(number)
        computation = by_id[number]
        yield computation
        inside = {one.id: one for one in computation.instructions}
        for one in _alive(computation, inside):
            pending += one.called_computation_ids


def _by_id(module: hlo_pb2.HloModuleProto) -> dict[int, hlo_pb2.HloComputationProto]:
    return {one.id: one for one in module.computations}
