"""The rows of caches, as layers and their stacks lay them out."""

from __future__ import annotations

import tensorflow as tf

from meshwright.framework.modeling.layer import Layer
from meshwright.framework.modeling.shapes import copies_of_each, take_rows
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.pipelines.pipeline_decoding import ROWS_DIM
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.stacks.sequential import Sequential
from meshwright.layers.stacks.shared_bias import SharedRelativeBias


def copied(layer: Layer, cache: NestedMap, count: int) -> NestedMap:
    """A layer's cache with `count` copies, in a row, of each row."""
    dims = row_dims(layer, cache)
    return cache.map(lambda t, dim: copies_of_each(t, count, dim), dims)


def reordered(layer: Layer, cache: NestedMap, beam: tf.Tensor) -> NestedMap:
    """A layer's cache of B * K rows with `beam` of each B, int32 [B, K], taken."""
    if isinstance(layer, SharedRelativeBias):
        return reordered(layer.stack, cache, beam)
    if isinstance(layer, Pipeline):
        return layer.take_rows(cache, beam)
    if isinstance(layer, Sequential):
        parts = {
            name: reordered(each, cache[name], beam) for name, each in layer.named()
        }
        return NestedMap(parts)
    dims = row_dims(layer, cache)
    return cache.map(lambda t, dim: take_rows(t, beam, dim), dims)


def row_dims(layer: Layer, cache: NestedMap, dim: int = 0) -> NestedMap:
    """The dim of rows of each tensor in a layer's cache, behind `dim` stacked ones."""
    if isinstance(layer, SharedRelativeBias):
        return row_dims(layer.stack, cache, dim)
    if isinstance(layer, Pipeline):
        return cache.map(lambda _: ROWS_DIM)
    if isinstance(layer, Repeat):
        return row_dims(layer.body, cache, dim + 1)
    if isinstance(layer, Sequential):
        return NestedMap(
            {name: row_dims(each, cache[name], dim) for name, each in layer.named()}
        )
    return cache.map(lambda _: dim)
