"""How many cycles a tile of the fused attention kernel takes on TPUs, as scheduled.

    python benchmarks/kernel_cycles.py [--topologies=v4:2x2x1,v5e:2x2]
        [--dtypes=bfloat16,float32] [--head_dims=64,128,256] [--tokens=2048]
        [--tile=1024]

Compiles the kernel's passes for a TPU and counts the instruction bundles that libtpu
schedules for a step of their grids: each takes a cycle, and more where it waits. The
table is of 1024 logits, for `_SCHEDULES` in `splash.py`. That wants libtpu, no TPU.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from absl import app, flags

from meshwright import framework as mw
from meshwright.framework.compiler.stablehlo.kernels.splash import PRODUCTS, Splash
from meshwright.framework.devices.topology import topology_devices

_BUNDLES = re.compile(r"total scheduled bundles:\s+(\d+)")


def define_flags() -> None:
    """Called only by this program."""
    topologies = ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
    flags.DEFINE_list("topologies", topologies, "TPU topologies.")
    flags.DEFINE_list("dtypes", ["bfloat16", "float32"], "Of queries and keys.")
    flags.DEFINE_list("head_dims", ["64", "128", "256"], "Features of a head.")
    flags.DEFINE_integer("tokens", 2048, "Of queries, and of keys.", lower_bound=128)
    flags.DEFINE_integer("tile", 1024, "The most tokens of a tile.", lower_bound=128)


def cycles_of(folder: pathlib.Path, logits: int) -> list[float]:
    """Cycles of 1024 logits in each pass, by libtpu's dumps of tiles of so many."""
    cycles = []
    for name in PRODUCTS:
        (dump,) = folder.glob(f"*{name}*schedule-analysis_final_bundles.txt")
        with dump.open() as lines:
            bundles = next(int(m[1]) for m in map(_BUNDLES.search, lines) if m)
        cycles.append(bundles / logits * 1024)
    return cycles


def compile_passes(
    kernel: Splash, topology: str, dtype: jnp.dtype, tokens: int, head_dim: int
) -> None:
    """Compiles both passes of a row of 8 heads, for a device of a TPU."""
    device = jax.sharding.SingleDeviceSharding(topology_devices(topology)[0])

    def spec(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    heads = spec(1, 8, tokens, head_dim)
    sums = spec(1, 8, tokens, dtype=jnp.float32)
    jax.jit(kernel.forward).lower(*[heads] * 3).compile()
    jax.jit(kernel.backward).lower(*[heads] * 4, sums, heads).compile()


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    given = flags.FLAGS
    folder = pathlib.Path(tempfile.mkdtemp())
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        "--xla_jf_emit_annotations=true"
    )
    mw.set_platform("cpu")
    print("   topology     dtype  head_dim  forward  queries  keys")
    kernel = Splash(left=None, right=0, cap=None, tile=given.tile, interpret=False)
    dtypes, head_dims = map(jnp.dtype, given.dtypes), map(int, given.head_dims)
    for topology, dtype, head_dim in itertools.product(
        given.topologies, dtypes, head_dims
    ):
        compile_passes(kernel, topology, dtype, given.tokens, head_dim)
        tile = kernel.tile_of(given.tokens, head_dim, dtype.itemsize)
        cycles = cycles_of(folder, tile**2)
        numbers = "".join(f"{n:8.2f}" for n in cycles)
        print(f"{topology:>11}{dtype.name:>10}{head_dim:10}{numbers}", flush=True)
        for dump in folder.iterdir():
            dump.unlink()
    shutil.rmtree(folder)


if __name__ == "__main__":
    define_flags()
    app.run(main)
