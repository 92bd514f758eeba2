"""Puts fused kernels where placeholders for them stand."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.kernels.cudnn import Cudnn
from meshwright.framework.compiler.stablehlo.kernels.ragged import Ragged
from meshwright.framework.compiler.stablehlo.kernels.splash import Splash
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    call_target,
    element_type,
    shape_of,
    walk,
)
from meshwright.framework.compiler.stablehlo.tidy import as_function, inline_text
from meshwright.framework.devices.hardware import kind_name, platform_of
from meshwright.framework.sharding.placeholders import KERNEL_PREFIX

_KERNELS = {"splash": Splash, "cudnn": Cudnn, "ragged": Ragged}
_DTYPES = {
    "f32": jnp.float32,
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "i32": jnp.int32,
}


def fill_kernels(module: ir.Operation, device: jax.Device) -> str | None:
    """Replaces placeholders by the ops that JAX lowers the kernels to.

    Args:
      module: a module that is not written for a partitioner yet; changed in place.
      device: one of those that it is compiled for.

    Returns:
      The only platform that can run the module now; None: any.
    """
    bound_to, platform = None, platform_of(device)
    for op in list(walk(module)):
        target = call_target(op) or ""
        if not target.startswith(KERNEL_PREFIX):
            continue
        config = ir.StringAttr(op.attributes["backend_config"]).value
        operands = tuple((shape_of(v), str(element_type(v))) for v in op.operands)
        name, _, part = target.removeprefix(KERNEL_PREFIX).rpartition("_")
        kernel = _KERNELS[name](**json.loads(config))
        text = _lowered(kernel, part, operands, platform, kind_name(device))
        inline_text(op, text)
        if kernel.is_bound:
            bound_to = platform
    return bound_to


@functools.lru_cache(maxsize=64)
def _lowered(
    kernel: Splash | Cudnn | Ragged,
    part: str,
    operands: tuple,
    platform: str,
    device_kind: str,
) -> str:
    """The StableHLO of a kernel's pass, a single function, which equal layers share."""
    specs = [jax.ShapeDtypeStruct(shape, _DTYPES[name]) for shape, name in operands]
    traced = jax.jit(getattr(kernel, part), keep_unused=True).trace(*specs)
    module = as_function(traced.lower(lowering_platforms=(platform,)).as_text())
    if isinstance(kernel, Splash):
        kernel.note_costs(module, device_kind, specs)
    return str(module)
