"""Attention by a fused kernel against attention in blocks and of all pairs at once.

The kernel is the one for TPUs, as a CPU interprets it.
"""

import dataclasses
import itertools
import json
import re
import types

import numpy as np
import pytest
import tensorflow as tf
from jax._src.cudnn import fused_attention_stablehlo
from jax.extend.mlir import ir

from meshwright import framework as mw
from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.compiler.stablehlo.kernels.fill_kernels import fill_kernels
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    call_target,
    shape_of,
    walk,
)
from meshwright.framework.compiler.stablehlo.tidy import tidy
from meshwright.framework.compiler.stablehlo.written import write_for
from meshwright.framework.modeling.layer import Context, Mode, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.sharding.manual import manual_partition
from meshwright.framework.sharding.placeholders import tracing_for
from meshwright.framework.sharding.plan import SequenceAttention, ShardingPlan
from meshwright.framework.testing import assert_layer_parity
from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.attention.blocks import Blocks
from meshwright.layers.attention.fused import Kernel
from meshwright.layers.attention.learned_terms import Sink
from meshwright.layers.attention.mask_rules import MaskKind, NearMask, PrefixMask
from meshwright.layers.attention.positions import PositionKind
from meshwright.layers.attention.relative.relative_positions import (
    RelativeSinusoids,
    RelativeVectors,
)
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.transformer import transformer_layer
from tests.layers.attention.on_devices import some_of
from tests.trainers.parity import initial_state, small_experiment, train

B, S, T, M = 2, 256, 384, 8
RNG = np.random.default_rng(0)
X = RNG.standard_normal([B, S, M], np.float32)
SEGMENTS = {"segment_ids": (np.arange(S) // 90).astype(np.int32)[None].repeat(B, 0)}
PADDINGS = np.zeros([B, S], np.float32)
PADDINGS[0, 200:] = PADDINGS[1, 5] = 1  # Every query still sees a key.
CROSS = {
    "memory": RNG.standard_normal([B, T, M], np.float32),
    **SEGMENTS,
    "memory_segment_ids": (np.arange(T) // 100).astype(np.int32)[None].repeat(B, 0),
}
CASES = {
    "causal": ({"positions": PositionKind.ROTARY}, {}),
    "full_padded": ({"mask": MaskKind.FULL}, {"paddings": PADDINGS}),
    "window": ({"mask": NearMask(left=70, right=0)}, {}),
    "both_sides_packed_capped": (
        {"mask": NearMask(left=140, right=9), "logit_cap": 3.0},
        SEGMENTS,
    ),
    "packed_grouped": ({"num_kv_heads": 2, "qk_norm": True}, SEGMENTS),
    "memory": ({"mask": MaskKind.FULL, "num_kv_heads": 1}, CROSS),
}
PLANS = {
    count: ShardingPlan(
        mesh_axes=("data", "tensor", "rest"),
        mesh_shape=shape,
        weights={"heads": "tensor"},
        activations={"batch": "data", "heads": "tensor"},
    )
    for count, shape in ((1, (1, 1, 1)), (8, (2, 2, 2)))
}
SPLIT_KEYS = dataclasses.replace(
    PLANS[8], activations={**PLANS[8].activations, "kv_heads": "tensor"}
)


def layer_of(kernel=Kernel.SPLASH, **kwargs):
    sizes = {"model_dims": M, "num_heads": 4, "head_dim": 4, "block_size": 128}
    return MultiHeadAttention(**{**sizes, "kernel": kernel, **kwargs})


# Each case, and any two of the other settings, meet in one of these; others are slow.
SOME = (
    ("causal", 1, "SHARDY", 128),
    ("causal", 8, "GSPMD", Blocks.NONE),
    ("full_padded", 8, "SHARDY", Blocks.NONE),
    ("window", 8, "GSPMD", 128),
    ("both_sides_packed_capped", 8, "SHARDY", 128),
    ("packed_grouped", 8, "GSPMD", 128),
    ("memory", 8, "SHARDY", Blocks.NONE),
)


@pytest.mark.parametrize(
    "name,devices,partitioner,block_size",
    some_of(
        itertools.product(CASES, PLANS, ("SHARDY", "GSPMD"), (128, Blocks.NONE)), SOME
    ),
)
def test_it_computes_what_one_device_does_without(
    name, devices, partitioner, block_size
):
    """In blocks, or of all pairs at once."""
    kwargs, inputs = CASES[name]
    assert_layer_parity(
        layer_of(**kwargs),
        X,
        plan=PLANS[devices],
        partitioner=mw.Partitioner[partitioner],
        reference=layer_of(Kernel.NONE, **{**kwargs, "block_size": block_size}),
        **inputs,
    )


@pytest.mark.parametrize("heads", [2, 1])
def test_grouped_heads_where_the_plan_splits_both_alike(heads):
    """One head of keys, which two devices cannot share, is repeated."""
    kwargs, inputs = {**CASES["packed_grouped"][0], "num_kv_heads": heads}, SEGMENTS
    assert_layer_parity(
        layer_of(**kwargs),
        X,
        plan=SPLIT_KEYS,
        reference=layer_of(Kernel.NONE, **kwargs),
        **inputs,
    )


def gradients(layer, dtype=tf.float32, **inputs):
    """The output, and gradients by weights and input, on a CPU device."""
    theta = initialize(layer.weights(), key_from_seed(0))

    def step(theta, x, inputs):
        ctx = Context(plan=PLANS[1], activation_dtype=dtype)
        with tf.GradientTape() as tape:
            tape.watch((theta, x))
            y = layer.fprop(ctx, theta, x, **inputs)
        return [y, *tf.nest.flatten(tape.gradient(y, (theta, x), tf.sin(y)))]

    args = tf.nest.map_structure(np.asarray, (theta, X, inputs))
    specs = tf.nest.map_structure(lambda a: tf.TensorSpec(a.shape, a.dtype), args)
    program = mw.compile_program(step, specs, PLANS[1].mesh)
    return [np.float32(t) for t in program.unshard(program(*args))]


def test_sixteen_bit_activations_are_as_exact_as_at_once():
    exact = gradients(layer_of(Kernel.NONE))
    errors = [
        [
            np.abs(got - want).mean()
            for got, want in zip(gradients(layer, tf.bfloat16), exact, strict=True)
        ]
        for layer in (layer_of(), layer_of(Kernel.NONE, block_size=Blocks.NONE))
    ]
    assert np.all(np.array(errors[0]) < 1.2 * np.array(errors[1]))


def test_queries_that_see_no_key_stay_finite_and_reach_nobody():
    paddings = np.zeros([B, S], np.float32)
    paddings[:, :9] = 1
    results = [
        gradients(layer_of(kernel), paddings=paddings)
        for kernel in (Kernel.SPLASH, Kernel.NONE)
    ]
    assert all(np.isfinite(t).all() for t in results[0])
    got, want = (each[0][:, 9:] for each in results)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def lowered(layer, device_kind, plan=PLANS[1], length=S, dtype=tf.float32, padded=True):
    """The module of a layer's gradients, as traced for a kind of devices."""

    def step(theta, x, key, paddings):
        ctx = Context(plan=plan, mode=Mode.TRAIN, key=key, activation_dtype=dtype)
        is_padded = padded and layer.mask is MaskKind.FULL
        more = {"paddings": paddings} if is_padded else {}
        with tf.GradientTape() as tape:
            tape.watch((theta, x))
            y = layer.fprop(ctx, theta, x, **more)
        return tape.gradient(y, (theta, x))

    weights = layer.weights().map(lambda s: tf.TensorSpec(s.shape))
    specs = [
        tf.TensorSpec([B, length, M], dtype),
        tf.TensorSpec([2], tf.uint32),
        tf.TensorSpec([B, length]),
    ]
    with tracing_for(device_kind):
        return Module(lower(step, [weights, *specs], name="step"), plan.mesh)


def calls(module):
    """How many passes of kernels a module calls."""
    text = str(module.operation)
    return len(re.findall(r"custom_call @meshwright_kernel\.", text))


@pytest.mark.parametrize(
    "kind,kwargs,length,count",
    [
        ("v5e", {}, 2048, 2),
        ("v6e", {"mask": MaskKind.FULL, "num_kv_heads": 1}, 2048, 2),
        ("v5e", {}, 1920, 0),  # Short.
        ("v5e", {}, 2176, 0),  # No multiple of 512.
        ("v5e", {"block_size": 512}, 2048, 0),
        ("v5e", {"block_size": Blocks.NONE}, 2048, 0),
        ("v5e", {"dropout_rate": 0.1}, 2048, 0),
        ("v5e", {"kernel": Kernel.NONE}, 2048, 0),
        ("v3", {}, 2048, 0),
        ("cuda", {}, 2048, 0),
        ("cpu", {}, 2048, 0),
        ("cpu", {"kernel": Kernel.SPLASH, "block_size": 128}, 256, 2),
    ],
)
def test_it_is_automatic_in_long_sequences_on_tpus_alone(kind, kwargs, length, count):
    layer = layer_of(**{"kernel": Kernel.AUTO, "block_size": Blocks.AUTO, **kwargs})
    assert calls(lowered(layer, kind, length=length)) == count


THREE_ROWS = dataclasses.replace(PLANS[8], mesh_shape=(4, 2, 1))
SPLIT_SEQUENCE = dataclasses.replace(
    PLANS[8],
    activations={"sequence": "data"},
    sequence_attention=SequenceAttention.RING,
)


@pytest.mark.parametrize(
    "kwargs,given,message",
    [
        ({"mask": PrefixMask(length=3)}, {}, "whose mask is PrefixMask.*a NearMask"),
        ({"positions": PositionKind.RELATIVE}, {}, "relative positions: use .*ROTARY"),
        (
            {"positions": RelativeVectors()},
            {},
            "relative positions: use .*ROTARY",
        ),
        ({"positions": RelativeSinusoids()}, {}, "relative positions: use .*ROTARY"),
        ({"sink": Sink.ZERO}, {}, "has sinks: set sink to Sink.NONE"),
        ({"mask": NearMask(left=3, right=0, first=2)}, {}, "set NearMask.first to 0"),
        ({"dropout_rate": 0.1}, {}, "drops out probabilities: set dropout_rate to 0"),
        ({}, {"dtype": tf.float16}, "float16: use float32 or bfloat16"),
        ({}, {"length": 200}, "has 200 queries: make their number a multiple of 128"),
        ({"head_dim": 512}, {}, "head_dim is 512: make it at most 256"),
        ({"block_size": 64}, {}, "block_size is 64: make it 128 or more"),
        ({}, {"device_kind": "v3"}, "the devices are v3: use v4, v5e, .*, cpu"),
        ({}, {"plan": THREE_ROWS}, "splits its 2 rows over 4 devices: make them a"),
        (
            {},
            {"plan": SPLIT_SEQUENCE},
            "splits 'sequence': set ShardingPlan.sequence_attention to .*ALL_TO_ALL",
        ),
        (
            {},
            {"plan": PLANS[8].inside_pipeline(["rest"])},
            "is in a pipeline: leave out the pipeline",
        ),
        ({"kernel": Kernel.CUDNN}, {}, "the devices are cpu: use cuda"),
        (
            {"kernel": Kernel.CUDNN},
            {"device_kind": "cuda"},
            "activations are float32: use bfloat16 or float16",
        ),
        (
            {"kernel": Kernel.CUDNN},
            {"device_kind": "cuda", "dtype": tf.bfloat16},
            "head_dim is 4: make it a multiple of 8, at most 128",
        ),
        (
            {"kernel": Kernel.CUDNN, "head_dim": 8, "logit_cap": 2.0},
            {"device_kind": "cuda", "dtype": tf.bfloat16},
            "logit_cap is 2.0: set it to None",
        ),
        (
            {"kernel": Kernel.CUDNN, "head_dim": 8, "mask": NearMask(left=3, right=1)},
            {"device_kind": "cuda", "dtype": tf.bfloat16},
            "right=1.*: make its right 0",
        ),
        (
            {"kernel": Kernel.CUDNN, "head_dim": 8, "mask": MaskKind.FULL},
            {"device_kind": "cuda", "dtype": tf.bfloat16},
            "has segments or paddings: leave them out",
        ),
    ],
)
def test_a_kernel_that_cannot_is_refused(kwargs, given, message):
    with pytest.raises(ValueError, match=f"Kernel.*cannot.*{message}.*or set kernel"):
        lowered(layer_of(**kwargs), **{"device_kind": "cpu", **given})


def in_partition(fn):
    """`fn` of a row of "data", which is manual."""
    dims = ["data", None, None]
    mesh = PLANS[8].mesh
    return manual_partition(
        fn, mesh=mesh, in_dims=[dims], out_dims=dims, manual_axes=["data"]
    )


def vectorized(fn):
    return lambda x: tf.vectorized_map(lambda row: fn(row[None])[0], x)


@pytest.mark.parametrize(
    "around,plan,message",
    [
        (
            in_partition,
            dataclasses.replace(PLANS[8], activations={"heads": "tensor"}),
            "is in a manual region: call it outside of manual_partition",
        ),
        (
            vectorized,
            PLANS[1],
            "is vectorized: call it outside of tf.vectorized_map",
        ),
    ],
)
def test_where_no_kernel_can_be_automatic_goes_without(around, plan, message):
    """Around a layer; `Kernel.SPLASH` is refused there."""

    def traced(layer):
        def step(theta, x):
            return around(lambda x: layer.fprop(Context(plan=plan), theta, x))(x)

        weights = layer.weights().map(lambda s: tf.TensorSpec(s.shape))
        with tracing_for("v5e"):
            specs = [weights, tf.TensorSpec([B, 2048, M])]
            return Module(lower(step, specs, name="step"), plan.mesh)

    layer = layer_of(Kernel.AUTO, block_size=Blocks.AUTO)
    assert calls(traced(layer)) == 0
    with pytest.raises(ValueError, match=message):
        traced(dataclasses.replace(layer, kernel=Kernel.SPLASH))


def test_what_is_not_traced_for_devices_has_no_kernel():
    layer = layer_of()
    theta = initialize(layer.weights(), key_from_seed(0))
    plain = dataclasses.replace(layer, kernel=Kernel.NONE)
    got, want = (
        each.fprop(Context(), theta, tf.constant(X)) for each in (layer, plain)
    )
    np.testing.assert_array_equal(got, want)


def test_a_function_with_variables_is_traced_for_the_devices():
    layer = layer_of()
    theta = initialize(layer.weights(), key_from_seed(0)).map(tf.Variable)

    def call(x):
        return layer.fprop(Context(plan=PLANS[8]), theta.map(tf.identity), x)

    call = mw.function(call, mesh=PLANS[8].mesh)
    with pytest.raises(ValueError, match="has 200 queries"):
        call(X[:, :200])


@pytest.mark.parametrize("partitioner", mw.Partitioner)
@pytest.mark.parametrize(
    "mask,kind,window",
    [
        (MaskKind.FULL, "NO_MASK", 0),
        (MaskKind.CAUSAL, "CAUSAL", 0),
        (NearMask(left=9, right=0), "CAUSAL", 10),
    ],
)
def test_cudnn_is_called_as_jax_lowers_it(mask, kind, window, partitioner, monkeypatch):
    """JAX looks for cuDNN before, which is not here; no GPU compiles or runs it."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    layer = layer_of(Kernel.CUDNN, head_dim=8, mask=mask, num_kv_heads=2)
    plan = PLANS[8]
    module = lowered(layer, "cuda", plan, length=100, dtype=tf.bfloat16, padded=False)
    calls = []
    with module.opened():
        tidy(module.operation)
        gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100")
        assert fill_kernels(module.operation, gpu) == "cuda"
        write_for(module.blame, module.operation, plan.mesh, partitioner)
        module.operation.verify()
        for op in walk(module.operation):
            if (target := call_target(op) or "").startswith("__cudnn$"):
                text = ir.StringAttr(op.attributes["backend_config"]).value
                config = json.loads(text)["cudnn_fmha_backend_config"]
                assert config["fmha_scale"] == 1
                # A device's rows and heads.
                assert shape_of(op.operands[0]) == (1, 100, 2, 8)
                calls.append(
                    (target, config["mask_type"], config["sliding_window_length"])
                )
    assert calls == [
        ("__cudnn$fmhaSoftmax", kind, window),
        ("__cudnn$fmhaSoftmax", kind, window),
        ("__cudnn$fmhaSoftmaxBackward", kind, window),
    ]


SEQUENCE_PARALLEL = dataclasses.replace(
    PLANS[8],
    weights={"heads": "tensor", "hidden": "tensor"},
    activations={**PLANS[8].activations, "hidden": "tensor", "stream": "tensor"},
    unreduced_gradient_axes=("tensor",),
)
BY_HEADS = dataclasses.replace(
    PLANS[8],
    activations={"batch": "data", "sequence": "tensor"},
    sequence_attention=SequenceAttention.ALL_TO_ALL,
)


@pytest.mark.parametrize(
    "plan,partitioner",
    some_of(
        itertools.product(("sequence", "by_heads"), ("SHARDY", "GSPMD")),
        (("sequence", "SHARDY"), ("by_heads", "GSPMD")),
    ),
)
def test_stacks_too_where_the_sequence_is_split(plan, partitioner):
    def stack(**kwargs):
        body = transformer_layer(
            model_dims=M, num_heads=4, head_dim=2, hidden_dims=16, **kwargs
        )
        return Repeat(
            body=body,
            num_layers=2,
            recompute=Recompute.ALL_BUT_NAMED,
            saved_names=("context",),
        )

    assert_layer_parity(
        stack(kernel=Kernel.SPLASH),
        X,
        plan={"sequence": SEQUENCE_PARALLEL, "by_heads": BY_HEADS}[plan],
        partitioner=mw.Partitioner[partitioner],
        reference=stack(block_size=Blocks.NONE),
        **SEGMENTS,
    )


@pytest.mark.slow
@pytest.mark.parametrize("partitioner", ["SHARDY", "GSPMD"])
def test_eight_devices_train_as_one_without(partitioner):
    def experiment(mesh, kernel):
        return small_experiment(
            f"MESH_SHAPE = {mesh}",
            f"transformer_layer.kernel = %Kernel.{kernel}",
            f"Experiment.partitioner = %Partitioner.{partitioner}",
            "SEQUENCE_LENGTH = 256",
        )

    plain = experiment((1, 1), "NONE")
    start = initial_state(plain)
    got, want = train(experiment((2, 4), "SPLASH"), start), train(plain, start)
    assert len(got.losses) == 5 and got.losses[-1] < got.losses[0]
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    for path, value in want.state.items():
        scale = np.abs(value).max() or 1.0
        np.testing.assert_allclose(
            got.state[path] / scale, value / scale, atol=1e-3, err_msg=path
        )
