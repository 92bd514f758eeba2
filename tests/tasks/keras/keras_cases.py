"""Keras models as tasks, trained by the trainer's programs and by Keras."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from meshwright import framework as mw
from meshwright.tasks import (
    DatasetInput,
    KerasCompile,
    KerasModel,
    KerasOptimizer,
)
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.step_programs import StepPrograms

ROWS = 16
CROSS_ENTROPY = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


def examples(count: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [count, 16] and labels of ten classes."""
    x = np.random.default_rng(0).standard_normal([count, 16], np.float32)
    return x, np.arange(count) % 10


def from_arrays(arrays: Any) -> Callable[[], tf.data.Dataset]:
    """A function as `DatasetInput` takes it."""
    return lambda: tf.data.Dataset.from_tensor_slices(arrays)


def classifier() -> keras.Model:
    """Has a constraint, a regularizer and running statistics."""
    x = keras.Input([16])
    dense = keras.layers.Dense(
        32, "relu", kernel_regularizer="l2", kernel_constraint="max_norm"
    )
    h = keras.layers.BatchNormalization()(dense(x))
    return keras.Model(x, keras.layers.Dense(10)(h))


def task_of(make, arrays=None, held_out=None, **compiled: Any) -> KerasModel:
    """A task of a model and arrays of examples."""
    train = from_arrays(examples() if arrays is None else arrays)
    held_out = None if held_out is None else from_arrays(held_out)
    return KerasModel(
        model=make,
        data=DatasetInput(train=train, held_out=held_out),
        compile=KerasCompile(**compiled),
    )


def programs_of(task: KerasModel, optimizer: Any, **changes: Any) -> StepPrograms:
    """The trainer's programs on a (2, 4) mesh, batches and some weights split."""
    plan = mw.ShardingPlan(
        mesh_shape=(2, 4), weights={"tensor": "Y"}, activations={"batch": "X"}
    )
    if isinstance(optimizer, keras.optimizers.Optimizer):
        optimizer = KerasOptimizer(optimizer=optimizer)
    how = {"plan": plan, "global_batch": ROWS, "num_steps": 10} | changes
    return StepPrograms(Experiment(task=task, optimizer=optimizer, **how))


def trained(
    programs: StepPrograms, steps: int = 5
) -> tuple[list[dict[str, float]], mw.NestedMap, mw.NestedMap]:
    """Metrics of each step, the weights before the first and after the last."""
    task, rows = programs.experiment.task, programs.experiment.global_batch
    state = programs.init(programs.seed())
    before = mw.NestedMap(state.theta).map(np.asarray)
    state = programs.convert(state, programs.initial_layout, programs.step_layout)
    metrics = []
    batches = task.train_batches(0, global_batch=rows, rows=range(rows))
    for batch in itertools.islice(batches, steps):
        arrays = mw.NestedMap(batch).map(lambda tensor: tensor.numpy()[None])
        out = programs.main(state, arrays)
        state = out["state"]
        sums = mw.NestedMap(out["metrics"]["sums"]).map(lambda x: np.asarray(x)[0])
        metrics.append(task.metrics(dict(sums.items_by_path())))
    after = programs.convert(state, programs.step_layout, programs.saved_layout)
    return metrics, before, mw.NestedMap(after.theta).map(np.asarray)


def assert_as_keras(
    programs: StepPrograms,
    batches: Sequence[tuple],
    optimizer: keras.optimizers.Optimizer,
    **compile_args: Any,
) -> None:
    """Metrics of each step and all weights are those of `train_on_batch`."""
    task = programs.experiment.task
    metrics, before, after = trained(programs, len(batches))
    model = task.filled(before)
    model.compile(optimizer, **compile_args)
    for got, batch in zip(metrics, batches, strict=True):
        want = model.train_on_batch(*batch, return_dict=True)
        model.reset_metrics()
        got = {name: got[name] for name in want}
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, rtol=2e-5, err_msg=name)
    for got, want in zip(task.filled(after).variables, model.variables, strict=True):
        if "seed_generator" not in want.path:
            np.testing.assert_allclose(
                got.numpy(), want.numpy(), rtol=1e-5, atol=1e-5, err_msg=want.path
            )


def batches_of(arrays: Sequence[Any], count: int = 5) -> list[tuple]:
    """The first batches of arrays in order, which begin anew at their end."""
    leaves = tf.nest.flatten(arrays)
    numbers = np.arange(count * ROWS).reshape(count, ROWS) % len(leaves[0])
    return [
        tf.nest.pack_sequence_as(arrays, [leaf[rows] for leaf in leaves])
        for rows in numbers
    ]
