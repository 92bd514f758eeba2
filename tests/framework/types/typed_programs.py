"""Random programs whose sharding types are all right, and what each value's is."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tests.framework.partial.partial_programs import MESH, RandomSteps, split, to

AXES = MESH.axis_names
SIZES = [4, 8]
LINEAR = {
    "negate": lambda x: -x,
    "twice": lambda x: x + x,
    "half": lambda x: x / 2.0,
    "mask": lambda x: tf.where(np.indices(x.shape).sum(0) % 3 > 0, x, 0.0),
}
"""Which keep a tensor's type, whatever it is."""
OF_WHOLE_DIMS = {
    "turn": lambda x: tf.concat([x[2:], x[:2]], 0),
    "rows": lambda x: tf.gather(x, [1, 0, 3, 2] * (x.shape[0] // 4)),
    "columns": lambda x: tf.broadcast_to(tf.reduce_sum(x, 0), x.shape),
    "added_rows": lambda x: tf.tensor_scatter_nd_add(x, [[0], [1]], x[2:4]),
    "shift": lambda x: tf.pad(x[1:, :-1], [[0, 1], [1, 0]]),
    "reshape": lambda x: tf.reshape(tf.reshape(x, [-1]), x.shape),
}
ELEMENTWISE = {"relu": tf.nn.relu, "abs": tf.abs, "more": lambda x: x + 1.0}
Dims = list[list[str]]


@dataclasses.dataclass(frozen=True)
class Value:
    """One of a program's values: its number, its shape and its type."""

    number: int
    shape: tuple[int, ...]
    dims: Dims
    unreduced: tuple[str, ...] = ()


class Program(RandomSteps):
    """Whose types are all right."""

    def shape(self) -> tuple[int, ...]:
        return tuple(self.choose(*SIZES) for _ in range(2))

    def step(
        self,
        what: str,
        op: Callable,
        reads: Sequence[Value],
        shape: Sequence[int],
        dims: Dims,
        unreduced: Sequence[str] = (),
    ) -> Value:
        """One more step: `op` of the values that it reads."""
        value = Value(len(self.steps), tuple(shape), dims, tuple(unreduced))
        numbers = [read.number for read in reads]
        self.text.append(f"  v{value.number} = {what} of {numbers}: {value}")
        self.steps.append(lambda values, _: op(*(values[n] for n in numbers)))
        return value

    def argument(self, shape: Sequence[int], dims: Dims | None = None) -> Value:
        dims = self.dims(len(shape)) if dims is None else dims
        number = self.add_argument(shape, dims)
        value = self.step("argument", None, [], shape, dims)
        self.steps[-1] = lambda _, args: args[number]
        return value

    def converted(self, x: Value, dims: Dims, unreduced: Sequence[str] = ()) -> Value:
        return self.step(
            "reshard",
            lambda x: to(x, *dims, unreduced=unreduced),
            [x],
            x.shape,
            dims,
            unreduced,
        )

    def resharded(self, x: Value) -> Value:
        unreduced = self.choose((), *[(axis,) for axis in AXES], AXES)
        return self.converted(x, self.dims(len(x.shape), unreduced), unreduced)

    def begun(self, x: Value) -> Value:
        """A product, unreduced along some of the axes that split what it sums."""
        summed = self.choose(
            *itertools.permutations(AXES, 1), *itertools.permutations(AXES)
        )
        left, right = (self.dims(1, but=summed)[0] for _ in range(2))
        right = [axis for axis in right if axis not in left]
        left_operand = self.converted(x, [left, list(summed)])
        other = self.argument((x.shape[1], self.choose(*SIZES)), [list(summed), right])
        partial = self.choose(*[(axis,) for axis in summed], tuple(sorted(summed)))
        dims = self.dims(2, but=partial)
        return self.step(
            "product",
            lambda a, b: split(a @ b, *dims, unreduced=partial),
            [left_operand, other],
            (x.shape[0], other.shape[1]),
            dims,
            partial,
        )

    def linear(self, x: Value) -> Value:
        if self.choose(True, False):
            name = self.choose(*LINEAR)
            return self.step(name, LINEAR[name], [x], x.shape, x.dims, x.unreduced)
        unsplit: Dims = [[] for _ in x.shape]
        x = self.converted(x, unsplit, x.unreduced)
        name = self.choose(*OF_WHOLE_DIMS)
        return self.step(name, OF_WHOLE_DIMS[name], [x], x.shape, unsplit, x.unreduced)

    def transposed(self, x: Value) -> Value:
        return self.step(
            "transpose", tf.transpose, [x], x.shape[::-1], x.dims[::-1], x.unreduced
        )

    def added(self, x: Value) -> Value:
        y = self.converted(self.argument(x.shape), x.dims, x.unreduced)
        return self.step("sum", tf.add, [x, y], x.shape, x.dims, x.unreduced)

    def multiplied(self, x: Value) -> Value:
        y = self.argument(x.shape, x.dims)
        return self.step("multiple", tf.multiply, [x, y], x.shape, x.dims, x.unreduced)

    def elementwise(self, x: Value) -> Value:
        x = self.converted(x, self.dims(len(x.shape)))
        name = self.choose(*ELEMENTWISE)
        return self.step(name, ELEMENTWISE[name], [x], x.shape, x.dims)

    def looped(self, x: Value) -> Value:
        """Carries what begins as zeros, and what begins as `x`."""

        def op(x):
            return tf.while_loop(
                lambda i, *_: i < 2,
                lambda i, a, b: [i + 1, a - x, a + b],
                [tf.constant(0), tf.zeros(x.shape), x],
                maximum_iterations=2,
            )[2]

        return self.step("loop", op, [x], x.shape, x.dims, x.unreduced)

    def branched(self, x: Value) -> Value:
        flag = self.argument((4,), [[]])

        def op(x, flag):
            return tf.cond(flag[0] > 0.0, lambda: -x, lambda: x + x)

        return self.step("branch", op, [x, flag], x.shape, x.dims, x.unreduced)

    def more(self, x: Value, count: int) -> Value:
        """After a number of random steps."""
        steps = ["linear", "linear", "transposed", "added", "multiplied", "resharded"]
        steps += ["begun", "looped", "branched", "elementwise"]
        for _ in range(count):
            x = getattr(self, self.choose(*steps))(x)
        return x

    def run(self, *args: tf.Tensor) -> tf.Tensor:
        """The result of the last step."""
        values: list[tf.Tensor] = []
        for step in self.steps:
            values.append(step(values, args))
        return values[-1]
