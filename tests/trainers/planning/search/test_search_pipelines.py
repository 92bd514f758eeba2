"""Pipelines in a search: microbatches, what is dropped, bounds, rough costs, winner."""

import dataclasses

import pytest

from meshwright.framework.modeling.recompute import Recompute
from meshwright.trainers.planning.planning import plan
from meshwright.trainers.planning.search import (
    search_screen,
    search_text,
    search_variants,
)
from meshwright.trainers.planning.search.search_cost import bytes_passed, rough_seconds
from meshwright.trainers.planning.search.search_memory import MemoryBound
from meshwright.trainers.planning.search.search_space import (
    Policy,
    built,
    dims_of,
    essence,
    is_configured,
    microbatch_counts,
    misfit,
)
from tests import needs
from tests.trainers.planning.search import pipelined
from tests.trainers.planning.search.search_cases import EVERYTHING, searched, space
from tests.trainers.planning.search.search_cases import candidate as any_candidate
from tests.trainers.planning.test_plan_main import call_main

PLANS = ("plans/pipeline.gin",)
MESH = (2, 2, 2)


def pipelined_space(*params, **more):
    params = (*pipelined.PARAMS, *params)
    return space(*params, files=pipelined.GIN_FILES, plans=PLANS, **more)


@pytest.fixture(scope="module")
def small():
    return pipelined_space()


def candidate(where, mesh=MESH, policy=EVERYTHING, batch=8, microbatches=4):
    case = any_candidate(where, mesh, "pipeline", policy, batch)
    return dataclasses.replace(case, microbatches=microbatches)


def test_microbatches_are_powers_of_two_from_one_a_stage(small):
    experiment = small.experiment
    assert microbatch_counts(experiment, 8) == [2, 4, 8]
    assert microbatch_counts(experiment, 12) == [2, 4]
    # 16 a stage at most; what is configured even if it divides nothing.
    assert microbatch_counts(experiment, 2**10) == [2, 4, 8, 16, 32]
    assert microbatch_counts(experiment, 7) == [4]
    assert microbatch_counts(experiment, 8, (3, 5)) == [3, 5]
    assert microbatch_counts(space().experiment, 8) == [None]


def test_a_candidate_is_built_from_its_bindings(small):
    ones = small.candidates()
    assert {c.microbatches for c in ones} == {2, 4, 8}
    configured = [c for c in ones if is_configured(small.experiment, c)]
    assert configured == [candidate(small)]
    for case in [*configured, candidate(small, (1, 4, 2), batch=16, microbatches=2)]:
        made = built(small.gin_files, [*small.gin_params, *case.bindings()])
        assert made == case.of(small.experiment)
        assert made.task.stack.num_microbatches == case.microbatches
        assert made.task.stack.stack.recompute is Recompute.EVERYTHING


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"mesh": (1, 4, 2), "microbatches": 2}, None),
        ({"mesh": (4, 1, 2)}, "more shards than there are 'stages'"),
        ({"microbatches": 3}, "microbatches that do not divide the batch"),
        ({"microbatches": 8}, "shards of unequal microbatches"),
        ({"batch": 6, "microbatches": 3}, "shards of unequal batches"),
    ],
)
def test_shapes_that_cannot_do_are_left_out(small, changes, reason):
    assert misfit(small.experiment, candidate(small, **changes), small.torus) == reason


def test_stages_that_their_axis_does_not_divide_are_left_out():
    where = pipelined_space("NUM_STAGES = 3", "NUM_LAYERS = 3")
    case = candidate(where)
    reason = "stages that their mesh axis does not divide"
    assert misfit(where.experiment, case, where.torus) == reason
    full = candidate(where, (1, 4, 2), microbatches=2)
    assert misfit(where.experiment, full, where.torus) is None
    # Bounds are traced on another mesh, which such stages allow.
    assert MemoryBound(where.experiment).activations(full) > 0


def test_how_a_microbatch_is_split_makes_another_program(small):
    dims = dims_of(small.experiment)
    case = candidate(small)
    tables = case.plan.tables
    split = dict(tables.activations, microbatch=None)
    other = dataclasses.replace(
        case.plan, tables=dataclasses.replace(tables, activations=split)
    )
    plans = [case, dataclasses.replace(case, plan=other)]
    counts = [case, dataclasses.replace(case, microbatches=2)]
    for pair in (plans, counts):
        assert len({essence(each, dims) for each in pair}) == 2


# Of small_lm.gin: U 2 rows of a microbatch, S 8, M 16; float32; 4 layers, 2 stages.
INPUT = 2 * 8 * 16 * 4


@pytest.mark.parametrize(
    ("changes", "inputs", "split"),
    [
        # Inputs of 2 layers in 5 iterations, and gradients of 4 microbatches.
        ({}, 2 * 5 + 4, 4),
        # Half the rows, 9 iterations and 8 microbatches.
        ({"mesh": (2, 1, 4), "microbatches": 8}, (2 * 9 + 8) / 2, 4),
        # A device has both stages.
        ({"mesh": (1, 2, 4)}, 2 * (2 * 5 + 4), 8),
    ],
)
def test_saved_activations_are_counted(small, changes, inputs, split):
    bound = MemoryBound(small.experiment).activations(candidate(small, **changes))
    assert bound == INPUT * inputs / split


def test_saved_activations_of_a_circular_pipeline():
    """3 microbatches have slots as 4: 9 iterations of one layer."""
    where = pipelined_space("Pipeline.num_repeats = 2", "NUM_MICROBATCHES = 3")
    case = candidate(where, batch=6, microbatches=3)
    assert MemoryBound(where.experiment).activations(case) == INPUT * (9 + 4) / 4


def test_what_is_recomputed_is_not_saved(small):
    bound = MemoryBound(small.experiment)
    named = Policy(recompute=Recompute.ALL_BUT_NAMED, saved_names=("hidden",))
    policies = (EVERYTHING, named, Policy(recompute=Recompute.NOTHING))
    saved = [bound.activations(candidate(small, policy=each)) for each in policies]
    # A hidden activation is twice an input, in 10 iterations and layers.
    assert saved[1] - saved[0] == 2 * 10 * INPUT / 4 < saved[2] - saved[0]


def test_weights_are_split_by_stages(small):
    bound = MemoryBound(small.experiment)
    halves, full = (bound.state(candidate(small, (n, 4 // n, 2))) for n in (2, 1))
    stack = small.experiment.task.weights().stack
    matrices = sum(4 * spec.size for spec in stack.leaves() if spec.is_matrix)
    vectors = sum(4 * spec.size for spec in stack.leaves() if not spec.is_matrix)
    # Weights, two slots and gradients.
    assert full - halves == 4 * (matrices / 2 + vectors) / 2


@needs.libtpu
@pytest.mark.always
def test_no_program_takes_less_than_its_bound(small):
    case = candidate(small)
    bound = MemoryBound(small.experiment)
    least = bound.state(case) + bound.activations(case)
    assert 0 < least <= plan(case.of(small.experiment), topology="v3:2x2").peak_bytes


def test_bubbles_cost_time(small):
    """Where nothing is sent, time goes by the iterations."""
    large = pipelined_space("MODEL_DIMS = 4096", "HIDDEN_DIMS = 16384", batches=(64,))
    times = [
        rough_seconds(
            large.experiment,
            candidate(large, (2, 1, 4), batch=64, microbatches=n),
            dataclasses.replace(
                large.torus,
                kind=dataclasses.replace(large.torus.kind, link_bandwidth=1e30),
            ),
            0.0,
        )
        for n in (2, 16)
    ]
    # 3 iterations instead of 2, and 17 instead of 16; a little of it is the softmax.
    assert times[0] / times[1] == pytest.approx((3 / 2) / (17 / 16), rel=0.01)


def test_weights_gradients_are_reduced_for_each_microbatch(small):
    few, many = (
        bytes_passed(candidate(small, microbatches=n).of(small.experiment), 0.0)
        for n in (2, 4)
    )
    embedding = 2 * 4 * 264 * 16 / 2 * 1 / 2
    assert (many["X"] - embedding) / (few["X"] - embedding) == pytest.approx(5 / 3)
    # Nothing of a layer is sent along the stages' axis.
    assert few["L"] == many["L"] > 0


def test_the_winner_is_a_gin_file_to_train_with(small, tmp_path):
    best = candidate(small, batch=16, microbatches=2)
    rows = searched(space()).ranked
    promising = dataclasses.replace(rows[0].promising, space=small, candidate=best)
    row = dataclasses.replace(rows[0], promising=promising)
    changed = dataclasses.replace(searched(space()), ranked=(row,), refused=())
    path = tmp_path / "winner.gin"
    path.write_text(search_text.winner(small, changed))
    assert built([str(path)], []) == best.of(small.experiment)
    lines = search_text.table(small, changed).splitlines()
    assert lines[1].split()[-4:] == ["pipeline", "2", "everything", "16/2"]
    assert "  after a plan's name: stages x repeats of pipelines" in lines
    assert "  batch: examples a step / microbatches of pipelines" in lines
    assert all(len(line) <= 80 for line in lines)


def test_screening_keeps_what_can_be_laid_out():
    screened = search_screen.screen(pipelined_space(batches=(8,)))
    kept = {(s.candidate.mesh, s.candidate.microbatches) for s in screened.promising}
    assert {scored.candidate.mesh[0] for scored in screened.promising} == {1, 2}
    assert (MESH, 4) in kept and (MESH, 8) not in kept
    assert screened.promising[0].configured
    assert screened.left_out["more shards than there are 'stages'"] > 0


@pytest.fixture(scope="module")
def others(small):
    """By their stages."""
    return {each.stages: each for each in search_variants.staged(small)}


def test_other_stages_and_none_are_spaces_of_their_own(small, others):
    assert small.stages == "2" and list(others) == ["", "2x2", "4"]
    for each in others.values():
        assert built(each.gin_files, each.bindings) == each.experiment
    assert others[""].experiment.task.stack == small.experiment.task.stack.stack
    circular = others["2x2"].experiment.task.stack
    assert (circular.num_stages, circular.num_repeats) == (2, 2)
    assert search_variants.staged(space()) == []
    (chosen,) = search_variants.staged(small, stages=(2, 4), repeats=(1,))
    assert chosen.stages == "4"


@pytest.mark.parametrize(
    ("params", "stages"),
    [
        # gin looks up a parameter in a scope and then around it.
        (("LanguageModel.stack = @deep/Pipeline()",), ["", "4"]),
        (
            (
                "LanguageModel.stack = @deep/Pipeline()",
                "deep/Repeat.recompute = %Recompute.NOTHING",
            ),
            ["", "4"],
        ),
        # No single binding puts the stack in its place.
        (
            (
                "LanguageModel.stack = @Sequential()",
                "Sequential.layers = (@Pipeline(),)",
            ),
            ["4"],
        ),
    ],
)
def test_a_pipeline_of_a_scope(params, stages):
    made = search_variants.staged(pipelined_space(*params), repeats=(1,))
    assert [each.stages for each in made] == stages


def test_stages_of_which_nothing_can_be_built_are_left_out(caplog):
    caplog.set_level("WARNING", logger="absl")
    deep = ("LanguageModel.stack = @deep/Pipeline()", "deep/Pipeline.num_stages = 2")
    where = pipelined_space(*deep)
    assert search_variants.staged(where, stages=(4,), repeats=(1,)) == []
    assert "left out: Pipeline.num_stages = 4; Pipeline.num_repeats = 1" in caplog.text


def test_stages_that_are_named_need_not_divide_the_layers(small):
    made = search_variants.staged(small, stages=(3,), repeats=(1,))
    assert [each.stages for each in made] == ["3"]


def test_a_plan_file_does_not_undo_a_variant(small, others, tmp_path):
    """Such as the winner of an earlier search, which includes what it is based on."""
    path = tmp_path / "mine.gin"
    path.write_text("include 'plans/pipeline.gin'\nPipeline.num_stages = 2\n")
    plan = dataclasses.replace(small.plans[0], gin_file=str(path))
    four = others["4"]
    case = dataclasses.replace(candidate(four, mesh=(4, 2, 1)), plan=plan)
    row = dataclasses.replace(
        searched(space()).ranked[0],
        promising=dataclasses.replace(
            search_screen.screen(four).promising[0], candidate=case
        ),
    )
    changed = dataclasses.replace(searched(space()), ranked=(row,), refused=())
    winner = tmp_path / "winner.gin"
    winner.write_text(search_text.winner(small, changed))
    assert built([str(winner)], []) == case.of(four.experiment)


def test_an_encoder_and_a_decoder_have_the_same_stages():
    gin_files = ("mt/gettext_pipeline.gin",)
    experiment = built(gin_files, ())
    where = dataclasses.replace(
        space(), experiment=experiment, gin_files=gin_files, gin_params=()
    )
    task = experiment.task
    plain, *deeper = search_variants.staged(where, stages=(1, 4), repeats=(1,))
    assert plain.experiment.task.encoder == task.encoder.stack
    assert plain.experiment.task.decoder == task.decoder.stack
    assert [each.stages for each in deeper] == ["4"]


def test_pipelines_and_plans_without_take_turns(small, others):
    parts = [
        search_screen.screen(small),
        search_screen.screen(others["4"]),
        search_screen.screen(others[""]),
    ]
    joined = search_screen.joined_spaces(parts)
    assert joined.promising[0].configured
    assert sum(scored.configured for scored in joined.promising) == 1
    pipelined_ones = [bool(scored.space.stages) for scored in joined.promising]
    assert pipelined_ones[1:5] in ([False, True] * 2, [False, False, True, False])
    counts = [len(part.promising) for part in parts]
    assert len(joined.promising) == sum(counts)
    assert sum(joined.left_out.values()) == len(joined.dropped)


def test_a_winner_without_a_pipeline_trains(small, others, tmp_path):
    best = search_screen.screen(others[""]).promising[0]
    rows = searched(space()).ranked
    row = dataclasses.replace(rows[0], promising=best)
    changed = dataclasses.replace(searched(space()), ranked=(row,), refused=())
    path = tmp_path / "winner.gin"
    path.write_text(search_text.winner(small, changed))
    assert built([str(path)], []) == best.candidate.of(others[""].experiment)


ONE_AXIS = (  # As of Table 5.
    "ShardingPlan.mesh_axes = ('L',)",
    "ShardingPlan.weights = {'stages': 'L'}",
    "ShardingPlan.activations = {'batch': 'L', 'microbatch': None}",
    "MESH_SHAPE = (8,)",
    "NUM_STAGES = 8",
    "NUM_MICROBATCHES = 8",
)


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_mesh_may_have_no_axis_but_that_of_the_stages(repeats):
    """Memory is bounded by a trace for a mesh that has one device then."""
    params = (*ONE_AXIS, f"NUM_LAYERS = {8 * repeats}")
    params = (*pipelined.PARAMS, *params, f"Pipeline.num_repeats = {repeats}")
    where = space(*params, files=pipelined.GIN_FILES, plans=())
    screened = search_screen.screen(where)
    assert screened.left_out == {} and screened.promising[0].configured
    case = screened.promising[0].candidate
    iterations = 8 * repeats + 7
    # A device has one stage, and a microbatch one row: half of `INPUT`.
    saved = MemoryBound(where.experiment).activations(
        dataclasses.replace(case, policy=EVERYTHING)
    )
    assert saved == INPUT / 2 * (iterations + 8)


ONE = {"search_stages": "2"}  # As configured.
SCOPED = ("LanguageModel.stack = @deep/Pipeline()", "deep/Pipeline.stack = @Repeat()")


@pytest.mark.parametrize(
    ("params", "more", "message"),
    [
        (
            [*SCOPED, "deep/Pipeline.num_microbatches = 2"],
            {},
            "deep/Pipeline.num_microbatches is bound for a scope, and would stay: bind",
        ),
        (
            [
                "Pipeline.stack = @deep/Repeat()",
                "deep/Repeat.recompute = %Recompute.NOTHING",
            ],
            {},
            "--search chooses Repeat.recompute for all",
        ),
        ([], {"search_microbatches": "0"}, "--search_microbatches=0: must be whole"),
        ([], {"search_stages": "two"}, "--search_stages=two: must be whole numbers"),
        ([], ONE | {"search_batch": "9"}, "choose other batches (--search_batch)"),
        (
            [],
            ONE | {"search_microbatches": "3"},
            "microbatches (--search_microbatches)",
        ),
    ],
)
def test_wrong_input_is_told(params, more, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as info:
        call_main(
            *pipelined.PARAMS,
            *params,
            gin_files=pipelined.GIN_FILES,
            search="true",
            topology="v3:2x2",
            cache_dir=str(tmp_path),
            **more,
        )
    assert message in " ".join(str(info.value.code).split())


@pytest.mark.parametrize("name", ["microbatches", "stages", "repeats"])
def test_flags_of_pipelines_need_pipelines(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = f"--search_{name} is for pipelines, and the task has none"
    with pytest.raises(SystemExit, match=message):
        call_main(search="true", topology="v3:2x2", **{f"search_{name}": "4"})
