"""A function of every entry of a leading dim: `tf.vectorized_map` with annotations.

TF's rule for XlaSharding keeps the annotation unchanged, for a tensor that has one more
dim: XLA refuses the program. Ours leaves the new dim to propagation (GSPMD 3.5), which
follows the caller's annotations. And there are rules here for ops that layers have in
their loops, for which TF has none.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.python.ops.parallel_for import pfor

from meshwright.framework.sharding.annotations import annotate_serialized, stacked

_NO_RULE = re.compile(
    r"No pfor vectorization defined for (?P<type>\w+)\s+name: \"(?P<name>[^\"]*)\""
)

_RULES = pfor._pfor_converter_registry  # There is no public way to replace a rule.
_replaced = {}  # Rules by op, in place before ours.
# Contexts in which ours are in place; those of several threads may overlap.
_contexts = 0
_lock = threading.Lock()


class NoRuleError(ValueError):
    """TF cannot vectorize an op."""


def vectorize(
    fn: Callable[..., Sequence[tf.Tensor]],
    entries: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """`fn` of each of `entries`, as a single computation on a leading dim.

    Args:
      fn: (*entries) -> flat sequence of tensors.
      entries: tensors whose leading dims are equal.

    Returns:
      `fn`'s results with that leading dim.

    Raises:
      NoRuleError: `fn` has an op that TF cannot vectorize; the message names it.
    """

    def run(entry):
        return list(fn(*entry))

    logger = tf.get_logger()
    logger.addFilter(_is_not_of_pfor)
    try:
        with our_rules():
            return list(
                tf.vectorized_map(run, list(entries), fallback_to_while_loop=False)
            )
    except ValueError as error:
        if (missing := _NO_RULE.search(str(error))) is None:
            raise
        raise NoRuleError(
            f"TF cannot vectorize {missing['type']} (op {missing['name']!r})"
        ) from None
    finally:
        logger.removeFilter(_is_not_of_pfor)


def is_vectorized() -> bool:
    """Whether what is traced is the function of a `tf.vectorized_map`.

    TF does not tell; it traces that in a name scope of its own.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        scopes = graph.get_name_scope().split("/")
        if any(scope.startswith("loop_body") for scope in scopes):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def _is_not_of_pfor(record: logging.LogRecord) -> bool:
    """Filters out some hundred lines that TF logs about an op without a rule."""
    return record.module != "pfor"


def _convert_sharding(pfor_input):
    unspecified = [0, *(dim + 1 for dim in pfor_input.get_attr("unspecified_dims"))]
    return pfor.wrap(
        annotate_serialized(
            pfor_input.stacked_input(0),
            stacked(pfor_input.get_attr("sharding")),
            unspecified,
        ),
        True,
    )


def _convert_dynamic_slice(pfor_input):
    x = pfor_input.stacked_input(0)
    start, sizes = (_unstacked(pfor_input, i) for i in (1, 2))
    start = tf.concat([tf.zeros([1], start.dtype), start], 0)
    shape = [x.shape[0], *tf.get_static_value(sizes)]
    sizes = tf.concat([pfor_input.pfor.loop_len_vector, sizes], 0)
    return pfor.wrap(tf.ensure_shape(xla.dynamic_slice(x, start, sizes), shape), True)


def _convert_dynamic_update_slice(pfor_input):
    pfor_input.stack_inputs([0, 1])
    x, update = (pfor_input.stacked_input(i) for i in (0, 1))
    start = _unstacked(pfor_input, 2)
    start = tf.concat([tf.zeros([1], start.dtype), start], 0)
    return pfor.wrap(xla.dynamic_update_slice(x, update, start), True)


def _unstacked(pfor_input, i: int) -> tf.Tensor:
    """An input that must be the same for every entry."""
    tensor, is_stacked, _ = pfor_input.input(i)
    if is_stacked:
        raise NoRuleError(
            f"TF cannot vectorize {pfor_input.op_type} (op {pfor_input.op.name!r}) at "
            "places that are not the same for every entry"
        )
    return tensor


def _convert_dot(pfor_input):
    pfor_input.stack_inputs([0, 1])
    text = pfor_input.get_attr("dimension_numbers")
    before = xla_data_pb2.DotDimensionNumbers.FromString(text)
    after = xla_data_pb2.DotDimensionNumbers()
    for field, dims in before.ListFields():
        getattr(after, field.name).extend(dim + 1 for dim in dims)
    after.lhs_batch_dimensions.insert(0, 0)
    after.rhs_batch_dimensions.insert(0, 0)
    product = xla.dot_general(
        *(pfor_input.stacked_input(i) for i in (0, 1)),
        after,
        preferred_element_type=pfor_input.get_attr("preferred_element_type"),
    )
    return pfor.wrap(product, True)


def _convert_bitcast(pfor_input):
    dtype = pfor_input.get_attr("type")
    return pfor.wrap(tf.bitcast(pfor_input.stacked_input(0), dtype), True)


def _convert_barrier(pfor_input):
    pfor_input.stack_inputs()
    stacked = [pfor_input.stacked_input(i) for i in range(pfor_input.num_inputs)]
    return [pfor.wrap(t, True) for t in xla.optimization_barrier(*stacked)]


_OURS = {
    "Bitcast": _convert_bitcast,
    "XlaDotV2": _convert_dot,
    "XlaDynamicSlice": _convert_dynamic_slice,
    "XlaDynamicUpdateSlice": _convert_dynamic_update_slice,
    "XlaOptimizationBarrier": _convert_barrier,
    "XlaSharding": _convert_sharding,
}


@contextlib.contextmanager
def our_rules() -> Iterator[None]:
    """Adds to TF's rules what they lack, while the context lasts.

    `tf.vectorized_map` reads them, and so do a tape's `jacobian` and `batch_jacobian`.
    """
    global _contexts
    with _lock:
        if not _contexts:
            _replaced.update((kind, _RULES.get(kind)) for kind in _OURS)
        _contexts += 1
        _RULES.update(_OURS)
    try:
        yield
    finally:
        with _lock:
            _contexts -= 1
            if not _contexts:
                _restore()


def _restore() -> None:
    for kind, rule in _replaced.items():
        if rule is None:
            del _RULES[kind]
        else:
            _RULES[kind] = rule
