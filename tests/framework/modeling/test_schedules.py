"""Schedules against Lingvo's numbers, our own definitions, and bad input."""

import functools
import json
import math
import pathlib

import gin
import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.optimizers.optimizer import SGD
from meshwright.framework.modeling.optimizers.schedules import (
    ConstantSchedule,
    CosineSchedule,
    CyclicSchedule,
    ExponentialSchedule,
    LeastSchedule,
    LinearWarmup,
    PiecewiseConstantSchedule,
    PolynomialSchedule,
    PowerSchedule,
    ProductSchedule,
    RsqrtDecay,
    Schedule,
    SequentialSchedule,
    StaircaseSchedule,
)

DATA = pathlib.Path(__file__).parents[2] / "data" / "lr_schedules.json"


@functools.cache
def golden() -> dict:
    return json.loads(DATA.read_text())


def values(schedule: Schedule, steps) -> np.ndarray:
    """Values at `steps`, from one compiled program that takes the step as input."""

    @tf.function(
        jit_compile=True,
        autograph=False,
        input_signature=[tf.TensorSpec([], tf.int32)],
    )
    def compiled(step):
        return schedule(step)

    out = [compiled(tf.constant(step, tf.int32)) for step in steps]
    assert all(v.dtype == tf.float32 and v.shape == () for v in out)
    return np.array(out)


def transformer(first_decay: int, *, end_step: int | None = None) -> RsqrtDecay:
    """Lingvo's model_dim ** -0.5 * max(n, first_decay) ** -0.5, of model_dim 512."""
    peak = (512 * first_decay) ** -0.5
    return RsqrtDecay(peak=peak, start_step=first_decay, end_step=end_step)


# (index of the case in the golden file, its name there, ours)
GOLDEN = [
    (
        0,
        "TransformerSchedule",
        LinearWarmup(steps=400, schedule=transformer(400)),
    ),
    (
        1,
        "TransformerSchedule",
        LinearWarmup(steps=400, schedule=transformer(400, end_step=1001)),
    ),
    (2, "TransformerScheduleNoWarmUp", transformer(400)),
    (
        3,
        "LinearRampupSqrtDecay",
        LinearWarmup(
            steps=100,
            first_step=0,
            schedule=RsqrtDecay(peak=1.0, start_step=100, first_step=0),
        ),
    ),
    (4, "SqrtDecay", RsqrtDecay(peak=0.1, start_step=100, first_step=0)),
    (5, "SqrtDecay", RsqrtDecay(peak=0.001, start_step=100, first_step=0)),
    (
        6,
        "LinearRampupCosineSchedule",
        LinearWarmup(
            steps=100,
            first_step=0,
            schedule=CosineSchedule(start_value=3.0, end_value=1.0, end_step=1000),
        ),
    ),
    (
        7,
        "CosineSchedule",
        CosineSchedule(start_value=3.0, end_value=1.0, end_step=1000),
    ),
    (
        8,
        "LinearRampupExponentialDecay",
        LinearWarmup(
            steps=100,
            first_step=0,
            schedule=ExponentialSchedule(
                start_step=200, start_value=1.0, end_step=1000, end_value=0.1
            ),
        ),
    ),
    (
        9,
        "PolynomialSchedule",
        PolynomialSchedule(
            power=2, start_step=100, start_value=0.0, end_step=1000, end_value=1.0
        ),
    ),
    (
        10,
        "LinearSchedule",
        PolynomialSchedule(
            start_step=100, start_value=0.0, end_step=1000, end_value=1.0
        ),
    ),
    (
        11,
        "ExponentialSchedule",
        ExponentialSchedule(
            start_step=100, start_value=1.0, end_step=1000, end_value=0.01
        ),
    ),
    (
        12,
        "PiecewiseConstantSchedule",
        PiecewiseConstantSchedule(boundaries=[100, 1000], values=[1.0, 0.1, 0.01]),
    ),
    (
        13,
        "ContinuousSchedule",
        ExponentialSchedule(
            start_step=100,
            start_value=1.0,
            end_step=100 + 100 * math.log2(1.0 / 0.1),
            end_value=0.1,
        ),
    ),
    (
        14,
        "StepwiseExponentialSchedule",
        StaircaseSchedule(
            interval=100,
            schedule=ExponentialSchedule(
                start_value=1.0, end_step=10_000, end_value=0.5**100
            ),
        ),
    ),
]


@pytest.mark.parametrize(
    ("index", "name", "schedule"), GOLDEN, ids=[f"{i}_{n}" for i, n, _ in GOLDEN]
)
def test_reproduces_lingvo(index, name, schedule):
    case = golden()["cases"][index]
    assert case["schedule"] == name
    steps, expected = golden()["steps"], np.array(case["values"])
    if name == "LinearRampupSqrtDecay":
        # Lingvo gives step 0 the value of step 1; our line starts at 0.
        assert values(schedule, [0]) == 0.0
        steps, expected = steps[1:], expected[1:]
    # 0.5 ** 100 by one exponential: float32's rounding of its argument shows.
    rtol = 1e-4 if name == "StepwiseExponentialSchedule" else 1e-5
    np.testing.assert_allclose(values(schedule, steps), expected, rtol=rtol, atol=0)


def test_covers_all_learning_rate_schedules_of_lingvo():
    covered = {name for _, name, _ in GOLDEN}
    others = {case["schedule"] for case in golden()["cases"]} - covered
    # The first is in test_ema.py, the second serves scheduled sampling.
    assert others == {"EmaDecaySchedule", "InverseSigmoid"}


def test_constant():
    np.testing.assert_array_equal(
        values(ConstantSchedule(value=0.25), [0, 10**6]), [0.25, 0.25]
    )


def test_a_number_is_a_constant_schedule():
    constant = ConstantSchedule(value=0.25)
    assert LinearWarmup(steps=4, schedule=0.25).schedule == constant
    assert SGD(learning_rate=0.25) == SGD(learning_rate=constant)
    with pytest.raises(ValueError, match=r"SGD\.learning_rate is -1; it must be a num"):
        SGD(learning_rate=-1)


def test_warmup_to_constant_gives_the_first_update_a_rate():
    schedule = LinearWarmup(steps=4, schedule=ConstantSchedule(value=2.0))
    np.testing.assert_allclose(values(schedule, range(6)), [0.5, 1.0, 1.5, 2, 2, 2])


def test_warmup_meets_a_cosine_that_starts_where_it_ends():
    cosine = CosineSchedule(start_value=1.0, start_step=4, end_value=0.0, end_step=8)
    schedule = LinearWarmup(steps=4, first_step=0, schedule=cosine)
    expected = [0.0, 0.25, 0.5, 0.75, 1.0, 0.5 + 0.5**1.5, 0.5]
    np.testing.assert_allclose(values(schedule, range(7)), expected, rtol=1e-6)


def test_polynomial_bends_towards_the_lower_value():
    fall = PolynomialSchedule(start_value=3.0, end_value=1.0, end_step=4, power=2)
    expected = [1 + 2 * (1 - i / 4) ** 2 for i in range(5)]
    np.testing.assert_allclose(values(fall, range(5)), expected, rtol=1e-6)


def test_composes_in_gin():
    config = """
        LinearWarmup.steps = 10
        LinearWarmup.schedule = @RsqrtDecay()
        RsqrtDecay.peak = 0.5
        RsqrtDecay.start_step = 10
    """
    with gin.unlock_config():
        gin.parse_config(config)
    try:
        built = gin.get_configurable("LinearWarmup")()
    finally:
        gin.clear_config()
    assert built == LinearWarmup(steps=10, schedule=RsqrtDecay(peak=0.5, start_step=10))


def test_schedules_after_one_another_count_their_own_steps():
    line = PolynomialSchedule(start_value=1.0, end_value=0.0, end_step=4)
    schedule = SequentialSchedule(schedules=[0.5, line, 0.25], boundaries=[2, 5])
    expected = [0.5, 0.5, 1.0, 0.75, 0.5, 0.25, 0.25]
    np.testing.assert_allclose(values(schedule, range(7)), expected, rtol=1e-6)


def test_the_least_and_the_product_of_schedules():
    up = PolynomialSchedule(start_value=0.0, end_value=4.0, end_step=4)
    power = PowerSchedule(value=2.0, power=-1.0, at_step=2)
    np.testing.assert_allclose(values(power, range(4)), [4.0, 2.0, 4 / 3, 1.0])
    least = LeastSchedule(schedules=[up, power, 1.25])
    np.testing.assert_allclose(values(least, range(4)), [0.0, 1.0, 1.25, 1.0])
    product = ProductSchedule(schedules=[up, power, 0.5])
    np.testing.assert_allclose(values(product, range(4)), [0.0, 1.0, 4 / 3, 1.5])


@pytest.mark.parametrize("growth", [1, 2, 3])
def test_warm_restarts(growth):
    cosine = CosineSchedule(start_value=1.0, end_value=0.0, end_step=4)
    schedule = CyclicSchedule(schedule=cosine, period=4, growth=growth)
    starts, lengths = [0], [4]
    while starts[-1] < 10**6:
        starts.append(starts[-1] + lengths[-1])
        lengths.append(lengths[-1] * growth if growth > 1 else 10**6)
    cycles = zip(starts[:3], lengths[:3], strict=True) if growth > 1 else [(400, 4)]
    for start, length in cycles:
        steps = [start, start + length // 2, start + length - 1]
        last = 0.5 * (1 + math.cos(math.pi * (1 - 1 / length)))
        np.testing.assert_allclose(
            values(schedule, steps), [1.0, 0.5, last], rtol=1e-5, atol=1e-6
        )
    assert 0 <= values(schedule, [2**31 - 1])[0] <= 1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ConstantSchedule(value=-1.0), r"ConstantSchedule\.value is -1\.0.*0"),
        (lambda: ConstantSchedule(value=math.nan), r"ConstantSchedule\.value is nan"),
        (lambda: ConstantSchedule(value="big"), r"ConstantSchedule\.value is 'big'"),
        (
            lambda: LinearWarmup(steps=0, schedule=ConstantSchedule(value=1.0)),
            r"LinearWarmup\.steps is 0; it must be a whole number above 0",
        ),
        (
            lambda: LinearWarmup(steps=1, schedule="a"),
            r"LinearWarmup\.schedule is 'a'; it must be a number or a Schedule, such",
        ),
        (
            lambda: LinearWarmup(
                steps=1, schedule=ConstantSchedule(value=1.0), first_step=-1
            ),
            r"LinearWarmup\.first_step is -1",
        ),
        (lambda: RsqrtDecay(peak=-1.0, start_step=1), r"RsqrtDecay\.peak is -1"),
        (lambda: RsqrtDecay(peak=1.0, start_step=0), r"RsqrtDecay\.start_step is 0"),
        (
            lambda: RsqrtDecay(peak=1.0, start_step=5, end_step=5),
            r"RsqrtDecay\.end_step is 5; it must be a number above 5",
        ),
        (
            lambda: RsqrtDecay(peak=1.0, start_step=5, first_step=-1),
            r"RsqrtDecay\.first_step is -1",
        ),
        (
            lambda: CosineSchedule(start_value=-1.0, end_value=0.0, end_step=1),
            r"CosineSchedule\.start_value is -1",
        ),
        (
            lambda: CosineSchedule(start_value=1.0, end_value=-1.0, end_step=1),
            r"CosineSchedule\.end_value is -1",
        ),
        (
            lambda: CosineSchedule(start_value=1.0, end_value=0.0, end_step=0),
            r"CosineSchedule\.end_step is 0",
        ),
        (
            lambda: PolynomialSchedule(
                start_value=1.0, end_value=0.0, end_step=1, power=0
            ),
            r"PolynomialSchedule\.power is 0",
        ),
        (
            lambda: ExponentialSchedule(start_value=1.0, end_value=0.0, end_step=1),
            r"ExponentialSchedule\.end_value is 0\.0",
        ),
        (
            lambda: StaircaseSchedule(schedule=ConstantSchedule(value=1.0), interval=0),
            r"StaircaseSchedule\.interval is 0",
        ),
        (
            lambda: PiecewiseConstantSchedule(boundaries=[1], values=[1.0]),
            r"PiecewiseConstantSchedule\.values has 1 entries for 1 boundaries",
        ),
        (
            lambda: PiecewiseConstantSchedule(boundaries=[2, 2], values=[1, 1, 1]),
            r"PiecewiseConstantSchedule\.boundaries is \[2, 2\]; it must increase",
        ),
        (
            lambda: SequentialSchedule(boundaries=[1], schedules=[1.0]),
            r"SequentialSchedule\.schedules has 1 entries for 1 boundaries",
        ),
        (
            lambda: SequentialSchedule(boundaries=[2, 2], schedules=[1, 1, 1]),
            r"SequentialSchedule\.boundaries is \[2, 2\]; it must increase",
        ),
        (
            lambda: LeastSchedule(schedules=[1.0, -1]),
            r"LeastSchedule\.schedules\[1\] is -1",
        ),
        (
            lambda: LeastSchedule(schedules=["cosine"]),
            r"LeastSchedule\.schedules\[0\] is 'cosine'; it must be a number or a Sch",
        ),
        (
            lambda: ProductSchedule(schedules=[]),
            r"ProductSchedule\.schedules is \[\]; it must be a list of schedules",
        ),
        (
            lambda: ProductSchedule(schedules=0.1),
            r"ProductSchedule\.schedules is 0\.1; it must be a list of schedules",
        ),
        (
            lambda: CyclicSchedule(schedule=1.0, period=0),
            r"CyclicSchedule\.period is 0",
        ),
        (
            lambda: CyclicSchedule(schedule=1.0, period=1, growth=1.5),
            r"CyclicSchedule\.growth is 1\.5",
        ),
        (
            lambda: PowerSchedule(value=1.0, power=-0.5, at_step=0),
            r"PowerSchedule\.at_step is 0",
        ),
        (
            lambda: PiecewiseConstantSchedule(boundaries=[2], values=[1, -1]),
            r"PiecewiseConstantSchedule\.values\[1\] is -1",
        ),
    ],
)
def test_refuses(build, message):
    with pytest.raises(ValueError, match=message):
        build()
