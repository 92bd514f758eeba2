"""The rows of the table of faults; `faults` has the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.repair.convolutions import conv_layout
from meshwright.framework.compiler.repair.halos import halos
from meshwright.framework.compiler.repair.op_layout import (
    EvenLayout,
    FactorKind,
    OpLayout,
    even_layout,
)
from meshwright.framework.compiler.stablehlo.rewrites.known_fault import (
    KnownFault,
    Outcome,
)
from meshwright.framework.compiler.stablehlo.rewrites.starts import Clamped
from meshwright.framework.sharding.mesh import did_you_mean

_OPS = [
    kind.OPERATION_NAME
    for kind in vars(stablehlo).values()
    if hasattr(kind, "OPERATION_NAME")
]
Chosen = EvenLayout | halos.Halos | conv_layout.Layout | Clamped
"""The layout that an operation is to have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault(KnownFault):
    """A fault of operations that are sharded in certain ways.

    Args:
      what: the operation and its layout, for messages and docs.
      more: which of these, or why; for docs.
      ops: the operations that can meet it.
      choose: returns the layout that XLA gets right for an operation's completed
        layout; None if the operation does not meet the fault.
      repair: what `choose` does, for docs, and for messages if it changes no sharding.

    Raises:
      ValueError: no operation, or one that StableHLO does not have; `choose` is no
        function; or as `KnownFault`.
    """

    ops: tuple[str, ...]
    choose: Callable[[OpLayout], Chosen | None]
    more: str = ""

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.ops, str):
            raise ValueError(
                f"fault {self.name!r}: ops = {self.ops!r} is a string: make it a tuple"
            )
        if not self.ops:
            raise ValueError(
                f"fault {self.name!r}: ops is empty, so that no op could meet it: name "
                "one, such as 'stablehlo.gather'"
            )
        if not callable(self.choose):
            raise ValueError(
                f"fault {self.name!r}: choose = {self.choose!r} is no function of an "
                "OpLayout: give one, such as evenly(condition)"
            )
        for op in self.ops:
            if op not in _OPS:  # The row would never apply.
                raise ValueError(
                    f"fault {self.name!r}: StableHLO has no op {op!r}"
                    f"{did_you_mean(op, _OPS)}"
                )

    @property
    def is_slow(self) -> bool:
        """Whether XLA gets the op right without the repair, and only takes longer."""
        return all(
            program.outcome is Outcome.SLOW for program in self.smallest.values()
        )


def evenly(
    meets: Callable[[OpLayout], bool], *kept: FactorKind, agreed: bool = False
) -> Callable[[OpLayout], Chosen | None]:
    """Lays an operation that meets a fault out evenly, split by some factors only.

    Factors that its tensors split alike come first, if `agreed`.

    Raises:
      TypeError: `kept` are no kinds of factors.
    """
    for kind in kept:
        if not isinstance(kind, FactorKind):
            raise TypeError(f"evenly keeps {kind!r}: give a FactorKind, or none")

    def choose(layout: OpLayout) -> Chosen | None:
        return even_layout(layout, kept, agreed=agreed) if meets(layout) else None

    return choose
