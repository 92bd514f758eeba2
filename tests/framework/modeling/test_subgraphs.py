import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.subgraphs import Subgraphs

OUTSIDE = tf.constant([1.0, 10.0, 100.0])
X = np.array([1.0, 2.0, 3.0], np.float32)


@pytest.fixture(scope="module")
def traced():
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
def test_a_cut_function_computes_what_tfs_own_does(traced, given, wanted):
    wrapped, tensors = traced
    given, wanted = ([tensors[n] for n in names.split()] for names in (given, wanted))
    args = [tf.constant(X + n) for n in range(len(given))]
    got = Subgraphs(wrapped).cut(given, wanted)(*args)
    want = wrapped.prune(given, wanted)(*args)
    assert len(got) == len(want) == len(wanted)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_not_needed_is_not_copied_and_names_stay(traced):
    wrapped, tensors = traced
    part = Subgraphs(wrapped).cut([tensors["x"], tensors["y"]], [tensors["first"]])
    names = {op.name for op in part.graph.get_operations()}
    assert names >= {"sums", "parts"}
    assert not any("while" in name.lower() for name in names)
    whole = {op.name for op in wrapped.graph.get_operations()}
    assert names <= whole | {tensor.op.name for tensor in part.inputs}


def test_a_cut_function_is_traced_into_another(traced):
    wrapped, tensors = traced
    part = Subgraphs(wrapped).cut([tensors["sums"]], [tensors["result"]])
    outer = tf.function(lambda x: part(x * 2)[0], jit_compile=True)
    np.testing.assert_array_equal(outer(X), part(tf.constant(X * 2))[0])


def test_an_argument_that_is_left_out_is_named(traced):
    wrapped, tensors = traced
    missing = f"'sums' needs '{tensors['y'].op.name}', which is not given"
    with pytest.raises(ValueError, match=missing):
        Subgraphs(wrapped).cut([tensors["x"]], [tensors["sums"]])
