"""The one place that touches JAX's compiler interfaces.

A TF program's HLO becomes a StableHLO function that a `jax.jit` program calls through a
primitive of ours. So shardings at the border, donation, compilation, memory and cost
analysis, the persistent cache and several processes are JAX's public ones.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np
import tensorflow as tf
from jax._src import compiler as jax_compiler
from jax._src.clusters import ClusterEnv
from jax._src.interpreters import pxla
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import mlir
from jaxlib import _jax

from meshwright.framework.compiler.boundary.wide_elements import wide_elements
from meshwright.framework.compiler.hlo.memory import MemoryTimeline, memory_timeline
from meshwright.framework.compiler.hlo.out_of_memory import (
    OutOfMemoryError,
    allocations_of,
    check_arguments_fit,
    parse_refusal,
)
from meshwright.framework.compiler.lowering.errors import (
    LoweringError,
    of_child,
    of_xla,
)
from meshwright.framework.compiler.lowering.lower import LoweredFunction
from meshwright.framework.compiler.xla.child import ChildEnded, ChildRefused, child
from meshwright.framework.devices.device_order import device_order
from meshwright.framework.devices.topology import place_on_torus, topology_of
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

JAXLIB = tuple(int(n) for n in re.findall(r"\d+", jaxlib.__version__)[:3])
"""The version of jaxlib."""
_DETECTION_SECONDS = 60
# Whether what is compiled now is to be compiled in a child process.
_IN_CHILD = contextvars.ContextVar("in_child", default=False)
_NAMING = contextvars.ContextVar("naming", default=False)
# JAX has a program call the process that it was lowered in, by an address there.
_CALLS_BACK = b"python_cpu_callback"
# What XLA takes for a program of GSPMD's, whatever partitioner it is asked for.
_GSPMD_MARK = re.compile(
    r"mhlo\.sharding|@(?:Sharding|SPMDFullToShardShape|SPMDShardToFullShape)\b"
)


def detected_cluster() -> tuple[str | None, int | None, int | None, list[int] | None]:
    """What SLURM, a TPU pod, Kubernetes or Open MPI says of this process.

    Returns:
      Address of process 0, number of processes, number of this one, numbers of its own
      devices on this machine (None: all); all None outside of these.
    """
    return ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, _DETECTION_SECONDS
    )


def jax_mesh(
    mesh: DeviceMesh, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """The devices of `mesh`, in its order; without one, along the links of a TPU torus.

    Args:
      mesh: the device mesh; its ids are places in `devices`.
      devices: those of a topology to compile for; by default all that this program's
        processes have, `jax.devices()`, whatever numbers they go by.

    Raises:
      ValueError: it has more devices than there are, or ids that none has.
    """
    here = devices is None
    devices = jax.devices() if here else list(devices)
    missing = [i for i in mesh.ids.flat if not 0 <= i < len(devices)]
    if missing and not here:
        raise ValueError(
            f"device mesh ({mesh}) needs {mesh.size} devices but the topology has "
            f"{len(devices)} (no device {missing[0]}); name a larger one"
        )
    if missing:
        raise ValueError(
            f"device mesh ({mesh}) needs {mesh.size} devices but {len(devices)} "
            f"{jax.default_backend()} devices exist (no device {missing[0]}); use a "
            "smaller mesh or, on CPU, ask for more virtual devices (--device_count)"
        )
    ids, torus = mesh.ids, topology_of(devices)
    if mesh.device_ids is None and torus is not None and torus.size == mesh.size:
        devices = sorted(devices, key=place_on_torus)
        ids = device_order(mesh.shape, torus).ids
    grid = np.vectorize(devices.__getitem__, otypes=[object])(ids)
    auto = (jax.sharding.AxisType.Auto,) * len(mesh.shape)
    return jax.sharding.Mesh(grid, mesh.axis_names, axis_types=auto)


def named_sharding(
    sharding: Sharding, mesh: jax.sharding.Mesh | None = None
) -> jax.sharding.NamedSharding:
    """`sharding` over real devices."""
    spec = jax.sharding.PartitionSpec(*(axes or None for axes in sharding.dims))
    return jax.sharding.NamedSharding(mesh or jax_mesh(sharding.mesh), spec)


def abstract_array(
    shape: Sequence[int], dtype: tf.DType, sharding: Sharding
) -> jax.ShapeDtypeStruct:
    """A described device array, for a checkpoint to be restored into."""
    return jax.ShapeDtypeStruct(
        tuple(shape), dtype.as_numpy_dtype, sharding=named_sharding(sharding)
    )


# JAX keeps a primitive's parameters as long as the process lives: no TF graphs in them.
def _abstract(*args, name, module, results):
    return list(results)


def _lowering(ctx, *args, name, module, results):
    module = ir.Module.parse(module)
    main = ir.SymbolTable(module.operation)["main"]
    symbol = mlir.merge_mlir_modules(
        ctx.module_context.module,
        name,
        module,
        dst_symtab=ctx.module_context.symbol_table,
    )
    call = func.CallOp(main.type.results, ir.FlatSymbolRefAttr.get(symbol), list(args))
    return list(call.results)


_TF_PROGRAM = Primitive("tf_program")
_TF_PROGRAM.multiple_results = True
_TF_PROGRAM.def_abstract_eval(_abstract)
mlir.register_lowering(_TF_PROGRAM, _lowering)


def flat_specs(nest) -> list:
    """The leaves of a nest of `tf.TensorSpec`."""
    return tf.nest.flatten(nest)


def ir_context() -> contextlib.AbstractContextManager:
    """An MLIR context that knows the dialects of JAX's programs, to be entered."""
    return mlir.make_ir_context()


def stable_hlo_of(hlo: bytes) -> bytes:
    """A serialized HLO module as StableHLO, in MLIR's text or bytecode."""
    return _jax.mlir.hlo_to_stablehlo(hlo)


def check_fits(
    lowered: LoweredFunction,
    mesh: DeviceMesh,
    in_shardings: Sequence[Sharding | None],
    devices: Sequence[jax.Device] | None = None,
) -> None:
    """Refuses a mesh that the devices cannot make, and arguments too large for them.

    Raises:
      ValueError: see `jax_mesh`.
      OutOfMemoryError: the arguments alone do not fit into the devices' memory.
    """
    device = jax_mesh(mesh, devices).devices.flat[0]
    check_arguments_fit(lowered, mesh, in_shardings, device)


def lower_for_mesh(
    lowered: LoweredFunction,
    mesh: DeviceMesh,
    *,
    in_shardings: Sequence[Sharding | None],
    out_shardings: Sequence[Sharding | None],
    donate: Sequence[int],
    shardy: bool,
    module: bytes,
    devices: Sequence[jax.Device] | None = None,
    in_child: bool = False,
) -> MeshProgram:
    """Puts a program on the devices of `mesh`, unpartitioned; all sequences are flat.

    A None sharding is left to completion. `module` is the function's own, as MLIR
    bytecode, written for the partitioner (`modules`). What is `in_child` is compiled in
    a child process.
    """
    grid = jax_mesh(mesh, devices)

    def border(shardings):
        return tuple(None if s is None else named_sharding(s, grid) for s in shardings)

    results = tuple(
        jax.core.ShapedArray(tuple(spec.shape), spec.dtype.as_numpy_dtype)
        for spec in flat_specs(lowered.outputs)
    )

    def program(*flat):
        bound = {"name": lowered.name, "module": module, "results": results}
        return tuple(_TF_PROGRAM.bind(*flat, **bound))

    program.__name__ = lowered.name
    avals = [
        jax.ShapeDtypeStruct(tuple(spec.shape), spec.dtype.as_numpy_dtype)
        for spec in flat_specs(lowered.inputs)
    ]
    jitted = jax.jit(
        program,
        in_shardings=border(in_shardings),
        out_shardings=border(out_shardings),
        donate_argnums=tuple(donate),
        keep_unused=True,
    )
    with _partitioner(shardy), jax.set_mesh(grid), wide_elements():
        ready = jitted.lower(*avals)
    call = (jitted, *avals)
    return MeshProgram(
        lowered.name, mesh, ready, shardy, lowered, call, in_child=in_child
    )


@dataclasses.dataclass(frozen=True, eq=False)
class MeshProgram:
    """A program on a mesh, not partitioned yet.

    Args:
      name: for messages.
      mesh: the device mesh.
      lowered: as JAX lowered it.
      shardy: whether Shardy is to complete its shardings, or GSPMD.
      function: what it was lowered from, to name its arguments and ops.
      call: the jitted function, and its abstract arguments.
      repairs: what was laid out otherwise than completion chose (`repair.repaired`).
      in_child: whether XLA compiles it in a child process.
    """

    name: str
    mesh: DeviceMesh
    lowered: jax.stages.Lowered
    shardy: bool
    function: LoweredFunction | None = None
    call: tuple = ()
    repairs: tuple = ()
    in_child: bool = False

    def export(self, platforms: Sequence[str]) -> bytes:
        """The program for other machines, as `jax.export.deserialize` reads it.

        Args:
          platforms: "cpu", "cuda", "tpu": it is lowered for each.

        Raises:
          LoweringError: see `compile`.
        """
        if self.shardy:
            self._check_no_fallback()
        jitted, *arguments = self.call
        grid = jax_mesh(self.mesh)
        with _partitioner(self.shardy), jax.set_mesh(grid), wide_elements():
            exported = jax.export.export(jitted, platforms=platforms)(*arguments)
        return bytes(exported.serialize())

    def compile(self, options: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
        """Partitions and compiles.

        Args:
          options: XLA's, for this compilation.

        Raises:
          LoweringError: the module would make XLA fall back to GSPMD; XLA refuses the
            program, or ends the child process that compiles it.
          OutOfMemoryError: it needs more memory than a device has.
        """
        if self.shardy:
            self._check_no_fallback()
        try:
            in_child = _compiling_in_child(self.in_child)
            with _partitioner(self.shardy), in_child, _naming_what_axes_can():
                return self.lowered.compile(compiler_options=options)
        except ChildEnded as e:
            raise of_child(self.name, str(e), shardy=self.shardy) from e
        except jax.errors.JaxRuntimeError as e:
            refusal = parse_refusal(str(e))
            if refusal is None:
                sources = self.function.sources if self.function else None
                raise of_xla(self.name, e, shardy=self.shardy, sources=sources) from e
            timeline = self._refused(options)
            largest = allocations_of(timeline, self.function) if timeline else ()
            raise OutOfMemoryError(self.name, refusal, largest, timeline) from e

    def _refused(self, options: Mapping[str, Any] | None) -> MemoryTimeline | None:
        """What would be alive when in a program that the compiler refuses.

        It writes down such a program if it is told where to. None if it does not.
        """
        if self.function is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
            refused = contextlib.suppress(jax.errors.JaxRuntimeError, ChildEnded)
            in_child = _compiling_in_child(self.in_child)
            with _partitioner(self.shardy), in_child, refused:
                self.lowered.compile(compiler_options={**(options or {}), **dump})
            found = list(pathlib.Path(folder).rglob("*.oom_intermediate_module.txt"))
            if not found:
                return None
            return memory_timeline(found[0].read_text(), self.function.sources)

    def _check_no_fallback(self) -> None:
        for line in self.lowered.as_text().splitlines():
            if found := _GSPMD_MARK.search(line):
                raise LoweringError(
                    f"{self.name}: {found[0]} is left in the program, for which XLA "
                    "would give up Shardy for all of it; compile it for "
                    f"Partitioner.GSPMD, or take out: {line.strip()[:200]}"
                )


@contextlib.contextmanager
def _partitioner(shardy: bool) -> Iterator[None]:
    """Both lowering and compiling ask JAX's configuration which one to use."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", shardy)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


@contextlib.contextmanager
def _naming_what_axes_can() -> Iterator[None]:
    """What mesh axes cannot name, of what XLA chose, this thread's JAX leaves as it is.

    An argument or a result that is left to completion may be split by part of an axis,
    or over devices in another order. JAX takes such shardings, but refuses the program
    if it finds no argument's mesh to name them by.
    """
    _leave_unnamed()
    token = _NAMING.set(True)
    try:
        yield
    finally:
        _NAMING.reset(token)


@functools.cache
def _leave_unnamed() -> None:
    """Takes the place of the function of JAX's that names shardings by mesh axes."""
    here = pxla.maybe_recover_user_shardings

    def named(old, new, old_avals, new_avals, *args, **kwargs):
        if not _NAMING.get():
            return here(old, new, old_avals, new_avals, *args, **kwargs)
        found = []
        for sharding, aval in zip(new, new_avals, strict=True):
            try:
                found += here(old, [sharding], old_avals, [aval], *args, **kwargs)
            except (AssertionError, LookupError, NotImplementedError, ValueError):
                found.append(sharding)
        return found

    pxla.maybe_recover_user_shardings = named


@contextlib.contextmanager
def _compiling_in_child(wanted: bool) -> Iterator[None]:
    """What this thread compiles is compiled in a child process, if `wanted`."""
    if wanted:
        _let_children_compile()
    token = _IN_CHILD.set(wanted)
    try:
        yield
    finally:
        _IN_CHILD.reset(token)


@functools.cache
def _let_children_compile() -> None:
    """Takes the place of the one function of JAX's that has XLA compile a module.

    JAX's caches come before it, and what it makes of an executable after it: as a
    cached one is, it is deserialized.
    """
    here = jax_compiler.backend_compile_and_load

    def compile_and_load(backend, module, devices, options, host_callbacks):
        if not _IN_CHILD.get():
            return here(backend, module, devices, options, host_callbacks)
        text = mlir.module_to_bytecode(module)
        if host_callbacks or _CALLS_BACK in text:
            raise LoweringError(
                "a program that calls back into Python cannot be compiled in a child "
                "process: do not set in_child"
            )
        numbers = [device.id for device in devices]
        compiler = child(jax.local_device_count())
        try:
            compiled = compiler.compile(text, options.SerializeAsString(), numbers)
        except ChildRefused as e:
            raise jax.errors.JaxRuntimeError(str(e)) from None
        return backend.deserialize_executable(compiled, devices, options)

    jax_compiler.backend_compile_and_load = compile_and_load
