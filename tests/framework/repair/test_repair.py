"""Programs that XLA's partitioner alone gets wrong: one device against eight.

The smallest program for each fault is in the table of faults, and in the operator
matrix; these are what people write.
"""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.manual import manual_partition
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from tests.framework.compiler.programs import MESH, over_partitioners, specs


def array(*shape, seed=0):
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


def indices(count, below):
    return np.random.RandomState(0).randint(0, below, count).astype(np.int32)


def split(x, *dims):
    return mesh_split(x, MESH, dims)


def as_it_is(x, *dims):
    return x


def with_gradients(fn):
    """The result of `fn(lay, ...)`, and the gradients of its float arguments."""

    def compute(lay, *args):
        with tf.GradientTape() as tape:
            floats = [x for x in args if x.dtype == tf.float32]
            tape.watch(floats)
            y = fn(lay, *args)
            weights = tf.cos(tf.range(tf.size(y), dtype=tf.float32))
            loss = tf.reduce_sum(y * tf.reshape(weights, y.shape))
        return y, [tf.convert_to_tensor(g) for g in tape.gradient(loss, floats)]

    return compute


def assert_close(got, want):
    """Within 1e-5 of the largest element, or of 1: sums have another order."""
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        atol = 1e-5 * max(1, np.abs(b).max())
        np.testing.assert_allclose(a, b, atol=atol, rtol=0)


def repaired(fn, args, partitioner):
    """The faults that a program with gradients would meet; its numbers are right."""
    compute = with_gradients(fn)
    program = compile_program(
        lambda *args: compute(split, *args),
        [specs(arg) for arg in args],
        MESH,
        partitioner=partitioner,
    )
    want = compute(as_it_is, *map(tf.constant, args))
    assert_close(program.unshard(program(*args)), want)
    return {repair.fault.name for repair in program.repairs}


def max_pool(lay, x):
    x = lay(x, None, "Y", None, None)
    return lay(tf.nn.max_pool2d(x, 2, 1, "VALID"), None, "Y", None, None)


def uneven_windows(lay, x):
    """Adaptive pooling of 16 rows to 5: windows of four rows, some of which overlap."""
    x = lay(x, None, "Y", None, None)
    ends = [(16 * i // 5, -(-16 * (i + 1) // 5)) for i in range(5)]
    return tf.stack([tf.reduce_max(x[:, a:b], 1) for a, b in ends], 1)


def few_indices(lay, table, i):
    return tf.gather(lay(table, "X", None), lay(i, "Y"))


def next_to_a_product(lay, table, x, w, i):
    product = x @ lay(w, None, "Y")
    return tf.concat([tf.gather(table, i, axis=1), product], 1)


def into_a_product(lay, table, x, w, v, i):
    return next_to_a_product(lay, table, x, w, i) @ v


def norm(x):
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def hard_sigmoid(x):
    return tf.nn.relu6(x + 3) / 6


def mobile_block(lay, x, expand, depthwise, squeeze, excite, project):
    """A block of MobileNetV3, each kernel split as if its last dim were features.

    A depthwise kernel has one there. It covers the image: XLA takes the convolution for
    a product, over whose kernel GSPMD alone ends the process.
    """
    kernels = (expand, depthwise, squeeze, excite, project)
    expand, depthwise, squeeze, excite, project = (
        lay(kernel, None, None, None, "Y") for kernel in kernels
    )
    y = norm(tf.nn.conv2d(x, expand, 1, "SAME"))
    y = tf.pad(y * hard_sigmoid(y), [[0, 0], [1, 2], [1, 2], [0, 0]])
    y = norm(tf.nn.depthwise_conv2d(y, depthwise, [1, 2, 2, 1], "VALID"))
    y = y * hard_sigmoid(y)
    pooled = tf.reduce_mean(y, [1, 2], keepdims=True)
    gate = tf.nn.conv2d(
        tf.nn.relu(tf.nn.conv2d(pooled, squeeze, 1, "SAME")), excite, 1, "SAME"
    )
    return norm(tf.nn.conv2d(y * hard_sigmoid(gate), project, 1, "SAME"))


def called_twice(lay, x, y, i):
    """A function whose calls are sharded differently, the first as XLA fails at."""

    @tf.function
    def take(table, i):
        return tf.gather(table, i)

    first = take(lay(x, "X", None), lay(i, "Y"))
    return tf.concat([first, take(lay(y, None, "Y"), lay(i, None))], 0)


def all_but_the_last(lay, x):
    """Two slices of a tensor, in shards of its shards' size, resharded alike."""
    x = lay(x, None, "Y", None)
    first, two = (lay(x[:, :-cut], "X", None, None) for cut in (1, 2))
    return first[:, 1:] * two + lay(x, "X", None, None)[:, 2:]


def in_a_loop(lay, x, i):
    def body(k, x):
        x = lay(x, "X", None, None)
        rows = tf.gather(x, lay((i + k) % 16, "Y"))
        pooled = tf.nn.max_pool1d(lay(x, None, "Y", None), 3, 1, "SAME")
        return k + 1, x + 0.3 * pooled + 0.1 * tf.pad(rows, [[0, 14], [0, 0], [0, 0]])

    return tf.while_loop(lambda k, _: k < 3, body, (0, x), maximum_iterations=3)[1]


def in_a_region(body, in_dims, out_dims):
    """A body that is manual along X; along Y it is annotated."""

    def fn(lay, *args):
        if lay is as_it_is:
            return body(lay, *args)
        region = manual_partition(
            lambda *shards: body(lay, *shards),
            mesh=MESH,
            in_dims=in_dims,
            out_dims=out_dims,
            manual_axes=["X"],
        )
        return region(*args)

    return fn


REGION_GATHER = in_a_region(
    lambda lay, x, i: tf.gather(lay(x, "Y", None), lay(i, "Y")),
    [[None, "X"], [None]],
    [None, "X"],
)
REGION_POOL = in_a_region(
    lambda lay, x: tf.nn.max_pool1d(lay(x, None, "Y", None), 2, 1, "SAME"),
    [["X", None, None]],
    ["X", None, None],
)
REGION_STEPS = in_a_region(
    lambda lay, x: lay(x, "Y", None)[0:10:3], [[None, "X"]], [None, "X"]
)
REGION_INDEX = in_a_region(
    lambda lay, x, i, y: tf.tensor_scatter_nd_update(lay(x, "Y", None), i, y),
    [[None, "X"], [None, None], [None, "X"]],
    [None, "X"],
)
IMAGE, TWO = array(2, 16, 8, 3), np.array([3, 7], np.int32)
FEATURES = array(8, 30), array(8, 16, seed=1), array(16, 8, seed=2)
INDICES, POOLS = {"uneven indices"}, {"overlapping windows"}
BLOCK = [
    array(8, 2, 2, 8),
    array(1, 1, 8, 16, seed=1),
    array(5, 5, 16, 1, seed=2),
    array(1, 1, 16, 4, seed=3),
    array(1, 1, 4, 16, seed=4),
    array(1, 1, 16, 12, seed=5),
]
WHOLE_SHARDS = {"slices that cut no shard"}
PROGRAMS = {
    "max pool": (max_pool, [IMAGE], POOLS),
    "uneven windows": (uneven_windows, [IMAGE], set()),
    "2 indices in 4 shards": (few_indices, [array(16, 4), TWO], INDICES),
    "21 rows": (next_to_a_product, [*FEATURES, indices(21, 30)], INDICES),
    "20 rows": (next_to_a_product, [*FEATURES, indices(20, 30)], set()),
    "mobile block": (mobile_block, BLOCK, {"convolution summed twice"}),
    "21 columns": (
        into_a_product,
        [*FEATURES, array(29, 5, seed=3), indices(21, 30)],
        INDICES,
    ),
    "called twice": (
        called_twice,
        [array(16, 4), array(16, 4, seed=1), TWO],
        INDICES | WHOLE_SHARDS,
    ),
    "all but the last": (all_but_the_last, [array(2, 16, 3)], WHOLE_SHARDS),
    "loop": (in_a_loop, [array(16, 8, 4), TWO], INDICES | POOLS),
    "gather in a region": (REGION_GATHER, [array(16, 4), TWO], INDICES),
    "pool in a region": (REGION_POOL, [array(4, 16, 3)], POOLS),
    "steps in a region": (REGION_STEPS, [array(10, 4)], {"steps across shards"}),
    "index in a region": (
        REGION_INDEX,
        [array(16, 4), np.array([[3]], np.int32), array(1, 4)],
        {"scatter of a single index"},
    ),
}


@over_partitioners
@pytest.mark.parametrize("name", PROGRAMS)
def test_eight_devices_have_the_numbers_of_one(name, partitioner):
    fn, args, faults = PROGRAMS[name]
    assert repaired(fn, args, partitioner) == faults


@over_partitioners
def test_slices_stay_split_as_their_tensor(partitioner):
    program = compile_program(
        lambda x: all_but_the_last(split, x),
        [tf.TensorSpec([2, 16, 3])],
        MESH,
        partitioner=partitioner,
    )
    rows = Sharding.from_dims_mapping(MESH, [None, "Y", None])
    assert [repair.after for repair in program.repairs] == [(rows, rows)] * 2


CUBE = DeviceMesh(("X", "Y", "Z"), (2, 2, 2))


def on_cube(x, *dims):
    return mesh_split(x, CUBE, dims)


def of_a_sum_with_zero(x):
    """XLA drops the sum, so that the slice is one of a tensor with another reader."""
    x = on_cube(x, ("X", "Y", "Z"), None)
    rows = on_cube((x + 0)[:5], None, "Y")
    return rows, on_cube(tf.identity(x), "Y", ("X", "Z"))


def of_a_tensor_transposed_twice(x):
    x = tf.transpose(tf.transpose(on_cube(x, ("Y", "X"), "Z")))
    return on_cube(x[:5], None, "Z"), on_cube(x, None, "Z")


def of_a_roll(x):
    x = on_cube(x, ("X", "Y"), None)
    return on_cube(tf.roll(x, 1, 0), None, "X"), on_cube(tf.identity(x), None, "X")


@over_partitioners
@pytest.mark.parametrize(
    "fn", [of_a_sum_with_zero, of_a_tensor_transposed_twice, of_a_roll]
)
@pytest.mark.parametrize("shape", [(6, 3), (4, 4)])
def test_slices_beside_their_tensor(fn, shape, partitioner):
    x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    specs = [tf.TensorSpec(shape, tf.int32)]
    program = compile_program(fn, specs, CUBE, partitioner=partitioner)
    want_x = {of_a_roll: np.roll(x, 1, 0)}.get(fn, x[:5])
    for got, want in zip(program(x), (want_x, x), strict=True):
        np.testing.assert_array_equal(got, want)


@over_partitioners
def test_adaptive_pooling_of_keras(partitioner):
    keras = pytest.importorskip("keras")
    if not hasattr(keras.layers, "AdaptiveMaxPooling2D"):
        pytest.skip("this Keras has no AdaptiveMaxPooling2D")
    layer = keras.layers.AdaptiveMaxPooling2D((5, 3))
    x = array(2, 16, 8, 5)
    repaired_faults = repaired(
        lambda lay, x: layer(lay(x, None, "Y", None, None)), [x], partitioner
    )
    assert repaired_faults == {"overlapping windows"}


B, DENSE, HIDDEN, D, TABLES = 8, 5, 16, 8, 6
PAIRS = np.array([i * 7 + j for i in range(7) for j in range(i)], np.int32)


def dlrm(lay, weights, x, ids):
    """Embeddings, a bottom MLP, products of all pairs, a top MLP; one weight split."""
    hidden = tf.nn.relu(x @ weights["bottom_0"])
    hidden = tf.nn.relu(hidden @ lay(weights["bottom_1"], None, "Y"))
    embedded = [tf.gather(t, ids[:, i]) for i, t in enumerate(weights["tables"])]
    vectors = tf.stack([*embedded, hidden], 1)
    products = tf.matmul(vectors, vectors, transpose_b=True)
    pairs = tf.gather(tf.reshape(products, [B, 49]), PAIRS, axis=1)
    top = tf.nn.relu(tf.concat([pairs, hidden], 1) @ weights["top_0"])
    return top @ weights["top_1"]


def step(lay, weights, x, ids, labels):
    """The weights after a step of SGD, the gradients, the loss."""
    with tf.GradientTape() as tape:
        tape.watch(tf.nest.flatten(weights))
        logits = dlrm(lay, weights, x, ids)
        losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
        loss = tf.reduce_mean(losses)
    gradients = tape.gradient(loss, weights)
    gradients = tf.nest.map_structure(tf.convert_to_tensor, gradients)
    after = tf.nest.map_structure(lambda w, g: w - 0.1 * g, weights, gradients)
    return after, gradients, loss


@over_partitioners
@pytest.mark.parametrize("batch", [None, "X"])
def test_steps_of_a_dlrm(batch, partitioner):
    weights = {
        "tables": [array(10 + i, D, seed=i) for i in range(TABLES)],
        "bottom_0": 0.3 * array(DENSE, HIDDEN),
        "bottom_1": 0.3 * array(HIDDEN, D),
        "top_0": 0.3 * array(len(PAIRS) + D, 6),
        "top_1": 0.3 * array(6, 1),
    }
    ids = indices(B * TABLES, 10).reshape(B, TABLES)
    inputs = array(B, DENSE), ids, np.float32(array(B, 1) > 0)
    state = {name: tf.nest.map_structure(replicated, w) for name, w in weights.items()}
    state["bottom_1"] = Sharding.from_dims_mapping(MESH, [None, "Y"])
    rows = Sharding.from_dims_mapping(MESH, [batch, None])
    program = compile_program(
        lambda *args: step(split, *args),
        [specs(weights), *map(specs, inputs)],
        MESH,
        in_shardings=[state, rows, rows, rows],
        out_shardings=(state, None, None),
        donate=[0],
        partitioner=partitioner,
    )
    assert {repair.fault.name for repair in program.repairs} == {"uneven indices"}
    placed, *batch = program.shard(weights, *inputs)
    for _ in range(3):
        out = program(placed, *batch)
        want = tf.nest.map_structure(
            np.asarray, step(as_it_is, tf_of(weights), *map(tf.constant, inputs))
        )
        assert_close(program.unshard(out), want)
        placed, weights = out[0], want[0]


def replicated(array):
    return Sharding.replicated(MESH, array.ndim)


def tf_of(nest):
    return tf.nest.map_structure(tf.constant, nest)


@over_partitioners
def test_an_annotation_may_be_the_result_of_a_branch(partitioner):
    """XLA refuses a conditional whose branches end in shardings of their own."""

    def branch(lay, x, i):
        ends = [lambda: lay(2 * x, "X", None), lambda: lay(x, None, None)]
        ends.append(lambda: tf.reshape(lay(x * x, None, "Y"), x.shape))
        return lay(tf.switch_case(i, ends), "Y", "X")

    args = array(8, 4), np.int32(1)
    assert repaired(branch, args, partitioner) == set()
