"""Tensors whose size depends on values, in HLO as TF2XLA makes it.

TF's own jit runs them padded to a bound. Shardy refuses a program with such a tensor,
and GSPMD refuses it or ends the process once the tensor is split.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2

_BOUND = "SetBound"
_MAKER = "set-dimension-size"  # Every such size begins with this opcode.


def drop_bounds(module: hlo_pb2.HloModuleProto) -> bool:
    """Drops the bounds that TF2XLA states for the values of a branch's operands.

    It puts them on what comes from a sort, as constants of its size. They change
    nothing, and StableHLO has no such call.

    Returns:
      Whether the module, which is changed in place, had any.
    """
    bounds = [
        op
        for computation in module.computations
        for op in computation.instructions
        if op.custom_call_target == _BOUND
    ]
    for op in bounds:
        copy = hlo_pb2.HloInstructionProto(opcode="copy", name=op.name, id=op.id)
        copy.shape.CopyFrom(op.shape)
        copy.metadata.CopyFrom(op.metadata)
        copy.operand_ids[:] = op.operand_ids[:1]
        op.CopyFrom(copy)
    return bool(bounds)


def result_shapes(module: hlo_pb2.HloModuleProto) -> list[xla_data_pb2.ShapeProto]:
    """The shapes of a program's results, in order."""
    result = module.host_program_shape.result
    is_tuple = result.element_type == xla_data_pb2.TUPLE
    return list(result.tuple_shapes) if is_tuple else [result]


def is_dynamic(shape: xla_data_pb2.ShapeProto) -> bool:
    """Whether only a bound is known for some size of an array."""
    return any(shape.is_dynamic_dimension)


def maker_of_result(module: hlo_pb2.HloModuleProto, number: int) -> str:
    """The name of the op that makes the unknown size of a result."""
    entry = _by_id(module)[module.entry_computation_id]
    by_id = {i.id: i for i in entry.instructions}
    instruction = by_id[entry.root_id]
    while instruction.opcode in ("tuple", "get-tuple-element"):
        picked = number if instruction.opcode == "tuple" else 0
        instruction = by_id[instruction.operand_ids[picked]]
    return _maker(instruction, by_id)


def first_maker(module: hlo_pb2.HloModuleProto) -> str | None:
    """The name of an op that makes an unknown size on which the results depend."""
    if not any(i.opcode == _MAKER for c in module.computations for i in c.instructions):
        return None
    for computation in _used(module):
        by_id = {i.id: i for i in computation.instructions}
        for instruction in _alive(computation, by_id):
            if is_dynamic(instruction.shape):
                return _maker(instruction, by_id)
    return None


def _maker(instruction: hlo_pb2.HloInstructionProto, by_id) -> str:
    while True:
        operands = (by_id[number] for number in instruction.operand_ids)
        before = next((op for op in operands if is_dynamic(op.shape)), None)
        if before is None:
            return instruction.metadata.op_name or instruction.name
        instruction = before


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
        inside = {i.id: i for i in computation.instructions}
        for instruction in _alive(computation, inside):
            pending += instruction.called_computation_ids


def _by_id(module: hlo_pb2.HloModuleProto) -> dict[int, hlo_pb2.HloComputationProto]:
    return {computation.id: computation for computation in module.computations}
