"""Volumes put together from what a model said of their tiles, and how right it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from meshwright.tasks.segmentation.patches import Tile
from meshwright.tasks.segmentation.segmentation_input import Size


@dataclasses.dataclass(frozen=True, eq=False)
class Segmented:
    """What was found in a volume.

    Args:
      case: number of the volume.
      found: int32 [X, Y, Z], the likeliest class of each voxel.
    """

    case: int
    found: np.ndarray


def segmented_volumes(
    tiles: Sequence[Tile],
    answers: Iterable[tuple[int, np.ndarray]],
    size_of: Callable[[int], Size],
) -> Iterator[Segmented]:
    """Each volume of which all tiles are answered, as soon as they are.

    Where tiles overlap their answers are added up.

    Args:
      tiles: of all volumes, those of a volume next to each other.
      answers: number of a tile, and float32 [U, V, W, K] of the classes' chances, in
        the order of the numbers; some tiles may be missing.
      size_of: of a volume, by its number.
    """
    counts: dict[int, int] = {}
    for tile in tiles:
        counts[tile.case] = counts.get(tile.case, 0) + 1
    case, missing, total = None, 0, None
    for number, chances in answers:
        tile = tiles[number]
        if tile.case != case:
            case, missing = tile.case, counts[tile.case]
            total = np.zeros((*size_of(case), chances.shape[-1]), np.float32)
        ends = zip(tile.start, chances.shape, total.shape[:3], strict=False)
        place = tuple(slice(i, min(i + m, n)) for i, m, n in ends)
        own = tuple(slice(0, one.stop - one.start) for one in place)
        total[place] += chances[own]
        missing -= 1
        if missing == 0:
            yield Segmented(case, total.argmax(-1).astype(np.int32))


def counts_by_class(
    found: np.ndarray, truth: np.ndarray, num_classes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Voxels of each class in both, in `found` and in `truth`: int64 [K] each."""
    same = np.where(found == truth, truth, num_classes)
    return tuple(
        np.bincount(one.ravel(), minlength=num_classes + 1)[:num_classes]
        for one in (same, found, truth)
    )


def dice(overlap: np.ndarray, found: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """2 |found and truth| / (|found| + |truth|) by class; NaN of one in neither."""
    both = np.asarray(found, np.float64) + np.asarray(truth, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(both > 0, 2 * np.asarray(overlap, np.float64) / both, np.nan)
