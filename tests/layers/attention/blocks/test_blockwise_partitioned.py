"""Attention in blocks on eight devices, in stacks and pipelines, and in training."""

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
    Mode,
    annotate_weights,
    initialize,
)
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.testing import assert_layer_parity
from meshwright.layers.attention.blocks import Blocks
from meshwright.layers.attention.learned_terms import Sink
from meshwright.layers.attention.mask_rules import MaskKind, NearMask
from meshwright.layers.attention.positions import PositionKind
from meshwright.layers.attention.relative.relative_positions import (
    RelativeSinusoids,
    RelativeVectors,
)
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.pipelines.stages import StageMode
from meshwright.layers.stacks.repeat import Repeat, Unroll
from meshwright.layers.transformer import transformer_layer
from tests.layers.attention.on_devices import (
    PLAN,
    SEQUENCE_PARALLEL,
    SPLIT,
    gradients_of,
    some_of,
)
from tests.trainers.parity import initial_state, small_experiment, train

B, S, T, M = 4, 19, 11, 8
RNG = np.random.default_rng(0)
X = RNG.standard_normal([B, S, M], np.float32)
PACKED = {"segment_ids": (np.arange(S) // 7).astype(np.int32)[None].repeat(B, 0)}


def layer_of(block_size=4, **kwargs):
    sizes = {"model_dims": M, "num_heads": 4, "head_dim": 2, "hidden_dims": 16}
    return transformer_layer(**sizes | kwargs, block_size=block_size)


SINK = {"sink": Sink.LEARNED, "dropout_rate": 0.2}
RELATIVE = {"positions": PositionKind.RELATIVE, "dropout_rate": 0.2}
LAYERS = {
    "causal": ({}, PACKED),
    "relative": ({"mask": MaskKind.FULL, **RELATIVE}, {}),
    "window_of_heads_that_do_not_divide": (
        {"mask": NearMask(left=5, right=0), "num_heads": 3, **RELATIVE},
        PACKED,
    ),
    "memory": ({"has_memory": True}, {"memory": np.tanh(X[:, :T])}),
    "grouped": ({"num_kv_heads": 2, "logit_cap": 3.0, "qk_norm": True}, PACKED),
    "vectors": ({"positions": RelativeVectors(max_distance=5), **SINK}, PACKED),
    "waves": ({"positions": RelativeSinusoids(), "num_kv_heads": 2, **SINK}, {}),
    "first_keys": ({"mask": NearMask(left=4, right=0, first=2), **SINK}, {}),
}


PLANS = {"tensor": PLAN, "sequence": SEQUENCE_PARALLEL}
# Any two of the settings meet in one of these; the others are slow.
SOME = (
    ("causal", "tensor", "SHARDY"),
    ("causal", "sequence", "GSPMD"),
    ("relative", "sequence", "SHARDY"),
    ("relative", "tensor", "GSPMD"),
    ("window_of_heads_that_do_not_divide", "tensor", "GSPMD"),
    ("window_of_heads_that_do_not_divide", "sequence", "SHARDY"),
    ("memory", "tensor", "SHARDY"),
    ("memory", "sequence", "GSPMD"),
    ("grouped", "tensor", "GSPMD"),
    ("grouped", "sequence", "SHARDY"),
    ("vectors", "tensor", "GSPMD"),
    ("vectors", "sequence", "SHARDY"),
    ("waves", "tensor", "SHARDY"),
    ("waves", "sequence", "GSPMD"),
    ("first_keys", "tensor", "SHARDY"),
    ("first_keys", "sequence", "GSPMD"),
)


@pytest.mark.parametrize(
    "name,plan,partitioner",
    some_of(itertools.product(LAYERS, PLANS, ("SHARDY", "GSPMD")), SOME),
)
def test_eight_devices_compute_what_one_does(name, plan, partitioner):
    kwargs, inputs = LAYERS[name]
    assert_layer_parity(
        layer_of(**kwargs),
        X,
        plan=PLANS[plan],
        partitioner=mw.Partitioner[partitioner],
        **inputs,
    )


@functools.cache
def compiled(block_size, partitioner, recompute=None, length=S, batch=B):
    """The program of a layer's gradients, or of three such layers'."""
    layer = layer_of(block_size, **RELATIVE)
    if recompute is not None:
        names = ("context",) if recompute is Recompute.ALL_BUT_NAMED else ()
        layer = Repeat(body=layer, num_layers=3, recompute=recompute, saved_names=names)
    return gradients_of(layer, PLAN, [batch, length, M], partitioner)


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_devices_send_no_more_than_without_blocks(partitioner):
    """Heads and batch stay split in the loops, forward and backward."""

    def sent(block_size):
        counts = collections.Counter()
        for collective in compiled(block_size, partitioner).collectives():
            assert "while" not in collective.op_name
            counts[collective.kind, collective.axes] += collective.bytes
        return counts

    in_blocks, at_once = sent(4), sent(Blocks.NONE)
    assert in_blocks.keys() == at_once.keys()
    assert all(size <= at_once[kind] for kind, size in in_blocks.items())


@pytest.mark.parametrize("recompute", Recompute)
def test_memory_grows_with_the_length(recompute):
    """In a stack too: eight times the length, not 64 times the memory."""

    def memory(length):
        return compiled(16, mw.Partitioner.SHARDY, recompute, length).memory()

    assert memory(8192).temporaries < 9 * memory(1024).temporaries


@pytest.mark.parametrize(
    "recompute,unroll",
    some_of(
        itertools.product(Recompute, Unroll),
        (
            (Recompute.EVERYTHING, Unroll.UNROLLED),
            (Recompute.ALL_BUT_NAMED, Unroll.LOOP),
            (Recompute.NOTHING, Unroll.LOOP),
        ),
    ),
)
def test_a_stack_computes_what_it_does_without_blocks(recompute, unroll):
    names = ("query", "context") if recompute is Recompute.ALL_BUT_NAMED else ()

    def gradients(block_size):
        layer = Repeat(
            body=layer_of(block_size, **RELATIVE),
            num_layers=2,
            recompute=recompute,
            saved_names=names,
            unroll=unroll,
        )
        theta = initialize(layer.weights(), key_from_seed(0))

        @tf.function(jit_compile=True, autograph=False)
        def step(theta, x):
            ctx = Context(mode=Mode.TRAIN, key=key_from_seed(1))
            with tf.GradientTape() as tape:
                tape.watch((theta, x))
                y = layer.fprop(ctx, theta, x, **PACKED)
            return y, tape.gradient(y, (theta, x), output_gradients=tf.sin(y))

        return tf.nest.flatten(step(theta, tf.constant(X)))

    for got, want in zip(gradients(4), gradients(Blocks.NONE), strict=True):
        scale = max(1.0, np.abs(want).max())
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * scale)


def test_a_stack_that_saves_the_context_does_not_compute_it_again():
    """The backward pass has one loop over blocks, not two."""

    def loops(recompute):
        text = compiled(4, mw.Partitioner.SHARDY, recompute).hlo_text()
        return text.count(" while(")

    assert loops(Recompute.EVERYTHING) == loops(Recompute.ALL_BUT_NAMED) + 1
    assert loops(Recompute.NOTHING) == loops(Recompute.ALL_BUT_NAMED)


@pytest.mark.parametrize(
    "mode,partitioner",
    some_of(
        itertools.product(StageMode, mw.Partitioner),
        (
            (StageMode.VECTORIZED, mw.Partitioner.GSPMD),
            (StageMode.MANUAL, mw.Partitioner.SHARDY),
        ),
    ),
)
def test_a_pipeline_computes_what_it_does_without_blocks(mode, partitioner):
    plan = dataclasses.replace(
        PLAN,
        mesh_axes=("stage", "data", "tensor"),
        mesh_shape=(2, 2, 2),
        weights={**SPLIT, "stages": "stage"},
    )

    def gradients(block_size):
        layer = Pipeline(
            stack=Repeat(body=layer_of(block_size, **RELATIVE), num_layers=2),
            num_stages=2,
            num_microbatches=2,
            stage_mode=mode,
        )

        def step(theta, x, segment_ids):
            ctx = Context(plan=plan, mode=Mode.TRAIN, key=key_from_seed(1))
            with tf.GradientTape() as tape:
                tape.watch((theta, x))
                read = annotate_weights(plan, layer.weights(), theta)
                y = layer.fprop(ctx, read, x, segment_ids=segment_ids)
            return y, tape.gradient(y, (theta, x), output_gradients=tf.sin(y))

        theta = initialize(layer.weights(), key_from_seed(0)).map(lambda t: t.numpy())
        args = (theta, X, PACKED["segment_ids"])
        program = mw.compile_program(
            step,
            tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), args),
            plan.mesh,
            partitioner=partitioner,
        )
        return tf.nest.flatten(program.unshard(program(*args)))

    for got, want in zip(gradients(4), gradients(Blocks.NONE), strict=True):
        scale = max(1.0, np.abs(want).max())
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * scale)


OPTIONS = {
    "buckets": ("transformer_layer.positions = %PositionKind.RELATIVE",),
    "vectors": (
        "transformer_layer.positions = @RelativeVectors()",
        "RelativeVectors.max_distance = 5",
        "transformer_layer.mask = @NearMask()",
        "NearMask.left = 6",
        "NearMask.right = 0",
        "NearMask.first = 2",
    ),
    "sinusoids": (
        "transformer_layer.positions = @RelativeSinusoids()",
        "transformer_layer.sink = %Sink.LEARNED",
    ),
}


@pytest.mark.parametrize(
    "options,partitioner",
    some_of(
        itertools.product(OPTIONS, ["SHARDY", "GSPMD"]),
        [*zip(OPTIONS, itertools.cycle(["SHARDY", "GSPMD"]))],
    ),
)
def test_eight_devices_train_as_one_without_blocks(options, partitioner):
    def experiment(mesh, block_size):
        return small_experiment(
            f"MESH_SHAPE = {mesh}",
            f"transformer_layer.block_size = {block_size}",
            f"Experiment.partitioner = %Partitioner.{partitioner}",
            "transformer_layer.dropout_rate = 0.1",
            "SEQUENCE_LENGTH = 13",
            *OPTIONS[options],
        )

    plain = experiment((1, 1), "%Blocks.NONE")
    start = initial_state(plain)
    got, want = train(experiment((2, 4), 4), start), train(plain, start)
    assert len(got.losses) == 5 and got.losses[-1] < got.losses[0]
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    for path, value in want.state.items():
        scale = np.abs(value).max() or 1.0
        np.testing.assert_allclose(
            got.state[path] / scale, value / scale, atol=1e-3, err_msg=path
        )
