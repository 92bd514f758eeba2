"""Which instructions of a program compute again what its forward pass computed.

A stack's backward loop calls the backward part of its layer. Names show what that does:

  while/PartitionedCall/gradients/attention/...   gradients
  while/PartitionedCall/attention/...             what they need, computed again
  while/XlaDynamicSlice                           the loop's own: reads, writes, sums

The same layer in the forward loop has names like those on the second line, so what
counts is the loop that an instruction is in.
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
_MOVES = frozenset({"copy", "all-gather", "bitcast", "reshape", "transpose"})
_NO_SOURCE = frozenset({"parameter", "constant", "get-tuple-element"})


def recomputed(module: HloModule) -> frozenset[str]:
    """Names of the recomputing instructions in the backward loops of stacks.

    Instructions of layers that are no loop in the program are left out.
    """
    finder = _Finder(module)
    again = frozenset(finder.recomputing())
    return frozenset(name for name in again if finder.moved(name) in again)


class _Finder:
    def __init__(self, module: HloModule):
        self.module = module
        self.inside = module.inside
        self.names: dict[str, str] = {}

    def recomputing(self) -> Iterator[str]:
        in_loops = [
            (instruction.name, _scopes(self.name(instruction)), loops)
            for computation, loops in self.loops().items()
            for instruction in self.inside[computation]
        ]
        of_loop: dict[str, set[str]] = {}
        for _, scopes, loops in in_loops:
            of_loop.setdefault(loops[0], set()).update(scopes)
        # The loop over steps has gradients too, which a tape makes.
        backward = {
            loop
            for loop, scopes in of_loop.items()
            if _GRADIENTS in scopes and _TAPE not in scopes
        }
        for name, scopes, loops in in_loops:
            if backward.isdisjoint(loops) or not {"", _GRADIENTS}.isdisjoint(scopes):
                continue
            # A loop of the layer's own is below the call.
            if loops[0] not in backward or _is_called(scopes):
                yield name

    def moved(self, name: str) -> str:
        """The name of what an instruction moves; its own, if it computes.

        A copy or a gather of what was saved may be named after the forward pass.
        """
        while self.module.by_name[name].opcode in _MOVES:
            name = self.module.by_name[name].operands[0]
        return name

    def loops(self) -> dict[str, list[str]]:
        """By computation that runs in a loop the loops around it, innermost first."""
        fused = {
            called
            for instruction in self.module.instructions
            if instruction.opcode not in _RUNS
            for called in instruction.called
        }
        loops_around = {
            name: [loop.name for loop in self.module.loops_around(name)]
            for name in self.inside
            if name not in fused
        }
        return {name: loops for name, loops in loops_around.items() if loops}

    def name(self, instruction: Instruction) -> str:
        """The op that it was lowered from; for a fusion around a product, the product.

        An instruction that the compiler gave no name has the name of an operand.
        """
        if instruction.name not in self.names:
            self.names[instruction.name] = ""
            named = (name for name in self.candidates(instruction) if "/" in name)
            self.names[instruction.name] = next(named, "")
        return self.names[instruction.name]

    def candidates(self, instruction: Instruction) -> Iterator[str]:
        inner = list(self.fused(instruction))
        products = [part for part in inner if part.opcode in ("convolution", "dot")]
        for part in (*products, instruction, *reversed(inner)):
            yield program_name(part.op_name)
        if instruction.opcode not in {*_RUNS, "tuple"}:
            for operand in self.module.operands(instruction):
                if operand.opcode not in _NO_SOURCE:
                    yield self.name(operand)

    def fused(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions inside a fusion, and inside fusions in it."""
        if instruction.opcode == "fusion":
            for inner in self.inside[instruction.called[0]]:
                yield inner
                yield from self.fused(inner)


def _scopes(name: str) -> list[str]:
    # XLA joins the names of ops that it merges; the last is the innermost.
    return name.rsplit(";", 1)[-1].split("/")


def _is_called(scopes: list[str]) -> bool:
    """Whether there is a call among the scopes in the innermost loop."""
    loops = [i for i, scope in enumerate(scopes) if _LOOP.fullmatch(scope)]
    return any(map(_CALL.fullmatch, scopes[max(loops, default=0) :]))
