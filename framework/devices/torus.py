"""The load on the links of a torus.

Messages take the shortest way, dim by dim, x first. A link has two directions that do
not hinder each other; devices on the same chip need no link.
"""

from __future__ import annotations

import math

import numpy as np

from meshwright.framework.devices.topology import Topology


def link_load(torus: Topology, source: np.ndarray, target: np.ndarray) -> int:
    """The number of messages on the busiest link, in its busier direction.

    Args:
      torus: the topology.
      source: int [messages, dims + 1], positions as in `Topology.positions`.
      target: likewise.
    """
    source, target = (end[:, : len(torus.chips)] for end in (source, target))
    most = 0
    for dim, (size, wraps) in enumerate(zip(torus.chips, torus.wraps, strict=True)):
        # Dims before this one have been travelled.
        line = np.concatenate([target[:, :dim], source[:, dim + 1 :]], axis=1)
        others = [n for i, n in enumerate(torus.chips) if i != dim]
        lines = np.ravel_multi_index(tuple(line.T), others) if others else 0
        start, steps = source[:, dim], _steps(source, target, dim, size, wraps)
        for sign, begin in ((1, start), (-1, size - 1 - start)):
            length = np.maximum(sign * steps, 0)
            crossings = np.zeros((int(np.prod(others)), 2 * size + 1), np.int64)
            np.add.at(crossings, (lines, begin), 1)
            np.add.at(crossings, (lines, begin + length), -1)
            crossings = crossings.cumsum(axis=1)
            most = max(most, int((crossings[:, :size] + crossings[:, size:-1]).max()))
    return most


def _steps(source, target, dim: int, size: int, wraps: bool) -> np.ndarray:
    """Links along a dim from each source to its target, by the shorter way round."""
    steps = target[:, dim] - source[:, dim]
    if not wraps:
        return steps
    steps = (steps + size // 2) % size - size // 2
    # Half way round is equally far either way: alternate.
    turn = (2 * steps == -size) & (source[:, dim] % 2 == 0)
    return np.where(turn, -steps, steps)


def longest_way(torus: Topology, source: np.ndarray, target: np.ndarray) -> int:
    """The most links that a message passes; for the arguments see `link_load`."""
    return int(_ways(torus, source, target).max(initial=0))


def _ways(torus: Topology, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The number of links that each message passes."""
    dims = enumerate(zip(torus.chips, torus.wraps, strict=True))
    return sum(abs(_steps(source, target, d, *dim)) for d, dim in dims)


def longest_step(torus: Topology, rings: np.ndarray) -> int:
    """The most links between neighbours of a ring; for `rings` see `ring_load`."""
    return longest_way(torus, *_neighbours(rings))


def ring_hops(torus: Topology, rings: np.ndarray) -> int:
    """The links that data passes one after the other until all of a ring have it.

    They lie half way round, as data goes both ways at once; where rings share links, it
    goes one way, and on to the last device; for `rings` see `ring_load`.
    """
    links = _ways(torus, *_neighbours(rings)).reshape(rings.shape[:2])
    around = links.sum(axis=1)
    if _share_links(torus, rings):
        return int((around - links.min(axis=1)).max())
    return int((-(-around // 2)).max())


def ring_load(torus: Topology, rings: np.ndarray) -> int:
    """The load of the busiest link while rings pass data on, all at once.

    A ring sends half of its data each way round, so that links are used in both
    directions. Rings that share links send all of it one way: this explains the step
    times of GSPMD's Table 2, where linking the ends of the torus makes collectives
    faster along the axis that has the links to itself, and no faster along the axis
    whose rings run in pairs, over the two cores of each chip.

    Args:
      torus: the topology.
      rings: int [rings, devices, dims + 1]: positions, in the order of each ring.

    Returns:
      Multiples of half the bytes that one device passes on; 1 where every link carries
      one ring, each way.
    """
    source, target = _neighbours(rings)
    if _share_links(torus, rings):
        return 2 * link_load(torus, source, target)
    return link_load(
        torus, np.concatenate([source, target]), np.concatenate([target, source])
    )


def box_lines(groups: np.ndarray) -> list[np.ndarray] | None:
    """The lines along each dim of the boxes that groups fill.

    Args:
      groups: int [groups, devices, dims + 1], positions.

    Returns:
      int [lines, devices, dims + 1] for each dim that a box has; None if groups fill no
      boxes of one size, or the boxes have a single dim.
    """
    shape = tuple(len(np.unique(places)) for places in groups[0].T)
    if math.prod(shape) != groups.shape[1] or sum(n > 1 for n in shape) < 2:
        return None
    boxes = np.stack([group[np.lexsort(group.T[::-1])] for group in groups])
    boxes = boxes.reshape(len(groups), *shape, groups.shape[-1])
    lines = []
    for dim in (dim for dim, n in enumerate(shape) if n > 1):
        along = np.moveaxis(boxes, dim + 1, -2)
        along = along.reshape(-1, shape[dim], groups.shape[-1])
        if (np.delete(along, dim, axis=2).std(axis=1) > 0).any():
            return None
        lines.append(along)
    return lines


def _neighbours(rings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each device of all rings, and the device that comes after it."""
    ends = (rings, np.roll(rings, -1, axis=1))
    return tuple(end.reshape(-1, rings.shape[-1]) for end in ends)


def _share_links(torus: Topology, rings: np.ndarray) -> bool:
    """Whether all rings together load a link more than one of them does."""
    alone = link_load(torus, *_neighbours(rings[:1]))
    return link_load(torus, *_neighbours(rings)) > alone


def all_pairs(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sources and targets of messages from each device of a group to each of it.

    They are those of an all-to-all.

    Args:
      groups: int [groups, devices, dims + 1], positions.
    """
    count = groups.shape[1]
    shape = (len(groups), count, count, groups.shape[-1])
    source = np.broadcast_to(groups[:, :, None], shape)
    target = np.broadcast_to(groups[:, None], shape)
    return source.reshape(-1, shape[-1]), target.reshape(-1, shape[-1])
