"""A page of a program: where its tensors lie and why, what is sent, and by whom."""

from __future__ import annotations

import html
import json
import os
import pathlib
import string
from typing import Any

from meshwright.framework.compiler.boundary.borders import no_program
from meshwright.framework.compiler.explaining.explain import Explanation, explain
from meshwright.framework.compiler.explaining.explain_difference import (
    explain_difference,
)
from meshwright.framework.compiler.program import Program, TracedProgram
from meshwright.framework.showing.page_data import Lines, of_explanation, of_reasons

_WEB = pathlib.Path(__file__).with_name("web")
_STYLES = ("tokens.css", "page.css")
_SCRIPTS = ("common.js", "model.js", "drawing.js", "list.js", "details.js")

Shown = Program | TracedProgram | Explanation


def explain_page(
    program: Shown, path: str | os.PathLike, *, other: Shown | None = None
) -> None:
    """Writes a page on which a program can be walked through, as one HTML file.

    It has the layers as the user named them, the tensors of each with their splits, and
    what is sent at each; of a tensor that is clicked, the annotation behind each axis,
    the lines of code, and the shards of each device. It loads nothing. Of the random
    bits of a line of code, hundreds of tensors for a dropout, it has the largest and a
    count, unless there are two programs.

    Of a compiled program it is what XLA did, for which that is compiled once more. Of
    one that is only traced, by `trace_program`, it is what propagation says, in about a
    second: such a page can be had of a program that does not compile, for one that
    needs more memory than there is.

    Args:
      program: compiled or traced, or an explanation with reasons.
      path: of the file.
      other: a second program to be shown beside it, of the same kind.

    Raises:
      TypeError: it is no program.
      ValueError: an explanation and a program that is only traced; the mesh has one
        device.
      LoweringError: see `explain`.
      OSError: the file cannot be written.
    """
    text = page_text(program, other=other)
    try:
        pathlib.Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(
            f"cannot write the page {os.fspath(path)} ({error.strerror}): give the "
            "path of a file in a folder that exists and can be written to"
        ) from error


def page_text(program: Shown, *, other: Shown | None = None) -> str:
    """The text of the page that `explain_page` writes."""
    programs, lines = [program] if other is None else [program, other], Lines()
    for each in programs:
        if not isinstance(each, Shown):
            raise no_program("explain_page", each)
    folds = other is None  # Two programs are compared by the names of all tensors.
    if any(isinstance(each, TracedProgram) for each in programs):
        differing = explain_difference(*programs).tensors if other is not None else []
        shown = [_traced(each, lines, folds) for each in programs]
    else:
        explained = [_explained(each) for each in programs]
        differing = explain_difference(*explained).tensors if other is not None else []
        shown = [of_explanation(each, lines, folds=folds) for each in explained]
    data = {
        "programs": shown,
        "sources": lines.values(),
        "differing": [tensor.name for tensor in differing],
    }
    return filled(data)


def _traced(
    program: Program | TracedProgram, lines: Lines, folds: bool
) -> dict[str, Any]:
    is_traced = isinstance(program, TracedProgram)
    by = program.target.partitioner if is_traced else program.partitioner
    return of_reasons(program.reasons, by, lines, folds=folds)


def _explained(program: Program | Explanation) -> Explanation:
    if isinstance(program, Program):
        return explain(program, reasons=True)
    if not program.has_reasons:
        raise ValueError(
            f"the explanation of {program.name} has no reasons, which a page shows: "
            "make it by explain(program, reasons=True), or give the program"
        )
    return program


def filled(data: dict[str, Any]) -> str:
    """The page of values: `programs`, `sources` and the keys of tensors `differing`."""
    title = f"{data['programs'][0]['name']}: where its tensors lie"
    # In a script no text may end it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    template = string.Template(_file("page.html"))
    return template.substitute(
        title=html.escape(title),
        style="".join(map(_file, _STYLES)),
        script="\n".join(map(_file, _SCRIPTS)),
        data=text,
    )


def _file(name: str) -> str:
    return (_WEB / name).read_text(encoding="utf-8")
