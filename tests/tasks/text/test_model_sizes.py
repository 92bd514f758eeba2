"""Language models of all sizes: their weights, the rules, what overrides give."""

import pytest

from meshwright.tasks.text.model_sizes import DENSE, EXPERTS
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.trainers.parity import initial_state, train

SIZES = {"dense": DENSE, "experts": EXPERTS}
SIZED = [(family, size) for family, sizes in SIZES.items() for size in sizes]
MOST_TOKENS = 16 * 2**20


def build(family, *params):
    return build_experiment([f"lm/{family}.gin"], list(params))[0]


def tokens_of_a_step(size):
    return size.global_batch * size.sequence_length


@pytest.mark.parametrize(("family", "size"), SIZED)
def test_each_size_of_a_family_has_about_as_many_weights_as_its_name(family, size):
    experiment = build(family, f'SIZE = "{size}"')
    specs = StepPrograms(experiment).state_specs.theta.leaves()
    total = sum(spec.size for spec in specs)
    if size != "tiny":
        unit = {"m": 1e6, "b": 1e9, "t": 1e12}[size[-1]]
        assert total == pytest.approx(float(size[:-1]) * unit, rel=0.15)
    shape = SIZES[family][size]
    if family == "dense":  # But for the norms' scales.
        assert total == pytest.approx(shape.active_weights, rel=0.01)
    tokens = tokens_of_a_step(shape) * shape.num_steps
    assert tokens == pytest.approx(20 * shape.active_weights, rel=0.001)
    assert experiment.task.tokens(experiment.global_batch) * experiment.num_steps == (
        tokens
    )
    flops = experiment.task.train_flops(1) / shape.sequence_length
    assert flops > 0.9 * 6 * shape.active_weights  # Attention comes on top.


def test_sizes_follow_the_published_rules():
    """DeepSeek LLM 67B was trained with 3.2e-4 on 4608 rows of 4096 tokens."""
    nearest = DENSE["70b"]
    assert nearest.learning_rate == pytest.approx(3.2e-4, rel=0.1)
    assert tokens_of_a_step(nearest) == pytest.approx(4608 * 4096, rel=0.2)
    compute = 6 * nearest.active_weights * 20 * nearest.active_weights
    assert nearest.train_flops == pytest.approx(compute)
    assert nearest.learning_rate == pytest.approx(0.3118 * compute**-0.125)


def test_no_batch_is_larger_than_that_of_llama_3():
    """Llama 3 405B had up to 16 Mi tokens a step, where the law gives more."""
    most = max(tokens_of_a_step(size) for size in [*DENSE.values(), *EXPERTS.values()])
    assert most == MOST_TOKENS == tokens_of_a_step(DENSE["405b"])
    assert 0.2920 * DENSE["405b"].train_flops ** 0.3271 > 3 * MOST_TOKENS
    assert tokens_of_a_step(DENSE["8b"]) < MOST_TOKENS


@pytest.mark.parametrize(
    ("size", "num_steps", "warmup"),
    [("8b", None, 2000), ("tiny", 60, 6), ("tiny", 5, 1)],
)
def test_warm_up_follows_the_number_of_steps(size, num_steps, warmup):
    steps = [f"NUM_STEPS = {num_steps}"] if num_steps else []
    experiment = build("dense", f'SIZE = "{size}"', *steps)
    schedule = experiment.optimizer.learning_rate
    assert schedule.steps == schedule.schedule.start_step == warmup
    assert schedule.schedule.end_step == experiment.num_steps
    assert num_steps in (None, experiment.num_steps)


def test_an_override_changes_no_other_value_and_needs_no_notice(caplog):
    caplog.set_level("INFO", logger="absl")
    plain = build("dense")
    changed = build("dense", "NUM_LAYERS = 2", "GLOBAL_BATCH = 8")
    assert "no effect" not in caplog.text
    assert changed.task.stack.num_layers == 2
    assert changed.global_batch == 8
    assert changed.num_steps == plain.num_steps
    assert changed.optimizer == plain.optimizer


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (['SIZE = "9b"'], "SIZE is '9b'; it must be one of 'tiny', '125m', '350m'"),
        (["SIZE = 8"], "SIZE is 8; it must be one of 'tiny', '125m', '350m'"),
        (
            ["NUM_LAYERS = @num_layer/model_size()"],
            "the scope of model_size is 'num_layer'; it must be one of "
            "'active_weights', (.|\n)*Did you mean 'num_layers'",
        ),
        (
            ['model_size.family = "sparse"'],
            "model_size.family is 'sparse'; it must be one of 'dense', 'experts'",
        ),
    ],
)
def test_a_size_that_there_is_not_is_refused(params, message):
    with pytest.raises(ValueError, match=message):
        build("dense", *params)


@pytest.mark.parametrize("size", EXPERTS)
def test_experts_of_any_size_can_be_without_drops(size):
    params = (f'SIZE = "{size}"', "MoE.dropless = @Dropless()")
    assert build("experts", *params).task.stack.body.feed_forward.dropless is not None


@pytest.mark.parametrize(
    ("family", "params"),
    [
        ("dense", ()),
        pytest.param("experts", (), marks=pytest.mark.slow),
        ("experts", ("MoE.dropless = @Dropless()",)),
    ],
)
def test_the_smallest_learn(family, params):
    experiment = build(
        family,
        "NUM_LAYERS = 1",
        "GLOBAL_BATCH = 8",
        "SEQUENCE_LENGTH = 16",
        "NUM_STEPS = 5",
        "GROUP_SIZE = 16" if family == "experts" else "",
        *params,
    )
    got = train(experiment, initial_state(experiment))
    assert len(got.losses) == 5 * experiment.steps_per_loop
    assert got.losses[-1] < got.losses[0], "five steps must learn something"
