"""Schedules: against reference tables, and by their formulas.

The tables of tests/data/pipeline_schedules.json are another implementation's
(lingvo 0.14.2, LayerwiseShardablePipelinedLayer).
"""

import json
import pathlib

import numpy as np
import pytest

from meshwright.layers.stacks.pipelines.pipeline_schedule import (
    PipelineOrder,
    PipelineSchedule,
)

DATA = pathlib.Path(__file__).parents[3] / "data"
TABLES = json.loads((DATA / "pipeline_schedules.json").read_text())["tables"]


def schedule(stages, microbatches, repeats=1, order=PipelineOrder.FORWARD_FIRST):
    return PipelineSchedule(
        num_stages=stages,
        num_microbatches=microbatches,
        num_repeats=repeats,
        order=order,
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


def check(pipeline):
    """Checks the tables of any schedule; returns the most activations of a stage.

    A pass takes an iteration of one stage, after the pass whose result it takes, which
    arrives in the next iteration; a stage has at most one pass forward and one backward
    in an iteration. What a forward pass saves is kept until its backward pass is done.
    """
    visits = range(pipeline.num_stages * pipeline.num_repeats)
    forward = _places(pipeline, start=0)
    backward = _places(pipeline.backward, start=pipeline.backward_start)
    kept = np.zeros([int(backward[:, 0].max()) + 1, pipeline.num_stages], int)
    for m in range(pipeline.num_microbatches):
        np.testing.assert_array_equal(np.diff(forward[m]), 1)
        np.testing.assert_array_equal(np.diff(backward[m]), -1)
        assert backward[m, -1] >= forward[m, -1]
        for visit in visits:
            stage = visit % pipeline.num_stages
            kept[forward[m, visit] : backward[m, visit] + 1, stage] += 1
    return kept.max()


def _places(tables, start):
    """[microbatches, visits]: the iteration of each pass, of which there is one."""
    visits = tables.num_stages * tables.num_repeats
    places = np.full([tables.num_microbatches, visits], -1)
    for t, s in np.argwhere(tables.valid):
        at = tables.microbatch[t, s], tables.repeat[t, s] * tables.num_stages + s
        assert places[at] == -1
        places[at] = start + t
    assert (places >= 0).all()
    return places


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", PipelineOrder)
def test_every_microbatch_passes_the_stages_in_turn(shape, order):
    stages, microbatches, repeats = shape
    pipeline = schedule(*shape, order)
    kept = check(pipeline)
    if order is PipelineOrder.ONE_F_ONE_B:
        assert kept <= pipeline.kept_passes <= kept + 1  # One for bubbles.
        if repeats == 1:
            assert kept == min(2 * stages - 1, microbatches)
    else:
        assert kept == microbatches * repeats
    assert pipeline.bubble_fraction == schedule(*shape).bubble_fraction
    for tables in (pipeline, pipeline.backward):
        assert tables.valid.mean() == pytest.approx(1 - pipeline.bubble_fraction)


def test_1f1b_keeps_microbatches_until_they_have_come_back():
    """The first stage keeps one until it has passed the last one and come back."""
    assert check(schedule(8, 32)) == 32
    for repeats, most in ((1, 15), (2, 23), (4, 39)):
        made = schedule(8, 32, repeats, PipelineOrder.ONE_F_ONE_B)
        assert check(made) == made.kept_passes == most


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_pass_keeps_stays_until_it_is_read(shape):
    pipeline = schedule(*shape, PipelineOrder.ONE_F_ONE_B)
    written, read = pipeline.kept_at
    for stage in range(pipeline.num_stages):
        place = {}
        for t in range(pipeline.iterations + pipeline.backward_start):
            if t < pipeline.iterations:
                one = pipeline.microbatch[t, stage], pipeline.repeat[t, stage]
                place[written[t, stage]] = one if pipeline.valid[t, stage] else None
            u, back = t - pipeline.backward_start, pipeline.backward
            if u >= 0 and back.valid[u, stage]:
                one = back.microbatch[u, stage], back.repeat[u, stage]
                assert place[read[u, stage]] == one


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
