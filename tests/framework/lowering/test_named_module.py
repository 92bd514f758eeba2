"""A program with names in place of axes, completed for plans."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.compiler.passes import simplify
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.stablehlo.shardy.device_work import Sent, work_of
from meshwright.framework.compiler.stablehlo.shardy.named_module import (
    ClashError,
    NamedModule,
)
from meshwright.framework.compiler.stablehlo.shardy.named_products import (
    Side,
    named_products,
)
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

NAMES = DeviceMesh(("rows", "model", "hidden", "wide"), (2, 2, 2, 2))
MESH = DeviceMesh(("X", "Y"), (4, 2))
B, M, H, TRIPS = 4096, 128, 256, 5


def named(fn, *args, yields=None):
    """The program of `fn` on arguments of (shape, names)."""
    specs = [tf.TensorSpec(shape) for shape, _ in args]
    module = Module(lower(fn, specs, name="f"), NAMES)
    with module.opened():
        simplify(module)
    dims = [Sharding.from_dims_mapping(NAMES, names) for _, names in args]
    return NamedModule(module, dims, [None], yields=yields)


def work(program, **axes):
    with program.opened():
        return work_of(program.complete(MESH, axes), MESH)


@pytest.fixture(scope="module")
def product():
    def fn(x, w):
        return mesh_split(x @ w, NAMES, ["rows", "hidden"])

    return named(fn, ((B, M), ["rows", "model"]), ((M, H), ["wide", "hidden"]))


def test_an_inner_dim_that_is_split_is_reduced(product):
    found = work(product, model=("X",), wide=("X",))
    assert found.sent == [Sent("all-reduce", ("X",), 4 * B * H, 1)]
    assert found.flops == 2 * B * M * H / 4


def test_what_is_kept_of_a_sum_is_a_reduce_scatter(product):
    found = work(product, model=("X",), wide=("X",), rows=("Y",), hidden=())
    assert found.sent == [Sent("all-reduce", ("X",), 4 * B * H / 2, 1)]
    scattered = work(product, model=("X",), wide=("X",), hidden=("Y",))
    assert scattered.flops == 2 * B * M * H / 8


def test_a_weight_that_is_split_otherwise_is_gathered(product):
    found = work(product, rows=("X",), wide=("X",))
    assert found.sent == [Sent("all-gather", ("X",), 4 * M * H, 1)]
    assert found.flops == 2 * B * M * H / 4


def test_nothing_is_sent_where_nothing_is_split(product):
    found = work(product)
    assert found.sent == [] and found.flops == 2 * B * M * H
    assert found.memory == pytest.approx(4 * (B * M + M * H + B * H))


def test_an_axis_cannot_split_two_dims(product):
    with pytest.raises(ClashError):
        work(product, wide=("X",), hidden=("X",))


def test_the_names_of_a_product_are_told(product):
    with product.opened():
        (found,) = named_products(product.named())
    assert [(d.side, d.size, d.left, d.right, d.out) for d in found.dims] == [
        (Side.ROWS, B, ("rows",), (), ("rows",)),
        (Side.COLUMNS, H, (), ("hidden",), ("hidden",)),
        (Side.INNER, M, ("model",), ("wide",), ()),
    ]
    assert found.itemsizes == (4, 4, 4) and found.count == 1


def test_its_tensors_have_names_and_sizes(product):
    found = {tensor.dims: tensor.shape for tensor in product.tensors}
    assert found == {
        (("rows",), ("model",)): (B, M),
        (("wide",), ("hidden",)): (M, H),
        (("rows",), ("hidden",)): (B, H),
    }


def test_a_loop_counts_by_its_trips():
    def fn(x, w):
        def body(i, y):
            return i + 1, mesh_split(y @ w, NAMES, ["rows", None])

        return tf.while_loop(lambda i, y: i < TRIPS, body, (tf.constant(0), x))[1]

    program = named(fn, ((B, M), ["rows", None]), ((M, M), ["wide", None]))
    found = work(program, rows=("X",), wide=("Y",))
    assert found.flops == TRIPS * 2 * B * M * M / 8
    assert found.sent and {sent.count for sent in found.sent} == {TRIPS}
    assert {sent.axes for sent in found.sent} == {("Y",)}


def test_a_name_may_yield_to_another():
    def fn(x):
        return mesh_split(x + 1, NAMES, ["wide", "rows"])

    program = named(fn, ((B, M), ["wide", "rows"]), yields={"rows": "wide"})
    found = work(program, wide=("X",), rows=("X", "Y"))
    assert found.memory == pytest.approx(4 * B * M / 8)


def test_sums_of_sums_are_reduced_once():
    def fn(x, w, v):
        return x @ w + x @ v

    program = named(
        fn,
        ((B, M), [None, "model"]),
        ((M, H), ["model", None]),
        ((M, H), ["model", None]),
    )
    found = work(program, model=("X",))
    assert sum(sent.count for sent in found.sent) == 1


def test_a_lookup_loads_a_table_that_fits_and_its_rows():
    """16 columns are padded to 128; a table of 32 MiB is not loaded."""
    rows = 2 * 4 * B * M
    for shape, table in (((600, 16), 4 * 600 * 128), ((2**16, M), 0)):
        fn = lambda w: tf.gather(w, tf.zeros([B], tf.int32))  # noqa: E731
        lookup = work(named(fn, (shape, [None, None])))
        assert lookup.moved == rows + table


def test_large_meshes_are_written_in_short():
    names = tuple(f"n{i}" for i in range(40))
    mesh = DeviceMesh(names, (2,) * 40)
    split = Sharding(mesh, (("n3",), (), ("n30", "n1")))
    proto = split.to_op_sharding()
    assert not proto.tile_assignment_devices
    assert Sharding.from_op_sharding(mesh, proto, 3) == split
    order = tuple(np.roll(np.arange(2**13), 1))
    ordered = Sharding(DeviceMesh(names[:13], (2,) * 13, order), (("n3",),))
    assert len(ordered.to_op_sharding().tile_assignment_devices) == 2**13


def test_a_convolution_by_groups_counts_each_group_once():
    """The gradient of a kernel of one channel each has the batch in groups."""

    def fn(x, k):
        with tf.GradientTape() as tape:
            tape.watch(k)
            y = tf.nn.depthwise_conv2d(x, k, (1, 1, 1, 1), "SAME")
            loss = tf.reduce_sum(y * y)
        return tape.gradient(loss, k)

    batch, size, channels, taps = 4, 8, 16, 3
    image = (batch, size, size, channels)
    kernel = (taps, taps, channels, 1)
    program = named(fn, (image, ["rows", None, None, None]), (kernel, [None] * 4))
    macs = taps * taps * batch * size * size * channels
    assert work(program).flops == 2 * 2 * macs  # Forward, and the gradient.
    assert work(program, rows=("X",)).flops == 2 * 2 * macs / 4
