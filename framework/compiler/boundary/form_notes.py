"""Why the tensors at a program's border have the forms that they have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshwright.framework.compiler.lowering.sources import Kind
from meshwright.framework.sharding.stored_form import StoredForm


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormNotes:
    """Why arguments, and the results that replace them, have their forms.

    Args:
      texts: for each leaf of the arguments why its sharding was given, or none was; ""
        if nothing is known. Shorter if nothing is known of the last.
      carried: how many of the first results replace the first arguments.
      completed: numbers of the carried leaves whose forms completion chose.
    """

    texts: Sequence[str] = ()
    carried: int = 0
    completed: frozenset[int] = frozenset()

    def is_completed(self, number: int, form: StoredForm | None) -> bool:
        """Whether completion, and no later pass, chose the form of a carried leaf."""
        return number in self.completed and form is not None and form.split is None

    def giver(self, kind: Kind, number: int, form: StoredForm | None) -> str:
        """What gave an argument or a result its form, such as a row of a layout.

        "" if completion did, or another program, or nothing is known.
        """
        if form is None or form.kept_from or self.is_completed(number, form):
            return ""
        return (
            self.text(kind, number) if form.split is None else "weight-update sharding"
        )

    def text(self, kind: Kind, number: int) -> str:
        """Of an argument or a result, by its number; "" if nothing is known."""
        is_noted = kind is Kind.ARGUMENT or number < self.carried
        return self.texts[number] if is_noted and number < len(self.texts) else ""
