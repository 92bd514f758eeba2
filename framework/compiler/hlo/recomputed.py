"""Which instructions of a program compute again what its forward pass had.

A stack's backward loop calls the backward part of its layer. Names tell what that does:

  while/PartitionedCall/gradients/attention/...   gradients
  while/PartitionedCall/attention/...             what they need, computed again
  while/XlaDynamicSlice                           the loop's own: reads, writes, sums

The same layer in the forward loop has names like the second line's, so what counts is
the loop that an instruction is in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.framework.compiler.hlo.hlo_text import HloModule, Instruction
from meshwright.framework.compiler.lowering.sources import program_name

_GRADIENTS, _TAPE = "gradients", "gradient_tape"
_LOOP = re.compile(r"while(_\d+)?")
_CALL = re.compile(r"(Stateful)?PartitionedCall(_\d+)?")
_RUNS = frozenset({"while", "call", "conditional"})
_NO_SOURCE = frozenset({"parameter", "constant", "get-tuple-element"})


def recomputed(module: HloModule) -> frozenset[str]:
    """Names of the instructions that do, in the backward loops of stacks.

    Of layers that are no loop in the program nothing is told.
    """
    return frozenset(_Finder(module).found())


class _Finder:
    def __init__(self, module: HloModule):
        self.module = module
        self.inside = module.inside
        self.names: dict[str, str] = {}

    def found(self) -> Iterator[str]:
        in_loops = [
            (one.name, _scopes(self.name(one)), loops)
            for computation, loops in self.loops().items()
            for one in self.inside[computation]
        ]
        of_loop: dict[str, set[str]] = {}
        for _, scopes, loops in in_loops:
            of_loop.setdefault(loops[0], set()).update(scopes)
        # The loop over steps has gradients too, that a tape makes.
        backward = {
            loop
            for loop, scopes in of_loop.items()
            if _GRADIENTS in scopes and _TAPE not in scopes
        }
        for name, scopes, loops in in_loops:
            if backward.isdisjoint(loops) or not {"", _GRADIENTS}.isdisjoint(scopes):
                continue
            # A loop of the layer's own lies below the call.
            if loops[0] not in backward or _is_called(scopes):
                yield name

    def loops(self) -> dict[str, list[str]]:
        """Names of the loops around what runs in one, innermost first."""
        fused = {
            called
            for one in self.module.instructions
            if one.opcode not in _RUNS
            for called in one.called
        }
        found = {
            name: [one.name for one in self.module.loops_around(name)]
            for name in self.inside
            if name not in fused
        }
        return {name: loops for name, loops in found.items() if loops}

    def name(self, one: Instruction) -> str:
        """What it was lowered from; of a product with all around it, the product.

        What the compiler gives no name has that of what it is made from.
        """
        if one.name not in self.names:
            self.names[one.name] = ""
            named = (name for name in self.candidates(one) if "/" in name)
            self.names[one.name] = next(named, "")
        return self.names[one.name]

    def candidates(self, one: Instruction) -> Iterator[str]:
        inner = list(self.fused(one))
        products = [each for each in inner if each.opcode in ("convolution", "dot")]
        for each in (*products, one, *reversed(inner)):
            yield program_name(each.op_name)
        if one.opcode not in {*_RUNS, "tuple"}:
            for given in self.module.operands(one):
                if given.opcode not in _NO_SOURCE:
                    yield self.name(given)

    def fused(self, one: Instruction) -> Iterator[Instruction]:
        """What a fusion computes."""
        if one.opcode == "fusion":
            for each in self.inside[one.called[0]]:
                yield each
                yield from self.fused(each)


def _scopes(name: str) -> list[str]:
    # XLA joins the names of ops that it merges; the last is the innermost.
    return name.rsplit(";", 1)[-1].split("/")


def _is_called(scopes: list[str]) -> bool:
    """Whether they go on below a call within the innermost loop."""
    loops = [i for i, scope in enumerate(scopes) if _LOOP.fullmatch(scope)]
    return any(map(_CALL.fullmatch, scopes[max(loops, default=0) :]))
