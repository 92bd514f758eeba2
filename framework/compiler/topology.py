"""The devices of TPU pods that are not here, to compile for; libtpu describes them."""

from __future__ import annotations

import os
import re

import jax
from jax.experimental import topologies

# Chips along the dims of the largest pod that is built of each kind. libtpu describes
# any size, such as a v3 pod of 64 x 64 chips, that nobody could ever run on.
_LARGEST = {
    "v2": (16, 16),
    "v3": (32, 32),
    "v4": (16, 16, 16),
    "v5e": (16, 16),
    "v5p": (16, 20, 28),
    "v6e": (16, 16),
}
# libtpu asks the network what machine this is, and locks itself for one process.
_NO_TPU_HERE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v3-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def topology_devices(name: str) -> list[jax.Device]:
    """The devices of a TPU topology, for `compile_program`; no TPU is needed.

    Args:
      name: kind and chips along each dim, such as "v3:32x32", the 2048 cores of the
        GSPMD and GShard papers: a v2 or v3 chip is two devices.

    Returns:
      The devices row by row: by (z, y, x, core on chip), the last running fastest.

    Raises:
      ValueError: an unknown kind, or a size that it does not come in.
      ImportError: libtpu is not installed.
    """
    _check(name)
    if jax.default_backend() != "tpu":
        for variable, value in _NO_TPU_HERE.items():
            os.environ.setdefault(variable, value)
    try:
        found = topologies.get_topology_desc(name, platform="tpu").devices
    except jax.errors.JaxRuntimeError as e:
        raise ValueError(f"TPU topology {name!r}: {e}") from e
    except RuntimeError as e:
        raise ImportError(
            f"TPU topology {name!r} needs libtpu, which is not installed: "
            "pip install 'meshwright[plan]'"
        ) from e
    return sorted(found, key=lambda d: (*reversed(d.coords), d.core_on_chip))


def _check(name: str) -> None:
    kind, _, size = name.partition(":")
    if kind not in _LARGEST:
        raise ValueError(
            f"TPU topology {name!r} is of an unknown kind: one of {', '.join(_LARGEST)}"
            ", then the chips along each dim, as in 'v3:16x16'"
        )
    largest = _LARGEST[kind]
    well_formed = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size)
    dims = [int(n) for n in size.split("x")] if well_formed else []
    if len(dims) != len(largest) or any(
        n > most for n, most in zip(sorted(dims), sorted(largest), strict=True)
    ):
        example = f"{kind}:" + "x".join(map(str, largest))
        raise ValueError(
            f"TPU topology {name!r}: {kind} pods have {len(largest)} dims and go up to "
            f"{example!r}"
        )
