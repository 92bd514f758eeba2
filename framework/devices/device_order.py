"""Laying the axes of a mesh onto the links of a torus.

The partitioner keeps the user's device order in its collectives, so that order decides
which links they take (GSPMD 3.1). Each axis gets a box of the torus, entire dims of it
if sizes allow, and goes through its box so that neighbours on the axis are linked:

  chips of one row          0 -> 1 -> 2 -> 3    on the first cores of the chips, and
  with two cores each       7 <- 6 <- 5 <- 4    back on the second cores: a ring
  chips of one column       0 -> 7 -> 1 -> 6 -> 2 -> 5 -> 3 -> 4   (index on the axis)

The papers' authors order devices like this outside of full pods (`GetNonPod2dMesh` in
Lingvo's gshard_utils.py).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from meshwright.framework.devices.topology import Topology
from meshwright.framework.devices.torus import longest_step, ring_load
from meshwright.framework.sharding.mesh import DeviceMesh

# How many more cuts of torus dims than necessary are tried: (32, 8) on v3:8x16 gains by
# two cuts. Trying all would take minutes for three axes on a large torus.
_MORE_CUTS = 2


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DeviceOrder:
    """The position on a torus of each device of a mesh.

    Args:
      topology: the torus.
      ids: int, of the mesh's shape: numbers of devices in `topology_devices`.
      boxes: for each mesh axis how many chips along each torus dim it spans, and
        cores; None for an order that the user gave.
      loads: for each mesh axis the load of its rings on the busiest link, see
        `ring_load`.
    """

    topology: Topology
    ids: np.ndarray
    boxes: tuple[tuple[int, ...], ...] | None
    loads: tuple[int, ...]

    @property
    def positions(self) -> np.ndarray:
        """int [devices, dims + 1]: each mesh device's position, in row-major order."""
        return self.topology.positions[self.ids.flat]


def order_of(mesh: DeviceMesh, torus: Topology) -> DeviceOrder:
    """The order that a mesh gives, or the best order if it gives none.

    Args:
      mesh: with as many devices as the torus, or a single device; its ids are numbers
        in `topology_devices`.
      torus: the topology.

    Raises:
      ValueError: see `device_order`.
    """
    if mesh.device_ids is None and mesh.size > 1:
        return device_order(mesh.shape, torus)
    positions = torus.positions[mesh.ids]
    loads = []
    for axis in range(len(mesh.shape)):
        rings = np.moveaxis(positions, axis, -2)
        loads.append(ring_load(torus, rings.reshape(-1, *rings.shape[-2:])))
    return DeviceOrder(topology=torus, ids=mesh.ids, boxes=None, loads=tuple(loads))


@functools.cache
def device_order(shape: tuple[int, ...], torus: Topology) -> DeviceOrder:
    """The order in which the rings of all axes load the links least.

    Args:
      shape: the mesh's shape; the product is the number of devices of the torus.
      torus: the topology.

    Raises:
      ValueError: the mesh and the topology differ in size.
    """
    if math.prod(shape) != torus.size:
        raise ValueError(
            f"a mesh of shape {shape} has {math.prod(shape)} devices, but TPU topology "
            f"{torus.name!r} has {torus.size}: choose a mesh or a topology of the "
            "same size"
        )
    splits = list(_splits(shape, (*torus.chips, torus.kind.cores)))
    # Dims that are cut up leave rings that jump over each other's chips.
    fewest = min(map(_cuts, splits), default=0)
    orders = [_ordered(torus, boxes) for boxes in splits if _cuts(boxes) == fewest]
    if not orders:
        raise ValueError(
            f"a mesh of shape {shape} cannot be laid onto TPU topology {torus.name!r} "
            "in boxes: choose axes whose sizes divide its dims"
        )
    return min(orders, key=lambda order: (sum(order.loads), *reversed(order.loads)))


@functools.cache
def device_orders(shape: tuple[int, ...], torus: Topology) -> tuple[DeviceOrder, ...]:
    """The trainer's order, and the orders that load the links less on some axis.

    Args:
      shape: the mesh's shape.
      torus: the topology, with as many devices.

    Raises:
      ValueError: the mesh cannot be laid onto the torus.
    """
    default = device_order(shape, torus)
    splits = list(_splits(shape, (*torus.chips, torus.kind.cores)))
    most = min(map(_cuts, splits)) + _MORE_CUTS
    by_loads = {default.loads: default}
    for boxes in splits:
        if _cuts(boxes) <= most:
            order = _ordered(torus, boxes)
            # A mesh whose devices are in order leaves their order to the trainer.
            if list(order.ids.flat) != list(range(torus.size)):
                by_loads.setdefault(order.loads, order)
    return tuple(
        order
        for order in by_loads.values()
        if order is default
        or not any(_is_less(loads, order.loads) for loads in by_loads)
    )


def _is_less(loads: tuple[int, ...], than: tuple[int, ...]) -> bool:
    return loads != than and all(a <= b for a, b in zip(loads, than, strict=True))


def _splits(
    sizes: Sequence[int], dims: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways of giving each axis a box, so that boxes together make up the dims."""
    if not sizes:
        if all(n == 1 for n in dims):
            yield ()
        return
    choices = [[f for f in range(1, n + 1) if n % f == 0] for n in dims]
    for box in itertools.product(*choices):
        if math.prod(box) == sizes[0]:
            left = tuple(n // f for n, f in zip(dims, box, strict=True))
            for others in _splits(sizes[1:], left):
                yield (box, *others)


def _cuts(boxes: Sequence[Sequence[int]]) -> int:
    """The number of times that axes cut dims into parts."""
    sharing = [sum(f > 1 for f in along) for along in zip(*boxes, strict=True)]
    return sum(max(axes - 1, 0) for axes in sharing)


def _ordered(torus: Topology, boxes: tuple[tuple[int, ...], ...]) -> DeviceOrder:
    """The best order of each axis in its box; the last axes have neighbouring chips."""
    box_array = np.array(boxes)
    scales = np.cumprod(np.vstack([np.ones_like(box_array[:1]), box_array[:0:-1]]), 0)
    scales = scales[::-1]
    origin = [np.indices(box).reshape(len(box), -1).T for box in boxes]
    ways, loads = [], []
    for axis, box in enumerate(boxes):
        others = [steps * scales[i] for i, steps in enumerate(origin) if i != axis]
        offsets = functools.reduce(_sums, others, np.zeros((1, len(box)), int))
        rings = {
            name: offsets[:, None] + way * scales[axis]
            for name, way in _ways(box).items()
        }
        load, _, name = min(
            (ring_load(torus, r), longest_step(torus, r), name)
            for name, r in rings.items()
        )
        ways.append(_ways(box)[name] * scales[axis])
        loads.append(load)
    positions = functools.reduce(_sums, ways)
    dims = (*torus.chips, torus.kind.cores)
    # Devices are numbered by (..., y, x, core).
    order = [*reversed(range(len(dims) - 1)), len(dims) - 1]
    ids = np.ravel_multi_index(
        tuple(positions[:, d] for d in order), [dims[d] for d in order]
    )
    return DeviceOrder(
        topology=torus,
        ids=ids.reshape([math.prod(box) for box in boxes]),
        boxes=boxes,
        loads=tuple(loads),
    )


def _sums(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return (first[:, None] + second[None]).reshape(-1, first.shape[-1])


def _ways(box: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Ways through a box, int [positions, dims]; plainer ways have earlier names."""
    plain = np.indices(box).reshape(len(box), -1).T
    ways = {"0 plain": plain, "1 zigzag": _zigzag(plain)}
    real = [d for d, n in enumerate(box) if n > 1]
    for last in real:
        rest = [d for d in real if d != last]
        if rest and box[last] % 2 == 0:
            ways[f"2 ring {last}"] = _ring(box, rest, last)
    return ways


def _zigzag(way: np.ndarray) -> np.ndarray:
    """Every second position out, the others back: no step is longer than two."""
    return np.concatenate([way[::2], way[1::2][::-1]])


def _ring(box: tuple[int, ...], rest: Sequence[int], last: int) -> np.ndarray:
    """A closed way of single steps: snakes over all lines but one, and back on that."""
    path = _snake([box[d] for d in rest])
    going = [
        (point, i)
        for i in range(box[last])
        for point in (path[1:] if i % 2 == 0 else path[:0:-1])
    ]
    back = [(path[0], i) for i in reversed(range(box[last]))]
    way = np.zeros((len(going) + len(back), len(box)), int)
    for row, (point, i) in zip(way, going + back, strict=True):
        row[rest], row[last] = point, i
    return way


def _snake(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """A way of single steps through a box, not closed."""
    path: list[tuple[int, ...]] = [()]
    for size in sizes:
        path = [
            (*point, i)
            for number, point in enumerate(path)
            for i in (range(size) if number % 2 == 0 else reversed(range(size)))
        ]
    return path
