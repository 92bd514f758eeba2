"""Random programs of partial sums, typed as they may be: the numbers of one device.

Arguments and factors are small whole numbers, of which every sum is exact in whatever
order it is taken. `TYPES_CASES` says how often 16 of them there are, `TYPES_SEED` gives
others.
"""

import dataclasses
import itertools
import os
import random
from collections.abc import Callable

import hypothesis
import numpy as np
import tensorflow as tf

from tests.framework.partial.partial_programs import (
    MESH,
    RandomSteps,
    check_random,
    gradients,
    split,
    to,
    traced,
)

CASES = int(os.environ.get("TYPES_CASES", 1))
SEED = os.environ.get("TYPES_SEED", "")
AXES = MESH.axis_names
SIZES = [4, 8]
LINEAR = {
    "negate": lambda x: -x,
    "twice": lambda x: x + x,
    "less_half": lambda x: x - 0.5 * x,
    "transpose": tf.transpose,
    "reshape": lambda x: tf.reshape(x, x.shape[::-1]),
    "shift": lambda x: tf.pad(x[1:, :-1], [[0, 1], [1, 0]]),
    "turn": lambda x: tf.concat([x[2:], x[:2]], 0),
    "mask": lambda x: tf.where(np.indices(x.shape).sum(0) % 3 > 0, x, 0.0),
    "rows": lambda x: x - tf.reduce_sum(x, 1, keepdims=True),
    "columns": lambda x: tf.broadcast_to(tf.reduce_sum(x, 0), x.shape),
    "first": lambda x: x + x[0],
    "picked": lambda x: tf.gather(x, [1, 0, 3, 1] * (x.shape[0] // 4)),
    "counted": lambda x: tf.math.unsorted_segment_sum(
        x, [0, 3, 1, 0] * (x.shape[0] // 4), x.shape[0]
    ),
    "stacked": lambda x: tf.reduce_sum(tf.stack([x, 2.0 * x]), 0),
}
ELEMENTWISE = {"relu": tf.nn.relu, "abs": tf.abs, "more": lambda x: x + 1.0}


@dataclasses.dataclass(frozen=True)
class Value:
    """One of a program's values: its number, its shape, what it is unreduced along."""

    number: int
    shape: tuple[int, ...]
    unreduced: tuple[str, ...] = ()


class Program(RandomSteps):
    """Of partial sums, some of which other steps may read again."""

    def __init__(self, random: random.Random):
        super().__init__(random)
        self.made: list[Value] = []

    def step(self, what: str, shape, unreduced, op: Callable, again=True) -> Value:
        """One more step; whether its value may be read `again` by another."""
        value = Value(len(self.steps), tuple(shape), tuple(unreduced))
        if again:
            self.made.append(value)
        types = f"{list(shape)}{{U:{','.join(unreduced)}}}"
        self.text.append(f"  v{value.number} = {what}: {types}")
        self.steps.append(op)
        return value

    def argument(self, *shape: int) -> Value:
        number = self.add_argument(shape, self.dims(len(shape)))
        return self.step(f"argument {number}", shape, (), lambda _, args: args[number])

    def whole(self, *shape: int) -> Value:
        """A value of that shape of which nothing is unreduced."""
        had = [v for v in self.made if v.shape == shape and not v.unreduced]
        return self.choose(*had) if had and self.choose(0, 1) else self.argument(*shape)

    def linear(self, x: Value) -> Value:
        name = self.choose(*LINEAR)
        shape = LINEAR[name](tf.zeros(x.shape)).shape
        return self.step(
            f"{name} v{x.number}",
            shape,
            x.unreduced,
            lambda v, _: LINEAR[name](v[x.number]),
        )

    def elementwise(self, x: Value) -> Value:
        x = self.converted(x, ())
        name = self.choose(*ELEMENTWISE)
        return self.step(
            f"{name} v{x.number}",
            x.shape,
            (),
            lambda v, _: ELEMENTWISE[name](v[x.number]),
        )

    def converted(self, x: Value, unreduced=None) -> Value:
        """`x`, resharded to random dims; unreduced along random axes if not given."""
        if unreduced is None:
            unreduced = self.choose((), *[(a,) for a in AXES], AXES)
        elif x.unreduced == unreduced:
            return x
        dims = self.dims(len(x.shape), but=unreduced)
        return self.step(
            f"v{x.number} to {dims}",
            x.shape,
            unreduced,
            lambda v, _: to(v[x.number], *dims, unreduced=unreduced),
        )

    def begun(self, x: Value) -> Value:
        """A product, unreduced along some of the axes that split what it sums."""
        x = self.converted(x, ())
        other = self.whole(x.shape[1], self.choose(*SIZES))
        summed = self.choose(
            *itertools.permutations(AXES, 1), *itertools.permutations(AXES)
        )
        left, right = (self.dims(1, but=summed)[0] for _ in range(2))
        unreduced = self.choose(*[(a,) for a in summed], *[tuple(sorted(summed))])
        dims = self.dims(2, but=unreduced)

        def op(v, _):
            left_value, two = (
                split(v[x.number], left, summed),
                split(v[other.number], summed, right),
            )
            return split(left_value @ two, *dims, unreduced=unreduced)

        return self.step(
            f"v{x.number} {[left, summed]} @ v{other.number} {[summed, right]}, "
            f"split {dims}",
            (x.shape[0], other.shape[1]),
            unreduced,
            op,
        )

    def factor(self, shape, unreduced) -> Value:
        """What a partial sum is multiplied by: its own gradient will be unreduced."""
        w = self.whole(*shape)
        if not unreduced:
            return w
        dims = self.dims(len(shape), but=unreduced)
        return self.step(
            f"v{w.number} to {dims} R:{','.join(unreduced)}",
            shape,
            (),
            lambda v, _: to(v[w.number], *dims, reduced=unreduced),
            again=False,
        )

    def multiplied(self, x: Value) -> Value:
        w = self.factor(x.shape, x.unreduced)
        return self.step(
            f"v{x.number} * v{w.number}",
            x.shape,
            x.unreduced,
            lambda v, _: v[x.number] * v[w.number],
        )

    def matmul(self, x: Value) -> Value:
        (m, n), k = x.shape, self.choose(*SIZES)
        if self.choose("left", "right") == "left":
            w = self.factor((k, m), x.unreduced)
            first, two, shape = w, x, (k, n)
        else:
            w = self.factor((n, k), x.unreduced)
            first, two, shape = x, w, (m, k)
        return self.step(
            f"v{first.number} @ v{two.number}",
            shape,
            x.unreduced,
            lambda v, _: v[first.number] @ v[two.number],
        )

    def added(self, x: Value) -> Value:
        others = [v for v in self.made if v.shape == x.shape]
        y = self.converted(self.choose(*others), x.unreduced)
        return self.step(
            f"v{x.number} + v{y.number}",
            x.shape,
            x.unreduced,
            lambda v, _: v[x.number] + v[y.number],
        )


def drawn(random):
    program = Program(random)
    value = program.argument(*(program.choose(*SIZES) for _ in range(2)))
    value = program.begun(value)
    steps = ["linear", "linear", "multiplied", "matmul", "added", "converted", "begun"]
    for _ in range(random.randint(1, 5)):
        value = getattr(program, program.choose(*steps, "elementwise"))(value)
    program.converted(program.linear(value), ())
    return program


def results(program, like):
    """The function: the program's result, and its arguments' gradients."""

    def run(*args):
        values = []
        for step in program.steps:
            values.append(step(values, args))
        return values[-1]

    def fn(*args):
        return run(*args), gradients(lambda *a: tf.reduce_sum(run(*a) * like), *args)

    return fn


def check(random, partitioner):
    program = drawn(random)
    hypothesis.note(f"{partitioner} {program}")
    rng = np.random.default_rng(0)
    like = rng.integers(-1, 2, program.made[-1].shape).astype(np.float32)
    fn = results(program, like)
    compiled = traced(fn, *program.arguments, partitioner=partitioner).compile()
    args = [
        rng.integers(-1, 2, spec.shape).astype(np.float32)
        for spec in tf.nest.flatten(compiled.inputs)
    ]
    want = fn(*map(tf.constant, args))
    got = compiled.unshard(compiled(*args))
    for result, expected in zip(
        tf.nest.flatten(got), tf.nest.flatten(want), strict=True
    ):
        assert np.abs(expected).max() < 2**20  # Or sums of it may be rounded.
        np.testing.assert_array_equal(result, expected)


def test_random_programs_have_the_numbers_of_one_device():
    check_random(check, 16 * CASES, SEED)
