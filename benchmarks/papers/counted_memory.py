"""What libtpu estimates for ops that only wait for memory, beside their bytes.

    python benchmarks/papers/counted_memory.py [--topology=v3:1x1]

Each op goes through arrays of 32768 x 1024 elements, compiled alone. `cycles` are those
of which step times are made (docs/reference/planning/step_times.md), `memory` those in
which its operands and results pass at the published bandwidth.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import SingleDeviceSharding

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.memory import padded_bytes
from meshwright.framework.compiler.hlo.roofline import moved_bytes
from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.framework.devices.hardware import TpuKind
from meshwright.framework.devices.topology import topology, topology_devices

SHAPE = (32768, 1024)
OPS: dict[str, tuple[Callable, Sequence[str]]] = {
    "negate float32": (lambda x: -x, ("float32",)),
    "add float32": (lambda x, y: x + y, ("float32", "float32")),
    "multiply and add float32": (lambda x: x * 1.5 + 0.5, ("float32",)),
    "bfloat16 to float32": (lambda x: x.astype(jnp.float32), ("bfloat16",)),
    "sum of float32": (jnp.sum, ("float32",)),
    "negate bfloat16": (lambda x: -x, ("bfloat16",)),
    "add bfloat16": (lambda x, y: x + y, ("bfloat16", "bfloat16")),
    "multiply and add bfloat16": (lambda x: x * 1.5 + 0.5, ("bfloat16",)),
}
"""Functions by name, and the dtypes of their arguments."""


def ops_of(module: HloModule, kind: TpuKind) -> Iterator[tuple[int, float]]:
    """Cycles that libtpu estimates, and cycles of memory, of each op of a program."""
    for op in module.inside[module.entry]:
        if op.cycles is not None:
            moved = moved_bytes(module, op, size=padded_bytes)
            yield op.cycles, moved / kind.memory_bandwidth * kind.clock


def main(argv: Sequence[str]) -> None:
    """Compiles the ops and prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    set_platform("cpu")
    name = flags.FLAGS.topology
    try:
        kind, devices = topology(name).kind, topology_devices(name)
    except (ValueError, ImportError) as error:
        sys.exit(f"counted_memory.py: {error}")
    place = SingleDeviceSharding(np.ravel(devices)[0])
    print(f"{name:28}{'cycles':>9}{'memory':>9}{'ratio':>7}")
    for label, (function, dtypes) in OPS.items():
        arguments = [jax.ShapeDtypeStruct(SHAPE, d, sharding=place) for d in dtypes]
        text = jax.jit(function).lower(*arguments).compile().as_text()
        cycles, memory = map(sum, zip(*ops_of(HloModule(text), kind), strict=True))
        print(f"{label:28}{cycles:9}{memory:9.0f}{cycles / memory:7.2f}", flush=True)


if __name__ == "__main__":
    flags.DEFINE_string("topology", "v3:1x1", "A topology of TPUs.")
    app.run(main)
