"""Errors of TF2XLA, in terms of the program that it refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.util import nest

from meshwright.framework.compiler.lowering.sources import Sources

_NOT_CONSTANT = re.compile(
    r"Input (?P<input>\d+) to node `(?P<op>[^`]+)` with op (?P<type>\w+) must be a "
    "compile-time constant"
)
_NODE = re.compile(r"\{\{node (?P<op>[^}]+)\}\}")
_NO_KERNEL = re.compile(r"No registered '(?P<type>\w+)' OpKernel for XLA")
_OTHER_TYPE = re.compile(r"attributes didn't match.*?\bT=DT_(?P<type>\w+)", re.DOTALL)
_SEGMENTS = re.compile("Segment(?P<reduction>Max|Mean|Min|Prod|Sum)")
_TF2XLA_PREFIX = re.compile(r"^Failed getting HLO text: '")
_STATUS = re.compile(r"^[A-Z_]+: (?:\S+\.py:\d+:\d+: error: )?")
_LENGTH = 300

_PYTHON = (
    "It runs Python on the host: write it in TF ops, or call it outside the program"
)
_DENSE_LABELS = (
    "Give tf.nn.ctc_loss dense labels and their lengths, and say which class is the "
    "blank, which tf.compat.v1.nn.ctc_loss has last: tf.nn.ctc_loss(labels, logits, "
    "label_length, logit_length, blank_index=-1)"
)
_INSTEAD = {
    "CTCLoss": _DENSE_LABELS,
    "CTCLossV2": _DENSE_LABELS,
    "EagerPyFunc": _PYTHON,
    "PyFunc": _PYTHON,
    "PyFuncStateless": _PYTHON,
    "DebugNumericSummaryV2": (
        "Leave out tf.debugging.enable_check_numerics, and put "
        "tf.debugging.check_numerics on the tensors to be checked"
    ),
    "StringFormat": "Return what is to be printed as a result, and print it outside",
    "FakeParam": (
        "TF makes it for the gradient of a loop in a branch: put the tf.cond into the "
        "loop's body, or always run the loop and choose by tf.where"
    ),
    "ResizeNearestNeighborGrad": (
        "It is the gradient of tf.image.resize by 'nearest': use tf.repeat along "
        "height and width, or tf.gather"
    ),
    "TensorListScatterIntoExistingList": (
        "Put the elements in order by tf.gather, and use TensorArray.unstack in place "
        "of scatter"
    ),
}

_NO_LIST_SIZE = "requires a fixed tensor list size"
_LIST_SIZE = (
    "it keeps something of each step of a loop, such as for a gradient, and the number "
    "of steps is not known: give tf.while_loop its maximum_iterations, or make the "
    "bound of the `for` a Python number"
)
_MASK = (
    "Keep all of its elements and mask them, by tf.where(mask, x, 0) in place of "
    "tf.boolean_mask(x, mask), or x * (range < n) in place of x[:n]; give k of "
    "tf.math.top_k as a Python number; or compute it on the host"
)
# TF divides the rows of a gradient among the parts of a `tf.concat` by their values.
_GRADIENT_OF_ROWS = re.compile(r"'[^']*gradient[^']*/Where(_\d+)?'")
_ROWS_OF_PARTS = (
    "It is the gradient of tf.gather(tf.concat(parts, 0), rows): multiply the "
    "concatenated tensor by 1.0, or annotate it, and gather from that"
)


class LoweringError(ValueError):
    """The function cannot become one XLA program; the message names the culprit."""

    # So AutoGraph, which adds the user's lines to a message, keeps the class.
    __init__ = Exception.__init__


def check_not_eager(name: str) -> None:
    """Raises LoweringError if TF is to run functions op by op, as none here does."""
    if tf.config.functions_run_eagerly():
        raise LoweringError(
            f"{name}: tf.config.run_functions_eagerly(True) is in force, and what runs "
            "on a mesh is compiled: call tf.config.run_functions_eagerly(False) before "
            "it; to run op by op, use the function or model on one device"
        )


def no_elements(dtype: tf.DType) -> str:
    """What is wrong with elements that XLA has no type for; "" if it has one."""
    if dtype == tf.string:
        return (
            "is a tensor of strings, of which XLA has none: make numbers of texts on "
            "the host, such as in the input pipeline, and texts of numbers after a call"
        )
    if dtype in (tf.resource, tf.variant):
        return (
            f"is a tensor of {dtype.name}, which is no value that XLA has: pass and "
            "return numbers"
        )
    return ""


def needs_constant(error: Exception) -> bool:
    """Whether TF2XLA refuses because a shape, or the like, is no constant yet."""
    return _NOT_CONSTANT.search(str(error)) is not None


def of_tf2xla(
    name: str, error: Exception, args: Sequence, concrete, sources: Sources
) -> LoweringError:
    """TF2XLA's refusal, with the op and its line.

    Args:
      name: the program's.
      error: TF's.
      args: nests of the function's arguments.
      concrete: the traced function; its arguments are the leaves of `args`.
      sources: where its ops come from.
    """
    text = str(error)
    if match := _NOT_CONSTANT.search(text):
        return _of_no_constant(name, match, args, concrete, sources)
    nodes = (sources.full_name(match["op"]) for match in _NODE.finditer(text))
    known = next(filter(None, nodes), None)
    where = f"{sources.text(known)}: " if known else ""
    if match := _NO_KERNEL.search(text):
        reason = f"it has no kernel for {match['type']}"
        if of := _OTHER_TYPE.search(text):
            reason += (
                f" of {of['type'].lower()}: cast it to a type that it has, such as "
            )
            reason += "float32 or int32"
        else:
            reason += f". {_instead(match['type'])}"
    else:
        reason = _TF2XLA_PREFIX.sub("", text).strip().split("\n")[0]
        if _NO_LIST_SIZE in reason:
            reason = _LIST_SIZE
    return LoweringError(f"{name}: TF2XLA cannot compile it: {where}{reason}")


def _instead(op_type: str) -> str:
    """What to do without an op."""
    if of := _SEGMENTS.fullmatch(op_type):
        reduction = f"tf.math.unsorted_segment_{of['reduction'].lower()}"
        return f"Use {reduction}, and give it num_segments"
    return _INSTEAD.get(
        op_type,
        "Compute it on the host, before or after the program, or from ops that XLA has",
    )


def _of_no_constant(name, match, args, concrete, sources) -> LoweringError:
    where = sources.text(sources.full_name(match["op"]) or match["op"])
    paths = [path for path, _ in leaves_of(args)]
    read = _arguments_of(concrete, match["op"], int(match["input"]))
    given = " and ".join(paths[number] for number in read)
    return LoweringError(
        f"{name}: {where} takes a size, shape or axis from the "
        f"values of {f'argument {given}' if given else 'tensors'}, but one program has "
        "one shape for each tensor: give it as a Python number, such as a field of the "
        "model, or give the op such a number as a bound (maxlength=, num=, depth=)"
    )


def _arguments_of(concrete, op_name: str, number: int) -> list[int]:
    """Numbers of the function's arguments that an op's input is computed from."""
    try:
        op = concrete.graph.get_operation_by_name(op_name)
    except (KeyError, ValueError):
        return []  # It is in a function that this one calls.
    inputs = {id(tensor): n for n, tensor in enumerate(concrete.inputs)}
    pending, seen, numbers = [op.inputs[number]], set(), set()
    while pending:
        tensor = pending.pop()
        if tensor.ref() in seen:
            continue
        seen.add(tensor.ref())
        if id(tensor) in inputs:
            numbers.add(inputs[id(tensor)])
        pending += tensor.op.inputs
    return sorted(numbers)


def first_line(error: Exception) -> str:
    """What an error of XLA's says first, without its status, and not too long."""
    return _STATUS.sub("", str(error).strip()).split("\n")[0][:_LENGTH].rstrip(". ")


def of_import(name: str, error: Exception) -> LoweringError:
    """JAX's refusal to read TF2XLA's program as StableHLO."""
    first = first_line(error)
    return LoweringError(
        f"{name}: JAX cannot read TF2XLA's program as StableHLO: {first}. Lower parts "
        "of the function alone to find the op, and compute it by other ops"
    )


def unknown_size(name: str, where: str, *, what: str) -> LoweringError:
    """The error for a tensor whose size depends on the values of others."""
    remedy = _ROWS_OF_PARTS if _GRADIENT_OF_ROWS.search(where) else _MASK
    return LoweringError(
        f"{name}: {what} has a size that depends on values, made by {where}: on a mesh "
        f"every tensor has one shape. {remedy}"
    )


def leaves_of(structure) -> list[tuple[str, Any]]:
    """(path, leaf) of a nest; the path of a single leaf is empty."""
    return nest.flatten_with_joined_string_paths(structure)
