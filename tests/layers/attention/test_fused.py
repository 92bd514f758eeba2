"""Attention by a fused kernel against attention in blocks and of all pairs at once.

The kernel is the one for TPUs, as a CPU interprets it.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from meshwright import framework as mw
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.testing import assert_layer_parity
from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.attention.blocks import Blocks
from meshwright.layers.attention.fused import Kernel
from meshwright.layers.attention.mask_rules import MaskKind, NearMask
from meshwright.layers.attention.positions import PositionKind
from tests.layers.attention.on_devices import some_of

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
    return MultiHeadAttention(**sizes | kwargs, kernel=kernel)


# Each case on one device and, by one of them, on eight.
SOME = (
    ("causal", 1, "SHARDY"),
    ("causal", 8, "GSPMD"),
    ("full_padded", 8, "SHARDY"),
    ("window", 8, "GSPMD"),
    ("both_sides_packed_capped", 8, "SHARDY"),
    ("packed_grouped", 8, "GSPMD"),
    ("memory", 8, "SHARDY"),
)


@pytest.mark.parametrize(
    "name,devices,partitioner",
    some_of(itertools.product(CASES, PLANS, ("SHARDY", "GSPMD")), SOME),
)
@pytest.mark.parametrize("reference", [128, Blocks.NONE], ids=["blocks", "at_once"])
def test_it_computes_what_one_device_does_without(
    name, devices, partitioner, reference
):
    kwargs, inputs = CASES[name]
    assert_layer_parity(
        layer_of(**kwargs),
        X,
        plan=PLANS[devices],
        partitioner=mw.Partitioner[partitioner],
        reference=layer_of(Kernel.NONE, **{**kwargs, "block_size": reference}),
        **inputs,
    )
