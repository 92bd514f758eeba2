"""Small states, their checkpoints, and what can happen to files."""

from __future__ import annotations

import hashlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.checkpoints.checkpoints import Checkpoints


def mesh_sharding(*shape):
    mesh = jax.make_mesh(shape, ("X", "Y"))
    return NamedSharding(mesh, PartitionSpec("X", "Y"))


def one_device():
    return SingleDeviceSharding(jax.devices()[0])


def make_state(sharding=None, seed=0, rows=256):
    """Sharded, replicated, scalar, bfloat16 and empty entries; `step` is the seed."""
    rng = np.random.default_rng(seed)
    sharding = sharding or mesh_sharding(2, 4)
    weight = rng.standard_normal((rows, 64)).astype(np.float32)
    return NestedMap(
        theta=NestedMap(
            layer=NestedMap(w=jax.device_put(weight, sharding)),
            b=jnp.asarray(rng.standard_normal(7), jnp.bfloat16),
        ),
        slots=NestedMap(),
        step=jnp.asarray(seed, jnp.int32),
    )


def make_wide_state(sharding, place=jax.device_put):
    """64-bit entries that no 32 bits hold; `place` puts a host array."""
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    count = np.arange(16 * 8).reshape(16, 8)
    with jax.enable_x64(True):
        return NestedMap(
            counts=place(count + 2**40, sharding),
            hashes=place(count.astype(np.uint64) + 2**63, sharding),
            exact=place(count + 1 / 3, sharding),
            phase=place(count * 1j + 1 / 3, replicated),
            iterations=place(np.array(2**40 + 1), replicated),
        )


def abstract_of(state, sharding=None):
    def describe(array):
        where = sharding if sharding is not None and array.ndim == 2 else array.sharding
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

    return state.map(describe)


def make_abstract():
    return abstract_of(make_state())


def assert_same(actual, expected):
    assert list(dict(actual.items_by_path())) == list(dict(expected.items_by_path()))
    for leaf, other in zip(actual.leaves(), expected.leaves(), strict=True):
        assert leaf.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))


def save_steps(folder, *steps, **options):
    """Saves a state of its own at each step."""
    with Checkpoints(folder, **options) as saver:
        for step in steps:
            saver.save(step, make_state(seed=step), metadata={"seed": step})


def files_of(step: pathlib.Path) -> list[str]:
    """Paths of all files below a folder, in it."""
    files = [file for file in step.rglob("*") if file.is_file()]
    return sorted(str(file.relative_to(step)) for file in files)


def flip_a_bit(file: pathlib.Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def write_digests(step: pathlib.Path) -> None:
    """What somebody does who alters files and wants nobody to notice."""
    apart = ("SHA256SUMS", "_CHECKPOINT_METADATA", "commit_success.txt")
    lines = [
        f"{hashlib.sha256((step / path).read_bytes()).hexdigest()}  {path}\n"
        for path in files_of(step)
        if path not in apart
    ]
    (step / "SHA256SUMS").write_text("".join(lines))
