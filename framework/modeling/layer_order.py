"""In which order a weight stacks the weights of equal layers.

Dims: L stages, Q layers of a stage, K of them in a row.
"""

from __future__ import annotations

import dataclasses
import functools


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOrder:
    """Which layer each place of a stack [L, Q, ...], or [N, ...] if L is 1, has.

    Layer (r * L + s) * K + j is number r * K + j of stage s in round r: two stacks of
    one shape may have their layers in different orders.

    Args:
      layers: how many layers there are; None if that is not known.
      stages: L.
      rounds: how often a microbatch passes each stage.
    """

    layers: int | None
    stages: int
    rounds: int

    def __str__(self) -> str:
        layers = "" if self.layers is None else f"{self.layers} layers in "
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        stages = "1 stage" if self.stages == 1 else f"{self.stages} stages"
        return f"{layers}{stages} and {rounds}"

    def is_same(self, other: LayerOrder) -> bool:
        """Whether each layer has the same place, if stages are merged with layers.

        An order that does not know how many layers there are has as many as the other.
        """
        layers = self.layers or other.layers
        if layers is None:
            return (self.stages, self.rounds) == (other.stages, other.rounds)
        return self._numbers(layers) == other._numbers(layers)

    def _numbers(self, layers: int) -> tuple[int | None, ...]:
        """The number of the layer at each place; None where there is no layer.

        Args:
          layers: how many there are, if this order does not know.
        """
        if self.layers is not None:
            return _numbers(self.layers, self.stages, self.rounds)
        # With a layer a stage there is one round, as in a stack that is no pipeline.
        rounds = self.rounds if self.stages < layers else 1
        return _numbers(layers, self.stages, rounds)


@functools.cache
def _numbers(layers: int, stages: int, rounds: int) -> tuple[int | None, ...]:
    in_a_row = -(-layers // (stages * rounds))
    numbers = (
        (turn * stages + stage) * in_a_row + number
        for stage in range(stages)
        for turn in range(rounds)
        for number in range(in_a_row)
    )
    return tuple(number if number < layers else None for number in numbers)
