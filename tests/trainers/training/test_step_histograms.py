"""Histograms of weights and gradients: of the global tensors, and what is written."""

import functools
import time

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import (
    EventMultiplexer,
)
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.histogram.histograms_plugin import HistogramsPlugin

from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.tensorboard.summaries import Summaries
from meshwright.trainers.training.step_histograms import write_histograms
from tests.trainers.parity import initial_state, random_batches, small_experiment
from tests.trainers.small_run import (
    five_steps_a_loop,
    points,
    saved_state,
    small_programs,
    train,
)

# Gradients differ by how they are added up, relative to their largest.
CLOSE = 1e-5


def even_batches(experiment):
    """All tokens count, so that microbatches do alike."""
    (batches,) = random_batches(experiment, 1)
    return batches.map_with_path(
        lambda path, x: np.ones_like(x) if path == "weights" else x
    )


def tensors_by_tf(experiment):
    """What the first step's histograms are of, by TF on one device."""
    start, batches = initial_state(experiment), even_batches(experiment)
    programs = StepPrograms(experiment)
    step = tf.function(
        lambda *args: programs.step_gradients(*args).gradients, autograph=False
    )
    held = NestedMap(step=start.step, theta=start.theta).map(tf.constant)
    gradients = step(held, batches.map(lambda x: tf.constant(x[0])))
    tensors = {f"weights/{p}": x for p, x in start.theta.items_by_path()}
    return tensors | {f"gradients/{p}": x.numpy() for p, x in gradients.items_by_path()}


def histograms(experiment):
    """Edges and counts by tag, of the first step."""
    programs, start = StepPrograms(experiment), initial_state(experiment)
    held, batches = TrainState(programs, start).stored(), even_batches(experiment)
    out = programs.histograms(NestedMap(step=held.step, theta=held.theta), batches)
    assert not np.asarray(out.not_finite).any()
    rows = zip(np.asarray(out.edges), np.asarray(out.counts), strict=True)
    return dict(zip(programs.histogram_tags, rows, strict=True))


def assert_histogram_of(values, edges, counts, *, slack):
    """Counts are those of `values`, each of which may be `slack` larger or smaller."""
    low, high = values.min(), values.max()
    assert abs(edges[0] - low) <= slack and abs(edges[-1] - high) <= slack
    np.testing.assert_allclose(
        edges, np.linspace(low, high, len(edges)), rtol=0, atol=slack + 1e-6 * high
    )
    assert counts.sum() == values.size
    ordered = np.sort(values, axis=None)
    below = np.cumsum(counts)[:-1]
    assert (below >= np.searchsorted(ordered, edges[1:-1] - slack)).all()
    assert (below <= np.searchsorted(ordered, edges[1:-1] + slack)).all()


PIPELINE = (
    "NUM_LAYERS = 4",
    "include 'lm/pipeline.gin'",
    "include 'plans/pipeline.gin'",
    "NUM_STAGES = 2",
    "NUM_MICROBATCHES = 4",
)
UPDATES = "Experiment.weight_update_sharding = 'all'"
# The plan; the mesh, and what else is not so on one device; what is so on both.
CASES = {
    "data": ("data", "(8,)", [UPDATES], []),
    "uneven": ("finalized", "(1, 3)", [], []),
    "finalized": ("finalized", "(2, 4)", [UPDATES], []),
    "accumulated": (
        "finalized",
        "(2, 4)",
        ["Experiment.gradient_accumulation_steps = 2"],
        ["Experiment.global_batch = 16"],
    ),
    "pipeline": ("finalized", "(2, 2, 2)", [], PIPELINE),
}


@pytest.mark.parametrize(
    "case,partitioner",
    [
        ("data", "GSPMD"),
        ("uneven", "SHARDY"),
        ("finalized", "SHARDY"),
        ("accumulated", "GSPMD"),
        ("pipeline", "SHARDY"),
        pytest.param("pipeline", "GSPMD", marks=pytest.mark.slow),
    ],
)
def test_counts_on_a_mesh_are_of_all_of_each_tensor(case, partitioner):
    plan, mesh, params, both = CASES[case]
    alone = ", ".join("1" for n in mesh if n.isdigit())
    one_device = small_experiment(*both, f"MESH_SHAPE = ({alone},)", plan=plan)
    params = [*params, f"Experiment.partitioner = %Partitioner.{partitioner}"]
    many = small_experiment(*both, f"MESH_SHAPE = {mesh}", *params, plan=plan)
    want, got = tensors_by_tf(one_device), histograms(many)
    assert got.keys() == want.keys()
    for tag, (edges, counts) in got.items():
        values = want[tag]
        slack = CLOSE * np.abs(values).max() if tag.startswith("gradients") else 0.0
        assert_histogram_of(values, edges, counts, slack=slack)


def tensorboard_tab(folder):
    """(step, buckets) by tag, as TensorBoard's histograms tab asks for them."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    tab = HistogramsPlugin(TBContext(data_provider=provider))
    context = RequestContext()
    tags = tab.index_impl(context, experiment="")["train"]
    return {
        tag: [
            (step, np.array(buckets))
            for _, step, buckets in tab.histograms_impl(context, tag, "train", "")[0]
        ]
        for tag in tags
    }


def assert_of_saved_weights(folder):
    """Step 6's counts are those of the weights that step 5 saved."""
    tab, state = tensorboard_tab(folder), saved_state(small_programs(), folder, 5)
    for tag in ("weights/embedding.table", "weights/stack.attention.w_q"):
        buckets = dict(tab[tag])[6]
        edges = np.append(buckets[:, 0], buckets[-1, 1])
        values = state[tag.replace("weights/", "theta.")]
        np.testing.assert_array_equal(buckets[:, 2], np.histogram(values, edges)[0])


@functools.cache
def programs():
    small_programs().histograms  # noqa: B018  # Compiled once, for all copies.
    return small_programs()


def test_a_run_writes_them_and_trains_to_the_same_bits(straight, tmp_path):
    result = train(programs(), tmp_path, histogram_interval=6)
    assert result.losses == straight()[0].losses
    tab = tensorboard_tab(tmp_path)
    assert tab.keys() == set(programs().histogram_tags)
    for tag, histograms in tab.items():
        assert [step for step, _ in histograms] == [6, 12, 18], tag
    assert_of_saved_weights(tmp_path)


def test_a_compiled_loop_shows_its_first_step(tmp_path):
    train(five_steps_a_loop(), tmp_path / "loop", num_steps=10, histogram_interval=10)
    train(programs(), tmp_path / "steps", num_steps=6, histogram_interval=6)
    looped, plain = (tensorboard_tab(tmp_path / name) for name in ("loop", "steps"))
    assert looped.keys() == plain.keys()
    for tag, histograms in plain.items():
        assert [step for step, _ in looped[tag]] == [6]
        (_, want), (_, got) = *histograms, *looped[tag]
        # Five steps of Adam have rounded differently.
        np.testing.assert_allclose(got[:, :2], want[:, :2], rtol=1e-3, atol=1e-4)


def test_what_is_not_finite_is_named(tmp_path, caplog):
    state = TrainState.initial(programs())
    state.stored().theta.final_norm.scale += np.float32(np.inf)
    (batches,) = random_batches(programs().experiment, 1)
    summaries = Summaries(str(tmp_path), "train")
    write_histograms(programs(), summaries, state, batches)
    summaries.close()
    tags = programs().histogram_tags
    gradients = [tag for tag in tags if tag.startswith("gradients/")]
    assert (
        "step 1: histograms leave out values that are not finite: 16 of "
        "weights/final_norm.scale, 4224 of gradients/embedding.table, 16 of "
        f"gradients/final_norm.scale and of {len(gradients) - 2} more"
    ) in caplog.text
    tab = tensorboard_tab(tmp_path)
    ((step, buckets),) = tab["weights/final_norm.scale"]
    assert step == 1 and not buckets.any()


def test_the_first_of_a_resumed_run_replaces_later_points(tmp_path):
    """As a curve's point does: the run before had gone on after its checkpoint."""
    for run in range(2):
        summaries = Summaries(str(tmp_path), "train")
        for step in (5, 10, 15)[run : 3 - run]:
            summaries.histograms(step, {"weights/w": np.float32([[0, 1, run]])})
            summaries.scalars(step, {"loss": run})
        summaries.close()
        time.sleep(1 - time.time() % 1)  # Event files are ordered by the second.
    (histograms,) = tensorboard_tab(tmp_path).values()
    assert [(step, buckets[0, 2]) for step, buckets in histograms] == [(5, 0), (10, 1)]
    assert points(tmp_path, "train")["loss"] == [(5, 0), (10, 1)]
