"""A TF function, partitioned for a device mesh and ready to run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import jax
import tensorflow as tf
from tensorflow.python.util import nest

from meshwright.framework.compiler.boundary.arguments import Arguments, check_structure
from meshwright.framework.compiler.boundary.border_table import border_table
from meshwright.framework.compiler.boundary.borders import (
    check_kinds,
    check_results,
    flat_numbers,
    stored_forms,
    stored_spec,
)
from meshwright.framework.compiler.boundary.form_notes import FormNotes
from meshwright.framework.compiler.explaining.reasons import Reasons
from meshwright.framework.compiler.explaining.why import Answer, why
from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.report import Collective, collectives_of
from meshwright.framework.compiler.lowering.errors import check_not_eager
from meshwright.framework.compiler.lowering.garbage import garbage_later
from meshwright.framework.compiler.lowering.lower import argument_specs, lower
from meshwright.framework.compiler.lowering.sources import Sources
from meshwright.framework.compiler.passes import PassResults, run_passes
from meshwright.framework.compiler.sharding_types.explain_types import (
    check_types as check_sharding_types,
)
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.weight_update_sharding.decisions import UpdateReport
from meshwright.framework.compiler.weight_update_sharding.shard import UpdateSharding
from meshwright.framework.compiler.xla import standstill
from meshwright.framework.compiler.xla.mesh_program import (
    MeshProgram,
    Target,
    Written,
    put_on_mesh,
)
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.compiler.xla.processes import check_child, to_host
from meshwright.framework.devices.hardware import kind_name
from meshwright.framework.devices.topology import expect_no_tpu
from meshwright.framework.markup import code_html
from meshwright.framework.sharding.annotations import unreduced_gradients
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.placeholders import tracing_for
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.stored_form import StoredForm
from meshwright.framework.sizes import bytes_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryUsage:
    """Bytes on one device."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def peak(self) -> int:
        """Arguments, results that are not donated arguments, and temporaries."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


class Program:
    """One compiled SPMD program; made by `compile_program`.

    Args:
      results: what the passes made of it.
      target: what it was compiled by, and for.
      unpartitioned: the program on the mesh.
      compiled: the program, partitioned.
    """

    def __init__(
        self,
        *,
        results: PassResults,
        target: Target,
        unpartitioned: MeshProgram,
        compiled: jax.stages.Compiled,
    ):
        self.unpartitioned = unpartitioned
        self.mesh: DeviceMesh = unpartitioned.mesh
        self.partitioner = target.partitioner
        # The devices of a topology are not here.
        self.can_run = target.devices is None
        self.repairs, self.updates = results.repairs, results.updates
        written = results.written
        self._written, self._plain = written, results.plain
        self._signature = written.signature
        self._compiled = compiled
        self._in_forms, self.out_forms = written.in_forms, written.out_forms
        self.notes = written.notes
        self.arguments = Arguments(
            self.name,
            self.inputs,
            forms=self._in_forms,
            shardings=jax.tree.leaves(compiled.input_shardings[0]),
            can_run=self.can_run,
            donated=target.donate,
        )
        self._calls = standstill.calls_of(self)

    def __repr__(self) -> str:
        by = self.partitioner.value
        return f"<Program {self._signature.name!r} for the mesh ({self.mesh}), by {by}>"

    def _repr_html_(self) -> str:
        """For notebooks: the memory, and where arguments and results lie."""
        held = f"{bytes_text(self.memory().peak)} on each device"
        borders = (self.inputs, self.outputs, self.in_shardings, self.out_shardings)
        return (
            f"<div>{code_html(repr(self))}, {held}{border_table(*borders)}"
            "<div>mw.explain_page(program, 'page.html') shows all of it</div></div>"
        )

    def __call__(self, *args: Any) -> Any:
        """Runs the program.

        Args:
          *args: nests of the compiled structure. Leaves are device arrays in stored
            form, as other programs return them, or host arrays of logical shape.

        Returns:
          The function's result, as a nest of device arrays in stored form.

        Raises:
          ValueError: an argument's structure, shape, kind or sharding is not the one
            compiled for, an earlier call took over its buffer, or it shares its buffer
            with an argument that is donated.
        """
        flat = self.arguments.take(args)
        calls = self._calls
        try:
            out = calls.make(self._compiled, flat) if calls else self._compiled(*flat)
        except ValueError:
            self.arguments.check_shardings(flat)
            raise
        return tf.nest.pack_sequence_as(self._signature.outputs, list(out))

    def shard(self, *args: Any) -> Any:
        """Puts host arrays of logical shape onto the mesh, as this program takes them.

        In a program of several processes each of them has the full arrays; see
        `Arguments.shard_rows` for parts.

        Returns:
          The nest of device arrays of a single argument, or a tuple of such nests for
          several.

        Raises:
          ValueError: they do not match the program's first arguments in structure,
            shape and kind.
        """
        return self.arguments.shard(*args)

    def unshard(self, outputs: Any) -> Any:
        """The result of a call as host arrays of logical shape.

        Raises:
          ValueError: it has another structure than the program's result.
        """
        check_structure(self.name, "its results", self._signature.outputs, outputs)
        flat = [
            to_host(leaf) if form is None else form.unpad(to_host(leaf))
            for leaf, form in zip(tf.nest.flatten(outputs), self.out_forms, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._signature.outputs, flat)

    @property
    def name(self) -> str:
        return self._signature.name

    @property
    def sources(self) -> Sources:
        """Where the program's ops come from."""
        return self._signature.sources

    @property
    def in_shardings(self) -> list[Sharding | None]:
        """The requested shardings of the arguments; None: left to completion."""
        return [form and form.border for form in self._in_forms]

    @property
    def out_shardings(self) -> list[Sharding | None]:
        """The requested shardings of the result; None: left to completion."""
        return [form and form.border for form in self.out_forms]

    @property
    def inputs(self) -> Any:
        """The arguments: a tuple of nests of `tf.TensorSpec`, in stored form."""
        return self._signature.inputs

    @property
    def outputs(self) -> Any:
        """The result: a nest of `tf.TensorSpec`, in stored form."""
        return self._signature.outputs

    @functools.cached_property
    def reasons(self) -> Reasons:
        """The program completed once more, with the reason of each axis.

        Raises:
          LoweringError, ValueError: see `Reasons`.
        """
        return Reasons(self._written, self._plain)

    def why(self, target: str, axis: str | None = None) -> Answer:
        """Why a tensor has its sharding by propagation, and what is sent for it.

        Args:
          target: the name that `explain` gives a tensor, or its last parts; a line of
            code, such as "linear.py:12"; or a layer.
          axis: a mesh axis; None: all.

        Raises:
          ValueError: there is no such tensor, line or layer, or no such axis; or the
            mesh has one device.
        """
        of = {"partitioner": self.partitioner, "updates": self.updates}
        return why(self.reasons, target, axis, is_compiled=True, **of)

    def hlo_text(self) -> str:
        """The partitioned, optimized HLO of one device."""
        return self._compiled.as_text()

    def collectives(self) -> list[Collective]:
        """The collectives of the optimized program, with the mesh axes they span."""
        return collectives_of(HloModule(self.hlo_text()), self.mesh)

    def memory(self) -> MemoryUsage:
        """The memory that one device needs."""
        stats = self._compiled.memory_analysis()
        return MemoryUsage(
            arguments=stats.argument_size_in_bytes,
            outputs=stats.output_size_in_bytes,
            aliased=stats.alias_size_in_bytes,
            temporaries=stats.temp_size_in_bytes,
        )

    def cost(self) -> dict[str, float]:
        """XLA's own estimate for one device; the body of a loop counts once."""
        return dict(self._compiled.cost_analysis() or {})


@dataclasses.dataclass(frozen=True)
class TracedProgram:
    """A TF function, ready to be partitioned; made by `trace_program`.

    Args:
      results: what the passes made of it.
      target: what it is compiled by, and for.
    """

    results: PassResults
    target: Target

    @property
    def updates(self) -> UpdateReport | None:
        """What was decided on weight updates; None: not requested."""
        return self.results.updates

    @property
    def written(self) -> Written:
        """The program, written for its partitioner."""
        return self.results.written

    @functools.cached_property
    def reasons(self) -> Reasons:
        """See `Program.reasons`; nothing has to be compiled."""
        return Reasons(self.results.written, self.results.plain)

    def why(self, target: str, axis: str | None = None) -> Answer:
        """See `Program.why`; nothing has to be compiled."""
        of = {"partitioner": self.target.partitioner, "updates": self.updates}
        return why(self.reasons, target, axis, **of)

    def forms(self, argument: int) -> Any:
        """The stored forms of an argument, as a nest of its structure."""
        inputs = self.written.signature.inputs
        packed = tf.nest.pack_sequence_as(inputs, list(self.written.in_forms))
        return packed[argument]

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Program:
        """Partitions and compiles; see `compile_program`."""
        unpartitioned = put_on_mesh(self.written, self.target)
        options = dict(self.updates.xla_options if self.updates else {})
        options |= compiler_options or {}
        return Program(
            results=self.results,
            target=self.target,
            unpartitioned=unpartitioned,
            compiled=unpartitioned.compile(options or None),
        )

    def export(self, platforms: Sequence[str]) -> bytes:
        """The program, unpartitioned, for other machines; see `MeshProgram.export`."""
        return put_on_mesh(self.written, self.target).export(platforms)


class FunctionOptions(TypedDict, total=False):
    """Keyword arguments of `mw.function`, which `trace_program` describes."""

    partitioner: Partitioner
    update_sharding: UpdateSharding | None
    strict: bool
    check_types: bool
    devices: Sequence[jax.Device] | None
    in_child: bool


class TraceOptions(FunctionOptions, total=False):
    """Keyword arguments of `trace_program`, which describes them."""

    in_shardings: Sequence[Any] | None
    out_shardings: Any
    donate: Sequence[int]
    name: str | None
    carried: int
    variables: Sequence[tf.Variable]
    notes: FormNotes | None
    unreduced_gradient_axes: Sequence[str]


def compile_program(
    fn: Callable[..., Any],
    args: Iterable[Any],
    mesh: DeviceMesh,
    *,
    compiler_options: Mapping[str, Any] | None = None,
    **options: Unpack[TraceOptions],
) -> Program:
    """Partitions a pure TF function over a mesh and compiles it.

    Args:
      fn: the function, written as for one device, with some tensors annotated.
      args: for each argument a nest of `tf.TensorSpec`, with logical shapes.
      mesh: the device mesh.
      compiler_options: XLA's own, by flag name, for this program.
      **options: see `trace_program`.

    Raises:
      LoweringError: see `lower`; an annotation would be dropped on this mesh; XLA would
        get an op wrong that cannot be laid out otherwise, or, with `strict`, only at a
        cost; XLA ended the child process that compiled it, with `in_child`.
      ValueError: the mesh has more devices than exist; structures, ranks or meshes do
        not agree; an argument to donate is not there.
    """
    return trace_program(fn, args, mesh, **options).compile(compiler_options)


@garbage_later()
def trace_program(
    fn: Callable[..., Any],
    args: Iterable[Any],
    mesh: DeviceMesh,
    *,
    in_shardings: Sequence[Any] | None = None,
    out_shardings: Any = None,
    donate: Sequence[int] = (),
    partitioner: Partitioner = Partitioner.SHARDY,
    name: str | None = None,
    devices: Sequence[jax.Device] | None = None,
    carried: int = 0,
    variables: Sequence[tf.Variable] = (),
    notes: FormNotes | None = None,
    update_sharding: UpdateSharding | None = None,
    strict: bool = False,
    check_types: bool = False,
    unreduced_gradient_axes: Sequence[str] = (),
    in_child: bool = False,
) -> TracedProgram:
    """Lowers a pure TF function for a mesh, and runs the compiler's passes.

    For GSPMD a pass has XLA complete the program, which begins a compilation.

    Args:
      fn: the function, written as for one device, with some tensors annotated.
      args: for each argument a nest of `tf.TensorSpec`, with logical shapes.
      mesh: the device mesh.
      in_shardings: for each argument None, which is left to completion, or a nest of
        its structure with a `Sharding`, an axis for each dim, or a `StoredForm` for
        each leaf. Dims that do not divide are stored padded, see `Program.shard`.
      out_shardings: the same for the result.
      donate: numbers of the arguments whose buffers the results may take over.
      partitioner: Shardy, or GSPMD as the second opinion.
      name: for messages and profiles.
      devices: those of a topology (`topology_devices`), to compile for: the program can
        be looked at, not run. The mesh's ids are places among them.
      carried: how many leaves are state: the first of the arguments, and in their place
        the first of the result. Where completion decides, both get the same sharding.
      variables: those that the function may capture: it assigns each before reading it.
      notes: why arguments were given their shardings, or none, for reports.
      update_sharding: which weight updates to shard. State then has other stored forms,
        `TracedProgram.forms`.
      strict: refuse a program in which an op that XLA's partitioner would get wrong is
        laid out otherwise at a cost in communication, or assertions are left
        unchecked; otherwise these are warnings.
      check_types: refuse a program that communicates where no annotation says so; see
        `check_types`. An argument without a sharding counts as replicated.
      unreduced_gradient_axes: the axes of a scope of `unreduced_gradients` around `fn`.
      in_child: have XLA compile in a child process: if XLA's C++ ends that process,
        this one lives on and gets an error. For the CPU devices of one process.

    Raises:
      LoweringError: see `lower`; or an annotation would be dropped on this mesh.
      ShardingTypeError: the first mistake that `check_types` finds.
      ValueError: structures, ranks or meshes do not agree; an argument to donate is not
        there; `in_child` cannot compile for the devices.
    """
    name = name or getattr(fn, "__name__", "program").strip("<>")
    check_not_eager(name)
    check_kinds(name, args, mesh)
    partitioner = Partitioner(partitioner)
    if in_child:
        check_child(name, devices)
    args = tuple(args)
    flat_args = argument_specs(name, args)
    in_forms = stored_forms(flat_args, args, in_shardings, mesh, what="in_shardings")
    stored_args = tf.nest.pack_sequence_as(
        args, [stored_spec(s, f) for s, f in zip(flat_args, in_forms, strict=True)]
    )
    fn = tracing_for_devices(devices, partitioner, mesh)(fn)
    if unreduced_gradient_axes:
        fn = unreduced_gradients(*unreduced_gradient_axes)(fn)
    if check_types:
        check_sharding_types(
            fn,
            args,
            mesh,
            in_shardings=_logical(in_shardings),
            out_shardings=_logical(out_shardings),
            name=name,
            variables=variables,
        )
    out_forms: list[StoredForm | None] = []

    def stored_fn(*stored):
        flat = [
            x if form is None else form.to_logical(x)
            for x, form in zip(tf.nest.flatten(stored), in_forms, strict=True)
        ]
        out = fn(*tf.nest.pack_sequence_as(args, flat))
        check_results(name, out)
        out = tf.nest.map_structure(tf.convert_to_tensor, out)
        leaves = tf.nest.flatten(out)
        out_forms[:] = stored_forms(
            leaves, out, out_shardings, mesh, what="out_shardings"
        )
        stored = [
            x if form is None else form.to_stored(x)
            for x, form in zip(leaves, out_forms, strict=True)
        ]
        return tf.nest.pack_sequence_as(out, stored)

    lowered = lower(
        stored_fn, stored_args, name=name, strict=strict, variables=variables
    )
    target = Target(
        partitioner=partitioner,
        devices=devices,
        donate=flat_numbers(args, donate),
        in_child=in_child,
    )
    module = Module(lowered, mesh, in_forms=in_forms, out_forms=out_forms, notes=notes)
    results = run_passes(
        module,
        target,
        carried=carried,
        update_sharding=update_sharding,
        strict=strict,
    )
    return TracedProgram(results, target)


def tracing_for_devices(
    devices: Sequence[jax.Device] | None, partitioner: Partitioner, mesh: DeviceMesh
) -> contextlib.AbstractContextManager:
    """In it layers know for what they are traced; devices None are those here."""
    expect_no_tpu()
    kind = kind_name((devices or jax.devices())[0])
    return tracing_for(kind, partitioner.value, mesh)


def _logical(shardings: Any) -> Any:
    """The shardings of logical tensors, where a nest has stored forms."""
    return nest.map_structure(
        lambda leaf: leaf.sharding if isinstance(leaf, StoredForm) else leaf, shardings
    )
