"""Convolutions on meshes with axes to spare: one device against several."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.repair import check, inspection
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.devices.topology import topology_devices
from meshwright.framework.modeling.initializers import Constant
from meshwright.framework.modeling.layer import Context, Layer, Mode, WeightSpec
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.layers.stacks.repeat import Repeat
from tests import needs

MESHES = [(2, 4), (4, 2), (1, 8), (8, 1)]
ONE = mw.DeviceMesh(("one",), (1,))
CHANNELS = 2
MESH_OF_V3 = mw.DeviceMesh(("data", "spatial"), (2, 4))


def mesh_of(*shape, names=("data", "spatial", "model")):
    return mw.DeviceMesh(names[: len(shape)], shape)


@pytest.fixture
def inspected(monkeypatch):
    """The name of each inspection of a program."""
    taken = []

    def noted(name, inspect):
        return lambda *args: taken.append(name) or inspect(*args)

    for name in "by_shardy", "by_gspmd":
        monkeypatch.setattr(inspection, name, noted(name, getattr(inspection, name)))
    return taken


def with_gradients(fn, mesh=None, annotated=None, result=None):
    """The result of `fn`, and the gradients of its arguments.

    Args:
      fn: a function of tensors.
      mesh: to annotate over; None for a program on one device.
      annotated: a dims_mapping for each argument, or None.
      result: the same for the result.
    """

    def split(x, dims_mapping):
        if mesh is None or dims_mapping is None:
            return x
        return mw.mesh_split(x, mesh, dims_mapping)

    def convolve(*args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            laid = map(split, args, annotated or [None] * len(args))
            out = split(fn(*laid), result)
            count = out.shape.num_elements()
            weights = np.cos(np.arange(count, dtype=np.float32))
            loss = tf.reduce_sum(out * weights.reshape(out.shape))
        return out, tape.gradient(loss, args)

    return convolve


def compiled(fn, shapes, mesh, annotated, result, partitioner=Partitioner.SHARDY):
    specs = [tf.TensorSpec(shape) for shape in shapes]
    annotated_fn = with_gradients(fn, mesh, annotated, result)
    return compile_program(annotated_fn, specs, mesh, partitioner=partitioner)


def assert_parity(fn, shapes, mesh, annotated, result, partitioner, alone=None):
    """`alone` is what one device runs, `fn` if not given."""
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    specs = [tf.TensorSpec(shape) for shape in shapes]
    single = compile_program(with_gradients(alone or fn), specs, ONE)
    want = single.unshard(single(*args))
    program = compiled(fn, shapes, mesh, annotated, result, partitioner)
    got = program.unshard(program(*args))
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        # Sums of up to some hundred products, in another order.
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(b).max()))


def window_op(kind: str, rank: int, stride: int):
    """A function, the shapes of image and kernel; the image can be split by 8."""
    image = (8, 16, *(4,) * (rank - 1), CHANNELS)
    window = (3,) * rank
    steps = [1, *[stride] * rank, 1]
    if kind == "pool":
        apart = (stride,) * rank
        return lambda x: tf.nn.pool(x, apart, "MAX", apart, "SAME"), [image]
    if kind == "transposed":
        transpose = getattr(tf.nn, f"conv{rank}d_transpose")
        out = [8, *(n * stride for n in image[1:-1]), 3]
        return (
            lambda x, y: transpose(x, y, out, stride, "SAME"),
            [image, (*window, 3, CHANNELS)],
        )
    convolve = getattr(tf.nn, f"conv{rank}d")
    return (
        lambda x, y: convolve(x, y, steps, "SAME"),
        [image, (*window, CHANNELS, 3)],
    )


@pytest.mark.parametrize("partitioner", Partitioner, ids=lambda p: p.value)
@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("kind", ["plain", "transposed", "pool"])
def test_images_split_by_batch_and_rows(kind, rank, stride, shape, partitioner):
    fn, shapes = window_op(kind, rank, stride)
    rows = ["data", "spatial", *[None] * rank]
    annotated = [rows, *[None] * (len(shapes) - 1)]
    assert_parity(fn, shapes, mesh_of(*shape), annotated, rows, partitioner)


def conv1d(x, y):
    return tf.nn.conv1d(x, y, 1, "SAME")


def depthwise(x, y):
    return tf.nn.depthwise_conv2d(x, y, [1, 1, 1, 1], "SAME")


def conv2d(x, y):
    return tf.nn.conv2d(x, y, [1, 2, 2, 1], "SAME")


# Each is wrong under XLA alone: fn, shapes of x and y, how x, y and the result lie.
SPARE = {
    "rows": (conv1d, (2, 8, 2), (3, 2, 4), [None, "spatial", None], None, "x"),
    "kernel": (
        conv1d,
        (2, 8, 2),
        (3, 2, 4),
        [None, "spatial", None],
        [None, "model", None],
        "x",
    ),
    "features": (
        conv1d,
        (2, 8, 2),
        (3, 2, 4),
        ["data", "spatial", None],
        [None, None, "model"],
        ["data", "spatial", "model"],
    ),
    "two dims": (
        conv2d,
        (2, 8, 4, 2),
        (3, 3, 2, 4),
        [None, "spatial", "model", None],
        None,
        "x",
    ),
    "uneven": (conv1d, (2, 9, 2), (3, 2, 4), [None, "spatial", None], None, "x"),
    "two dims, uneven": (
        conv2d,
        (1, 8, 9, 2),
        (3, 3, 2, 2),
        None,
        [None, None, None, "data"],
        [None, "data", ("spatial", "model"), None],
    ),
    "other dims of the result": (
        lambda x, y: tf.nn.conv3d_transpose(x, y, [8, 4, 8, 8, 2], [1, 1, 1], "SAME"),
        (8, 4, 8, 8, 2),
        (3, 3, 3, 2, 2),
        [None, "model", "data", None, "spatial"],
        None,
        [None, None, "spatial", ("data", "model"), None],
    ),
    "depthwise": (
        depthwise,
        (4, 8, 4, 4),
        (3, 3, 4, 1),
        ["data", None, None, None],
        None,
        "x",
    ),
    "depthwise, channels": (
        depthwise,
        (4, 8, 4, 4),
        (3, 3, 4, 2),
        ["data", "spatial", None, "model"],
        None,
        ["data", "spatial", None, "model"],
    ),
}


@pytest.mark.parametrize("partitioner", Partitioner, ids=lambda p: p.value)
@pytest.mark.parametrize("name", SPARE)
def test_axes_that_do_not_split_the_image(name, partitioner):
    fn, x, y, of_x, of_y, result = SPARE[name]
    result = of_x if result == "x" else result
    mesh = mesh_of(2, 2, 2)
    assert_parity(fn, [x, y], mesh, [of_x, of_y], result, partitioner)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convolved(Layer):
    """A convolution over the sequence; `window` and `dilation` of its kernel."""

    window: int
    dilation: int = 1

    def weights(self):
        shape = (self.window, CHANNELS, CHANNELS)
        dims = ("window", "in", "out")
        return NestedMap(w=WeightSpec(shape=shape, dims=dims, initializer=Constant(0)))

    def fprop(self, ctx, theta, x):
        y = tf.nn.conv1d(x, theta.w, 1, "SAME", dilations=self.dilation)
        return tf.tanh(y)


@pytest.mark.parametrize("partitioner", Partitioner, ids=lambda p: p.value)
def test_in_stacks_that_are_loops(partitioner):
    """Each stack's bodies are loops, forward and backward, of shapes of their own."""
    stacks = [Convolved(window=3), Convolved(window=5), Convolved(window=3, dilation=2)]
    stacks = [Repeat(body=body, num_layers=2) for body in stacks]
    mesh = mesh_of(2, 4)

    def stacked(x, *kernels, on=mesh):
        plan = ShardingPlan(mesh_axes=on.axis_names, mesh_shape=on.shape)
        ctx = Context(mode=Mode.TRAIN, plan=plan)
        for stack, kernel in zip(stacks, kernels, strict=True):
            x = stack.fprop(ctx, NestedMap(w=kernel), x)
        return x

    shapes = [(2, 8, CHANNELS), *(stack.weights().w.shape for stack in stacks)]
    rows = [None, "spatial", None]
    annotated = [rows, None, None, None]
    alone = functools.partial(stacked, on=ONE)
    assert_parity(stacked, shapes, mesh, annotated, rows, partitioner, alone=alone)


@pytest.mark.parametrize(
    "shape,names,rows",
    [
        ((2, 4), ("data", "spatial"), ["data", "spatial", None, None]),
        ((2, 4), ("data", "model"), ["data", None, None, None]),
        ((8,), ("data",), ["data", None, None, None]),
    ],
    ids=str,
)
@pytest.mark.parametrize("partitioner", Partitioner, ids=lambda p: p.value)
def test_what_is_right_is_left_alone(shape, names, rows, partitioner, inspected):
    """A repair would be inspected too."""
    mesh = mesh_of(*shape, names=names)
    shapes = [(8, 16, 4, 2), (3, 3, 2, 4)]
    compiled(conv2d, shapes, mesh, [rows, None], rows, partitioner)
    assert inspected == [f"by_{partitioner.value}"]


@pytest.mark.parametrize("partitioner", Partitioner, ids=lambda p: p.value)
def test_in_a_manual_region_only_its_batch_and_channels_are_split(partitioner):
    mesh = mesh_of(2, 2, 2)
    rows = [None, "spatial", None]

    def gradient(x, y, *, lay=lambda x: mw.mesh_split(x, mesh, rows)):
        with tf.GradientTape() as tape:
            tape.watch(y)
            out = lay(conv1d(lay(x), y))
            loss = tf.reduce_sum(out * out)
        return tape.gradient(loss, y)

    region = mw.manual_partition(
        gradient,
        mesh=mesh,
        manual_axes=["data"],
        in_dims=[[None, None, None], [None, None, None]],
        out_dims=[None, None, None],
    )
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(s).astype("f4") for s in ([2, 8, 2], [3, 2, 4])]
    specs = [tf.TensorSpec(a.shape) for a in args]
    program = compile_program(region, specs, mesh, partitioner=partitioner)
    want = gradient(*map(tf.constant, args), lay=lambda x: x)
    np.testing.assert_allclose(program.unshard(program(*args)), want, rtol=1e-5)
    assert {r.fault.name for r in program.repairs} == {"convolution summed twice"}
    with pytest.raises(LoweringError, match=r"test_conv\.py:\d+\) is a convolution"):
        compile_program(region, specs, mesh, partitioner=partitioner, strict=True)


@pytest.mark.parametrize("partitioner", Partitioner, ids=lambda p: p.value)
def test_a_result_larger_than_the_image(partitioner):
    def padded(x, y):
        return tf.nn.conv2d(x, y, 1, [[0, 0], [0, 0], [0, 1], [0, 0]])

    columns = [None, None, "data", None]
    shapes, mesh = [(1, 1, 6, 1), (1, 1, 1, 1)], mesh_of(6)
    assert_parity(padded, shapes, mesh, [columns, None], columns, partitioner)


@pytest.mark.parametrize("partitioner", Partitioner, ids=lambda p: p.value)
def test_a_slice_of_one_element_by_a_step(partitioner):
    def take(x):
        return x[1:2:3]

    assert_parity(take, [(2,)], mesh_of(2), [None], ["data"], partitioner)


def test_what_cannot_be_laid_out_is_refused(monkeypatch, inspected):
    """As if no layout helped."""
    rows = [None, "spatial", None]
    args = [(2, 8, 2), (3, 2, 4)], mesh_of(2, 4), [rows, None], rows
    monkeypatch.setattr(check, "_ROUNDS", 1)
    with pytest.raises(
        LoweringError,
        match=r"convolve: no layout was found in which XLA gets the program right. "
        r"The last attempt: op 'gradient_tape/conv1d/Conv2DBackpropFilter' \(.*\) is a "
        "convolution whose partial sums .* Annotate the op's operands and its result",
    ):
        compiled(conv1d, *args)
    assert len(inspected) == 1
    monkeypatch.setattr(check, "_ROUNDS", 2)  # The last inspection counts too.
    compiled(conv1d, *args)
    assert len(inspected) == 3


def unlike_any(monkeypatch, rows):
    """Compiles as if XLA had made its convolutions anew."""
    complete = inspection.completed_by_gspmd

    def without_numbers(program):
        completion = complete(program)
        completion.completed.instructions[:] = [
            dataclasses.replace(op, tag=None)
            for op in completion.completed.instructions
        ]
        return completion

    monkeypatch.setattr(inspection, "completed_by_gspmd", without_numbers)
    monkeypatch.setattr(inspection, "originals", lambda *args: ())
    args = [(2, 8, 2), (3, 2, 4)], mesh_of(2, 4), [rows, None], rows
    compiled(conv1d, *args, Partitioner.GSPMD)


def test_what_xla_made_anew_is_refused(monkeypatch):
    with pytest.raises(
        LoweringError,
        match=r"convolve: XLA made a convolution '.*' of shape \[.*\] before GSPMD "
        r"completed it, like none .*; use Partitioner\.SHARDY",
    ):
        unlike_any(monkeypatch, [None, "spatial", None])


def test_what_xla_made_anew_is_right_where_nothing_is_added_up(monkeypatch):
    unlike_any(monkeypatch, None)


# TPU's compiler has no devices here: fn, shapes of x and y, how x and the result lie,
# and the op whose gradient is laid out.
ON_TPU = {
    "batch": (conv1d, (8, 16, 2), (3, 2, 4), ["data", None, None], ""),
    "rows": (conv1d, (8, 16, 2), (3, 2, 4), ["data", "spatial", None], ""),
    "spare": (conv1d, (2, 8, 2), (3, 2, 4), [None, "spatial", None], "conv1d"),
    "kernel larger than image": (
        conv1d,
        (2, 4, 2),
        (7, 2, 4),
        [None, "spatial", None],
        "conv1d",
    ),
    "padding": (
        lambda x, y: tf.nn.conv1d(tf.pad(x, [[0, 0], [2, 2], [0, 0]]), y, 1, "VALID"),
        (2, 8, 2),
        (5, 2, 4),
        [None, "spatial", None],
        "conv1d",
    ),
    "transposed": (
        lambda x, y: tf.nn.conv1d_transpose(x, y, [2, 16, 3], 2, "SAME"),
        (2, 8, 2),
        (3, 3, 2),
        [None, "spatial", None],
        "conv1d_transpose",
    ),
    "depthwise": (
        depthwise,
        (2, 8, 4, 4),
        (3, 3, 4, 2),
        [None, "spatial", None, None],
        "depthwise",
    ),
}


@needs.libtpu
@pytest.mark.parametrize("name", ON_TPU)
def test_what_tpu_makes_of_convolutions_is_known_again(name):
    """TPU's clean-up changes ranks, names and the order of operands."""
    fn, x, y, rows, laid_out = ON_TPU[name]
    program = compile_program(
        with_gradients(fn, MESH_OF_V3, [rows, None], rows),
        [tf.TensorSpec(shape) for shape in (x, y)],
        MESH_OF_V3,
        partitioner=Partitioner.GSPMD,
        devices=topology_devices("v3:2x2"),
    )
    assert bool(program.repairs) == bool(laid_out)
    # All that is wrong is the gradient of the kernel, counted along the axis to spare.
    for repair in program.repairs:
        assert repair.op_name.startswith(f"gradient_tape/{laid_out}/")
        assert repair.op_name.endswith("BackpropFilter")


@needs.libtpu
def test_what_tpu_names_otherwise_is_known_by_its_shapes():
    """By an op of another scope, behind the reshape that takes a dim of 1 away."""
    rows = ["data", "spatial", None]

    def fn(x, y):
        image = mw.mesh_split(x, MESH_OF_V3, rows)[:, None]
        with tf.name_scope("inner"):
            out = tf.nn.conv2d(image, y[None], 1, "SAME")
        with tf.name_scope("outer"):
            return tf.squeeze(out, 1)

    specs = [tf.TensorSpec([8, 16, 2]), tf.TensorSpec([3, 2, 4])]
    program = compile_program(
        fn,
        specs,
        MESH_OF_V3,
        partitioner=Partitioner.GSPMD,
        devices=topology_devices("v3:2x2"),
    )
    assert {c.kind for c in program.collectives()} == {"collective-permute"}


def test_programs_without_guarded_operations_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(check, "_wrong", None)
    compiled(tf.add, [(2, 2), (2, 2)], mesh_of(2, 4), [None, None], None)
