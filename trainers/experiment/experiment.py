"""An experiment: everything that a gin file says."""

from __future__ import annotations

import dataclasses

import gin
import tensorflow as tf

from meshwright.framework.compiler.weight_update_sharding.decide import (
    WeightUpdateSharding,
)
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.checks import Checked, bounded, instance
from meshwright.framework.modeling.optimizers.ema import ExponentialMovingAverage
from meshwright.framework.modeling.optimizers.optimizer import Optimizer
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.tasks.task import Task
from meshwright.trainers.checkpoints.checkpoint_rules import InitializeFrom
from meshwright.trainers.experiment import config
from meshwright.trainers.experiment.not_finite import NotFinite

# Under this package's name, so that `gin.tf`'s constants can live beside them.
for _name in config.DTYPES:
    gin.constant(f"meshwright.{_name}", tf.dtypes.as_dtype(_name))


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """A training experiment.

    Args:
      task: model, loss and input.
      plan: the device mesh, and where weights and activations are split.
      optimizer: how weights are updated.
      ema: moving average of the weights for evaluation and export, or None.
      global_batch: examples a step over all devices.
      num_steps: when training ends.
      steps_per_loop: steps inside one compiled program; saves small models' dispatch.
      gradient_accumulation_steps: into how many microbatches a step divides its batch,
        one after the other; gradients are added up on each device, and over devices
        once. Losses of microbatches count alike.
      initialize_from: weights of another model to begin with, or None. Used only when
        the model_dir has no checkpoint.
      seed: of weights and dropout, below 2**64. Input order has another, such as
        `TextInput.seed`.
      activation_dtype: dtype of activations; weights are float32.
      gradient_dtype: dtype in which layers compute gradients of weights, and devices
        add them up; None: that of activations, but float32 across microbatches. A Keras
        model computes them in its own.
      partitioner: Shardy or GSPMD.
      weight_update_sharding: "auto", "off" or "all": which weight updates that data
        parallelism repeats on every device are computed on shards instead.
      weights_as_matrices: steps hold the weights of attention as matrices
        (`WeightSpec.as_matrix`); checkpoints and exports have them as they are.
      eval_interval: steps between evaluations; also evaluated at the end. 0: end only.
      eval_batches: held-out batches of an evaluation; None for all.
      decode_batches: held-out batches that an evaluation lets the model translate or
        the like, if its task decodes; 0 for none, None for all.
      checkpoint_interval: steps between checkpoints; also saved at the end.
      summary_interval: steps between TensorBoard points.
      histogram_interval: steps between TensorBoard histograms of weights and gradients,
        for which gradients are computed a second time; 0: none.
      keep_checkpoints: how many of the last checkpoints stay; None for all.
      not_finite: what to do when a loss or the gradients' norm is infinite or NaN.
      not_finite_limit: how many steps may be skipped in a row, and how many roll backs
        there may be between two checkpoints.
      slow_step_factor: stacks are written when a step takes so many times the median;
        None: never.
      strict: stop when an op that XLA's partitioner would get wrong can only be laid
        out otherwise at a cost in communication, or assertions of the model are left
        unchecked; else these are warnings.
      check_types: stop where a program communicates and no annotation says so: each
        contraction over a split dim, and each other op that needs other shards than it
        is given, has its result or its operands annotated.
      compile_in_child: have XLA compile in a child process, so that the run can report
        it if XLA ends that process. For the CPU devices of one process; the planner
        compiles for topologies in its own process.
      replicated_budget: bytes of state, batch and activations that may be replicated on
        each device before the run stops; None for no limit.

    Raises:
      ValueError: a field of a wrong type, a count out of range, or an interval that is
        no multiple of `steps_per_loop`.
    """

    task: Task = instance(example="@LanguageModel()")
    plan: ShardingPlan = instance(example="@ShardingPlan()")
    optimizer: Optimizer = instance(example="@Adam()")
    ema: ExponentialMovingAverage | None = instance(
        None, example="@ExponentialMovingAverage()"
    )
    global_batch: int = bounded(at_least=1)
    num_steps: int = bounded(at_least=1)
    steps_per_loop: int = bounded(1, at_least=1)
    gradient_accumulation_steps: int = bounded(1, at_least=1)
    initialize_from: InitializeFrom | None = instance(None, example="@InitializeFrom()")
    seed: int = bounded(0, at_least=0, below=2**64)
    activation_dtype: tf.DType = instance(tf.float32, example="%bfloat16")
    gradient_dtype: tf.DType | None = instance(None, example="%float32")
    partitioner: Partitioner = Partitioner.SHARDY
    weight_update_sharding: WeightUpdateSharding | str = WeightUpdateSharding.AUTO
    weights_as_matrices: bool = False
    eval_interval: int = bounded(0, at_least=0)
    eval_batches: int | None = bounded(None, at_least=1)
    decode_batches: int | None = bounded(0, at_least=0)
    checkpoint_interval: int = bounded(1000, at_least=1)
    summary_interval: int = bounded(10, at_least=1)
    histogram_interval: int = bounded(0, at_least=0)
    keep_checkpoints: int | None = bounded(2, at_least=1)
    not_finite: NotFinite = NotFinite.STOP
    not_finite_limit: int = bounded(10, at_least=0)
    slow_step_factor: int | None = bounded(20, at_least=2)
    strict: bool = False
    check_types: bool = False
    compile_in_child: bool = False
    replicated_budget: int | None = bounded(None, at_least=0)

    def __post_init__(self):
        super().__post_init__()
        self._check_weight_update_sharding()
        self._check_gradient_dtype()
        if self.weights_as_matrices and self.optimizer.reads_dims:
            raise ValueError(
                f"Experiment.weights_as_matrices is True, but "
                f"{type(self.optimizer).__name__} updates a weight by its dims: set it "
                "to False, or use another optimizer"
            )
        if self.decode_batches != 0 and self.task.decoding is None:
            raise ValueError(
                f"Experiment.decode_batches is {self.decode_batches}, but "
                f"{type(self.task).__name__} decodes nothing{self.task.why_not_decoded}"
                ": set it to 0"
            )
        intervals = ("eval", "checkpoint", "summary", "histogram")
        for name in ("num_steps", *(f"{each}_interval" for each in intervals)):
            steps, loop = getattr(self, name), self.steps_per_loop
            if steps % loop:
                raise ValueError(
                    f"Experiment.{name} = {steps} is no multiple of steps_per_loop = "
                    f"{loop}, and a compiled loop cannot stop in the middle: set it to "
                    f"{(steps // loop + 1) * loop}, or steps_per_loop to a divisor of "
                    f"{steps}"
                )

    def _check_gradient_dtype(self) -> None:
        dtype, activations = self.gradient_dtype, self.activation_dtype
        if dtype is None or (dtype.is_floating and dtype.size >= activations.size):
            return
        raise ValueError(
            f"Experiment.gradient_dtype is {dtype.name}, which has fewer bits than "
            f"the activations' {activations.name}: set it to None, for gradients in "
            f"{activations.name}, or to %float32"
        )

    def _check_weight_update_sharding(self) -> None:
        try:
            mode = WeightUpdateSharding(self.weight_update_sharding)
        except ValueError:
            known = ", ".join(repr(mode.value) for mode in WeightUpdateSharding)
            raise ValueError(
                f"Experiment.weight_update_sharding is "
                f"{self.weight_update_sharding!r}; it must be one of {known}"
            ) from None
        object.__setattr__(self, "weight_update_sharding", mode)

    def is_due(self, step: int, interval: int) -> bool:
        """Whether the call that ends with `step` made a multiple of `interval` steps.

        An interval of 0 is never due.
        """
        before = step - self.steps_per_loop
        return interval > 0 and step // interval > before // interval
