"""What is known of devices: their peak arithmetic rate, for utilisation."""

from __future__ import annotations

import time

import jax
import numpy as np

# bfloat16 matrix FLOP/s of what JAX calls one device; TPU v2 and v3 have two devices a
# chip. From the vendors' public data sheets (dense rates).
_PEAK_FLOPS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}
_SIZE = 1024
_TRIALS = 5


def peak_flops(device_count: int) -> float | None:
    """FLOP/s of the devices in use, or None for a kind not known here.

    The virtual devices of one CPU share it, so there the rate is the whole machine's,
    measured: the best of a few float32 matrix products.
    """
    kind = jax.devices()[0].device_kind
    if jax.default_backend() == "cpu":
        return _measured_cpu_flops()
    known = [name for name in _PEAK_FLOPS if kind.startswith(name)]
    return _PEAK_FLOPS[max(known, key=len)] * device_count if known else None


def _measured_cpu_flops() -> float:
    a = np.ones((_SIZE, _SIZE), np.float32)
    a @ a
    best = float("inf")
    for _ in range(_TRIALS):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2.0 * _SIZE**3 / best
