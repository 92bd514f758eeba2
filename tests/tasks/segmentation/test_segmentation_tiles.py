"""Volumes put together from tiles, their scores, and pictures of them."""

import numpy as np
import pytest

from meshwright.tasks.segmentation.patches import Tile
from meshwright.tasks.segmentation.segmentation_tiles import (
    counts_by_class,
    dice,
    segmented_volumes,
)
from meshwright.tasks.segmentation.segmentation_views import views
from meshwright.tasks.segmentation.volume_files import Volume
from tests.tasks.segmentation.volume_files_on_disk import affine_of, boxes

K = 3


def cut_up(size, tile, starts):
    """Tiles of volumes of these sizes; `starts` gives those along a dim."""
    made = []
    for case, shape in enumerate(size):
        along = [starts(n, m) for n, m in zip(shape, tile, strict=True)]
        grid = np.stack(np.meshgrid(*along, indexing="ij"), -1).reshape(-1, 3)
        made += [Tile(case=case, start=tuple(at), fresh=tuple(at)) for at in grid]
    return made


def answers_of(tiles, volumes, tile, sure=0.9):
    """Chances of each tile, of which `volumes` has the classes; padded by class 2."""
    for number, piece in enumerate(tiles):
        place = tuple(slice(i, i + n) for i, n in zip(piece.start, tile, strict=True))
        label = volumes[piece.case][place]
        missing = [(0, n - m) for n, m in zip(tile, label.shape, strict=True)]
        label = np.pad(label, missing, constant_values=2)
        yield number, (np.eye(K)[label] * sure).astype(np.float32)


def test_volumes_are_put_together_from_overlapping_tiles():
    """Larger and smaller than a tile, and left out where a tile is missing."""
    sizes, tile = ((7, 5, 6), (3, 9, 2), (4, 4, 4), (6, 6, 6)), (4, 4, 3)
    volumes = [boxes(size, seed=i) for i, size in enumerate(sizes)]
    tiles = cut_up(sizes, tile, lambda n, m: range(max(1, n - m + 1)))
    answers = list(answers_of(tiles, volumes, tile))
    results = list(segmented_volumes(tiles, answers, lambda i: sizes[i]))
    assert [result.case for result in results] == [0, 1, 2, 3]
    for result, want in zip(results, volumes, strict=True):
        assert result.found.dtype == np.int32
        np.testing.assert_array_equal(result.found, want)
    second = next(i for i, tile in enumerate(tiles) if tile.case == 1)
    some = [*answers[:second], *answers[second + 1 : -1]]
    results = segmented_volumes(tiles, some, lambda i: sizes[i])
    assert [result.case for result in results] == [0, 2]


def test_answers_of_tiles_that_overlap_are_added_up():
    tiles = [Tile(case=0, start=(i, 0, 0), fresh=(i, 0, 0)) for i in range(3)]
    chances = [[[0.6, 0.4], [0.3, 0.7]], [[0.6, 0.4], [0.2, 0.8]], [[0.9, 0.1]] * 2]
    answers = [
        (i, np.reshape(chance, [2, 1, 1, 2]).astype(np.float32))
        for i, chance in enumerate(chances)
    ]
    (result,) = segmented_volumes(tiles, answers, lambda _: (4, 1, 1))
    assert result.found.ravel().tolist() == [0, 1, 0, 0]


def test_dice_of_known_masks():
    truth = np.array([0, 0, 1, 1, 1, 1, 2, 2])
    predicted = np.array([0, 1, 1, 1, 1, 0, 0, 0])
    counts = counts_by_class(predicted, truth, 4)
    assert [count.tolist() for count in counts] == [
        [1, 3, 0, 0],
        [4, 4, 0, 0],
        [2, 4, 2, 0],
    ]
    np.testing.assert_allclose(dice(*counts), [1 / 3, 3 / 4, 0, np.nan])


# Pictures.


def a_volume(label, affine, image=None) -> Volume:
    if image is None:
        image = np.random.default_rng(0).standard_normal(label.shape)
    image = image[..., None].astype(np.float32)
    return Volume(image=image, label=label, affine=affine)


def coloured(picture) -> np.ndarray:
    """bool [height, width]: what is not gray."""
    return picture.max(-1) != picture.min(-1)


def test_pictures_have_the_size_of_what_they_show():
    """Of 12, 8 and 10 mm; the longest side of each has 192 pixels."""
    label = np.zeros([6, 8, 10], np.int32)
    label[2:4, 3:5, 4:7] = 1
    picture = views(a_volume(label, affine_of("RAS", (2.0, 1.0, 1.0))), label * 0)
    widths, heights = (192, 192, 154), (128, 160, 192)
    assert picture.dtype == np.uint8
    assert picture.shape == (2 * 192 + 4, sum(widths) + 8, 3)
    left, shown = 0, coloured(picture)
    shares = ((4 * 2, 96), (4 * 3, 120), (2 * 3, 80))  # Labelled, and all, in mm².
    for width, height, (part, full) in zip(widths, heights, shares, strict=True):
        column = picture[:, left : left + width]
        assert not column[2 * height + 4 :].any(), "nothing below"
        assert not column[height : height + 4].any()
        upper = shown[:height, left : left + width]
        assert abs(upper.mean() - part / full) < 0.01
        assert not shown[height:, left : left + width].any(), "nothing was found"
        assert column[height + 4 : 2 * height + 4].max() > 100
        left += width + 4


@pytest.mark.parametrize(
    ("at", "sides"),
    [
        ("right front top", ["upper left", "upper left", "upper left"]),
        ("left front top", ["upper right", "upper right", "upper left"]),
        ("right back top", ["lower left", "upper left", "upper right"]),
        ("right front bottom", ["upper left", "lower left", "lower left"]),
    ],
)
def test_pictures_are_turned_as_radiologists_look(at, sides):
    """Axial: front on top, right on the left. Upright: top so, right or front left."""
    high = ("right", "front", "top")
    corner = tuple(7 if word in at else 0 for word in high)
    predicted = np.zeros([8, 8, 8], np.int32)
    predicted[corner] = 2
    picture = views(a_volume(0 * predicted, np.eye(4)), predicted)[192 + 4 :]
    for i, side in enumerate(sides):
        shown = coloured(picture[:192, 196 * i :][:, :192])
        rows, columns = np.nonzero(shown)
        assert len(rows) == 24**2
        assert ("upper" if rows.mean() < 96 else "lower") in side
        assert ("left" if columns.mean() < 96 else "right") in side


def test_classes_have_colours_of_their_own_over_the_image():
    label = np.zeros([10, 10, 10], np.int32)
    for k in range(1, 10):
        label[k] = k
    dark = a_volume(label, np.eye(4), np.zeros(label.shape))
    axial = views(dark, label)[:192, :192]
    colours = {tuple(c) for c in axial.reshape(-1, 3).tolist()}
    assert len(colours) == 1 + 7, "from the eighth on they begin again"
    assert (0, 0, 0) in colours and (115, 80, 0) in colours
    image = np.zeros(label.shape)
    image[:, :5] = 1
    light = views(a_volume(label, np.eye(4), image), label)[:192, :192]
    assert (255, 255, 255) in {tuple(c) for c in light.reshape(-1, 3).tolist()}
    assert light[150].sum() > axial[150].sum() and (light[20] == axial[20]).all()
