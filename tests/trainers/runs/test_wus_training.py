"""Training with sharded weight updates: the same losses, checkpoints and evaluation."""

import dataclasses
import functools

import numpy as np
import pytest

from meshwright.framework.compiler.weight_update_sharding.decide import (
    WeightUpdateSharding,
)
from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.checkpoints.checkpoints import Checkpoints
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.trainers.parity import initial_state, random_batches, small_experiment

# Float32 sums in another order, after five steps; of a tensor's largest element.
LOSS_RTOL = 2e-6
STATE_TOLERANCE = 5e-6
# The vocabulary divides by no axis: padded, or combined with another dim.
SMALL = (
    "NUM_LAYERS = 1",
    "VOCAB_SIZE = 265",
    "Experiment.ema = @ExponentialMovingAverage()",
    "ExponentialMovingAverage.decay = 0.75",
    "ExponentialMovingAverage.warmup = None",
)
PLANS = {"data": "MESH_SHAPE = (8,)", "finalized": "MESH_SHAPE = (4, 2)"}


@functools.cache
def programs(plan: str, mode: str, *params: str) -> StepPrograms:
    sharding = f"Experiment.weight_update_sharding = '{mode}'"
    experiment = small_experiment(PLANS[plan], sharding, *SMALL, *params, plan=plan)
    return StepPrograms(experiment)


@functools.cache
def start() -> NestedMap:
    return initial_state(programs("data", "off").experiment)


@functools.cache
def batches() -> list[NestedMap]:
    return random_batches(programs("data", "off").experiment, 5)


def host(tree: NestedMap) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in tree.items_by_path()}


def steps(runs: StepPrograms, state: TrainState, first: int, last: int) -> list[float]:
    """Trains from step `first` to `last`; losses."""
    losses = []
    for batch in batches()[first:last]:
        out = runs.main(state.stored(), batch)
        state.update(out["state"])
        losses.append(float(out["metrics"].loss[0]))
    return losses


@dataclasses.dataclass(frozen=True)
class Trained:
    """Losses of five steps; the state after three, and after five."""

    losses: list[float]
    halfway: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    folder: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Maps plan and mode to what five steps gave; a checkpoint of step 3 is saved."""

    @functools.cache
    def run(plan: str, mode: str) -> Trained:
        folder = tmp_path_factory.mktemp("wus")
        runs = programs(plan, mode)
        state = TrainState(runs, start())
        losses = steps(runs, state, 0, 3)
        halfway = state.logical()
        with Checkpoints(folder) as saver:
            saver.save(3, halfway)
        halfway = host(halfway)
        losses += steps(runs, state, 3, 5)
        weights = host(state.weights())
        return Trained(losses, halfway, host(state.logical()), weights, str(folder))

    return run


def assert_close(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for path, value in want.items():
        assert got[path].shape == value.shape, path
        assert got[path].dtype == value.dtype, path
        scale = np.abs(value).max() or 1.0
        np.testing.assert_allclose(
            got[path] / scale, value / scale, atol=STATE_TOLERANCE, err_msg=path
        )


@pytest.mark.parametrize("plan", PLANS)
def test_losses_and_checkpoints_are_the_same(trained, plan):
    assert programs(plan, "all").traced_main.updates.sharded
    assert programs("data", "off").traced_main.updates is None
    # On any plan the unsharded losses are those of tests/trainers/runs/test_parity.py.
    got, want = trained(plan, "all"), trained("data", "off")
    np.testing.assert_allclose(got.losses, want.losses, rtol=LOSS_RTOL)
    assert want.losses[-1] < want.losses[0], "five steps must learn something"
    for part in ("halfway", "state"):
        assert_close(getattr(got, part), getattr(want, part))
    specs = programs(plan, "all").state_specs
    assert {path: leaf.shape for path, leaf in got.state.items()} == {
        path: spec.shape for path, spec in specs.items_by_path()
    }


@pytest.mark.parametrize(
    "before,after",
    [
        (("data", "all"), ("data", "off")),
        (("data", "off"), ("data", "all")),
        (("data", "all"), ("finalized", "all")),
    ],
)
def test_a_checkpoint_of_one_goes_on_in_another(trained, before, after):
    saved, runs = trained(*before), programs(*after)
    with Checkpoints(saved.folder) as loader:
        restored = loader.restore(3, TrainState.abstract(runs))
    for path, leaf in host(restored).items():
        np.testing.assert_array_equal(leaf, saved.halfway[path], err_msg=path)
    state = TrainState(runs, restored)
    assert state.step == 3
    losses = steps(runs, state, 3, 5)
    np.testing.assert_allclose(losses, saved.losses[3:], rtol=LOSS_RTOL)
    assert_close(host(state.logical()), saved.state)


@pytest.mark.parametrize(
    "plan,mode", [("data", "off"), ("data", "all"), ("finalized", "all")]
)
def test_evaluation_reads_the_moving_average(trained, plan, mode):
    """In the plan's form: the dims that it pads are padded, those combined are not."""
    result = trained(plan, mode)
    forms = dict(programs(plan, mode).plan_layout.forms.ema.items_by_path())
    assert result.weights.keys() == forms.keys()
    for path, stored in result.weights.items():
        logical = result.state[f"ema.{path}"]
        np.testing.assert_array_equal(stored, forms[path].pad(logical), err_msg=path)
        weight = result.state[f"theta.{path}"]
        assert not np.array_equal(logical, weight), path


def test_a_fresh_state_is_evaluated_as_it_is():
    runs = programs("finalized", "all")
    state = TrainState(runs, start())
    forms = dict(runs.plan_layout.forms.ema.items_by_path())
    for path, stored in host(state.weights()).items():
        want = forms[path].pad(start().ema.get_path(path))
        np.testing.assert_array_equal(stored, want, err_msg=path)


class NoPrograms(StepPrograms):
    """Programs of which none may be compiled."""

    def compile(self, *args, name, **how):
        raise AssertionError(name)


def test_where_forms_are_the_same_nothing_is_compiled():
    """Unsharded, the logical, the stored and the evaluated form are one."""
    runs = NoPrograms(programs("data", "off").experiment)
    state = TrainState(runs, start())
    assert state.weights() is start().ema
    assert state.stored() is state.logical() is start()
    assert state.weights() is start().ema


def test_weights_that_stay_whole_are_evaluated_as_they_are():
    """Slots are split, but of the same shapes: to split them is all there is to do."""
    experiment = programs("data", "all", "VOCAB_SIZE = 264").experiment
    runs = NoPrograms(dataclasses.replace(experiment, ema=None))
    forms, planned = runs.step_layout.forms, runs.plan_layout.forms
    assert forms.theta == planned.theta and forms.slots != planned.slots
    specs = runs.state_specs
    state = TrainState(runs, specs.map(lambda spec: spec.shape))
    assert state.weights() == specs.theta.map(lambda spec: spec.shape)
    with pytest.raises(AssertionError, match="^initial_to_step"):
        state.stored()
    after = specs.map(lambda spec: -1)
    state.update(after)
    assert state.stored() is state.logical() is after
    assert state.weights() is after.theta


def test_each_device_holds_less_state():
    def held(mode):
        return programs("data", mode).main.memory().arguments

    updates = programs("data", "all").traced_main.updates
    assert held("off") - held("all") == sum(
        line.state_saved_bytes for line in updates.lines
    )
    # Adam's slots and the moving average, of which none is read by the model.
    assert held("all") < 0.45 * held("off")


def test_some_is_no_mode():
    message = (
        "Experiment.weight_update_sharding is 'some'; it must be one of 'auto', 'off', "
        "'all'"
    )
    with pytest.raises(ValueError, match=message):
        programs("data", "some")


@pytest.mark.parametrize("mode", ["auto", WeightUpdateSharding.ALL])
def test_modes_are_names_or_members(mode):
    experiment = programs("data", "off").experiment
    changed = dataclasses.replace(experiment, weight_update_sharding=mode)
    assert changed.weight_update_sharding is WeightUpdateSharding(mode)


def test_without_data_parallelism_nothing_is_asked():
    experiment = small_experiment("MESH_SHAPE = (1,)", *SMALL, plan="data")
    assert StepPrograms(experiment).data_axes == ()
    assert StepPrograms(experiment).traced_main.updates is None
