"""What XLA's completion and partitioner did to a program (GSPMD 3.5, 4.5).

One mechanism serves both partitioners: the program is compiled once more, XLA dumps its
module between passes, and the HLO text is read. So every tensor has the sharding that
the compiler itself gave it. Shardy's propagation can be run from Python too and would
give named axes, but for Shardy only, and on a module before XLA's own clean-up.
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
from meshwright.framework.compiler.xla.jax_bridge import not_cached
from meshwright.framework.compiler.xla.mesh_program import MeshProgram
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.xla_form import logical, place_along

_SHARDY, _GSPMD = "shardy-xla", "sharding-propagation"
_PASSES = {Partitioner.SHARDY: _SHARDY, Partitioner.GSPMD: _GSPMD}
# The TPU compiler, which libtpu brings, calls its pass "tpu-spmd-partitioning".
_PARTITIONER = r"[\w-]*spmd[-_]partition\w+"
_GSPMD_PARTITIONS = "spmd-partitioning"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdjacentTensor:
    """An array that is made from another, or from which another is made.

    Args:
      shape: logical.
      sharding: completed; HLO's text where mesh axes cannot express it.
    """

    shape: tuple[int, ...]
    sharding: Sharding | str


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
    """A program after completion and after partitioning.

    Args:
      mesh: the program's.
      completed: the module at logical shapes, every tensor's sharding decided.
      partitioned: the module of one device, right after the partitioner.
    """

    mesh: DeviceMesh
    completed: HloModule
    partitioned: HloModule

    def sharding(self, array: Instruction) -> Sharding | str:
        """Of an array of `completed`; HLO's text where mesh axes cannot express it."""
        return self._read(array.sharding, len(array.shape))

    def results_of(
        self, instruction: Instruction
    ) -> list[tuple[tuple[int, ...], Sharding | str]]:
        """The shapes of an instruction's results, and their shardings."""
        if instruction.dtype:
            return [(instruction.shape, self.sharding(instruction))]
        shapes = [shape for _, shape in arrays_of(instruction.type)]
        texts = elements(instruction.sharding) or [instruction.sharding] * len(shapes)
        pairs = zip(shapes, texts, strict=True)
        return [(shape, self._read(text, len(shape))) for shape, text in pairs]

    def result_shardings(self, ranks: Sequence[int]) -> list[Sharding | str]:
        """Of the program's results, which have these ranks, in order."""
        root = self.completed.root()
        texts = [root.sharding] if root.dtype else self._leaves(root)
        pairs = zip(texts, ranks, strict=True)
        return [self._read(text, rank) for text, rank in pairs]

    def _leaves(self, instruction: Instruction) -> list[str]:
        """The shardings of a tuple's elements."""
        if instruction.sharding:
            return elements(instruction.sharding)
        return [operand.sharding for operand in self.completed.operands(instruction)]

    def around(self, array: Instruction) -> list[AdjacentTensor]:
        """The arrays that an array of `completed` is made from, and its readers.

        Tuples, which loops take and return, are looked through.
        """
        inner = self.unpacked(array)
        makers = self.completed.operands(array) if inner is array else [inner]
        readers = self.completed.users.get(array.name, [])
        near = [self.as_neighbour(near) for near in makers + readers if near.dtype]
        if array.opcode == "get-tuple-element" and makers[0].opcode == "while":
            leaves = elements(makers[0].sharding)
            near += (
                [self._neighbour(array.shape, leaves[array.number])] if leaves else []
            )
        for reader in readers:
            for number, name in enumerate(reader.operands):
                if reader.opcode == "tuple" and name == array.name:
                    text = self._leaves(reader)[number]
                    near.append(self._neighbour(array.shape, text))
        return [tensor for tensor in near if tensor.shape]

    def as_neighbour(self, array: Instruction) -> AdjacentTensor:
        """An array of `completed` as the neighbour of another."""
        return self._neighbour(array.shape, array.sharding)

    def _neighbour(self, shape: tuple[int, ...], text: str) -> AdjacentTensor:
        return AdjacentTensor(shape=shape, sharding=self._read(text, len(shape)))

    def unpacked(self, array: Instruction) -> Instruction:
        """The array itself, if it was only put into a tuple and taken out."""
        while array.opcode == "get-tuple-element":
            packed = self.completed.by_name[array.operands[0]]
            if packed.opcode != "tuple":
                return array
            array = self.completed.by_name[packed.operands[array.number]]
        return array

    def follows(self, completed: Sharding | str, requested: Sharding) -> bool:
        """Whether each device holds the shard that was requested.

        Of an unspecified dim a device may hold a part of that shard's.
        """
        try:
            if isinstance(completed, str):
                actual = self._over_places(completed, requested.rank)
            else:
                actual = logical(completed, self.mesh)
        except ValueError:
            return False
        expected = logical(requested, self.mesh)
        counts = zip(actual.splits(), expected.splits(), strict=True)
        for dim, (count, wanted) in enumerate(counts):
            parts = count // wanted
            if count % wanted or (parts > 1 and dim not in requested.unspecified):
                return False
            places = _by_device(actual, dim) // parts
            if not np.array_equal(places, _by_device(expected, dim)):
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
        """Over a mesh that counts devices as XLA does: by their place in the mesh."""
        places = DeviceMesh(self.mesh.axis_names, self.mesh.shape)
        # An array without a sharding is replicated.
        return Sharding.from_hlo(places, text or "{replicated}", rank)

    def rematerializations(self) -> list[Rematerialization]:
        """The tensors gathered on every device without an annotation for it."""
        return rematerializations(
            self.mesh, self.completed, self.partitioned, self._read
        )


def _by_device(sharding: Sharding, dim: int) -> np.ndarray:
    """The index along `dim` of each device's shard, by the device's number."""
    order = np.argsort(sharding.mesh.ids.flatten())
    return place_along(sharding.mesh, sharding.dims[dim]).flatten()[order]


def complete(program: MeshProgram) -> Completion:
    """Compiles a program to see how it is completed and partitioned.

    The backend's own optimizations, most of a compile's time, come after that; on CPU
    they are left out.

    Raises:
      LoweringError: see `MeshProgram.compile`; or XLA used another partitioner than
        requested.
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
    """Within this context XLA gives up on the module soon after completing it.

    The passes after that take most of a compile's time. The CPU backend refuses to
    decompose an array that is no matrix; other backends might do so before completion.

    Args:
      module: written for GSPMD, whose completion is to be looked at.
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
    # The call breaks one of Shardy's rules, which the module is to follow afterwards.
    call.owner.erase()


def completed_by_gspmd(program: MeshProgram) -> Completion:
    """How GSPMD completes a program, without partitioning it.

    So a program can be looked at that the partitioner would refuse, or that would make
    it end the process. What the backend compiles from it, if anything, is of no use.

    Raises:
      LoweringError: XLA used another partitioner than requested, or did not complete
        the program.
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
        # Limits dumps that are not read here. The folder's name also keeps JAX's
        # persistent cache, whose keys leave out where dumps go, from answering.
        "xla_dump_emitter_re": folder,
    }
    if jax.default_backend() == "cpu":
        options["xla_backend_optimization_level"] = 0
        options["xla_llvm_disable_expensive_passes"] = True
    return options


def _completing_pass(program: MeshProgram, folder: str) -> str:
    """The pass that completed the program; an error if another was requested."""
    used = [name for name in (_SHARDY, _GSPMD) if _paths(folder, name)]
    requested = _PASSES[program.partitioner]
    if used != [requested]:
        raise LoweringError(
            f"{program.name}: XLA completed the program by "
            f"{' and '.join(used) or 'other passes'}, but {requested} was requested"
        )
    return requested


def _dumped(folder: str, name: str) -> HloModule:
    """The module after the last run of a pass."""
    return HloModule(_paths(folder, name)[-1].read_text())


def _paths(folder: str, name: str) -> list[pathlib.Path]:
    paths = pathlib.Path(folder).glob("*.txt")
    return sorted(p for p in paths if re.search(rf"\.after_{name}\.", p.name))
