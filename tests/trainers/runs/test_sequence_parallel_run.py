"""`plans/sequence_tensor.gin`: the same training, and what a step sends."""

import functools

import pytest

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.trainers.parity import initial_state, small_experiment, train
from tests.trainers.runs.test_parity import assert_equal_training

DROPOUT = "transformer_layer.dropout_rate = 0.1"
SAVED = (
    "Repeat.recompute = %Recompute.ALL_BUT_NAMED",
    "Repeat.saved_names = ('query', 'context', 'hidden', 'attention_out')",
)


@functools.cache
def one_device(*params, experts=0):
    job = small_experiment(
        "MESH_SHAPE = (1, 1)", *params, plan="sequence_tensor", experts=experts
    )
    return initial_state(job), train(job, initial_state(job))


QUICK = [  # Mesh, partitioner, what is trained, how, experts.
    ("(2, 4)", "SHARDY", (DROPOUT,), ("weight_update_sharding = 'auto'",), 0),
    ("(4, 2)", "GSPMD", (DROPOUT,), (), 0),
]
SLOW = [
    ("(4, 2)", "SHARDY", SAVED, (), 0),
    ("(2, 4)", "GSPMD", ("Repeat.recompute = %Recompute.NOTHING",), (), 0),
    ("(4, 2)", "SHARDY", ("Repeat.unroll = %Unroll.UNROLLED",), (), 0),
    ("(2, 4)", "GSPMD", (DROPOUT,), ("weight_update_sharding = 'all'",), 0),
    ("(2, 4)", "SHARDY", (), (), 4),
    ("(4, 2)", "GSPMD", (), (), 4),
    # The axis does not divide the sequence.
    ("(2, 4)", "SHARDY", ("SEQUENCE_LENGTH = 7",), (), 0),
]


@pytest.mark.parametrize(
    "mesh,partitioner,what,how,experts",
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_eight_devices_train_as_one(mesh, partitioner, what, how, experts):
    experiment = small_experiment(
        f"MESH_SHAPE = {mesh}",
        f"Experiment.partitioner = %Partitioner.{partitioner}",
        *what,
        *(f"Experiment.{binding}" for binding in how),
        plan="sequence_tensor",
        experts=experts,
    )
    start, want = one_device(*what, experts=experts)
    assert_equal_training(train(experiment, start), want)


READ = (
    "Repeat.recompute = %Recompute.ALL_BUT_NAMED",
    "Repeat.saved_names = ('attention_in', 'attention_out', 'feed_forward_in')",
)


@pytest.mark.parametrize(
    "partitioner,saved,gathers,scatters",
    [
        # Forward 2 and 2; recomputed 2 and 1; backward 2 and 2.
        ("SHARDY", (), 6, 5),
        ("GSPMD", (), 6, 5),
        # What layers read and attention gives is recomputed no more.
        ("SHARDY", READ, 4, 4),
    ],
)
def test_layers_send_shards_of_the_stream_and_no_sums_of_it(
    partitioner, saved, gathers, scatters
):
    """In the loops over layers: a layer, and its gradient with what it recomputes."""
    experiment = small_experiment(
        "MESH_SHAPE = (4, 2)",
        f"Experiment.partitioner = %Partitioner.{partitioner}",
        *saved,
        plan="sequence_tensor",
    )
    program = StepPrograms(experiment).main
    module = HloModule(program.hlo_text())
    sent = [
        c.kind
        for c in program.collectives()
        if c.axes == ("tensor",)
        and c.bytes > 400
        and module.loops_around(module.by_name[c.name].computation)
    ]
    assert sorted(sent) == ["all-gather"] * gathers + ["reduce-scatter"] * scatters
