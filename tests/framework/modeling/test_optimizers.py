"""Optimizers against Lingvo's numbers, numpy and Keras; stacking; bad input."""

import dataclasses
import functools
import json
import math
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.initializers import Constant
from meshwright.framework.modeling.layer import EXPERT_DIM, STACK_DIM, WeightSpec
from meshwright.framework.modeling.optimizers.adafactor import Adafactor
from meshwright.framework.modeling.optimizers.optimizer import (
    SGD,
    Adam,
    Optimizer,
    WeightUpdate,
    slot_spec,
)
from meshwright.framework.modeling.optimizers.schedules import (
    ConstantSchedule,
    PolynomialSchedule,
)
from meshwright.framework.nested_map import NestedMap

DATA = pathlib.Path(__file__).parents[2] / "data"
RATE = ConstantSchedule(value=0.1)
QUIRK = "factored_3d_largest_first"


def spec(*shape: int, stack_rank: int = 0, dtype=tf.float32) -> WeightSpec:
    names = ["a", "b", "c", "d"][: len(shape) - stack_rank]
    return WeightSpec(
        shape=shape,
        dims=(*[STACK_DIM] * stack_rank, *names),
        initializer=Constant(0.0),
        dtype=dtype,
    )


def zero_slots(optimizer: Optimizer, specs: NestedMap) -> NestedMap:
    return optimizer.slots(specs).map(lambda s: tf.zeros(s.shape, s.dtype))


def train(optimizer: Optimizer, specs: NestedMap, theta: NestedMap, grads: list):
    """All updates in turn, by one compiled program over abstract inputs."""
    abstract = functools.partial(tf.nest.map_structure, tf.TensorSpec.from_tensor)
    slots = zero_slots(optimizer, specs)

    def update(step, grads, theta, slots):
        result = optimizer.update(step, grads, theta, slots, specs)
        return result.theta, result.slots, result.metrics

    compiled = tf.function(update, jit_compile=True, autograph=False)
    compiled = compiled.get_concrete_function(
        tf.TensorSpec([], tf.int32), *map(abstract, (grads[0], theta, slots))
    )
    history = []
    for step, grad in enumerate(grads):
        flat = tf.nest.flatten([tf.constant(step, tf.int32), grad, theta, slots])
        theta, slots, metrics = compiled(*flat)
        history.append(theta)
    return history, slots, metrics


def random_map(specs: NestedMap, seed: int, scale: float = 1.0) -> NestedMap:
    rng = np.random.default_rng(seed)
    return specs.map(
        lambda s: tf.constant(scale * rng.standard_normal(s.shape), s.dtype)
    )


def tensors(**arrays) -> NestedMap:
    return NestedMap({k: tf.constant(v, tf.float32) for k, v in arrays.items()})


@functools.cache
def golden_adafactor() -> dict:
    cases = json.loads((DATA / "adafactor.meta.json").read_text())
    return {case.pop("case"): case for case in cases}


@functools.cache
def golden_arrays(case: str) -> NestedMap:
    with np.load(DATA / "adafactor.npz") as arrays:
        names = [name for name in arrays if name.startswith(case + "/")]
        return NestedMap({n.split("/")[1]: arrays[n] for n in names})


def golden_optimizer(case: str) -> Adafactor:
    config = dict(golden_adafactor()[case])
    renamed = {
        "decay_exponent_pow": "decay_exponent",
        "decay_exponent_offset": "decay_offset",
    }
    config = {renamed.get(k, k): v for k, v in config.items()}
    del config["shape"]
    if not config.pop("factored", True):
        config["min_dim_size_to_factor"] = None
    rate = ConstantSchedule(value=config.pop("lr"))
    return Adafactor(learning_rate=rate, **config)


@pytest.mark.parametrize("case", sorted(set(golden_adafactor()) - {QUIRK}))
def test_adafactor_reproduces_lingvo(case):
    golden = golden_arrays(case)
    specs = NestedMap(w=spec(*golden.w0.shape))
    history, slots, _ = train(
        golden_optimizer(case),
        specs,
        tensors(w=golden.w0),
        [tensors(w=g) for g in golden.grads],
    )
    for ours, theirs in zip(history, golden.w_after_each_step, strict=True):
        np.testing.assert_allclose(ours.w, theirs, rtol=1e-5, atol=1e-6)
    theirs = {k: v for k, v in golden.items() if k.startswith("final_slot_")}
    names = {"v": "v", "vr": "v_row", "vc": "v_col", "m": "m"}
    assert len(theirs) == len(slots.w)
    for name, value in theirs.items():
        ours = slots.w[names[name.removeprefix("final_slot_")]]
        np.testing.assert_allclose(ours, value, rtol=1e-5, atol=1e-6)


def test_adafactor_divides_the_row_by_its_mean_over_the_other_factored_dim():
    """The paper's rule, matrix by matrix, where Lingvo takes another dim's mean."""
    golden = golden_arrays(QUIRK)
    w = golden.w0.astype(np.float64)  # [6, 4, 3]: three matrices [6, 4]
    row, col, expected = 0.0, 0.0, []
    for t, grad in enumerate(golden.grads.astype(np.float64), start=1):
        decay = 1 - t**-0.8
        row = decay * row + (1 - decay) * (grad**2).mean(axis=0)
        col = decay * col + (1 - decay) * (grad**2).mean(axis=1)
        v = [np.outer(col[:, i], row[:, i] / row[:, i].mean()) for i in range(3)]
        along = grad / np.sqrt(np.stack(v, axis=-1))
        along /= max(1.0, np.sqrt((along**2).mean()))
        w = w - 0.1 * max(1e-3, np.sqrt((w**2).mean())) * along
        expected.append(w)

    specs = NestedMap(w=spec(*golden.w0.shape))
    history, slots, _ = train(
        golden_optimizer(QUIRK),
        specs,
        tensors(w=golden.w0),
        [tensors(w=g) for g in golden.grads],
    )
    for ours, w in zip(history, expected, strict=True):
        np.testing.assert_allclose(ours.w, w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slots.w.v_row, golden.final_slot_vr, rtol=1e-5)
    np.testing.assert_allclose(slots.w.v_col, golden.final_slot_vc, rtol=1e-5)
    assert not np.allclose(expected[-1], golden.w_after_each_step[-1], atol=1e-3)


def test_adafactor_offset_before_its_step_is_finite():
    optimizer = Adafactor(learning_rate=RATE, decay_offset=5)
    theta, grads = tensors(w=[1.0, 2.0]), tensors(w=[0.5, -0.5])
    history, _, _ = train(optimizer, NestedMap(w=spec(2)), theta, [grads, grads])
    assert np.isfinite(history[-1].w).all()


OPTIMIZERS = {
    "sgd": SGD(learning_rate=RATE),
    "momentum": SGD(learning_rate=RATE, momentum=0.9),
    "nesterov": SGD(learning_rate=RATE, momentum=0.9, nesterov=True),
    "adam": Adam(learning_rate=RATE),
    "adamw": Adam(learning_rate=RATE, weight_decay=0.1, clip_global_norm=1.0),
    "adafactor": Adafactor(learning_rate=RATE, min_dim_size_to_factor=2),
    "adafactor_momentum": Adafactor(
        learning_rate=RATE, min_dim_size_to_factor=2, beta1=0.9, clip_global_norm=1.0
    ),
    "adafactor_unfactored": Adafactor(learning_rate=RATE),
}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize(
    "dims", [(STACK_DIM,), (STACK_DIM, STACK_DIM), (STACK_DIM, EXPERT_DIM)]
)
def test_stacking_layers_changes_nothing(name, dims):
    # The stack is as long as any dim, and comes before: it must not be factored.
    # Layers of very different size show any reduction across them.
    optimizer, stack = OPTIMIZERS[name], (3,) if len(dims) == 1 else (1, 3)
    shapes = {"kernel": (2, 2), "heads": (2, 3, 2), "bias": (3,)}
    one_layer = NestedMap({k: spec(*s) for k, s in shapes.items()})
    stacked_specs = NestedMap(
        {
            k: WeightSpec(
                shape=(*stack, *spec.shape),
                dims=(*dims, *spec.dims),
                initializer=spec.initializer,
            )
            for k, spec in one_layer.items()
        }
    )
    specs = NestedMap({f"layer{i}": one_layer for i in range(3)})
    sizes = [1e-3, 1.0, 1e3]

    def sized(seed: int) -> NestedMap:
        layers = random_map(specs, seed)
        scaled = {
            k: layers[k].map(lambda t, size=size: size * t)
            for k, size in zip(sorted(layers), sizes, strict=True)
        }
        return NestedMap(scaled)

    def stacked(layers: NestedMap) -> NestedMap:
        parts = [layers[k] for k in sorted(layers)]
        return parts[0].map(
            lambda *t: tf.reshape(tf.stack(t), [*stack, *t[0].shape]), *parts[1:]
        )

    theta, grads = sized(0), [sized(seed) for seed in (1, 2)]
    separate, separate_slots, separate_metrics = train(optimizer, specs, theta, grads)
    together, together_slots, together_metrics = train(
        optimizer, stacked_specs, stacked(theta), [stacked(g) for g in grads]
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-9)
    stacked(separate[-1]).map(close, together[-1])
    stacked(separate_slots).map(close, together_slots)
    separate_metrics.map(close, together_metrics)


def keras_history(keras_optimizer, w0: np.ndarray, grads) -> list[np.ndarray]:
    variable, history = tf.Variable(w0), []
    for grad in grads:
        keras_optimizer.apply([tf.constant(grad)], [variable])
        history.append(variable.numpy())
    return history


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("sgd", lambda: tf.keras.optimizers.SGD(0.1)),
        ("momentum", lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9)),
        (
            "nesterov",
            lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        ),
    ],
)
def test_sgd_agrees_with_keras(ours, theirs):
    rng = np.random.default_rng(0)
    w0 = rng.standard_normal((3, 4)).astype(np.float32)
    grads = rng.standard_normal((5, 3, 4)).astype(np.float32)
    expected = keras_history(theirs(), w0, grads)
    specs = NestedMap(w=spec(3, 4))
    history, _, _ = train(
        OPTIMIZERS[ours], specs, tensors(w=w0), [tensors(w=g) for g in grads]
    )
    for got, w in zip(history, expected, strict=True):
        np.testing.assert_allclose(got.w, w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.0, 0.95)])
def test_adam_agrees_with_the_paper(weight_decay, beta1, beta2):
    schedule = PolynomialSchedule(start_value=0.1, end_value=0.0, end_step=10)
    optimizer = Adam(
        learning_rate=schedule, beta1=beta1, beta2=beta2, weight_decay=weight_decay
    )
    rng = np.random.default_rng(0)
    weights = {"kernel": rng.standard_normal((3, 4)), "bias": rng.standard_normal(4)}
    grads = [{k: rng.standard_normal(w.shape) for k, w in weights.items()}] * 4

    expected = {}
    for name, w in weights.items():
        m = v = 0.0
        decay = weight_decay if w.ndim == 2 else 0.0
        for t, grad in enumerate((g[name] for g in grads), start=1):
            m = beta1 * m + (1 - beta1) * grad
            v = beta2 * v + (1 - beta2) * grad**2
            m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
            rate = 0.1 * (1 - (t - 1) / 10)
            w = w - rate * (m_hat / (np.sqrt(v_hat) + 1e-8) + decay * w)
        expected[name] = w

    specs = NestedMap(kernel=spec(3, 4), bias=spec(4))
    history, _, metrics = train(
        optimizer, specs, tensors(**weights), [tensors(**g) for g in grads]
    )
    for name, w in expected.items():
        np.testing.assert_allclose(history[-1][name], w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics.learning_rate, 0.07, rtol=1e-6)


def test_stacked_vectors_do_not_decay():
    optimizer = Adam(learning_rate=RATE, weight_decay=0.5)
    specs = NestedMap(bias=spec(2, 3, stack_rank=1), kernel=spec(2, 3))
    theta = tensors(bias=np.ones([2, 3]), kernel=np.ones([2, 3]))
    grads = theta.map(tf.zeros_like)
    history, _, _ = train(optimizer, specs, theta, [grads])
    np.testing.assert_array_equal(history[0].bias, np.ones([2, 3]))
    np.testing.assert_allclose(history[0].kernel, np.full([2, 3], 0.95), rtol=1e-6)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_running_statistics_follow_their_gradients_and_disturb_nothing(name):
    optimizer = OPTIMIZERS[name]
    plain = NestedMap(kernel=spec(3, 2))
    statistic = dataclasses.replace(spec(2, 3, stack_rank=1), statistic_decay=0.75)
    specs = NestedMap(plain, mean=statistic)
    slots = optimizer.slots(specs)
    assert slots.mean == {} and slots.kernel == optimizer.slots(plain).kernel
    theta, grads = random_map(specs, 0), [random_map(specs, i, 9.0) for i in (1, 2)]

    def without_mean(tensors):
        return NestedMap(kernel=tensors.kernel)

    history, _, metrics = train(optimizer, specs, theta, grads)
    alone, _, alone_metrics = train(
        optimizer, plain, without_mean(theta), [without_mean(g) for g in grads]
    )
    np.testing.assert_array_equal(history[-1].kernel, alone[-1].kernel)
    metrics.map(np.testing.assert_array_equal, alone_metrics)
    mean = theta.mean
    for new, grad in zip(history, grads, strict=True):
        mean = 0.75 * mean + 0.25 * grad.mean
        np.testing.assert_allclose(new.mean, mean, rtol=1e-6)


@pytest.mark.parametrize(
    ("limit", "factor"), [(2.5, 0.5), (5.0, 1.0), (50.0, 1.0), (None, 1.0)]
)
def test_clips_by_the_norm_of_all_gradients(limit, factor):
    optimizer = SGD(learning_rate=ConstantSchedule(value=1.0), clip_global_norm=limit)
    specs = NestedMap(a=spec(1), b=NestedMap(c=spec(1)))
    grads = NestedMap(a=tf.constant([3.0]), b=NestedMap(c=tf.constant([-4.0])))
    theta = NestedMap(a=tf.constant([6.0]), b=NestedMap(c=tf.constant([8.0])))
    history, _, metrics = train(optimizer, specs, theta, [grads])
    np.testing.assert_allclose(history[0].a, [6.0 - 3.0 * factor])
    np.testing.assert_allclose(history[0].b.c, [8.0 + 4.0 * factor])
    np.testing.assert_allclose(metrics.grad_norm, 5.0)
    norm = np.hypot(6.0 - 3.0 * factor, 8.0 + 4.0 * factor)
    np.testing.assert_allclose(metrics.weight_norm, norm, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_zero_gradients_are_finite(name):
    specs = NestedMap(w=spec(3, 4), b=spec(4), s=spec())
    theta = random_map(specs, 0)
    history, _, _ = train(OPTIMIZERS[name], specs, theta, [theta.map(tf.zeros_like)])
    assert all(np.isfinite(leaf).all() for leaf in history[0].leaves())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_clipping_hides_no_bad_gradient(bad):
    optimizer = SGD(learning_rate=RATE, clip_global_norm=1.0)
    specs = NestedMap(w=spec(2))
    grads = tensors(w=[bad, 1.0])
    history, _, metrics = train(optimizer, specs, tensors(w=[1.0, 1.0]), [grads])
    assert not np.isfinite(metrics.grad_norm)
    assert not np.isfinite(history[0].w).all()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_bfloat16_weights_keep_their_dtype_and_float32_slots(name):
    specs = NestedMap(w=spec(3, 4, dtype=tf.bfloat16))
    theta, grads = random_map(specs, 0), random_map(specs, 1)
    history, slots, metrics = train(OPTIMIZERS[name], specs, theta, [grads])
    assert history[0].w.dtype == tf.bfloat16
    assert all(leaf.dtype == tf.float32 for leaf in slots.leaves())
    assert all(leaf.dtype == tf.float32 for leaf in metrics.leaves())


def test_slots_have_the_names_of_the_weights_dims():
    specs = NestedMap(attention=NestedMap(w=spec(9, 6, 3, 4, stack_rank=1), b=spec(4)))
    optimizer = Adafactor(learning_rate=RATE, min_dim_size_to_factor=2, beta1=0.5)
    slots = dict(optimizer.slots(specs).items_by_path())
    got = {path: (slot.shape, slot.dims) for path, slot in slots.items()}
    assert got == {
        "attention.b.m": ((4,), ("a",)),
        "attention.b.v": ((4,), ("a",)),
        "attention.w.m": ((9, 6, 3, 4), (STACK_DIM, "a", "b", "c")),
        "attention.w.v_row": ((9, 3, 4), (STACK_DIM, "b", "c")),
        "attention.w.v_col": ((9, 6, 3), (STACK_DIM, "a", "b")),
    }
    assert all(slot.initializer == Constant(0.0) for slot in slots.values())


@pytest.mark.parametrize(
    ("min_dim_size", "slots"),
    [(4, {"v_row", "v_col"}), (5, {"v"}), (None, {"v"})],
)
def test_small_dims_are_not_factored(min_dim_size, slots):
    optimizer = Adafactor(learning_rate=RATE, min_dim_size_to_factor=min_dim_size)
    assert set(optimizer.slots(NestedMap(w=spec(8, 4, 3))).w) == slots


def test_sgd_without_momentum_keeps_nothing():
    slots = SGD(learning_rate=RATE).slots(NestedMap(a=NestedMap(w=spec(2))))
    assert slots == NestedMap(a=NestedMap(w=NestedMap()))


def test_update_names_a_weight_without_gradient():
    optimizer, specs = SGD(learning_rate=RATE), NestedMap(a=NestedMap(w=spec(2)))
    theta = random_map(specs, 0)
    with pytest.raises(ValueError, match=r"weight 'a\.w' has no gradient.*remove it"):
        optimizer.update(
            tf.constant(0),
            NestedMap(a=NestedMap(w=None)),
            theta,
            zero_slots(optimizer, specs),
            specs,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Returning(Optimizer):
    """Its rule returns `made`."""

    made: object

    def slots_of(self, spec):
        return NestedMap(m=slot_spec(spec))

    def rule(self, step, rate):
        return lambda grad, weight, slots, spec: self.made


def made(weight, **slots) -> WeightUpdate:
    return WeightUpdate(weight=weight, slots=NestedMap(slots))


KEPT = (
    "but it was float32[2, 3]: an update keeps shapes and dtypes; return float32[2, 3]"
)
W = tf.zeros([2, 3])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ((W, NestedMap()), "a tuple for 'a.w'; return WeightUpdate(weight=, slots=)"),
        (
            WeightUpdate(weight=W, slots={"m": W}),
            "a dict as the slots of 'a.w'; return a NestedMap",
        ),
        (made(W), "the slots [] for 'a.w'; slots_of has ['m']"),
        (made(1.0, m=W), "the weight 'a.w' as a float; return a tensor"),
        (made(W[0], m=W), f"the weight 'a.w' as float32[3], {KEPT}"),
        (
            made(W, m=W[:, 0]),
            f"the slot 'm' of 'a.w' as float32[2], {KEPT}, or let slots_of describe it",
        ),
        (made(W, m=tf.cast(W, tf.half)), "the slot 'm' of 'a.w' as float16[2, 3], but"),
    ],
)
def test_refuses_another_result_of_a_rule(made, message):
    optimizer = Returning(learning_rate=RATE, made=made)
    specs = NestedMap(a=NestedMap(w=spec(2, 3)))
    theta = random_map(specs, 0)
    slots = zero_slots(optimizer, specs)
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        optimizer.update(tf.constant(0), theta, theta, slots, specs)


def test_an_optimizer_without_a_rule_is_told_what_to_define():
    bare = Optimizer(learning_rate=RATE)
    for call in (lambda: bare.slots_of(spec(2)), lambda: bare.rule(0, 0.1)):
        with pytest.raises(
            NotImplementedError,
            match=r"defines slots_of\(spec\) and rule\(step, rate\)",
        ):
            call()


def test_refuses_nesterov_without_momentum():
    with pytest.raises(ValueError, match=r"set SGD\.momentum above 0"):
        SGD(learning_rate=RATE, nesterov=True)


@pytest.mark.parametrize(
    ("optimizer", "field", "value"),
    [
        (SGD, "learning_rate", "a"),
        (SGD, "clip_global_norm", 0.0),
        (SGD, "momentum", 1.0),
        (SGD, "momentum", -0.1),
        (Adam, "clip_global_norm", -1.0),
        (Adam, "beta1", 1.0),
        (Adam, "beta2", -0.5),
        (Adam, "epsilon", 0.0),
        (Adam, "weight_decay", -0.1),
        (Adafactor, "beta1", 1.5),
        (Adafactor, "beta2", 0.0),
        (Adafactor, "decay_exponent", -0.8),
        (Adafactor, "decay_offset", math.nan),
        (Adafactor, "clipping_threshold", 0.0),
        (Adafactor, "min_dim_size_to_factor", 0),
    ],
)
def test_refuses(optimizer, field, value):
    message = rf"{optimizer.__name__}\.{field} is {value!r}; it must be a"
    with pytest.raises(ValueError, match=message):
        optimizer(**{"learning_rate": RATE, field: value})
