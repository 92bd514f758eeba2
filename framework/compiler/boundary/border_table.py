"""The arguments and results of a program as a table, for notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tensorflow.python.util import nest

from meshwright.framework.markup import code_html, table_html
from meshwright.framework.sharding.sharding import Sharding

_MOST_ROWS = 24


def border_table(
    inputs: Any,
    outputs: Any,
    in_shardings: Sequence[Sharding | None],
    out_shardings: Sequence[Sharding | None],
) -> str:
    """HTML of a table with the name, type and sharding of each.

    Args:
      inputs, outputs: nests of `tf.TensorSpec`.
      in_shardings, out_shardings: of their leaves; None: left to completion.
    """
    rows = [
        *_rows("argument", inputs, in_shardings),
        *_rows("result", outputs, out_shardings),
    ]
    more = len(rows) - _MOST_ROWS
    table = table_html(["", "name", "type", "sharding"], rows[:_MOST_ROWS])
    return table + (f"<div>and {more} more</div>" if more > 0 else "")


def _rows(what: str, specs: Any, shardings: Sequence) -> Iterator[list[str]]:
    pairs = nest.flatten_with_joined_string_paths(specs, separator=".")
    for (path, spec), sharding in zip(pairs, shardings, strict=True):
        shape = ",".join(map(str, spec.shape))
        lies = "left to completion" if sharding is None else sharding._repr_html_()
        yield [what, code_html(path), code_html(f"{spec.dtype.name}[{shape}]"), lies]
