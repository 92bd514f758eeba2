"""What a task's methods return is checked when its loss is first traced."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.modeling.optimizers.optimizer import SGD
from meshwright.tasks import DatasetInput, Task, TaskLoss
from meshwright.tasks.task import metrics_of
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.step_programs import StepPrograms


def described():
    return mw.WeightSpec(shape=(), dims=(), initializer=mw.Constant(1.0))


def means(sums):
    return {"loss": sums["loss"] / sums["rows"]}


def numbers():
    return tf.data.Dataset.from_tensor_slices(np.arange(8, dtype=np.float32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitting(Task):
    """A task of one weight that returns whatever a test says."""

    input: DatasetInput = DatasetInput(train=numbers)
    returns: Callable[[tf.Tensor], Any] | None = None
    shows: Callable[[dict], Any] = means
    has: Any = dataclasses.field(default_factory=lambda: mw.NestedMap(w=described()))

    def weights(self):
        return self.has

    def loss(self, ctx, theta, batch):
        losses = theta.w * batch.x
        if self.returns:
            return self.returns(losses)
        return summed(losses)

    def metrics(self, sums):
        return self.shows(sums)


def summed(losses, **more):
    total = tf.reduce_sum(losses)
    sums = {"loss": total, "rows": tf.ones([]), **more}
    return TaskLoss(loss=total, sums=mw.NestedMap(sums))


def programs(**fields):
    plan = mw.ShardingPlan(mesh_shape=(2, 1), activations={"batch": "X"})
    optimizer = SGD(learning_rate=0.1)
    return StepPrograms(
        Experiment(
            task=Fitting(**fields),
            plan=plan,
            optimizer=optimizer,
            global_batch=4,
            num_steps=2,
        )
    )


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (
            tf.reduce_sum,
            r"Fitting\.loss returned a float32 tensor of shape \(\); return TaskLoss\(",
        ),
        (lambda losses: None, r"Fitting\.loss returned None; return TaskLoss\("),
        (
            lambda losses: TaskLoss(loss=losses, sums=mw.NestedMap()),
            r"TaskLoss\.loss of shape \(4,\); .*: return its mean over the batch",
        ),
        (
            lambda losses: TaskLoss(loss=1.0, sums=mw.NestedMap()),
            r"returned a float as TaskLoss\.loss; return a scalar tensor that depends",
        ),
        (
            lambda losses: TaskLoss(loss=tf.reduce_sum(losses), sums=[losses]),
            r"returned a list as TaskLoss\.sums; return a NestedMap of tensors",
        ),
        (
            lambda losses: summed(losses, by={"name": None}),
            r"returned None as TaskLoss\.sums\.by\.name; return a tensor of numbers",
        ),
        (
            lambda losses: summed(losses, any=losses > 0),
            r"returned a bool tensor of shape \(4,\) as TaskLoss\.sums\.any",
        ),
    ],
)
def test_what_a_loss_returns_is_checked_in_training_and_in_evaluation(returns, message):
    of = programs(returns=returns)
    for program in ("traced_main", "eval"):
        with pytest.raises((TypeError, ValueError), match=message):
            getattr(of, program)


@pytest.mark.parametrize(
    ("shows", "message"),
    [
        (
            lambda sums: [sums["loss"]],
            r"Fitting\.metrics returned a list; return a dict of numbers by name",
        ),
        (
            lambda sums: {"each": sums["each"] / sums["rows"]},
            r"returned an array of shape \[4\] as 'each'; a metric is a number: reduce",
        ),
        (lambda sums: {"loss": None}, r"returned None as 'loss'; a metric is a number"),
    ],
)
def test_what_metrics_return_is_checked_before_anything_is_compiled(shows, message):
    of = programs(shows=shows, returns=lambda losses: summed(losses, each=losses))
    with pytest.raises((TypeError, ValueError), match=message):
        of.traced_main  # noqa: B018
    with pytest.raises((TypeError, ValueError), match=message):
        metrics_of(of.experiment.task, {"loss": 1.0, "rows": 1.0, "each": np.ones(4)})


def test_metrics_may_reduce_arrays_and_fail_for_other_sums_than_the_real_ones():
    def shows(sums):
        if sums["rows"] == 1:
            raise ZeroDivisionError
        return {"most": sums["each"].max() / (sums["rows"] - 1)}

    returns = lambda losses: summed(losses, each=losses)  # noqa: E731
    assert programs(shows=shows, returns=returns).traced_main
    sums = {"each": np.arange(4), "rows": np.float64(4)}
    assert metrics_of(Fitting(shows=shows), sums) == {"most": 1}


@pytest.mark.parametrize(
    ("has", "message"),
    [
        ({"w": described()}, r"Fitting\.weights\(\) returned a dict; return a NestedM"),
        (mw.NestedMap(w=(2,)), r"Fitting\.weights\(\) has a tuple at 'w'; describe"),
    ],
)
def test_what_describes_the_weights_of_a_task_is_checked(has, message):
    with pytest.raises(TypeError, match=message):
        programs(has=has)
