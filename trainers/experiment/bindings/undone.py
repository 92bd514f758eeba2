"""Bindings that a file undoes because another file includes it once more."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from meshwright.trainers.experiment.bindings.gin_messages import (
    MACRO,
    key_text,
    references,
)

Key = tuple[str, str, str]
"""Scope, selector and parameter of a binding."""


class Location(Protocol):
    """Where a statement is, as gin's parser has it."""

    filename: str
    line_num: int
    line_content: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Undone:
    """A binding that a file, which had set it before, sets back.

    Args:
      name: the class and its parameter, with their scope, or the macro.
      lost: the value that no longer holds.
      place: file and line of that.
      value: the value that holds.
      by: file and line of this.
      include: the statement that has the file read again, with file and line; "" if
        the file is given by itself.
      loses_a_class: whether `lost` refers to a class that `value` does not refer to.
    """

    name: str
    lost: Any
    place: str
    value: Any
    by: str
    include: str
    loses_a_class: bool

    def __str__(self) -> str:
        text = (
            f"`{self.name} = {self.lost!r}` ({self.place}) is replaced by "
            f"`{self.name} = {self.value!r}` of {self.by}"
        )
        if not self.include:
            former, again = (at.rpartition(":")[0] for at in (self.place, self.by))
            return f"{text}: give {again} before {former}"
        return (
            f"{text}, which {self.include} reads again: write your own lines after all "
            "includes"
        )


@dataclasses.dataclass
class _Bound:
    """A bound value; `is_again`: of a file that another had replaced before."""

    file: str | None
    place: str
    value: Any
    is_again: bool = False


class Places:
    """Where bindings are written while gin parses."""

    def __init__(self):
        self._open: list[Location] = []
        self._history: dict[Key, list[_Bound]] = {}
        self._undone: dict[Key, Undone] = {}

    @property
    def file(self) -> str | None:
        """The file of the statement that gin is at; None if it is in none."""
        return (self._open[-1].filename or None) if self._open else None

    def is_bound_here(self, key: Key) -> bool:
        """Whether a binding is of the file of the statement that gin is at.

        All of the command line is as of one file.
        """
        return (self._history[key][-1].file or None) == self.file

    @property
    def undone(self) -> list[Undone]:
        """The bindings that are undone, and that nothing has set since."""
        return list(self._undone.values())

    def following(self, enter: Callable) -> Callable:
        """Gin's `try_with_location`, which it enters for each statement, noted here."""

        @contextlib.contextmanager
        def try_with_location(location: Location) -> Iterator[None]:
            self._open.append(location)
            try:
                with enter(location):
                    yield
            finally:
                self._open.pop()

        return try_with_location

    def note(self, key: Key, value: Any) -> None:
        """Notes that the statement that gin is at binds a value."""
        here = self._open[-1]
        new = _Bound(file=here.filename, place=_place(here), value=value)
        history = self._history.setdefault(key, [])
        self._undone.pop(key, None)
        if history:
            is_same_reading = history[-1].file == new.file
            new.is_again = (
                history[-1].is_again
                if is_same_reading
                else any(before.file == new.file for before in history)
            )
            # Of the files that are read again, one may set back what another did.
            lost = next(b for b in reversed(history) if not b.is_again)
            if new.is_again and new.file != lost.file:
                self._note_lost(key, lost, new)
        history.append(new)

    def _note_lost(self, key: Key, lost: _Bound, new: _Bound) -> None:
        if not new.file or repr(lost.value) == repr(new.value):
            return
        before, after = (
            {ref for ref in references(bound.value) if ref[1] != MACRO}
            for bound in (lost, new)
        )
        self._undone[key] = Undone(
            name=key_text(key),
            lost=lost.value,
            place=lost.place,
            value=new.value,
            by=new.place,
            include=self._include(),
            loses_a_class=bool(before - after),
        )

    def _include(self) -> str:
        """The outermost include that is being read."""
        outermost = self._open[0]
        if len(self._open) == 1:
            return ""
        return f"`{outermost.line_content.strip()}` ({_place(outermost)})"


def _place(location: Location) -> str:
    if not location.filename:
        return "gin parameters"
    return f"{location.filename}:{location.line_num}"
