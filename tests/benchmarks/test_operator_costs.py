"""GShard's table of operator costs, row by row, under both partitioners."""

import functools

import pytest

from benchmarks import operator_costs
from benchmarks.operator_costs import OPERATORS
from meshwright.framework.compiler.xla.partitioner import Partitioner

COUNTS = (2, 8)
# Collectives of a row, and the float32 elements of their results on one of D devices.
EXPECTED = {
    "Add(A*,A*->A*)": ({}, lambda D: 0),
    "Matmul(AB*,B*C->AC)": ({"all-reduce": 1}, lambda D: 16 * 16),
    "Matmul(A*B,BC->A*C)": ({}, lambda D: 0),
    "Matmul(A*B,B*C->A*C)": ({"all-gather": 1}, lambda D: 16 * D * 16),
    "Matmul(A*B,BC*->A*C)": ({"all-gather": 1}, lambda D: 16 * 16 * D),
    "Reduce(A*B->A*)": ({}, lambda D: 0),
    "Reduce(A*B->B)": ({"all-reduce": 1}, lambda D: 16),
    # An expert takes 64 / D tokens of 16 numbers from each of D groups.
    "Einsum(G*SEC,G*SM->E*GCM)": ({"all-to-all": 1}, lambda D: 64 * 16),
    "Einsum(G*SEC,E*GCM->G*SM)": ({"all-to-all": 1}, lambda D: 64 * 16),
    # A row of 2 x 16 x 4 from each neighbour.
    "Convolution(BX*YI,xyIO->BX*YO)": ({"collective-permute": 2}, lambda D: 2 * 128),
}


@functools.cache
def costs(name, partitioner):
    (operator,) = [o for o in OPERATORS if o.name == name]
    return {n: operator_costs.cost(operator, n, partitioner) for n in COUNTS}


@pytest.mark.parametrize("partitioner", Partitioner)
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.name)
def test_operator_costs_what_the_paper_says(operator, partitioner):
    kinds, elements = EXPECTED[operator.name]
    costs_by_size = costs(operator.name, partitioner)
    for n, cost in costs_by_size.items():
        assert cost.kinds == kinds
        assert cost.bytes == 4 * elements(n)
    grows = operator_costs.growth(COUNTS, [c.bytes for c in costs_by_size.values()])
    claim, *claimed_kinds = operator.communication.split()
    assert grows == claim
    assert {operator_costs.KINDS[kind] for kind in kinds} <= set(claimed_kinds)
    flops = [c.flops for c in costs_by_size.values()]
    assert operator_costs.growth(COUNTS, flops) == operator.compute


def test_table():
    lines = operator_costs.table(
        {o.name: costs(o.name, Partitioner.SHARDY) for o in OPERATORS}
    )
    assert len(lines) == 3 + len(OPERATORS)
    assert lines[1].split() == (
        ["operator", "O(D)", "found", "paper", "D=2", "D=8", "by", "found", "paper"]
    )
    gathered = next(line for line in lines if line.startswith("Matmul(A*B,B*C"))
    assert gathered.split("  ")[0] == "Matmul(A*B,B*C->A*C)"
    assert gathered.endswith("   2048   8192  1 AG  O(D)   O(D) AG or CP")


@pytest.mark.parametrize(
    "values,expected",
    [
        ([0, 0, 0], "0"),
        ([5, 5, 5], "O(1)"),
        ([2, 4, 8], "O(D)"),
        ([2, 3, 8], "8/2"),
        ([0, 0, 8], "8/0"),
    ],
)
def test_growth(values, expected):
    assert operator_costs.growth([2, 4, 8], values) == expected


@pytest.mark.parametrize("texts", [["3", "4"], ["2"], ["2", "2"], ["1", "2"], ["x"]])
def test_device_counts_that_show_no_growth_are_an_error(texts):
    with pytest.raises(ValueError, match="give two or more numbers of .2, 4, 8, 16"):
        operator_costs.device_counts(texts)


def test_device_counts_are_sorted():
    assert operator_costs.device_counts(["8", "2"]) == [2, 8]
