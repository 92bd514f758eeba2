"""Chooses the devices of this process: any number of CPUs, GPUs or TPUs."""

from __future__ import annotations

import numbers
import os
import re

import jax
import tensorflow as tf

from meshwright.framework.compiler.xla import standstill
from meshwright.framework.devices.topology import give_compiler_stack

# XLA's CPU backend ends the process when a device waits this long for the others; with
# more virtual devices than cores a long wait is load, not a deadlock. A deadlock ends
# sooner (`standstill`), once XLA has logged how many devices came to which collective.
_COLLECTIVE_TIMEOUTS = {
    "xla_cpu_collective_call_terminate_timeout_seconds": 1200,
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 45,
    "xla_cpu_collective_timeout_seconds": 1200,
}
# XLA's CPU backend has two pools of so many threads each, and a device that waits for
# the others holds one. The first pool runs each device's program and, while 32 calls
# are in flight, each device's next call, which waits for one of them: with fewer than
# two threads for a device they come to a standstill. The second, of at most 256
# threads, runs the loops and branches of a program that are under way together, each
# up to its next collective. So it is with jaxlib 0.10.2; the number may go when
# `test_many_calls_in_flight_have_the_threads_that_they_need` passes without it.
_THREADS_PER_DEVICE = 8
_PLATFORMS = ("cpu", "cuda", "tpu")


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
      standstill_seconds: for "cpu", after devices have waited for each other for so
        long while none of XLA's threads ran, the process reports it and ends, with
        status 70. None: never, for programs that rightly wait for something outside.

    Raises:
      TypeError: the number of devices is no int.
      ValueError: there is no such platform, or none of its devices here; or JAX has
        started with other devices.
    """
    if platform not in _PLATFORMS:
        hint = '; did you mean "cuda"?' if platform == "gpu" else ""
        raise ValueError(
            f'there is no platform {platform!r}: it is "cpu", "cuda" or "tpu"{hint}'
        )
    if not isinstance(device_count, numbers.Integral | None):
        raise TypeError(
            f"device_count is {device_count!r}; pass the number of virtual cpu devices "
            "as an int, such as 8"
        )
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
        # TF only traces here; it would take the memory that programs need.
        tf.config.set_visible_devices([], "GPU")
    if platform == "tpu":
        give_compiler_stack()
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
        pass  # The backend is up; whether it fits is checked below.
    try:
        have, backend = jax.local_device_count(), jax.default_backend()
    except (AssertionError, RuntimeError) as e:  # JAX's plugins raise either.
        raise ValueError(
            f"no {platform} devices can be used here ({str(e)[:200] or 'no plugin'}); "
            f"install meshwright[{platform}] on a machine that has some, or choose "
            "platform cpu"
        ) from e
    expected = "gpu" if platform == "cuda" else platform
    if backend != expected or device_count not in (None, have):
        devices = f"{have} {backend} device{'s' if have > 1 else ''}"
        raise ValueError(
            f"JAX has already started with {devices}, not {device_count or 'some'} of "
            f"{platform}: call mw.set_platform before jax.devices() and whatever "
            "else starts it"
        )
