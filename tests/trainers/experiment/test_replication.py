"""The replication report at start-up, and its budget."""

import dataclasses

import pytest
import tensorflow as tf

from meshwright.framework.compiler.explaining.explain import (
    RematerializedTensor,
    explain,
)
from meshwright.framework.compiler.lowering.sources import Source
from meshwright.trainers.experiment import replication
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.trainers.small_run import at, points, small_programs, train

M, S, B = 16, 8, 8


def changed(**changes) -> StepPrograms:
    experiment = small_programs().experiment
    plan = dataclasses.replace(experiment.plan, **changes.pop("plan", {}))
    return StepPrograms(dataclasses.replace(experiment, plan=plan, **changes))


def test_state_and_batch_that_no_axis_splits_are_found_with_the_reason():
    tensors = replication.replicated_state(small_programs())
    assert [tensor.bytes for tensor in tensors] == sorted(
        (tensor.bytes for tensor in tensors), reverse=True
    )
    by_name = {tensor.name: tensor for tensor in tensors}
    scale = by_name["theta.stack.attention_norm.scale"]
    assert (scale.shape, scale.dtype, scale.bytes) == ((1, M), "float32", 4 * M)
    assert scale.why == (
        "ShardingPlan.weights names no axis for its dims (layers, features)"
    )
    assert by_name["step"].why == "a scalar"
    assert not [name for name in by_name if name.endswith(("w_in", "table"))]
    assert not [name for name in by_name if name.startswith("batch")]


def test_a_batch_that_the_plan_forgets_is_found():
    tensors = replication.replicated_state(changed(plan={"activations": {}}))
    ids = next(tensor for tensor in tensors if tensor.name == "batch.ids")
    assert (ids.shape, ids.bytes) == ((B, S), 4 * B * S)
    assert ids.why == (
        "ShardingPlan.activations names no axis for its dims (batch, sequence)"
    )


def test_an_axis_of_one_device_splits_nothing():
    tensors = replication.replicated_state(changed(plan={"mesh_shape": (1, 8)}))
    ids = next(tensor for tensor in tensors if tensor.name == "batch.ids")
    assert ids.why == "its axes [X,_] have one device each"


def test_on_one_device_there_is_nothing_to_report():
    programs = changed(plan={"mesh_shape": (1, 1)})
    assert replication.replicated_state(programs) == []
    lines = replication.report_lines(programs, [])
    assert lines == ["replicated: nothing, the mesh has one device"]


def test_small_tensors_have_one_line():
    programs = small_programs()
    tensors = replication.replicated_state(programs)
    total = sum(tensor.bytes for tensor in tensors)
    assert replication.report_lines(programs, tensors) == [
        f"replicated on each of 8 devices: {len(tensors)} tensors of state and batch, "
        f"{total} B",
        "  each is below 1.00 MiB",
    ]


def test_large_tensors_have_a_few_lines():
    tensors = [
        replication.ReplicatedTensor(
            name=f"theta.w_{i}",
            shape=(2**i,),
            dtype="float32",
            bytes=4 * 2**i,
            why="so",
        )
        for i in range(21, 15, -1)
    ]
    lines = replication.report_lines(small_programs(), tensors)
    assert lines[1:] == [
        "  8.00 MiB float32[2097152] theta.w_21: so",
        "  4.00 MiB float32[1048576] theta.w_20: so",
        "  2.00 MiB float32[524288] theta.w_19: so",
        "  3 more",
    ]
    assert replication.report_lines(small_programs(), tensors[3:])[1:] == [
        "  1.00 MiB float32[262144] theta.w_18: so",
        "  2 more",
    ]


def test_budget():
    tensors = replication.replicated_state(small_programs())
    total = sum(tensor.bytes for tensor in tensors)
    replication.check_budget(tensors, None)
    replication.check_budget(tensors, total)
    with pytest.raises(replication.ReplicationError) as info:
        replication.check_budget(tensors, total - 1)
    error = str(info.value)
    assert f"takes {total} B ({total} bytes) on each device" in error
    assert f"Experiment.replicated_budget = {total - 1}; the largest of" in error
    assert "64 B float32[1,16] " in error
    assert "names no axis for its dims (layers, features)" in error
    assert "Name mesh axes for these dims in ShardingPlan.weights" in error


@pytest.mark.parametrize("budget", [-1, 1.5, "1 MB"])
def test_a_budget_that_is_no_number_of_bytes_is_refused(budget):
    with pytest.raises(
        ValueError, match="replicated_budget is .*a whole number of at least 0"
    ):
        changed(replicated_budget=budget)


def test_training_stops_before_compiling_if_state_alone_is_over(tmp_path):
    with pytest.raises(replication.ReplicationError, match="replicated_budget = 100;"):
        train(changed(replicated_budget=100), tmp_path)
    assert not (tmp_path / "checkpoints" / "5").exists()


def test_training_stops_if_activations_are_over(tmp_path, caplog):
    state = replication.replicated_state(small_programs())
    activations = replication.replicated_activations(explain(small_programs().main))
    assert activations[0].bytes > 0 and "(" in activations[0].name
    total = sum(tensor.bytes for tensor in (*state, *activations))
    with pytest.raises(replication.ReplicationError) as info:
        train(small_programs(), tmp_path, replicated_budget=total - 1)
    count = len(state) + len(activations)
    assert f"the largest of {count} tensors:\n  64 B " in str(info.value)
    caplog.set_level("INFO", logger="absl")
    result = train(
        small_programs(), tmp_path / "enough", replicated_budget=total, num_steps=5
    )
    assert result.step == 5
    assert "replicated on each of 8 devices: " in caplog.text
    assert "is gathered in full" not in caplog.text
    (event,) = points(tmp_path / "enough", "train")["left replicated"]
    assert "theta.stack.attention_norm.scale" in str(event)


def rematerialized(layer):
    source = Source(
        op_name="x/MatMul",
        op_type="MatMul",
        layer=layer,
        file="/a/layers/attention/attention.py",
        line=7,
        is_gradient=False,
        shapes=((32, 32),),
    )
    return RematerializedTensor(
        tensor=source,
        at=source,
        tensor_name="x/MatMul",
        at_name="x/MatMul",
        shape=(32, 32),
        dtype="f32",
        bytes=tf.float32.size * 32 * 32,
    )


def test_a_full_rematerialization_is_logged(tmp_path, caplog, monkeypatch):
    """With a budget, the program is explained: what that finds is told."""
    programs = at(small_programs(), replicated_budget=10**9, num_steps=5)
    explanation = explain(programs.main)
    gathered = rematerialized("stack.attention")
    explanation = dataclasses.replace(explanation, _rematerialized=(gathered,))
    monkeypatch.setattr(replication, "explain", lambda program: explanation)
    train(programs, tmp_path)
    assert "a tensor is gathered in full on every device:\n  4.00 KiB" in caplog.text
    assert "stack.attention: MatMul (attention/attention.py:7)" in caplog.text
