"""What a search chooses from: candidates, plans, what is dropped by shapes alone."""

import dataclasses
import math

import pytest

from meshwright.framework.compiler.weight_update_sharding.decide import (
    WeightUpdateSharding,
)
from meshwright.framework.devices.topology import topology
from meshwright.framework.modeling.recompute import Recompute
from meshwright.trainers.planning.search import search_screen, search_variants
from meshwright.trainers.planning.search.search_memory import MemoryBound
from meshwright.trainers.planning.search.search_space import (
    Candidate,
    Policy,
    built,
    candidates,
    configured,
    factorizations,
    is_configured,
    misfit,
    more_names,
    named_plans,
    policies,
)
from tests.trainers.planning.search.search_cases import (
    EVERYTHING,
    NAMED,
    NAMES,
    NOTHING,
    PLANS,
    candidate,
    promising,
    space,
)
from tests.trainers.small_run import GIN_FILES


@pytest.fixture(scope="module")
def small():
    return space(*NAMED)


def test_mesh_shapes_are_all_products():
    assert factorizations(8, 2) == [(1, 8), (2, 4), (4, 2), (8, 1)]
    shapes = factorizations(64, 3)
    assert len(set(shapes)) == len(shapes) == math.comb(6 + 2, 2)
    assert all(math.prod(shape) == 64 for shape in shapes)
    assert factorizations(1, 0) == [()] and factorizations(2, 0) == []


def test_policies_are_all_nothing_and_nested_subsets(small):
    subsets = [
        Policy(recompute=Recompute.ALL_BUT_NAMED, saved_names=NAMES[:count])
        for count in (6, 4, 2)
    ]
    assert policies(small.experiment) == [EVERYTHING, NOTHING, *subsets]
    plain = built(GIN_FILES, ["MESH_SHAPE = (2, 4)"])
    assert policies(plain) == [EVERYTHING, NOTHING]
    assert policies(plain, ("hidden",)) == [EVERYTHING, NOTHING]


def test_what_a_layer_reads_may_be_saved_too(small):
    more = more_names(small.experiment)
    assert more == ("attention_in", "attention_out", "feed_forward_in")
    kept = [policy.saved_names for policy in policies(small.experiment, more)[-2:]]
    assert kept == [(*NAMES, *more[:2]), (*NAMES, *more)]
    wide = dataclasses.replace(small, more_names=more)
    saved = {case.policy.saved_names for case in wide.candidates() if case.policy}
    assert set(kept) < saved
    assert more_names(built(GIN_FILES, ["MESH_SHAPE = (2, 4)"])) == ()


def test_a_candidate_is_built_from_its_bindings(small):
    for case in small.candidates():
        made = built(small.gin_files, [*small.gin_params, *case.bindings()])
        assert made.plan == case.plan.on(case.mesh)
        stack = made.task.stack
        assert (stack.recompute, tuple(stack.saved_names)) == (
            case.policy.recompute,
            case.policy.saved_names,
        )
        assert made.global_batch == case.batch
        assert is_configured(small.experiment, case) == (made == small.experiment)
    assert len(small.candidates()) == 4 * 3 * 5


def test_a_given_device_order_is_for_its_mesh_alone():
    ids = "ShardingPlan.device_ids = (7, 6, 5, 4, 3, 2, 1, 0)"
    case = candidate(space(ids), mesh=(4, 2))
    assert "ShardingPlan.device_ids = None" in case.bindings()
    assert built(GIN_FILES, [ids, *case.bindings()]).plan.device_ids is None


def test_plans_are_the_shipped_ones_of_the_same_axes_and_the_users_own(tmp_path):
    binding = 'ShardingPlan.weights = {"model": "Y"}'
    shipped = [plan.name for plan in space(plans=()).plans]
    assert {"attempt1", "attempt2", "finalized"} <= set(shipped)
    names = [plan.name for plan in space(binding, plans=()).plans]
    assert names == ["as given", *shipped]
    other_axes = [
        'ShardingPlan.mesh_axes = ("replica",)',
        'ShardingPlan.activations = {"batch": "replica"}',
        "ShardingPlan.weights = {}",
        "ShardingPlan.mesh_shape = (8,)",
    ]
    (only,) = space(*other_axes, plans=()).plans
    assert only.name == "as given"
    path = tmp_path / "mine.gin"
    path.write_text("\n".join(other_axes))
    small = space()
    files = ["plans/attempt1.gin", str(path)]
    wanted = named_plans(small.experiment, GIN_FILES, small.gin_params, files)
    assert [plan.name for plan in wanted] == ["attempt1", "mine"]
    assert wanted[1].gin_file == str(path)


def test_a_plan_may_be_another_one_by_inclusion(tmp_path):
    small = space()
    path = tmp_path / "mine.gin"
    path.write_text("# As tried first.\ninclude 'plans/attempt1.gin'\n")
    (plan,) = named_plans(small.experiment, GIN_FILES, small.gin_params, [str(path)])
    (first,) = (plan for plan in small.plans if plan.name == "attempt1")
    assert plan.name == "mine" and plan.tables == first.tables
    path.write_text("include 'plans/attempt1.gin'\nRepeat.num_layers = 2\n")
    with pytest.raises(ValueError, match="mine.gin binds nothing of ShardingPlan"):
        named_plans(small.experiment, GIN_FILES, small.gin_params, [str(path)])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mesh": (1, 8)}, "more shards than there are 'heads'"),
        ({"batch": 4, "mesh": (8, 1)}, "more shards than there are 'batch'"),
        ({"batch": 9}, "shards of unequal batches"),
        ({"mesh": (8, 1)}, None),
    ],
)
def test_shapes_that_cannot_do_are_left_out(small, changes, reason):
    assert misfit(small.experiment, candidate(small, **changes), small.torus) == reason


def test_a_mesh_that_is_no_box_of_the_topology_is_left_out(small):
    torus = topology("v5e:4x3")
    assert misfit(small.experiment, candidate(small, mesh=(8, 1)), torus) == (
        "mesh cannot be laid onto the topology"
    )


def test_a_model_without_a_plan_gets_a_shipped_one():
    """What it has splits nothing, on one device."""
    files = (GIN_FILES[0], GIN_FILES[2])
    experiment = built(files, [])
    assert not experiment.plan.weights and experiment.plan.mesh.size == 1
    plans = named_plans(experiment, files, [])
    assert plans[0].name == "as given"
    (plan,) = (p for p in plans if p.name == "finalized")
    case = Candidate(mesh=(4, 2), plan=plan, policy=EVERYTHING, batch=8)
    made = built(files, case.bindings())
    assert made.plan == plan.on((4, 2)) and made.plan.weights


def test_what_is_the_same_program_is_looked_at_once(monkeypatch):
    """Along an axis of one device plans do not differ."""
    bounded, state = [], MemoryBound.state
    monkeypatch.setattr(
        MemoryBound, "state", lambda self, c: bounded.append(c) or state(self, c)
    )
    screened = search_screen.screen(space())
    assert len(bounded) == len(screened.promising)
    apart = {
        (scored.candidate.mesh, scored.candidate.plan.name)
        for scored in screened.promising
        if scored.candidate.mesh in ((8, 1), (4, 2))
    }
    assert apart == {
        ((4, 2), "attempt1"),
        ((4, 2), "attempt2"),
        ((4, 2), "finalized"),
        ((8, 1), "attempt1"),
        ((8, 1), "attempt2"),
    }
    assert screened.left_out["the same program as with another plan"] == 2
    assert screened.promising[0].configured


def test_dims_that_the_model_lacks_make_no_other_program(tmp_path):
    path = tmp_path / "experts.gin"
    path.write_text(
        "include 'plans/attempt2.gin'\n"
        "ShardingPlan.weights = {'model': 'X', 'heads': 'Y', 'hidden': 'Y', "
        "'vocab': 'Y', 'experts': 'X'}\n"
    )
    screened = search_screen.screen(space(plans=(str(path), PLANS[1])))
    assert {scored.candidate.plan.name for scored in screened.promising} == {"attempt2"}
    assert screened.left_out["the same program as with another plan"] == 6


@pytest.mark.parametrize(
    "params",
    [(), pytest.param(NAMED, marks=pytest.mark.slow)],  # That lowers each program.
    ids=["everything", "named"],
)
def test_of_equal_programs_the_configured_one_is_kept(params):
    """Attempt 2 comes first, and is the same on (8, 1)."""
    screened = search_screen.screen(space("MESH_SHAPE = (8, 1)", *params))
    (configured,) = (s.candidate for s in screened.promising if s.configured)
    assert configured.plan.name == "finalized" and configured.mesh == (8, 1)


def test_candidates_come_with_each_batch(small):
    ones = list(
        candidates(small.experiment, small.plans[:1], devices=8, batches=(8, 16))
    )
    assert {c.batch for c in ones} == {8, 16} and len(ones) == 4 * 5 * 2


def test_weight_updates_are_tried_otherwise_where_a_matrix_is_not_split_by_data(small):
    """Attempt 2 splits all by the batch's axis; data parallelism nothing."""
    plans = ("plans/attempt2.gin", "plans/data_2d.gin")
    where = space(*NAMED, plans=plans)
    split, data = (
        promising(where, plan=name, mesh=(2, 4)) for name in ("attempt2", "data_2d")
    )
    assert search_variants.with_other_updates(split) == []
    (other,) = search_variants.with_other_updates(data)
    assert other.candidate == data.candidate and other.space.variant == "off"
    made = other.space.experiment
    assert built(other.space.gin_files, other.space.bindings) == made
    assert made.weight_update_sharding is WeightUpdateSharding.OFF


def test_groups_of_experts_are_spaces_of_their_own(caplog):
    gin_files = ("lm/stdlib_experts.gin",)
    experiment = built(gin_files, ())
    where = dataclasses.replace(
        space(), experiment=experiment, gin_files=gin_files, gin_params=()
    )
    size = experiment.task.stack.body.layers[1].feed_forward.group_size
    (other,) = search_variants.grouped(where, [size, 32])
    assert other.variant == "g32" and not other.is_configured(configured(experiment))
    layer = other.experiment.task.stack.body.layers[1].feed_forward
    assert layer.group_size == 32
    scoped = dataclasses.replace(where, gin_params=("experts/MoE.group_size = 64",))
    assert search_variants.grouped(scoped, [32]) == []
    assert "never took effect: MoE.group_size = 32" in caplog.text
