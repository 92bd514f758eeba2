"""The loss of a batch and its gradients, at once or microbatch by microbatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from meshwright.framework.modeling import random
from meshwright.framework.modeling.layer import Context, added_up, annotate_weights
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.annotations import annotate
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.tasks.task import Task, loss_of, try_metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchGradients:
    """The loss, sums and gradients of a batch.

    Args:
      loss: float32 scalar; the mean over microbatches.
      sums: the task's sums over the batch.
      gradients: nested map like the weights; means over microbatches.
    """

    loss: tf.Tensor
    sums: NestedMap
    gradients: NestedMap


def batch_gradients(
    task: Task, ctx: Context, specs: NestedMap, theta: NestedMap, batch: NestedMap
) -> BatchGradients:
    """The gradients of a batch at once.

    Args:
      task: model and loss.
      ctx: context of training.
      specs: nested map of `WeightSpec` of the weights.
      theta: the weights.
      batch: the batch.
    """
    result = _gradients(task, ctx, specs, theta, batch)
    gradients = added_up(ctx.plan, specs, result.gradients)
    return dataclasses.replace(result, gradients=gradients)


def _gradients(task, ctx, specs, theta, batch) -> BatchGradients:
    """`batch_gradients`, unreduced along the plan's `unreduced_gradient_axes`."""
    with tf.GradientTape() as tape:
        leaves = theta.leaves()
        tape.watch(leaves)
        read = annotate_weights(ctx.plan, specs, theta.pack(leaves))
        result = loss_of(task, ctx, read, batch)
    try_metrics(task, result.sums)
    gradients = theta.pack(tape.gradient(result.loss, leaves))
    return BatchGradients(loss=result.loss, sums=result.sums, gradients=gradients)


def accumulated_gradients(
    task: Task,
    ctx: Context,
    specs: NestedMap,
    theta: NestedMap,
    batch: NestedMap,
    *,
    steps: int,
    unreduced_gradient_axes: Sequence[str],
) -> BatchGradients:
    """The gradients of a batch, microbatch by microbatch in a loop.

    Each device adds up its part of them, and the parts are added up once, after the
    loop ("Replicate forwards, partial backwards"). Losses of microbatches count alike:
    where their weights differ, as with padding, the mean differs from the batch's; and
    a layer that works over its batch works over a microbatch.

    Args:
      task, ctx, specs, theta, batch: as of `batch_gradients`.
      steps: how many microbatches.
      unreduced_gradient_axes: the mesh axes along which gradients are added up
        after the loop, besides those of the plan.

    Raises:
      ValueError: the rows of the batch are not divided by the microbatches and the
        devices that split them.
    """
    dims = NestedMap(task.batch_dims())
    parts = batch.map_with_path(
        lambda path, x, names: _microbatches(path, x, names, steps, ctx.plan),
        dims,
    )
    axes = dict.fromkeys((*ctx.plan.unreduced_gradient_axes, *unreduced_gradient_axes))
    plan = dataclasses.replace(ctx.plan, unreduced_gradient_axes=tuple(axes))
    ctx = dataclasses.replace(ctx, plan=plan)

    def microbatch(i: tf.Tensor) -> NestedMap:
        key = None if ctx.key is None else random.fold_in(ctx.key, i)
        rows = parts.map_with_path(
            lambda path, x, names: annotate(
                x[i], plan.activation_sharding(names, f"batch.{path}")
            ),
            dims,
        )
        inner = dataclasses.replace(ctx, key=key)
        result = _gradients(task, inner, specs, theta, rows)
        return NestedMap(loss=result.loss, sums=result.sums, gradients=result.gradients)

    # Traced ahead of the loop, which must know what it will add up.
    traced = tf.function(microbatch, autograph=False)
    traced = traced.get_concrete_function(tf.TensorSpec([], tf.int32))
    like = NestedMap(traced.structured_outputs)

    def leaves(i: tf.Tensor) -> list[tf.Tensor]:
        return NestedMap(traced(i)).leaves()

    _, totals = tf.while_loop(
        lambda i, _: i < steps,
        lambda i, totals: (
            i + 1,
            [total + x for total, x in zip(totals, leaves(i), strict=True)],
        ),
        (tf.constant(0), [tf.zeros(x.shape, x.dtype) for x in like.leaves()]),
    )
    total = like.pack(totals)
    return BatchGradients(
        loss=total.loss / steps,
        sums=total.sums,
        gradients=added_up(plan, specs, total.gradients.map(lambda x: x / steps)),
    )


def _microbatches(
    path: str,
    x: tf.Tensor,
    names: Sequence[str | None],
    steps: int,
    plan: ShardingPlan,
) -> tf.Tensor:
    """A leaf of a batch with a leading dim of microbatches.

    Each takes every `steps`-th row, so that a device's rows stay where they are.
    """
    if "batch" not in names:
        return tf.broadcast_to(x, [steps, *x.shape])
    dim = list(names).index("batch")
    devices = plan.activation_sharding(names, f"batch.{path}").splits()[dim]
    rows = x.shape[dim]
    if rows % (steps * devices):
        raise ValueError(
            f"Experiment.gradient_accumulation_steps is {steps}, but batch.{path} "
            f"has {rows} rows on {devices} devices, no multiple of {steps * devices}: "
            "set a global_batch that is"
        )
    shape = [*x.shape[:dim], rows // steps, steps, *x.shape[dim + 1 :]]
    order = [dim + 1, *range(dim + 1), *range(dim + 2, len(shape))]
    return tf.transpose(tf.reshape(x, shape), order)
