"""The one place that touches JAX's compiler interfaces.

A TF program's HLO becomes a StableHLO function that a `jax.jit` program calls through a
primitive of ours. So shardings at the border, donation, compilation, memory and cost
analysis, the persistent cache and several processes are JAX's public ones.

Annotations come as `@Sharding` custom calls. For Shardy each is rewritten to an
`sdy.sharding_constraint` over named mesh axes; a single one left over would silently
switch the whole module to GSPMD propagation, so that is an error. For GSPMD they stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pathlib
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np
import tensorflow as tf
from jax._src.clusters import ClusterEnv
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import mlir
from jaxlib import _jax

from meshwright.framework.compiler import standstill
from meshwright.framework.compiler.constraints import (
    refuse_foreign,
    rewrite_annotations,
    untype_annotations,
)
from meshwright.framework.compiler.device_order import device_order
from meshwright.framework.compiler.errors import (
    LoweringError,
    inexpressible,
    of_xla,
    unknown_size,
)
from meshwright.framework.compiler.fourier import keep_row_major
from meshwright.framework.compiler.lower import LoweredFunction
from meshwright.framework.compiler.manual_regions import rewrite_manual_regions
from meshwright.framework.compiler.memory import MemoryTimeline, memory_timeline
from meshwright.framework.compiler.refusal import (
    DoesNotFit,
    allocations_of,
    check_arguments_fit,
    parse_refusal,
)
from meshwright.framework.compiler.rolls import rotate
from meshwright.framework.compiler.slices import drop_idle_steps
from meshwright.framework.compiler.stable_hlo import Blame
from meshwright.framework.compiler.topology import place_on_torus, topology_of
from meshwright.framework.compiler.tuples import flatten_tuples
from meshwright.framework.compiler.wide_elements import wide_elements
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

JAXLIB = tuple(int(n) for n in re.findall(r"\d+", jaxlib.__version__)[:3])
"""The version of jaxlib."""
# XLA's CPU backend ends the process when a device waits this long for the others; with
# more virtual devices than cores a long wait is load, not a deadlock. What is one ends
# sooner (`standstill`); by then XLA shall have said how many devices came to which.
_COLLECTIVE_TIMEOUTS = {
    "xla_cpu_collective_call_terminate_timeout_seconds": 1200,
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 45,
    "xla_cpu_collective_timeout_seconds": 1200,
}
# XLA's CPU backend has two pools of so many threads each, and a device that waits for
# the others holds one. In the first run each device's program and, while 32 calls are
# in flight, each device's next call, which waits for one of them: with fewer than two
# threads for a device they come to a standstill. In the second, of at most 256, go on
# the loops and branches of a program that are under way together, each up to its next
# collective.
_THREADS_PER_DEVICE = 8
_DETECTION_SECONDS = 60
# What XLA takes for a program of GSPMD's, whatever partitioner it is asked for.
_GSPMD_MARK = re.compile(
    r"mhlo\.sharding|@(?:Sharding|SPMDFullToShardShape|SPMDShardToFullShape)\b"
)


def set_platform(
    platform: str,
    device_count: int | None = None,
    *,
    standstill_seconds: float | None = 60.0,
) -> None:
    """Chooses the backend; call it before the first program is compiled.

    Args:
      platform: "cpu", "cuda" or "tpu".
      device_count: for "cpu", how many virtual devices this process has.
      standstill_seconds: for "cpu", when devices have waited for each other for so long
        while none of XLA's threads ran, the process says so and ends, with status 70.
        None: never, for programs that rightly wait for something outside.

    Raises:
      ValueError: there are no such devices here, or devices are in use already with
        another setting.
    """
    if device_count is not None and (platform != "cpu" or device_count < 1):
        raise ValueError(
            f"device_count={device_count} with platform={platform!r}: it is the number "
            "of virtual cpu devices, 1 or more; other platforms bring their own"
        )
    if standstill_seconds is not None and not standstill_seconds > 0:
        raise ValueError(
            f"standstill_seconds={standstill_seconds}: it is above 0, or None for never"
        )
    standstill.set_limit(standstill_seconds)
    if platform == "cuda":
        # TF only traces here; it would take the memory that programs run in.
        tf.config.set_visible_devices([], "GPU")
    flags = os.environ.get("XLA_FLAGS", "")
    for flag, seconds in _COLLECTIVE_TIMEOUTS.items():
        if flag not in flags:
            flags += f" --{flag}={seconds}"
    os.environ["XLA_FLAGS"] = flags.strip()
    forced = re.search(r"xla_force_host_platform_device_count=(\d+)", flags)
    devices = device_count or max(jax.config.jax_num_cpu_devices, 1)
    if device_count is None and forced:
        devices = max(devices, int(forced[1]))
    if platform == "cpu" and devices > 1:
        threads = _THREADS_PER_DEVICE * devices + (os.cpu_count() or 1)
        os.environ.setdefault("PJRT_NPROC", str(threads))
    try:
        jax.config.update("jax_platforms", platform)
        if device_count is not None and platform == "cpu":
            jax.config.update("jax_num_cpu_devices", device_count)
    except RuntimeError:
        pass  # The backend is up; what counts is whether it fits.
    try:
        have, backend = jax.local_device_count(), jax.default_backend()
    except (AssertionError, RuntimeError) as e:  # By JAX's plugins, each in its way.
        raise ValueError(
            f"no {platform} devices can be used here ({str(e)[:200] or 'no plugin'}); "
            f"install meshwright[{platform}] on a machine that has some, or choose "
            "platform cpu"
        ) from e
    expected = "gpu" if platform == "cuda" else platform
    if backend != expected or device_count not in (None, have):
        raise ValueError(
            f"{device_count or 'some'} {platform} devices were asked for but {have} "
            f"{backend} devices are in use already: choose the platform first thing in "
            "the process"
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


def stable_hlo(
    lowered: LoweredFunction,
    mesh: DeviceMesh,
    shardy: bool,
    rewrite: Callable[[ir.Module], None] | None = None,
) -> bytes:
    """The StableHLO module of a lowered function, annotations ready for a partitioner.

    Returns:
      MLIR bytecode.

    Raises:
      LoweringError: an annotation or a manual region cannot be honoured on `mesh`.
    """
    with neutral_module(lowered) as module:
        blame = Blame(lowered.name, lowered.sources)
        refuse_foreign(blame, module)
        untype_annotations(blame, module, mesh)
        drop_idle_steps(module)
        rotate(module)
        keep_row_major(module)
        if rewrite is not None:
            rewrite(module)
        rewrite_manual_regions(blame, module, mesh, shardy=shardy)
        rewrite_annotations(blame, module, mesh, shardy=shardy)
        return bytecode(module)


@contextlib.contextmanager
def neutral_module(lowered: LoweredFunction) -> Iterator[ir.Module]:
    """The StableHLO module that a function was lowered to, for either partitioner.

    Annotations and manual regions are in it as the TF program has them. It is to be
    used within the context.
    """
    with mlir.make_ir_context(), ir.Location.unknown():
        text = lowered.rewritten or _jax.mlir.hlo_to_stablehlo(lowered.hlo)
        module = ir.Module.parse(text)
        flatten_tuples(module)
        yield module


def bytecode(module: ir.Module) -> bytes:
    """MLIR bytecode of a module."""
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


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


def lower_for_mesh(
    lowered: LoweredFunction,
    mesh: DeviceMesh,
    *,
    in_shardings: Sequence[Sharding | None],
    out_shardings: Sequence[Sharding | None],
    donate: Sequence[int],
    shardy: bool,
    devices: Sequence[jax.Device] | None = None,
    rewrite: Callable[[ir.Module], None] | None = None,
    only_read: bool = False,
) -> MeshProgram:
    """Puts a program on the devices of `mesh`, unpartitioned; all sequences are flat.

    A None sharding is left to completion. `rewrite` changes the module while it is for
    either partitioner. What is `only_read` need not fit.

    Raises:
      LoweringError: an annotation cannot be honoured.
      DoesNotFit: the arguments alone do not fit into the devices' memory.
    """
    grid = jax_mesh(mesh, devices)
    if not only_read:
        check_arguments_fit(lowered, mesh, in_shardings, grid.devices.flat[0])

    def border(shardings):
        return tuple(None if s is None else named_sharding(s, grid) for s in shardings)

    if lowered.unknown_size is not None and mesh.size > 1:
        where = lowered.sources.text(lowered.unknown_size)
        raise unknown_size(lowered.name, where, what="a tensor")
    module = stable_hlo(lowered, mesh, shardy, rewrite)

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
    return MeshProgram(lowered.name, mesh, ready, shardy, lowered, (jitted, *avals))


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
    """

    name: str
    mesh: DeviceMesh
    lowered: jax.stages.Lowered
    shardy: bool
    function: LoweredFunction | None = None
    call: tuple = ()
    repairs: tuple = ()

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
          LoweringError: the module would make XLA fall back to GSPMD; GSPMD gives a
            result whose sharding was left to it one of no mesh axes; XLA refuses it.
          DoesNotFit: it needs more memory than a device has.
        """
        if self.shardy:
            self._check_no_fallback()
        try:
            with _partitioner(self.shardy):
                return self.lowered.compile(compiler_options=options)
        except (AssertionError, LookupError, NotImplementedError, ValueError) as e:
            if not _names_a_sharding(e):
                raise
            outputs = self.function.outputs if self.function else None
            raise inexpressible(
                self.name, self.mesh, outputs, _chosen(e), shardy=self.shardy
            ) from e
        except jax.errors.JaxRuntimeError as e:
            refusal = parse_refusal(str(e))
            if refusal is None:
                sources = self.function.sources if self.function else None
                raise of_xla(self.name, e, shardy=self.shardy, sources=sources) from e
            timeline = self._refused(options)
            largest = allocations_of(timeline, self.function) if timeline else ()
            raise DoesNotFit(self.name, refusal, largest, timeline) from e

    def _refused(self, options: Mapping[str, Any] | None) -> MemoryTimeline | None:
        """What would be alive when in a program that the compiler refuses.

        It writes down such a program if it is told where to. None if it does not.
        """
        if self.function is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
            refused = contextlib.suppress(jax.errors.JaxRuntimeError)
            with _partitioner(self.shardy), refused:
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


def _names_a_sharding(error: Exception) -> bool:
    """Whether JAX raised it on its way from a tile assignment to mesh axes.

    Of what it cannot name it says so, or some step of the way fails.
    """
    frames = traceback.walk_tb(error.__traceback__)
    return any(f.f_code.co_name == "parse_flatten_op_sharding" for f, _ in frames)


def _chosen(error: Exception) -> list[str]:
    """The results' shardings as HLO has them, some of which JAX could not name.

    It does not tell, but the frames that it left have them; [] if a later JAX has not.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "maybe_recover_user_shardings":
            given = frame.f_locals.get("new_shardings", ())
            return [str(getattr(one, "_hlo_sharding", "")) for one in given]
    return []


@contextlib.contextmanager
def _partitioner(shardy: bool) -> Iterator[None]:
    """Both lowering and compiling ask JAX's configuration which one to use."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", shardy)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
