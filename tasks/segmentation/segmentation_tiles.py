"""Volumes assembled from a model's predictions for their tiles, and their scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from meshwright.tasks.segmentation.patches import Tile
from meshwright.tasks.segmentation.segmentation_input import Size


@dataclasses.dataclass(frozen=True, eq=False)
class Segmented:
    """The predicted classes of a volume.

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
    """Each volume for which all tiles are answered, as soon as they are.

    Where tiles overlap, their answers are added.

    Args:
      tiles: the tiles of all volumes; those of a volume are next to each other.
      answers: the number of a tile, and the classes' chances, float32 [U, V, W, K], in
        the order of the numbers; some tiles may be missing.
      size_of: returns the size of a volume by its number.
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
        inside = tuple(slice(0, s.stop - s.start) for s in place)
        total[place] += chances[inside]
        missing -= 1
        if missing == 0:
            yield Segmented(case, total.argmax(-1).astype(np.int32))


def counts_by_class(
    found: np.ndarray, truth: np.ndarray, num_classes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts of each class in both, in `found` and in `truth`: int64 [K] each."""
    same = np.where(found == truth, truth, num_classes)
    return tuple(
        np.bincount(labels.ravel(), minlength=num_classes + 1)[:num_classes]
        for labels in (same, found, truth)
    )


def dice(overlap: np.ndarray, found: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """2 |found and truth| / (|found| + |truth|) by class; NaN of a class in neither."""
    both = np.asarray(found, np.float64) + np.asarray(truth, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(both > 0, 2 * np.asarray(overlap, np.float64) / both, np.nan)
