"""Experts without drops against slots: what is read of a run, and the table of it."""

import pytest
import tensorflow as tf

from benchmarks import dropless
from meshwright.trainers.cli import build_experiment


def write(folder, curves):
    with tf.summary.create_file_writer(str(folder)).as_default():
        for name, points in curves.items():
            for step, value in points:
                tf.summary.scalar(name, value, step=step)


def test_a_run_is_read_once_it_is_complete(tmp_path):
    write(tmp_path / "train", {"speed/step_time_s": [(20, 9.0), (40, 0.5), (60, 0.25)]})
    values = dict(zip(dropless.METRICS, (2.0, 0.125, 1.5), strict=True))
    write(tmp_path / "eval", {name: [(60, v)] for name, v in values.items()})
    assert dropless.read(tmp_path, 60) == values | {"step_s": 0.5}
    assert dropless.read(tmp_path, 80) is None
    assert dropless.read(tmp_path / "nowhere", 60) is None


def test_the_table_tells_differences_by_seed():
    names = (*dropless.METRICS, "step_s")
    runs = {
        (1, "dropless"): dict(zip(names, (2.0, 0.0, 1.5, 0.25), strict=True)),
        (1, "slots"): dict(zip(names, (2.5, 0.125, 2.0, 0.5), strict=True)),
        (2, "dropless"): dict(zip(names, (2.25, 0.0, 1.5, 0.25), strict=True)),
        (2, "slots"): dict(zip(names, (2.0, 0.125, 2.0, 0.5), strict=True)),
    }
    want = "held-out loss, dropless less slots: -0.1250 (-0.5000, +0.2500)"
    assert dropless.summary(runs) == want
    row = dropless.table_row(1, "slots", runs[1, "slots"])
    assert row.split() == ["1", "slots", "2.5000", "0.1250", "2.000", "0.500"]
    assert len(row) == len(dropless.HEADER.splitlines()[0]) <= 80


def test_both_models_have_the_same_products_of_experts():
    flops = {}
    for model in dropless.MODELS:
        bindings = dropless.bindings_of(model, seed=7, steps=60)
        experiment, _ = build_experiment([dropless.GIN_FILE], bindings)
        assert experiment.num_steps == experiment.eval_interval == 60
        mixture = experiment.task.stack.body.layers[1].feed_forward
        flops[model] = mixture.extra_flops(64)
        if model == "slots":  # Dispatch and combine are products too.
            E, M = mixture.gating.num_experts, mixture.gating.model_dims
            slots = mixture.gating.capacity.slots(64, E)
            flops[model] -= 2 * 2 * E * slots * M
    assert flops["dropless"] == pytest.approx(flops["slots"])
