"""First values do not depend on where they are made; bad ones are found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.trainers.small_run import small_programs


@pytest.mark.parametrize(
    "params",
    [
        ("MESH_SHAPE = (1, 1)",),
        ("MESH_SHAPE = (2, 4)", "Experiment.partitioner = %Partitioner.GSPMD"),
    ],
)
def test_initial_state_has_the_same_bits_everywhere(params):
    want, got = small_programs(), small_programs(*params)
    want = dict(want.init(want.seed()).items_by_path())
    got = dict(got.init(got.seed()).items_by_path())
    assert got.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_array_equal(got[path], value, err_msg=path)
    assert np.std(np.asarray(want["theta.embedding.table"])) > 0


def test_seed_is_an_argument():
    programs = small_programs()
    first, other = (programs.init(np.uint32([0, n])).theta for n in (1, 2))
    assert not np.array_equal(first.embedding.table, other.embedding.table)
    np.testing.assert_array_equal(first.final_norm.scale, other.final_norm.scale)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_finite_names_the_leaf(value):
    programs = small_programs()
    state = programs.init(programs.seed())
    assert np.asarray(programs.finite(state)).all()
    state.slots.final_norm.scale.m += jnp.float32(value)
    paths = [path for path, _ in state.items_by_path()]
    bad = np.flatnonzero(~np.asarray(programs.finite(state)))
    assert [paths[i] for i in bad] == ["slots.final_norm.scale.m"]


def test_programs_for_devices_of_a_topology_are_not_run():
    experiment = small_programs("MESH_SHAPE = (2, 2)").experiment
    programs = StepPrograms(experiment, devices=jax.devices()[4:])
    assert programs.eval.collectives()
    state = programs.state_specs.map(lambda s: np.zeros(s.shape, s.dtype.name))
    with pytest.raises(ValueError, match="finite was compiled for a topology, whose"):
        programs.finite(state)
