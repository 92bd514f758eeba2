"""Any Keras 3 model as a task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.checks import Checked, instance
from meshwright.framework.modeling.layer import Context
from meshwright.framework.nested_map import NestedMap, as_key
from meshwright.tasks.input.dataset_input import (
    ROW_WEIGHTS,
    DatasetInput,
    named,
    unnamed,
)
from meshwright.tasks.task import BatchServing, Task, TaskLoss


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class KerasCompile(Checked):
    """The arguments of a Keras model's `compile`, except the optimizer.

    Args:
      loss: None where the model calls `add_loss`.
      loss_weights: of the losses of several outputs.
      metrics: Keras's own, or means.
      weighted_metrics: those that sample weights count in.
    """

    loss: Any = None
    loss_weights: Any = None
    metrics: Any = ()
    weighted_metrics: Any = ()


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class KerasModel(Task):
    """A Keras model with a loss and metrics, as `compile` and `fit` take them.

    The model is made without values, however large it is. Weights have Keras's paths.
    Those that nothing trains stay as they are; running statistics follow the model. The
    loss is that of `fit`; random numbers, as of dropout and of initializers without a
    seed, are drawn from `Experiment.seed` and the step.

    The first dim of each tensor of a batch is "batch" for the sharding plan. The dims
    of a weight are named by `weight_dims`, else "tensor" is that which tensor
    parallelism splits (see `TensorParallel`), "fsdp" the largest other one of a weight
    of at least two dims, and "other" each of the rest.

    Args:
      model: a function without arguments that returns the model, such as one of
        `keras.Sequential`.
      data: the examples: tuples of the model's input and labels, perhaps with weights.
      compile: its loss and metrics.
      weight_dims: by regular expression, which is searched for in a variable's path,
        the names of its dims.

    Raises:
      ValueError: the model is no function of a Keras model, or a model that only `fit`
        can train; a row of `weight_dims` fits no variable.
    """

    loss_unit: ClassVar[str] = ""

    model: Callable[[], Any]
    data: DatasetInput = instance(example="@DatasetInput()")
    compile: KerasCompile = instance(KerasCompile(), example="@KerasCompile()")
    weight_dims: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        is_model = hasattr(self.model, "layers") and not isinstance(self.model, type)
        if is_model or not callable(self.model):
            raise ValueError(
                f"KerasModel.model is {self.model!r}; it must be a function that "
                "returns a Keras model (in gin @function, without brackets), so that "
                "the model can be made without its weights"
            )
        # Keras takes a second to import: for tasks of Keras models only.
        from meshwright.tasks.keras.keras_program import KerasProgram

        program = KerasProgram(
            self.model,
            compiled_loss=(self.compile.loss, self.compile.loss_weights),
            compiled_metrics=(self.compile.metrics, self.compile.weighted_metrics),
            structure=self.data.structure,
            weight_dims=self.weight_dims,
        )
        object.__setattr__(self, "_program", program)

    @property
    def input(self) -> DatasetInput:
        return self.data

    def weights(self) -> NestedMap:
        return self._program.weights

    def loss(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> TaskLoss:
        """The loss of `fit`, regularization included.

        Raises:
          ValueError: activations of another dtype than float32 are asked for, which a
            Keras model decides by its dtype policy.
        """
        if ctx.activation_dtype != tf.float32:
            raise ValueError(
                f"Experiment.activation_dtype is {ctx.activation_dtype.name}, which a "
                "Keras model does not follow: leave it out, and have KerasModel.model "
                'set the policy, such as by keras.config.set_dtype_policy("mixed_'
                'bfloat16")'
            )
        return self._program.loss(ctx, theta, batch)

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The loss and the metrics by Keras's names."""
        return self._program.metrics(sums)

    def eval_batches(
        self, *, global_batch: int, rows: range, max_batches: int | None = None
    ) -> tf.data.Dataset:
        """As of `Task`.

        The iterator raises ValueError at a batch that is filled up, if the model calls
        `add_loss` or its loss compares rows: rows of padding would count.
        """
        batches = super().eval_batches(
            global_batch=global_batch, rows=rows, max_batches=max_batches
        )

        def check(row_weights: np.ndarray) -> np.ndarray:
            if self._program.wants_full_batches and not row_weights.all():
                raise ValueError(
                    "a batch of held-out examples is not full, and a loss that the "
                    "model adds by add_loss, or that compares rows, would count its "
                    "rows of padding: have DatasetInput.held_out return a multiple of "
                    f"Experiment.global_batch, {global_batch}"
                )
            return row_weights

        def checked(batch: NestedMap) -> NestedMap:
            weights = batch[ROW_WEIGHTS]
            same = tf.numpy_function(check, [weights], tf.float32)
            return NestedMap(
                batch | {ROW_WEIGHTS: tf.ensure_shape(same, weights.shape)}
            )

        return batches.map(checked)

    def filled(self, theta: NestedMap) -> Any:
        """A Keras model with these weights, such as to save it.

        Args:
          theta: nested map of host arrays, like `weights`.
        """
        return self._program.filled(theta)

    def names_in_file(self, names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
        """Which arrays of a file of Keras are which weights.

        They are found as by Keras's `load_weights`, for which layers are in the same
        places in the model that wrote the file.

        Args:
          names: of the arrays, such as `layers/dense/vars/0`.

        Returns:
          The paths of weights by the names of their arrays, and for layers that get
          none, why.
        """
        return self._program.names_in_file(names)

    @property
    def serving(self) -> BatchServing:
        structure = self.data.structure
        is_dict = isinstance(structure, Mapping)
        names = named(structure).keys() if is_dict else ("x",)
        return BatchServing(self, tuple(names), self.predict)

    def predict(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """The model's outputs by name; `output` of a model with a single one."""
        structure = self.data.structure
        part = structure[:1] if isinstance(structure, tuple) else structure
        outputs = self._program.outputs(ctx, theta, unnamed(batch, part)[0])
        if tf.is_tensor(outputs):
            return NestedMap(output=outputs)
        if not isinstance(outputs, Mapping):
            outputs = dict(enumerate(outputs))
        return NestedMap({as_key(name): value for name, value in outputs.items()})

    def train_flops(self, global_batch: int) -> float:
        """Three times the forward FLOPs of products; 0 if there are some in loops."""
        return 3.0 * global_batch * self._program.row_flops
