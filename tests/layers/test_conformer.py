"""The Conformer layer against Lingvo; padding, causality; on eight devices; bad input.

Dims: B batch, S sequence, M model, N heads, D head size.
"""

import dataclasses
import functools
import pathlib

import gin
import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import Context, Mode, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.testing import assert_layer_parity
from meshwright.layers.basic.normalization import BatchNorm, GroupNorm, LayerNorm
from meshwright.layers.conformer import ConvolutionModule, conformer_layer
from meshwright.layers.convolutions.convolution import DepthwiseConv1D
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.pipelines.stages import StageMode
from meshwright.layers.stacks.repeat import Repeat
from meshwright.trainers.experiment.config import PARAMS
from tests.layers.stacks.staged import Staged

DATA = pathlib.Path(__file__).parents[1] / "data"
B, S, M = 2, 12, 8
SIZES = {"model_dims": M, "hidden_dims": 32, "num_heads": 2, "head_dim": 4}
MASK = np.arange(S) < np.array([[S], [7]])
FINALIZED = ShardingPlan(
    mesh_shape=(2, 4),
    weights={"model": "X", "heads": "Y", "hidden": "Y"},
    activations={"batch": "X", "model": "Y", "heads": "Y", "hidden": "Y"},
)


def inputs(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal([B, S, M]).astype(np.float32)


def build(**kwargs):
    layer = conformer_layer(**SIZES, **{"window": 5, **kwargs})
    return layer, initialize(layer.weights(), key_from_seed(0))


def run(layer, theta, x, mask=MASK, ctx=None) -> np.ndarray:
    mask = None if mask is None else tf.constant(mask)
    return layer.fprop(ctx or Context(), theta, tf.constant(x), mask=mask).numpy()


class Golden:
    """Lingvo's numbers; its weights in our terms."""

    def __init__(self, file: str):
        self.arrays = dict(np.load(DATA / file))
        self.x, self.y = self.arrays["in/x"], self.arrays["out/y"]
        self.mask = self.arrays["in/paddings"] == 0

    def var(self, name: str) -> np.ndarray:
        return self.arrays[f"var/{name}/var"]

    def norm(self, name: str) -> NestedMap:
        # Lingvo keeps the scale less one.
        return NestedMap(
            scale=1 + self.var(f"{name}/scale"), bias=self.var(f"{name}/bias")
        )

    def feed_forward(self, name: str) -> NestedMap:
        return NestedMap(
            w_in=self.var(f"{name}/fflayer_0/w"),
            b_in=self.var(f"{name}/fflayer_0/b"),
            w_out=self.var(f"{name}/fflayer_1/w"),
            b_out=self.var(f"{name}/fflayer_1/b"),
        )

    def attention(self, name: str) -> NestedMap:
        var = {key: self.var(f"{name}/{key}") for key in ("u", "v", "pos_proj/w")}
        for key in ("query", "key", "value", "post"):
            var[f"{key}/w"] = self.var(f"{name}/{key}/w")
            var[f"{key}/b"] = self.var(f"{name}/{key}/b")
        # Its queries are scaled by feature, by 1 at the start, and divided by sqrt(D)
        # before u and v are added: in the weights, it comes to the same.
        per_dim = self.var(f"{name}/per_dim_scale/per_dim_scale")
        scale = np.logaddexp(0, per_dim) / np.log(2)
        root = np.sqrt(per_dim.size)
        return NestedMap(
            w_q=var["query/w"] * scale,
            b_q=var["query/b"] * scale,
            w_k=var["key/w"],
            b_k=var["key/b"],
            w_v=var["value/w"],
            b_v=var["value/b"],
            w_r=var["pos_proj/w"],
            u=var["u"] * root,
            v=var["v"] * root,
            w_o=var["post/w"].transpose(1, 2, 0),
            b_o=var["post/b"],
        )

    def convolution(self, name: str, norm: NestedMap) -> NestedMap:
        w_gate, w_in = np.split(self.var(f"{name}/linear_start/w"), 2, axis=-1)
        b_gate, b_in = np.split(self.var(f"{name}/linear_start/b"), 2, axis=-1)
        kernel = self.var(f"{name}/depthwise_conv/w")[:, 0, :, 0]
        return NestedMap(
            w_in=w_in,
            b_in=b_in,
            w_gate=w_gate,
            b_gate=b_gate,
            depthwise=NestedMap(kernel=kernel),
            norm=norm,
            w_out=self.var(f"{name}/linear_end/w"),
            b_out=self.var(f"{name}/linear_end/b"),
        )

    def assert_agrees(self, y: np.ndarray) -> None:
        np.testing.assert_allclose(
            y[self.mask], self.y[self.mask], rtol=1e-5, atol=1e-5
        )


def test_the_layer_reproduces_lingvo():
    golden = Golden("conformer_global_rel_ln.npz")
    name = "conformer"
    theta = NestedMap(
        first_feed_forward_norm=golden.norm(f"{name}/fflayer_start/fflayer_ln"),
        first_feed_forward=golden.feed_forward(f"{name}/fflayer_start/fflayer"),
        attention_norm=golden.norm(f"{name}/trans_atten/atten_ln"),
        attention=golden.attention(f"{name}/trans_atten/multihead_atten"),
        convolution_norm=golden.norm(f"{name}/lconv/ln"),
        convolution=golden.convolution(
            f"{name}/lconv", golden.norm(f"{name}/lconv/norm_layer")
        ),
        second_feed_forward_norm=golden.norm(f"{name}/fflayer_end/fflayer_ln"),
        second_feed_forward=golden.feed_forward(f"{name}/fflayer_end/fflayer"),
        final_norm=golden.norm(f"{name}/final_ln"),
    )
    layer = conformer_layer(**SIZES, window=3)
    # Lingvo's four frequencies go down to 1 / 10000, ours to the last before it.
    attention = dataclasses.replace(layer.attention, max_timescale=1e4 ** (4 / 3))
    layer = dataclasses.replace(layer, attention=attention)
    golden.assert_agrees(run(layer, theta.map(tf.constant), golden.x, golden.mask))


def test_the_causal_convolution_reproduces_lingvo():
    golden = Golden("lconv_causal1.npz")
    norm = NestedMap(
        scale=1 + golden.var("lconv/norm_layer/gamma"),
        bias=golden.var("lconv/norm_layer/beta"),
        mean=golden.var("lconv/norm_layer/moving_mean"),
        variance=golden.var("lconv/norm_layer/moving_variance"),
    )
    layer, _ = build(
        window=3,
        is_causal=True,
        convolution_norm=functools.partial(BatchNorm, epsilon=1e-3),
    )
    x, mask = tf.constant(golden.x), tf.constant(golden.mask)
    theta = NestedMap(
        norm=golden.norm("lconv/ln"), convolution=golden.convolution("lconv", norm)
    ).map(tf.constant)
    y = layer.norm.fprop(Context(), theta.norm, x)
    y = layer.convolution.fprop(Context(), theta.convolution, y, mask=mask)
    golden.assert_agrees((x + y).numpy())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("context", [None, 3])
def test_padded_frames_never_reach_real_ones(is_causal, context):
    layer, theta = build(
        is_causal=is_causal,
        left_context=context,
        right_context=None if is_causal else context,
    )
    x, changed = inputs(), inputs()
    changed[~MASK] = np.nan
    before, after = run(layer, theta, x), run(layer, theta, changed)
    np.testing.assert_array_equal(before[MASK], after[MASK])
    alone = run(layer, theta, x[1:, :7], mask=None)
    np.testing.assert_allclose(before[1:, :7], alone, rtol=1e-4, atol=1e-5)


def test_a_causal_layer_does_not_look_ahead():
    layer, theta = build(is_causal=True)
    x, changed = inputs(), inputs()
    changed[:, 7:] += 1
    before, after = (run(layer, theta, each, mask=None) for each in (x, changed))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.all(np.any(before[:, 7:] != after[:, 7:], axis=-1))
    layer, theta = build()
    assert np.any(run(layer, theta, x)[:, :7] != run(layer, theta, changed)[:, :7])


@pytest.mark.slow  # Each 10 s: the pipeline below splits the same layers.
@pytest.mark.parametrize("partitioner", Partitioner)
def test_a_stack_computes_on_eight_devices_what_it_does_on_one(partitioner):
    """Running statistics, whose gradients are their newest values, too."""
    layer, _ = build(window=3, left_context=2, convolution_norm=BatchNorm)
    stack = Repeat(body=layer, num_layers=2)
    assert_layer_parity(
        stack, inputs(), plan=FINALIZED, partitioner=partitioner, mask=MASK
    )


@pytest.mark.parametrize(
    ("mode", "partitioner"),
    [
        (StageMode.VECTORIZED, Partitioner.SHARDY),
        pytest.param(StageMode.MANUAL, Partitioner.GSPMD, marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_computes_what_its_layers_do_in_a_row(mode, partitioner):
    """BatchNorm is of each microbatch; of running statistics the mean is taken."""
    layer, _ = build(
        window=3, left_context=2, right_context=1, convolution_norm=BatchNorm
    )
    pipeline = Pipeline(
        stack=Repeat(body=layer, num_layers=2),
        num_stages=2,
        num_microbatches=2,
        stage_mode=mode,
    )
    plan = ShardingPlan(
        mesh_axes=("stage", "data", "model"),
        mesh_shape=(2, 2, 2),
        weights={"stages": "stage", "heads": "model", "hidden": "model"},
        activations={
            "batch": ("data", "stage"),
            "microbatch": "data",
            "heads": "model",
            "hidden": "model",
        },
    )
    x = np.concatenate([inputs(0), inputs(1)])
    mask = np.arange(S) < np.array([[S], [7], [9], [S - 1]])
    assert_layer_parity(
        Staged(pipeline=pipeline), x, plan=plan, partitioner=partitioner, mask=mask
    )


@pytest.mark.slow  # 5 s.
def test_a_split_sequence_computes_what_a_whole_one_does():
    layer, _ = build(window=3, left_context=2, right_context=1)
    activations = {"batch": "X", "sequence": "Y"}
    plan = dataclasses.replace(FINALIZED, activations=activations)
    assert_layer_parity(layer, inputs(), plan=plan, mask=MASK)


def test_every_name_can_be_saved_and_recomputation_changes_nothing():
    layer, _ = build()
    names = ["query", "key", "value", "context", "attention_out"]
    names += ["hidden", "feed_forward_out"]
    names += [f"convolution_{name}" for name in ("hidden", "gate", "out")]
    policies = [
        {"recompute": Recompute.NOTHING},
        {"recompute": Recompute.ALL_BUT_NAMED, "saved_names": tuple(names)},
    ]
    theta = initialize(Repeat(body=layer, num_layers=1).weights(), key_from_seed(0))
    x = tf.constant(inputs())

    def gradients(policy):
        stack = Repeat(body=layer, num_layers=1, **policy)
        with tf.GradientTape() as tape:
            tape.watch((theta, x))
            y = stack.fprop(Context(mode=Mode.TRAIN), theta, x)
            loss = tf.reduce_sum(y**3)
        return tf.nest.flatten(tape.gradient(loss, (theta, x)))

    for a, b in zip(*map(gradients, policies), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_flops_beyond_weights_are_those_of_attention():
    layer, _ = build()
    # Keys, values: S each; distances: 2 S; two FLOPs for each of the 8 features.
    assert layer.extra_flops(100) == 2 * 8 * (100 + 100 + 200)
    local, _ = build(left_context=4, right_context=5)
    # Blocks of 10 see 19, at 29 distances.
    assert local.extra_flops(100) == local.extra_flops(1000) == 2 * 8 * (19 + 19 + 29)


def test_gin_builds_what_the_sizes_say():
    gin.parse_config((PARAMS / "layers" / "conformer.gin").read_text())
    gin.parse_config(
        """
        MODEL_DIMS = 8
        HIDDEN_DIMS = 16
        NUM_HEADS = 2
        HEAD_DIM = 4
        NUM_BINS = 12
        SUBSAMPLING_CHANNELS = 3
        conformer_layer.window = 3
        conformer_layer.is_causal = True
        conformer_layer.convolution_norm = @BatchNorm
        BatchNorm.decay = 0.5
        """
    )
    try:
        layer = gin.get_configurable("conformer_layer")()
        front = gin.get_configurable("ConvSubsampling")()
    finally:
        gin.clear_config()
    assert front.weights().w_out.shape == (3, 3, 8)
    assert layer.attention.right_context == 0
    assert layer.convolution.depthwise.is_causal
    assert layer.convolution.norm == BatchNorm(model_dims=8, decay=0.5)
    shapes = {
        path: spec.shape
        for path, spec in layer.weights().items_by_path()
        if path.startswith(("convolution.", "second_feed_forward."))
    }
    assert shapes == {
        "convolution.b_gate": (8,),
        "convolution.b_in": (8,),
        "convolution.b_out": (8,),
        "convolution.depthwise.kernel": (3, 8),
        "convolution.norm.bias": (8,),
        "convolution.norm.mean": (8,),
        "convolution.norm.scale": (8,),
        "convolution.norm.variance": (8,),
        "convolution.w_gate": (8, 8),
        "convolution.w_in": (8, 8),
        "convolution.w_out": (8, 8),
        "second_feed_forward.b_in": (16,),
        "second_feed_forward.b_out": (8,),
        "second_feed_forward.w_in": (8, 16),
        "second_feed_forward.w_out": (16, 8),
    }


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_the_stream_is_in_the_activation_dtype(dtype):
    layer, theta = build()
    y = layer.fprop(Context(activation_dtype=dtype), theta, tf.constant(inputs()))
    assert y.dtype == dtype
    exact = layer.fprop(Context(), theta, tf.constant(inputs()))
    np.testing.assert_allclose(tf.cast(y, tf.float32), exact, atol=0.1)


@pytest.mark.parametrize(
    "mask", [np.zeros([B, S], np.float32), MASK[:, 1:], MASK[..., None]]
)
def test_a_mask_that_does_not_fit_is_refused(mask):
    layer, theta = build()
    with pytest.raises(ValueError, match=r"mask must be bool \(2, 12\), True at real"):
        run(layer, theta, inputs(), mask)


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="right_context is 4, but a causal layer"):
        build(is_causal=True, right_context=4)
    norm = functools.partial(GroupNorm, num_groups=2)
    with pytest.raises(ValueError, match="convolution_norm is GroupNorm"):
        build(is_causal=True, convolution_norm=norm)
    with pytest.raises(ValueError, match="model_dims is 8 but its depthwise .* has 4"):
        ConvolutionModule(
            model_dims=8,
            depthwise=DepthwiseConv1D(model_dims=4, window=3),
            norm=LayerNorm(model_dims=8),
        )
