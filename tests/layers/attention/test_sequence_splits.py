"""Attention of sequences that a plan splits: in a ring, and by heads."""

import collections
import dataclasses
import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.modeling.layer import (
    Context,
    initialize,
)
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import SequenceAttention, ShardingPlan
from meshwright.framework.testing import assert_layer_parity
from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.attention.blocks import Blocks
from meshwright.layers.attention.learned_terms import Sink
from meshwright.layers.attention.mask_rules import MaskKind, NearMask, PrefixMask
from meshwright.layers.attention.positions import PositionKind
from meshwright.layers.attention.relative.relative_positions import (
    RelativeSinusoids,
    RelativeVectors,
)
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.pipelines.stages import StageMode
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.transformer import transformer_layer
from tests.layers.attention.blocks.test_blockwise import EveryOther
from tests.layers.attention.on_devices import gradients_of, some_of
from tests.trainers.parity import initial_state, small_experiment, train

B, S, T, M = 4, 37, 23, 8
RNG = np.random.default_rng(0)
X = RNG.standard_normal([B, S, M], np.float32)
MEMORY = RNG.standard_normal([B, T, M], np.float32)


def repeated(row):
    return np.asarray(row, np.int32)[None].repeat(B, 0)


PACKED = {
    "segment_ids": repeated(np.arange(S) // 11),
    "segment_positions": repeated(np.arange(S) % 11),
}
PADDINGS = np.zeros([B, S], np.float32)
PADDINGS[0, 35:] = PADDINGS[1, 5] = 1  # Every query still sees a key.
CROSS = {
    "memory": MEMORY,
    "segment_ids": PACKED["segment_ids"],
    "memory_segment_ids": repeated(np.arange(T) // 6),
}
SINK = {"sink": Sink.LEARNED}
GROUPED = {"num_kv_heads": 4, "logit_cap": 2.0, "qk_norm": True, "use_bias": True}
# By name: mask, positions, tokens of a block, inputs, further settings.
CASES = {
    "causal": (MaskKind.CAUSAL, "ROTARY", 4, {}),
    "full_padded": (MaskKind.FULL, "RELATIVE", 7, {"paddings": PADDINGS}),
    "causal_buckets": (MaskKind.CAUSAL, "RELATIVE", 3, PACKED),
    "one_block": (MaskKind.CAUSAL, "NONE", Blocks.NONE, {}),
    "window": (NearMask(left=9, right=0), "ROTARY", 4, PACKED),
    "both_sides": (NearMask(left=3, right=2), "RELATIVE", 4, {"paddings": PADDINGS}),
    "prefix": (PrefixMask(length=4), "NONE", 4, PACKED),
    "own_rule": (EveryOther(), "RELATIVE", 5, PACKED),
    "memory": (MaskKind.FULL, "NONE", 8, CROSS),
    "grouped": (MaskKind.CAUSAL, "ROTARY", 4, PACKED, GROUPED),
    "sink": (MaskKind.CAUSAL, "ROTARY", 4, PACKED, SINK),
    "first_keys": (NearMask(left=5, right=0, first=3), "NONE", 2, {}),
    "first_keys_packed": (
        NearMask(left=3, right=1, first=2),
        "ROTARY",
        4,
        PACKED,
        SINK,
    ),
    "vectors": (MaskKind.CAUSAL, RelativeVectors(max_distance=5), 3, PACKED),
    "vectors_of_heads": (
        NearMask(left=9, right=4),
        RelativeVectors(max_distance=20, by_head=True),
        4,
        {"paddings": PADDINGS},
    ),
    "waves": (MaskKind.CAUSAL, RelativeSinusoids(), 4, {}, SINK),
    "waves_both_ways": (MaskKind.FULL, RelativeSinusoids(), 7, PACKED),
}
HEADS = {"heads": "tensor", "kv_heads": "tensor", "hidden": "tensor"}


LAYER = {"model_dims": M, "num_heads": 4, "head_dim": 2, "hidden_dims": 16}


def plan_of(way, shape=(2, 2, 2)):
    """Of the axes data, sequence and tensor."""
    return ShardingPlan(
        mesh_axes=("data", "sequence", "tensor"),
        mesh_shape=shape,
        weights=HEADS,
        activations={"batch": "data", "sequence": "sequence", **HEADS},
        sequence_attention=SequenceAttention[way],
    )


def attention(mask=MaskKind.CAUSAL, positions="NONE", block_size=4, **kwargs):
    return MultiHeadAttention(
        model_dims=M,
        num_heads=8,
        head_dim=2,
        mask=mask,
        positions=PositionKind[positions] if isinstance(positions, str) else positions,
        num_buckets=8,
        max_distance=16,
        block_size=block_size,
        **{"dropout_rate": 0.3, **kwargs},
    )


WAYS = ("RING", "ALL_TO_ALL")
PARTITIONERS = ("SHARDY", "GSPMD")
SOME = (
    ("causal", "RING", "SHARDY"),
    ("full_padded", "RING", "GSPMD"),
    ("causal_buckets", "RING", "GSPMD"),
    ("window", "RING", "SHARDY"),
    ("both_sides", "RING", "SHARDY"),
    ("prefix", "RING", "GSPMD"),
    ("own_rule", "RING", "SHARDY"),
    ("memory", "RING", "GSPMD"),
    ("grouped", "RING", "SHARDY"),
    ("sink", "RING", "GSPMD"),
    ("first_keys", "RING", "SHARDY"),
    ("first_keys_packed", "RING", "GSPMD"),
    ("vectors", "RING", "GSPMD"),
    ("vectors_of_heads", "RING", "SHARDY"),
    ("waves", "RING", "SHARDY"),
    ("waves_both_ways", "RING", "GSPMD"),
    ("sink", "ALL_TO_ALL", "SHARDY"),
    ("vectors", "ALL_TO_ALL", "SHARDY"),
    ("waves", "ALL_TO_ALL", "GSPMD"),
    ("causal_buckets", "ALL_TO_ALL", "SHARDY"),
    ("memory", "ALL_TO_ALL", "GSPMD"),
    ("grouped", "ALL_TO_ALL", "GSPMD"),
)


@pytest.mark.parametrize(
    "name,way,partitioner", some_of(itertools.product(CASES, WAYS, PARTITIONERS), SOME)
)
def test_eight_devices_compute_what_one_does_at_once(name, way, partitioner):
    """Outputs and gradients; 37 tokens, which no devices divide."""
    mask, positions, size, inputs, *kwargs = CASES[name]
    layer = attention(mask, positions, size, **(kwargs[0] if kwargs else {}))
    # One of the two shapes for each case, so that both are in either partitioner.
    shape = ((2, 2, 2), (2, 4, 1))[list(CASES).index(name) % 2]
    assert_layer_parity(
        layer,
        X,
        plan=plan_of(way, shape),
        partitioner=mw.Partitioner[partitioner],
        reference=dataclasses.replace(layer, block_size=Blocks.NONE),
        **inputs,
    )


@pytest.mark.parametrize(
    "count,way,partitioner",
    [
        (1, "RING", "SHARDY"),
        (2, "ALL_TO_ALL", "SHARDY"),
        (3, "RING", "GSPMD"),
        (4, "ALL_TO_ALL", "GSPMD"),
        (5, "RING", "SHARDY"),
        (8, "RING", "GSPMD"),
        (8, "ALL_TO_ALL", "SHARDY"),
    ],
)
def test_any_number_of_devices_computes_what_one_does(count, way, partitioner):
    layer = attention(NearMask(left=9, right=0), num_kv_heads=8)
    assert_layer_parity(
        layer,
        X,
        plan=plan_of(way, (1, count, 1)),
        partitioner=mw.Partitioner[partitioner],
        reference=dataclasses.replace(layer, block_size=Blocks.NONE),
        **PACKED,
    )


@pytest.mark.parametrize(
    "way,partitioner",
    some_of(
        itertools.product(WAYS, PARTITIONERS),
        (("RING", "GSPMD"), ("ALL_TO_ALL", "SHARDY")),
    ),
)
def test_in_sixteen_bits_too(way, partitioner):
    """To a few roundings. Without biases, whose gradients are sums in 16 bits."""
    layer = attention(positions="ROTARY", num_kv_heads=4)
    assert_layer_parity(
        layer,
        X,
        plan=plan_of(way, (2, 4, 1)),
        partitioner=mw.Partitioner[partitioner],
        reference=dataclasses.replace(layer, block_size=Blocks.NONE),
        activation_dtype=tf.bfloat16,
        tolerance=4 * 2**-7,
        **PACKED,
    )


@functools.cache
def compiled(way, partitioner, length=64, batch=B, size=4, shape=(2, 2, 2), **kwargs):
    """The program of a layer's gradients."""
    layer, plan = attention(block_size=size, **kwargs), plan_of(way, shape)
    return gradients_of(layer, plan, [batch, length, M], mw.Partitioner[partitioner])


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("way", ["RING", "ALL_TO_ALL"])
def test_what_is_sent(way, partitioner):
    """Nothing is gathered but what all devices have of the bias's gradient."""
    kinds = collections.Counter()
    for collective in compiled(way, partitioner, positions="RELATIVE").collectives():
        if collective.axes == ("sequence",):
            kinds[collective.kind] += 1
        else:
            assert collective.kind == "all-reduce"
        largest = max(np.prod(shape) for shape in collective.shapes)
        if collective.kind == "all-gather":
            assert largest <= 8 * 8
        if collective.kind == "collective-permute":
            # A device's keys, values or words of them.
            assert largest <= B // 2 * 32 * 8 // 2 * 2
    assert kinds["all-to-all"]
    assert bool(kinds["collective-permute"]) == (way == "RING")


@pytest.mark.parametrize("way", ["RING", "ALL_TO_ALL"])
def test_memory_grows_with_the_length(way):
    """Eight times the length, not 64 times the memory."""

    def memory(length):
        program = compiled(way, "SHARDY", length, 2, 64, (2, 4, 1), dropout_rate=0.0)
        return program.memory().temporaries

    assert memory(8192) < 9 * memory(1024)


@pytest.mark.parametrize(
    "way,recompute",
    some_of(
        itertools.product(WAYS, Recompute),
        (("RING", Recompute.ALL_BUT_NAMED), ("RING", Recompute.NOTHING)),
    ),
)
def test_a_stack_computes_what_it_does_on_one_device(way, recompute):
    names = ("context",) if recompute is Recompute.ALL_BUT_NAMED else ()

    def stack(block_size):
        body = transformer_layer(**LAYER, block_size=block_size)
        return Repeat(body=body, num_layers=2, recompute=recompute, saved_names=names)

    assert_layer_parity(
        stack(4),
        X,
        plan=plan_of(way),
        partitioner=mw.Partitioner.GSPMD,
        reference=stack(Blocks.NONE),
        segment_ids=PACKED["segment_ids"],
    )


def staged(mode):
    body = transformer_layer(**LAYER, block_size=4)
    return Pipeline(
        stack=Repeat(body=body, num_layers=2),
        num_stages=2,
        num_microbatches=2,
        stage_mode=mode,
    )


def plan_of_stages(way):
    return dataclasses.replace(
        plan_of(way),
        mesh_axes=("stage", "sequence", "tensor"),
        weights={**HEADS, "stages": "stage"},
        activations={"sequence": "sequence", **HEADS},
    )


@pytest.mark.parametrize(
    "mode,partitioner",
    some_of(
        itertools.product(StageMode, PARTITIONERS),
        ((StageMode.VECTORIZED, "SHARDY"), (StageMode.MANUAL, "GSPMD")),
    ),
)
def test_stages_of_a_pipeline_may_split_heads(mode, partitioner):
    assert_layer_parity(
        staged(mode),
        X,
        plan=plan_of_stages("ALL_TO_ALL"),
        partitioner=mw.Partitioner[partitioner],
        segment_ids=PACKED["segment_ids"],
    )


def trace(layer, plan):
    """Traces a program of the layer, without compiling it."""
    specs = layer.weights().map(lambda spec: tf.TensorSpec(spec.shape))
    program = tf.function(
        lambda theta, x: layer.fprop(Context(plan=plan), theta, x), autograph=False
    )
    program.get_concrete_function(specs, tf.TensorSpec(X.shape))


@pytest.mark.parametrize("mode", StageMode)
def test_a_ring_in_a_pipeline_is_refused(mode):
    with pytest.raises(ValueError, match="in a pipeline.*ALL_TO_ALL, or leave out"):
        trace(staged(mode), plan_of_stages("RING"))


@pytest.mark.parametrize(
    "name,heads",
    [("num_heads", {"num_heads": 6}), ("num_kv_heads", {"num_kv_heads": 2})],
)
def test_heads_that_devices_do_not_divide_are_refused(name, heads):
    layer = MultiHeadAttention(model_dims=M, head_dim=2, **{"num_heads": 8, **heads})
    with pytest.raises(ValueError, match=rf"{name} is \d, which the 4 .*RING"):
        trace(layer, plan_of("ALL_TO_ALL"))


def test_a_way_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="sequence_attention is 'ring'.*RING"):
        dataclasses.replace(plan_of("RING"), sequence_attention="ring")


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_a_step_with_a_split_cache_adds_up_what_devices_have(partitioner):
    """Of its softmax: no keys are sent."""
    layer, plan = attention(positions="ROTARY"), plan_of("RING", (2, 4, 1))
    split = plan.activation_sharding(("batch", "sequence", "heads", "head_dim"))
    theta = initialize(layer.weights(), key_from_seed(0)).map(lambda t: t.numpy())
    cache = RNG.standard_normal([2, B, 64, 8, 2], np.float32)
    cache = NestedMap(key=cache[0], value=cache[1])
    args = (theta, X[:, :1], cache, np.int32(37))
    shardings = cache.map(lambda _: split)
    program = mw.compile_program(
        lambda *args: layer.step(Context(plan=plan), *args),
        tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), args),
        plan.mesh,
        in_shardings=[None, None, shardings, None],
        out_shardings=(None, shardings),
        partitioner=mw.Partitioner[partitioner],
    )
    for collective in program.collectives():
        assert all(np.prod(shape) <= B * 8 * 2 for shape in collective.shapes)
    got = program.unshard(program(*args))
    want = layer.step(Context(), *tf.nest.map_structure(tf.constant, args))
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("way,partitioner", list(itertools.product(WAYS, PARTITIONERS)))
def test_a_prompt_that_fills_a_cache_is_attended_to_in_parts(way, partitioner):
    """As the plan says, of rows that begin with padding."""
    layer, plan = attention(positions="ROTARY"), plan_of(way, (2, 4, 1))
    theta = initialize(layer.weights(), key_from_seed(0)).map(lambda t: t.numpy())
    padding = np.arange(B, dtype=np.int32)[:, None]
    more = {
        "paddings": (np.arange(S + 9) < padding).astype(np.int32),
        "segment_positions": np.maximum(np.arange(S, dtype=np.int32) - padding, 0),
    }

    def step(plan):
        def run(theta, x, more):
            ctx = Context(plan=plan)
            return layer.step(ctx, theta, x, layer.init_cache(ctx, B, S + 9), 0, **more)

        return run

    args = (theta, X, more)
    program = mw.compile_program(
        step(plan),
        tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), args),
        plan.mesh,
        partitioner=mw.Partitioner[partitioner],
    )
    sent = {collective.kind for collective in program.collectives()}
    assert {"RING": "collective-permute", "ALL_TO_ALL": "all-to-all"}[way] in sent
    got = program.unshard(program(*args))
    want = step(ShardingPlan())(*tf.nest.map_structure(tf.constant, args))
    # What tokens of padding find is not read.
    read = (padding <= np.arange(S))[:, :, None]
    (got, *got_cache), (want, *want_cache) = map(tf.nest.flatten, (got, want))
    pairs = zip([got * read, *got_cache], [want * read, *want_cache], strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


OPTIONS = (
    "transformer_layer.dropout_rate = 0.1",
    "transformer_layer.positions = %PositionKind.RELATIVE",
    "SEQUENCE_LENGTH = 32",
)
TRAINED = {
    "ring": [((2, 4, 1), "SHARDY"), ((2, 2, 2), "GSPMD")],
    "all_to_all": [((2, 4, 1), "GSPMD")],
}


@pytest.mark.parametrize(
    "plan,shape,partitioner",
    some_of(
        itertools.product(TRAINED, [(2, 4, 1), (2, 2, 2)], PARTITIONERS),
        [(plan, *case) for plan, cases in TRAINED.items() for case in cases],
    ),
)
def test_eight_devices_train_as_one_without_blocks(plan, shape, partitioner):
    def experiment(shape, block_size):
        return small_experiment(
            f"MESH_SHAPE = {shape}",
            f"transformer_layer.block_size = {block_size}",
            f"Experiment.partitioner = %Partitioner.{partitioner}",
            *OPTIONS,
            plan=plan,
        )

    plain = experiment((1, 1, 1), "%Blocks.NONE")
    start = initial_state(plain)
    got, want = train(experiment(shape, 4), start), train(plain, start)
    assert len(got.losses) == 5 and got.losses[-1] < got.losses[0]
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    for path, value in want.state.items():
        scale = np.abs(value).max() or 1.0
        np.testing.assert_allclose(
            got.state[path] / scale, value / scale, atol=1e-3, err_msg=path
        )
