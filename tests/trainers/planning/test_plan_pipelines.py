"""What a plan says of pipelines: schedule, bubbles, recomputation, pictures."""

import functools
import json
import re
import types

import numpy as np
import pytest

from meshwright.framework.compiler.hlo.step_time import Loop
from meshwright.layers.stacks.pipelines.pipeline_schedule import (
    PipelineOrder,
    PipelineSchedule,
)
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.planning import plan_html, plan_plots
from meshwright.trainers.planning.plan_pipelines import planned_pipelines
from meshwright.trainers.planning.plan_text import plan_text
from meshwright.trainers.planning.tensorboard.plan_tensorboard import scalars
from tests import needs
from tests.trainers.planning.browser import look_at, needs_chromium
from tests.trainers.planning.search.pipelined import GIN_FILES, PARAMS
from tests.trainers.planning.test_plan_main import call_main
from tests.trainers.planning.test_plan_page import (
    DESK,
    PHONE,
    axes_of,
    check_view,
    plots,
    words,
)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Maps a topology, and bindings, to the document; JSON and page are written."""

    @functools.cache
    def run(topology, *params):
        path = tmp_path_factory.mktemp("plan") / "plan.json"
        call_main(
            *PARAMS,
            *params,
            gin_files=GIN_FILES,
            topology=topology,
            json_out=str(path),
            html_out=str(path.with_suffix(".html")),
        )
        document = json.loads(path.read_text())
        assert path.with_suffix(".html").read_text() == plan_html.page(document)
        return document

    return run


ONE_F_ONE_B = PipelineOrder.ONE_F_ONE_B


def pipeline(stages, microbatches, repeats=1, order=PipelineOrder.FORWARD_FIRST):
    """As a document has it."""
    schedule = PipelineSchedule(
        num_stages=stages,
        num_microbatches=microbatches,
        num_repeats=repeats,
        order=order,
    )
    return {
        "path": "stack",
        "num_stages": stages,
        "num_microbatches": microbatches,
        "num_repeats": repeats,
        "order": order.value,
        "iterations": schedule.iterations,
        "bubble_fraction": schedule.bubble_fraction,
        "timetable": [
            [number if is_valid else -1 for number, is_valid in zip(*row, strict=True)]
            for row in zip(
                schedule.microbatch.tolist(), schedule.valid.tolist(), strict=True
            )
        ],
        "seconds_in_bubbles": None,
    }


CIRCULAR = "Pipeline.num_repeats = 2"


def test_on_the_cpu_mesh(planned):
    document = planned("cpu", CIRCULAR)
    assert document["pipelines"] == [pipeline(2, 4, 2)]
    assert document["of_which"] is None
    row = "9 11.1% - stack 2 stages x 4 microbatches x 2 repeats"
    assert row in " ".join(plan_text(document).split())
    page = plan_html.page(document)
    assert "<td>stack</td><td>2 stages x 4 microbatches x 2 repeats</td>" in page
    assert scalars(document)["bubble_fraction/stack"] == pytest.approx(1 / 9)


@needs.libtpu
def test_on_a_pod_bubbles_and_recomputation_have_their_share(planned):
    document = planned("v3:2x2")
    parts, step = document["parts"], document["step_seconds"]
    assert sum(parts.values()) == pytest.approx(step)
    (row,) = document["pipelines"]
    bubbles, again = (document["of_which"][x] for x in ("in bubbles", "recomputed"))
    assert row | {"seconds_in_bubbles": None} == pipeline(2, 4)
    assert row["seconds_in_bubbles"] == bubbles
    # One of 5 iterations is a bubble, and nearly all time goes to the loops; the layers
    # take a third of theirs again, outside of bubbles.
    assert 0.9 * 0.2 < bubbles / step < 0.2
    assert 0.8 * 0.25 * 0.8 < again / step < 0.8 * 0.25
    lines = [" ".join(line.split()) for line in plan_text(document).splitlines()]
    page = plan_html.page(document)
    assert f"5 20.0% {1e6 * bubbles:.0f} us stack 2 stages x 4 microbatches" in lines
    for what, took in (("in bubbles", bubbles), ("recomputed", again)):
        cells = (f"{1e6 * took:.0f} us", f"{took / step:.1%}", f"of which {what}")
        assert " ".join(cells) in lines
        time, share, name = (re.escape(cell) for cell in cells)
        assert re.search(rf"<td[^>]*>{time}</td><td[^>]*>{share}</td><td>{name}<", page)
        assert scalars(document)[f"time_of_which/{what}"] == took


@needs.libtpu
@pytest.mark.slow  # Two programs.
@pytest.mark.parametrize("saved", ["ALL_BUT_NAMED", "NOTHING"])
def test_what_is_saved_is_not_recomputed(planned, saved):
    params = [f"Repeat.recompute = %Recompute.{saved}"]
    if saved == "ALL_BUT_NAMED":
        params.append("Repeat.saved_names = ('hidden', 'query', 'key', 'value')")
    plan = planned("v3:2x2", *params)
    shares = [
        document["of_which"]["recomputed"] / document["step_seconds"]
        for document in (plan, planned("v3:2x2"))
    ]
    # What follows from positions alone is never saved.
    assert 0 < shares[0] < (0.02 if saved == "NOTHING" else 0.7 * shares[1])


def taking(seconds, layer, *loops):
    return types.SimpleNamespace(
        name="op", op_name=layer, exposed=seconds, loops=tuple(loops)
    )


SOURCES = types.SimpleNamespace(
    find=lambda name: None if name == "?" else types.SimpleNamespace(layer=name)
)


def test_a_pipelines_loops_make_its_iterations_on_its_layers_alone():
    """Neither the loop over as many steps, nor another stack's, is one."""
    task = build_experiment(GIN_FILES, PARAMS)[0].task
    steps, forward, layers = (
        Loop(name=n, trips=t) for n, t in (("s", 5), ("f", 5), ("k", 2))
    )
    backward, other = Loop(name="b", trips=5), Loop(name="o", trips=5)
    ops = [
        taking(100, "embedding", steps),
        taking(1, "stack", steps, forward),
        taking(2, "stack.attention", steps, forward, layers),
        taking(4, "", steps, backward),
        taking(8, "stack.attention", steps, backward),
        taking(16, "?", steps, backward),
        taking(32, "stacked.attention", steps, other),
    ]
    times = types.SimpleNamespace(all=lambda: iter(ops))
    (pipeline,) = planned_pipelines(task, times, SOURCES)
    assert pipeline.loops == {"f", "b"} and pipeline.loop_seconds == 31
    assert pipeline.bubble_seconds == pytest.approx(31 / 5)
    times = types.SimpleNamespace(all=lambda: iter(ops[:1]))
    (unknown,) = planned_pipelines(task, times, SOURCES)
    assert unknown.loop_seconds is unknown.bubble_seconds is None


def test_of_1f1b_the_time_of_layers_alone_is_in_proportion():
    """Four of its five iterations are in the loop that has the loss, too."""
    params = [*PARAMS, "Pipeline.order = %PipelineOrder.ONE_F_ONE_B"]
    task = build_experiment(GIN_FILES, params)[0].task
    steps, both, layers = (
        Loop(name=n, trips=t) for n, t in (("s", 4), ("b", 4), ("k", 2))
    )
    ops = [
        taking(100, "embedding", steps),
        taking(1, "stack", steps, both),
        taking(2, "stack.attention", steps, both, layers),
        taking(4, "", steps, both),
        taking(8, "softmax", steps, both),
        taking(16, "stack.attention", steps),  # A loop of one iteration is none.
    ]
    times = types.SimpleNamespace(all=lambda: iter(ops))
    (pipeline,) = planned_pipelines(task, times, SOURCES)
    assert pipeline.loops == {"b"}
    assert pipeline.loop_seconds == pytest.approx(7 * 5 / 4)
    times = types.SimpleNamespace(all=lambda: iter(ops[:1]))
    (unknown,) = planned_pipelines(task, times, SOURCES)
    assert unknown.loop_seconds is unknown.bubble_seconds is None


def test_of_1f1b_both_passes_are_drawn(planned):
    row = pipeline(2, 4, order=ONE_F_ONE_B)
    plot = schedule_plot(row, document=planned("cpu", CIRCULAR))
    assert plot.text.startswith("2 stages x 4 microbatches, 1F1B: 5 iterations, ")
    assert "the first in iteration 1: 6 iterations together" in plot.text
    axes = axes_of(plot)
    np.testing.assert_array_equal(
        cells(axes)[..., 3],
        [  # Forward and backward, by stage.
            [1, 1, 1, 1, 0, 0],
            [0, 0, 1, 1, 1, 1],
            [0, 1, 1, 1, 1, 0],
            [0, 1, 1, 1, 1, 0],
        ],
    )
    assert {(t.get_text(), t.xy) for t in axes.texts} == {
        (str(m), at) for m in range(4) for at in ((m, 0), (m + 2, 1))
    } | {(str(m), (m + 1, row)) for m in range(4) for row in (2, 3)}


def schedule_plot(pipeline, *, document):
    """The plot of a document's only pipeline."""
    return plots(document | {"pipelines": [pipeline]})["pipeline1"]


def cells(axes):
    """[stages, iterations, RGBA]."""
    (image,) = axes.images
    return np.asarray(image.get_array())


def test_a_schedule_is_drawn(planned):
    plot = schedule_plot(pipeline(2, 4), document=planned("cpu", CIRCULAR))
    assert plot.title == "Schedule of the pipeline stack: 20.0% bubbles"
    axes = axes_of(plot)
    shown = cells(axes)
    np.testing.assert_array_equal(shown[..., 3], [[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
    # A microbatch has its colour and number in every stage.
    np.testing.assert_array_equal(shown[0, :4], shown[1, 1:])
    assert len({tuple(cell) for cell in shown[0, :4]}) == 4
    assert {(t.get_text(), t.xy) for t in axes.texts} == {
        (str(m), (m + s, s)) for m in range(4) for s in range(2)
    }


def test_later_rounds_are_paler(planned):
    plot = schedule_plot(pipeline(4, 4, 2), document=planned("cpu", CIRCULAR))
    axes = axes_of(plot)
    shown = cells(axes)[0, :, :3]
    assert (shown[4:8] > shown[:4]).all()
    assert "paler: later rounds" in axes.get_xlabel()


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_wide_schedule_stays_small(planned, repeats):
    wide = pipeline(16, 128, repeats)
    plot = schedule_plot(wide, document=planned("cpu", CIRCULAR))
    axes = axes_of(plot)
    assert cells(axes).shape == (16, wide["iterations"], 4)
    assert not words(axes)
    assert len(plan_plots.svg(plot)) < 20_000 and len(plan_plots.png(plot)) < 60_000


@needs_chromium
def test_pages_with_pipelines_in_a_browser(planned, tmp_path):
    pipelines = [pipeline(4, 16), pipeline(16, 128, 2)]
    page = plan_html.page(planned("cpu", CIRCULAR) | {"pipelines": pipelines})
    look = look_at(page, tmp_path, widths=(PHONE, DESK))
    assert look.console == []
    for view in look.views:
        check_view(view)
        assert len(view.pictures) == 4 + 2
