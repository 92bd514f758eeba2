"""A program's sharding types as text, at 80 columns."""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.framework.compiler.sharding_types.explain_types import (
        TypedProgram,
        TypedTensor,
    )

_WIDTH = 80
_NAME = 26


def program_text(program: TypedProgram) -> str:
    """What `print(program)` shows."""
    count = len(program.errors)
    lines = [
        f"{program.name} over {program.mesh}: {len(program.tensors)} tensors, "
        f"{count or 'no'} {'error' if count == 1 else 'errors'}.",
        "{U:x}: a sum is unreduced along x. {R:x}: the gradient's will be. {sum?:x}:",
        "the program does not say yet.",
        "",
    ]
    for heading, tensors in _groups(program.tensors):
        if tensors:
            lines += [heading, *(line for t in tensors for line in _lines(t)), ""]
    for number, error in enumerate(program.errors, 1):
        lines += textwrap.wrap(
            f"{number}. {error}",
            _WIDTH,
            subsequent_indent="   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines).rstrip()


def _groups(
    tensors: Sequence[TypedTensor],
) -> Iterator[tuple[str, list[TypedTensor]]]:
    inside = [t for t in tensors if t.kind.value == "inside" and t.is_shown]
    yield "arguments", [t for t in tensors if t.kind.value == "argument"]
    yield "forward", [t for t in inside if not t.is_gradient]
    yield "backward, and what is made of it", [t for t in inside if t.is_gradient]
    yield "results", [t for t in tensors if t.kind.value == "result"]


def _lines(tensor: TypedTensor) -> Iterator[str]:
    name = tensor.name.removeprefix("gradient_tape/")
    line = f"  {name:<{_NAME}} {tensor.type}"
    if len(name) <= _NAME and len(line) <= _WIDTH:
        yield line
    else:
        yield f"  {name}"
        yield f"{'':<8}{tensor.type}"
    if str(tensor.source or ""):
        of = "gradient of " if tensor.source.is_gradient else ""
        code = linecache.getline(tensor.source.file, tensor.source.line).strip()
        yield f"      {of}{tensor.source}  {code}"[:_WIDTH].rstrip()
