"""How many collectives reduce the gradients of sharded updates, and of which kind."""

import collections
import functools

import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.compiler.weight_update_sharding import decide
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


def many(mesh, mode):
    """A step with six weights of 256 KiB, compiled for a TPU."""

    def step(state, x):
        def loss(*weights):
            h = x
            for w in weights:
                h = tf.tanh(h @ tf.cast(w, x.dtype))
            return mean_square(tf.cast(h, tf.float32))

        grads = gradients(loss, *state["w"])
        slots = [0.9 * m + g for m, g in zip(state["m"], grads, strict=True)]
        weights = [w - m for w, m in zip(state["w"], slots, strict=True)]
        return {"state": {"w": weights, "m": slots}}

    data, weights = mesh.axis_names, 6 * [tf.TensorSpec([256, 256])]
    whole = 6 * [mw.Sharding.replicated(mesh, 2)]
    return mw.compile_program(
        step,
        [{"w": weights, "m": weights}, tf.TensorSpec([B, 256], tf.bfloat16)],
        mesh,
        in_shardings=[{"w": whole, "m": whole}, mw.Sharding(mesh, (data, ()))],
        out_shardings={"state": {"w": whole, "m": whole}},
        devices=topology_devices("v3:4x4"),
        update_sharding=mw.UpdateSharding(
            mode=mw.WeightUpdateSharding(mode), data_axes=data
        ),
    )


def counted(program) -> collections.Counter:
    """How many collectives there are by kind, axes and the number of tensors."""
    return collections.Counter(
        (collective.kind, collective.axes, len(collective.shapes))
        for collective in program.collectives()
    )


@needs.libtpu
def test_small_collectives_are_batched_on_a_tpu():
    """Partial sharding: the shards' all-reduce is one, and so is the gather (5.2)."""
    auto = many(TORUS, "auto")
    assert {line.format for line in auto.updates.sharded} == {"[256:columns,256]"}
    assert counted(auto) == {
        ("reduce-scatter", ("columns",), 1): 6,
        ("all-reduce", ("rows",), 6): 1,
        ("all-gather", ("columns",), 6): 1,
    }
    off = many(TORUS, "off")
    assert counted(off) == {("all-reduce", ("rows", "columns"), 6): 1}


@needs.libtpu
def test_one_axis_is_divided_on_a_tpu(monkeypatch):
    """Into neighbours, who scatter where the whole slice would not.

    A slice this small is divided only if told to.
    """
    part = "data:(8)4"
    monkeypatch.setattr(
        decide._CostModel, "choices_of_axes", lambda self, cluster: [(part,)]
    )
    program = many(mw.DeviceMesh(("data",), (32,)), "all")
    assert all(part in line.format for line in program.updates.sharded)
    assert counted(program) == {
        ("reduce-scatter", (part,), 1): 6,
        ("all-reduce", ("data:(1)8",), 6): 1,
        ("all-gather", (part,), 6): 1,
    }
