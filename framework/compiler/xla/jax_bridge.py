"""The one place that touches JAX's compiler interfaces.

A TF program's HLO becomes a StableHLO function that a `jax.jit` program calls through a
primitive of ours. JAX's public interfaces do the rest: shardings at the border,
donation, compilation, memory and cost analysis, persistent cache, several processes.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jaxlib
import tensorflow as tf
from jax._src import compiler as jax_compiler
from jax._src import distributed
from jax._src.clusters import ClusterEnv
from jax._src.interpreters import pxla
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import mlir
from jaxlib import _jax

from meshwright.framework.compiler.boundary.wide_elements import wide_elements
from meshwright.framework.compiler.lowering.errors import LoweringError
from meshwright.framework.compiler.xla.child import ChildRefused, child
from meshwright.framework.compiler.xla.jax_mesh import jax_mesh, named_sharding
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

JAXLIB = tuple(int(n) for n in re.findall(r"\d+", jaxlib.__version__)[:3])
"""The version of jaxlib."""
_DETECTION_SECONDS = 60
_EXCHANGES = itertools.count()
# Whether the current compile is to be done in a child process.
_IN_CHILD = contextvars.ContextVar("in_child", default=False)
_NAMING = contextvars.ContextVar("naming", default=False)
# With this call a program calls back the process that lowered it, by an address there.
_CALLS_BACK = b"python_cpu_callback"


def detected_cluster() -> tuple[str | None, int | None, int | None, list[int] | None]:
    """This process's place in a cluster of SLURM, a TPU pod, Kubernetes or Open MPI.

    Returns:
      Address of process 0, number of processes, number of this one, numbers of its own
      devices on this machine (None: all); all None outside these clusters.
    """
    return ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, _DETECTION_SECONDS
    )


def exchange(text: str, *, seconds: float) -> list[str | None]:
    """What each process passes here; all call it equally often, from one thread.

    The texts go by way of process 0's service, so that no device has to wait.

    Args:
      text: this process's.
      seconds: how long to wait for the others.

    Returns:
      By number of the process its text; None of one that did not come.
    """
    number, texts = next(_EXCHANGES), []
    client, here = distributed.global_state.client, jax.process_index()
    client.key_value_set(f"meshwright/{number}/{here}", text)
    deadline = time.monotonic() + seconds
    for process in range(jax.process_count()):
        left = max(1, int(1000 * (deadline - time.monotonic())))
        try:
            texts.append(
                client.blocking_key_value_get(f"meshwright/{number}/{process}", left)
            )
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE_EXCEEDED" not in str(e):
                raise
            texts.append(None)
    if number and None not in texts:  # All have read what was told before.
        client.key_value_delete(f"meshwright/{number - 1}/{here}")
    return texts


# JAX keeps a primitive's parameters as long as the process lives: they hold no graphs.
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


def ir_context() -> contextlib.AbstractContextManager:
    """An MLIR context that knows the dialects of JAX's programs, to be entered."""
    return mlir.make_ir_context()


def stable_hlo_of(hlo: bytes) -> bytes:
    """A serialized HLO module as StableHLO, in MLIR's text or bytecode."""
    return _jax.mlir.hlo_to_stablehlo(hlo)


def lower_for_mesh(
    name: str,
    module: bytes,
    mesh: DeviceMesh,
    *,
    inputs: Sequence[tf.TensorSpec],
    outputs: Sequence[tf.TensorSpec],
    in_shardings: Sequence[Sharding | None],
    out_shardings: Sequence[Sharding | None],
    donate: Sequence[int],
    partitioner: Partitioner,
    devices: Sequence[jax.Device] | None = None,
) -> tuple[jax.stages.Lowered, tuple]:
    """Puts a module on the devices of `mesh`, unpartitioned.

    Args:
      name: the program's.
      module: MLIR bytecode, written for the partitioner.
      mesh: the device mesh.
      inputs, outputs: specs of its arguments and its results.
      in_shardings, out_shardings: their shardings; None: left to completion.
      donate: numbers of the arguments whose buffers the results may take over.
      partitioner: Shardy or GSPMD.
      devices: those of a topology, or None.

    Returns:
      The program as JAX lowered it; and for `export` the function that it was lowered
      from, with its abstract arguments.
    """
    grid = jax_mesh(mesh, devices)

    def border(shardings):
        return tuple(None if s is None else named_sharding(s, grid) for s in shardings)

    def types(specs, kind):
        return tuple(kind(tuple(s.shape), s.dtype.as_numpy_dtype) for s in specs)

    results = types(outputs, jax.core.ShapedArray)

    def program(*flat):
        bound = {"name": name, "module": module, "results": results}
        return tuple(_TF_PROGRAM.bind(*flat, **bound))

    program.__name__ = name
    call = (
        jax.jit(
            program,
            in_shardings=border(in_shardings),
            out_shardings=border(out_shardings),
            donate_argnums=tuple(donate),
            keep_unused=True,
        ),
        *types(inputs, jax.ShapeDtypeStruct),
    )
    jitted, *arguments = call
    with _requesting(partitioner), jax.set_mesh(grid), wide_elements():
        return jitted.lower(*arguments), call


def compile_lowered(
    lowered: jax.stages.Lowered,
    partitioner: Partitioner,
    options: Mapping[str, Any] | None = None,
    *,
    in_child: bool = False,
) -> tuple[jax.stages.Compiled, bool]:
    """Has XLA partition and compile a program, as JAX lowered it.

    Args:
      lowered: the program.
      partitioner: Shardy or GSPMD.
      options: XLA's, for this compilation.
      in_child: whether XLA compiles in a child process.

    Returns:
      The program, and whether it was serialized: by a child, or in JAX's cache.

    Raises:
      JaxRuntimeError: XLA refuses the program.
      ChildEnded: XLA ended the child process.
      LoweringError: it calls back into Python and is to be compiled in a child.
    """
    with (
        _requesting(partitioner),
        _compiling_in_child(in_child),
        _naming_axes(),
        _cache_hits() as hits,
    ):
        compiled = lowered.compile(compiler_options=options)
    return compiled, in_child or bool(hits)


@contextlib.contextmanager
def _cache_hits() -> Iterator[list[str]]:
    """Notes what JAX reads from its cache, for whichever thread."""
    hits: list[str] = []

    def note(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    jax.monitoring.register_event_listener(note)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(note)


def compile_here(
    lowered: jax.stages.Lowered,
    partitioner: Partitioner,
    options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """`compile_lowered` in this process, whatever JAX has of the program in a cache."""
    # An option that does nothing is a part of the keys of JAX's caches, and under this
    # one nothing is kept.
    options = {**(options or {}), "xla_dump_emitter_re": "compile_here"}
    with not_cached():
        return compile_lowered(lowered, partitioner, options)[0]


def export(
    call: tuple, mesh: DeviceMesh, partitioner: Partitioner, platforms: Sequence[str]
) -> bytes:
    """A program for other machines, as `jax.export.deserialize` reads it.

    Args:
      call: what `lower_for_mesh` returns beside the program.
      mesh: the device mesh.
      partitioner: Shardy or GSPMD.
      platforms: "cpu", "cuda", "tpu": it is lowered for each.
    """
    jitted, *arguments = call
    with _requesting(partitioner), jax.set_mesh(jax_mesh(mesh)), wide_elements():
        exported = jax.export.export(jitted, platforms=platforms)(*arguments)
    return bytes(exported.serialize())


@contextlib.contextmanager
def _requesting(partitioner: Partitioner) -> Iterator[None]:
    """Sets JAX's partitioner: lowering and compiling both read its configuration."""
    before = jax.config.jax_use_shardy_partitioner
    shardy = partitioner is Partitioner.SHARDY
    jax.config.update("jax_use_shardy_partitioner", shardy)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


@contextlib.contextmanager
def _naming_axes() -> Iterator[None]:
    """This thread's JAX keeps shardings of XLA's choice that mesh axes cannot name.

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
    """Replaces JAX's function that names shardings by mesh axes."""
    original = pxla.maybe_recover_user_shardings

    def named(old, new, old_avals, new_avals, *args, **kwargs):
        if not _NAMING.get():
            return original(old, new, old_avals, new_avals, *args, **kwargs)
        shardings = []
        for sharding, aval in zip(new, new_avals, strict=True):
            try:
                shardings += original(
                    old, [sharding], old_avals, [aval], *args, **kwargs
                )
            except (AssertionError, LookupError, NotImplementedError, ValueError):
                shardings.append(sharding)
        return shardings

    pxla.maybe_recover_user_shardings = named


@contextlib.contextmanager
def not_cached() -> Iterator[None]:
    """Keeps compiled programs out of JAX's persistent cache, which may still answer."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


@contextlib.contextmanager
def _compiling_in_child(wanted: bool) -> Iterator[None]:
    """Programs that this thread compiles are compiled in a child process, if `wanted`.

    They are not cached: an executable that is serialized a second time lacks functions
    when it is read (jaxlib 0.10.2, while
    `test_an_executable_that_is_serialized_twice_lacks_functions` passes).
    """
    if wanted:
        _let_children_compile()
    token = _IN_CHILD.set(wanted)
    try:
        with not_cached() if wanted else contextlib.nullcontext():
            yield
    finally:
        _IN_CHILD.reset(token)


@functools.cache
def _let_children_compile() -> None:
    """Replaces the one function of JAX that has XLA compile a module.

    JAX's caches come before it, and its handling of executables after it: as a cached
    executable is, the child's is deserialized.
    """
    original = jax_compiler.backend_compile_and_load

    def compile_and_load(backend, module, devices, options, host_callbacks):
        if not _IN_CHILD.get():
            return original(backend, module, devices, options, host_callbacks)
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
