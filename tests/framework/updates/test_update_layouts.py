"""How weight updates are divided: dims, tiles, padding, and back to logical shapes."""

import dataclasses
import math

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies

from meshwright.framework.compiler.weight_update_sharding.update_layouts import (
    Tiles,
    UpdateLayout,
    layouts_of,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.stored_form import StoredForm
from tests.framework.updates.updates import BOTH, NO_LATENCY, Analysed, analysed

CPU, TPU = Tiles(), Tiles(rows=8, columns=128)
B = 8


@pytest.mark.parametrize(
    "tiles,shape,dtype,elements",
    [
        (CPU, (9, 130), "f32", 9 * 130),
        (CPU, (), "f32", 1),
        (TPU, (9, 130), "f32", 16 * 256),
        (TPU, (9, 130), "bf16", 16 * 256),
        (TPU, (17, 130), "bf16", 32 * 256),
        (TPU, (17, 130), "s8", 32 * 256),
        (TPU, (3, 3, 8, 64), "f32", 9 * 8 * 128),
        (TPU, (72, 64), "f32", 64 * 128),
        (TPU, (3, 3, 2, 64), "f32", 9 * 2 * 128),
        (TPU, (3, 6, 64), "f32", 3 * 8 * 128),
        (TPU, (130,), "f32", 256),
        (TPU, (130,), "bf16", 256),
    ],
)
def test_bytes_in_whole_tiles(tiles, shape, dtype, elements):
    size = {"f32": 4, "bf16": 2, "s8": 1}[dtype]
    assert tiles.bytes(shape, dtype) == elements * size


def on_mesh(analysis: Analysed, devices: int) -> Analysed:
    """The same as if analysed for more devices than there are."""
    mesh = DeviceMesh(("data",), (devices,))
    completed = dataclasses.replace(analysis.completed, mesh=mesh, shardings={})
    return dataclasses.replace(analysis, completed=completed)


def momentum_of(shape):
    """A step for a weight of any shape; the batch's sum is its gradient."""

    def step(w, m, x):
        m = 0.9 * m + tf.reduce_sum(x, 0)
        return {"w": w - m, "m": m}

    return step, {"w": shape, "m": shape, "x": [B, *shape]}, {"x": batch(len(shape))}


def batch(rank):
    return ("data", *[None] * rank)


def stored(layout: UpdateLayout, value) -> str:
    """Such as `[9:data,64]`: the shape with dims combined, and what is split."""
    split = layout.sharding(value).dims
    sizes = zip(layout.shape(value), split, strict=True)
    return ",".join(
        str(n) + (":" + ".".join(axes) if axes else "") for n, axes in sizes
    )


@pytest.mark.parametrize(
    "tiles,devices,shape,want",
    [
        # As plain as can be: one dim, the first of equals.
        (CPU, 8, [3, 3, 64, 64], "3,3,64:data,64"),
        (CPU, 32, [3, 3, 64, 64], "3,3,64:data,64"),
        (CPU, 8, [64, 3], "64:data,3"),
        (CPU, 8, [3, 64], "3,64:data"),
        # A tile has 128 columns and 8 rows, fewer of few rows; either dim may be rows.
        # [3,3,8,64] are 72 rows, [72,64] are 64; [3,3,2,64] are 18, [3,6,64] are 24.
        (TPU, 8, [3, 3, 64, 64], "576:data,64"),
        (TPU, 32, [3, 3, 64, 64], "3,3,64:data,64"),
        (TPU, 8, [3, 3, 256, 256], "3,3,256:data,256"),
        (TPU, 8, [2, 2048], "2,2048:data"),
        # Biases; the padding of a vector's last tile is all that 32 devices have.
        (CPU, 8, [2048], "2048:data"),
        (TPU, 8, [2048], "2048:data"),
        (TPU, 32, [2048], "2048:data"),
        # What nothing divides is combined, for less padding.
        (CPU, 8, [13], "13:data"),
        (CPU, 8, [13, 7], "91:data"),
        (CPU, 8, [3, 3, 5, 7], "315:data"),
        (CPU, 9, [3, 3, 256, 256], "9:data,256,256"),
        (TPU, 9, [3, 3, 256, 256], "9:data,256,256"),
    ],
)
def test_the_format_with_the_fewest_bytes(tiles, devices, shape, want):
    step, shapes, split = momentum_of(shape)
    machine = dataclasses.replace(NO_LATENCY, tiles=tiles)
    with analysed(step, shapes, split) as analysis:
        analysis = on_mesh(analysis, devices)
        decision = analysis.decide(machine)["m w"]
        layout = decision.layout
        for name in ("w", "m"):
            assert stored(layout, analysis.arguments[name]) == want
        assert layout.shards == devices
        together = layout.sharding(analysis.arguments["m"])
        shard = together.shard_shape(layout.shape(analysis.arguments["m"]))
        spared = tiles.bytes(shape, "f32") - tiles.bytes(shard, "f32")
        assert layout.spared_bytes(analysis.arguments["m"]) == spared


def test_a_dim_of_less_than_two_is_not_split():
    step, shapes, split = momentum_of([1, 5])
    with analysed(step, shapes, split) as analysis:
        (cluster,) = analysis.clusters
        layouts = layouts_of(cluster, analysis.dims, analysis.completed, ("data",), CPU)
        w = analysis.arguments["w"]
        assert [stored(layout, w) for layout in layouts] == ["1,5:data", "5:data"]


def chains(analysis: Analysed, name: str, tiles: Tiles = CPU) -> set[tuple[int, ...]]:
    """The dims of a tensor that may be split, or combined and split."""
    (cluster,) = analysis.clusters
    value = analysis.arguments[name]
    layouts = list(
        layouts_of(cluster, analysis.dims, analysis.completed, ("data",), tiles)
    )
    firsts = [(layout.first(value), layout.count) for layout in layouts]
    return {tuple(range(i, i + n)) for i, n in firsts if i is not None}


@pytest.mark.parametrize(
    "tiles,shape,combined",
    [
        (CPU, [3, 5, 7], {(0, 1), (1, 2), (0, 1, 2)}),
        # Rows and columns of tiles are no row of numbers, nor are dims with padding.
        (TPU, [3, 5, 7], set()),
        (TPU, [3, 16, 128], {(0, 1)}),
        (TPU, [2, 3, 5, 7], {(0, 1)}),
    ],
)
def test_only_dims_that_lie_in_a_row_are_combined(tiles, shape, combined):
    step, shapes, split = momentum_of(shape)
    with analysed(step, shapes, split) as analysis:
        alone = {(dim,) for dim in range(len(shape))}
        assert chains(analysis, "w", tiles) == alone | combined


def test_factored_slots_are_split_as_the_dims_that_they_have():
    """Adafactor's row has the first dim, its column the second: never combined."""

    def step(w, row, col, x):
        g = tf.reduce_sum(x, 0)
        row = 0.9 * row + tf.reduce_mean(g * g, 1)
        col = 0.9 * col + tf.reduce_mean(g * g, 0)
        scale = tf.math.rsqrt(row[:, None]) * tf.math.rsqrt(col)
        return {"w": w - g * scale, "row": row, "col": col}

    shapes = {"w": [13, 7], "row": [13], "col": [7], "x": [B, 13, 7]}
    with analysed(step, shapes, {"x": batch(2)}) as analysis:
        assert analysis.updated() == [["col", "row", "w"]]
        assert chains(analysis, "w") == {(0,), (1,)}
        assert chains(analysis, "row") == chains(analysis, "col") == {(0,)}
        row_layout, other = layouts_of(
            analysis.clusters[0], analysis.dims, analysis.completed, ("data",), CPU
        )
        row, col = analysis.arguments["row"], analysis.arguments["col"]
        firsts = {(form.first(row), form.first(col)) for form in (row_layout, other)}
        assert firsts == {(0, None), (None, 0)}


def norms_of(dims):
    """A step whose size is relative to norms over some dims, as LARS' is."""

    def step(w, m, x):
        norm = lambda t: tf.reduce_sum(t * t, dims, keepdims=True)  # noqa: E731
        g = tf.reduce_sum(x, 0)
        m = 0.9 * m + g * norm(w) / norm(g)
        return {"w": w - m, "m": m}

    return step


@pytest.mark.parametrize(
    "dims,forbidden",
    [
        # Of each stacked layer on its own: its number stays apart.
        ([1, 2], {(0, 1), (0, 1, 2)}),
        ([2], {(1, 2), (0, 1, 2)}),
        ([0], {(0, 1), (0, 1, 2)}),
        ([0, 2], {(0, 1), (1, 2), (0, 1, 2)}),
        ([0, 1, 2], set()),
    ],
)
def test_reduced_dims_are_not_combined_with_kept_ones(dims, forbidden):
    shape = [3, 13, 7]
    shapes = {"w": shape, "m": shape, "x": [B, *shape]}
    with analysed(norms_of(dims), shapes, {"x": batch(3)}) as analysis:
        may = chains(analysis, "w")
        assert {(0,), (1,), (2,)} <= may
        assert not may & forbidden
        if not forbidden:
            assert may == {(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)}


def test_a_dim_that_the_plan_splits_is_split_further_but_not_combined():
    step, shapes, split = momentum_of([16, 6])
    split |= {"w": ("model", None), "m": ("model", None)}
    with analysed(step, shapes, split, mesh=BOTH) as analysis:
        assert chains(analysis, "w") == {(0,), (1,)}
        decision = analysis.decide()["m w"]
        assert stored(decision.layout, analysis.arguments["w"]) == "16:model.data,6"
        unsplit = decision.layout.sharding(analysis.arguments["w"], split=False)
        assert str(unsplit) == "[model,_]"


@pytest.mark.parametrize(
    "data_axes,sharding",
    [(("data",), "[data,_]"), (("data", "model"), "[model.data,_]")],
)
def test_an_update_is_split_by_all_axes_along_which_it_is_repeated(data_axes, sharding):
    """By the last one first: neighbours are to reduce most."""
    step, shapes, _ = momentum_of([16, 6])
    split = {"x": (data_axes, None, None)}
    with analysed(step, shapes, split, mesh=BOTH, data_axes=data_axes) as analysis:
        (decision,) = analysis.decide().values()
        assert str(decision.layout.sharding(analysis.arguments["m"])) == sharding


MESH = DeviceMesh(("X", "Y"), (2, 4))


@strategies.composite
def forms(draw):
    """A stored form with any dims combined, any dim split."""
    shape = tuple(
        draw(strategies.lists(strategies.integers(1, 7), min_size=1, max_size=4))
    )
    first = draw(strategies.integers(0, len(shape) - 1))
    count = draw(strategies.integers(1, len(shape) - first))
    rank = len(shape) - count + 1
    axes = draw(strategies.permutations(["X", "Y"]))
    dims = [[] for _ in range(rank)]
    for axis in axes[: draw(strategies.integers(0, 2))]:
        dims[draw(strategies.integers(0, rank - 1))].append(axis)
    split = Sharding(MESH, tuple(map(tuple, dims)))
    combined = (first, count) if count > 1 else None
    replicated = Sharding.replicated(MESH, len(shape))
    return StoredForm(shape, tf.float32, replicated, split, combined)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(form=forms())
def test_stored_forms_hold_every_number_once_and_zeros_besides(form):
    size = math.prod(form.shape)
    logical = np.arange(1.0, size + 1, dtype=np.float32).reshape(form.shape)
    stored = form.pad(logical)
    assert stored.shape == form.stored_shape
    splits = form.border.splits()
    assert all(n % parts == 0 for n, parts in zip(stored.shape, splits, strict=True))
    # In order, for padding is at the end of dims; less than one more for each shard.
    np.testing.assert_array_equal(stored[stored != 0], logical.ravel())
    first, count = form.combined or (0, 1)
    together = math.prod(form.shape[first : first + count])
    sizes = (*form.shape[:first], together, *form.shape[first + count :])
    for n, parts, padded in zip(sizes, splits, stored.shape, strict=True):
        assert padded - n < parts
    np.testing.assert_array_equal(form.unpad(stored), logical)
    # The same inside a program.
    np.testing.assert_array_equal(form.to_stored(tf.constant(logical)), stored)
    np.testing.assert_array_equal(form.to_logical(tf.constant(stored)), logical)


def test_what_is_split_otherwise_but_of_the_same_shape():
    """Nothing to do on the host; inside a program it is annotated both ways."""
    plain = Sharding.from_dims_mapping(MESH, [None, "Y"])
    split = Sharding.from_dims_mapping(MESH, ["X", "Y"])
    form = StoredForm((4, 8), tf.float32, plain, split)
    assert form.is_logical and form.border == split
    host = np.ones([4, 8], np.float32)
    assert form.pad(host) is host

    @tf.function(autograph=False)
    def there_and_back(x):
        return form.to_logical(form.to_stored(x))

    graph = there_and_back.get_concrete_function(tf.TensorSpec([4, 8])).graph
    texts = [
        op.get_attr("sharding") for op in graph.get_operations() if "Shard" in op.type
    ]
    assert len(set(texts)) == 2


def test_a_split_of_another_rank_is_refused():
    replicated, split = (Sharding.replicated(MESH, rank) for rank in (3, 1))
    with pytest.raises(ValueError, match=r"\(3, 5, 7\)"):
        StoredForm((3, 5, 7), tf.float32, replicated, split, (0, 2)).pad(
            np.ones([3, 5, 7])
        )
