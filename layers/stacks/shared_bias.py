"""Biases of relative positions that all layers of a stack share, as T5's.

Dims: N heads; everything else is the stack's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded, instance
from meshwright.framework.modeling.layer import Context, Layer
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.positions import PositionKind
from meshwright.layers.attention.relative.relative_bias import bias_spec
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.sequential import each_layer


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedRelativeBias(Layer):
    """A stack whose layers add one bias of relative positions (T5, Raffel et al. 2020).

    The attention of each layer has `PositionKind.SHARED`. The bias of a head and a
    bucket of distances is a weight of this layer; its gradient is the sum over layers.

    Args:
      stack: the layers, not in a pipeline, which cuts what its layers get in
        microbatches: a table has none.
      num_buckets: see `relative_bucket`, as for `MultiHeadAttention.max_distance`.

    Raises:
      ValueError: a pipeline; a layer that does not read the bias; layers with different
        numbers of heads.
    """

    stack: Layer = instance(example="@Repeat()")
    num_buckets: int = bounded(32, at_least=1)

    def __post_init__(self):
        super().__post_init__()
        parts = [self.stack, *getattr(self.stack, "layers", ())]
        if any(isinstance(part, Pipeline) for part in parts):
            raise ValueError(
                "SharedRelativeBias.stack is or has a Pipeline, which cuts what its "
                "layers get in microbatches, and a table of biases has none: make it a "
                "Repeat, or give each layer a bias of its own by "
                "PositionKind.RELATIVE, without SharedRelativeBias"
            )
        heads: dict[int, str] = {}
        for path, layer in each_layer(self.stack, "SharedRelativeBias.stack"):
            attention = getattr(layer, "attention", None)
            positions = getattr(attention, "positions", None)
            if positions is not PositionKind.SHARED:
                raise ValueError(
                    f"{path} is {type(layer).__name__} with {positions}, which reads "
                    "no bias that layers share: make it a TransformerLayer with "
                    "attention.positions = PositionKind.SHARED, or leave out "
                    "SharedRelativeBias"
                )
            heads[attention.num_heads] = path
        if len(heads) > 1:
            named = ", ".join(f"{path} has {n}" for n, path in heads.items())
            raise ValueError(
                f"SharedRelativeBias: a bias is of a head, but {named} heads: give all "
                "layers equally many"
            )

    def weights(self) -> NestedMap:
        _, layer = next(each_layer(self.stack, ""))
        bias = bias_spec(self.num_buckets, layer.attention.num_heads)
        return NestedMap(relative_bias=bias, stack=self.stack.weights())

    def fprop(self, ctx: Context, theta: NestedMap, x: Any, **inputs: Any) -> Any:
        """See `Repeat.fprop`."""
        with ctx.scope("stack") as c:
            return self.stack.fprop(
                c, theta.stack, x, relative_bias=theta.relative_bias, **inputs
            )

    def extra_flops(self, sequence_length: int) -> float:
        return self.stack.extra_flops(sequence_length)

    def init_cache(self, ctx: Context, batch: int, length: int) -> NestedMap:
        """See `Repeat.init_cache`."""
        with ctx.scope("stack") as c:
            return self.stack.init_cache(c, batch, length)

    def encode_memory(
        self, ctx: Context, theta: NestedMap, memory: tf.Tensor
    ) -> NestedMap:
        """See `Repeat.encode_memory`."""
        with ctx.scope("stack") as c:
            return self.stack.encode_memory(c, theta.stack, memory)

    def step(
        self, ctx: Context, theta: NestedMap, x: tf.Tensor, *args, **inputs
    ) -> tuple[tf.Tensor, NestedMap]:
        """See `Repeat.step`."""
        with ctx.scope("stack") as c:
            return self.stack.step(
                c, theta.stack, x, *args, relative_bias=theta.relative_bias, **inputs
            )
