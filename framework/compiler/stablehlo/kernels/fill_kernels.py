"""Puts fused kernels where placeholders for them stand."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.kernels.splash import KERNELS, Splash
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    call_target,
    element_type,
    shape_of,
    walk,
)
from meshwright.framework.compiler.stablehlo.tidy import inline, tidy
from meshwright.framework.sharding.placeholders import KERNEL_PREFIX

_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "i32": jnp.int32}


def fill_kernels(module: ir.Operation, platform: str) -> bool:
    """Replaces placeholders by the ops that JAX lowers the kernels to.

    Args:
      module: a module that is not written for a partitioner yet; changed in place.
      platform: of the devices that it is compiled for.

    Returns:
      Whether only this platform can run the module now.
    """
    is_bound = False
    for op in list(walk(module)):
        target = call_target(op) or ""
        if not target.startswith(KERNEL_PREFIX):
            continue
        config = ir.StringAttr(op.attributes["backend_config"]).value
        operands = tuple((shape_of(v), str(element_type(v))) for v in op.operands)
        kind = target.removeprefix(KERNEL_PREFIX)
        lowered = ir.Module.parse(_lowered(kind, config, operands, platform)).operation
        tidy(lowered)
        _finish(lowered, config, operands, op.location)
        inline(op, ir.SymbolTable(lowered)["main"].operation)
        is_bound |= not json.loads(config)["interpret"]
    return is_bound


@functools.lru_cache(maxsize=64)
def _lowered(kind: str, config: str, operands: tuple, platform: str) -> str:
    """The StableHLO of a kernel, which equal layers share."""
    specs = [jax.ShapeDtypeStruct(shape, _DTYPES[name]) for shape, name in operands]
    run = functools.partial(KERNELS[kind], Splash(**json.loads(config)))
    traced = jax.jit(run, keep_unused=True).trace(*specs)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def _finish(lowered: ir.Operation, config: str, operands: tuple, place) -> None:
    """Gives the ops costs, and the place of the TF op that they stand for."""
    (q, dtype), (k, _), *_ = operands
    itemsize = jnp.dtype(_DTYPES[dtype]).itemsize
    Splash(**json.loads(config)).note_costs(lowered, q, k[2], itemsize)
    for op in walk(lowered):
        op.location = place
