"""Where the axes that split a tensor come from, as plain values.

Text and pages are made of these; `reasons.py` reads them off a program.
"""

from __future__ import annotations

import dataclasses
import enum

from meshwright.framework.compiler.lowering.sources import (
    Kind,
    Source,
    place_text,
    shown_name,
)
from meshwright.framework.compiler.stablehlo.shardy.recorded import Direction
from meshwright.framework.sharding.sharding import Sharding

NAMELESS = "?"
"""The name of what no TF op makes."""
ASKED_FOR = "what was asked for"
"""The note of an argument or a result that `what_if` lays out."""


class OriginKind(enum.Enum):
    """What gave a tensor its axis in the beginning."""

    ANNOTATION = "annotation"
    ARGUMENT = "argument"
    RESULT = "result"
    REGION = (
        "manual region, in which each device computes its own part (yours, or made "
        "for a sum), at"
    )
    ASKED = f"{ASKED_FOR},"  # Of `what_if`: it is in no program.
    COMPILER = "annotation by weight-update sharding or a repair"


@dataclasses.dataclass(frozen=True)
class Spot:
    """A tensor of a program before it is completed.

    Args:
      kind: argument, result, or inside.
      number: of the argument, the result, or the op in the order of the module.
      result: number of the op's result.
    """

    kind: Kind
    number: int
    result: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The annotation, argument or result where an axis begins.

    Args:
      kind: what it is.
      name: of the annotation's TF op; the path of an argument or a result in its nest.
      layer: dotted path of the layer, or of the annotated weight; "" for none.
      file: of the user's code that made it; "" for arguments and results.
      line: in the file.
      sharding: what it asks for.
      kept_from: of an argument, the program that gave its variable this sharding, if
        this one did not.
      note: of an argument or a result, which row of a layout gave the sharding.
      inferred_from: of state that was left to completion, where the axis begins.
    """

    kind: OriginKind
    name: str
    layer: str
    file: str
    line: int
    sharding: Sharding
    kept_from: str = ""
    note: str = ""
    inferred_from: Origin | None = None

    @property
    def root(self) -> Origin:
        """Where the axis begins, of state that was left to completion too."""
        return self.inferred_from.root if self.inferred_from else self

    @property
    def is_asked(self) -> bool:
        """Whether `what_if` was asked for it."""
        return self.kind is OriginKind.ASKED or self.note == ASKED_FOR

    @property
    def given(self) -> str:
        """How an argument or a result was given it: `given by row 'kernel' of ...`."""
        if self.inferred_from:
            return f"inferred from {self.inferred_from}"
        by = f" by {self.note}" if self.note else ""
        return f"kept from {self.kept_from}" if self.kept_from else f"given{by}"

    def __str__(self) -> str:
        """`annotation stack.attention.w [X,_] at layers/basic/linear.py:12`."""
        name = f" {shown_name(self.name)}" if self.name != NAMELESS else ""
        if self.kind is OriginKind.ANNOTATION and self.layer:
            name = f" {self.layer}"
        where = f" at {place_text(self.file, self.line)}" if self.file else ""
        kept = f", kept from {self.kept_from}" if self.kept_from else ""
        if self.note == ASKED_FOR:  # Of state the same as argument and as result.
            path = self.name.partition(".")[2] or f"{self.kind.value}{name}"
            return f"{ASKED_FOR}, {path} {self.sharding}"
        by = f", by {self.note}" if self.note and self.inferred_from is None else ""
        inferred = f", inferred from {self.inferred_from}" if self.inferred_from else ""
        return f"{self.kind.value}{name} {self.sharding}{where}{kept}{by}{inferred}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hop:
    """An op along which an axis went from one tensor to another.

    Args:
      step: number of the step of propagation, counted over the program; -1: before
        all, as Shardy gives what is annotated the annotation's sharding.
      op: what the op is, in StableHLO's words: "dot_general", "while".
      op_name: of the TF op that it comes from.
      file, line: of the user's code that made it; "" and 0 if unknown.
      direction: from which side of it to which.
    """

    step: int
    op: str
    op_name: str
    file: str
    line: int
    direction: Direction

    def __str__(self) -> str:
        """`forth through dense/MatMul (mine.py:12, step 3)`."""
        where = f"{place_text(self.file, self.line)}, " if self.file else ""
        when = "before all steps" if self.step < 0 else f"step {self.step}"
        through = shown_name(self.op_name) or self.op
        return f"{self.direction.value} through {through} ({where}{when})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """Why an axis splits a dim of a tensor.

    Args:
      axis: the mesh axis, or a part of one.
      dim: number of the dim that it splits.
      origin: where it comes from.
      way: the ops that it passed, from the origin to the tensor; () if it begins here.
    """

    axis: str
    dim: int
    origin: Origin
    way: tuple[Hop, ...]

    @property
    def step(self) -> int:
        """The step in which it came to the tensor; -1: it was there from the start."""
        return self.way[-1].step if self.way else -1


class Decided(enum.Enum):
    """What decided between two axes that cannot both be had."""

    ANNOTATED = "the annotation of the tensor, which propagation does not change"
    KEPT = "the sharding that its variable keeps from another program"
    EARLIER = "the order of steps: what comes first stays"
    AT_OP = "the op, at which both were: it passes on one of them"
    UNEVEN = "the size of the dim, which it does not divide"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Competition:
    """An axis that splits a tensor beside this one, and did not come to it.

    Args:
      axis: the mesh axis.
      dim: number of the dim of this tensor that it would have split.
      at: name of the TF op that has both tensors.
      neighbor: name of the TF op of the tensor beside.
      loser: why the axis splits the tensor beside.
      winner: what splits this tensor in its place; None if nothing does.
      decided: by what.
    """

    axis: str
    dim: int
    at: str
    neighbor: str
    loser: Provenance
    winner: Provenance | None
    decided: Decided


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TensorLayout:
    """A tensor of a program, as propagation lays it out.

    Args:
      kind: argument, result, or inside.
      name: as in `TensorReport.op_name`: of the TF op, or the path in the nest.
      layer: dotted path of its layer; "" for none.
      file, line: of the user's code that made it; "" and 0 if unknown.
      shape: logical; for arguments and results the stored shape.
      dtype: element type in HLO's words.
      sharding: completed.
      note: of an argument or a result, why it was given a sharding, or none; "" if
        nothing is known.
    """

    kind: Kind
    name: str
    layer: str
    file: str
    line: int
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    note: str = ""

    @property
    def source(self) -> str:
        """`folder/file.py:12`; "" if unknown."""
        return place_text(self.file, self.line) if self.file else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """A tensor that has to be sent, by propagation: two shardings that differ.

    Args:
      at: name of the TF op that needs it otherwise, or whose sum is added up.
      tensor: name of the TF op that makes what is sent.
      before: its sharding; for a sum that of the op's result, before it is added up.
      after: the sharding that is needed.
      shape: of the tensor, logical.
      kinds: of the collectives that do it: "all-gather", "all-reduce", ...
      axes: the mesh axes along which it is sent.
      bytes: of the collectives' results on one device, each time they run.
      times: how often one call of the program runs them.
      seconds: what all of them take on a topology, None without one.
      before_origins: the annotations behind the axes that go: of `before`, or of the
        dim that is summed.
      after_origins: those behind the axes that come; and the annotation at which axes
        go, if it is one that needs the tensor otherwise.
    """

    at: str
    tensor: str
    before: Sharding
    after: Sharding
    shape: tuple[int, ...]
    kinds: tuple[str, ...]
    axes: tuple[str, ...]
    bytes: int
    times: int
    seconds: float | None
    before_origins: tuple[Origin, ...]
    after_origins: tuple[Origin, ...]


def made_at(source: Source | None) -> dict[str, str | int]:
    """The layer, file and line of a source; "" and 0 if it is unknown."""
    return {
        "layer": source.layer if source else "",
        "file": source.file if source else "",
        "line": source.line if source else 0,
    }
