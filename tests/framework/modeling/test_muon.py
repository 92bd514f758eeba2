"""Muon against its formulas in numpy, stacking, and which weights are matrices."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.initializers import Constant
from meshwright.framework.modeling.layer import EXPERT_DIM, STACK_DIM, WeightSpec
from meshwright.framework.modeling.optimizers.muon import (
    Muon,
    MuonScale,
    newton_schulz,
)
from meshwright.framework.modeling.optimizers.optimizer import SGD, Adam
from meshwright.framework.nested_map import NestedMap

RNG = np.random.default_rng(0)


def spec(shape, dims, **how) -> WeightSpec:
    return WeightSpec(shape=shape, dims=dims, initializer=Constant(0.0), **how)


SPECS = NestedMap(
    w=spec((6, 10), ("model", "hidden")),
    out=spec((10, 6), ("hidden", "model")),
    q=spec((6, 2, 4), ("model", "heads", "head_dim")),
    o=spec((3, 2, 4, 6), (STACK_DIM, "heads", "head_dim", "model")),
    experts=spec((2, 3, 6, 5), (STACK_DIM, EXPERT_DIM, "expert_model", "hidden")),
    bias=spec((2, 4), ("heads", "head_dim")),
    scale=spec((6,), ("features",)),
    table=spec((11, 6), ("vocab", "model")),
    kernel=spec((3, 3, 2, 4), ("window", "window", "in_channels", "channels")),
)
MATRICES = {"w": 1, "out": 1, "q": 1, "o": 2, "experts": 1}


def drawn() -> NestedMap:
    return SPECS.map(lambda s: RNG.standard_normal(s.shape).astype(np.float32))


def run(optimizer, theta, gradients) -> NestedMap:
    """The weights after an update for each of the gradients."""

    @tf.function(autograph=False)
    def update(step, grads, theta, slots):
        result = optimizer.update(step, grads, theta, slots, SPECS)
        return result.theta, result.slots

    slots = optimizer.slots(SPECS).map(lambda s: tf.zeros(s.shape))
    for step, grads in enumerate(gradients):
        theta, slots = update(tf.constant(step), grads, theta, slots)
    return theta.map(lambda x: x.numpy())


def orthogonal(x: np.ndarray) -> np.ndarray:
    """Five iterations of one matrix, in float64."""
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def expected(path: str, x: np.ndarray, scale: MuonScale) -> np.ndarray:
    """The direction of an update, matrix by matrix."""
    spec, rows = SPECS[path], MATRICES[path]
    stack, shape = spec.shape[: spec.stack_rank], spec.shape[spec.stack_rank :]
    height, width = np.prod(shape[:rows]), np.prod(shape[rows:])
    made = [orthogonal(m) for m in x.reshape(-1, height, width).astype(np.float64)]
    size = {
        MuonScale.SPECTRAL: max(1.0, width / height) ** 0.5,
        MuonScale.ADAM: 0.2 * max(height, width) ** 0.5,
    }[scale]
    return size * np.reshape(made, (*stack, *shape))


@pytest.mark.parametrize("scale", MuonScale)
@pytest.mark.parametrize("nesterov,decay", [(True, 0.0), (False, 0.25)])
def test_updates_are_the_formulas(scale, nesterov, decay):
    optimizer = Muon(
        learning_rate=0.5,
        momentum=0.75,
        nesterov=nesterov,
        weight_decay=decay,
        scale=scale,
        others=Adam(learning_rate=0.125),
    )
    theta, gradients = drawn(), [drawn(), drawn()]
    got = run(optimizer, theta, gradients)
    by_adam = run(Adam(learning_rate=0.125), theta, gradients)
    for path, start in theta.items():
        if path not in MATRICES:
            np.testing.assert_array_equal(got[path], by_adam[path], err_msg=path)
            continue
        w, m = start.astype(np.float64), 0.0
        for g in gradients:
            m = 0.75 * m + g[path]
            along = expected(path, g[path] + 0.75 * m if nesterov else m, scale)
            w = w - 0.5 * (along + decay * w)
        np.testing.assert_allclose(got[path], w, atol=2e-5, err_msg=path)


def test_singular_values_come_near_one():
    x = RNG.standard_normal([4, 20, 30]).astype(np.float32)
    values = np.linalg.svd(newton_schulz(tf.constant(x), 5).numpy(), compute_uv=False)
    assert values.min() > 0.5 and values.max() < 1.25
    np.testing.assert_array_equal(newton_schulz(tf.zeros([3, 4]), 5), np.zeros([3, 4]))


def test_slots_and_which_weights_are_matrices():
    optimizer = Muon(learning_rate=0.1, others=Adam(learning_rate=0.1))
    assert {p: optimizer.rows(s) for p, s in SPECS.items()} == {
        path: MATRICES.get(path) for path in SPECS
    }
    slots = optimizer.slots(SPECS)
    assert [*slots.w] == [*slots.experts] == ["m"]
    assert [*slots.table] == [*slots.bias] == ["m", "v"]
    assert [
        *Muon(learning_rate=1, momentum=0.0, others=SGD(learning_rate=1)).slots(SPECS).w
    ] == []


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"others": 0.1}, r"Muon\.others is 0\.1; it must be the optimizer of all"),
        (
            {"others": SGD(learning_rate=1, clip_global_norm=1.0)},
            r"Muon\.others clips gradients to 1\.0.*set Muon\.clip_global_norm",
        ),
        ({"momentum": 1.0}, r"Muon\.momentum is 1\.0"),
        ({"iterations": 0}, r"Muon\.iterations is 0"),
    ],
)
def test_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        Muon(**{"learning_rate": 0.1, "others": Adam(learning_rate=0.1), **settings})
