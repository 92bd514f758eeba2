"""Reshards, and whether XLA's partitioner must make the tensor whole on the way.

Run as a program it compiles them, under both partitioners, and writes to stderr what is
found, among XLA's own warnings.
"""

import functools
import os
import sys

if __name__ == "__main__":
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"  # With XLA's warnings.

import tensorflow as tf

from meshwright.framework.compiler.program import Program, compile_program
from meshwright.framework.compiler.xla.completion import Completion, complete
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import mesh_split, replicate
from meshwright.framework.sharding.mesh import DeviceMesh

MESH = DeviceMesh(("X", "Y"), (2, 4))
SHAPE = (64, 256)


def moved(before, after):
    def fn(a):
        a = mesh_split(a, MESH, before)
        return mesh_split(tf.tanh(a), MESH, after) * 2.0

    return fn


def meant_to_be_whole(a):
    a = mesh_split(a, MESH, ["X", "Y"])
    return mesh_split(replicate(tf.tanh(a)) * 2.0, MESH, ["Y", "X"])


def uneven(a):
    return moved(["X", None], [None, "Y"])(a[:63, :254])


def tile_of_a_reshape(a):
    a = mesh_split(a, MESH, ["X", None])
    return mesh_split(tf.reshape(tf.tanh(a), [16, 1024]), MESH, [None, "Y"])


def one_axis_at_a_time(a):
    return mesh_split(moved(["X", None], ["X", "Y"])(a), MESH, [None, "Y"])


RESHARDS = {
    "other dim, other axis": moved(["X", None], [None, "Y"]),
    "same dim, other axis": moved(["X", None], ["Y", None]),
    "axes exchanged": moved(["X", "Y"], ["Y", "X"]),
    "other device order": moved([["X", "Y"], None], [["Y", "X"], None]),
    "gathered by half": moved(["X", "Y"], ["X", None]),
    "one axis at a time": one_axis_at_a_time,
    "meant to be whole": meant_to_be_whole,
    "uneven": uneven,
    "tile of a reshape": tile_of_a_reshape,
}


@functools.cache
def program(name: str, partitioner: Partitioner) -> Program:
    return compile_program(
        RESHARDS[name], [tf.TensorSpec(SHAPE)], MESH, partitioner=partitioner, name=name
    )


@functools.cache
def completion(name: str, partitioner: Partitioner) -> Completion:
    return complete(program(name, partitioner).unpartitioned)


def main() -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", MESH.size)
    # JAX's cache must neither answer for a dump nor keep what was compiled for one.
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    for partitioner in Partitioner:
        for name in RESHARDS:
            program(name, partitioner)
            print(f"BEGIN {partitioner.value} {name}", file=sys.stderr, flush=True)
            remats = completion(name, partitioner).rematerializations()
            print(f"FOUND {len(remats)}", file=sys.stderr, flush=True)
    completion.cache_clear()
    assert completion(name, partitioner).rematerializations() == remats


if __name__ == "__main__":
    main()
