"""Logits and loss by parts of a sequence: the same training, and no tensor of all."""

import functools
import math

import pytest

from meshwright.framework.compiler.hlo.hlo_text import HloModule, arrays_of
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.trainers.parity import initial_state, small_experiment, train
from tests.trainers.runs.test_parity import assert_equal_training

LOSS = (
    "LanguageModel.z_loss = 0.01",
    "LanguageModel.label_smoothing = 0.1",
    "LanguageModel.logit_cap = 5.0",
)
SEPARATE = (
    "TokenEmbedding.softmax = %SoftmaxKind.SEPARATE",
    "LanguageModel.softmax = @Softmax()",
    "Softmax.model_dims = %MODEL_DIMS",
    "Softmax.vocab_size = %VOCAB_SIZE",
)
PARTS = "LanguageModel.loss_parts = 2"


@functools.cache
def at_once(*params):
    job = small_experiment("MESH_SHAPE = (1, 1)", *LOSS, *params)
    return initial_state(job), train(job, initial_state(job))


@pytest.mark.parametrize(
    "plan,mesh,partitioner,params",
    [
        ("finalized", "(1, 1)", "SHARDY", ()),
        ("finalized", "(2, 4)", "SHARDY", ()),
        ("finalized", "(4, 2)", "GSPMD", ()),
        ("data", "(8,)", "SHARDY", ()),
        ("data_tensor", "(2, 4)", "SHARDY", SEPARATE),
        ("data_tensor", "(4, 2)", "GSPMD", SEPARATE),
        ("sequence_tensor", "(2, 4)", "SHARDY", ()),
        ("sequence_tensor", "(4, 2)", "GSPMD", ()),
    ],
)
def test_parts_train_as_all_at_once(plan, mesh, partitioner, params):
    start, want = at_once(*params)
    job = small_experiment(
        f"MESH_SHAPE = {mesh}",
        f"Experiment.partitioner = %Partitioner.{partitioner}",
        PARTS,
        *LOSS,
        *params,
        plan=plan,
    )
    assert_equal_training(train(job, start), want)


@pytest.mark.parametrize("partitioner", ["SHARDY", "GSPMD"])
def test_a_table_is_reduced_once_and_no_tensor_has_all_logits(partitioner):
    job = small_experiment(
        "MESH_SHAPE = (8,)",
        f"Experiment.partitioner = %Partitioner.{partitioner}",
        "Experiment.weight_update_sharding = 'off'",
        *LOSS,
        PARTS,
        plan="data",
    )
    program = StepPrograms(job).main
    module = HloModule(program.hlo_text())
    table = 264 * 16
    sent = [
        bool(module.loops_around(module.by_name[c.name].computation))
        for c in program.collectives()
        if sum(map(math.prod, c.shapes)) >= table
    ]
    assert sent and not any(sent)
    logits = 264 * 8  # Of a device's sequence.
    sizes = {
        math.prod(shape)
        for op in module.by_name.values()
        for _, shape in arrays_of(op.type)
        if 264 in shape
    }
    assert logits not in sizes and logits // 2 in sizes


@pytest.mark.parametrize(
    "plan,mesh,parts,message",
    [
        ("data", "(8,)", 3, "LanguageModel.loss_parts is 3.* 8 tokens, no mul"),
        ("sequence_tensor", "(2, 4)", 4, "8 tokens on 4 devices, no multiple of 16"),
    ],
)
def test_parts_that_do_not_divide_are_refused(plan, mesh, parts, message):
    job = small_experiment(
        f"MESH_SHAPE = {mesh}", f"LanguageModel.loss_parts = {parts}", plan=plan
    )
    with pytest.raises(ValueError, match=message):
        StepPrograms(job).main.hlo_text()


def test_parts_of_a_loss_within_a_pipeline_are_refused():
    message = "LanguageModel.loss_parts is 2, but Pipeline.order = .*: set Lang"
    with pytest.raises(ValueError, match=message):
        small_experiment(
            "include 'lm/pipeline.gin'",
            "include 'plans/pipeline.gin'",
            "MESH_SHAPE = (2, 2, 2)",
            "NUM_STAGES = 2",
            "NUM_MICROBATCHES = 2",
            "Pipeline.order = %PipelineOrder.ONE_F_ONE_B",
            PARTS,
        )
