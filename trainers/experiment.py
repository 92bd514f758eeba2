"""An experiment: everything that a gin file says."""

from __future__ import annotations

import dataclasses

import gin
import tensorflow as tf

from meshwright.framework.compiler.program import Partitioner
from meshwright.framework.modeling.ema import ExponentialMovingAverage
from meshwright.framework.modeling.optimizers import Optimizer
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.tasks.task import Task


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One training experiment.

    Args:
      task: model, loss and input.
      plan: the device mesh, and where weights and activations are split.
      optimizer: how weights are updated.
      ema: moving average of the weights for evaluation and export, or None.
      global_batch: examples a step over all devices.
      num_steps: when training ends.
      steps_per_loop: steps inside one compiled program; saves dispatch for small models.
      seed: of weights, dropout and input order.
      activation_dtype: of activations; weights are float32.
      partitioner: Shardy or GSPMD.
      eval_interval: steps between evaluations; also evaluated at the end. 0: end only.
      eval_batches: held-out batches of an evaluation; None for all.
      checkpoint_interval: steps between checkpoints; also saved at the end.
      summary_interval: steps between TensorBoard points.
      keep_checkpoints: how many of the last checkpoints stay.

    Raises:
      ValueError: a count out of range, or an interval that is no multiple of
        `steps_per_loop`.
    """

    task: Task
    plan: ShardingPlan
    optimizer: Optimizer
    ema: ExponentialMovingAverage | None = None
    global_batch: int
    num_steps: int
    steps_per_loop: int = 1
    seed: int = 0
    activation_dtype: tf.DType = tf.float32
    partitioner: Partitioner = Partitioner.SHARDY
    eval_interval: int = 0
    eval_batches: int | None = None
    checkpoint_interval: int = 1000
    summary_interval: int = 10
    keep_checkpoints: int = 2

    def __post_init__(self):
        positive = ("global_batch", "num_steps", "steps_per_loop")
        for name in (*positive, "checkpoint_interval", "summary_interval"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"Experiment.{name} is {getattr(self, name)}, must be >= 1"
                )
        intervals = ("eval_interval", "checkpoint_interval", "summary_interval")
        for name in ("num_steps", *intervals):
            if getattr(self, name) % self.steps_per_loop:
                raise ValueError(
                    f"Experiment.{name} = {getattr(self, name)} is no multiple of "
                    f"steps_per_loop = {self.steps_per_loop}: a compiled loop cannot "
                    "stop in the middle"
                )
