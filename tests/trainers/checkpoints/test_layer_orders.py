"""Weights of pipelines are read only where their layers are in the same order."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from meshwright.framework.modeling.layer_order import LayerOrder
from meshwright.framework.nested_map import NestedMap
from meshwright.trainers import export, generate
from meshwright.trainers.checkpoints import checkpoint_digests
from meshwright.trainers.checkpoints.checkpoint_initialize import weights_from
from meshwright.trainers.checkpoints.checkpoint_rules import InitializeFrom
from meshwright.trainers.checkpoints.checkpoints import CheckpointError, Checkpoints
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.training import loop
from tests.trainers import small_run
from tests.trainers.parity import small_experiment

PIPELINED = (
    "NUM_LAYERS = 4",
    "include 'lm/pipeline.gin'",
    "include 'plans/pipeline.gin'",
    "NUM_STAGES = 2",
    "NUM_MICROBATCHES = 4",
    "MESH_SHAPE = (2, 2, 2)",
)
ROUNDS = "Pipeline.num_repeats = %d"
OTHER = (
    r"theta\.stack\.\S+ and \d+ more: (4 layers in )?2 stages and 2 rounds in the "
    r"checkpoint, 4 layers in 2 stages and 1 round in this model\s+set "
    r"Pipeline\.num_repeats, which says"
)


@functools.cache
def programs(*params):
    return StepPrograms(small_experiment(*small_run.GIN_PARAMS, *params))


def circular():
    return programs(*PIPELINED, ROUNDS % 2)


def save(folder, config):
    """A checkpoint of two rounds, all zeros."""
    state = TrainState.abstract(circular()).map(
        lambda leaf: jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding)
    )
    orders = circular().layer_orders
    with Checkpoints(folder / "checkpoints", orders=orders) as saver:
        saver.save(5, state, metadata={"config": config})
    return folder


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path / "run", "")


@pytest.fixture
def saved_before(tmp_path):
    """As `saved`, without orders, but with the configuration."""
    return forget(save(tmp_path / "before", f"R = 2\nlm/{ROUNDS % 2}\n"))


def forget(folder):
    """Takes the orders of layers out of a checkpoint's manifest."""
    step = folder / "checkpoints" / "5"
    file = step / "manifest" / "metadata"
    forms = json.loads(file.read_text())
    for form in forms.values():
        del form["order"]
    file.write_text(json.dumps(forms))
    (step / checkpoint_digests.DIGESTS).unlink()
    checkpoint_digests.write(epath.Path(step))
    return folder


def call(module, folder, *params, **flags):
    return small_run.status_of(
        module,
        *PIPELINED,
        *params,
        model_dir=str(folder),
        device_count="8",
        **flags,
    )


@pytest.mark.parametrize("when", ["saved", "saved_before"])
def test_other_rounds_are_refused(when, request, tmp_path, capfd):
    folder = request.getfixturevalue(when)
    assert call(generate, folder, ROUNDS % 1, prompt=["de"]) == 1
    assert_refused(capfd.readouterr().err)
    output = str(tmp_path / "out")
    assert call(export, folder, ROUNDS % 1, output=output, what=["saved_model"]) == 1
    assert_refused(capfd.readouterr().err)
    for evaluates in (False, True):
        with pytest.raises(CheckpointError, match=OTHER):
            go_on(folder, evaluates)


def assert_refused(text):
    assert re.search(OTHER, text), text


def go_on(folder, evaluates):
    run = loop.Run(model_dir=str(folder))
    one_round = programs(*PIPELINED, ROUNDS % 1)
    if evaluates:
        loop.evaluate_latest(one_round, run)
    else:
        loop.train_and_evaluate(one_round, run)


def start_from(folder, model, *rules):
    return weights_from(
        InitializeFrom(checkpoint=str(folder), rules=rules),
        TrainState.abstract(model).theta,
        model.experiment.task,
        orders=model.layer_orders,
    )


@pytest.mark.parametrize("when", ["saved", "saved_before"])
def test_a_start_from_other_rounds_is_refused(when, request):
    folder = request.getfixturevalue(when)
    with pytest.raises(CheckpointError, match=OTHER):
        start_from(folder, programs(*PIPELINED, ROUNDS % 1))
    assert start_from(folder, circular())
    # Nor as the layers of a plain stack.
    plain = programs("NUM_LAYERS = 4", small_run.MESH)
    with pytest.raises(CheckpointError, match="2 rounds in the checkpoint, 4"):
        start_from(folder, plain, r"stack\.(.*) -> stack.\1 reshape")


def test_the_same_rounds_are_read(saved, saved_before):
    for folder in (saved, saved_before):
        with Checkpoints(folder / "checkpoints", orders=circular().layer_orders) as c:
            assert c.restore(None, TrainState.abstract(circular()))


@pytest.mark.parametrize(
    "config", ["", "no configuration", "a/Pipeline.num_repeats = 1\nb/" + ROUNDS % 2]
)
def test_where_the_rounds_are_not_known_weights_are_read(tmp_path, config):
    folder = forget(save(tmp_path / "run", config))
    assert start_from(folder, programs(*PIPELINED, ROUNDS % 1))


def plain_before(folder, config):
    """A checkpoint of a stack that is no pipeline, without orders."""
    plain = programs("NUM_LAYERS = 4", small_run.MESH)
    zeros = TrainState.abstract(plain).map(lambda x: jnp.zeros(x.shape, x.dtype))
    with Checkpoints(folder / "checkpoints") as saver:
        saver.save(5, zeros, metadata={"config": config})
    return forget(folder)


def test_a_stack_saved_before_goes_on_beside_a_pipeline(tmp_path):
    """The configuration has rounds of the pipeline, which the stack has none of."""
    plain = programs("NUM_LAYERS = 4", small_run.MESH)
    assert start_from(plain_before(tmp_path, ROUNDS % 2), plain)


def test_a_stack_of_unknown_order_is_reshaped_to_one_round_alone(tmp_path):
    """Arrays of other programs have none: TensorFlow's checkpoints and safetensors."""
    folder = plain_before(tmp_path, "")
    rule = r"stack\.(.*) -> stack.\1 reshape"
    assert start_from(folder, programs(*PIPELINED, ROUNDS % 1), rule)
    message = "1 stage and 1 round in the checkpoint, 4 layers in 2 stages and 2 rounds"
    with pytest.raises(CheckpointError, match=message):
        start_from(folder, circular(), rule)


def test_orders_that_no_shape_has_are_damage(saved):
    file = saved / "checkpoints" / "5" / "manifest" / "metadata"
    forms = json.loads(file.read_text())
    (path, *_) = circular().layer_orders
    forms[path]["order"]["layers"] = 10**12
    file.write_text(json.dumps(forms))
    (saved / "checkpoints" / "5" / checkpoint_digests.DIGESTS).unlink()
    checkpoint_digests.write(epath.Path(saved / "checkpoints" / "5"))
    with (
        Checkpoints(saved / "checkpoints") as reader,
        pytest.raises(CheckpointError, match="1000000000000 layers in 2 stages"),
    ):
        reader.restore_part(5, lambda *_: NestedMap())


def order(layers, stages, rounds):
    return LayerOrder(layers=layers, stages=stages, rounds=rounds)


@pytest.mark.parametrize(
    "one,other,same",
    [
        ((8, 1, 1), (8, 4, 1), True),
        ((8, 2, 1), (8, 4, 1), True),
        ((8, 1, 2), (8, 4, 1), True),  # A single stage has all layers in a row.
        ((8, 4, 2), (8, 4, 1), False),
        ((8, 4, 2), (8, 2, 2), False),
        ((7, 4, 2), (8, 4, 2), False),  # One of them has a place without a layer.
        ((None, 4, 2), (8, 4, 2), True),
        ((None, 4, 2), (8, 4, 1), False),
        ((None, 4, 2), (None, 4, 1), False),
        ((None, 8, 2), (8, 1, 1), True),  # A layer a stage: whatever the rounds.
    ],
)
def test_orders_of_stacks_of_one_shape(one, other, same):
    assert order(*one).is_same(order(*other)) is same
    assert order(*other).is_same(order(*one)) is same


def test_text_of_an_order():
    assert str(order(8, 4, 2)) == "8 layers in 4 stages and 2 rounds"
    assert str(order(None, 1, 1)) == "1 stage and 1 round"
