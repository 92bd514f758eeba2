"""The weight-update benchmark: its memory formula, its table, and a run in small."""

import pathlib
import types

import pytest

FOLDER = pathlib.Path(__file__).parents[3] / "benchmarks" / "step_times"


@pytest.fixture(scope="module")
def benchmark():
    """The script, which imports its neighbours as scripts do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        import weight_update

        yield weight_update


def test_a_sharded_model_trains_alike_in_less_memory(benchmark):
    model = benchmark.MODELS["smallest"]
    results = benchmark.compare(model, ["all"], rounds=2, steps=1)
    assert list(results) == ["off", "all"]
    for result in results.values():
        assert len(result.turns) == 2
        assert all(turn.wall > 0 and turn.cpu > 0 for turn in result.turns)
    off, sharded = (result.memory for result in results.values())
    tables, perceptron, scores = 2 * (4096 + 2048) * 8, 16 * 8 + 8, 8 + 8 + 1
    for result in (off, sharded):
        assert result.weights == 4 * (tables + perceptron + scores)
        assert result.slots == 2 * result.weights  # Adam's.
    # Two of a batch's 16 pairs, a number each of user, item, label and weight; a step.
    assert off.arguments == off.weights + off.slots + 4 * (2 * 4) + 4
    assert sharded.arguments >= sharded.weights + sharded.slots // benchmark.DEVICES
    assert sharded.arguments < off.arguments - 0.99 * off.slots * 7 / 8
    assert sharded.peak <= off.promised() < off.peak


@pytest.mark.parametrize(
    "peak,want", [(100 + 200 + 300, 100 + 25 + 300), (100 + 200 + 40, 100 + 200)]
)
def test_the_formula_is_the_papers(benchmark, peak, want):
    off = benchmark.Memory(weights=100, slots=200, arguments=310, peak=peak)
    assert off.promised() == want


def made_up(benchmark):
    """What might have been measured."""

    def result(seconds, peak):
        turns = [benchmark.Turn(wall=wall, cpu=2 * wall) for wall in seconds]
        memory = benchmark.Memory(
            weights=8_000_000, slots=16_000_000, arguments=25_000_000, peak=peak
        )
        return benchmark.Found(turns=turns, memory=memory)

    return {
        "off": result([1.0, 4.0, 2.0], 40_000_000),
        "all": result([0.5, 1.0, 3.0], 24_500_000),
    }


def give_flags(benchmark, patch, **given):
    """Gives flags."""
    given = {"rounds": 3, "steps": None, "modes": ["all"], "models": ["ncf"], **given}
    values = types.SimpleNamespace(**given)
    patch.setattr(benchmark, "flags", types.SimpleNamespace(FLAGS=values))


def test_the_table_has_medians_and_the_ratios_of_rounds(benchmark, monkeypatch, capsys):
    give_flags(benchmark, monkeypatch)
    monkeypatch.setattr(benchmark, "compare", lambda *_: made_up(benchmark))
    benchmark.main(["weight_update.py"])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    off, sharded = (line.split() for line in lines[-3:-1])
    assert off == ["ncf", "off", "4.0000", "2.0000", "25.0", "40.0", "40.0"]
    # Of rounds 0.5, 0.25 and 1.5; the peak promised is 8 + 16 / 8 + 16.
    assert sharded[:5] == ["all", "2.0000", "1.0000", "0.50", "0.50"]
    assert sharded[5:] == ["25.0", "24.5", "26.0"]
    assert lines[-1] == "  MB: W 8.0, V 16.0, P 16.0"


def test_modes_that_train_otherwise_are_not_compared(benchmark):
    benchmark.check_losses("all", [1.0, 0.5], [1.0, 0.50001])
    with pytest.raises(ValueError, match='"all" does not train as "off" .* at step 1'):
        benchmark.check_losses("all", [1.0, 0.5], [1.0, 0.6])
    with pytest.raises(ValueError, match="at step 0"):
        benchmark.check_losses("all", [float("nan")], [1.0])


@pytest.mark.parametrize(
    "given,message",
    [
        ({"modes": ["all", "some"]}, "--modes: 'some' is none of all, auto"),
        ({"models": ["bert"]}, "--models: 'bert' is none of resnet, transformer, ncf"),
    ],
)
def test_what_is_unknown_is_told(benchmark, monkeypatch, given, message):
    give_flags(benchmark, monkeypatch, **given)
    with pytest.raises(SystemExit, match=f"weight_update.py: {message}"):
        benchmark.main(["weight_update.py"])
