"""What XLA's completion and partitioner did to a program (GSPMD 3.5, 4.5).

One mechanism serves both partitioners: the program is compiled once more with XLA
asked to write its module down between passes, and HLO text is read. So it is the
compiler's own word on every tensor. Shardy's propagation can be run from Python too and
would give named axes, but for Shardy only, and on a module before XLA's own clean-up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.hlo.hlo_text import (
    HloModule,
    Instruction,
    arrays_of,
    elements,
)
from meshwright.framework.compiler.hlo.rematerialization import (
    Rematerialization,
    rematerializations,
)
from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.stablehlo.constraints import logical
from meshwright.framework.compiler.xla.jax_bridge import not_cached
from meshwright.framework.compiler.xla.mesh_program import MeshProgram
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.xla_form import place_along

_SHARDY, _GSPMD = "shardy-xla", "sharding-propagation"
_PASSES = {Partitioner.SHARDY: _SHARDY, Partitioner.GSPMD: _GSPMD}
# TPU's compiler, which libtpu brings, calls its own "tpu-spmd-partitioning".
_PARTITIONER = r"[\w-]*spmd[-_]partition\w+"
_GSPMD_PARTITIONS = "spmd-partitioning"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdjacentTensor:
    """An array that reads another, or that another is made of.

    Args:
      shape: logical.
      sharding: completed; HLO's text where mesh axes cannot say it.
    """

    shape: tuple[int, ...]
    sharding: Sharding | str


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
    """A program after completion and after partitioning.

    Args:
      mesh: the program's.
      completed: the module at logical shapes, every tensor's sharding decided.
      partitioned: the module of one device, as the partitioner left it.
    """

    mesh: DeviceMesh
    completed: HloModule
    partitioned: HloModule

    def sharding(self, one: Instruction) -> Sharding | str:
        """Of an array of `completed`; HLO's text where mesh axes cannot say it."""
        return self._read(one.sharding, len(one.shape))

    def results_of(
        self, one: Instruction
    ) -> list[tuple[tuple[int, ...], Sharding | str]]:
        """The shapes of an instruction's results, and their shardings."""
        if one.dtype:
            return [(one.shape, self.sharding(one))]
        shapes = [shape for _, shape in arrays_of(one.type)]
        texts = elements(one.sharding) or [one.sharding] * len(shapes)
        pairs = zip(shapes, texts, strict=True)
        return [(shape, self._read(text, len(shape))) for shape, text in pairs]

    def result_shardings(self, ranks: Sequence[int]) -> list[Sharding | str]:
        """Of the program's results, which have these ranks, in order."""
        root = self.completed.root()
        texts = [root.sharding] if root.dtype else self._leaves(root)
        pairs = zip(texts, ranks, strict=True)
        return [self._read(text, rank) for text, rank in pairs]

    def _leaves(self, one: Instruction) -> list[str]:
        """The shardings of a tuple's elements."""
        if one.sharding:
            return elements(one.sharding)
        return [operand.sharding for operand in self.completed.operands(one)]

    def around(self, one: Instruction) -> list[AdjacentTensor]:
        """The arrays that an array of `completed` is made of, and its readers.

        Tuples, which loops take and give, are looked through.
        """
        inner = self.unpacked(one)
        makers = self.completed.operands(one) if inner is one else [inner]
        readers = self.completed.users.get(one.name, [])
        near = [self.as_neighbour(other) for other in makers + readers if other.dtype]
        if one.opcode == "get-tuple-element" and makers[0].opcode == "while":
            leaves = elements(makers[0].sharding)
            near += [self._neighbour(one.shape, leaves[one.number])] if leaves else []
        for reader in readers:
            for number, name in enumerate(reader.operands):
                if reader.opcode == "tuple" and name == one.name:
                    text = self._leaves(reader)[number]
                    near.append(self._neighbour(one.shape, text))
        return [other for other in near if other.shape]

    def as_neighbour(self, one: Instruction) -> AdjacentTensor:
        """An array of `completed` as what is next to another."""
        return self._neighbour(one.shape, one.sharding)

    def _neighbour(self, shape: tuple[int, ...], text: str) -> AdjacentTensor:
        return AdjacentTensor(shape=shape, sharding=self._read(text, len(shape)))

    def unpacked(self, one: Instruction) -> Instruction:
        """What an array is, past a tuple that it was only put into."""
        while one.opcode == "get-tuple-element":
            packed = self.completed.by_name[one.operands[0]]
            if packed.opcode != "tuple":
                return one
            one = self.completed.by_name[packed.operands[one.number]]
        return one

    def follows(self, completed: Sharding | str, asked: Sharding) -> bool:
        """Whether each device holds the shard that was asked for.

        Of a dim that was left open, that or a part of it.
        """
        try:
            if isinstance(completed, str):
                ours = self._over_places(completed, asked.rank)
            else:
                ours = logical(completed, self.mesh)
        except ValueError:
            return False
        theirs = logical(asked, self.mesh)
        counts = zip(ours.splits(), theirs.splits(), strict=True)
        for dim, (count, wanted) in enumerate(counts):
            parts = count // wanted
            if count % wanted or (parts > 1 and dim not in asked.unspecified):
                return False
            places = _by_device(ours, dim) // parts
            if not np.array_equal(places, _by_device(theirs, dim)):
                return False
        return True

    def _read(self, text: str, rank: int) -> Sharding | str:
        try:
            read = self._over_places(text, rank)
        except ValueError:
            return text
        if read.mesh.device_ids is not None:
            return text
        return dataclasses.replace(read, mesh=self.mesh)

    def _over_places(self, text: str, rank: int) -> Sharding:
        """As XLA counts devices: by their place in the mesh."""
        places = DeviceMesh(self.mesh.axis_names, self.mesh.shape)
        # No sharding is replicated.
        return Sharding.from_hlo(places, text or "{replicated}", rank)

    def rematerializations(self) -> list[Rematerialization]:
        """The tensors that are made whole on every device with nobody asking."""
        return rematerializations(
            self.mesh, self.completed, self.partitioned, self._read
        )


def _by_device(sharding: Sharding, dim: int) -> np.ndarray:
    """Which shard along `dim` each device has, by its number."""
    order = np.argsort(sharding.mesh.ids.flatten())
    return place_along(sharding.mesh, sharding.dims[dim]).flatten()[order]


def complete(program: MeshProgram) -> Completion:
    """Compiles a program to see how it is completed and partitioned.

    The backend's own optimizations, most of a compile's time, come after that; on CPU
    they are left out.

    Raises:
      LoweringError: see `MeshProgram.compile`; or XLA used another partitioner than
        asked.
      ValueError: the mesh has one device: there is nothing to partition.
    """
    if program.mesh.size == 1:
        raise ValueError(
            f"{program.name}: the mesh ({program.mesh}) has one device, so no "
            "tensor is split and there is nothing to explain"
        )
    with tempfile.TemporaryDirectory() as folder, not_cached():
        program.compile(_dump_options(folder))
        completed = _dumped(folder, _completing_pass(program, folder))
        partitioned = _dumped(folder, _PARTITIONER)
        return Completion(program.mesh, completed, partitioned)


@contextlib.contextmanager
def ending_early(
    module: ir.Operation, devices: Sequence[jax.Device] | None
) -> Iterator[None]:
    """What is made of the module within it XLA gives up soon after completing it.

    What it would do next takes most of a compile's time. The CPU backend refuses to
    decompose an array that is no matrix; other backends might before completion.

    Args:
      module: written for GSPMD, to be looked at.
      devices: those of a topology, or None.
    """
    if devices is not None or jax.default_backend() != "cpu":
        yield
        return
    main = ir.SymbolTable(module)["main"].operation
    start = ir.InsertionPoint.at_block_begin(main.regions[0].blocks[0])
    with start, ir.Location.unknown():
        scalar = stablehlo.constant(ir.DenseElementsAttr.get(np.zeros([], np.float32)))
        call = stablehlo.custom_call(
            [scalar.type], [scalar], call_target_name="Qr", has_side_effect=True
        )
    yield
    # Shardy's rules, of which this breaks one, are for the module without it.
    call.owner.erase()


def completed_by_gspmd(program: MeshProgram) -> Completion:
    """How GSPMD completes a program, which is not partitioned.

    So that what the partitioner would refuse, or end the process over, can be looked
    at. What the backend makes of the program that is left, if anything, is of no use.

    Raises:
      LoweringError: XLA used another partitioner than asked, or came to no completion.
    """
    with tempfile.TemporaryDirectory() as folder, not_cached():
        options = {**_dump_options(folder), "xla_disable_hlo_passes": _GSPMD_PARTITIONS}
        try:
            program.compile(options)
        except LoweringError:
            if not _paths(folder, _GSPMD):
                raise
        completed = _dumped(folder, _completing_pass(program, folder))
        return Completion(program.mesh, completed, completed)


def _dump_options(folder: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "xla_dump_to": folder,
        "xla_dump_hlo_pass_re": f"{_SHARDY}|{_GSPMD}|{_PARTITIONER}",
        # Limits what does not concern us; by the folder's name it also keeps JAX's
        # persistent cache, which does not look at where dumps go, from answering.
        "xla_dump_emitter_re": folder,
    }
    if jax.default_backend() == "cpu":
        options["xla_backend_optimization_level"] = 0
        options["xla_llvm_disable_expensive_passes"] = True
    return options


def _completing_pass(program: MeshProgram, folder: str) -> str:
    """The pass that completed the program; an error if it is not what was asked for."""
    used = [one for one in (_SHARDY, _GSPMD) if _paths(folder, one)]
    asked = _PASSES[program.partitioner]
    if used != [asked]:
        raise LoweringError(
            f"{program.name}: XLA completed the program by "
            f"{' and '.join(used) or 'other passes'}, but {asked} was asked for"
        )
    return asked


def _dumped(folder: str, name: str) -> HloModule:
    """The module after the last run of a pass."""
    return HloModule(_paths(folder, name)[-1].read_text())


def _paths(folder: str, name: str) -> list[pathlib.Path]:
    found = pathlib.Path(folder).glob("*.txt")
    return sorted(one for one in found if re.search(rf"\.after_{name}\.", one.name))
