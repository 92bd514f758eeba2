"""The benchmark of Keras's `fit`: programs that train alike, and the table."""

import importlib
import pathlib

import pytest

STEP_TIMES = pathlib.Path(__file__).parents[3] / "benchmarks" / "step_times"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(STEP_TIMES)
    return importlib.import_module("keras_fit")


@pytest.mark.parametrize("layout", ["data", "tensor"])
def test_keras_layers_train_as_ours(benchmark, layout):
    programs = benchmark.step_programs("smallest", "2x4", layout)
    trained = [
        benchmark.train(variant, programs, layout, steps=2)
        for variant in ("layers", "fit", "keras")
    ]
    assert len({run.weights for run in trained}) == 1
    losses = {str(number): run.losses for number, run in enumerate(trained)}
    assert len(losses["0"]) == benchmark.CHECKED_STEPS
    benchmark.interleave.loss_difference(losses, benchmark.LOSS_TOLERANCE)
    for run in trained:
        run.epoch()


def test_the_table_has_medians_and_the_ratios_of_rounds(benchmark):
    turn = benchmark.interleave.Turn
    fit = [turn(cpu=1.0, wall=2.0), turn(cpu=3.0, wall=4.0), turn(cpu=2.0, wall=3.0)]
    layers = [turn(cpu=2.0, wall=2.0), turn(cpu=2.0, wall=8.0), turn(cpu=1.0, wall=1.0)]
    turns = {("fit", "tensor"): fit, ("layers", "tensor"): layers}
    comparison = benchmark.Comparison(
        turns=turns, loss_difference=0.0, weights=10, versions={}
    )
    rows = benchmark.table_rows("tiny", "2x4", comparison)
    assert all(len(line) <= 80 for line in [*benchmark.HEADER.splitlines(), *rows])
    first, second = (row.split() for row in rows)
    assert first == [
        "tiny",
        "2x4",
        "tensor",
        "fit",
        "on",
        "the",
        "mesh",
        "2.0000",
        "3.0000",
    ]
    assert second == ["our", "layers", "2.0000", "2.0000", "1.50", "1.00"]


def test_one_device_has_one_layout_and_keras_as_it_is(benchmark):
    assert [*benchmark.programs_of("1x1", ["data", "tensor"])] == [
        ("fit", "data"),
        ("layers", "data"),
        ("keras", "data"),
    ]
    assert [*benchmark.programs_of("2x4", ["data", "tensor"])] == [
        ("fit", "data"),
        ("layers", "data"),
        ("fit", "tensor"),
        ("layers", "tensor"),
    ]
