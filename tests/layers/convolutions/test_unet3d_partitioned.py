"""The 3D U-Net on eight devices: the same numbers, and only halos between neighbours.

Nothing but the image is annotated (GSPMD 5.6).
"""

import collections
import dataclasses
import functools
import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import Context, Layer, Mode
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.testing import assert_layer_parity
from meshwright.layers.basic.normalization import BatchNorm, GroupNorm
from meshwright.layers.convolutions.convolution import Padding
from meshwright.layers.convolutions.unet3d import UNet3D, Upsampling

SHARDY, GSPMD = Partitioner
VOXELS = ("batch", "x", "y", "z", "channels")
WHOLE = ("batch", "whole", "whole", "whole", "channels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfSplitImage(Layer):
    """A network whose input is annotated, and nothing else but the border.

    There volumes are whole: uneven shards of one that is left to completion JAX cannot
    hand over.
    """

    network: UNet3D

    def weights(self) -> NestedMap:
        return self.network.weights()

    def fprop(self, ctx, theta, x):
        x = ctx.split(ctx.split(x, WHOLE), VOXELS, name="image")
        return ctx.split(self.network.fprop(ctx, theta, x), WHOLE)


def mesh(**axes) -> ShardingPlan:
    """A plan whose axes split the dim of their name, `data` the batch."""
    return ShardingPlan(
        mesh_axes=tuple(axes),
        mesh_shape=tuple(axes.values()),
        activations={"batch" if a == "data" else a: a for a in axes},
    )


def network(analysis, synthesis, norm=None, **kwargs) -> UNet3D:
    return UNet3D(
        in_channels=1,
        num_classes=2,
        analysis=analysis,
        synthesis=synthesis,
        norm=norm,
        **kwargs,
    )


ONE_GROUP = functools.partial(GroupNorm, num_groups=1)
two_levels = functools.partial(network, ((2, 3), (4,)), ((3,),))
three_levels = functools.partial(network, ((2,), (3,), (4,)), ((3,), (2,)))
four_levels = functools.partial(network, ((2,), (3,), (4,), (2,)), ((3,), (2,), (3,)))
NEAREST = {"upsampling": Upsampling.NEAREST}
VALID = {"padding": Padding.VALID}
X8, X4Y2, X2Y2Z2 = mesh(x=8), mesh(x=4, y=2), mesh(x=2, y=2, z=2)
D2X4, D2X2Y2 = mesh(data=2, x=4), mesh(data=2, x=2, y=2)
CASES = {
    "even": (X8, (1, 32, 4, 6), two_levels(BatchNorm)),
    "even_data": (D2X4, (2, 16, 4, 6), two_levels(ONE_GROUP)),
    "even_2d": (X4Y2, (1, 16, 8, 6), two_levels(BatchNorm)),
    "even_3d": (X2Y2Z2, (1, 8, 4, 4), two_levels()),
    "even_data_2d": (D2X2Y2, (2, 8, 8, 8), three_levels(ONE_GROUP)),
    "20_over_8": (X8, (1, 20, 4, 6), three_levels(BatchNorm)),
    "10_over_4": (D2X4, (2, 10, 6, 4), two_levels(BatchNorm)),
    "12_6_over_4_2": (X4Y2, (1, 12, 6, 5), three_levels(BatchNorm)),
    "13_7_over_4_2": (X4Y2, (1, 13, 7, 5), three_levels()),
    "2_coarse_over_4": (D2X4, (2, 8, 4, 4), three_levels(ONE_GROUP)),
    "1_coarse_over_4_2": (X4Y2, (1, 8, 8, 8), four_levels()),
    "nearest": (D2X4, (2, 16, 4, 6), two_levels(ONE_GROUP, **NEAREST)),
    "nearest_uneven": (X4Y2, (1, 11, 5, 6), two_levels(**NEAREST)),
    "valid": (X8, (1, 28, 12, 12), two_levels(BatchNorm, **VALID)),
    "valid_2d": (X4Y2, (1, 20, 14, 12), two_levels(**VALID)),
    "halo_over_shard": (X8, (1, 16, 9, 9), two_levels(window=7)),
    "window_5": (X4Y2, (1, 13, 9, 6), two_levels(window=5)),
}
QUICK = {
    ("even_2d", SHARDY),
    ("even_3d", SHARDY),
    ("10_over_4", SHARDY),
    ("13_7_over_4_2", SHARDY),
    ("1_coarse_over_4_2", SHARDY),
    ("halo_over_shard", SHARDY),
    ("nearest", GSPMD),
    ("nearest_uneven", GSPMD),
}


@pytest.mark.parametrize(
    ("name", "partitioner"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
        for case in ((name, p) for name in CASES for p in Partitioner)
    ],
)
def test_computes_on_eight_devices_what_it_does_on_one(name, partitioner):
    """Small volumes, of no near ties: TF's gradient of max_pool3d, which is that of one
    device here, goes whole to each value within 1e-5 of its window's maximum; XLA's,
    on one device or eight, to the maximum.
    """
    plan, size, layer = CASES[name]
    x = np.random.default_rng(0).standard_normal([*size, 1]).astype(np.float32)
    of_split = OfSplitImage(network=layer)
    assert_layer_parity(of_split, x, plan=plan, partitioner=partitioner)


def compiled_gradients(layer, plan, size, partitioner):
    """Of all weights and the image; nothing but the image is annotated."""

    def gradients(theta, x):
        ctx = Context(plan=plan, mode=Mode.TRAIN)
        with tf.GradientTape() as tape:
            tape.watch((theta, x))
            image = ctx.split(x, VOXELS, name="image")
            loss = tf.reduce_sum(layer.fprop(ctx, theta, image) ** 3)
        return tape.gradient(loss, (theta, x))

    specs = layer.weights()
    return compile_program(
        gradients,
        [specs.map(lambda s: tf.TensorSpec(s.shape)), tf.TensorSpec([*size, 1])],
        plan.mesh,
        in_shardings=[specs.map(lambda s: s.sharding(plan)), None],
        partitioner=partitioner,
    )


# Of the network below: level, channels in and out. The last two are of one layer: what
# came up, and what was on its way down; one gradient, and its halo, goes back to both.
SHARED = ("synthesis_0/convolution_0/convolution", "Conv3DBackpropInputV2")
CONVOLUTIONS = {
    "analysis_0/convolution_0/convolution": (0, 1, 3),
    "analysis_1/convolution_0/convolution": (1, 3, 4),
    "analysis_1/convolution_1/convolution": (1, 4, 6),
    "synthesis_0/convolution_0/convolution": (0, 6, 5),
    "synthesis_0/convolution_0/convolution_1": (0, 3, 5),
}
halo_network = functools.partial(network, ((3,), (4, 6)), ((5,),))


def halos(window, plan, size) -> dict:
    """What each convolution gets from each side: shapes on one device, in elements.

    Split dims come one after the other, a later one's halo with what an earlier one's
    neighbours sent: so corners take two steps, and no exchange of their own.
    """
    shards = dict(zip(plan.mesh_axes, plan.mesh_shape, strict=True))
    batch, halo, expected = size[0] // shards.get("data", 1), window // 2, {}
    for name, (level, ins, outs) in CONVOLUTIONS.items():
        dims = zip("xyz", size[1:], strict=True)
        part = [(n >> level) // shards.get(axis, 1) for axis, n in dims]
        for pass_, channels in [
            ("", ins),
            ("Conv3DBackpropFilterV2", ins),
            ("Conv3DBackpropInputV2", outs),
        ]:
            if (name, pass_) == SHARED:
                continue
            wide = list(part)
            for dim, axis in enumerate("xyz"):
                if axis in shards:
                    strip = (*wide[:dim], halo, *wide[dim + 1 :])
                    shape = (batch, *strip, channels)
                    expected |= {(name, pass_, axis, way): shape for way in (-1, 1)}
                    wide[dim] += 2 * halo
    return expected


_CONVOLUTION = re.compile(r"(\w+_\d/convolution_\d/convolution\w*)/?(\w*)$")


def permutes_of(program) -> dict:
    """Like `halos`, of the program."""
    sent = {}
    for collective in program.collectives():
        if collective.kind == "collective-permute":
            (axis,), (shape,) = collective.axes, collective.shapes
            places = program.mesh.place_along(axis).flatten()
            (way,) = {int(places[b] - places[a]) for a, b in collective.groups}
            name = _CONVOLUTION.search(collective.op_name)
            key = (name[1], name[2], axis, way)
            assert key not in sent and collective.dtypes == ("f32",)
            sent[key] = shape
    return sent


@pytest.mark.parametrize(
    ("plan", "size", "partitioner", "kind"),
    [
        (X8, (1, 32, 8, 10), GSPMD, {}),
        (D2X4, (2, 16, 8, 6), SHARDY, {"norm": BatchNorm}),
        (D2X4, (4, 16, 12, 14), GSPMD, {"window": 5}),
        (X4Y2, (1, 16, 12, 6), SHARDY, {}),
        (X4Y2, (1, 16, 12, 6), GSPMD, {}),
        (X2Y2Z2, (1, 8, 12, 16), SHARDY, {}),
    ],
    ids=["x", "norm", "window", "xy", "xy_gspmd", "xyz"],
)
def test_only_halos_go_between_neighbours(plan, size, partitioner, kind):
    layer = halo_network(**kind)
    program = compiled_gradients(layer, plan, size, partitioner)
    assert permutes_of(program) == halos(layer.window, plan, size)
    sums = [c for c in program.collectives() if c.kind != "collective-permute"]
    assert {c.kind for c in sums} == {"all-reduce"}
    weights = sum(4 * spec.size for spec in layer.weights().leaves())
    along = collections.Counter()
    for reduced in sums:
        along.update(dict.fromkeys(reduced.axes, reduced.bytes))
        assert reduced.bytes <= weights
    if layer.norm is None:  # Else statistics too.
        assert along == dict.fromkeys(plan.mesh_axes, weights)
