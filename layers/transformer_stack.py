"""Transformer layers of several kinds in turn, such as dense and mixture of experts.

Dims: B batch, S sequence, M model, K layers that are mixtures of experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import gin
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Layer
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.moe import MoE, x_and_aux
from meshwright.layers.repeat import Repeat, Unroll
from meshwright.layers.transformer import TransformerLayer


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerStack(Layer):
    """`num_layers` layers, `layers` over and over, as one loop (see `Repeat`).

    With a dense layer and a mixture of experts in `layers` this is GShard's and
    GLaM's: experts in every other layer. For layers of one kind there is `Repeat`.

    Args:
      layers: the layers of one turn; at least one is a mixture of experts, and all
        mixtures have equally many experts.
      num_layers: of the whole stack, a multiple of their number.
      recompute: see `Repeat`; the unit is one turn.
      saved_names: see `Repeat`.
      unroll: see `Repeat`.

    Raises:
      ValueError: no mixture of experts, or of different numbers of experts; a number
        of layers that the turns do not make; see `Repeat`.
    """

    layers: Sequence[TransformerLayer]
    num_layers: int
    recompute: Recompute = Recompute.EVERYTHING
    saved_names: Sequence[str] = ()
    unroll: Unroll = Unroll.LOOP

    def __post_init__(self):
        experts = {moe.gating.num_experts for moe in self._mixtures()}
        if len(experts) != 1:
            raise ValueError(
                f"TransformerStack.layers have mixtures of {sorted(experts)} experts: "
                "let at least one be a mixture of experts and all have equally many; "
                "for dense layers use Repeat"
            )
        if self.num_layers < 1 or self.num_layers % len(self.layers):
            raise ValueError(
                f"TransformerStack.num_layers is {self.num_layers}, must be a multiple "
                f"of its {len(self.layers)} layers that take turns"
            )
        self._repeat()  # For its checks.

    def weights(self) -> NestedMap:
        return self._repeat().weights()

    def extra_flops(self, sequence_length: int) -> float:
        return self._repeat().extra_flops(sequence_length)

    def fprop(
        self, ctx: Context, theta: NestedMap, x: tf.Tensor, **inputs: tf.Tensor | None
    ) -> NestedMap:
        """Transforms `x` [B, S, M].

        Args:
          ctx: context.
          theta: weights.
          x: [B, S, M].
          **inputs: see `TransformerLayer.fprop`; for all layers.

        Returns:
          `x`: [B, S, M] in the activation dtype.
          `aux.loss`: float32 scalar, to be added to the loss: the layers' mean, so that
            its weight does not depend on depth.
          `aux.sums`: see `Routing.sums`, with a leading dim K, a row for each mixture.
        """
        rows = len(self._mixtures()) * self.num_layers // len(self.layers)
        specs = self._mixtures()[0].aux_specs()
        aux = specs.map(lambda spec: tf.zeros([rows, *spec.shape], spec.dtype))
        carry = NestedMap(x=ctx.cast(x), aux=aux)
        out = self._repeat().fprop(ctx, theta, carry, **inputs)
        aux = NestedMap(loss=tf.reduce_mean(out.aux.loss), sums=out.aux.sums)
        return NestedMap(x=out.x, aux=aux)

    def start_cache(self, ctx: Context, batch: int, length: int) -> NestedMap:
        """See `Repeat.start_cache`."""
        return self._repeat().start_cache(ctx, batch, length)

    def remember(self, ctx: Context, theta: NestedMap, memory: tf.Tensor) -> NestedMap:
        """See `Repeat.remember`."""
        return self._repeat().remember(ctx, theta, memory)

    def step(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        cache: NestedMap,
        position: tf.Tensor,
        **inputs: NestedMap | tf.Tensor | None,
    ) -> tuple[tf.Tensor, NestedMap]:
        """See `TransformerLayer.step`."""
        return self._repeat().step(ctx, theta, x, cache, position, **inputs)

    def _mixtures(self) -> list[MoE]:
        parts = [layer.feed_forward for layer in self.layers]
        return [part for part in parts if isinstance(part, MoE)]

    def _repeat(self) -> Repeat:
        return Repeat(
            body=_Turn(layers=tuple(self.layers)),
            num_layers=self.num_layers // len(self.layers),
            recompute=self.recompute,
            saved_names=self.saved_names,
            unroll=self.unroll,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Turn(Layer):
    """Each layer once; `aux` of what has gone before is carried along.

    Args:
      layers: the layers, one after another.
    """

    layers: Sequence[TransformerLayer]

    def weights(self) -> NestedMap:
        return NestedMap({name: layer.weights() for name, layer in self._named()})

    def extra_flops(self, sequence_length: int) -> float:
        return sum(layer.extra_flops(sequence_length) for layer in self.layers)

    def fprop(
        self, ctx: Context, theta: NestedMap, x: NestedMap, **inputs: tf.Tensor | None
    ) -> NestedMap:
        """Returns what it takes: `x` [B, S, M], and `aux` with a dim K in front."""
        stream, aux = x.x, x.aux
        for name, layer in self._named():
            with ctx.scope(name) as c:
                out = layer.fprop(c, theta[name], stream, **inputs)
            stream, own = x_and_aux(out)
            if own is not None:
                aux = aux.map(_push, own)
        return NestedMap(x=stream, aux=aux)

    def start_cache(self, ctx: Context, batch: int, length: int) -> NestedMap:
        found = NestedMap()
        for name, layer in self._named():
            with ctx.scope(name) as c:
                found[name] = layer.start_cache(c, batch, length)
        return found

    def remember(self, ctx: Context, theta: NestedMap, memory: tf.Tensor) -> NestedMap:
        found = NestedMap()
        for name, layer in self._named():
            with ctx.scope(name) as c:
                found[name] = layer.remember(c, theta[name], memory)
        return found

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
        for name, layer in self._named():
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

    def _named(self) -> list[tuple[str, TransformerLayer]]:
        return [(f"layer_{i}", layer) for i, layer in enumerate(self.layers)]


def _push(rows: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
    """Drops the first row and appends one: after K layers each is in its place.

    The loop's body needs no count for this.
    """
    return tf.concat([rows[1:], row[None]], axis=0)
