"""A plan in TensorBoard, as its server reads the files."""

import json

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator,
)
from tensorboard.util import tensor_util

from meshwright.trainers.planning import plan_plots
from meshwright.trainers.planning.tensorboard import plan_tensorboard
from tests.trainers.planning.test_plan_page import (
    TOPOLOGIES,
    left_alone,
    planned,  # noqa: F401 (a fixture)
    plots,
    update,
    with_updates,
)
from tests.trainers.small_run import small_programs


def read(folder):
    """(scalars, images): values by tag; images are [height, width, 3], uint8."""
    events = EventAccumulator(str(folder))
    events.Reload()
    written = {"scalars": {}, "images": {}}
    for tag in events.Tags()["tensors"]:
        (event,) = events.Tensors(tag)
        assert event.step == 0
        value = tensor_util.make_ndarray(event.tensor_proto)
        plugin = events.SummaryMetadata(tag).plugin_data.plugin_name
        if plugin == "images":
            *_, png = value
            value = tf.io.decode_png(png).numpy()
        written[plugin][tag] = value
    return written["scalars"], written["images"]


# On GPUs XLA makes all gathers along X one.
@pytest.mark.parametrize("topology", TOPOLOGIES[:2])
def test_figures_and_pictures(planned, topology):  # noqa: F811
    document = planned(topology).document
    scalars, images = read(planned(topology).log_dir / "plan")
    want = {name: document[name] for name in ("peak_bytes", "memory_limit")}
    for row in document["breakdown"]:
        want[f"memory/{row['part']}"] = row["bytes"]
    for axis in ("X", "Y"):
        gathers = [
            row["bytes"]
            for row in document["collectives"]
            if (row["kind"], row["axis"]) == ("all-gather", axis)
        ]
        want[f"collective_bytes/all-gather along {axis}"] = sum(gathers)
        assert len(gathers) > 1
    if topology != "cpu":
        want["step_seconds"] = document["step_seconds"]
        for part, seconds in document["parts"].items():
            want[f"time/{part}"] = seconds
    want["weight_updates/sharded"] = 0
    for tag, value in want.items():
        assert scalars[tag] == pytest.approx(value, rel=1e-6), tag
    sent = [tag for tag in scalars if tag.startswith("collective_bytes/")]
    assert sum(scalars[tag] for tag in sent) == pytest.approx(
        sum(row["bytes"] for row in document["collectives"]), rel=1e-6
    )
    assert ("step_seconds" in scalars) == (topology != "cpu")
    drawn = plots(document)
    assert list(images) == [f"plan/{name}" for name in drawn]
    assert len(drawn) == 4 + (topology != "cpu")
    for name, plot in drawn.items():
        pixels = images[f"plan/{name}"]
        np.testing.assert_array_equal(pixels, tf.io.decode_png(plan_plots.png(plot), 3))
        assert pixels.shape[1] > 500 and pixels.std() > 10


def test_weight_updates(planned):  # noqa: F811
    lines = [update(0), update(1), left_alone(900)]
    document = planned("cpu").document
    scalars = plan_tensorboard.scalars(with_updates(document, *lines))
    updates = {
        tag: x for tag, x in scalars.items() if tag.startswith("weight_updates/")
    }
    assert updates == {
        "weight_updates/sharded": 2,
        "weight_updates/state_saved_bytes": 2**22 - 1,
        "weight_updates/gathered_bytes": 2**21,
        "weight_updates/gain_seconds": 4e-4,
    }
    none = plan_tensorboard.scalars(document | {"weight_updates": None})
    assert not [tag for tag in none if tag.startswith("weight_updates/")]


def test_a_plan_takes_the_place_of_an_earlier_one(planned, tmp_path):  # noqa: F811
    document, traced = planned("cpu").document, small_programs().traced_main
    plan_tensorboard.write(document, str(tmp_path), traced)
    plan_tensorboard.write(document | {"peak_bytes": 1000}, str(tmp_path), traced)
    scalars, images = read(tmp_path / "plan")
    assert scalars["peak_bytes"] == 1000
    assert len(images) == 4
    files = tmp_path / "plan" / "meshwright"
    assert json.loads((files / "plan.json").read_text())["peak_bytes"] == 1000
    assert "stack.feed_forward" in (files / "program.html").read_text()


def test_a_folder_that_cannot_be_written(planned, tmp_path):  # noqa: F811
    (tmp_path / "plan").write_text("a file")
    with pytest.raises(OSError, match="cannot write summaries to .*another --log_dir"):
        plan_tensorboard.write(
            planned("cpu").document, str(tmp_path), small_programs().traced_main
        )
