"""What TensorBoard reads back: every curve, right steps, nothing twice."""

import dataclasses
import logging
import pathlib
import resource
import shutil
import time

import jax
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from meshwright.trainers.planning.tensorboard.summaries import Summaries, heat_map
from meshwright.trainers.training import loop, progress, saved_config
from tests.trainers.small_run import at, points, saved_steps, small_programs, train

STEPS = [5, 10, 15, 20]


def steps_of(curves, tag):
    return [step for step, _ in curves[tag]]


def next_second():
    """Event files are ordered by the second in their names."""
    time.sleep(1 - time.time() % 1)


def test_training_curves(straight):
    result, folder = straight()
    curves = points(folder, "train")
    ((step, text),) = curves.pop("gin config")
    assert step == 0
    assert "Experiment.num_steps = 20" in text
    ((step, text),) = curves.pop("left replicated")
    assert step == 0
    assert "| theta.final_norm.scale | ShardingPlan.weights names no axis" in text
    ((step, text),) = curves.pop("weight-update sharding")
    assert step == 0
    assert "| theta.final_norm.scale | [16] | left alone: " in text
    assert curves.keys() == {
        "loss",
        "metrics/bits_per_byte",
        "optimizer/learning_rate",
        "optimizer/grad_norm",
        "optimizer/weight_norm",
        "speed/step_time_s",
        "run/goodput",
        "speed/tokens_per_s",
    }
    assert all(0 < value < 1 for _, value in curves["run/goodput"])
    for tag, curve in curves.items():
        assert [step for step, _ in curve] == STEPS, tag
    values = {tag: np.array([v for _, v in curve]) for tag, curve in curves.items()}
    np.testing.assert_allclose(
        values["loss"], [result.losses[step] for step in STEPS], rtol=1e-6
    )
    bits = values["metrics/bits_per_byte"]
    np.testing.assert_allclose(bits * np.log(2), values["loss"])
    np.testing.assert_allclose(values["optimizer/learning_rate"], 0.01)
    assert (values["optimizer/grad_norm"] > 0).all()
    assert (values["optimizer/weight_norm"] > 0).all()
    np.testing.assert_allclose(
        values["speed/tokens_per_s"] * values["speed/step_time_s"], 8 * 8, rtol=1e-5
    )


def test_utilization_is_shown_where_the_peak_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "peak_flops", lambda device_count: 1e15)
    programs = small_programs()
    train(programs, tmp_path, num_steps=5)
    curves = points(tmp_path, "train")
    ((_, utilization),) = curves["speed/model_flops_utilization"]
    ((_, seconds),) = curves["speed/step_time_s"]
    flops = programs.experiment.task.train_flops(8)
    assert utilization == pytest.approx(flops / seconds / 1e15)


def test_a_row_of_hyperparameters(tmp_path):
    config = "Experiment.seed = 7\nAdam.learning_rate = @LinearWarmup()\n"
    saved_config.write_hyperparameters(str(tmp_path), config)
    events = EventAccumulator(str(tmp_path)).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info")
    row = HParamsPluginData.FromString(content.plugin_data.content).session_start_info
    assert row.hparams["Experiment.seed"].number_value == 7
    assert row.hparams["Adam.learning_rate"].string_value == "@LinearWarmup()"


def test_evaluation_curves(straight):
    result, folder = straight()
    curves = points(folder, "eval")
    assert curves.keys() == {"loss", "metrics/bits_per_byte"}
    assert steps_of(curves, "loss") == [10, 20]
    assert curves["loss"][-1][1] == pytest.approx(result.evaluation["loss"])


def test_resumed_run_goes_on_where_it_was(straight, tmp_path):
    train(small_programs(), tmp_path, num_steps=10)
    next_second()
    train(small_programs(), tmp_path)
    next_second()
    train(small_programs(), tmp_path)  # Only evaluates.
    want = points(straight()[1], "train")
    curves = points(tmp_path, "train")
    assert steps_of(curves, "gin config") == [0, 10, 20]
    norms = ("optimizer/grad_norm", "optimizer/weight_norm")
    for tag in ("loss", *norms, "optimizer/learning_rate"):
        assert curves[tag] == want[tag]
    assert points(tmp_path, "eval") == points(straight()[1], "eval")


def test_points_after_the_checkpoint_of_a_killed_run_are_dropped(straight, tmp_path):
    train(small_programs(), tmp_path, num_steps=15)
    for step in (10, 15):
        shutil.rmtree(tmp_path / "checkpoints" / str(step))
    assert saved_steps(tmp_path) == [5]
    next_second()
    train(small_programs(), tmp_path)
    assert points(tmp_path, "train")["loss"] == points(straight()[1], "train")["loss"]
    assert points(tmp_path, "eval") == points(straight()[1], "eval")


def test_full_disk_costs_points_not_the_training(tmp_path, caplog):
    summaries = Summaries(str(tmp_path), "train")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for step in range(100):
            summaries.scalars(step, {"loss": 1.0})
        summaries.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.getMessage() == (
        f"summaries are lost: {tmp_path}/train: File too large"
    )


def test_a_bucket_is_no_local_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = []
    monkeypatch.setattr(tf.io.gfile, "makedirs", paths.append)
    monkeypatch.setattr(tf.summary, "create_file_writer", paths.append)
    Summaries("gs://bucket/run", "train")
    assert paths == ["gs://bucket/run/train"] * 2
    assert not list(tmp_path.iterdir())


def test_unwritable_folder(tmp_path):
    (tmp_path / "train").write_text("a file")
    with pytest.raises(
        OSError, match="cannot write summaries to .*train .*--model_dir"
    ):
        Summaries(str(tmp_path), "train")


def trace_of(folder):
    (path,) = pathlib.Path(folder).glob("plugins/profile/*/*.xplane.pb")
    return path


def traced_calls(path):
    """Step numbers of the calls in a trace, and how often a device ran them."""
    steps, runs = [], 0
    for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes:
        names = {key: value.name for key, value in plane.event_metadata.items()}
        stats = {key: value.name for key, value in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                runs += names[event.metadata_id].endswith("::Execute (jit_train)") and (
                    line.name.startswith("tf_XLAPjRtCpuClient")
                )
                steps += [
                    stat.int64_value
                    for stat in event.stats
                    if stats[stat.metadata_id] == "step_num"
                    and names[event.metadata_id] == "train"
                ]
    return steps, runs


def test_profile_is_of_the_steps_asked_for(tmp_path):
    run = loop.Run(model_dir=str(tmp_path), profile_steps=(3, 4), evaluate=False)
    loop.train_and_evaluate(at(small_programs(), num_steps=6), run)
    path = trace_of(tmp_path)
    assert traced_calls(path) == ([3, 4], 2 * len(jax.devices()))
    convert = pytest.importorskip("xprof.convert.raw_to_tool_data")
    trace, _ = convert.xspace_to_tool_data([str(path)], "trace_viewer@", {})
    assert b"jit_train" in trace


@pytest.mark.parametrize("steps", [(1, 5), (8, 9), (30, 40)])
def test_profile_of_steps_that_this_run_does_not_make(
    straight, tmp_path, caplog, steps
):
    shutil.copytree(straight()[1] / "checkpoints" / "5", tmp_path / "checkpoints" / "5")
    run = loop.Run(model_dir=str(tmp_path), profile_steps=steps, evaluate=False)
    loop.train_and_evaluate(at(small_programs(), num_steps=7), run)
    expected = "are requested, but this run makes steps 6 to 7"
    assert (
        f"nothing to profile: steps {steps[0]} to {steps[1]} {expected}" in caplog.text
    )
    assert not (tmp_path / "plugins").exists()


def test_summaries_of_a_compiled_loop_that_passes_the_interval():
    """A run may start at a step that is no multiple of steps_per_loop."""
    experiment = dataclasses.replace(small_programs().experiment, steps_per_loop=5)
    assert [s for s in range(8, 34, 5) if experiment.is_due(s, 10)] == [13, 23, 33]
    assert [s for s in range(5, 25, 5) if experiment.is_due(s, 5)] == STEPS
    assert not experiment.is_due(10, 0)


@pytest.mark.parametrize("columns,width", [(8, 128), (128, 2048), (2048, 2048)])
def test_a_heat_map_is_no_wider_than_a_screen(columns, width):
    load = np.arange(2.0 * columns).reshape(2, columns)
    picture = heat_map(load)
    cell = width // columns
    assert picture.shape == (2 * cell, width, 3)
    assert picture[0, 0].tolist() == [247, 251, 255]
    assert picture[-1, -1].tolist() == [8, 48, 107]
