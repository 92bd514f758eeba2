"""The first sieve: bounds and rough costs of many plans at once, by names alone.

A plan is a row of masks, one for each name: bit i says that mesh axis i splits it. What
does not fit is seen by what must be in memory; what is slow, by the program's products:
an operand is gathered along the axes that split it otherwise than the product, and a
result is reduced along those that split both inner dims.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from meshwright.framework.compiler.stablehlo.shardy.named_products import (
    NamedProduct,
    Side,
)
from meshwright.framework.devices.device_order import device_order
from meshwright.framework.devices.network import LINK_EFFICIENCY
from meshwright.framework.devices.topology import Topology
from meshwright.trainers.planning.search.found.named_step import NamedStep

Masks = np.ndarray
"""int [plans, names]."""

# Bytes that elementwise ops move for each element that a product gives.
_ELEMENTWISE = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rough:
    """Bounds and rough costs, arrays [plans].

    Args:
      clashes: numbers of tensors two of whose dims an axis splits: such plans are none.
      memory: bytes that a device needs at least.
      seconds: rough time of a step.
    """

    clashes: np.ndarray
    memory: np.ndarray
    seconds: np.ndarray


class RoughPlans:
    """Plans of a step on a mesh.

    Args:
      step: the step.
      shape: the mesh's shape.
      torus: the topology.

    Attributes:
      clashing: pairs of names, by number, that some tensor has both.
      allowed: for each name the masks whose devices divide all dims of that name.
      floor: seconds that products take at the peak, if all devices share them.
    """

    def __init__(self, step: NamedStep, shape: tuple[int, ...], torus: Topology):
        self.step, self.shape, self.kind = step, shape, torus.kind
        self.count = 2 ** len(shape)
        masks = range(self.count)
        self._splits = np.array([self._axes_product(mask) for mask in masks])
        loads = device_order(shape, torus).loads
        speed = 2 * LINK_EFFICIENCY * self.kind.link_bandwidth
        self._per_byte = [
            (n - 1) / n * load / speed for n, load in zip(shape, loads, strict=True)
        ]
        self._devices = math.prod(shape)
        self._numbers = {f"n{i}": i for i in range(len(step.names))}
        self.clashing = self._pairs()
        self.allowed = self._allowed()
        self.floor = sum(
            2 * math.prod(dim.size for dim in product.dims) * product.count
            for product in step.products
        ) / (self.kind.peak_flops * self._devices)

    def _axes_product(self, mask: int) -> int:
        return math.prod(n for i, n in enumerate(self.shape) if mask >> i & 1)

    def _allowed(self) -> list[list[int]]:
        """For each name the masks whose devices divide all dims of that name."""
        sizes = [self.step.sizes.get(name, ()) for name in self._numbers]
        return [
            [
                mask
                for mask in range(self.count if dims else 1)
                if all(size % self._splits[mask] == 0 for size in dims)
            ]
            for dims in sizes
        ]

    def _pairs(self) -> list[tuple[int, int]]:
        """Names that some tensor has both: they share no axis."""
        pairs = set()
        for tensor in self.step.module.tensors:
            names = [self._numbers[name] for dims in tensor.dims for name in dims]
            pairs.update(itertools.combinations(sorted(set(names)), 2))
        yielding = self.step.module.yields.items()
        free = {tuple(sorted(map(self._numbers.get, pair))) for pair in yielding}
        return sorted(pairs - free)

    def evaluate(self, masks: Masks) -> Rough:
        """Bounds and rough costs of plans."""
        by_name = masks.T
        clashes = np.zeros(len(masks), int)
        for first, second in self.clashing:
            clashes += (by_name[first] & by_name[second]) != 0
        memory = np.zeros(len(masks))
        for held in self.step.held:
            shards = float(self._devices)
            if held.dims is not None:
                shards = np.ones(len(masks))
                for names in held.dims:
                    shards = shards * self._splits[self._mask(names, by_name)]
            memory += held.bytes / shards
        seconds = np.zeros(len(masks))
        for product, count in self._products:
            seconds += count * self._of_product(product, by_name)
        return Rough(clashes=clashes, memory=memory, seconds=seconds)

    @functools.cached_property
    def _products(self) -> list[tuple[NamedProduct, int]]:
        """Equal products as one, and how often they are computed."""
        counts: dict[NamedProduct, int] = {}
        for product in self.step.products:
            once = dataclasses.replace(product, count=1)
            counts[once] = counts.get(once, 0) + product.count
        return list(counts.items())

    def _mask(self, names: Sequence[str], by_name: np.ndarray) -> np.ndarray:
        masks = [by_name[self._numbers[name]] for name in names]
        return functools.reduce(np.bitwise_or, masks, np.zeros_like(by_name[0]))

    def _of_product(self, product: NamedProduct, by_name: np.ndarray) -> np.ndarray:
        """Seconds of one product with what it gathers and reduces."""
        left, right, out = (
            [self._mask(getattr(dim, of), by_name) for dim in product.dims]
            for of in ("left", "right", "out")
        )
        inner = [dim.side is Side.INNER for dim in product.dims]
        zeros = np.zeros_like(by_name[0])
        summed = zeros
        for i, is_inner in enumerate(inner):
            if is_inner:
                # An operand that is not split is cut for nothing.
                both = np.where(left[i] == 0, right[i], left[i])
                summed = summed | np.where(right[i] == 0, both, left[i] & right[i])
        split, kept = [], zeros
        for i, is_inner in enumerate(inner):
            kept = kept | (zeros if is_inner else out[i])
            either = left[i] | right[i]
            split.append(summed & either if is_inner else out[i] & ~summed)
        shards = functools.reduce(np.multiply, (self._splits[mask] for mask in split))
        size = math.prod(dim.size for dim in product.dims)
        seconds = 2 * size / shards / self.kind.peak_flops
        full, sizes = self._bytes(product), product.itemsizes
        for sides, where in ((left, 0), (right, 1)):
            gathered, parts = zeros, 1
            for mask, mine in zip(split, sides, strict=True):
                gathered = gathered | (mine & ~mask)
                parts = parts * self._splits[mine & mask]
            seconds = seconds + self._along(gathered, full[where] / parts)
        parts = shards / self._splits[summed]
        result = full[2] / parts
        seconds = seconds + self._along(summed, result)
        seconds = seconds + self._along(summed & ~kept, result)
        elements = result / sizes[2] / self._splits[summed & kept]
        return seconds + _ELEMENTWISE * elements / self.kind.memory_bandwidth

    @staticmethod
    def _bytes(product: NamedProduct) -> list[float]:
        """Bytes of the full operands and the result."""
        missing = (Side.COLUMNS, Side.ROWS, Side.INNER)
        return [
            itemsize * math.prod(d.size for d in product.dims if d.side is not side)
            for side, itemsize in zip(missing, product.itemsizes, strict=True)
        ]

    def _along(self, masks: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Seconds to gather or to reduce so many bytes along the axes of masks."""
        seconds, left = np.zeros(len(masks)), size
        for i in reversed(range(len(self.shape))):
            has = (masks >> i & 1) == 1
            seconds = seconds + np.where(has, left * self._per_byte[i], 0.0)
            left = np.where(has, left / self.shape[i], left)
        return seconds
