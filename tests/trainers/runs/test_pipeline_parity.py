"""Five steps of a pipelined language model equal those of the plain stack."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.nested_map import NestedMap
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.pipelines.pipeline_schedule import PipelineOrder
from tests.layers.stacks.staged import state_by_stage
from tests.trainers.parity import (
    Trained,
    initial_state,
    small_experiment,
    train,
    train_by_tf,
)

LAYERS = "NUM_LAYERS = 4"
NO_DROPS = (  # A random choice would depend on the microbatch.
    "MoE.gating = @Switch()",
    "Switch.model_dims = %MODEL_DIMS",
    "Switch.num_experts = %NUM_EXPERTS",
)


def pipelined(stages, microbatches, *params, experts=0, **kwargs):
    return small_experiment(
        LAYERS,
        "include 'lm/pipeline.gin'",
        "include 'plans/pipeline.gin'",
        f"NUM_STAGES = {stages}",
        f"NUM_MICROBATCHES = {microbatches}",
        *params,
        plan="finalized" if not experts else "hybrid",
        experts=experts,
        **kwargs,
    )


@functools.cache
def plain(optimizer: str, experts: int) -> tuple[NestedMap, Trained]:
    """The state before and after, by TF on one device: no XLA."""
    params = NO_DROPS if experts else ()
    experiment = small_experiment(
        "MESH_SHAPE = (1, 1)",
        LAYERS,
        *params,
        plan="hybrid" if experts else "finalized",
        optimizer=optimizer,
        experts=experts,
    )
    start = initial_state(experiment)
    return start, train_by_tf(experiment, start)


def unstaged(layer: Pipeline, path: str, value: np.ndarray) -> np.ndarray:
    if ".stack." not in f".{path}.":
        return value
    return layer.plain_weights(NestedMap(x=tf.constant(value))).x.numpy()


STEPS = 5
# Stages, microbatches, repeats; mode, mesh, partitioner, steps a call; optimizer,
# experts.
FORWARD_FIRST = [
    ((2, 4, 1), "VECTORIZED", (2, 2, 2), "SHARDY", 1, "adam", 0),
    # A loop around the pipeline's: GSPMD once ended the process for what counts them.
    ((2, 4, 2), "MANUAL", (2, 2, 2), "GSPMD", STEPS, "adafactor", 0),
    ((2, 2, 1), "VECTORIZED", (2, 2, 2), "GSPMD", STEPS, "adam", 2),
    ((2, 2, 1), "MANUAL", (2, 2, 2), "SHARDY", STEPS, "adafactor", 2),
    ((4, 8, 1), "MANUAL", (4, 1, 2), "SHARDY", 1, "adam", 0),
    ((2, 2, 1), "VECTORIZED", (2, 4, 1), "GSPMD", 1, "adafactor", 0),
    # Two of the six layers that stages and rounds have are none.
    ((2, 4, 3), "VECTORIZED", (2, 2, 2), "SHARDY", STEPS, "adam", 0),
    ((2, 4, 3), "VECTORIZED", (2, 2, 2), "GSPMD", STEPS, "adafactor", 0),
]
ONE_F_ONE_B = [
    ((2, 4, 1), "VECTORIZED", (2, 2, 2), "SHARDY", 1, "adam", 0),
    ((2, 4, 2), "MANUAL", (2, 2, 2), "GSPMD", STEPS, "adafactor", 0),
    ((4, 8, 1), "VECTORIZED", (4, 1, 2), "GSPMD", 1, "adam", 0),
    ((2, 2, 1), "VECTORIZED", (2, 2, 2), "SHARDY", STEPS, "adafactor", 2),
    ((2, 2, 1), "MANUAL", (2, 2, 2), "GSPMD", STEPS, "adam", 2),
    ((2, 4, 3), "VECTORIZED", (2, 2, 2), "SHARDY", STEPS, "adam", 0),
]
CASES = [(*case, "FORWARD_FIRST") for case in FORWARD_FIRST]
CASES += [(*case, "ONE_F_ONE_B") for case in ONE_F_ONE_B]
QUICK = [*CASES[:2], CASES[len(FORWARD_FIRST)]]


@pytest.mark.parametrize(
    "sizes,mode,mesh,partitioner,steps,optimizer,experts,order",
    [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in CASES],
)
def test_trains_as_the_plain_stack(
    sizes, mode, mesh, partitioner, steps, optimizer, experts, order
):
    stages, microbatches, repeats = sizes
    params = [
        f"MESH_SHAPE = {mesh}",
        f"Pipeline.num_repeats = {repeats}",
        f"Pipeline.stage_mode = %StageMode.{mode}",
        f"Pipeline.order = %PipelineOrder.{order}",
        f"Experiment.partitioner = %Partitioner.{partitioner}",
        f"Experiment.steps_per_loop = {steps}",
    ]
    if experts:
        params += [
            *NO_DROPS,
            "ShardingPlan.weights = {'stages': 'L', 'heads': 'Y', 'experts': 'X'}",
            "ShardingPlan.activations = {'batch': ('X', 'L'), 'microbatch': 'X', "
            "'heads': 'Y', 'experts': 'X'}",
        ]
    experiment = pipelined(
        stages, microbatches, *params, optimizer=optimizer, experts=experts
    )
    layer = experiment.task.stack
    start, want = plain(optimizer, experts)
    got = train(experiment, state_by_stage(layer, start), calls=STEPS // steps)
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    assert got.losses[-1] < got.losses[0], "five steps must learn something"
    assert got.state.keys() == want.state.keys()
    for path, value in want.state.items():
        leaf = unstaged(layer, path, got.state[path])
        scale = np.abs(value).max() or 1.0
        np.testing.assert_allclose(leaf / scale, value / scale, atol=1e-3, err_msg=path)


STREAM = """ShardingPlan.activations = {
    "batch": ("X", "L"), "microbatch": "X", "stream": "Y",
    "heads": "Y", "hidden": "Y", "vocab": "Y"}"""


def all_of_a_loss(order, partitioner, params):
    """Two steps in parts, of all that a loss can have; tokens' weights are random."""
    experiment = pipelined(
        2,
        2,
        "MESH_SHAPE = (2, 2, 2)",
        f"Pipeline.order = %PipelineOrder.{order}",
        f"Experiment.partitioner = %Partitioner.{partitioner}",
        "Experiment.gradient_accumulation_steps = 2",
        "Experiment.weight_update_sharding = 'all'",
        "LanguageModel.label_smoothing = 0.1",
        "LanguageModel.z_loss = 0.01",
        "LanguageModel.logit_cap = 2.0",
        *params,
        optimizer="adam",
    )
    return train(experiment, initial_state(experiment), calls=2)


@pytest.mark.parametrize(
    "partitioner,params",
    [
        ("SHARDY", ()),
        pytest.param("SHARDY", (STREAM,), marks=pytest.mark.slow),
        # The axis of the stages does not divide sequences: it splits nothing of a loss.
        pytest.param("GSPMD", ("SEQUENCE_LENGTH = 7",), marks=pytest.mark.slow),
    ],
    ids=["sequences", "stream", "odd"],
)
def test_of_both_orders_the_loss_is_the_same(partitioner, params):
    want, got = (
        all_of_a_loss(order.name, partitioner, params) for order in PipelineOrder
    )
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    np.testing.assert_allclose(got.norms, want.norms, rtol=1e-5)
    for path, value in want.state.items():
        atol = 1e-4 * (np.abs(value).max() or 1.0)
        np.testing.assert_allclose(
            got.state[path], value, rtol=0, atol=atol, err_msg=path
        )
