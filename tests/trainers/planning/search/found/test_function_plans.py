"""Plans of functions that no file knows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.lowering.errors import LoweringError
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.stablehlo.shardy.device_work import work_of
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.trainers import search
from meshwright.trainers.planning.search.found.named_function import NamedFunction
from meshwright.trainers.planning.search.found.named_step import axes_by_name
from tests.needs import libtpu

B, M, H = 8192, 128, 512
ARGS = (
    {
        f"layer_{i}": {"up": tf.TensorSpec([M, H]), "down": tf.TensorSpec([H, M])}
        for i in range(2)
    },
    tf.TensorSpec([B, M]),
)


def step(weights, x):
    """Gradient descent of a model of two layers."""
    with tf.GradientTape() as tape:
        tape.watch(weights)
        y = x
        for layer in weights.values():
            y += tf.nn.relu(y @ layer["up"]) @ layer["down"]
        loss = tf.reduce_mean(tf.square(y))
    gradients = tape.gradient(loss, weights)
    return tf.nest.map_structure(lambda w, g: w - 0.1 * g, weights, gradients)


@pytest.fixture(scope="module")
def found():
    return search(step, ARGS, "v3:2x2", results_like=4, most=60)


def test_the_batch_is_split(found):
    """Rows are many more than weights, so the batch is what to split."""
    shardings = dict(zip(found.paths, found.leaves, strict=True))
    assert shardings["1"].splits()[0] > 1
    assert found.progress.considered > 1000 and found.progress.propagated <= 60
    first, *rest = found.text().splitlines()
    assert first.endswith(" ms on v3:2x2 by propagation")
    assert any("  1 " in line for line in rest)


def test_layers_are_split_alike(found):
    first, second = found.in_shardings[0].values()
    assert first == second


def test_the_program_is_the_one_of_one_device(found):
    random = np.random.default_rng(0)
    args = tf.nest.map_structure(
        lambda spec: random.normal(size=spec.shape).astype(np.float32) / 30, ARGS
    )
    program = compile_program(
        step,
        ARGS,
        found.mesh,
        in_shardings=found.in_shardings,
        out_shardings=found.out_shardings,
    )
    result = program.unshard(program(*args))
    alone = tf.function(step, autograph=False)(
        *tf.nest.map_structure(tf.constant, args)
    )
    for mine, its in zip(tf.nest.flatten(result), tf.nest.flatten(alone), strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-5)


def test_too_many_names_are_refused():
    many = tuple(tf.TensorSpec([2, i]) for i in range(2, 34))
    with pytest.raises(ValueError, match="64 dims of different names, and 1 to 60 can"):
        search(lambda *xs: [x + 1 for x in xs], many, "v3:2x2")


def test_what_does_not_fit_is_told():
    large = tf.TensorSpec([2**20, 2**20])
    with pytest.raises(ValueError, match="fits TPU topology 'v3:2x2'"):
        search(lambda x: x @ x, [large], "v3:2x2", most=5)


def test_one_device_is_refused():
    with pytest.raises(ValueError, match="'v5e:1x1' has one device"):
        search(lambda x: x @ x, [tf.TensorSpec([8, 8])], "v5e:1x1")


@pytest.mark.parametrize(
    "count, message",
    [(1, "leaf 0 of the result has shape"), (2, "2 leaves of the arguments and 1 of")],
)
def test_results_that_are_not_like_the_arguments_are_refused(count, message):
    specs = [tf.TensorSpec([8, 4]), tf.TensorSpec([4, 2])]
    with pytest.raises(ValueError, match=message):
        search(lambda x, w: [x @ w], specs, "v3:2x2", results_like=count)


def test_a_keras_model_is_searched_by_its_stateless_call():
    model = keras.Sequential([keras.layers.Dense(512), keras.layers.Dense(256)])
    model.build((None, 128))

    def fn(weights, x):
        return model.stateless_call(weights, [], x)[0]

    weights = [tf.TensorSpec(v.shape, v.dtype) for v in model.trainable_variables]
    found = search(fn, [weights, tf.TensorSpec([65536, 128])], "v3:2x2", most=10)
    assert found.leaves[-1].splits()[0] == 8


@pytest.mark.parametrize("mesh", [DeviceMesh(("X",), (8,)), None])
def test_annotations_are_refused(mesh):
    message = "is annotated, and a search has meshes of its own: leave annotations out"
    with pytest.raises(LoweringError, match=message):
        search(
            lambda x: mesh_split(x + 1, mesh, ["X"]), [tf.TensorSpec([64])], "v3:2x2"
        )


def work(fn, specs, shape, masks):
    named = NamedFunction(fn, specs, 0)
    mesh = DeviceMesh(("X",), shape)
    with named.step.module.opened():
        axes = axes_by_name(mesh, named.step, masks)
        return work_of(named.step.module.complete(mesh, axes), mesh)


def test_a_slice_of_what_every_device_holds_is_read_and_written():
    specs = tf.TensorSpec([64, 32]), tf.TensorSpec([32, 16])
    sizes = [work(tf.matmul, specs, (8,), (mask, 0, 0, 0)) for mask in (0, 1)]
    alone = [size.moved for size in sizes]
    assert alone == [0, 0]
    # The inner dim is split in one operand alone, which the other follows.
    sliced = work(tf.matmul, specs, (8,), (0, 1, 0, 0))
    assert sliced.moved == 2 * 4 * 16 * 4


@pytest.mark.parametrize("masks, halo", [((0, 1, 0, 0), 2), ((1, 0, 0, 0), 0)])
def test_windows_reach_into_neighbours(masks, halo):
    specs = tf.TensorSpec([8, 32, 32, 4]), tf.TensorSpec([3, 3, 4, 6])
    one = work(
        lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), specs, (8,), (*masks, 0, 0, 0, 0)
    )
    sent = [s for s in one.sent if s.kind == "collective-permute"]
    assert [s.bytes for s in sent] == [8 * halo * 32 * 4 * 4] * bool(halo)
    assert one.moved == 2 * (8 * 4 * 32 * 4 * 4) * bool(halo)


@libtpu
def test_a_search_that_compiles_takes_the_fastest():
    specs = tf.TensorSpec([512, 256]), tf.TensorSpec([256, 512])
    found = search(tf.matmul, specs, "v3:1x1", most=20, compiled=2)
    assert found.seconds == found.compiled != found.priced.seconds
    assert found.text().splitlines()[0].endswith("ms on v3:1x1 compiled")
