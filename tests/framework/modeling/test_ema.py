"""The moving average of the weights."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.initializers import Constant
from meshwright.framework.modeling.layer import WeightSpec
from meshwright.framework.modeling.optimizers.ema import ExponentialMovingAverage
from meshwright.framework.nested_map import NestedMap

SPEC = WeightSpec(shape=(2,), dims=("features",), initializer=Constant(0.0))
SPECS = NestedMap(a=NestedMap(w=SPEC))
DATA = pathlib.Path(__file__).parents[2] / "data" / "lr_schedules.json"


def test_decay_warms_up_as_lingvo_does():
    golden = json.loads(DATA.read_text())
    (case,) = [c for c in golden["cases"] if c["schedule"] == "EmaDecaySchedule"]
    ema = ExponentialMovingAverage(decay=0.9999)
    decays = [ema.decay_at(tf.constant(step)) for step in golden["steps"]]
    np.testing.assert_allclose(decays, case["values"], rtol=1e-5)


@pytest.mark.parametrize(
    ("warmup", "step", "decay"),
    [(10.0, 0, 0.1), (10.0, 2, 0.25), (10.0, 10**6, 0.75), (None, 0, 0.75)],
)
def test_moves_towards_the_weights(warmup, step, decay):
    ema = ExponentialMovingAverage(decay=0.75, warmup=warmup)

    @tf.function(jit_compile=True, autograph=False)
    def update(step, average, weight):
        averages, weights = (NestedMap(a=NestedMap(w=w)) for w in (average, weight))
        return ema.update(step, averages, weights, SPECS).a.w

    new = update(
        tf.constant(step), tf.constant([1.0, 2.0]), tf.constant([5.0, 2.0], tf.bfloat16)
    )
    assert new.dtype == tf.float32
    np.testing.assert_allclose(new, [decay + 5.0 * (1 - decay), 2.0], rtol=1e-6)


def test_a_running_statistic_is_taken_as_it_is():
    ema = ExponentialMovingAverage(decay=0.75)
    specs = SPECS.map(lambda s: dataclasses.replace(s, statistic_decay=0.9))
    old, new = (NestedMap(a=NestedMap(w=tf.fill([2], w))) for w in (1.0, 5.0))
    average = ema.update(tf.constant(0), old, new, specs).a.w
    np.testing.assert_array_equal(average, [5.0, 5.0])


@pytest.mark.parametrize(
    ("field", "value"), [("decay", 1.0), ("decay", -0.1), ("warmup", 0.5)]
)
def test_refuses(field, value):
    with pytest.raises(ValueError, match=rf"ExponentialMovingAverage\.{field} is"):
        ExponentialMovingAverage(**{field: value})
