"""Histograms are numpy's, on one device and over many, and gather nothing."""

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.util import tensor_util

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling import histograms
from meshwright.framework.modeling.histograms import BUCKETS, histograms_of
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

MOST = np.finfo(np.float32).max
NORMAL = np.random.RandomState(0).randn(64, 50).astype(np.float32)


def of(values):
    """Edges, counts and the number of values that are not finite."""
    out = histograms_of([tf.constant(values)])
    return out.edges[0].numpy(), out.counts[0].numpy(), float(out.not_finite[0])


def assert_counted(values, edges, counts, not_finite):
    finite = values[np.isfinite(values)]
    assert edges[0] == finite.min() and edges[-1] == finite.max()
    np.testing.assert_array_equal(counts, np.histogram(finite, edges)[0])
    assert not_finite == values.size - finite.size


@pytest.mark.parametrize(
    "values",
    [
        NORMAL,
        NORMAL[0],
        np.float32([[-1, 0, 1]]),
        np.float32([0, 1e-30, 3e-30]),
        np.float32([-MOST, 1, MOST]),
        np.float32([np.inf, 1, np.nan, 2, -np.inf]),
        np.nextafter(np.float32(1), np.float32(2)) - np.float32([0, 1e-7, 0]),
    ],
)
def test_counts_are_numpys(values):
    edges, counts, not_finite = of(values)
    assert_counted(values, edges, counts, not_finite)
    assert counts.shape == (BUCKETS,) and (np.diff(edges) >= 0).all()


def test_buckets_are_tensorboards():
    edges, counts, _ = of(NORMAL)
    (value,) = histogram_pb("", NORMAL).value
    want = tensor_util.make_ndarray(value.tensor)
    np.testing.assert_allclose(edges[:-1], want[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(counts, want[:, 2])


@pytest.mark.parametrize("values", [np.float32(3), np.full([4, 2], 3, np.float32)])
def test_a_single_value_is_the_last_buckets(values):
    edges, counts, not_finite = of(values)
    assert (edges == 3).all() and not_finite == 0
    assert counts.tolist() == [0] * (BUCKETS - 1) + [values.size]


def test_without_finite_values_nothing_is_counted():
    edges, counts, not_finite = of(np.float32([np.nan, np.inf]))
    assert not edges.any() and not counts.any() and not_finite == 2


def test_bfloat16_is_counted_as_float32():
    values = tf.cast(NORMAL, tf.bfloat16)
    edges, counts, not_finite = of(values)
    assert_counted(tf.cast(values, tf.float32).numpy(), edges, counts, not_finite)


@pytest.mark.parametrize("shape", [(50,), (3, 40, 5)])
def test_more_elements_than_an_int32_counts(shape, monkeypatch):
    monkeypatch.setattr(histograms, "_INT32_LIMIT", 20)
    values = NORMAL.flatten()[: np.prod(shape)].reshape(shape)
    assert_counted(values, *of(values))


@pytest.mark.parametrize("partitioner", Partitioner)
def test_each_device_counts_its_own_elements(partitioner):
    mesh = DeviceMesh(("x", "y"), (2, 4))
    splits = {
        (8, 32, 64): ((), ("x",), ("y",)),
        (50, 64): (("y",), ("x",)),  # Not divided by 4.
        (7, 5): (("x", "y"), ()),  # Nor by 8.
        (33,): ((),),
    }
    rng = np.random.RandomState(1)
    values = [rng.randn(*shape).astype(np.float32) for shape in splits]
    values[2][0, 0] = np.nan
    program = compile_program(
        lambda *tensors: histograms_of(tensors),
        [tf.TensorSpec(shape, tf.float32) for shape in splits],
        mesh,
        in_shardings=[Sharding(mesh, dims) for dims in splits.values()],
        partitioner=partitioner,
    )
    assert {c.kind for c in program.collectives()} == {"all-reduce"}
    out = program(*values)
    rows = zip(*map(np.asarray, (out.edges, out.counts, out.not_finite)), strict=True)
    for tensor, (edges, counts, not_finite) in zip(values, rows, strict=True):
        assert_counted(tensor, edges, counts, not_finite)


def test_a_tensor_takes_no_multiple_of_its_memory():
    program = compile_program(
        lambda x: histograms_of([x]),
        [tf.TensorSpec([1024, 1024], tf.float32)],
        DeviceMesh(("x",), (1,)),
    )
    assert program.memory().temporaries < 6 * 4 * 1024**2
