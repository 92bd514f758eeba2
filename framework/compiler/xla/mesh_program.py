"""A program on a mesh, as JAX lowered it, on its way through XLA."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import tensorflow as tf

from meshwright.framework.compiler.boundary.form_notes import FormNotes
from meshwright.framework.compiler.hlo.collective_order import is_ordered
from meshwright.framework.compiler.hlo.divergent_branches import check_branches
from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.memory import MemoryTimeline, memory_timeline
from meshwright.framework.compiler.hlo.out_of_memory import (
    OutOfMemoryError,
    allocations_of,
    check_arguments_fit,
    parse_refusal,
)
from meshwright.framework.compiler.lowering.errors import LoweringError
from meshwright.framework.compiler.lowering.lower import Signature
from meshwright.framework.compiler.lowering.sources import Kind
from meshwright.framework.compiler.xla import jax_bridge
from meshwright.framework.compiler.xla.child import ChildEnded
from meshwright.framework.compiler.xla.jax_mesh import jax_mesh
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.compiler.xla.refusals import of_child, of_xla
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.stored_form import StoredForm

# What makes XLA take a program for one of GSPMD, whatever partitioner is requested.
_GSPMD_MARK = re.compile(
    r"mhlo\.sharding|@(?:Sharding|SPMDFullToShardShape|SPMDShardToFullShape)\b"
)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Written:
    """A program as its partitioner reads it, in no MLIR context: for any thread.

    Args:
      signature: its name, the structure of its arguments and its result, and sources.
      stable_hlo: MLIR bytecode.
      mesh: the device mesh.
      in_forms: for each leaf of the arguments its stored form; None: left to
        completion.
      out_forms: the same for the result.
      divergent: loops and branches of manual regions that not all devices run alike.
      platform: the only one that can run it, as it has fused kernels; None: any.
      notes: why arguments and results have their forms.
    """

    signature: Signature
    stable_hlo: bytes
    mesh: DeviceMesh
    in_forms: Sequence[StoredForm | None]
    out_forms: Sequence[StoredForm | None]
    divergent: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)
    platform: str | None = None
    notes: FormNotes = dataclasses.field(default_factory=FormNotes)

    def form(self, kind: Kind, number: int) -> StoredForm | None:
        """The stored form of an argument or a result."""
        return (self.in_forms if kind is Kind.ARGUMENT else self.out_forms)[number]

    @property
    def left(self) -> frozenset[int]:
        """Numbers of the carried leaves whose forms completion, and no pass, chose."""
        return frozenset(
            number
            for number in self.notes.completed
            if self.notes.is_completed(number, self.in_forms[number])
        )

    def giver(self, kind: Kind, number: int) -> str:
        """See `FormNotes.giver`."""
        return self.notes.giver(kind, number, self.form(kind, number))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What a program is compiled by, and for.

    Args:
      partitioner: Shardy or GSPMD.
      devices: those of a topology, or None.
      donate: numbers of the leaves whose buffers the results may take over.
      in_child: whether XLA compiles in a child process.
    """

    partitioner: Partitioner
    devices: Sequence[jax.Device] | None = None
    donate: Sequence[int] = ()
    in_child: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class MeshProgram:
    """A program on a mesh, not partitioned yet.

    Args:
      signature: its name, the structure of its arguments and its result, and sources.
      mesh: the device mesh.
      lowered: as JAX lowered it.
      partitioner: the one that completes its shardings.
      call: the jitted function, and its abstract arguments.
      in_child: whether XLA compiles it in a child process.
      divergent: the loops and branches whose predicates may differ by device, and
        along which axes (`divergent_ops`).
      platform: the only one that can run it, see `Written`.
    """

    signature: Signature
    mesh: DeviceMesh
    lowered: jax.stages.Lowered
    partitioner: Partitioner
    call: tuple = ()
    in_child: bool = False
    divergent: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)
    platform: str | None = None

    @property
    def name(self) -> str:
        return self.signature.name

    def export(self, platforms: Sequence[str]) -> bytes:
        """The program for other machines, as `jax.export.deserialize` reads it.

        Args:
          platforms: "cpu", "cuda", "tpu": it is lowered for each.

        Raises:
          LoweringError: see `compile`; or it has fused kernels of another platform.
        """
        self._check_no_fallback()
        others = [platform for platform in platforms if platform != self.platform]
        if self.platform is not None and others:
            raise LoweringError(
                f"{self.name} has fused kernels that only a {self.platform} can run, "
                f"and is to be exported for {', '.join(others)}: leave that out, or "
                "set the kernel of attention layers to Kernel.NONE"
            )
        if self.divergent:
            self.compile()  # Only the compiled program shows what waits for what.
        return jax_bridge.export(self.call, self.mesh, self.partitioner, platforms)

    def compile(self, options: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
        """Partitions and compiles the program.

        Args:
          options: XLA's, for this compilation.

        Raises:
          LoweringError: the module would make XLA fall back to GSPMD; XLA refuses the
            program, or ends the child process that compiles it; or devices that take
            different branches would wait for each other.
          OutOfMemoryError: it needs more memory than a device has.
        """
        self._check_no_fallback()
        try:
            compiled = self._compile(options)
        except ChildEnded as e:
            raise of_child(self.name, str(e), partitioner=self.partitioner) from e
        except jax.errors.JaxRuntimeError as e:
            refusal = parse_refusal(str(e))
            if refusal is None:
                raise of_xla(
                    self.name,
                    e,
                    partitioner=self.partitioner,
                    sources=self.signature.sources,
                ) from e
            timeline = self._refused(options)
            largest = allocations_of(timeline, self.signature) if timeline else ()
            raise OutOfMemoryError(self.name, refusal, largest, timeline) from e
        if self.divergent:
            check_branches(
                self.name,
                HloModule(compiled.as_text()),
                self.mesh,
                self.divergent,
                self.signature.sources,
            )
        return compiled

    def _compile(self, options: Mapping[str, Any] | None) -> jax.stages.Compiled:
        compiled, was_serialized = jax_bridge.compile_lowered(
            self.lowered, self.partitioner, options, in_child=self.in_child
        )
        may_hang = was_serialized and self.mesh.size > 1 and _is_for_cpu(compiled)
        if may_hang and not is_ordered(HloModule(compiled.as_text())):
            # A child, if there was one, has shown that XLA does not end by it.
            return jax_bridge.compile_here(self.lowered, self.partitioner, options)
        return compiled

    def _refused(self, options: Mapping[str, Any] | None) -> MemoryTimeline | None:
        """The memory over time of a program that the compiler refuses, or None.

        The compiler may dump such a program; None if it does not.
        """
        with tempfile.TemporaryDirectory() as folder:
            dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
            with contextlib.suppress(jax.errors.JaxRuntimeError, ChildEnded):
                self._compile({**(options or {}), **dump})
            dumps = list(pathlib.Path(folder).rglob("*.oom_intermediate_module.txt"))
            if not dumps:
                return None
            return memory_timeline(dumps[0].read_text(), self.signature.sources)

    def _check_no_fallback(self) -> None:
        """Refuses a program for all of which XLA would give up Shardy."""
        if self.partitioner is not Partitioner.SHARDY:
            return
        for line in self.lowered.as_text().splitlines():
            if mark := _GSPMD_MARK.search(line):
                raise LoweringError(
                    f"{self.name}: {mark[0]} is left in the program, for which XLA "
                    "would give up Shardy for all of it; compile it for "
                    f"Partitioner.GSPMD, or take out: {line.strip()[:200]}"
                )


def _is_for_cpu(compiled: jax.stages.Compiled) -> bool:
    borders = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return any(d.platform == "cpu" for border in borders for d in border.device_set)


def put_on_mesh(written: Written, target: Target) -> MeshProgram:
    """Has JAX lower a program for the devices of its mesh.

    Args:
      written: the program, written for the target's partitioner.
      target: what it is compiled by, and for.

    Raises:
      OutOfMemoryError: the arguments alone do not fit into the devices' memory.
    """
    signature, mesh = written.signature, written.mesh
    in_shardings = [form and form.border for form in written.in_forms]
    device = jax_mesh(mesh, target.devices).devices.flat[0]
    check_arguments_fit(signature, mesh, in_shardings, device)
    lowered, call = jax_bridge.lower_for_mesh(
        signature.name,
        written.stable_hlo,
        mesh,
        inputs=tf.nest.flatten(signature.inputs),
        outputs=tf.nest.flatten(signature.outputs),
        in_shardings=in_shardings,
        out_shardings=[form and form.border for form in written.out_forms],
        donate=target.donate,
        partitioner=target.partitioner,
        devices=target.devices,
    )
    return MeshProgram(
        signature,
        mesh,
        lowered,
        target.partitioner,
        call=call,
        divergent=written.divergent,
        platform=written.platform,
        in_child=target.in_child,
    )
