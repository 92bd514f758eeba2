"""How many collectives reduce the gradients of sharded updates, and of which kind."""

import functools

import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.devices.topology import topology_devices
from tests import needs
from tests.framework.updates.updates import gradients, mean_square

MESH = mw.DeviceMesh(("data",), (8,))
# A TPU v3 scatters along a row or a column of its torus, not over a whole slice.
TORUS = mw.DeviceMesh(("rows", "columns"), (4, 8))
B, M, V, L = 32, 128, 1024, 3


def product(w, x, ids):
    return mean_square(tf.tanh(x @ w))


def convolution(w, x, ids):
    images = tf.reshape(x, [B, 1, 2, M // 2])
    return mean_square(tf.nn.conv2d(images, w, 1, "SAME"))


def lookup(w, x, ids):
    return mean_square(tf.gather(w, ids) * x)


def layers(w, x, ids):
    layer = lambda i, h: (i + 1, tf.tanh(h @ w[i]))  # noqa: E731
    loop = functools.partial(tf.while_loop, maximum_iterations=L)
    return mean_square(loop(lambda i, h: i < L, layer, (0, x))[1])


def tied(w, x, ids):
    """Two lookups and a product, as of a Transformer's table."""
    h = tf.tanh(tf.gather(w, ids) + x) * tf.gather(w, ids[::-1])
    return mean_square(h @ tf.transpose(w))


LOSSES = {
    product: [M, 256],
    convolution: [3, 3, M // 2, 256],
    lookup: [V, M],
    layers: [L, M, M],
    tied: [V, M],
}


@functools.cache
def compiled(loss, partitioner=mw.Partitioner.SHARDY, mesh=MESH):
    def step(state, x, ids):
        (g,) = gradients(lambda w: loss(w, x, ids), state["w"])
        m = 0.9 * state["m"] + g
        return {"state": {"w": state["w"] - m, "m": m}}

    data = mesh.axis_names
    w = tf.TensorSpec(LOSSES[loss])
    unsplit = mw.Sharding.replicated(mesh, w.shape.rank)
    state = {"w": unsplit, "m": unsplit}
    return mw.compile_program(
        step,
        [{"w": w, "m": w}, tf.TensorSpec([B, M]), tf.TensorSpec([B], tf.int32)],
        mesh,
        in_shardings=[
            state,
            mw.Sharding(mesh, (data, ())),
            mw.Sharding(mesh, (data,)),
        ],
        out_shardings={"state": state},
        partitioner=partitioner,
        devices=topology_devices("v3:4x4") if mesh is TORUS else None,
        update_sharding=mw.UpdateSharding(
            mode=mw.WeightUpdateSharding.ALL, data_axes=data
        ),
    )


def reductions(program, loss, axis: str) -> list[str]:
    """The kinds of the collectives that reduce a gradient along an axis of 8."""
    size = 4 * tf.TensorShape(LOSSES[loss]).num_elements()
    # A loop has the gradient of a layer.
    shard = size // 8 // (L if loss is layers else 1)
    return [
        collective.kind
        for collective in program.collectives()
        if collective.kind != "all-gather"
        and collective.axes == (axis,)
        and collective.bytes >= shard
    ]


@pytest.mark.parametrize("partitioner", mw.Partitioner)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_gradient_is_reduced_once_onto_its_shards(loss, partitioner):
    program = compiled(loss, partitioner)
    assert len(program.updates.sharded) == 1
    assert reductions(program, loss, "data") == ["reduce-scatter"]


@needs.libtpu
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_on_a_tpu_too(loss):
    """Its shards are reduced further along the other axis."""
    assert reductions(compiled(loss, mesh=TORUS), loss, "columns") == ["reduce-scatter"]
