"""Modules of other libraries on a mesh: numbers are those of one device."""

import functools
import pathlib

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf

import meshwright.framework as mw
from tests.framework.functions.zoo import (
    garden_modules,
    keras2_modules,
    sonnet_modules,
    tfp_distributions,
    tfp_modules,
)
from tests.framework.functions.zoo.zoo_cases import MESH, computed, on_mesh

LIBRARIES = {
    "Sonnet": sonnet_modules.MODULES,
    "tf_keras": keras2_modules.MODULES,
    "TFP": tfp_modules.MODULES,
    "Garden": garden_modules.MODULES,
}
CASES = [(library, name) for library, made in LIBRARIES.items() for name in made]
BY_GSPMD = [
    *[("Sonnet", name) for name in ("BatchNorm", "Conv2D", "LSTM", "Adam", "Embed")],
    *[("Sonnet", name) for name in ("Cifar10ConvNet", "VectorQuantizerEMA")],
    *[("tf_keras", name) for name in ("functional", "MultiHeadAttention", "LSTM")],
    *[("tf_keras", name) for name in ("legacy.Adam", "metrics of probabilities")],
    *[("Garden", name) for name in ("TransformerEncoderBlock", "MoeLayer")],
    *[("TFP", name) for name in ("distributions: vectors", "DenseFlipout")],
    *[("TFP", name) for name in ("RealNVP", "NoUTurnSampler", "GaussianProcess")],
]
"""Cases that GSPMD partitions too: each kind of program that the others are of."""
PAGE = pathlib.Path(__file__).parents[4] / "docs/reference/programs/functions.md"


@functools.cache
def by_one_device(library, name):
    return computed(
        LIBRARIES[library][name], lambda step: tf.function(step, jit_compile=True)
    )


def assert_alike(library, name, partitioner):
    case = LIBRARIES[library][name]
    want = by_one_device(library, name)
    got = computed(case, on_mesh(case, partitioner, name.split(":")[0]))
    pairs = zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True)
    for x, y in pairs:
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("library", "name"), CASES)
def test_a_module(library, name):
    assert_alike(library, name, mw.Partitioner.SHARDY)


@pytest.mark.parametrize(("library", "name"), BY_GSPMD)
def test_a_module_by_gspmd(library, name):
    assert_alike(library, name, mw.Partitioner.GSPMD)


@pytest.mark.parametrize("name", tfp_modules.NO_JIT)
def test_what_tf_does_not_compile(name):
    case, message = tfp_modules.NO_JIT[name]
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        computed(case, lambda step: tf.function(step, jit_compile=True))
    with pytest.raises(mw.LoweringError, match="TF2XLA cannot compile it: op '"):
        computed(case, on_mesh(case, mw.Partitioner.SHARDY, "step"))


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_dropout_without_a_seed(partitioner):
    """TF's jit makes such numbers by an op that has no seed: each call is different."""
    dropout = snt.Dropout(0.25)

    @mw.function(mesh=MESH, partitioner=partitioner)
    def drop(x):
        y = dropout(mw.mesh_split(x, MESH, ["data", None]), is_training=True)
        return (
            y,
            mw.mesh_split(y, MESH, [None, "model"]),
            mw.mesh_split(y, MESH, [None, None]),
        )

    x = np.ones([8, 64], np.float32)
    first, *others = [y.numpy() for y in drop(x)]
    for other in others:
        np.testing.assert_array_equal(first, other)
    np.testing.assert_allclose(np.unique(first), [0, 1 / 0.75], rtol=1e-6)
    assert 0.65 < np.mean(first > 0) < 0.85
    assert len({row.tobytes() for row in first}) == 8
    assert (drop(x)[0].numpy() != first).any()


def test_each_class_of_sonnet_has_a_case_or_a_reason():
    settled = {*sonnet_modules.ABSTRACT, *sonnet_modules.UNTESTED}
    assert sonnet_modules.exported() == {*sonnet_modules.MODULES, *settled}


def test_each_optimizer_of_keras_2_has_a_case():
    optimizers = keras2_modules.OPTIMIZERS
    for prefix, module in (("", optimizers), ("legacy.", optimizers.legacy)):
        names = {name for name in dir(module) if name[0].isupper()} - {"Optimizer"}
        assert {prefix + name for name in names} <= keras2_modules.MODULES.keys()


def test_the_page_counts_the_cases():
    groups = tfp_distributions.GROUPS
    distributions = sum(len(group.distributions) for group in groups.values())
    others = len(tfp_modules.MODULES) - len(groups)
    page = " ".join(PAGE.read_text().split())
    for row in (
        f"| Sonnet | {len(sonnet_modules.MODULES)} |",
        f"| tf_keras | {len(keras2_modules.MODULES)} |",
        f"| Model Garden | {len(garden_modules.MODULES)} |",
        f"| TensorFlow Probability | {distributions + others} |",
        f"probabilities of {distributions} distributions",
        f"{len(BY_GSPMD)} of them under GSPMD",
    ):
        assert row in page
