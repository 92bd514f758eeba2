"""A layer to repeat, and what its stack must equal: the layers in a row."""

import collections
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling import random
from meshwright.framework.modeling.initializers import FanIn
from meshwright.framework.modeling.layer import (
    Context,
    Layer,
    Mode,
    WeightSpec,
    annotate_weights,
    initialize,
)
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.layers.stacks.repeat import Repeat, Unroll

# B batch, S sequence, M model, H hidden.
B, S, M, H = 4, 2, 8, 16
DEPTH = {Unroll.LOOP: 3, Unroll.UNROLLED: 2}  # Deeper unrolled ones compile longer.
L = DEPTH[Unroll.LOOP]
BSM, BSH = ("batch", "sequence", "model"), ("batch", "sequence", "hidden")
KEY = random.key_from_seed(3)
RNG = np.random.default_rng(0)
X = RNG.standard_normal([B, S, M], np.float32)
MASK = (RNG.random([B, S]) < 0.7).astype(np.float32)


def weight(*dims):
    sizes = {"model": M, "hidden": H}
    shape = tuple(sizes[d] for d in dims)
    return WeightSpec(shape=shape, dims=dims, initializer=FanIn())


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedForward(Layer):
    """Two products, dropout, a mask, annotations, a name."""

    def weights(self):
        return NestedMap(
            w_in=weight("model", "hidden"), w_out=weight("hidden", "model")
        )

    def fprop(self, ctx, theta, x, *, mask, extra=None):
        assert extra is None
        w_in, w_out = ctx.cast(theta.w_in), ctx.cast(theta.w_out)
        h = tf.nn.relu(tf.einsum("bsm,mh->bsh", x, w_in))
        h = ctx.split(h, BSH, name="hidden")
        if ctx.mode is Mode.TRAIN:
            keep = random.bernoulli(ctx.random_key(), 0.8, h.shape)
            h = tf.where(keep, h, tf.zeros([], h.dtype))
        y = ctx.split(tf.einsum("bsh,hm->bsm", h, w_out), BSM)
        return ctx.split(x + tf.tanh(y) * ctx.cast(mask)[:, :, None], BSM)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InARow(Layer):
    """What `Repeat` must equal: a Python loop that TF differentiates."""

    body: Layer
    num_layers: int

    def weights(self):
        return self.body.weights().map(lambda spec: spec.stacked(self.num_layers))

    def fprop(self, ctx, theta, x, **constants):
        for i in range(self.num_layers):
            key = None if ctx.key is None else random.fold_in(ctx.key, i)
            layer = theta.map(lambda w, i=i: w[i])
            x = self.body.fprop(
                dataclasses.replace(ctx, key=key), layer, x, **constants
            )
        return x


def repeat(body=None, recompute=Recompute.EVERYTHING, *, unroll=Unroll.LOOP, **kwargs):
    if recompute is Recompute.ALL_BUT_NAMED:
        kwargs.setdefault("saved_names", ("hidden",))
    kwargs.setdefault("num_layers", DEPTH[unroll])
    body = body or FeedForward()
    return Repeat(body=body, recompute=recompute, unroll=unroll, **kwargs)


def plan_of(mesh_shape):
    return ShardingPlan(
        mesh_shape=mesh_shape,
        weights={"model": "X", "hidden": "Y"},
        activations={"batch": "X", "model": "Y", "hidden": "Y"},
    )


def gradients_of(layer, mesh_shape=(1, 1), **context):
    """(theta, x, mask, key) -> the output and the gradients of a loss of it."""
    plan = plan_of(mesh_shape)
    context.setdefault("mode", Mode.TRAIN)

    def fn(theta, x, mask, key):
        ctx = Context(plan=plan, key=key, **context)
        with tf.GradientTape() as tape:
            tape.watch((theta, x))
            theta_in = annotate_weights(plan, layer.weights(), theta)
            y = layer.fprop(ctx, theta_in, x, mask=mask)
            loss = tf.add_n(
                [tf.reduce_sum(tf.cast(t, tf.float32) ** 2) for t in tf.nest.flatten(y)]
            )
        return {"y": y, "gradients": tape.gradient(loss, (theta, x))}

    return fn


def arguments(layer, x=X):
    theta = initialize(layer.weights(), KEY).map(lambda w: w.numpy())
    return [theta, x, MASK, KEY.numpy()]


def specs(nest):
    return tf.nest.map_structure(lambda v: tf.TensorSpec(v.shape, v.dtype), nest)


def run(layer, x=X, mesh_shape=(1, 1), partitioner=Partitioner.SHARDY, **context):
    fn = gradients_of(layer, mesh_shape, **context)
    args = arguments(layer, x)
    mesh = plan_of(mesh_shape).mesh
    program = compile_program(fn, specs(args), mesh, partitioner=partitioner)
    return program, program.unshard(program(*args))


def in_a_row(body, unroll=Unroll.LOOP, x=X, **context):
    """The same of the layers in a row, without a compiler."""
    layer = InARow(body=body, num_layers=DEPTH[unroll])
    args = tf.nest.map_structure(tf.constant, arguments(layer, x))
    return gradients_of(layer, **context)(*args)


def assert_close(got, want, tolerance=1e-6):
    tf.nest.assert_same_structure(got, want)
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def operations(fn, args):
    """How often each opcode is in the program as it is handed to XLA."""
    module = hlo_pb2.HloModuleProto.FromString(lower(fn, specs(args)).hlo)
    return collections.Counter(
        op.opcode for c in module.computations for op in c.instructions
    )


over_recompute = pytest.mark.parametrize("recompute", Recompute)
over_unroll = pytest.mark.parametrize("unroll", Unroll)
