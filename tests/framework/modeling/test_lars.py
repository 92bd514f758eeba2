"""LARS against its formulas in numpy, stacking, what decays, MLPerf's schedule."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.initializers import Constant
from meshwright.framework.modeling.layer import EXPERT_DIM, STACK_DIM, WeightSpec
from meshwright.framework.modeling.optimizers.lars import LARS, MomentumOf
from meshwright.framework.modeling.optimizers.schedules import (
    ConstantSchedule,
    LinearWarmup,
    PolynomialSchedule,
)
from meshwright.framework.nested_map import NestedMap

RATE = ConstantSchedule(value=0.1)
FALLING = PolynomialSchedule(start_value=8.0, end_value=0.0, end_step=10)


def spec(*shape: int, stack=()) -> WeightSpec:
    names = ["a", "b", "c", "d"][: len(shape) - len(stack)]
    return WeightSpec(shape=shape, dims=(*stack, *names), initializer=Constant(0.0))


def train(optimizer, specs, weights: dict, grads: list[dict]) -> list[NestedMap]:
    """The weights after each update, by one compiled program."""

    def tensors(arrays):
        return NestedMap({k: tf.constant(v, tf.float32) for k, v in arrays.items()})

    @functools.partial(tf.function, jit_compile=True, autograph=False)
    def update(step, grads, theta, slots):
        result = optimizer.update(step, grads, theta, slots, specs)
        return result.theta, result.slots

    theta, history = tensors(weights), []
    slots = optimizer.slots(specs).map(lambda s: tf.zeros(s.shape, s.dtype))
    for step, grad in enumerate(grads):
        theta, slots = update(tf.constant(step), tensors(grad), theta, slots)
        history.append(theta)
    return history


def drawn(specs, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(s.shape) for k, s in specs.items()}


@pytest.mark.parametrize("momentum_of", MomentumOf)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.3, "momentum": 0.5},
        {"weight_decay": 0.3, "epsilon": 2.0, "trust_coefficient": 0.02},
        {"momentum": 0.0, "weight_decay": 0.1},
    ],
    ids=["plain", "decay", "epsilon", "no momentum"],
)
def test_is_the_papers_update(momentum_of, settings):
    """Rates fall between the updates: there what momentum is of makes a difference."""
    optimizer = LARS(learning_rate=FALLING, momentum_of=momentum_of, **settings)
    specs = NestedMap(kernel=spec(2, 3, 4), bias=spec(4))
    weights, grads = drawn(specs, 0), [drawn(specs, seed) for seed in range(1, 5)]
    eta, beta = optimizer.trust_coefficient, optimizer.weight_decay

    def expected(name):
        w, m = weights[name], 0.0
        for t, g in enumerate(step_grads[name] for step_grads in grads):
            rate = 8.0 * (1 - t / 10)
            if name == "kernel":
                sizes = [np.linalg.norm(v.ravel()) for v in (w, g)]
                rate *= (
                    eta * sizes[0] / (sizes[1] + beta * sizes[0] + optimizer.epsilon)
                )
                g = g + beta * w
            if momentum_of is MomentumOf.UPDATES:
                m = optimizer.momentum * m + rate * g
                w = w - m
            else:
                m = optimizer.momentum * m + g
                w = w - rate * m
            yield w

    history = train(optimizer, specs, weights, grads)
    for name in weights:
        for got, want in zip(history, expected(name), strict=True):
            np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-6)


def test_momentum_of_updates_and_of_gradients_differ_only_where_rates_change():
    specs = NestedMap(bias=spec(4))
    weights, grads = drawn(specs, 0), [drawn(specs, seed) for seed in (1, 2, 3)]

    def last(schedule, momentum_of):
        optimizer = LARS(learning_rate=schedule, momentum_of=momentum_of)
        return train(optimizer, specs, weights, grads)[-1].bias

    level = [last(RATE, kind) for kind in MomentumOf]
    np.testing.assert_allclose(*level, rtol=1e-5, atol=1e-6)
    falling = [last(FALLING, kind) for kind in MomentumOf]
    assert np.abs(falling[0] - falling[1]).max() > 0.1


@pytest.mark.parametrize("zero", ["weight", "gradient"])
def test_of_nothing_the_rate_is_that_of_the_step(zero):
    """Else a weight that starts at zero would stay there."""
    optimizer = LARS(learning_rate=RATE, weight_decay=0.5)
    specs = NestedMap(kernel=spec(2, 3))
    weights, grads = drawn(specs, 0), drawn(specs, 1)
    if zero == "weight":
        weights["kernel"] *= 0
        want = -0.1 * grads["kernel"]
    else:
        grads["kernel"] *= 0
        want = 0.95 * weights["kernel"]
    (got,) = train(optimizer, specs, weights, [grads])
    np.testing.assert_allclose(got.kernel, want, rtol=1e-5)


@pytest.mark.parametrize("momentum_of", MomentumOf)
@pytest.mark.parametrize("stack", [(STACK_DIM,), (STACK_DIM, EXPERT_DIM)])
def test_stacked_layers_have_rates_of_their_own(momentum_of, stack):
    optimizer = LARS(
        learning_rate=FALLING, weight_decay=0.1, momentum_of=momentum_of, epsilon=1e-5
    )
    shapes = {"kernel": (2, 3), "bias": (3,)}
    lead = (3,) if len(stack) == 1 else (1, 3)
    apart = NestedMap(
        {f"{k}{i}": spec(*s) for k, s in shapes.items() for i in range(3)}
    )
    together = NestedMap({k: spec(*lead, *s, stack=stack) for k, s in shapes.items()})

    def sized(seed):  # Layers of very different size show a norm over all of them.
        return {k: v * 10.0 ** int(k[-1]) for k, v in drawn(apart, seed).items()}

    def stacked(arrays):
        return {
            k: np.stack([arrays[f"{k}{i}"] for i in range(3)]).reshape(*lead, *s)
            for k, s in shapes.items()
        }

    weights, grads = sized(0), [sized(seed) for seed in (1, 2)]
    want = train(optimizer, apart, weights, grads)[-1]
    got = train(optimizer, together, stacked(weights), [stacked(g) for g in grads])[-1]
    for name, value in stacked({k: v.numpy() for k, v in want.items()}).items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


def test_the_schedule_of_mlperf_is_made_of_the_pieces_there_are():
    """Google's 2048 cores: 25 epochs up to 31.2, then a fall of power 2 to 1e-4."""
    steps, warmup = 2983, 977  # 25 epochs of 1,281,167 images, 32,768 at a time.
    rate = LinearWarmup(
        steps=warmup,
        first_step=0,
        schedule=PolynomialSchedule(
            start_value=31.2,
            end_value=1e-4,
            start_step=warmup,
            end_step=steps + 1,
            power=2.0,
        ),
    )
    for step in (0, 1, 400, warmup, 1500, steps - 1):
        if step <= warmup:
            want = 31.2 * step / warmup
        else:
            left = 1 - (step - warmup) / (steps - warmup + 1)
            want = (31.2 - 1e-4) * left**2 + 1e-4
        np.testing.assert_allclose(rate(tf.constant(step)), want, rtol=1e-4)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("learning_rate", "a", "must be a number or a Schedule"),
        ("momentum", 1.0, "must be a number of at least 0 and below 1"),
        (
            "momentum_of",
            "updates",
            r"must be one of MomentumOf\.UPDATES, MomentumOf\.G",
        ),
        ("trust_coefficient", 0.0, "must be a number above 0"),
        ("weight_decay", -0.1, "must be a number of at least 0"),
        ("epsilon", -1.0, "must be a number of at least 0"),
    ],
)
def test_refuses(field, value, message):
    with pytest.raises(ValueError, match=rf"LARS\.{field} is {value!r}; it {message}"):
        LARS(**{"learning_rate": RATE, field: value})
