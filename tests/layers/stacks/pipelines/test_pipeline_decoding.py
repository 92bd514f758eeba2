"""Tokens decoded through stages are those of layers in a row; weights stay in place.

Dims: B prompts, K beams, P tokens of a prompt, T tokens, M model.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling import random
from meshwright.framework.modeling.layer import Context, annotate_weights, initialize
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.layers.experts.gatings import Top2
from meshwright.layers.experts.moe import ExpertFeedForward, MoE
from meshwright.layers.stacks import cache_rows
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.pipelines.stages import StageMode
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.transformer import transformer_layer
from tests.layers.stacks.staged import by_stage

B, K, P, T, M, LAYERS = 8, 2, 2, 4, 16, 4
SIZES = {"model_dims": M, "num_heads": 2, "head_dim": 8}
RNG = np.random.default_rng(0)
X = RNG.standard_normal([T, B * K, 1, M], np.float32)
PROMPTS = RNG.standard_normal([B, P, M], np.float32)
MEMORY = RNG.standard_normal([B, 5, M], np.float32)
BEAMS = RNG.integers(0, K, [T, B, K]).astype(np.int32)
LENGTHS = np.array([1, 2] * (B // 2), np.int32)
VECTORIZED, MANUAL = StageMode
SHARDY, GSPMD = Partitioner


def decoder():
    """With cross-attention, of rows that are beams."""
    return transformer_layer(**SIZES, hidden_dims=24, has_memory=True)


def experts():
    sizes = {"model_dims": M, "num_experts": 4}
    feed_forward = ExpertFeedForward(hidden_dims=8, **sizes)
    moe = MoE(gating=Top2(**sizes), experts=feed_forward)
    return transformer_layer(**SIZES, feed_forward=moe)


def decoded_with_memory(layer, ctx, theta):
    """Steps of beams, whose rows change places after each."""
    memory = layer.encode_memory(ctx, theta, tf.constant(MEMORY))
    cache = cache_rows.copied(layer, layer.init_cache(ctx, B, T), K)
    paddings = tf.cast(tf.range(5)[None] > LENGTHS[:, None] + 1, tf.int32)

    def step(i, cache, outs):
        more = {"memory": memory, "memory_paddings": paddings}
        y, cache = layer.step(ctx, theta, tf.constant(X)[i], cache, i, **more)
        cache = cache_rows.reordered(layer, cache, tf.constant(BEAMS)[i])
        return i + 1, cache, tf.tensor_scatter_nd_update(outs, [[i]], y[None])

    return NestedMap(y=looped(step, cache, X))


def decoded_after_prompts(layer, ctx, theta):
    """All tokens of prompts at once, then one after another."""
    cache = layer.init_cache(ctx, B, P + T)
    paddings = tf.cast(tf.range(P + T)[None] < P - LENGTHS[:, None], tf.int32)
    start = tf.constant(LENGTHS)[:, None] - P
    positions = tf.maximum(tf.range(P)[None] + start, 0)
    prompts = tf.constant(PROMPTS)
    more = {"paddings": paddings, "token_ids": None}
    y, cache = layer.step(
        ctx, theta, prompts, cache, 0, segment_positions=positions, **more
    )

    def step(i, cache, outs):
        at, x = P + i, tf.constant(X[:, :B])[i]
        y, cache = layer.step(
            ctx, theta, x, cache, at, segment_positions=start + at, **more
        )
        return i + 1, cache, tf.tensor_scatter_nd_update(outs, [[i]], y[None])

    return NestedMap(y=y, more=looped(step, cache, X[:, :B]))


def looped(step, cache, x):
    """What `step` writes into a tensor like `x`, for each of its tokens."""
    state = [tf.constant(0), cache, tf.zeros(x.shape)]
    return tf.while_loop(lambda i, *_: i < T, step, state)[-1]


def pipeline(body, stages, repeats=1, mode=VECTORIZED):
    return Pipeline(
        stack=Repeat(body=body, num_layers=LAYERS),
        num_stages=stages,
        num_microbatches=2,
        num_repeats=repeats,
        stage_mode=mode,
    )


def plan(*mesh):
    return ShardingPlan(
        mesh_axes=("stage", "data", "model"),
        mesh_shape=mesh,
        weights={"stages": "stage", "heads": "model", "hidden": "model"},
        activations={
            "batch": ("data", "stage"),
            "microbatch": "data",
            "heads": "model",
            "hidden": "model",
        },
    )


@functools.cache
def wanted(decode, body):
    """By a `Repeat`, on one device, with TF's kernels."""
    stack = Repeat(body=body(), num_layers=LAYERS)
    theta = initialize(stack.weights(), random.key_from_seed(0))
    return theta, decode(stack, Context(), theta).map(lambda t: t.numpy())


def compiled(decode, layer, split, partitioner):
    specs = layer.weights()

    def run(theta):
        ctx = Context(plan=split, key=random.key_from_seed(1), path="stack")
        return decode(layer, ctx, annotate_weights(split, specs, theta))

    return compile_program(
        run,
        [specs.map(lambda s: tf.TensorSpec(s.shape))],
        split.mesh,
        in_shardings=[specs.map(lambda s: s.sharding(split))],
        partitioner=partitioner,
        name="decoding",
    )


def assert_no_weights_move(program):
    """Stages exchange activations [..., tokens, M] alone, and masks of integers."""
    moved = [
        (c.kind, shape)
        for c in program.collectives()
        for shape, dtype in zip(c.shapes, c.dtypes, strict=True)
        if "stage" in "".join(c.axes) and dtype == "f32"
    ]
    assert "collective-permute" in {kind for kind, _ in moved}
    for kind, shape in moved:
        assert len(shape) > 3 and shape[-2:] in [(1, M), (P, M)], (kind, shape)


CASES = [
    (decoded_with_memory, decoder, (2,), (2, 2, 2), SHARDY),
    (decoded_with_memory, decoder, (2, 2), (2, 2, 2), GSPMD),
    (decoded_with_memory, decoder, (4,), (4, 2, 1), GSPMD),
    (decoded_with_memory, decoder, (4, 1, MANUAL), (4, 1, 2), SHARDY),
    # Two of the six layers that stages and rounds have are none.
    (decoded_with_memory, decoder, (2, 3), (2, 2, 2), SHARDY),
    (decoded_after_prompts, experts, (4,), (4, 1, 2), SHARDY),
    (decoded_after_prompts, experts, (2, 2, MANUAL), (2, 2, 2), GSPMD),
    (decoded_after_prompts, experts, (4,), (2, 2, 2), SHARDY),  # Two to a device.
    (decoded_after_prompts, experts, (2, 2), (1, 2, 2), SHARDY),  # None is split.
]


IDS = [f"{case[1].__name__} {case[2]} {case[3]} {case[4].value}" for case in CASES]


@pytest.mark.parametrize("decode,body,sizes,mesh,partitioner", CASES, ids=IDS)
def test_equals_its_layers_in_a_row(decode, body, sizes, mesh, partitioner):
    theta, want = wanted(decode, body)
    layer = pipeline(body(), *sizes)
    program = compiled(decode, layer, plan(*mesh), partitioner)
    got = program.unshard(program(by_stage(layer, theta).map(lambda t: t.numpy())))
    for path, value in want.items_by_path():
        atol = 1e-5 * np.abs(value).max()
        same = got.get_path(path)
        np.testing.assert_allclose(same, value, rtol=0, atol=atol, err_msg=path)
    if mesh[0] > 1:
        assert_no_weights_move(program)


def test_rows_that_fit_no_groups_are_refused():
    layer = pipeline(decoder(), 2)
    ctx = Context(plan=plan(2, 2, 2), path="stack")
    theta = initialize(layer.weights(), random.key_from_seed(0))
    cache = layer.init_cache(ctx, B, T)
    message = (
        r"'stack': the rows of 'paddings' of shape \(3, 4\) do not divide into the "
        "cache's 2 groups: give it the rows"
    )
    with pytest.raises(ValueError, match=message):
        x = tf.constant(X[0, :B])
        layer.step(ctx, theta, x, cache, 0, paddings=tf.zeros([3, T], tf.int32))


@pytest.mark.parametrize(
    ("rows", "steps", "memories", "message"),
    [
        (B // 2, B, B, "the cache of a step has 2 entries of 2 rows, but x has 4 g"),
        (B, B // 2, B // 2, "the cache of a step has 4 entries of 2 rows"),
        (B, B - 1, B, "the cache of a step has 4 entries of 2 rows"),
        (B, B, 4, "the memory of a step has 2 entries of 2 rows, but x has 4 groups"),
    ],
)
def test_a_cache_of_other_rows_is_refused(rows, steps, memories, message):
    """Entries that are not there would be read as the last one."""
    stages = 2 if rows < B else 4
    layer, split = pipeline(decoder(), stages), plan(stages, 2, 1)
    ctx = Context(plan=split, path="stack")
    theta = initialize(layer.weights(), random.key_from_seed(0))
    cache = layer.init_cache(ctx, rows, T)
    memory = layer.encode_memory(ctx, theta, tf.constant(MEMORY[:memories]))
    with pytest.raises(ValueError, match=message):
        layer.step(ctx, theta, tf.constant(X[0, :steps]), cache, 0, memory=memory)
