"""Pictures of a segmented volume: slices, with reference and prediction."""

from __future__ import annotations

import numpy as np

from meshwright.tasks.segmentation.volume_files import Volume

# Okabe and Ito's colours, which the colour-blind can distinguish; the background has
# none.
_COLOURS = np.array(
    [
        (230, 159, 0),
        (86, 180, 233),
        (0, 158, 115),
        (240, 228, 66),
        (0, 114, 178),
        (213, 94, 0),
        (204, 121, 167),
    ],
    np.float32,
)
_OPACITY = 0.5
_GAP = 4
_LEAST_SIDE = 192


def views(volume: Volume, found: np.ndarray) -> np.ndarray:
    """Three slices through a volume, the reference above and the prediction below.

    The slices are axial, coronal and sagittal, each through the middle of the labelled
    voxels, with spacing respected. Right is the picture's left, as radiologists look.

    Args:
      volume: a volume with a label.
      found: int32 [X, Y, Z], the predicted classes.

    Returns:
      uint8 [height, width, 3].
    """
    spacing = np.linalg.norm(volume.affine[:3, :3], axis=0)
    labelled = (volume.label > 0) | (found > 0)
    middle = [_middle(labelled.sum(tuple({0, 1, 2} - {dim}))) for dim in range(3)]
    gray = _gray(volume.image[..., 0])
    columns = []
    for dim in (2, 1, 0):
        rest = [d for d in range(3) if d != dim]
        halves = [
            _picture(
                np.take(gray, middle[dim], dim),
                np.take(label, middle[dim], dim),
                spacing[rest],
            )
            for label in (volume.label, found)
        ]
        columns.append(np.concatenate([halves[0], _gap(halves[0], 0), halves[1]], 0))
    height = max(column.shape[0] for column in columns)
    columns = [
        np.pad(column, [(0, height - column.shape[0]), (0, _GAP), (0, 0)])
        for column in columns
    ]
    return np.concatenate(columns, axis=1)[:, :-_GAP]


def _middle(counts: np.ndarray) -> int:
    """The index before which half of the counts are; the dim's middle if all are 0."""
    if not counts.any():
        return len(counts) // 2
    return int(np.searchsorted(counts.cumsum(), counts.sum() / 2))


def _gap(like: np.ndarray, dim: int) -> np.ndarray:
    shape = list(like.shape)
    shape[dim] = _GAP
    return np.zeros(shape, np.uint8)


def _gray(image: np.ndarray) -> np.ndarray:
    """Gray float [X, Y, Z] from 0 to 255; the outermost hundredths are clipped."""
    low, high = np.percentile(image, [1, 99])
    return 255 * np.clip((image - low) / max(high - low, 1e-6), 0, 1)


def _picture(gray: np.ndarray, label: np.ndarray, spacing: np.ndarray) -> np.ndarray:
    """A slice [P, Q] with its classes in colour, and pixels of one size in mm."""
    pixels = np.repeat(gray[..., None], 3, -1)
    colours = _COLOURS[(label - 1) % len(_COLOURS)]
    mixed = (1 - _OPACITY) * pixels + _OPACITY * colours
    pixels = np.where((label > 0)[..., None], mixed, pixels)
    sizes = np.array(label.shape) * spacing
    scale = max(1.0, _LEAST_SIDE / sizes.max()) * spacing
    indices = [
        np.minimum((np.arange(round(n * s)) / s).astype(int), n - 1)
        for n, s in zip(label.shape, scale, strict=True)
    ]
    pixels = pixels[indices[0]][:, indices[1]]
    # The second dim goes up, and the first from the patient's right to the left.
    return pixels.transpose(1, 0, 2)[::-1, ::-1].round().astype(np.uint8)
