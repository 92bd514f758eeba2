"""Several layers in a row as a single layer, such as a dense layer and a mixture.

And the layers of any stack, one by one.

Dims: B batch, S sequence, M model, K layers that are mixtures of experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import gin
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Layer, check_returns
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.experts.moe import MoE, x_and_aux
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.transformer import TransformerLayer


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequential(Layer):
    """Runs each of `layers` once: the body of a stack whose layers alternate.

    With a dense layer and a mixture of experts in `layers`, `Repeat` makes GShard's and
    GLaM's stack of it: experts in every other layer. As a stack itself it may have a
    `Repeat` first and, after it, the remaining layers.

    Args:
      layers: the layers, one after another. All mixtures of experts among them have
        the same number of experts.

    Raises:
      ValueError: no layer; mixtures with different numbers of experts.
    """

    layers: Sequence[TransformerLayer]

    def __post_init__(self):
        super().__post_init__()
        if not self.layers:
            raise ValueError("Sequential.layers is empty: give one layer or more")
        parts = [getattr(layer, "feed_forward", None) for layer in self.layers]
        experts = {p.gating.num_experts for p in parts if isinstance(p, MoE)}
        if len(experts) > 1:
            raise ValueError(
                f"Sequential.layers have mixtures of {sorted(experts)} experts: let "
                "all have equally many"
            )

    def weights(self) -> NestedMap:
        return NestedMap({name: layer.weights() for name, layer in self.named()})

    @property
    def depth(self) -> int:
        return sum(layer.depth for layer in self.layers)

    def extra_flops(self, sequence_length: int) -> float:
        return sum(layer.extra_flops(sequence_length) for layer in self.layers)

    def fprop(
        self, ctx: Context, theta: NestedMap, x: tf.Tensor, **inputs: tf.Tensor | None
    ) -> tf.Tensor | NestedMap:
        """Transforms `x` [B, S, M].

        Args:
          ctx: context.
          theta: weights.
          x: [B, S, M].
          **inputs: see `TransformerLayer.fprop`; for all layers.

        Returns:
          [B, S, M] in the activation dtype. With mixtures of experts, a nested map of
          it as `x` and of their `aux` with a leading dim K, a row for each mixture.
        """
        x, rows = ctx.cast(x), []
        for name, layer in self.named():
            with ctx.scope(name) as c:
                out = layer.fprop(c, theta[name], x, **inputs)
            check_returns(layer, out)
            x, aux = x_and_aux(out)
            if aux is not None:
                rows.append(aux)
        if not rows:
            return x
        return NestedMap(x=x, aux=rows[0].map(lambda *t: tf.stack(t), *rows[1:]))

    def init_cache(self, ctx: Context, batch: int, length: int) -> NestedMap:
        cache = NestedMap()
        for name, layer in self.named():
            with ctx.scope(name) as c:
                cache[name] = layer.init_cache(c, batch, length)
        return cache

    def encode_memory(
        self, ctx: Context, theta: NestedMap, memory: tf.Tensor
    ) -> NestedMap:
        cache = NestedMap()
        for name, layer in self.named():
            with ctx.scope(name) as c:
                cache[name] = layer.encode_memory(c, theta[name], memory)
        return cache

    def step(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        cache: NestedMap,
        position: tf.Tensor,
        *,
        memory: NestedMap | None = None,
        **inputs: tf.Tensor | None,
    ) -> tuple[tf.Tensor, NestedMap]:
        after = NestedMap()
        for name, layer in self.named():
            with ctx.scope(name) as c:
                x, after[name] = layer.step(
                    c,
                    theta[name],
                    x,
                    cache[name],
                    position,
                    memory=memory and memory[name],
                    **inputs,
                )
        return x, after

    def named(self) -> list[tuple[str, TransformerLayer]]:
        """The layers, with the names of their weights and caches."""
        return [(f"layer_{i}", layer) for i, layer in enumerate(self.layers)]


def each_layer(layer: Layer, path: str) -> Iterator[tuple[str, Layer]]:
    """The layers of a stack and the fields that lead to them; `path` leads to it.

    What is around a stack, such as a `Pipeline`, has it in a field `stack`.
    """
    if isinstance(getattr(layer, "stack", None), Layer):
        yield from each_layer(layer.stack, f"{path}.stack")
    elif isinstance(layer, Repeat):
        yield from each_layer(layer.body, f"{path}.body")
    elif isinstance(layer, Sequential):
        for i, each in enumerate(layer.layers):
            yield from each_layer(each, f"{path}.layers[{i}]")
    else:
        yield path, layer
