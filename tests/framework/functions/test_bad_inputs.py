"""What cannot be a program: refused with the argument or the op, its line, a remedy."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import meshwright.framework as mw

MESH = mw.DeviceMesh(("data", "model"), (2, 4))
HERE = pathlib.Path(__file__).name
X = np.ones([8, 4], np.float32)
TARGETS = np.ones([8, 2], np.float32)
STRINGS = "is a tensor of strings, of which XLA has none: make numbers of texts on the"
ITERATOR = iter(tf.data.Dataset.range(3))


def first(x, other=None):
    return x * 2


def made_of_an_argument():
    made = []

    def step(x):
        if not made:
            made.append(tf.Variable(x * 2, name="late"))
        return made[0] + x

    return step


def grown(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.while_loop(lambda y: tf.reduce_sum(y) < 99.0, lambda y: (y * x,), (x,))
    return tape.gradient(y[0], x)


LEAKED = []


@tf.function
def leak(y):
    LEAKED.append(y)
    return y


leak(X)


def nearest_gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.image.resize(x[None, ..., None], [16, 8], "nearest")
    return tape.gradient(y, x)


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        (first, [X, tf.constant(["a"] * 8)], f"step: argument other {STRINGS}"),
        (first, [X, np.array(["a"] * 8)], f"step: argument other {STRINGS}"),
        (
            first,
            [X, {"a": [np.array("a", object)]}],
            "argument other/a/0 is a tensor",
        ),
        (lambda *x: x[0], [X, tf.constant("a")], "argument 1 is a tensor of strings"),
        (
            lambda x: {"x": x, "text": tf.strings.as_string(x)},
            [X],
            f"step: result text {STRINGS}",
        ),
        (
            first,
            [X, np.array(["2020-01-01"], "datetime64[D]")],
            r"argument other is an array of datetime64\[D\], which TF has not",
        ),
        (
            first,
            [
                X,
                tf.raw_ops.TensorListReserve(
                    element_shape=[2], num_elements=3, element_dtype=tf.float32
                ),
            ],
            "argument other is a tensor of variant, which is no value that XLA has",
        ),
        (
            first,
            [X, tf.ragged.constant([[1.0], [2.0, 3.0]])],
            "step: argument other is a RaggedTensor: pass its components",
        ),
        (
            first,
            [X, {1, 2}],
            "argument other of type set is neither a tensor nor",
        ),
        (
            lambda x: tf.cast(tf.strings.length(tf.strings.as_string(x)), tf.float32),
            [X],
            rf"op '.*AsString' \(.*{HERE}:\d+\): it has no kernel for AsString",
        ),
        (
            lambda x: tf.py_function(lambda y: y, [x], tf.float32),
            [X],
            rf"op '.*EagerPyFunc' \(.*{HERE}:\d+\): it has no kernel .* runs Python on",
        ),
        (
            lambda x: tf.numpy_function(lambda y: y, [x], tf.float32),
            [X],
            rf"op '.*PyFunc' \(.*{HERE}:\d+\): it has no kernel .* It runs Python on",
        ),
        (
            lambda x: (tf.print(x), x)[1],
            [X],
            rf"op '.*StringFormat' \(.*{HERE}:\d+\): .* Return what is to be printed",
        ),
        (
            lambda x: tf.ones([tf.cast(x[0, 0], tf.int32)]),
            [X],
            rf"op '.*ones' \(.*{HERE}:\d+\) takes a size, shape or axis from",
        ),
        (
            grown,
            [X],
            rf"op '.*' \(.*{HERE}:\d+\): it keeps something of each step of a",
        ),
        (
            lambda x: x + tf.cast(next(ITERATOR), tf.float32),
            [X],
            rf"an iterator of a tf.data.Dataset from outside, at op .*{HERE}:\d+\)"
            ": take its next element outside",
        ),
        (
            lambda x: x + LEAKED[0],
            [X],
            r"reads 'y:0', a symbolic tensor of the function 'leak', at op .*: return "
            "it from there and pass it as an argument",
        ),
        (
            lambda x: tf.sort(tf.cast(x, tf.uint16)),
            [X],
            "no kernel for TopKV2 of uint16: cast it to a type that it has, such as",
        ),
        (
            nearest_gradient,
            [X],
            "no kernel for ResizeNearestNeighborGrad. It is the gradient of tf.image",
        ),
        (
            made_of_an_argument(),
            [X],
            "step: the function makes a variable whose initial value depends on",
        ),
        (
            lambda x: tf.cast(x, tf.float32) * 2,
            [X.astype(np.complex64)],
            rf"step: argument x is complex64, and op 'Cast' \(.*{HERE}:\d+\) makes it "
            "float32 without its imaginary part: pass real numbers, or take tf.math",
        ),
    ],
)
def test_a_function(fn, args, message):
    with pytest.raises(mw.LoweringError, match=message):
        mw.function(fn, MESH, name="step")(*args)


def test_complex_arguments_that_stay_complex():
    step = mw.function(lambda x: tf.math.real(x * x) + tf.abs(x), MESH)
    x = X * (1 + 2j)
    np.testing.assert_allclose(step(x), (x * x).real + abs(x), rtol=1e-6)


def fitted(x, y):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    mw.keras.distribute(model, MESH).fit(x, y, verbose=0)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (
            tf.fill([8, 4], "a"),
            TARGETS,
            "train_step: argument data/0 is a tensor of",
        ),
        (
            tf.cast(X, tf.complex64),
            TARGETS,
            "argument data/0 is complex64, and op",
        ),
        (
            X.astype(np.complex64),
            TARGETS,
            "argument data/0 is complex64, and op",
        ),
        (
            X,
            TARGETS.astype(np.complex64),
            "argument data/1 is complex64, and op",
        ),
        (
            tf.ragged.constant([[1.0, 2.0]] * 7 + [[1.0]]),
            TARGETS,
            "train_step: argument data/0 is a RaggedTensor: pass its components",
        ),
    ],
)
def test_a_keras_model(x, y, message):
    with pytest.raises(mw.LoweringError, match=message):
        fitted(x, y)


@pytest.mark.parametrize(
    ("fn", "specs", "message"),
    [
        (
            lambda batch: batch["x"],
            [{"x": tf.TensorSpec([8]), "text": tf.TensorSpec([8], tf.string)}],
            f"step: argument 0/text {STRINGS}",
        ),
        (
            lambda x: {"x": x, "text": tf.constant("a")},
            [tf.TensorSpec([8])],
            f"step: result text {STRINGS}",
        ),
    ],
)
def test_a_program(fn, specs, message):
    with pytest.raises(mw.LoweringError, match=message):
        mw.compile_program(fn, specs, MESH, name="step")


@pytest.mark.parametrize("to_complex", [np.complex128, tf.complex64])
def test_a_program_of_real_numbers(to_complex):
    program = mw.compile_program(
        lambda x: x, [tf.TensorSpec([8, 4])], MESH, name="step"
    )
    x = X.astype(to_complex) if to_complex is np.complex128 else tf.cast(X, to_complex)
    with pytest.raises(ValueError, match="step: argument 0 is complex.*for float32"):
        program(x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: mw.mesh_split(X, [None, "model"], MESH),
            r"mesh_split: the second argument is the mesh, the third the dims, as in "
            r'mesh_split\(x, mesh, \["X", None\]\); this mesh is \[None',
        ),
        (
            lambda: mw.explain(first),
            r"explain takes a Program, as compile_program\(fn, specs, mesh\) returns "
            "it; this is of type function",
        ),
        (
            lambda: mw.visualize(X),
            r"this is of type ndarray: program.shard\(...\) puts host arrays onto a",
        ),
        (
            lambda: mw.explain(keras.Sequential()),
            r"explain takes a Program, as mw.keras.program\(model, x, y\) returns it",
        ),
        (
            lambda: mw.explain_page(keras.Sequential(), "page.html"),
            r"explain_page takes a Program, as mw.keras.program\(model, x, y\) ret",
        ),
    ],
)
def test_an_argument_of_another_kind(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_functions_that_are_to_run_eagerly_are_refused():
    """TF's switch would go unheard, also of programs that are there already."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    mw.keras.distribute(model, MESH).fit(X, TARGETS, verbose=0)
    ours = mw.function(first, MESH)
    ours(X)
    message = r"run_functions_eagerly\(True\) is in force, .* call .*eagerly\(False\)"
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(mw.LoweringError, match=f"train_step: .*{message}"):
            model.fit(X, TARGETS, verbose=0)
        with pytest.raises(mw.LoweringError, match=f"first: .*{message}"):
            ours(X)
        with pytest.raises(mw.LoweringError, match=message):
            mw.compile_program(first, [tf.TensorSpec([8, 4])], MESH)
    finally:
        tf.config.run_functions_eagerly(False)
    ours(X)
