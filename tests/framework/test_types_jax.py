"""The table of docs/types.md: what our types and JAX's explicit mode do.

DTensor's column is by its documentation; PyTorch is not installed here.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from jax import P, reshard

from meshwright import framework as mw

MESH = mw.DeviceMesh(("dp", "tp"), (2, 2))
ERROR = "error"


@pytest.fixture(scope="module")
def jax_mesh():
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=kinds, devices=devices)
    with jax.set_mesh(mesh):
        yield mesh


def collectives(fn, *args):
    """The result's type, and the kinds of the collectives in a row; or ERROR."""
    types = []

    def noted(*args):
        out = fn(*args)
        types.append(str(jax.typeof(out)))
        return out

    try:
        lowered = jax.jit(noted).lower(*args)
    except Exception as error:
        # JAX does not export the first.
        if type(error).__name__ not in ("ShardingTypeError", "NotImplementedError"):
            raise
        return ERROR
    pattern = r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\("
    text = lowered.compile().as_text()
    return types[0], " ".join(sorted(re.findall(pattern, text)))


def put(shape, *dims):
    return jax.device_put(jnp.ones(shape, jnp.float32), P(*dims))


def sums(x, y, axis="dp"):
    """[6, 4], unreduced along the axis that splits the rows of x and y."""
    asked = P(None, None, unreduced={axis})
    return jnp.einsum("bi,bo->io", x, y, out_sharding=asked)


def loss(w, x):
    return jnp.sum(jnp.sin(jnp.einsum("bi,io->bo", x, w)))


def reduced(w):
    return reshard(w, P(None, None, reduced={"dp"}))


X, Y, W = ((8, 6), "dp", None), ((8, 4), "dp", None), ((6, 4), None, None)
A, B = ((8, 6), None, "tp"), ((6, 4), "tp", None)
WHOLE = "float32[6,4]"


@pytest.mark.parametrize(
    "fn,args,want",
    [
        (lambda x, y, w: sums(x, y) + w, (X, Y, W), ERROR),
        (lambda x, y: sums(x, y) * sums(x, y), (X, Y), ERROR),
        (lambda x, y: jax.nn.relu(sums(x, y)), (X, Y), ERROR),
        (lambda x, y: jnp.exp(sums(x, y)), (X, Y), ERROR),
        (lambda a, b: a @ b, (A, B), ERROR),
        (sums, (X, Y), (WHOLE + "{U:dp}", "")),
        (
            lambda x, y: reshard(sums(x, y), P("dp", None)),
            (X, Y),
            ("float32[6@dp,4]", "all-reduce"),
        ),
        (lambda a, b: a + b, (((8, 6), "tp", None), A), ERROR),
        (lambda a, b: a + b, (((8, 6), None, None), A), ("float32[8,6@tp]", "")),
        (jax.grad(loss), (W, X), (WHOLE, "all-reduce")),
        (
            lambda w, x: jax.grad(loss)(reduced(w), x),
            (W, X),
            (WHOLE + "{U:dp}", ""),
        ),
        (
            lambda x, y, a, b: sums(x, y) + sums(a, b, "tp"),
            (X, Y, ((8, 6), "tp", None), ((8, 4), "tp", None)),
            ERROR,
        ),
        (lambda a: a.reshape(48), (A,), ERROR),
        (lambda x, y: -sums(x, y), (X, Y), ERROR),
        (lambda x, y: sums(x, y) / 3.0, (X, Y), ERROR),
        (lambda x, y, w: sums(x, y) * w, (X, Y, W), ERROR),
        (lambda x: x.sum(0), (X,), ("float32[6]", "all-reduce")),
        (lambda a, w: a @ w, (A, W), ("float32[8,4]", "all-gather")),
    ],
)
def test_jax(jax_mesh, fn, args, want):
    assert collectives(fn, *(put(*arg) for arg in args)) == want


def ours(x, y, axis="dp"):
    product = tf.einsum("bi,bo->io", x, y)
    return mw.mesh_split(product, MESH, [-1, -1], unreduced=[axis])


def whole(t):
    return mw.reshard(t, MESH, [-1] * t.shape.rank)


def gradient(w, x, *axes):
    with tf.GradientTape() as tape:
        tape.watch(w)
        read = mw.mesh_split(w, MESH, [-1, -1], reduced=axes)
        value = mw.mesh_split(tf.reduce_sum(tf.sin(x @ read)), MESH, [])
    return tape.gradient(value, w)


@pytest.mark.parametrize(
    "fn,args,want",
    [
        (lambda x, y, w: whole(ours(x, y) + w), (X, Y, W), ERROR),
        (lambda x, y: whole(ours(x, y) * ours(x, y)), (X, Y), ERROR),
        (lambda x, y: whole(tf.nn.relu(ours(x, y))), (X, Y), ERROR),
        (lambda x, y: whole(tf.exp(ours(x, y))), (X, Y), ERROR),
        (lambda a, b: a @ b, (A, B), ERROR),
        (lambda x, y: whole(ours(x, y)), (X, Y), "all-reduce"),
        (
            lambda x, y: mw.reshard(ours(x, y), MESH, ["dp", -1]),
            (X, Y),
            "reduce-scatter",
        ),
        (lambda a, b: a + b, (((8, 6), "tp", None), A), ERROR),
        (lambda a, b: a + b, (((8, 6), None, None), A), ""),
        (gradient, (W, X), "all-reduce"),
        (lambda w, x: whole(gradient(w, x, "dp")), (W, X), "all-reduce"),
        (
            lambda x, y, a, b: whole(ours(x, y) + ours(a, b, "tp")),
            (X, Y, ((8, 6), "tp", None), ((8, 4), "tp", None)),
            ERROR,
        ),
        (lambda a: tf.reshape(a, [48]), (A,), ERROR),
        (lambda x, y: whole(-ours(x, y)), (X, Y), "all-reduce"),
        (lambda x, y: whole(ours(x, y) / 3.0), (X, Y), "all-reduce"),
        (lambda x, y, w: whole(ours(x, y) * w), (X, Y, W), "all-reduce"),
        (lambda x: tf.reduce_sum(x, 0), (X,), ERROR),
        (lambda a, w: a @ w, (A, W), ERROR),
        (
            lambda a, w: whole(mw.mesh_split(a @ w, MESH, [-1, -1], unreduced=["tp"])),
            (A, W),
            "all-reduce",
        ),
    ],
)
def test_ours(fn, args, want):
    specs = [tf.TensorSpec(shape) for shape, *_ in args]
    dims = [[-1 if d is None else d for d in dims] for _, *dims in args]
    shardings = [mw.Sharding.from_dims_mapping(MESH, one) for one in dims]
    if want == ERROR:
        with pytest.raises(mw.ShardingTypeError):
            mw.check_types(fn, specs, MESH, in_shardings=shardings)
        return
    mw.check_types(fn, specs, MESH, in_shardings=shardings)
    program = mw.compile_program(fn, specs, MESH, in_shardings=shardings)
    values = [np.random.default_rng(0).normal(size=s.shape) for s in specs]
    values = [value.astype(np.float32) for value in values]
    got = np.asarray(program.unshard(program(*values)))
    np.testing.assert_allclose(got, fn(*map(tf.constant, values)), rtol=2e-5, atol=1e-5)
    assert " ".join(sorted(c.kind for c in program.collectives())) == want
