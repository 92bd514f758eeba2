"""Schedules: against reference tables, and by their formulas.

The tables of tests/data/pipeline_schedules.json are another implementation's
(lingvo 0.14.2, LayerwiseShardablePipelinedLayer).
"""

import json
import pathlib

import numpy as np
import pytest

from meshwright.layers.stacks.pipelines.pipeline_schedule import PipelineSchedule

DATA = pathlib.Path(__file__).parents[2] / "data"
TABLES = json.loads((DATA / "pipeline_schedules.json").read_text())["tables"]


def schedule(stages, microbatches, repeats=1):
    return PipelineSchedule(
        num_stages=stages, num_microbatches=microbatches, num_repeats=repeats
    )


@pytest.mark.parametrize("table", TABLES)
def test_equals_the_reference(table):
    pipeline = schedule(
        table["num_stages"], table["num_microbatches"], table["circular_repeat"]
    )
    assert pipeline.iterations == table["iterations"]
    assert pipeline.bubble_fraction == pytest.approx(table["bubble_fraction"])
    np.testing.assert_array_equal(pipeline.microbatch, table["microbatch_id"])
    np.testing.assert_array_equal(pipeline.repeat, table["repeat_id"])
    np.testing.assert_array_equal(pipeline.valid, np.array(table["valid"], bool))
    taken = pipeline.takes_input & pipeline.valid[:, 0]
    first = np.where(taken, pipeline.microbatch[:, 0] + 1, 0)
    np.testing.assert_array_equal(first, table["padded_input_1based_stage0"])


SHAPES = [(1, 1, 1), (1, 5, 3), (2, 7, 1), (4, 4, 2), (4, 8, 4), (8, 16, 4), (3, 5, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_microbatch_passes_the_stages_in_turn(shape):
    stages, microbatches, repeats = shape
    pipeline = schedule(*shape)
    place = {}
    for t in range(pipeline.iterations):
        for s in np.flatnonzero(pipeline.valid[t]):
            key = (pipeline.microbatch[t, s], pipeline.repeat[t, s] * stages + s)
            assert key not in place
            place[key] = t
    for m in range(microbatches):
        times = [place.pop((m, visit)) for visit in range(stages * repeats)]
        np.testing.assert_array_equal(np.diff(times), 1)
    assert not place


@pytest.mark.parametrize("shape", SHAPES)
def test_stages_are_on_two_rounds_at_most(shape):
    pipeline = schedule(*shape)
    rounds = np.stack(pipeline.rounds, axis=1)
    assert (pipeline.repeat[:, :, None] == rounds[:, None]).any(axis=2).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_iterations_and_bubbles_are_the_papers(shape):
    """GSPMD 3.3, where microbatches fill the rounds."""
    stages, microbatches, repeats = shape
    pipeline = schedule(*shape)
    if repeats == 1 or microbatches % stages == 0:
        assert pipeline.iterations == repeats * microbatches + stages - 1
        share = (stages - 1) / pipeline.iterations
        assert pipeline.bubble_fraction == pytest.approx(share)
    else:
        assert pipeline.bubble_fraction > (stages - 1) / pipeline.iterations


def test_what_goes_in_comes_out():
    grid = schedule(4, 6, 2)
    ins = grid.microbatch[grid.takes_input & grid.valid[:, 0], 0]
    outs = grid.microbatch[grid.gives_output, -1]
    np.testing.assert_array_equal(ins, range(6))
    np.testing.assert_array_equal(outs, range(6))
    # What does not go round again is given.
    last = grid.valid[:, -1]
    np.testing.assert_array_equal(grid.comes_round[last], ~grid.gives_output[last])


@pytest.mark.parametrize("name", ["num_stages", "num_microbatches", "num_repeats"])
def test_numbers_below_one_are_refused(name):
    sizes = {"num_stages": 2, "num_microbatches": 2, "num_repeats": 2, name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0; it must be a whole number"):
        PipelineSchedule(**sizes)
