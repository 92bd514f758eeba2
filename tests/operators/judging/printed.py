"""Reads a case from the text that it prints, which is how faults are kept."""

from __future__ import annotations

import ast
import re

from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from tests.operators.definitions.use import Input, Kind, Use
from tests.operators.judging.cases import Case

_FIRST = re.compile(r"(?P<operator>\w+): (?P<expression>.*)  on mesh \((?P<mesh>.*)\)")
_INPUT = re.compile(
    r"(?P<name>\w+): (?:(?P<kind>[a-z]+) )?(?P<dtype>\w+) (?P<shape>\[.*?\])"
    r"(?: below (?P<limit>\d+))?, arrives (?P<arrives>\S+), annotated (?P<annotated>.*)"
)
_RESULT = re.compile(
    r"result: (?P<shape>\[.*?\]), annotated (?P<annotated>.*), leaves (?P<leaves>.*)"
)
_INSIDE = re.compile(r"inside, \d+: annotated (?P<annotated>.*)")
_REGION = "in a region manual along "
_OVER = re.compile(
    r"(?P<sharding>\S+)(?: over \((?P<mesh>.*?)\)(?: of devices (?P<ids>\[.*\]))?)?"
)


_OF_A_CASE = re.compile(r"arrives|annotated|leaves|\w+: \w+ \[")


def case_of(text: str) -> Case:
    """The case that prints as `text`; what follows it is left out.

    Raises:
      ValueError: a line cannot be read, a sharding has another rank than its tensor, or
        the expression has results of other shapes.
    """
    first, *lines = (line.strip() for line in text.strip().splitlines() or [""])
    head = _FIRST.fullmatch(first)
    if head is None:
        raise ValueError(
            f"no case begins with {first!r}: the first line is NAME: EXPRESSION  on "
            'mesh (X=2), with two spaces before "on"'
        )
    mesh = _mesh(head["mesh"])
    flags, inputs, region = {}, {}, ()
    arrives, annotated, result, leaves, inner = [], [], [], [], []
    shapes = []
    for line in lines:
        if line.startswith("with "):
            flags = eval(f"dict({line.removeprefix('with ')})")
        elif line.startswith(_REGION):
            region = tuple(line.removeprefix(_REGION).split(", "))
        elif match := _INPUT.fullmatch(line):
            inputs[match["name"]] = Input(
                tuple(ast.literal_eval(match["shape"])),
                Kind[(match["kind"] or "number").upper()],
                int(match["limit"] or 0),
                match["dtype"],
            )
            arrives.append(Sharding.parse(mesh, match["arrives"]))
            annotated.append(_annotation(mesh, match["annotated"]))
            _check_ranks(line, inputs[match["name"]].shape, arrives[-1], annotated[-1])
        elif match := _RESULT.fullmatch(line):
            shapes.append(tuple(ast.literal_eval(match["shape"])))
            result.append(_annotation(mesh, match["annotated"]))
            leaves.append(Sharding.parse(mesh, match["leaves"]))
            _check_ranks(line, shapes[-1], result[-1], leaves[-1])
        elif match := _INSIDE.fullmatch(line):
            inner.append(_annotation(mesh, match["annotated"]))
        elif _OF_A_CASE.search(line):
            raise ValueError(f"cannot read the line {line!r} of a case")
    ranks = tuple(array.rank if array else 0 for array in inner)
    use = Use(head["expression"], inputs, inner=ranks, **flags)
    if shapes != use.result_shapes:
        said, real = (
            ", ".join(str(list(shape)) for shape in of)
            for of in (shapes, use.result_shapes)
        )
        raise ValueError(f"results of {use.expression} are {real}, not {said}")
    return Case(
        operator=head["operator"],
        use=use,
        mesh=mesh,
        arrives=tuple(arrives),
        annotated=tuple(annotated),
        result=tuple(result),
        leaves=tuple(leaves),
        inner=tuple(inner),
        region=region,
    )


def _check_ranks(
    line: str, shape: tuple[int, ...], *shardings: Sharding | None
) -> None:
    if any(sharding and sharding.rank != len(shape) for sharding in shardings):
        raise ValueError(f"a sharding of another rank than its tensor: {line!r}")


def _mesh(text: str, ids: str | None = None) -> DeviceMesh:
    axes = dict(axis.split("=") for axis in text.split(", "))
    return DeviceMesh(
        tuple(axes), tuple(map(int, axes.values())), ids and ast.literal_eval(ids)
    )


def _annotation(mesh: DeviceMesh, text: str) -> Sharding | None:
    if text == "None":
        return None
    match = _OVER.fullmatch(text)
    return Sharding.parse(
        _mesh(match["mesh"], match["ids"]) if match["mesh"] else mesh, match["sharding"]
    )
