"""What a function reads from outside: small tensors are constants, the rest refused."""

import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.lowering.lower import LoweringError, lower
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import Context
from meshwright.framework.sharding.annotations import mesh_split
from tests.framework.compiler.programs import MESH

X = tf.TensorSpec([8, 4])
ROW = tf.constant(np.arange(4, dtype=np.float32))
SHAPE = tf.constant([4, 8])
AXIS = tf.constant(1)
WIDE = tf.constant(np.ones([512, 512], np.float32))  # Just 1 MiB.
WIDER = tf.constant(np.ones([513, 512], np.float32))
INPUT = np.random.default_rng(0).random([8, 4], np.float32)


@tf.function
def times_row(x):
    return x * ROW


def in_a_loop(x):
    return tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + ROW), (0, x))[1]


def gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(ROW)
        loss = tf.reduce_sum(times_row(x) * ROW)
    return tape.gradient(loss, ROW)


CASES = {
    "op": lambda x: x + ROW,
    "called_function": times_row,
    "loop": in_a_loop,
    "branch": lambda x: tf.cond(x[0, 0] > 0, lambda: x + ROW, lambda: x),
    "shape": lambda x: tf.reshape(x, SHAPE),
    "axis": lambda x: tf.reduce_sum(x, AXIS),
    "result": lambda x: (x, ROW),
    "gradient_of_it": gradient,
    "large": lambda x: x[0, 0] * WIDE,
}


@pytest.mark.parametrize("name", CASES)
def test_a_small_tensor_from_outside_is_a_constant(name):
    fn = CASES[name]
    program = compile_program(lambda x: fn(mesh_split(x, MESH, ["X", -1])), [X], MESH)
    results = tf.nest.flatten(program(INPUT))
    wanted = tf.nest.flatten(fn(tf.constant(INPUT)))
    for result, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(result, want, rtol=1e-6)


@pytest.mark.parametrize(
    "dtype", [tf.bfloat16, tf.float16, tf.int64, tf.uint8, tf.bool, tf.complex64]
)
def test_constants_of_all_types(dtype):
    outside = tf.cast(tf.constant([1.0, 0.0, 3.0]), dtype)
    lowered = lower(lambda x: (x, outside), [X])
    assert lowered.signature.outputs[1].dtype == dtype


def test_the_mean_of_keras_normalization_is_a_constant():
    layer = tf.keras.layers.Normalization()
    layer.adapt(INPUT)
    program = compile_program(layer, [X], MESH, partitioner=Partitioner.GSPMD)
    np.testing.assert_allclose(program(INPUT), layer(INPUT), rtol=1e-5, atol=1e-6)


def refusal(fn):
    with pytest.raises(LoweringError) as raised:
        lower(fn, [X], name="step")
    return str(raised.value)


def test_a_large_tensor_from_outside_is_refused():
    def fn(x):
        with tf.name_scope("head"):
            return x[0, 0] * WIDER

    assert re.fullmatch(
        r"step: the function reads a tensor float32\[513, 512\] from outside, whose "
        r"1.00 MiB are over the 1.00 MiB of a constant, at op 'head/mul' \(head, "
        r"lowering/test_captures.py:\d+\): pass it as an argument or compute it "
        "inside the function",
        refusal(fn),
    )


def makes_a_variable(x):
    with Context().scope("head") as ctx, ctx.scope("scale"):
        return x * tf.Variable(2.0)


@pytest.mark.parametrize(
    "fn,where",
    [
        (makes_a_variable, "layer 'head.scale', "),
        (lambda x: x * tf.Variable(2.0), ""),
        (
            lambda x: tf.while_loop(
                lambda i, x: i < 3, lambda i, x: (i + 1, makes_a_variable(x)), (0, x)
            )[1],
            "layer 'head.scale', ",
        ),
    ],
)
def test_a_variable_that_is_made_while_tracing_is_refused(fn, where):
    assert re.match(
        r"step: a tf.Variable is created while the program is traced, by "
        rf"{where}lowering/test_captures.py:\d+: programs are pure functions. Describe "
        r"a weight by a WeightSpec in the layer's weights\(\) and read it from theta",
        refusal(fn),
    )


BIAS = tf.Variable(np.zeros([300], np.float32), name="bias")
TABLE = tf.Variable(np.zeros([10, 4], np.float32), name="table")


@tf.function
def plus_bias(x):
    with tf.name_scope("deep"):
        return x + BIAS[0]


@pytest.mark.parametrize(
    "fn,what",
    [
        (plus_bias, r"'bias:0' of shape \(300,\) .*op 'deep/.*deep"),
        (lambda x: x + tf.gather(TABLE, [1]), r"'table:0' .*op 'Gather'"),
        (
            lambda x: tf.cond(x[0, 0] > 0, lambda: x + BIAS[0], lambda: x),
            r"'bias:0' .*op 'cond/.*'",
        ),
        (
            tf.keras.layers.Dropout(0.5, name="drop").__call__,
            r"'.*seed_generator_state:0' of shape \(2,\) .*op 'drop.*'",
        ),
    ],
)
def test_a_variable_from_outside_is_refused(fn, what):
    def training(x):
        is_dropout = getattr(fn, "__name__", "") == "__call__"
        return fn(x, training=True) if is_dropout else fn(x)

    text = refusal(training)
    assert re.match(rf"step: the function reads a variable {what}", text)
    assert "(lowering/test_captures.py:" in text or ", lowering/test_capt" in text
    assert text.endswith(
        ": pass its value as an argument, and return its new value as a result, or use "
        "mw.function, which keeps variables"
    )


def test_a_lookup_table_from_outside_is_refused():
    keys = tf.constant([1, 2])
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(keys, keys), default_value=0
    )
    text = refusal(lambda x: table.lookup(tf.cast(x, tf.int32)))
    assert re.match(
        r"step: the function reads a StaticHashTable from outside, at", text
    )
    assert "LookupTableFindV2' (" in text and "look up on the host" in text


def test_a_variable_that_is_read_before_it_is_assigned():
    variable = tf.Variable([1.0, 2.0], name="scale")
    with pytest.raises(LoweringError, match="fn reads variable 'scale:0' before it"):
        lower(
            lambda x: x * variable,
            [tf.TensorSpec([2])],
            name="fn",
            variables=[variable],
        )
