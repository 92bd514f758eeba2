"""Which dims of a Keras model's weights tensor parallelism splits, by their layers."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Sequence
from typing import Any


class SplitRule(enum.Enum):
    """By what tensor parallelism splits a weight."""

    HEADS = "heads"
    UNITS = "units"
    INPUTS = "inputs"
    WORDS = "words"

    @property
    def text(self) -> str:
        """For reports."""
        return {
            SplitRule.HEADS: "attention by heads",
            SplitRule.UNITS: "feed-forward layers by units",
            SplitRule.INPUTS: "by inputs a layer that follows one split by units",
            SplitRule.WORDS: "embeddings by words",
        }[self]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SplitWeight:
    """A weight that tensor parallelism splits.

    Args:
      weight: the Keras variable.
      dim: the dim that is split.
      rule: by what.
    """

    weight: Any
    dim: int
    rule: SplitRule


def split_weights(model: Any) -> list[SplitWeight]:
    """The weights of a Keras model that tensor parallelism splits.

    - `EinsumDense` to two dims of its own, as queries, keys and values are made: the
      first of the two, the heads. From two dims, as a result of attention: the first.
    - `Dense`, and `EinsumDense` likewise, to more units than it has inputs: its units,
      if a later one of these layers takes them, or if it is the last, as of logits.
      What others make would be gathered at once.
    - To fewer, as the second of a pair: its inputs, so that each device adds up a part.
      The layer whose units it takes is split by units.
    - To as many, as the second of a pair: its inputs, if it comes next in the parent.
    - To fewer, as the first of a pair: its units. The next of these layers in the same
      parent takes them as its inputs, and does not have more units.
    - `Embedding`: its rows.

    Layers are in the order in which their parents hold them. One takes the units of the
    last before it that makes as many as it has inputs, or twice as many, as for a gate
    and its input together; and of those right beside that one which make as many.
    """
    layers = list(inner_layers(model))
    weights = [
        SplitWeight(weight=words, dim=0, rule=SplitRule.WORDS)
        for _, layer in layers
        if "Embedding" in _kinds(layer)
        and (words := getattr(layer, "_embeddings", None)) is not None
    ]
    products = [(parent, p) for parent, layer in layers if (p := product_of(layer))]
    splits: list[SplitWeight | None] = []
    taken = {len(products) - 1}  # Those whose units are taken, and the last.
    for number, (_, product) in enumerate(products):
        wanted = (product.inputs, 2 * product.inputs)
        makers = [i for i in range(number) if products[i][1].units in wanted]
        split_makers = itertools.takewhile(lambda i: _by_units(splits[i]), makers[::-1])
        # A gate has another layer right beside it.
        by_units = [m for i, m in enumerate(split_makers) if m == makers[-1] - i]
        split = product.split(
            takes_units=bool(by_units),
            is_second=number - 1 in by_units
            and _are_a_pair(products[number - 1], products[number]),
            is_first=number + 1 < len(products)
            and _are_a_pair(products[number], products[number + 1]),
        )
        taken.update(by_units)
        splits.append(split)
    for number, split in enumerate(splits):
        if split and (split.rule is not SplitRule.UNITS or number in taken):
            weights.append(split)
    return weights


def _by_units(split: SplitWeight | None) -> bool:
    return split is not None and split.rule is SplitRule.UNITS


def split_dims(model: Any) -> dict[int, int]:
    """The dim of each weight that tensor parallelism splits, by the weight's `id`."""
    return {id(split.weight): split.dim for split in split_weights(model)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """A `Dense` or `EinsumDense` layer.

    Args:
      kernel: its weight.
      made: the kernel's dims that are dims of the result.
      summed: those that are dims of the input.
    """

    kernel: Any
    made: Sequence[int]
    summed: Sequence[int]

    @property
    def units(self) -> int:
        """The size of the result's dim; 0 if it makes several."""
        return self.kernel.shape[self.made[0]] if len(self.made) == 1 else 0

    @property
    def inputs(self) -> int:
        """The size of the input's dim; 0 if it sums over several."""
        return self.kernel.shape[self.summed[0]] if len(self.summed) == 1 else 0

    @property
    def narrows(self) -> bool:
        """Whether it has fewer units than inputs."""
        return 0 < self.units < self.inputs

    def split(
        self, *, takes_units: bool, is_first: bool, is_second: bool
    ) -> SplitWeight | None:
        """How it is split; see `split_weights`.

        Args:
          takes_units: whether the last layer before it that makes its inputs is split
            by units.
          is_first: whether it is the first of a pair.
          is_second: whether it is the second of a pair that is split.
        """
        counts = len(self.made), len(self.summed)
        if counts in ((2, 1), (1, 2)):
            dims = self.made if counts == (2, 1) else self.summed
            return SplitWeight(weight=self.kernel, dim=dims[0], rule=SplitRule.HEADS)
        if counts != (1, 1):
            return None
        if is_second or (self.narrows and takes_units):
            dim, rule = self.summed[0], SplitRule.INPUTS
        elif self.units > self.inputs or (self.narrows and is_first):
            dim, rule = self.made[0], SplitRule.UNITS
        else:
            return None
        return SplitWeight(weight=self.kernel, dim=dim, rule=rule)


def _are_a_pair(here: tuple[Any, Product], after: tuple[Any, Product]) -> bool:
    """Whether of layers with their parents one takes the other's units, not widening.

    They have the same parent.
    """
    (parent, first), (other, second) = here, after
    takes_units = first.units == second.inputs
    return parent is other and takes_units and 0 < second.units <= second.inputs


def inner_layers(model: Any) -> Iterator[tuple[Any, Any]]:
    """Each layer without layers of its own, after the layer that holds it, once."""
    seen: set[int] = set()

    def walk(parent, layer):
        if id(layer) in seen:
            return
        seen.add(id(layer))
        if not layer._layers:
            yield parent, layer
        for inner in layer._layers:
            yield from walk(layer, inner)

    return walk(None, model)


def _kinds(layer: Any) -> set[str]:
    return {kind.__name__ for kind in type(layer).__mro__}


def is_known(layer: Any) -> bool:
    """Whether tensor parallelism has rules for the layer's class."""
    return bool(_kinds(layer) & {"Dense", "EinsumDense", "Embedding"})


def product_of(layer: Any) -> Product | None:
    """The product that a layer is; None if it is another layer, or is not built."""
    weight = getattr(layer, "_kernel", None)
    if not _kinds(layer) & {"Dense", "EinsumDense"} or weight is None:
        return None
    equation = getattr(layer, "equation", "ab,bc->ac")
    inputs, rest = equation.replace("...", "").split(",")
    kernel, outputs = rest.split("->")
    return Product(
        kernel=weight,
        made=[i for i, d in enumerate(kernel) if d in outputs and d not in inputs],
        summed=[i for i, d in enumerate(kernel) if d in inputs and d not in outputs],
    )
