"""The repeated stack equals its layers in a row, whatever it saves and recomputes."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import Context, Mode
from meshwright.framework.modeling.recompute import (
    Recompute,
    computed_once,
    save_name,
)
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.stacks.repeat import Unroll
from meshwright.layers.stacks.sequential import Sequential
from tests.layers.stacks.repeated import (
    BSH,
    KEY,
    MASK,
    B,
    FeedForward,
    H,
    InARow,
    L,
    M,
    S,
    X,
    arguments,
    assert_close,
    gradients_of,
    in_a_row,
    operations,
    over_recompute,
    over_unroll,
    plan_of,
    repeat,
    run,
    specs,
)


@functools.cache
def feed_forward_in_a_row(unroll):
    return in_a_row(FeedForward(), unroll)


def products(program):
    hlo = program.hlo_text()
    return hlo.count(" dot(") + hlo.count("__onednn$matmul")


@over_unroll
@over_recompute
def test_equals_layers_in_a_row_on_one_device(recompute, unroll):
    program, got = run(repeat(recompute=recompute, unroll=unroll))
    assert_close(got, feed_forward_in_a_row(unroll))
    if unroll is Unroll.LOOP:
        # Two products forward and four backward, plus what is recomputed.
        recomputed = {"EVERYTHING": 2, "NOTHING": 0, "ALL_BUT_NAMED": 1}
        assert products(program) == 6 + recomputed[recompute.name]


# Any two settings meet in one of these; the slow ones are the rest.
PAIRS = (
    (Recompute.EVERYTHING, Unroll.LOOP, Partitioner.SHARDY),
    (Recompute.EVERYTHING, Unroll.UNROLLED, Partitioner.GSPMD),
    (Recompute.ALL_BUT_NAMED, Unroll.LOOP, Partitioner.GSPMD),
    (Recompute.ALL_BUT_NAMED, Unroll.UNROLLED, Partitioner.SHARDY),
    (Recompute.NOTHING, Unroll.LOOP, Partitioner.SHARDY),
    (Recompute.NOTHING, Unroll.UNROLLED, Partitioner.GSPMD),
)


@pytest.mark.parametrize(
    "recompute,unroll,partitioner",
    [
        case if case in PAIRS else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(Recompute, Unroll, Partitioner)
    ],
)
def test_equals_layers_in_a_row_on_eight_devices(recompute, unroll, partitioner):
    layer = repeat(recompute=recompute, unroll=unroll)
    _, got = run(layer, mesh_shape=(2, 4), partitioner=partitioner)
    assert_close(got, feed_forward_in_a_row(unroll))


@tf.custom_gradient
def halved(x):
    return tf.tanh(x), lambda dy: 0.5 * dy * (1 - tf.tanh(x) ** 2)


class ManyOutputs(FeedForward):
    """Ops of several results, a gradient of its own, and a nest of two tensors."""

    def fprop(self, ctx, theta, x, *, mask):
        h = tf.einsum("bsm,mh->bsh", x.a, theta.w_in)
        first, second = tf.unstack(tf.reshape(h, [B, S, 2, -1]), axis=2)
        h = tf.concat([halved(first), tf.where(second > 0, second, 0.0)], axis=-1)
        first, second = tf.split(ctx.split(h, BSH), 2, axis=-1)
        h = tf.concat([save_name(first, "hidden") * second, second], axis=-1)
        y = tf.einsum("bsh,hm->bsm", h, theta.w_out)
        return NestedMap(a=x.a + x.b["c"] * mask[:, :, None], b={"c": tf.tanh(y)})


@over_unroll
@over_recompute
def test_bodies_of_many_outputs_and_a_nest_of_tensors(recompute, unroll):
    x = NestedMap(a=X, b={"c": X[::-1].copy()})
    _, got = run(repeat(ManyOutputs(), recompute, unroll=unroll), x=x)
    assert isinstance(got["y"], NestedMap)
    assert_close(got, in_a_row(ManyOutputs(), unroll, x=x), 2e-6)


@pytest.mark.parametrize(
    "outer,inner,unroll,mesh_shape",
    [
        (Recompute.EVERYTHING, Recompute.EVERYTHING, Unroll.LOOP, (2, 4)),
        (Recompute.NOTHING, Recompute.ALL_BUT_NAMED, Unroll.LOOP, (1, 1)),
        (Recompute.EVERYTHING, Recompute.NOTHING, Unroll.UNROLLED, (1, 1)),
    ],
)
def test_stacks_of_stacks(outer, inner, unroll, mesh_shape):
    group = repeat(num_layers=2, recompute=inner)
    _, got = run(repeat(group, outer, unroll=unroll), mesh_shape=mesh_shape)
    assert_close(got, in_a_row(InARow(body=FeedForward(), num_layers=2), unroll))


def test_16_bit_activations_and_32_bit_weights():
    context = {"activation_dtype": tf.bfloat16}
    x = X.astype(tf.bfloat16.as_numpy_dtype)
    _, got = run(repeat(recompute=Recompute.ALL_BUT_NAMED), x=x, **context)
    assert got["y"].dtype == x.dtype and got["gradients"][1].dtype == x.dtype
    assert got["gradients"][0].w_in.dtype == np.float32
    assert_close(got, in_a_row(FeedForward(), x=x, **context), 0.02)


class Barred(FeedForward):
    """With a barrier, for which TF has no gradient, as a dropout has."""

    def fprop(self, ctx, theta, x, **inputs):
        return super().fprop(ctx, theta, computed_once(x)[0], **inputs)


@over_unroll
def test_eager_execution_gives_the_same(unroll):
    layer = repeat(Barred(), Recompute.NOTHING, unroll=unroll)
    args = tf.nest.map_structure(tf.constant, arguments(layer))
    got = gradients_of(layer, mesh_shape=(2, 4))(*args)
    assert_close(got, feed_forward_in_a_row(unroll))


def test_a_mask_whose_gradient_nobody_reads_costs_none():
    layer = repeat(recompute=Recompute.NOTHING)

    def compiled(mask):
        args = [*arguments(layer)[:2], mask, KEY.numpy()]
        return compile_program(gradients_of(layer), specs(args), plan_of((1, 1)).mesh)

    floating, integers = compiled(MASK), compiled(MASK.astype(np.int32))
    assert floating.memory().peak <= integers.memory().peak
    assert floating.cost()["flops"] <= integers.cost()["flops"]


@pytest.mark.parametrize(
    "recompute,products,barriers",
    [
        (Recompute.EVERYTHING, 8, 1),
        (Recompute.ALL_BUT_NAMED, 7, 1),
        (Recompute.NOTHING, 6, 0),
    ],
)
def test_unrolled_recomputes_behind_barriers(recompute, products, barriers):
    layer = repeat(recompute=recompute, unroll=Unroll.UNROLLED)
    names = operations(gradients_of(layer), arguments(layer))
    assert names["dot"] == products * layer.num_layers
    assert names["opt-barrier"] == barriers * layer.num_layers
    assert names["while"] == 0


@over_recompute
def test_the_size_of_the_program_does_not_grow_with_depth(recompute):
    layers = [repeat(recompute=recompute, num_layers=n) for n in (16, 64)]
    shallow, deep = (operations(gradients_of(x), arguments(x)) for x in layers)
    assert shallow == deep and deep["while"] == 2


def forward(layer, mode, mesh_shape=(1, 1)):
    def fn(theta, x, mask, key):
        ctx = Context(plan=plan_of(mesh_shape), mode=mode, key=key)
        return layer.fprop(ctx, theta, x, mask=mask)

    return fn


@over_unroll
def test_evaluation_saves_nothing(unroll):
    layer = repeat(recompute=Recompute.NOTHING, unroll=unroll)
    args = arguments(layer)
    names = operations(forward(layer, Mode.EVAL), args)
    assert names["dynamic-update-slice"] == 0 and names["opt-barrier"] == 0
    assert names["dot"] == (2 if unroll is Unroll.LOOP else 2 * layer.num_layers)
    if unroll is Unroll.LOOP:
        assert operations(forward(layer, Mode.TRAIN), args)["dynamic-update-slice"] > 1
    program = compile_program(
        forward(layer, Mode.EVAL), specs(args), plan_of((1, 1)).mesh
    )
    want = forward(InARow(body=FeedForward(), num_layers=layer.num_layers), Mode.EVAL)
    args_in = tf.nest.map_structure(tf.constant, args)
    assert_close(np.asarray(program(*args)), want(*args_in).numpy())


@pytest.mark.parametrize(
    ("recompute", "kept"),
    [
        (Recompute.EVERYTHING, [(B, S, M)]),
        (Recompute.ALL_BUT_NAMED, [(B, S, M), (B, S, H)]),
    ],
)
@over_unroll
def test_says_what_it_saves(recompute, kept, unroll):
    layer = repeat(recompute=recompute, unroll=unroll)
    ctx = Context(plan=plan_of((2, 4)), mode=Mode.TRAIN, key=KEY)
    with tf.Graph().as_default():
        saved = layer.saved(ctx, tf.TensorSpec(X.shape), mask=tf.constant(MASK))
    assert [tuple(stack.tensor.spec.shape) for stack in saved.stacks] == kept
    assert all(stack.tensor.sharding for stack in saved.stacks)
    assert {(stack.count, stack.stages) for stack in saved.stacks} == {(layer.count, 1)}
    assert saved.result == tf.TensorSpec(X.shape)


def test_no_key_is_needed_where_nothing_is_random():
    def fn(theta, x, mask):
        return repeat().fprop(Context(), theta, x, mask=mask, extra=None)

    lowered = lower(fn, specs(arguments(repeat())[:3]))
    assert lowered.signature.outputs.shape == X.shape


def test_stacks_of_the_loop_are_laid_out_like_what_they_stack():
    layer = repeat(recompute=Recompute.ALL_BUT_NAMED)
    hlo = lower(gradients_of(layer, (2, 4)), specs(arguments(layer))).hlo
    module = hlo_pb2.HloModuleProto.FromString(hlo)
    stacks = {
        (tuple(op.shape.dimensions), tuple(op.sharding.tile_assignment_dimensions))
        for c in module.computations
        for op in c.instructions
        if op.custom_call_target == "Sharding" and op.shape.dimensions[:1] == [L]
    }
    assert stacks == {
        ((L, B, S, M), (1, 2, 1, 4)),  # Inputs of the layers.
        ((L, B, S, H), (1, 2, 1, 4)),  # What is saved by name.
        ((L, M, H), (1, 2, 4)),  # Weights and their gradients.
        ((L, H, M), (1, 4, 2)),
    }


class Wider(FeedForward):
    def fprop(self, ctx, theta, x, *, mask):
        return tf.einsum("bsm,mh->bsh", x, theta.w_in)


class Narrower(FeedForward):
    def fprop(self, ctx, theta, x, *, mask):
        return tf.cast(x, tf.bfloat16)


class Packer(FeedForward):
    def fprop(self, ctx, theta, x, *, mask):
        return {"x": x}


@pytest.mark.parametrize(
    "body,message",
    [
        (Wider(), r"Wider takes .*\(4, 2, 8\).* and returns .*\(4, 2, 16\)"),
        (Narrower(), "Narrower takes .*float32.* and returns .*bfloat16"),
        (Packer(), r"Packer takes TensorSpec.* and returns \{'x': "),
    ],
)
@over_unroll
def test_a_body_that_does_not_return_what_it_takes_is_refused(body, message, unroll):
    layer = repeat(body, unroll=unroll)
    message = (
        "layer 'decoder.stack': a repeated body must return what it takes, but "
        + message
    )
    with pytest.raises(ValueError, match=message):
        lower(gradients_of(layer, path="decoder.stack"), specs(arguments(layer)))


class Forgetful(FeedForward):
    def fprop(self, ctx, theta, x, **inputs):
        super().fprop(ctx, theta, x, **inputs)


@pytest.mark.parametrize(
    "layer", [repeat(Forgetful()), Sequential(layers=[Forgetful()])]
)
def test_a_layer_that_returns_nothing_is_named(layer):
    with pytest.raises(TypeError, match=r"Forgetful\.fprop returned None; return the"):
        lower(gradients_of(layer), specs(arguments(layer)))


def test_weights_of_another_depth_are_refused():
    args = arguments(repeat(num_layers=L + 1))
    with pytest.raises(
        ValueError,
        match=r"layer 'stack': weight 'w_in' has shape \(4, 8, 16\), but the stack's "
        r"layers need \(3, 8, 16\)",
    ):
        lower(
            lambda theta, x, mask, key: repeat().fprop(
                Context(key=key, path="stack"), theta, x, mask=mask
            ),
            specs(args),
        )


def test_a_name_that_the_body_does_not_give_is_refused():
    layer = repeat(recompute=Recompute.ALL_BUT_NAMED, saved_names=("hiden",))
    with pytest.raises(ValueError, match=r"saves 'hiden', .*it names \['hidden'\]"):
        lower(gradients_of(layer), specs(arguments(layer)))


@pytest.mark.parametrize(
    "kwargs,message",
    [
        ({"num_layers": 0}, "Repeat.num_layers is 0; it must be at least 1"),
        (
            {"saved_names": ["hidden"]},
            r"saved_names \('hidden',\) are read only by Recompute.ALL_BUT_NAMED, not",
        ),
    ],
)
def test_a_bad_stack_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        repeat(**kwargs)
