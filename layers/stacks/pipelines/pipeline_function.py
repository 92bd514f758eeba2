"""A pipeline of any function, for programs without this library's layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from meshwright.framework.modeling.initializers import Constant
from meshwright.framework.modeling.layer import (
    STAGE_DIM,
    Context,
    Layer,
    Mode,
    WeightSpec,
)
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.plan import Axes, ShardingPlan, as_axes
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.pipelines.pipeline_run import is_statistic
from meshwright.layers.stacks.pipelines.stages import StageMode
from meshwright.layers.stacks.repeat import Repeat


def pipeline(
    fn: Callable[..., Any],
    weights: Mapping[str, Any],
    x: Any,
    *,
    mesh: DeviceMesh,
    stage_axis: Axes,
    num_stages: int,
    num_microbatches: int,
    num_repeats: int = 1,
    batch_axes: Axes = (),
    weight_dims: Mapping[str, Sequence[Axes]] | None = None,
    key: tf.Tensor | None = None,
    stage_mode: StageMode = StageMode.VECTORIZED,
    recompute: Recompute = Recompute.EVERYTHING,
    deferred_gradients: Sequence[str] = (),
    **constants: Any,
) -> Any:
    """`fn` with one layer's weights after another, as a pipeline (GSPMD 3.3).

    To be called in a function that is compiled for `mesh`, by `mw.function` or
    `compile_program`; gradients of `weights`, `x` and `constants` are TF's. Dims: N
    layers, B batch, U rows of a microbatch.

    Args:
      fn: (weights of a layer, x [U, ...], **constants [U, ...]) -> the next layer's x,
        of the same structure, shapes and dtypes; or a pair of it and a nested mapping
        of results on the side. Those below `statistics`, at any depth, the newest
        values of running statistics, have no gradient. With `key` it also gets a `key`,
        uint32 [2], which differs by layer and microbatch.
      weights: nested mapping of tensors [N, ...], in the order of layers. Keys are
        identifiers.
      x: nest of floating-point tensors [B, ...].
      mesh: the mesh of the program.
      stage_axis: the axis, or axes, that split the stages.
      num_stages: the number of stages; times `num_repeats` it divides N, or the last
        stages have layers that are none, whose weights are zeros.
      num_microbatches: the number of microbatches; it divides B, or some have a row
        more, which is none: that needs a `fn` without results on the side.
      num_repeats: how often a microbatch passes each stage; see `Pipeline`.
      batch_axes: the axes that split B, and the rows of a microbatch.
      weight_dims: for weights that other axes split too, by dotted path, the axes of
        each dim after the first.
      key: uint32 [2], the random key, or None.
      stage_mode: how the function of a layer becomes that of all stages. VECTORIZED
        wants TF's rule for each op, MANUAL none.
      recompute: what the backward pass computes again.
      deferred_gradients: see `Pipeline`.
      **constants: nests of tensors [B, ...] of which each layer gets the microbatch's
        rows.

    Returns:
      The last layer's x; or a nested map of such an `x` and of `aux`: results on the
      side, with a leading dim N. Those called `loss` and those below `statistics` are
      means over the microbatches, others sums. So a moving average that each microbatch
      begins at the same old value moves by the mean of what it is an average of: of a
      variance, that of microbatches, without that of their means.

    Raises:
      ValueError: results on the side of rows that are none; statistics that are not
        floating-point numbers; weights of different N, or no weights; a path in
        `weight_dims` that is none; `fn` returns something not like `x`, or reads
        variables or tensors that it is not given; an op that cannot be vectorized.
    """
    weights = NestedMap(weights).map(tf.convert_to_tensor)
    count = _count(weights)
    dims = _dims(weights, weight_dims or {})
    names = {_name(axes): axes for each in dims.values() for axes in each if axes}
    batch = as_axes(batch_axes)
    plan = ShardingPlan(
        mesh_axes=mesh.axis_names,
        mesh_shape=mesh.shape,
        device_ids=mesh.device_ids,
        weights={STAGE_DIM: stage_axis} | names,
        activations={"batch": batch, "microbatch": batch},
    )
    specs = weights.map_with_path(
        lambda path, weight: WeightSpec(
            shape=tuple(weight.shape[1:]),
            dims=tuple(map(_name, dims[path])),
            initializer=Constant(0.0),
            dtype=weight.dtype,
        )
    )
    body = PipelinedFunction(fn=fn, specs=specs)
    layer = Pipeline(
        stack=Repeat(body=body, num_layers=count, recompute=recompute),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_repeats=num_repeats,
        stage_mode=stage_mode,
        deferred_gradients=deferred_gradients,
    )
    ctx = Context(plan=plan, mode=Mode.TRAIN, key=key, path="pipeline")
    return layer.fprop(ctx, weights.map(layer.by_stage), x, **constants)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelinedFunction(Layer):
    """A layer that calls a user's function."""

    fn: Callable[..., Any]
    specs: NestedMap

    def weights(self) -> NestedMap:
        return self.specs

    def fprop(self, ctx: Context, theta: NestedMap, x: Any, **constants: Any) -> Any:
        if ctx.key is not None:
            constants["key"] = ctx.random_key()
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.captures)
        made = self.fn(theta, x, **constants)
        _check_captures(tensor for tensor, _ in graph.captures[before:])
        if not isinstance(made, tuple) or _is_like(made, x):
            return made
        if len(made) != 2 or not isinstance(made[1], Mapping):
            raise ValueError(
                "pipeline: the function returns a tuple that is neither like its x nor "
                f"a pair of that and a mapping of results on the side: {made}"
            )
        x, aux = made
        aux = NestedMap(aux).map(tf.convert_to_tensor)
        return NestedMap(x=x, aux=aux.map_with_path(_side_result))


def _side_result(path: str, value: tf.Tensor) -> tf.Tensor:
    """What a function returns on the side; statistics without gradient."""
    if not is_statistic(path):
        return value
    if not value.dtype.is_floating:
        raise ValueError(
            f"pipeline: the function returns {path} as {value.dtype.name}, of which "
            "microbatches have no mean: return it outside statistics, where it is "
            "summed, or as floating-point numbers"
        )
    return tf.stop_gradient(value)


def _check_captures(tensors: Iterable[tf.Tensor]) -> None:
    """Raises ValueError for what a function reads and is not given, but constants."""
    for tensor in tensors:
        if tensor.dtype == tf.resource:
            what = "a variable"
        elif tf.is_symbolic_tensor(tensor) and tensor.op.type != "Const":
            what = f"a tensor {tensor.name!r}"
        else:
            continue
        raise ValueError(
            f"pipeline: the function reads {what} that it is not given, which would "
            "get no gradient: give it among the weights, stacked for all layers, or as "
            "a keyword, by rows of the batch"
        )


def _is_like(made: Any, x: Any) -> bool:
    try:
        tf.nest.assert_same_structure(made, x)
    except (TypeError, ValueError):
        return False
    return True


def _count(weights: NestedMap) -> int:
    """N."""
    counts = {path: weight.shape[0] for path, weight in weights.items_by_path()}
    if len({*counts.values()}) == 1:
        return next(iter(counts.values()))
    listed = ", ".join(f"{path}: {count}" for path, count in counts.items())
    raise ValueError(
        "pipeline: weights need a leading dim, the number of layers, that is the same "
        f"for all; here it is {listed or 'of no weight'}"
    )


def _dims(
    weights: NestedMap, given: Mapping[str, Sequence[Axes]]
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The axes of each dim of a layer's weight, by path."""
    ranks = {path: weight.shape.rank - 1 for path, weight in weights.items_by_path()}
    for path, dims in given.items():
        if path not in ranks:
            raise ValueError(
                f"pipeline: weight_dims names {path!r}, which is no weight; there are "
                f"{', '.join(ranks)}"
            )
        if len(dims) != ranks[path]:
            raise ValueError(
                f"pipeline: weight_dims has {len(dims)} dims for {path!r}, which has "
                f"{ranks[path]} after that of layers"
            )
    return {
        path: tuple(map(as_axes, given.get(path, [None] * rank)))
        for path, rank in ranks.items()
    }


def _name(axes: Sequence[str]) -> str:
    """A plan's name for dims that these axes split; "unsplit" for none."""
    return f"by {'.'.join(axes)}" if axes else "unsplit"
