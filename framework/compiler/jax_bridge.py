"""The one place that touches JAX's compiler interfaces.

A TF program's HLO becomes a StableHLO function that a `jax.jit` program calls through a
primitive of ours. So shardings at the border, donation, compilation, memory and cost
analysis, the persistent cache and several processes are JAX's public ones.

Annotations come as `@Sharding` custom calls. For Shardy each is rewritten to an
`sdy.sharding_constraint` over named mesh axes; a single one left over would silently
switch the whole module to GSPMD propagation, so that is an error. For GSPMD they stay.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import tensorflow as tf
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import mlir
from jaxlib import _jax
from jaxlib.mlir.dialects import sdy

from meshwright.framework.compiler.lower import LoweredFunction, LoweringError
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

# XLA's CPU backend ends the process when a device waits this long for the others; with
# more virtual devices than cores a long wait is load, not a deadlock.
_COLLECTIVE_SECONDS = 1200
_PLACEHOLDERS = ("SPMDFullToShardShape", "SPMDShardToFullShape")


def set_platform(platform: str, device_count: int | None = None) -> None:
    """Chooses the backend; call it before the first program is compiled.

    Args:
      platform: "cpu", "cuda" or "tpu".
      device_count: for "cpu", how many virtual devices.

    Raises:
      ValueError: devices are in use already with another setting.
    """
    if platform == "cuda":
        # TF only traces here; it would take the memory that programs run in.
        tf.config.set_visible_devices([], "GPU")
    flags = os.environ.get("XLA_FLAGS", "")
    for flag in ("terminate_timeout_seconds", "warn_stuck_timeout_seconds"):
        if f"xla_cpu_collective_call_{flag}" not in flags:
            flags += f" --xla_cpu_collective_call_{flag}={_COLLECTIVE_SECONDS}"
    os.environ["XLA_FLAGS"] = flags.strip()
    if platform == "cpu" and (device_count or 1) > 1:
        # Devices wait for each other in threads of one pool, by default no more than
        # cores or devices. What they wait for may need a thread too: two devices on two
        # cores came to a standstill within minutes.
        threads = device_count + (os.cpu_count() or 1)
        os.environ.setdefault("PJRT_NPROC", str(threads))
    try:
        jax.config.update("jax_platforms", platform)
        if device_count is not None and platform == "cpu":
            jax.config.update("jax_num_cpu_devices", device_count)
    except RuntimeError:
        pass  # The backend is up; what counts is whether it fits.
    have, backend = len(jax.devices()), jax.default_backend()
    expected = "gpu" if platform == "cuda" else platform
    if backend != expected or device_count not in (None, have):
        raise ValueError(
            f"{device_count or 'some'} {platform} devices were asked for but {have} "
            f"{backend} devices are in use already: choose the platform first thing in "
            "the process"
        )


def jax_mesh(mesh: DeviceMesh) -> jax.sharding.Mesh:
    """The devices of `mesh`, in its order.

    Raises:
      ValueError: it has more devices than exist, or ids that no device has.
    """
    devices = {device.id: device for device in jax.devices()}
    missing = [i for i in mesh.ids.flat if i not in devices]
    if missing:
        raise ValueError(
            f"device mesh ({mesh}) needs {mesh.size} devices but {len(devices)} "
            f"{jax.default_backend()} devices exist (no device {missing[0]}); use a "
            "smaller mesh or, on CPU, ask for more virtual devices (--device_count)"
        )
    grid = np.vectorize(devices.get, otypes=[object])(mesh.ids)
    auto = (jax.sharding.AxisType.Auto,) * len(mesh.shape)
    return jax.sharding.Mesh(grid, mesh.axis_names, axis_types=auto)


def named_sharding(
    sharding: Sharding, mesh: jax.sharding.Mesh | None = None
) -> jax.sharding.NamedSharding:
    """`sharding` over real devices."""
    spec = jax.sharding.PartitionSpec(*(axes or None for axes in sharding.dims))
    return jax.sharding.NamedSharding(mesh or jax_mesh(sharding.mesh), spec)


def place(value: np.ndarray, sharding: Sharding) -> jax.Array:
    """A host array, put on the devices; the sharding must divide its dims."""
    return jax.device_put(value, named_sharding(sharding))


def abstract_array(
    shape: Sequence[int], dtype: tf.DType, sharding: Sharding
) -> jax.ShapeDtypeStruct:
    """A described device array, for a checkpoint to be restored into."""
    return jax.ShapeDtypeStruct(
        tuple(shape), dtype.as_numpy_dtype, sharding=named_sharding(sharding)
    )


def stable_hlo(lowered: LoweredFunction, mesh: DeviceMesh, shardy: bool) -> ir.Module:
    """The StableHLO module of a lowered function, annotations ready for a partitioner.

    Must be called with an MLIR context of JAX's active.

    Raises:
      LoweringError: an annotation cannot be honoured on `mesh`.
    """
    module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(lowered.hlo))
    for op in list(_custom_calls(module.operation)):
        target = ir.StringAttr(op.attributes["call_target_name"]).value
        if target == "Sharding":
            _rewrite_annotation(lowered.name, op, mesh, shardy)
        elif target in _PLACEHOLDERS:
            raise LoweringError(
                f"{lowered.name}: op {target} needs a manual region, which programs do "
                "not support yet"
            )
    return module


def _custom_calls(op) -> Iterator:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                if inner.operation.name == "stablehlo.custom_call":
                    yield inner.operation
                yield from _custom_calls(inner.operation)


def _rewrite_annotation(name: str, op, mesh: DeviceMesh, shardy: bool) -> None:
    text = ir.StringAttr(op.attributes["mhlo.sharding"]).value
    operand = op.operands[0]
    rank = ir.RankedTensorType(operand.type).rank
    try:
        sharding = Sharding.from_hlo(mesh, text, rank)
    except ValueError as e:
        raise LoweringError(f"{name}: an annotation would be dropped: {e}") from None
    if mesh.size == 1:
        op.results[0].replace_all_uses_with(operand)
        op.erase()
    elif shardy:
        axes = ", ".join(
            f'"{axis}"={size}'
            for axis, size in zip(mesh.axis_names, mesh.shape, strict=True)
        )
        attribute = ir.Attribute.parse(
            f"#sdy.sharding<mesh<[{axes}]>, {sharding.to_sdy()}>"
        )
        with ir.InsertionPoint(op), op.location:
            constraint = sdy.ShardingConstraintOp(operand, attribute)
        op.results[0].replace_all_uses_with(constraint.result)
        op.erase()
    elif mesh.device_ids is not None:
        # The compiled program counts devices by their place in the mesh.
        logical = DeviceMesh(mesh.axis_names, mesh.shape)
        text = Sharding(logical, sharding.dims).to_hlo()
        op.attributes["mhlo.sharding"] = ir.StringAttr.get(text)


def _abstract(*args, lowered, mesh, shardy):
    return [
        jax.core.ShapedArray(tuple(spec.shape), spec.dtype.as_numpy_dtype)
        for spec in flat_specs(lowered.outputs)
    ]


def _lowering(ctx, *args, lowered, mesh, shardy):
    module = stable_hlo(lowered, mesh, shardy)
    main = ir.SymbolTable(module.operation)["main"]
    results = main.type.results
    symbol = mlir.merge_mlir_modules(
        ctx.module_context.module,
        lowered.name,
        module,
        dst_symtab=ctx.module_context.symbol_table,
    )
    call = func.CallOp(results, ir.FlatSymbolRefAttr.get(symbol), list(args))
    return list(call.results)


_TF_PROGRAM = Primitive("tf_program")
_TF_PROGRAM.multiple_results = True
_TF_PROGRAM.def_abstract_eval(_abstract)
mlir.register_lowering(_TF_PROGRAM, _lowering)


def flat_specs(nest) -> list:
    """The leaves of a nest of `tf.TensorSpec`."""
    return tf.nest.flatten(nest)


def compile_lowered(
    lowered: LoweredFunction,
    mesh: DeviceMesh,
    *,
    in_shardings: Sequence[Sharding | None],
    out_shardings: Sequence[Sharding | None],
    donate: Sequence[int],
    shardy: bool,
) -> jax.stages.Compiled:
    """Partitions and compiles for the devices of `mesh`; all sequences are flat.

    A None sharding is left to completion.

    Raises:
      LoweringError: an argument has 64-bit elements; an annotation cannot be honoured;
        GSPMD gives a result whose sharding was left to it one of no mesh axes.
    """
    devices = jax_mesh(mesh)

    def border(shardings):
        return tuple(
            None if s is None else named_sharding(s, devices) for s in shardings
        )

    def program(*flat):
        out = _TF_PROGRAM.bind(*flat, lowered=lowered, mesh=mesh, shardy=shardy)
        return tuple(out)

    program.__name__ = lowered.name
    avals = [_argument(lowered.name, spec) for spec in flat_specs(lowered.inputs)]
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", shardy)
    try:
        with jax.set_mesh(devices):
            jitted = jax.jit(
                program,
                in_shardings=border(in_shardings),
                out_shardings=border(out_shardings),
                donate_argnums=tuple(donate),
                keep_unused=True,
            )
            return jitted.lower(*avals).compile()
    except AssertionError as e:  # What JAX makes of an output that it cannot name.
        raise LoweringError(
            f"{lowered.name}: completion chose for a result a sharding that axes of "
            f"the mesh ({mesh}) cannot express; give its out_shardings"
        ) from e
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


def _argument(name: str, spec: tf.TensorSpec) -> jax.ShapeDtypeStruct:
    dtype = np.dtype(spec.dtype.as_numpy_dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise LoweringError(
            f"{name}: argument {spec} has 64-bit elements, which device arrays do not "
            "have here: pass 32 bits and cast inside"
        )
    return jax.ShapeDtypeStruct(tuple(spec.shape), dtype)
