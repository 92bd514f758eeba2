"""One function for every entry of a leading dim: `tf.vectorized_map` with annotations.

TF's own rule for XlaSharding keeps the annotation as it was, for a tensor that has a
dim more: XLA refuses the program. Ours leaves the new dim to completion (GSPMD 3.5),
which follows what the caller's own annotations say of it.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor

from meshwright.framework.sharding.annotations import annotate_serialized, stacked

_NO_RULE = re.compile(
    r"No pfor vectorization defined for (?P<type>\w+)\s+name: \"(?P<name>[^\"]*)\""
)


class NoRuleError(ValueError):
    """TF cannot vectorize an op."""


def vectorize(
    fn: Callable[..., Sequence[tf.Tensor]],
    entries: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """`fn` of each of `entries`, as one computation on a leading dim.

    Args:
      fn: (*entries) -> flat sequence of tensors.
      entries: tensors whose leading dims are equal.

    Returns:
      `fn`'s results with that leading dim.

    Raises:
      NoRuleError: `fn` has an op that TF cannot vectorize; it is named.
    """

    def one(own):
        return list(fn(*own))

    logger = tf.get_logger()
    logger.addFilter(_is_not_of_pfor)
    try:
        with _rule_for_annotations():
            return list(
                tf.vectorized_map(one, list(entries), fallback_to_while_loop=False)
            )
    except ValueError as error:
        if (missing := _NO_RULE.search(str(error))) is None:
            raise
        raise NoRuleError(
            f"TF cannot vectorize {missing['type']} (op {missing['name']!r})"
        ) from None
    finally:
        logger.removeFilter(_is_not_of_pfor)


def _is_not_of_pfor(record: logging.LogRecord) -> bool:
    """TF logs some hundred lines about an op that it has no rule for."""
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


@contextlib.contextmanager
def _rule_for_annotations() -> Iterator[None]:
    """Puts our rule in the place of TF's while the context lasts."""
    rules = pfor._pfor_converter_registry  # There is no public way to replace a rule.
    before = rules["XlaSharding"]
    rules["XlaSharding"] = _convert_sharding
    try:
        yield
    finally:
        rules["XlaSharding"] = before
