"""Parts of arrays that are turned and shaped anew: right, and read no further."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.trainers.checkpoints.checkpoint_parts import read_part
from meshwright.trainers.checkpoints.checkpoint_rules import Change

TURN, SHAPE = Change.TRANSPOSE, Change.RESHAPE


class Counted:
    """An array that counts the elements that are read."""

    def __init__(self, array):
        self.array, self.read = array, 0

    def __getitem__(self, index):
        part = self.array[index]
        self.read += part.size
        return part


def changed(array, changes, shape):
    return (array.T if TURN in changes else array).reshape(shape)


@st.composite
def cases(draw):
    """A shape, the shape it is of, changes and bounds; some shapes have no runs."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    merged, rest = [], list(shape)
    while rest:
        count = draw(st.integers(1, len(rest)))
        merged.append(int(np.prod(rest[:count])))
        rest = rest[count:]
    ones = draw(st.integers(0, 1))
    source = draw(st.sampled_from([merged, [*[1] * ones, *merged], shape[::-1]]))
    bounds = []
    for size in shape:
        first = draw(st.integers(0, size - 1))
        bounds.append((first, draw(st.integers(first + 1, size))))
    is_turned = draw(st.booleans())
    return source[::-1] if is_turned else source, is_turned, shape, bounds


@settings(deadline=None, max_examples=300)
@given(cases())
def test_any_part_is_that_of_the_whole(case):
    source, is_turned, shape, bounds = case
    array = np.arange(np.prod(source)).reshape(source)
    changes = (TURN, SHAPE) if is_turned else (SHAPE,)
    part = read_part(array, source, changes, shape, bounds)
    cut = tuple(slice(*ends) for ends in bounds)
    np.testing.assert_array_equal(part, changed(array, changes, shape)[cut])


@pytest.mark.parametrize(
    ("source", "changes", "shape", "bounds"),
    [
        ((32, 16), (TURN, SHAPE), (16, 4, 8), [(4, 8), (1, 3), (0, 8)]),
        ((16, 32), (TURN, SHAPE), (4, 8, 16), [(2, 3), (0, 8), (0, 5)]),
        ((24, 16), (TURN,), (16, 24), [(8, 16), (12, 18)]),
        ((32,), (SHAPE,), (4, 8), [(1, 2), (0, 8)]),
        ((5,), (), (5,), [(2, 4)]),
        ((), (), (), []),
    ],
)
def test_no_more_than_the_part_is_read(source, changes, shape, bounds):
    array = Counted(np.arange(np.prod(source)).reshape(source))
    part = read_part(array, source, changes, shape, bounds)
    assert array.read == part.size
    whole = changed(array.array, changes, shape)
    cut = tuple(slice(*ends) for ends in bounds)
    np.testing.assert_array_equal(part, whole[cut])
