"""Random programs with right types, and with one mistake at a random place.

Arguments are small whole numbers, of which every sum is exact in whatever order.
`TYPES_CASES` says how many of each there are, `TYPES_SEED` gives others.
"""

import dataclasses
import inspect
import os
import random
import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tensorflow as tf

from meshwright import framework as mw
from tests.framework.partial.partial_programs import MESH, argument, traced
from tests.framework.types.typed_programs import AXES, Program, Value

CASES = int(os.environ.get("TYPES_CASES", 1))
SEED = os.environ.get("TYPES_SEED", "")
FILE = "types/test_types_random.py"


def partial(program: Program, x: Value) -> Value:
    return program.linear(program.begun(x))


def a_partial_sum(program, x):
    return [partial(program, x)]


def and_a_whole_one(program, x):
    p = partial(program, x)
    return [p, program.argument(p.shape, p.dims)]


def and_a_whole_one_and_a_flag(program, x):
    return [*and_a_whole_one(program, x), program.argument((4,), [[]])]


def and_one_along_other_axes(program, x):
    p = program.converted(x, [[], []], ["dp"])
    return [p, program.converted(program.argument(x.shape), [[], []], ["tp"])]


def and_one_that_they_split(program, x):
    p = partial(program, x)
    p = program.converted(p, [[], []], p.unreduced)
    return [p, program.argument(p.shape, [list(p.unreduced), []])]


def rows_and_columns(program, x):
    axis = program.choose(*AXES)
    first = program.converted(x, [[axis], []])
    return [first, program.argument(x.shape, [[], [axis]])]


def rows_by_each_axis(program, x):
    return [
        program.converted(x, [["dp"], []]),
        program.argument(x.shape, [["tp"], []]),
    ]


def factors(program, x):
    axis = program.choose(*AXES)
    size = x.shape[1]
    return [
        program.converted(x, [[], [axis]]),
        program.argument((size, size), [[axis], []]),
    ]


def uneven_factors(program, x):
    return [
        program.argument((4, 7), [[], ["tp"]]),
        program.argument((7, 4), [["tp"], []]),
    ]


def columns(program, x):
    return [program.converted(x, [[], ["tp"]])]


def rows(program, x):
    return [program.converted(x, [["tp"], []])]


def to_replicated(program, x):
    return [program.converted(x, [[], []])]


def reduced_and_replicated(program, x):
    read = program.step(
        "reduced",
        lambda x: mw.reshard(x, MESH, [-1, -1], reduced=["dp"]),
        [x],
        x.shape,
        [[], []],
    )
    return [read, program.argument(x.shape, [[], []])]


def loop(p, start):
    return tf.while_loop(
        lambda i, _: i < 2,
        lambda i, a: [i + 1, a + p],
        [tf.constant(0), start],
        maximum_iterations=2,
    )[1]


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A mistake: what is done, which the types of what it reads do not allow.

    Args:
      op: of the tensors that it reads, in one line.
      reads: makes these in a program that has come to some value.
      reason: that it is refused for; a pattern.
    """

    op: Callable
    reads: Callable[[Program, Value], Sequence[Value]]
    reason: str

    def says(self, message: str) -> bool:
        """Whether a message has the reason, and a line of the mistake."""
        lines, first = inspect.getsourcelines(self.op)
        is_named = [f"({FILE}:{first + n})" in message for n in range(len(lines))]
        return any(is_named) and re.search(self.reason, message) is not None


NOT_LINEAR = r"it is not linear in a sum unreduced along \w+; reshard it to \["
MISTAKES = {
    "unreduced and replicated": Mistake(
        lambda p, w: p + w,
        and_a_whole_one,
        r"adds .* a partial sum along \w+ and a (replicated|split) tensor; reshard the",
    ),
    "unreduced and another number": Mistake(
        lambda p: p + 1.0,
        a_partial_sum,
        r"adds .* a partial sum along \w+ and a constant other than zero",
    ),
    "along different axes": Mistake(
        lambda p, q: p - q,
        and_one_along_other_axes,
        r"subtracts .* a partial sum along \w+ and a replicated tensor",
    ),
    "joined with a replicated one": Mistake(
        lambda p, w: tf.stack([p, w]),
        and_a_whole_one,
        r"joins .* a partial sum along \w+ and a (replicated|split) tensor",
    ),
    "a product of unreduced": Mistake(
        lambda p: p * p,
        a_partial_sum,
        r"multiplies .* a product of sums unreduced along \w+ is not the sum of pro",
    ),
    "a product along different axes": Mistake(
        lambda p, q: p * q,
        and_one_along_other_axes,
        r"multiplies .* a product of two partial sums, one along tp: of a product one",
    ),
    "relu of unreduced": Mistake(
        lambda p: tf.nn.relu(p),
        a_partial_sum,
        NOT_LINEAR,
    ),
    "maximum of unreduced": Mistake(
        lambda p: tf.reduce_max(p, 0, keepdims=True),
        a_partial_sum,
        NOT_LINEAR,
    ),
    "by unreduced": Mistake(
        lambda p, w: w / p,
        and_a_whole_one,
        NOT_LINEAR,
    ),
    "unreduced and split": Mistake(
        lambda p, w: p * w,
        and_one_that_they_split,
        r"multiplies .* its result would be split by \w+ in dim 0 and a partial sum",
    ),
    "rows and columns": Mistake(
        lambda x, y: x + y,
        rows_and_columns,
        r"adds .* its result would be split by \w+ in dim \d and split by \w+ in dim",
    ),
    "rows by each axis": Mistake(
        lambda x, y: x * y,
        rows_by_each_axis,
        r"multiplies .* they are split by \w+ and \w+ in one dim; mesh_split one like",
    ),
    "an ambiguous contraction": Mistake(
        lambda x, y: tf.nn.relu(x @ y),
        factors,
        r"not linear in a sum unreduced along \w+; mesh_split it to \[",
    ),
    "an ambiguous sum": Mistake(
        lambda x: tf.abs(tf.reduce_sum(x, 0)),
        rows,
        r"not linear in a sum unreduced along tp; mesh_split it to \[_\]",
    ),
    "an uneven sum": Mistake(
        lambda x, y: mw.mesh_split(x @ y, MESH, [-1, -1], unreduced=["tp"]),
        uneven_factors,
        r"it is not a sum over dims that tp splits evenly",
    ),
    "not partial at all": Mistake(
        lambda x: mw.mesh_split(x - 1.0, MESH, [-1, -1], unreduced=["tp"]),
        to_replicated,
        r"no sum is unreduced along tp, so it is not unreduced; reshard converts",
    ),
    "split and called reduced": Mistake(
        lambda x: mw.mesh_split(x - 1.0, MESH, [-1, -1], reduced=["tp"]),
        columns,
        r"tp splits it, so it is not reduced along tp; reshard converts it",
    ),
    "reduced and replicated": Mistake(
        lambda r, w: r * w,
        reduced_and_replicated,
        r"one is reduced along dp and the other, .* replicated: its gradient would be",
    ),
    "dropped by an annotation": Mistake(
        lambda p: mw.mesh_split(-p, MESH, [-1, -1]),
        a_partial_sum,
        r"it would drop the sum unreduced along .*; reshard says where it is added up",
    ),
    "merged dims": Mistake(
        lambda x: tf.reshape(x, [-1]),
        columns,
        r"dim 1 is not split where the result could be: .*; mesh_split it to \[_,_\]",
    ),
    "a loop of another type": Mistake(
        loop,
        and_a_whole_one,
        r"a partial sum along \w+ and a (replicated|split) tensor",
    ),
    "branches of other types": Mistake(
        lambda p, w, flag: tf.cond(flag[0] > 0.0, lambda: p, lambda: w),
        and_a_whole_one_and_a_flag,
        r"gives .* or .*: branches of a conditional give one type",
    ),
}


def randoms(kind, each=1):
    return [random.Random(f"{kind} {number} {SEED}") for number in range(each * CASES)]


def explained(program):
    given = [argument(text) for text in program.arguments]
    return mw.explain_types(
        program.run,
        [spec for spec, _ in given],
        MESH,
        in_shardings=[sharding for _, sharding in given],
    )


def check_numbers(program, partitioner):
    """The message, if it is refused; else it has to have the numbers of one device."""
    try:
        compiled = traced(
            program.run, *program.arguments, partitioner=partitioner
        ).compile()
    except mw.LoweringError as error:
        return str(error)
    rng = np.random.default_rng(0)
    args = [
        rng.integers(-1, 2, spec.shape).astype(np.float32)
        for spec in tf.nest.flatten(compiled.inputs)
    ]
    want = np.asarray(program.run(*map(tf.constant, args)))
    assert np.abs(want).max() < 2**20  # Or sums of it may be rounded.
    got = compiled.unshard(compiled(*args))
    np.testing.assert_array_equal(got, want, err_msg=f"{partitioner} {program}")
    return None


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_right_types_are_accepted_and_give_the_numbers_of_one_device(partitioner):
    for rng in randoms(f"right {partitioner.value}", each=3):
        program = Program(rng)
        value = program.begun(program.argument(program.shape()))
        value = program.more(value, rng.randint(1, 6))
        program.converted(value, program.dims(2))
        errors = explained(program).errors
        assert not errors, f"{errors[0]}\n{program}"
        assert check_numbers(program, partitioner) is None, program


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_before_compiling_with_its_reason_and_line(name):
    mistake = MISTAKES[name]
    for number, rng in enumerate(randoms(name)):
        program = Program(rng)
        value = program.argument(program.shape())
        value = program.more(value, rng.randint(0, 3))
        value = program.converted(value, program.dims(2))
        reads = mistake.reads(program, value)
        wrong = program.step(name, mistake.op, reads, (), [])
        end = program.step("end", ended, [wrong], (4, 4), [[], []])
        end = program.more(end, rng.randint(0, 2))
        program.converted(end, program.dims(2))
        errors = [str(error) for error in explained(program).errors]
        assert len(errors) == 1 and mistake.says(errors[0]), f"{errors}\n{program}"
        check_numbers(program, list(mw.Partitioner)[number % 2])


def test_an_unreduced_result_is_refused():
    program = Program(random.Random(SEED))
    program.linear(program.begun(program.argument(program.shape())))
    (error,) = explained(program).errors
    assert "and a program's results are complete; reshard it to [" in str(error)
    assert check_numbers(program, mw.Partitioner.SHARDY) == str(error)


def ended(x):
    """Of any tensor, of a mistake too: a [4, 4] of which nothing is unreduced."""
    x = mw.reshard(x, MESH, [-1] * x.shape.rank)
    return tf.broadcast_to(tf.reduce_max(x), [4, 4])
