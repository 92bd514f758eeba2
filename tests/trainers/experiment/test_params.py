"""Every shipped gin file builds, abstractly; its shardings are those agreed on."""

import math
import re

import pytest

from meshwright.framework.compiler.lowering.lower import lower
from meshwright.layers.attention.positions import PositionKind
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.config import PARAMS
from meshwright.trainers.experiment.sharding_text import sharding_text
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.golden.refresh import experiment_files, golden_path

# GSPMD's tables and GShard's count a layer's matrices; embeddings come on top. Tables 6
# and 7 count in 2^30.
PAPER_WEIGHTS = {
    "gshard": 600e9,
    "table6_32e": 10 * 2**30,
    "table6_128e": 37 * 2**30,
    "table6_512e": 145 * 2**30,
    "table6_2048e": 577 * 2**30,
    "table7_8e": 33 * 2**30,
    "table7_16e": 57 * 2**30,
    "table7_32e": 420 * 2**30,
    "table7_64e": 804 * 2**30,
    "table2_64b": 64e9,
    "table2_128b": 128e9,
    "table2_256b": 256e9,
    "table2_512b": 512e9,
    "table2_1t": 1e12,
    "table3": 16e9,
    "table4": 16e9,
    "table5_32l": 6.47e9,
    "table5_64l": 12.95e9,
    "wus_resnet": 25.6e6,
    "wus_ncf": 31.8e6,
    "wus_transformer": 210e6,
    "torchtitan_8b": 8.03e9,
    "maxtext_16b": 16.3e9,
    "maxtext_32b": 32.5e9,
    "maxtext_llama2_70b": 69.0e9,
}


@pytest.mark.parametrize("gin_file", experiment_files())
def test_golden_sharding(gin_file):
    experiment, _ = build_experiment([gin_file], [])
    assert sharding_text(experiment) == golden_path(gin_file).read_text(), (
        "shardings changed; if that is meant, refresh the golden texts: make golden"
    )


def test_no_golden_text_is_left_over():
    wanted = {golden_path(f) for f in experiment_files()}
    assert set(golden_path("x").parent.glob("*.txt")) == wanted


@pytest.mark.parametrize(
    "gin_file", [f for f in experiment_files() if f.startswith("paper/")]
)
def test_paper_configuration_has_the_papers_size(gin_file):
    experiment, _ = build_experiment([gin_file], [])
    total = sum(spec.size for spec in experiment.task.weights().leaves())
    # The paper does not say how many weights Table 8 and Figure 2 have.
    if not gin_file.startswith(("paper/table8", "paper/figure2")):
        name = next(name for name in PAPER_WEIGHTS if name in gin_file)
        assert total == pytest.approx(PAPER_WEIGHTS[name], rel=0.12)
    title = re.search(r"on (\d+) devices", (PARAMS / gin_file).read_text())
    assert experiment.plan.mesh.size == int(title[1])


def test_weights_of_weight_update_shardings_models():
    """As their files count them: the papers and benchmarks say only about how many."""
    layers = 6 * (4 + 8 + 8 + 8) * 1024**2
    for name, expected in {
        "ncf_32": (138_493 + 26_744) * (64 + 128) + 107_073,
        "transformer_32": 33_708 * 1024 + layers + 32 * 1024,
        "transformer_2048": 210_710_528,
    }.items():
        experiment, _ = build_experiment([f"paper/wus_{name}.gin"], [])
        specs = experiment.task.weights().leaves()
        assert sum(spec.size for spec in specs) == expected, name


@pytest.mark.parametrize(
    "gin_file", ["paper/table2_1t.gin", "paper/table3_8x16.gin", "lm/stdlib_tiny.gin"]
)
def test_train_step_lowers_without_allocating(gin_file):
    """A trillion weights become a program of some megabytes, nothing baked in."""
    experiment, _ = build_experiment([gin_file], [])
    programs = StepPrograms(experiment)
    lowered = lower(
        programs.train_loop,
        [programs.abstract_state(), programs.abstract_batches()],
        name="train",
    )
    assert len(lowered.hlo) < 4e6


def test_every_gin_file_says_what_must_be_set():
    for file in PARAMS.rglob("*.gin"):
        text = file.read_text()
        assert "# Must be set:" in text, file
        assert "plans" in file.parts or "Commonly overridden:" in text, file


def test_the_dense_baseline_has_the_flops_of_the_experts():
    flops = []
    for name in ("moe", "dense"):
        experiment, _ = build_experiment([f"mt/gettext_{name}.gin"], [])
        flops.append(experiment.task.train_flops(experiment.global_batch))
    assert flops[1] == pytest.approx(flops[0], rel=0.005)


@pytest.mark.parametrize(
    ("name", "stacks", "warmup"),
    [("from_t5x", ["stack"], 20), ("from_t5x_pairs", ["encoder", "decoder"], 50)],
)
def test_the_examples_from_t5x_set_what_their_comments_name(name, stacks, warmup):
    """T5X's attention, and create_learning_rate_scheduler's formula."""
    experiment, _ = build_experiment([f"docs/examples/{name}.gin"], [])
    for stack in stacks:
        body = getattr(experiment.task, stack).stack.body
        attention = body.attention
        assert attention.positions is PositionKind.SHARED
        assert attention.query_scale is None  # T5X's weights begin smaller instead.
        assert not body.feed_forward.use_bias
        if cross := body.cross_attention:
            assert cross.positions is PositionKind.NONE
    schedule, base = experiment.optimizer.learning_rate, 0.05
    for step in (0, 1, warmup - 1, warmup, warmup + 1, 4 * warmup):
        factors = min(1, step / warmup) * math.sqrt(warmup / max(step, warmup))
        assert float(schedule(step)) == pytest.approx(base * factors)
