"""Lowering: structures, and what cannot become one XLA program."""

import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.client import pywrap_tf_session

from meshwright.framework.compiler.lowering import lower as lower_module
from meshwright.framework.compiler.lowering.lower import LoweringError, lower
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.mesh import DeviceMesh

X = tf.TensorSpec([4, 2])


def test_nests_keep_their_structure_and_types():
    def fn(theta, batch):
        assert isinstance(theta, NestedMap) and isinstance(theta.layer, NestedMap)
        assert isinstance(batch, tuple) and isinstance(batch[1], dict)
        y = theta.layer.w + tf.cast(batch[1]["n"], tf.float32)
        return NestedMap(y=y, parts=NestedMap(a=[batch[0], {"b": 1.0}]))

    theta = NestedMap(layer=NestedMap(w=X, b=tf.TensorSpec([3], tf.bfloat16)))
    batch = (tf.TensorSpec([], tf.bool), {"n": tf.TensorSpec([2], tf.int32)})
    lowered = lower(fn, [theta, batch])
    assert lowered.signature.name == "fn" and isinstance(lowered.hlo, bytes)
    assert lowered.signature.inputs == (theta, batch)
    out = lowered.signature.outputs
    assert isinstance(out, NestedMap) and isinstance(out.parts, NestedMap)
    assert isinstance(out.parts.a, list) and type(out.parts.a[1]) is dict
    specs = [(tuple(s.shape), s.dtype) for s in tf.nest.flatten(out)]
    assert specs == [((), tf.bool), ((), tf.float32), ((4, 2), tf.float32)]


@pytest.mark.parametrize(
    "spec", [tf.TensorSpec([None, 3]), tf.TensorSpec(None), np.zeros([2]), None]
)
def test_an_argument_without_a_static_spec_is_refused(spec):
    with pytest.raises(LoweringError, match=r"step: argument .* static shape"):
        lower(lambda x, y: x, [X, spec], name="step")


BIG = np.random.default_rng(0).random([600, 600], np.float32)


def in_a_loop(x):
    return tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + BIG), (0, x))[1]


@pytest.mark.parametrize("fn", [lambda x: x + BIG, in_a_loop])
def test_a_large_constant_is_refused_wherever_it_is(fn):
    with pytest.raises(
        LoweringError,
        match=r"step: op '.*add.*' has a constant of shape \[600, 600\] that takes 144",
    ):
        lower(fn, [tf.TensorSpec([600, 600])], name="step")


def test_a_smaller_constant_is_none_of_our_business():
    assert lower(lambda x: x + BIG[:500, :500], [tf.TensorSpec([500, 500])]).hlo


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: tf.where(tf.range(600)[:, None] >= tf.range(600), x, 0.0),
        lambda x: x + tf.one_hot(tf.range(600), 600) + tf.eye(600),
        lambda x: tf.while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, x + tf.eye(600)), (0, x)
        )[1],
    ],
)
def test_what_depends_on_no_argument_is_computed_in_the_program(fn):
    hlo = lower(fn, [tf.TensorSpec([600, 600])]).hlo
    assert len(hlo) < 40_000


def gradient_of_a_loop_in_a_branch(x):
    def loop():
        return tf.while_loop(
            lambda i, _: i < 2,
            lambda i, x: (i + 1, tf.sin(x) * x),
            (0, x),
            maximum_iterations=2,
        )[1]

    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.cond(tf.reduce_sum(x) > 0, loop, lambda: x)
    return tf.convert_to_tensor(tape.gradient(y, x))


@pytest.mark.parametrize(
    "fn,message",
    [
        (gradient_of_a_loop_in_a_branch, "put the tf.cond into the loop's body, or"),
        (
            lambda x: tf.math.top_k(x, tf.cast(x[0, 0], tf.int32))[0],
            "give k of tf.math.top_k as a Python number",
        ),
    ],
)
def test_what_tf_makes_has_a_remedy(fn, message):
    mesh = DeviceMesh(("X",), (8,))
    with pytest.raises(LoweringError, match=message):
        compile_program(fn, [tf.TensorSpec([4, 4])], mesh)


@pytest.mark.parametrize(
    "fn,op,remedy",
    [
        (
            lambda x: tf.strings.length(tf.strings.as_string(x)),
            "AsString",
            "Compute it on the host, before or after the program, or from ops that XLA",
        ),
        (
            lambda x: tf.py_function(lambda y: y, [x], tf.float32),
            "EagerPyFunc",
            "It runs Python on the host: write it in TF ops, or call it outside",
        ),
        (
            lambda x: tf.math.segment_mean(x, tf.range(4)),
            "SegmentMean",
            "Use tf.math.unsorted_segment_mean, and give it num_segments",
        ),
        (
            lambda x: tf.raw_ops.CTCLoss(
                inputs=x[:, None],
                labels_indices=tf.constant([[0, 0]], tf.int64),
                labels_values=[1],
                sequence_length=[4],
            )[0],
            "CTCLoss",
            "Give tf.nn.ctc_loss dense labels and their lengths",
        ),
        (
            lambda x: tf.raw_ops.TensorListScatterIntoExistingList(
                input_handle=tf.raw_ops.TensorListReserve(
                    element_shape=[4], num_elements=4, element_dtype=tf.float32
                ),
                tensor=x,
                indices=[0, 2, 1, 3],
            ),
            "TensorListScatterIntoExistingList",
            "Put the elements in order by tf.gather, and use TensorArray.unstack",
        ),
    ],
)
def test_an_op_that_xla_does_not_have_is_named(fn, op, remedy):
    named = (
        rf"step: TF2XLA cannot compile it: op '{op}' \(lowering/test_lower.py:\d+\): "
        f"it has no kernel for {op}. {remedy}"
    )
    with pytest.raises(LoweringError, match=named) as raised:
        lower(fn, [X], name="step")
    assert "\n" not in str(raised.value)


def test_errors_of_the_function_pass_through():
    def fn(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        lower(fn, [X])


@pytest.mark.parametrize("size", [6, 600])
def test_branches_that_read_what_was_sorted(size):
    """TF2XLA states bounds of the values, which StableHLO cannot hold."""

    def fn(x, number):
        ordered = tf.sort(x, 0)
        branches = [lambda: tf.sin(ordered), lambda: ordered * 2, lambda: -ordered]
        return tf.switch_case(number, branches)

    x = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    specs = [tf.TensorSpec(x.shape), tf.TensorSpec([], tf.int32)]
    program = compile_program(fn, specs, DeviceMesh(("X",), (2,)))
    np.testing.assert_array_equal(program(x, np.int32(1)), np.sort(x, 0) * 2)


def test_functions_lowered_in_threads_leave_constant_folding_on():
    """It is a setting of the process: the last to restore it had seen it off."""
    begun, ended = threading.Event(), threading.Event()

    def first(stage):
        second_thread.start()
        begun.wait(0.2)
        return b""

    def second(stage):
        begun.set()
        ended.wait(10)
        return b""

    second_thread = threading.Thread(target=lower_module._hlo, args=[second])
    lower_module._hlo(first)
    ended.set()
    second_thread.join()
    assert not pywrap_tf_session.TF_GetXlaConstantFoldingDisabled()
