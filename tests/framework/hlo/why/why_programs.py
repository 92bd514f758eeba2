"""Programs whose reasons are asked for: small ones of each kind, and random ones."""

import functools

import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.compiler.program import trace_program
from tests.framework.partial import partial_programs

MESH = mw.DeviceMesh(("X", "Y"), (2, 4))


def flat(answer):
    """The text of an answer in a single line."""
    return " ".join(str(answer).split())


def split(x, *dims):
    return mw.mesh_split(x, MESH, dims)


def lies(*dims):
    return mw.Sharding.from_dims_mapping(MESH, dims)


def looped(w, x):
    w = split(w, "X", "Y")

    def body(i, x):
        y = mw.mesh_split(x @ w, MESH, ["X", "Y"])
        return i + 1, tf.tanh(tf.matmul(y, w, transpose_b=True))

    x = tf.while_loop(lambda i, _: i < 5, body, (tf.constant(0), x))[1]
    return tf.cond(tf.reduce_sum(x) > 0, lambda: 2 * x, lambda: tf.nn.relu(x)), 3 * w


def switched(w, x):
    y = split(x @ w, "X", None)
    cases = [lambda: y + 1, lambda: split(-y, None, "Y"), lambda: y * y]
    return tf.switch_case(tf.cast(x[0, 0], tf.int32), cases), tf.transpose(y)


def manual(w, x):
    local = mw.auto_to_manual(x @ w, MESH, ["X", None], manual_axes=["X"])
    local = tf.nn.relu(local) + mw.collectives.all_reduce(local, MESH, "X")
    return tf.tanh(mw.manual_to_auto(local, MESH, ["X", None], manual_axes=["X"]))


def gradient(w, x):
    with tf.GradientTape() as tape:
        tape.watch(w)
        y = tf.nn.softmax(split(x, "X", None) @ w)
        loss = tf.reduce_sum(y**2)
    return w - tape.gradient(loss, w), loss


def in_parts(w, x):
    """Reshapes give dims a part of an axis each."""
    x = split(x, "Y", None)
    return tf.reshape(tf.tanh(x), [2, 4, 16]) * 2.0, split(w, "X", None)


def convolved(w, x):
    image = split(tf.reshape(x, [2, 8, 8, 1]), None, "Y", None, None)
    kernel = tf.reshape(w, [8, 8, 1, 8])[:3, :3]
    return tf.nn.conv2d(image, kernel, 1, "SAME"), tf.gather(w, [0, 3], axis=1)


def reshards(w, x):
    x = split(tf.nn.relu(split(x, "X", None)), None, "X")
    return tf.sort(x, axis=0), tf.cumsum(split(w, None, "Y"), axis=1)


PROGRAMS = {
    f.__name__: f
    for f in (
        *(looped, switched, manual, gradient),
        *(in_parts, convolved, reshards),
    )
}


def traced(name, partitioner=mw.Partitioner.SHARDY, w_lies=None):
    return trace_program(
        PROGRAMS[name],
        [tf.TensorSpec([16, 32]), tf.TensorSpec([8, 16])],
        MESH,
        in_shardings=[w_lies, None],
        partitioner=partitioner,
        name=name,
    )


@functools.cache
def kept(name):
    """The traced program of a name; its weight is given as the plan says."""
    return traced(name, w_lies=lies(None, "Y"))


UNARY = {
    "tanh": (tf.tanh, lambda s: s),
    "transpose": (tf.transpose, lambda s: s[::-1]),
    "flatten": (lambda x: tf.reshape(x, [-1, 4]), lambda s: (s[0] * s[1] // 4, 4)),
    "column": (lambda x: x[:, :1] + tf.zeros([1, 4]), lambda s: (s[0], 4)),
    "softmax": (tf.nn.softmax, lambda s: s),
    "row": (lambda x: tf.reduce_sum(x, 0, keepdims=True) * x, lambda s: s),
    "loop": (
        lambda x: tf.while_loop(
            lambda i, *_: i < 3,
            lambda i, a, b: [i + 1, a + tf.tanh(b), b],
            [tf.constant(0), tf.zeros_like(x), x],
        )[1],
        lambda s: s,
    ),
    "branch": (
        lambda x: tf.cond(x[0, 0] > 0, lambda: tf.exp(x), lambda: x + x),
        lambda s: s,
    ),
}
"""Ops of a matrix, and the shape that they give one of a shape."""


class RandomProgram(partial_programs.RandomSteps):
    """Whose annotations, arguments and results split what they happen to split."""

    def __init__(self, random):
        super().__init__(random)
        self.shapes: list[tuple[int, ...]] = []
        self.specs: list[tf.TensorSpec] = []
        self.given: list[mw.Sharding | None] = []
        for _ in range(self.choose(1, 2)):
            self.argument((self.choose(4, 8), self.choose(4, 8)))
        for _ in range(self.choose(3, 5, 8, 12)):
            getattr(
                self, self.choose("unary", "unary", "annotated", "product", "sum")
            )()
        self.result = self.choose(None, self.sharding())
        self.text.append(f"result {self.result}")

    def fn(self, *arguments):
        values, left = [], list(arguments)
        for step in self.steps:
            values.append(left.pop(0) if step is None else step(values))
        return values[-1]

    def traced(self):
        return trace_program(
            self.fn,
            self.specs,
            partial_programs.MESH,
            in_shardings=self.given,
            out_shardings=self.result,
            name="random",
        )

    def step(self, what, op, reads, shape) -> int:
        self.text.append(f"  v{len(self.shapes)} = {what} of {reads}: {shape}")
        self.steps.append(lambda values: op(*(values[n] for n in reads)))
        self.shapes.append(tuple(shape))
        return len(self.shapes) - 1

    def sharding(self) -> mw.Sharding:
        return mw.Sharding.from_dims_mapping(partial_programs.MESH, self.dims(2))

    def argument(self, shape) -> int:
        self.specs.append(tf.TensorSpec(shape))
        self.given.append(self.choose(None, None, self.sharding()))
        number = self.step(f"argument {self.given[-1]}", None, [], shape)
        self.steps[-1] = None  # It is given, see `fn`.
        return number

    def one(self) -> int:
        """A value, most often a late one."""
        last = len(self.shapes) - 1
        return self.choose(last, last, *range(len(self.shapes)))

    def unary(self):
        x, name = self.one(), self.choose(*UNARY)
        op, shape = UNARY[name]
        self.step(name, op, [x], shape(self.shapes[x]))

    def annotated(self):
        x, sharding = self.one(), self.sharding()
        self.step(
            f"annotation {sharding}",
            lambda v: mw.mesh_split(v, sharding.mesh, sharding.dims),
            [x],
            self.shapes[x],
        )

    def product(self):
        x = self.one()
        rows, summed = self.shapes[x]
        y = self.argument((summed, self.choose(4, 8)))
        self.step("product", tf.matmul, [x, y], (rows, self.shapes[y][1]))

    def sum(self):
        x = self.one()
        alike = [n for n, shape in enumerate(self.shapes) if shape == self.shapes[x]]
        y = self.choose(*alike, self.argument(self.shapes[x]))
        self.step("sum", tf.add, [x, y], self.shapes[x])
