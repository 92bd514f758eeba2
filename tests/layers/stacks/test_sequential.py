"""Stacks of dense layers and mixtures of experts: order, statistics, training parity.

Dims: B batch, S sequence, M model, E experts.
"""

import dataclasses
import functools

import gin
import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import (
    Context,
    Mode,
    annotate_weights,
    initialize,
)
from meshwright.framework.modeling.optimizers.optimizer import SGD
from meshwright.framework.modeling.optimizers.schedules import ConstantSchedule
from meshwright.framework.modeling.random import fold_in, key_from_seed
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.layers.attention.positions import PositionKind
from meshwright.layers.basic.linear import BSM
from meshwright.layers.experts.gatings import Hash, Switch, Top2
from meshwright.layers.experts.moe import ExpertFeedForward, MoE, merge_aux
from meshwright.layers.stacks.repeat import Repeat, Unroll
from meshwright.layers.stacks.sequential import Sequential
from meshwright.layers.transformer import transformer_layer

B, S, M, E = 4, 8, 8, 4
SIZES = {
    "model_dims": M,
    "num_heads": 4,
    "head_dim": 4,
    "positions": PositionKind.NONE,
}
DENSE = transformer_layer(**SIZES, hidden_dims=16)
RNG = np.random.default_rng(0)
INPUTS = NestedMap(
    x=RNG.standard_normal((B, S, M)).astype(np.float32),
    segment_ids=np.tile(np.repeat([1, 2, 0], [4, 3, 1]), (B, 1)).astype(np.int32),
    token_ids=RNG.integers(0, 99, (B, S)).astype(np.int32),
)
HYBRID = ShardingPlan(
    mesh_shape=(2, 4),
    weights={
        "model": "X",
        "heads": "Y",
        "hidden": "Y",
        "experts": "X",
        "gate_model": "Y",
    },
    activations={
        "batch": "X",
        "model": "Y",
        "heads": "Y",
        "hidden": "Y",
        "experts": "X",
    },
)


def sparse(gating=Top2, experts=E):
    sizes = {"model_dims": M, "num_experts": experts}
    mixture = MoE(
        gating=gating(**sizes), experts=ExpertFeedForward(**sizes, hidden_dims=16)
    )
    return transformer_layer(**SIZES, feed_forward=mixture)


def stack(layers=None, **kwargs) -> Repeat:
    body = Sequential(layers=layers or (DENSE, sparse()))
    return Repeat(**{"body": body, "num_layers": 4, **kwargs})


def test_a_layer_with_experts_adds_what_they_say_to_the_stream():
    layer = sparse(Hash)
    theta = initialize(layer.weights(), key_from_seed(0))
    x, inputs = tf.constant(INPUTS.x), {"segment_ids": INPUTS.segment_ids}
    out = layer.fprop(Context(), theta, x, token_ids=INPUTS.token_ids, **inputs)
    normed = layer.attention_norm.fprop(Context(), theta.attention_norm, x)
    x += layer.attention.fprop(Context(), theta.attention, normed, **inputs)
    normed = layer.feed_forward_norm.fprop(Context(), theta.feed_forward_norm, x)
    mixed = layer.feed_forward.fprop(
        Context(), theta.feed_forward, normed, token_ids=INPUTS.token_ids, **inputs
    )
    np.testing.assert_allclose(out.x, x + mixed.x, rtol=1e-6, atol=1e-6)
    assert out.aux.sums.tokens == 7 * B  # Segment 0 is padding.


@pytest.mark.parametrize("unroll", Unroll)
def test_layers_take_turns(unroll):
    layer = stack(num_layers=6, unroll=unroll)
    theta = initialize(layer.weights(), key_from_seed(0))
    ctx = Context(mode=Mode.TRAIN, key=key_from_seed(1))
    out = layer.fprop(ctx, theta, tf.constant(INPUTS.x), segment_ids=INPUTS.segment_ids)
    aux = merge_aux(out.aux)
    x, losses, rows = tf.constant(INPUTS.x), [], []
    for turn in range(3):
        c = dataclasses.replace(ctx, key=fold_in(ctx.key, turn))
        weights = theta.map(lambda w, turn=turn: w[turn])
        with c.scope("layer_0") as inner:
            x = DENSE.fprop(inner, weights.layer_0, x, segment_ids=INPUTS.segment_ids)
        with c.scope("layer_1") as inner:
            result = sparse().fprop(
                inner, weights.layer_1, x, segment_ids=INPUTS.segment_ids
            )
        x = result.x
        losses.append(result.aux.loss)
        rows.append(result.aux.sums)
    np.testing.assert_allclose(out.x, x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(aux.loss, np.mean(losses), rtol=1e-5)
    assert aux.sums.load.shape == (3, E)
    for turn, row in enumerate(rows):
        for name, value in row.items():
            got = aux.sums[name][turn]
            np.testing.assert_allclose(got, value, rtol=1e-4, err_msg=name)


def test_first_and_second_mixture_of_a_turn_have_their_rows():
    layer = stack(layers=(sparse(Hash), DENSE, sparse(Switch)), num_layers=6)
    theta = initialize(layer.weights(), key_from_seed(0))
    out = layer.fprop(Context(), theta, tf.constant(INPUTS.x), **ids())
    np.testing.assert_array_equal(
        merge_aux(out.aux).sums.entropy > 0, [False, True] * 2
    )


def ids():
    return {"segment_ids": INPUTS.segment_ids, "token_ids": INPUTS.token_ids}


def train_step(layer, plan, optimizer):
    """A function of (step, theta, slots, inputs): their successors and the losses."""
    specs = layer.weights()

    def step_fn(step, theta, slots, inputs):
        key = fold_in(key_from_seed(0), step)
        ctx = Context(plan=plan, mode=Mode.TRAIN, key=key, path="stack")
        with tf.GradientTape() as tape:
            tape.watch(theta)
            out = layer.fprop(ctx, annotate_weights(plan, specs, theta), **inputs)
            task = tf.reduce_mean(tf.square(out.x - 1.0))
            aux = merge_aux(out.aux).loss
            loss = task + aux
        grads = theta.pack(tape.gradient(loss, theta.leaves()))
        update = optimizer.update(step, grads, theta, slots, specs)
        return NestedMap(
            theta=update.theta,
            slots=update.slots,
            losses=NestedMap(task=task, aux=aux),
        )

    return step_fn


def trained():
    layer = stack(layers=(DENSE, sparse(Switch)), recompute=Recompute.NOTHING)
    return layer, SGD(learning_rate=ConstantSchedule(value=0.1), momentum=0.9)


@functools.cache
def trained_by_tf():
    layer, optimizer = trained()
    step_fn = train_step(layer, ShardingPlan(), optimizer)
    step_fn = tf.function(step_fn, autograph=False)
    return train(step_fn, layer, optimizer, tf.constant, lambda x: x)


def train(step_fn, layer, optimizer, put, get):
    """Losses of five steps and the last weights."""
    theta = initialize(layer.weights(), key_from_seed(1)).map(put)
    slots = optimizer.slots(layer.weights()).map(lambda s: put(np.zeros(s.shape, "f")))
    inputs, losses = INPUTS.map(put), []
    for step in range(5):
        out = step_fn(put(np.int32(step)), theta, slots, inputs)
        theta, slots = out.theta, out.slots
        losses.append([float(x) for x in get(out).losses.leaves()])
    return np.array(losses), get(out).theta


@pytest.mark.parametrize("partitioner", Partitioner)
def test_trains_on_eight_devices_as_on_one(partitioner):
    layer, optimizer = trained()
    shardings = layer.weights().map(lambda s: s.sharding(HYBRID))
    slot_specs = optimizer.slots(layer.weights())
    slot_shardings = slot_specs.map(lambda s: s.sharding(HYBRID))
    by_token = HYBRID.activation_sharding(BSM[:2])
    inputs = NestedMap(
        x=HYBRID.activation_sharding(BSM), segment_ids=by_token, token_ids=by_token
    )
    program = compile_program(
        train_step(layer, HYBRID, optimizer),
        [
            tf.TensorSpec([], tf.int32),
            *(
                specs.map(lambda s: tf.TensorSpec(s.shape))
                for specs in (layer.weights(), slot_specs)
            ),
            INPUTS.map(lambda x: tf.TensorSpec(x.shape, x.dtype)),
        ],
        HYBRID.mesh,
        in_shardings=[None, shardings, slot_shardings, inputs],
        out_shardings=NestedMap(theta=shardings, slots=slot_shardings, losses=None),
        partitioner=partitioner,
        name="train",
    )
    losses, theta = train(program, layer, optimizer, np.asarray, program.unshard)
    want_losses, want = trained_by_tf()
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    for path, weight in want.items_by_path():
        got = theta.get_path(path)
        np.testing.assert_allclose(got, weight, atol=1e-5, err_msg=path)
    assert want_losses[-1, 1] < want_losses[0, 1]  # Leaves are [aux, task].
    kinds = [c.kind for c in program.collectives()]
    # One layer of experts in the loops' bodies: there and back, and their gradients.
    assert kinds.count("all-to-all") == 4


def test_flops_are_those_of_the_layers():
    layer = stack(num_layers=6)
    each = DENSE.extra_flops(S) + sparse().extra_flops(S)
    assert layer.extra_flops(S) == pytest.approx(3 * each)


def test_gin_builds_dense_and_sparse_layers():
    gin.parse_config(
        """
        Repeat.num_layers = 12
        Repeat.body = @Sequential()
        Sequential.layers = (@dense/transformer_layer(), @moe/transformer_layer())
        transformer_layer.model_dims = 8
        transformer_layer.num_heads = 4
        transformer_layer.head_dim = 2
        transformer_layer.norm = @LayerNorm
        dense/transformer_layer.hidden_dims = 32
        moe/transformer_layer.feed_forward = @MoE()
        MoE.gating = @Top2()
        MoE.experts = @ExpertFeedForward()
        Top2.capacity = @Capacity()
        Top2.second_expert = %SecondExpert.ALWAYS
        Top2.model_dims = 8
        Top2.num_experts = 16
        Capacity.factor = 1.5
        Capacity.rounding = %Rounding.DOWN
        ExpertFeedForward.num_experts = 16
        ExpertFeedForward.model_dims = 8
        ExpertFeedForward.hidden_dims = 32
        """
    )
    try:
        layer = gin.get_configurable("Repeat")()
    finally:
        gin.clear_config()
    shapes = {path: spec.shape for path, spec in layer.weights().items_by_path()}
    assert shapes["layer_0.feed_forward.w_in"] == (6, 8, 32)
    assert shapes["layer_1.feed_forward.experts.w_in"] == (6, 16, 8, 32)
    assert shapes["layer_1.feed_forward.gating.w"] == (6, 8, 16)
    assert layer.body.layers[1].feed_forward.gating.capacity.factor == 1.5


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Sequential(layers=()), r"layers is empty: give one layer or more"),
        (
            lambda: stack(layers=(sparse(), sparse(experts=8))),
            r"mixtures of \[4, 8\] experts: let all have equally many",
        ),
        (
            lambda: stack(num_layers=5),
            r"num_layers is 5; it must be at least 1 and a multiple of the 2 layers of",
        ),
        (lambda: stack(num_layers=0), r"num_layers is 0; it must be at least 1"),
        (
            lambda: stack(recompute=Recompute.NOTHING, saved_names=["hidden"]),
            r"saved_names \('hidden',\) are read only by",
        ),
        (
            lambda: transformer_layer(**SIZES),
            r"hidden_dims is None and its feed_forward NoneType: give one",
        ),
        (
            lambda: transformer_layer(**SIZES, hidden_dims=1, feed_forward=DENSE),
            r"hidden_dims is 1 and its feed_forward TransformerLayer: give one",
        ),
    ],
)
def test_what_makes_no_stack_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
