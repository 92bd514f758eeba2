"""A program on its way from TF2XLA to a partitioner: what passes take and change."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Iterator, Mapping, Sequence

import jax
from jax.extend.mlir import ir

from meshwright.framework.compiler.boundary.form_notes import FormNotes
from meshwright.framework.compiler.lowering.errors import of_import
from meshwright.framework.compiler.lowering.lower import LoweredFunction
from meshwright.framework.compiler.stablehlo.shardy.completed import (
    CompletedModule,
    complete,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import Blame
from meshwright.framework.compiler.xla.jax_bridge import ir_context, stable_hlo_of
from meshwright.framework.compiler.xla.mesh_program import Written
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.stored_form import StoredForm


class Module:
    """A StableHLO module with its signature, its boundary and where its ops come from.

    It is parsed once, into an MLIR context of its own. Passes use it within `opened`,
    in a single thread, and change it in place.

    Args:
      lowered: the function.
      mesh: the mesh that it is compiled for.
      in_forms: for each leaf of its arguments its stored form; None: left to
        completion.
      out_forms: the same for its result.
      notes: why they are so.

    Attributes:
      signature: its name, the structure of its arguments and its result, and sources.
      operation: the module, which a pass that changes it takes from `write`.
      unknown_size: name of an op that makes a size which depends on values, or None.
      divergent: by name of a loop or a branch of a manual region, the axes along which
        its predicate may differ by device.
      platform: the only one that can run it, as it has fused kernels; None: any.
    """

    def __init__(
        self,
        lowered: LoweredFunction,
        mesh: DeviceMesh,
        *,
        in_forms: Sequence[StoredForm | None] | None = None,
        out_forms: Sequence[StoredForm | None] | None = None,
        notes: FormNotes | None = None,
    ):
        self.signature = lowered.signature
        self.unknown_size = lowered.unknown_size
        self.mesh = mesh
        self.in_forms = list(in_forms or [])
        self.out_forms = list(out_forms or [])
        self.notes = notes or FormNotes()
        self.divergent: Mapping[str, Collection[str]] = {}
        self.platform: str | None = None
        self._completed: CompletedModule | None = None
        self._context = ir_context()
        with self.opened():
            try:
                stable_hlo = stable_hlo_of(lowered.hlo)
            except jax.errors.JaxRuntimeError as e:
                raise of_import(self.signature.name, e) from e
            parsed = ir.Module.parse(stable_hlo)
        self.operation: ir.Operation = parsed.operation

    @contextlib.contextmanager
    def opened(self) -> Iterator[Module]:
        """Enters the MLIR context of the module."""
        with self._context, ir.Location.unknown():
            yield self

    @property
    def blame(self) -> Blame:
        """Names the module's ops in messages."""
        return Blame(self.signature.name, self.signature.sources)

    @property
    def boundary(self) -> dict[str, list[Sharding | None]]:
        """The shardings of arguments and results; None: left to completion."""
        return {
            "in_shardings": [form and form.border for form in self.in_forms],
            "out_shardings": [form and form.border for form in self.out_forms],
        }

    def write(self) -> ir.Operation:
        """The module, to be changed: it has to be completed anew."""
        self._completed = None
        return self.operation

    @contextlib.contextmanager
    def rolled_back_on_error(self) -> Iterator[ir.Operation]:
        """Gives the module to be changed, and takes the changes back on an error.

        Raises:
          ir.MLIRError: what was written is no valid module.
        """
        before = self.operation.clone()
        try:
            yield self.write()
            self.operation.verify()
        except Exception:
            self._completed, self.operation = None, before
            raise

    def completed(self) -> CompletedModule:
        """The module with the sharding of each value, whichever partitioner follows.

        It is computed when a pass first needs it, and kept until a pass writes.

        Raises:
          LoweringError: see `complete`.
        """
        if self._completed is None:
            self._completed = complete(
                self.blame, self.operation, self.mesh, **self.boundary
            )
        return self._completed

    def bytecode(self, operation: ir.Operation | None = None) -> bytes:
        """The module as it is, or `operation` in its place, as MLIR bytecode."""
        buffer = io.BytesIO()
        (operation or self.operation).write_bytecode(buffer)
        return buffer.getvalue()

    def written(self, operation: ir.Operation | None = None) -> Written:
        """The module, or `operation` in its place, outside of its MLIR context."""
        return Written(
            signature=self.signature,
            stable_hlo=self.bytecode(operation),
            mesh=self.mesh,
            in_forms=self.in_forms,
            out_forms=self.out_forms,
            divergent=self.divergent,
            platform=self.platform,
            notes=self.notes,
        )
