"""What judges the matrix tells faults, and says which case is at fault."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import strategies as st

from meshwright.framework.compiler.xla.partitioner import Partitioner
from tests.operators.definitions.operators import OPERATORS
from tests.operators.definitions.use import operator
from tests.operators.judging.apart import Outcome, Verdict, judge, left_out
from tests.operators.judging.groups import Group, Judged, judged_without
from tests.operators.judging.layouts import LAYOUTS
from tests.operators.judging.printed import case_of
from tests.operators.known_failures import KNOWN_FAILURES

GOOD = case_of(
    """
    add: x + y  on mesh (X=2, Y=2)
      x: float32 [3, 4], arrives [X,_], annotated [_,Y]
      y: float32 [4], arrives [_], annotated None
      result: [3, 4], annotated None, leaves [Y,X]
    """
)


@pytest.mark.parametrize(
    ("printed", "wrong", "message"),
    [
        ("y  on", "y on", 'no case begins with .*, with two spaces before "on"'),
        ("arrives [X,_]", "arives [X,_]", "cannot read the line 'x: float32"),
        ("annotated [_,Y]", "anotated [_,Y]", "cannot read the line 'x: float32"),
        ("arrives [X,_]", "arrives [X]", "another rank than its tensor: 'x: float32"),
        ("annotated [_,Y]", "annotated [Y]", "another rank than its tensor: 'x: float"),
        ("leaves [Y,X]", "leaves [Y]", "another rank than its tensor: 'result: "),
        ("annotated None, leaves", "annotated [_], leaves", "tensor: 'result: "),
        pytest.param(str(GOOD), " ", "no case begins with ''", id="nothing"),
        ("x + y", "tf.where(x > 0)", r"tf.where.* have the shapes \(None, 2\), but a"),
        ("result: [3, 4]", "result: [3, 5]", r"x \+ y are \[3, 4\], not \[3, 5\]"),
    ],
)
def test_a_line_that_cannot_be_read_is_told(printed, wrong, message):
    with pytest.raises(ValueError, match=message):
        case_of(str(GOOD).replace(printed, wrong))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("splitt transform",),
            "have no row 'splitt transform'; did you mean 'split transform'",
        ),
        (
            "split transform",
            r"names of rows are .*: give a tuple, \('split transform',\)",
        ),
    ],
)
def test_a_row_that_no_table_has_is_refused(names, message):
    with pytest.raises(ValueError, match=message):
        judge([GOOD], Partitioner.SHARDY, without=names)
    with pytest.raises(ValueError, match=message), left_out(names):
        pass


def test_names_tell_operators_from_layouts():
    assert not OPERATORS.keys() & LAYOUTS.keys()


@pytest.mark.parametrize("name", list(OPERATORS)[::9])
def test_a_case_is_read_from_what_it_prints(name):
    group = Group(
        operator=name,
        partitioner=Partitioner.SHARDY,
        mesh=0,
        count=3,
        seed="printed",
    )
    for case in group.drawn():
        read = case_of(str(case))
        assert str(read) == str(case)
        assert read.annotated == case.annotated
        for ours, theirs in zip(read.use.values, case.use.values, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_cases_of_several_meshes_and_of_none_are_judged():
    assert judge([], Partitioner.SHARDY) == []
    text = str(GOOD).replace("(X=2, Y=2)", "(X=2, Y=4)").replace("4]", "8]")
    verdicts = judge([GOOD, case_of(text)], Partitioner.SHARDY)
    assert [verdict.outcome for verdict in verdicts] == [Outcome.RIGHT] * 2


def test_an_operator_that_is_not_there_is_told():
    with pytest.raises(ValueError, match="is called 'gathr'; did you mean 'gather'"):
        Group(
            operator="gathr", partitioner=Partitioner.SHARDY, mesh=0, count=1, seed=""
        )


def test_what_ends_a_process_is_alone_to_blame():
    name = "grouped_convolution_of_split_kernel-gspmd"
    failure = next(failure for failure in KNOWN_FAILURES if failure.name == name)
    cases = [GOOD, failure.case, GOOD]
    verdicts = judge(cases, Partitioner.GSPMD, without=failure.without)
    outcomes = [verdict.outcome for verdict in verdicts]
    assert outcomes == [Outcome.RIGHT, Outcome.ENDED, Outcome.RIGHT]
    assert verdicts[1].text == "SIGABRT"


def test_a_row_is_needed_for_what_meets_it_or_not():
    name = "gather_of_batches_split_apart-shardy"
    failure = next(failure for failure in KNOWN_FAILURES if failure.name == name)
    group = Group(
        operator="gather", partitioner=Partitioner.SHARDY, mesh=0, count=1, seed=""
    )
    right = Verdict(Outcome.RIGHT)
    needed = Judged(group=group, case=failure.case, verdict=right)
    row = failure.fault.name
    assert judged_without(needed, row).verdict.outcome is Outcome.WRONG
    assert judged_without(Judged(group=group, case=GOOD, verdict=right), row) is None


def test_an_expression_that_tf_refuses_is_the_tests_own_error():
    use = dataclasses.replace(GOOD.use, expression="tf.concat([x, y], 5)")
    (verdict,) = judge([dataclasses.replace(GOOD, use=use)], Partitioner.SHARDY)
    assert verdict.outcome is Outcome.FAILED and verdict.outcome.is_fault
    assert "concat" in verdict.text


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        (
            "tf.ensure_shape(tf.numpy_function(abs, [x], x.dtype), x.shape)",
            "it has no kernel for",
        ),
        ("tf.raw_ops.InfeedDequeue(dtype=tf.float32, shape=[3, 4])", "InfeedDequeue"),
    ],
)
def test_an_op_without_a_kernel_has_an_outcome_of_its_own(expression, says):
    use = dataclasses.replace(GOOD.use, expression=expression, differentiable=False)
    (verdict,) = judge([dataclasses.replace(GOOD, use=use)], Partitioner.SHARDY)
    assert verdict.outcome is Outcome.NO_KERNEL and verdict.outcome.is_fault
    assert says in verdict.text


def test_what_an_operator_draws_wrongly_names_it_and_the_remedy(monkeypatch):
    wrong = dataclasses.replace(GOOD.use, expression="tf.matmul(x, y)")
    monkeypatch.setitem(OPERATORS, "where", st.just(wrong))
    group = Group(
        operator="where", partitioner=Partitioner.SHARDY, mesh=0, count=1, seed=""
    )
    message = (
        r"operator 'where': TF does not take tf.matmul\(x, y\) of x: \w+ \[3, 4\], "
        r"y: \w+ \[4\] \(ValueError: .*\): correct the expression, or the shapes"
    )
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        group.drawn()


def test_an_operator_is_defined_once():
    def where(draw):
        pass

    message = (
        r"^pointwise\.py:\d+ and test_judging\.py:\d+ both define operator 'where'"
    )
    with pytest.raises(ValueError, match=message):
        operator(where)


@pytest.mark.parametrize("at", ["results", "gradients"])
def test_one_element_that_is_off_is_a_fault(at):
    want = {"results": [np.ones([3, 4])], "gradients": [np.ones([3, 4]), np.ones([4])]}
    got = {name: [array.copy() for array in arrays] for name, arrays in want.items()}
    assert GOOD.complaint(got, want) is None
    got[at][0][2, 1] += 3e-5
    complaint = GOOD.complaint(got, want)
    assert complaint.startswith(f"{at}[0]: 1 of 12 elements are off by more than 1e-05")
    got[at][0][2, 1] = np.nan
    assert "(2, 1): nan instead of 1.0" in GOOD.complaint(got, want)


def test_halves_are_judged_by_their_digits():
    case = dataclasses.replace(GOOD, use=GOOD.use.in_format("bfloat16"))
    assert case.tolerance == 8 * 2.0**-7
    assert {v.dtype.name for v in case.use.values} == {"bfloat16"}
    for values in case.use.values:
        assert len(set(values.astype("f4").flat)) == values.size
