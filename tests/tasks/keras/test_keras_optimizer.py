"""Keras's optimizers in the trainer's step, against Keras's own steps."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import meshwright.framework as mw
from meshwright.tasks import KerasOptimizer
from tests.tasks.keras.keras_cases import (
    CROSS_ENTROPY,
    assert_as_keras,
    batches_of,
    examples,
    programs_of,
    task_of,
)

OPT = keras.optimizers
DECAY = OPT.schedules.CosineDecay(0.1, 10)
OPTIMIZERS = {
    "Adadelta": lambda: OPT.Adadelta(0.1),
    "Adafactor": lambda: OPT.Adafactor(0.01),
    "Adagrad": lambda: OPT.Adagrad(0.01),
    "Adam": lambda: OPT.Adam(0.01, amsgrad=True, global_clipnorm=0.5),
    "AdamW": lambda: OPT.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: OPT.Adamax(0.01),
    "Ftrl": lambda: OPT.Ftrl(0.01),
    "Lamb": lambda: OPT.Lamb(0.01),
    "Lion": lambda: OPT.Lion(0.001),
    "Muon": lambda: OPT.Muon(0.01),
    "Nadam": lambda: OPT.Nadam(0.01, clipnorm=1.0),
    "RMSprop": lambda: OPT.RMSprop(0.01, momentum=0.9, centered=True),
    "SGD": lambda: OPT.SGD(DECAY, momentum=0.9, nesterov=True),
}


def small():
    return keras.Sequential(
        [keras.Input([16]), keras.layers.Dense(32, "tanh"), keras.layers.Dense(10)]
    )


@pytest.fixture(scope="module")
def task():
    return task_of(small, **CROSS_ENTROPY)


def updated(optimizer, specs, theta, steps):
    """The weights after updates by some gradients for each step."""
    slots = optimizer.slots(specs)
    slots = slots.map(
        lambda s: s.initializer(tf.zeros([2], tf.uint32), s.shape, s.dtype)
    )

    @tf.function
    def update(step, grads, theta, slots):
        result = optimizer.update(step, grads, theta, slots, specs)
        return result.theta, result.slots

    for step, grads in enumerate(steps):
        theta, slots = update(tf.constant(step), grads, theta, slots)
        theta, slots = mw.NestedMap(theta), mw.NestedMap(slots)
    return theta


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_updates_as_keras(name, task):
    """By the same gradients: where one is all rounding, some make a step of it."""
    make, specs = OPTIMIZERS[name], task.weights()
    draw = np.random.default_rng(0).standard_normal
    theta = specs.map(lambda s: draw(s.shape, np.float32))
    steps = [specs.map(lambda s: draw(s.shape, np.float32)) for _ in range(5)]
    got = updated(KerasOptimizer(optimizer=make()), specs, theta, steps)

    model, optimizer = task.filled(theta), make()
    paths = [v.path.replace("/", ".") for v in model.trainable_variables]
    for grads in steps:
        grads = [tf.constant(grads.get_path(path)) for path in paths]
        optimizer.apply(grads, model.trainable_variables)
    for path, variable in zip(paths, model.trainable_variables, strict=True):
        np.testing.assert_allclose(
            got.get_path(path), variable.numpy(), rtol=1e-5, atol=1e-6, err_msg=path
        )


@pytest.mark.parametrize("name", ["Adam", "Muon", "SGD"])
def test_the_trainer_does_as_keras(name, task):
    make = OPTIMIZERS[name]
    programs = programs_of(task, make())
    assert_as_keras(programs, batches_of(examples()), make(), **CROSS_ENTROPY)


def test_every_optimizer_of_keras_is_tried():
    known = {
        name
        for name in dir(OPT)
        if isinstance(kind := getattr(OPT, name), type)
        and issubclass(kind, OPT.Optimizer)
    }
    refused = {"LossScaleOptimizer", "MultiOptimizer", "ScheduleFreeAdamW"}
    assert known - refused - {"Optimizer"} == OPTIMIZERS.keys()


def test_a_schedule_of_ours_takes_the_place_of_the_rate(task):
    optimizer = KerasOptimizer(optimizer=OPT.SGD(123.0), learning_rate=0.01)
    programs = programs_of(task, optimizer)
    assert_as_keras(programs, batches_of(examples()), OPT.SGD(0.01), **CROSS_ENTROPY)


def test_slots_have_the_names_of_keras_and_are_split_as_weights(task):
    programs = programs_of(task, OPT.Adam(0.01))
    slots = dict(programs.state_specs.slots.items_by_path())
    assert slots.keys() == {
        f"adam.sequential_{layer}_{weight}_{slot}"
        for layer in ("dense", "dense_1")
        for weight in ("kernel", "bias")
        for slot in ("momentum", "velocity")
    }
    kernel = slots["adam.sequential_dense_kernel_velocity"]
    assert kernel.dims == ("fsdp", "tensor") and kernel.shape == (16, 32)


def test_weights_excluded_by_name_do_not_decay(task):
    def make():
        optimizer = OPT.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    programs = programs_of(task, make())
    assert_as_keras(programs, batches_of(examples()), make(), **CROSS_ENTROPY)


def test_names_that_exclude_nothing_are_told(task):
    optimizer = OPT.AdamW(0.01)
    optimizer.exclude_from_weight_decay(var_names=["bias", "a.b-c/kernel"])
    with pytest.raises(ValueError, match="excludes 'a.b-c/kernel' from weight decay"):
        KerasOptimizer(optimizer=optimizer).slots(task.weights())


def test_a_layer_of_ours_is_trained_by_an_optimizer_of_keras():
    """Any task's weights: stacks are a weight each, statistics are followed."""
    optimizer = KerasOptimizer(optimizer=OPT.SGD(0.5))
    spec = mw.WeightSpec(shape=(3,), dims=("model",), initializer=mw.Constant(1.0))
    statistic = mw.WeightSpec(
        shape=(), dims=(), initializer=mw.Constant(0.0), statistic_decay=0.75
    )
    specs = mw.NestedMap(a=spec, b=statistic)
    update = optimizer.update(
        np.int32(0),
        mw.NestedMap(a=np.float32([1, 2, 3]), b=np.float32(8)),
        mw.NestedMap(a=np.ones(3, np.float32), b=np.float32(4)),
        optimizer.slots(specs),
        specs,
    )
    np.testing.assert_allclose(update.theta.a, [0.5, 0, -0.5])
    assert float(update.theta.b) == 5.0


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (mw.SGD(learning_rate=0.1), "it must be a Keras optimizer, such as keras"),
        (OPT.LossScaleOptimizer(OPT.SGD(0.1)), "give its inner optimizer, and compute"),
        (OPT.SGD(0.1, gradient_accumulation_steps=2), "set Experiment.gradient_acc"),
        (OPT.SGD(0.1, loss_scale_factor=8.0), "has a loss_scale_factor, and nothing"),
        (OPT.SGD(0.1, use_ema=True), "set Experiment.ema = @ExponentialMovingAverage"),
    ],
)
def test_what_is_no_such_optimizer_is_refused(optimizer, message):
    with pytest.raises(ValueError, match=message):
        KerasOptimizer(optimizer=optimizer)


def test_an_optimizer_that_begins_with_the_weights_is_refused(task):
    optimizer = KerasOptimizer(optimizer=OPT.ScheduleFreeAdamW(0.01))
    with pytest.raises(ValueError, match="ScheduleFreeAdamW, begins with the"):
        optimizer.slots(task.weights())


def test_variables_excluded_from_decay_by_themselves_are_refused():
    optimizer = OPT.AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_list=[keras.Variable(1.0)])
    with pytest.raises(ValueError, match="exclude them by var_names"):
        KerasOptimizer(optimizer=optimizer)
