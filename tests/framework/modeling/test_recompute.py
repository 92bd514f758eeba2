"""Cutting a function and its gradient: numbers, what is saved, what is recomputed."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.modeling.recompute import (
    Recompute,
    Saved,
    names_given,
    save_name,
    split_function,
)
from meshwright.framework.modeling.subgraphs import Subgraphs
from meshwright.framework.sharding.annotations import mesh_split, replicate
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

MESH = DeviceMesh(("X", "Y"), (2, 4))
S, M, H = 6, 4, 8
RNG = np.random.default_rng(0)
X, Z = (RNG.standard_normal([S, M], np.float32) for _ in "XZ")
W_IN, W_OUT = (RNG.standard_normal(s, np.float32) for s in ([M, H], [H, M]))
OUTSIDE = tf.constant([1.0, 10.0, 100.0])
MASK = (RNG.random([S, 1]) < 0.5).astype(np.float32)


def two_matmuls(x, w_in, w_out, mask):
    mask = tf.sin(mask)  # Depends on constants alone, and
    w_in = tf.tanh(w_in)  # this on weights alone.
    h = save_name(tf.nn.relu(tf.matmul(x, w_in)), "hidden")
    return [x + tf.tanh(tf.matmul(h, w_out)) * mask]


def branching(x, w_in, w_out, mask):
    h = tf.matmul(x, w_in)
    h = save_name(tf.where(h > 0, h, 0.1 * h), "hidden")
    return [x + tf.matmul(h, w_out) * mask]


@tf.custom_gradient
def twice(a, b):
    def gradient(da, db):
        return 2 * da * b + db * tf.cos(a), 3 * da * a

    return (a * b, tf.sin(a)), gradient


def many_outputs(x, w_in, w_out, mask):
    h = tf.matmul(x, w_in)
    a, b = tf.unstack(tf.reshape(h, [S, 2, -1]), axis=1)
    a, b = twice(a, b)
    c, d = tf.split(tf.concat([a, tf.tanh(b)], 1), 2, axis=1)
    values, _ = tf.nn.top_k(c, 2)
    h = tf.concat([save_name(c, "hidden"), d * values[:, :1]], 1)
    return [x + tf.matmul(h, w_out) * mask]


def looping(x, w_in, w_out, mask):
    h = save_name(tf.nn.relu(tf.matmul(x, w_in)), "hidden")
    h = tf.while_loop(
        lambda i, h: i < 3,
        lambda i, h: (i + 1, tf.sin(h)),
        (0, h),
        maximum_iterations=3,
    )[1]
    return [x + tf.matmul(h, w_out) * mask]


def two_inputs(x, z, w_in, w_out, mask):
    h = save_name(tf.nn.relu(tf.matmul(z, w_in)), "hidden")
    return [x + tf.matmul(h, w_out) * mask, tf.tanh(z * x)]


def names_an_input(x, w_in, w_out, mask):
    h = tf.nn.relu(tf.matmul(save_name(x, "hidden"), w_in))
    return [x + tf.matmul(save_name(save_name(h, "hidden"), "hidden"), w_out) * mask]


BODIES = [
    two_matmuls,
    branching,
    many_outputs,
    looping,
    two_inputs,
    names_an_input,
]


def specs(values):
    return [tf.TensorSpec(v.shape, v.dtype) for v in values]


def arguments(body):
    inputs = [X, Z] if body is two_inputs else [X]
    return inputs, [W_IN, W_OUT], [MASK]


def cut(body, recompute, names=("hidden",)):
    inputs, weights, constants = map(specs, arguments(body))
    names = names if recompute is Recompute.ALL_BUT_NAMED else ()
    return split_function(
        body, inputs, weights, constants, recompute=recompute, names=names
    )


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("body", BODIES)
def test_the_parts_compute_the_function_and_its_gradient(body, recompute):
    inputs, weights, constants = arguments(body)
    constants = list(map(tf.constant, constants))
    split = cut(body, recompute)
    with tf.GradientTape() as tape:
        sources = [tf.constant(v) for v in (*inputs, *weights)]
        tape.watch(sources)
        want = body(*sources, *constants)
        cotangents = [tf.sin(y) + 1 for y in want]
    gradients = tape.gradient(want, sources, cotangents)

    outputs = split.forward(*sources, *constants)
    saved = outputs[len(want) :]
    assert len(saved) == len(split.saved)
    for tensor, described in zip(outputs, (*split.outputs, *split.saved), strict=True):
        assert described.spec.is_compatible_with(tensor)
    got = split.backward(*sources, *constants, *saved, *cotangents)
    for a, b in zip(outputs, want, strict=False):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    for a, b in zip(got, gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def backward_ops(split, body):
    given = [v.spec for v in (*split.saved, *split.outputs)]
    given = [*specs(sum(arguments(body), [])), *given]
    hlo = lower(lambda *flat: split.backward(*flat), given).hlo
    computations = hlo_pb2.HloModuleProto.FromString(hlo).computations
    return collections.Counter(op.opcode for c in computations for op in c.instructions)


# The gradients of two products are four; what is above that is recomputed. In `looping`
# and the like, the output of the second product is in no gradient.
@pytest.mark.parametrize(
    "body,everything,named,nothing",
    [
        (two_matmuls, 6, 5, 4),
        (branching, 5, 5, 4),
        (many_outputs, 5, 5, 4),
        (looping, 5, 4, 4),
        (two_inputs, 5, 4, 4),
        (names_an_input, 5, 4, 4),
    ],
)
def test_products_in_the_backward_part(body, everything, named, nothing):
    policies = Recompute.EVERYTHING, Recompute.ALL_BUT_NAMED, Recompute.NOTHING
    products = [backward_ops(cut(body, policy), body)["dot"] for policy in policies]
    assert products == [everything, named, nothing]


def saved_shapes(split):
    return [(tuple(s.spec.shape), s.spec.dtype) for s in split.saved]


def test_what_is_saved():
    assert cut(two_matmuls, Recompute.EVERYTHING).saved == ()
    hidden, out = ((S, H), tf.float32), ((S, M), tf.float32)
    assert saved_shapes(cut(two_matmuls, Recompute.ALL_BUT_NAMED)) == [hidden]
    # What follows from masks or weights alone is not.
    assert sorted(saved_shapes(cut(two_matmuls, Recompute.NOTHING))) == [out, hidden]
    assert ((S, H), tf.bool) in saved_shapes(cut(branching, Recompute.NOTHING))
    # No tensor is saved twice, and arguments never are.
    assert saved_shapes(cut(names_an_input, Recompute.ALL_BUT_NAMED)) == [hidden]


def test_which_values_the_backward_part_reads():
    """It needs no output of the last product, and of what is added only the shape."""

    def body(x, z, w_in, w_out, mask):
        h = save_name(tf.nn.relu(tf.matmul(x, w_in)), "hidden")
        return [z + save_name(tf.matmul(h, w_out) * mask, "out")]

    split = split_function(
        body,
        *map(specs, ([X, Z], [W_IN, W_OUT], [MASK])),
        recompute=Recompute.ALL_BUT_NAMED,
        names=("hidden", "out"),
    )
    assert split.reads == (True, False, True, False)


@pytest.mark.parametrize("name", ["hidden", "h", "w_1", "layer2", "_x", "Q"])
def test_names_may_be_any_identifiers_and_name_several_tensors(name):
    def body(x, w_in, w_out, mask):
        h = save_name(tf.nn.relu(tf.matmul(x, w_in)), name)
        with tf.name_scope("part"):
            y = save_name(tf.tanh(tf.matmul(h, w_out)), name)
        y = save_name(tf.sin(y * mask), name)
        return [x + y, save_name(tf.exp(y), f"{name}_1")][:1]

    split = cut(body, Recompute.ALL_BUT_NAMED, (name,))
    assert sorted(saved_shapes(split)) == [
        ((S, M), tf.float32),
        ((S, M), tf.float32),
        ((S, H), tf.float32),
    ]


def test_an_unknown_name_names_the_known_ones():
    with pytest.raises(
        ValueError, match=r"saves 'hiden', but the layer names no such .*\['hidden'\]"
    ):
        cut(two_matmuls, Recompute.ALL_BUT_NAMED, ("hidden", "hiden"))


@pytest.mark.parametrize("name", ["", "a.b", "a-b", "a b"])
def test_a_name_that_is_no_identifier_is_refused(name):
    with pytest.raises(ValueError, match="of a tensor to save is not an identifier"):
        save_name(tf.zeros([1]), name)


def annotated(x, w_in, w_out, mask):
    h = save_name(
        mesh_split(tf.nn.relu(tf.matmul(x, w_in)), MESH, ["X", "Y"]), "hidden"
    )
    y = mesh_split(x + tf.matmul(h, w_out) * mask, MESH, [None, "Y"])
    return [save_name(y, "out")]


def test_saved_tensors_and_outputs_know_their_annotation():
    split = cut(annotated, Recompute.ALL_BUT_NAMED)
    (saved,), (output,) = split.saved, split.outputs
    shardings = [Sharding.from_dims_mapping(MESH, d) for d in (["X", "Y"], [None, "Y"])]
    want = [s.to_op_sharding().SerializeToString() for s in shardings]
    assert [saved.sharding, output.sharding] == want
    assert cut(two_matmuls, Recompute.ALL_BUT_NAMED).saved[0].sharding is None


def test_what_is_annotated_twice_is_saved_as_it_arrives():
    def fn(x, w_in, w_out, mask):
        h = mesh_split(mesh_split(x @ w_in, MESH, ["X", "Y"]), MESH, [None, "Y"])
        return [x + tf.nn.relu(save_name(h, "hidden")) @ w_out * mask]

    (saved,) = cut(fn, Recompute.ALL_BUT_NAMED).saved
    want = Sharding.from_dims_mapping(MESH, [None, "Y"]).to_op_sharding()
    assert saved.sharding == want.SerializeToString()


def test_names_are_found_in_loops_too():
    with tf.Graph().as_default() as graph:
        x = save_name(tf.zeros([2]), "outside")
        tf.while_loop(
            lambda i, x: i < 3,
            lambda i, x: (i + 1, save_name(save_name(x, "within"), "_again")),
            (0, x),
        )
    assert names_given(graph) == ("_again", "outside", "within")


@pytest.mark.parametrize("dims_mapping", [["X", "Y"], [None, "X"], [("Y", "X"), -1]])
def test_the_sharding_of_a_stack_has_one_more_dim(dims_mapping):
    sharding = Sharding.from_dims_mapping(MESH, dims_mapping).to_op_sharding()
    stack = Sharding.from_dims_mapping(MESH, [None, *dims_mapping]).to_op_sharding()
    saved = Saved(tf.TensorSpec([4, 4]), sharding.SerializeToString(), (1,))
    with tf.Graph().as_default():
        got = saved.annotate_stack(tf.zeros([3, 4, 4])).op
    assert got.get_attr("sharding") == stack.SerializeToString()
    assert got.get_attr("unspecified_dims") == [2]


def test_a_stack_of_replicated_tensors_is_replicated():
    with tf.Graph().as_default():
        serialized = replicate(tf.zeros([2])).op.get_attr("sharding")
        saved = Saved(tf.TensorSpec([2]), serialized)
        stack = saved.annotate_stack(tf.zeros([3, 2])).op
    assert stack.get_attr("sharding") == serialized


def test_what_an_annotation_leaves_open_stays_open():
    def fn(x, w_in, w_out, mask):
        h = mesh_split(x @ w_in, MESH, ["X", None], unspecified_dims=[1])
        return [x + tf.nn.relu(save_name(h, "hidden")) @ w_out * mask]

    (saved,) = cut(fn, Recompute.ALL_BUT_NAMED).saved
    assert saved.unspecified_dims == (1,)
    with tf.Graph().as_default():
        again = saved.annotate(tf.zeros([4, 4])).op
    assert again.get_attr("unspecified_dims") == [1]


@pytest.fixture(scope="module")
def traced_sum():
    """A traced function, and its tensors by name."""
    tensors = {}

    @tf.function
    def in_a_function(x):
        return tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (0, x))[1]

    def fn(x, y):
        sums = tf.add(x, y, name="sums")
        first, *_ = parts = tf.unstack(sums, name="parts")
        with tf.control_dependencies([first]):
            scaled = in_a_function(sums * OUTSIDE)
        pairs = [("x", x), ("y", y), ("sums", sums), ("first", first)]
        tensors.update(pairs, last=parts[2], scaled=scaled)
        return scaled + parts[1]

    specs = [tf.TensorSpec([3]), tf.TensorSpec([3])]
    wrapped = tf.compat.v1.wrap_function(fn, specs)
    tensors["result"] = wrapped.outputs[0]
    return wrapped, tensors


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("x y", "result"),
        ("x y", "scaled last x last"),
        ("sums", "result"),
        ("sums y", "scaled"),
        ("scaled", "scaled"),
    ],
)
def test_a_cut_function_computes_what_tfs_own_does(traced_sum, given, wanted):
    wrapped, tensors = traced_sum
    given, wanted = ([tensors[n] for n in names.split()] for names in (given, wanted))
    args = [tf.constant(n + np.float32([1, 2, 3])) for n in range(len(given))]
    got = Subgraphs(wrapped).cut(given, wanted)(*args)
    want = wrapped.prune(given, wanted)(*args)
    assert len(got) == len(want) == len(wanted)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_not_needed_is_not_copied_and_names_stay(traced_sum):
    wrapped, tensors = traced_sum
    part = Subgraphs(wrapped).cut([tensors["x"], tensors["y"]], [tensors["first"]])
    names = {op.name for op in part.graph.get_operations()}
    assert names >= {"sums", "parts"}
    assert not any("while" in name.lower() for name in names)
    whole = {op.name for op in wrapped.graph.get_operations()}
    assert names <= whole | {tensor.op.name for tensor in part.inputs}


def test_a_cut_function_is_traced_into_another(traced_sum):
    wrapped, tensors = traced_sum
    part = Subgraphs(wrapped).cut([tensors["sums"]], [tensors["result"]])
    outer = tf.function(lambda x: part(x * 2)[0], jit_compile=True)
    np.testing.assert_array_equal(outer(OUTSIDE), part(OUTSIDE * 2)[0])


def test_an_argument_that_is_left_out_is_named(traced_sum):
    wrapped, tensors = traced_sum
    missing = f"'sums' needs '{tensors['y'].op.name}', which is not given"
    with pytest.raises(ValueError, match=missing):
        Subgraphs(wrapped).cut([tensors["x"]], [tensors["sums"]])
