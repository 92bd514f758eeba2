"""Variables that a lowered function only passes through.

A function that assigns each variable before it reads it, and returns the values that
the variables have in the end, is pure. TF2XLA knows nothing of that: it adds a
parameter for each variable that the function captures, and a result for each that it
assigns.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2


def handle_of(variable: tf.Variable) -> tf.Tensor:
    """The handle of TF's own copy; asking the variable may bring its value there."""
    return vars(variable)["_handle"]


def drop_variables(
    module: hlo_pb2.HloModuleProto, arguments: int, results: int
) -> list[int]:
    """Drops the parameters and results that TF2XLA adds for captured variables.

    Args:
      module: of a function; changed in place.
      arguments: how many parameters the function itself has; they come first.
      results: how many results it has; they come first too.

    Returns:
      Numbers of the captures that the function reads before it assigns them.
    """
    entry = next(c for c in module.computations if c.id == module.entry_computation_id)
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    del root.operand_ids[results:]
    del root.shape.tuple_shapes[results:]
    used = {operand for i in entry.instructions for operand in i.operand_ids}
    added = [
        instruction
        for instruction in entry.instructions
        if instruction.opcode == "parameter"
        and instruction.parameter_number >= arguments
    ]
    for parameter in added:
        entry.instructions.remove(parameter)
    for shape in module.host_program_shape, entry.program_shape:
        del shape.parameters[arguments:]
        del shape.parameter_names[arguments:]
        shape.result.CopyFrom(root.shape)
    module.ClearField("input_output_alias")
    return [p.parameter_number - arguments for p in added if p.id in used]
