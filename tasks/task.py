"""What a task is: a model, its loss and metrics, and its input."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.checks import Checked
from meshwright.framework.modeling.layer import Context, Layer
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.input.batched_input import BatchedInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskLoss:
    """The loss and the metrics' sums of one batch.

    Args:
      loss: float32 scalar, differentiated by training.
      sums: float32 tensors by name, such that sums over batches make exact metrics;
        scalars mostly.
    """

    loss: tf.Tensor
    sums: NestedMap


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """The scores and samples of a model's predictions for held-out examples.

    Args:
      metrics: scores by name.
      samples: some predictions, as Markdown.
      pictures: some predictions by name, uint8 [height, width, 3].
    """

    metrics: dict[str, float]
    samples: str = ""
    pictures: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


class Decoding:
    """Base of decoding, which predicts something of examples, such as a translation.

    An evaluation decodes held-out examples and scores the predictions.
    """

    def spec(self, global_batch: int | None) -> NestedMap:
        """Nested map of `tf.TensorSpec` for the input of `decode`, [B, ...] each.

        A tensor with a name of `Task.batch_dims` is split likewise, others by rows
        alone.
        """
        raise NotImplementedError(f"{type(self).__name__}.spec")

    def decode(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """The model's prediction for each row, a nested map of tensors [B, ...]."""
        raise NotImplementedError(f"{type(self).__name__}.decode")

    def batches(
        self, *, global_batch: int, max_batches: int | None = None
    ) -> Iterator[NestedMap]:
        """Held-out examples like `spec`, as arrays; the last batch is padded."""
        raise NotImplementedError(f"{type(self).__name__}.batches")

    def score(
        self, batches: Iterable[tuple[NestedMap, NestedMap]], folder: pathlib.Path
    ) -> DecodeResult:
        """Scores predictions.

        Args:
          batches: pairs of a batch and the result of `decode`; the iterator decodes one
            batch at a time.
          folder: for files of predictions, if there are any; may not exist.
        """
        raise NotImplementedError(f"{type(self).__name__}.score")


class Serving:
    """Base of an exported model's answers to requests."""

    def spec(self, batch: int | None) -> NestedMap:
        """Nested map of `tf.TensorSpec` for the input of `serve`, [B, ...] each."""
        raise NotImplementedError(f"{type(self).__name__}.spec")

    def serve(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """The answer by row, a nested map of tensors [B, ...].

        B may be unknown, and there is no mesh: the ops are TF's own.
        """
        raise NotImplementedError(f"{type(self).__name__}.serve")


@dataclasses.dataclass(frozen=True)
class BatchServing(Serving):
    """Answers requests that have some of the tensors of a task's batch.

    Args:
      task: the task.
      names: of the tensors.
      answer: as `serve`.
    """

    task: Task
    names: Sequence[str]
    answer: Callable[[Context, NestedMap, NestedMap], NestedMap]

    def spec(self, batch: int | None) -> NestedMap:
        """The tensors as a batch has them."""
        spec = self.task.batch_spec(batch)
        return NestedMap({name: spec[name] for name in self.names})

    def serve(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> NestedMap:
        return self.answer(ctx, theta, batch)


class Task(Checked):
    """Base of tasks: subclass as a frozen, keyword-only dataclass.

    Reading batches aside, everything is cheap, so that a task can be planned without
    its data.
    """

    loss_unit: ClassVar[str] = "nats"
    """The loss's unit; "" for a sum of several."""
    token_name: ClassVar[str] = "examples"
    """What `tokens` counts."""

    def weights(self) -> NestedMap:
        """Nested map of `WeightSpec`, for each field that is a layer."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        layers = {name: x for name, x in fields.items() if isinstance(x, Layer)}
        return NestedMap({name: layer.weights() for name, layer in layers.items()})

    def loss(self, ctx: Context, theta: NestedMap, batch: NestedMap) -> TaskLoss:
        """The loss of one batch, a pure function of the weights."""
        raise NotImplementedError(f"{type(self).__name__}.loss")

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Metrics to show, from the sums of one or more batches, by path."""
        raise NotImplementedError(f"{type(self).__name__}.metrics")

    def heat_maps(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Matrices to show as pictures: how much of a row falls on each column."""
        return {}

    @property
    def loss_extras(self) -> str:
        """What the training loss has that the metric `loss` has not, in words."""
        return ""

    input: BatchedInput
    """Where batches come from: a field or a property of a subclass."""

    def batch_spec(self, global_batch: int | None) -> NestedMap:
        """Nested map of `tf.TensorSpec`: one batch over all devices."""
        return self.input.element_spec(global_batch)

    def batch_dims(self) -> NestedMap:
        """For each leaf of a batch its logical dim names, for the sharding plan.

        By default the first dim of each is "batch", and the others have no name.
        """
        return self.batch_spec(None).map(
            lambda leaf: ("batch", *[None] * (leaf.shape.rank - 1))
        )

    def train_batches(
        self, start_step: int, *, global_batch: int, rows: range
    ) -> tf.data.Dataset:
        """Endless training batches like `batch_spec`; see `BatchedInput`."""
        return self._like_spec(
            self.input.train_batches(start_step, global_batch=global_batch, rows=rows)
        )

    def eval_batches(
        self, *, global_batch: int, rows: range, max_batches: int | None = None
    ) -> tf.data.Dataset:
        """Held-out batches, each example once, the last one filled up with weight 0."""
        return self._like_spec(
            self.input.held_out_batches(
                global_batch=global_batch, rows=rows, max_batches=max_batches
            )
        )

    def _like_spec(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Batches without the tensors that the model does not read."""
        names = self.batch_spec(None).keys()
        if batches.element_spec.keys() == names:
            return batches
        return batches.map(lambda batch: NestedMap({n: batch[n] for n in names}))

    @property
    def decoding(self) -> Decoding | None:
        """How the model decodes held-out examples, if it does."""
        return None

    @property
    def why_not_decoded(self) -> str:
        """Why `decoding` is None, to follow "decodes nothing" in a message."""
        return ""

    @property
    def serving(self) -> Serving | None:
        """How an exported model answers requests, if it does."""
        return None

    @property
    def to_serve(self) -> str:
        """What to do where `serving` is None: the end of a message."""
        return "export the task that its weights are for, or --what=bundle"

    def describe_data(self) -> dict[str, float]:
        """Facts about the data, to print and log before training."""
        return {}

    def data_fingerprint(self) -> dict[str, str | int]:
        """What determines training batches, by name; a resumed run compares it."""
        return self.input.fingerprint()

    def trained_files(self) -> dict[str, bytes]:
        """What a trained model needs besides its weights, by file name.

        The training writes them into its folder.
        """
        return {}

    def train_flops(self, global_batch: int) -> float:
        """Model FLOPs of one training step on all devices together.

        A multiplication and an addition are two FLOPs. Forward and backward passes
        count, recomputation does not; 0 if they are not known.
        """
        return 0.0

    def tokens(self, global_batch: int) -> int:
        """How many tokens, or other parts of examples, one step trains on.

        By default the examples of the batch; `token_name` is what they are called.
        """
        return global_batch


def loss_of(task: Task, ctx: Context, theta: NestedMap, batch: NestedMap) -> TaskLoss:
    """What `Task.loss` returns for a batch, checked.

    Args:
      task: the task.
      ctx, theta, batch: as of `Task.loss`.

    Raises:
      TypeError: it is no `TaskLoss` of tensors of numbers.
      ValueError: the loss is no scalar.
    """
    returned = task.loss(ctx, theta, batch)
    name = f"{type(task).__name__}.loss"
    if not isinstance(returned, TaskLoss):
        raise TypeError(
            f"{name} returned {_a(returned)}; return TaskLoss(loss=, sums=NestedMap()) "
            "with the scalar to train by, and the sums that `metrics` reads"
        )
    loss, sums = returned.loss, returned.sums
    if not tf.is_tensor(loss) or not loss.dtype.is_floating:
        raise TypeError(
            f"{name} returned {_a(loss)} as TaskLoss.loss; return a scalar tensor that "
            "depends on the weights"
        )
    if loss.shape.rank:
        raise ValueError(
            f"{name} returned a TaskLoss.loss of shape {loss.shape}; it must be a "
            "scalar: return its mean over the batch"
        )
    if not isinstance(sums, NestedMap):
        raise TypeError(
            f"{name} returned {_a(sums)} as TaskLoss.sums; return a NestedMap of "
            "tensors, empty if `metrics` needs none"
        )
    for path, value in sums.items_by_path():
        is_number = tf.is_tensor(value) and (
            value.dtype.is_floating or value.dtype.is_integer
        )
        if not is_number:
            raise TypeError(
                f"{name} returned {_a(value)} as TaskLoss.sums.{path}; return a tensor "
                "of numbers that add up over batches, a scalar as a rule"
            )
    return returned


def metrics_of(task: Task, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
    """What `Task.metrics` returns for sums by path, checked.

    Raises:
      TypeError: it is no dict of numbers by name.
      ValueError: a metric is an array.
    """
    return _checked_metrics(task, task.metrics(sums))


def try_metrics(task: Task, sums: NestedMap) -> None:
    """Checks ahead of training what `Task.metrics` returns, for sums that are all ones.

    What it raises itself may be due to these, and is left to the real sums.

    Args:
      task: the task.
      sums: tensors like the sums of its loss.

    Raises:
      TypeError, ValueError: as `metrics_of`.
    """
    if not all(x.shape.is_fully_defined() for x in sums.leaves()):
        return
    ones = {path: np.ones(x.shape) for path, x in sums.items_by_path()}
    try:
        with tf.init_scope(), np.errstate(all="ignore"):
            metrics = task.metrics(ones)
    except Exception:
        return
    _checked_metrics(task, metrics)


def _checked_metrics(task: Task, metrics: Any) -> dict[str, float]:
    name = f"{type(task).__name__}.metrics"
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"{name} returned {_a(metrics)}; return a dict of numbers by name, such as "
            '{"loss": sums["loss"] / sums["rows"]}'
        )
    for key, value in metrics.items():
        if shape := np.shape(value):
            raise ValueError(
                f"{name} returned an array of shape {list(shape)} as {key!r}; a metric "
                "is a number: reduce it there, or what it is made of in `loss`"
            )
        try:
            float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"{name} returned {_a(value)} as {key!r}; a metric is a number"
            ) from None
    return dict(metrics)


def _a(value: Any) -> str:
    """What a value is, for messages."""
    if tf.is_tensor(value):
        return f"a {value.dtype.name} tensor of shape {value.shape}"
    return "None" if value is None else f"a {type(value).__name__}"
