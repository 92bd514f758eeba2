"""Variants of a search's space: other stages, other groups of experts, other updates.

A variant is a space with a few more bindings, and with its own experiment, because the
shapes of weights depend on some of these.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import gin

from meshwright.framework.compiler.weight_update_sharding.decide import (
    WeightUpdateSharding,
)
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.trainers.experiment import config
from meshwright.trainers.experiment.stacks import map_stacks, pipelines
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.search.search_screen import (
    ScoredCandidate,
    SearchSpace,
)
from meshwright.trainers.planning.search.search_space import built

log = logging.getLogger("absl")

_REPEATS = (1, 2, 4)


def staged(
    space: SearchSpace, stages: Sequence[int] = (), repeats: Sequence[int] = ()
) -> list[SearchSpace]:
    """The spaces of a pipelined model with other stages, or without its pipelines.

    Args:
      space: the space as configured.
      stages: numbers of stages to choose from, 1 for no pipeline; empty for 1, the
        configured numbers and the powers of two up to the number of devices.
      repeats: how often a microbatch may pass each stage; empty for 1, 2, 4 and the
        configured numbers. Unless stages or repeats are given, their product divides
        the layers.
    """
    given = pipelines(space.experiment.task).values()
    if not given:
        return []
    counts = [pipeline.stack.count for pipeline in given]
    most = min(*counts, space.torus.size)
    powers = {2**n for n in range(most.bit_length())}
    numbers = set(stages) or powers | {each.num_stages for each in given}
    times = set(repeats) or {*_REPEATS, *(each.num_repeats for each in given)}
    made = list(_without_pipelines(space)) if 1 in numbers else []
    for number, passes in itertools.product(sorted(numbers - {1}), sorted(times)):
        divides = all(count % (number * passes) == 0 for count in counts)
        if divides or stages or repeats:
            lines = (
                f"Pipeline.num_stages = {number}",
                f"Pipeline.num_repeats = {passes}",
            )
            made += _with_bindings(space, lines)
    return [each for each in made if each.stages != space.stages]


def grouped(space: SearchSpace, sizes: Sequence[int]) -> list[SearchSpace]:
    """The spaces of a mixture of experts with groups of other numbers of tokens.

    Tokens compete for slots within their group, so each trains another model.
    """
    made = [
        each
        for size in sizes
        for each in _with_bindings(space, [f"MoE.group_size = {size}"], f"g{size}")
    ]
    return [each for each in made if each.experiment != space.experiment]


def with_other_updates(scored: ScoredCandidate) -> list[ScoredCandidate]:
    """A candidate with and without automatic weight-update sharding, but as it is.

    None where each matrix is split by all axes of the batch already.
    """
    space, candidate = scored.space, scored.candidate
    programs = StepPrograms(candidate.of(space.experiment))
    shardings = programs.plan_layout.shardings.theta.leaves()
    weights = zip(programs.state_specs.theta.leaves(), shardings, strict=True)
    data = set(programs.data_axes)
    split = [set().union(*s.dims) for spec, s in weights if spec.is_matrix]
    if all(data <= axes for axes in split):
        return []
    made = []
    for mode in (WeightUpdateSharding.AUTO, WeightUpdateSharding.OFF):
        if mode is not space.experiment.weight_update_sharding:
            line = f'Experiment.weight_update_sharding = "{mode.value}"'
            made += _with_bindings(space, [line], mode.value)
    return [dataclasses.replace(scored, space=each, configured=False) for each in made]


def _with_bindings(
    space: SearchSpace, lines: Sequence[str], what: str = ""
) -> Iterator[SearchSpace]:
    """The space with more bindings; none, and a warning, if they have no effect."""
    changes = (*space.changes, *lines)
    try:
        experiment = built(space.gin_files, [*space.gin_params, *changes])
    except ValueError as error:
        reason = " ".join(str(error).split())
        log.warning("search: left out: %s: %s", "; ".join(lines), reason)
        return
    changed = f"{space.changed} {what}".strip()
    yield dataclasses.replace(
        space, experiment=experiment, changes=changes, changed=changed
    )


def _without_pipelines(space: SearchSpace) -> Iterator[SearchSpace]:
    """The space with the stacks of its pipelines in their places, if gin can say so."""
    task = space.experiment.task
    config.load(space.gin_files, space.bindings)
    try:
        lines = [_stack_line(task, path) for path in pipelines(task)]
    except (ValueError, AttributeError):  # It is bound in a scope, or in a list.
        log.warning(
            "search: left out: no pipeline, as no single binding puts its stack in its "
            "place"
        )
        return
    plain = map_stacks(
        task, lambda _, stack: stack.stack if isinstance(stack, Pipeline) else stack
    )
    for made in _with_bindings(space, lines):
        if made.experiment.task == plain:
            yield made
        else:
            log.warning(
                "search: left out: no pipeline, as with %s the layers are others",
                "; ".join(lines),
            )


def _stack_line(task: Any, path: str) -> str:
    """The binding that puts a pipeline's stack in the pipeline's place."""
    *parents, field = path.split(".")
    holder = task
    for name in parents:
        holder = holder[int(name)] if name.isdecimal() else getattr(holder, name)
    bound = f"{type(holder).__name__}.{field}"
    *scopes, name = gin.query_parameter(bound).scoped_selector.split("/")
    stack = _in_scopes(scopes, f"{name}.stack").scoped_selector
    if "/" not in stack:  # It is built in the pipeline's scopes.
        stack = "/".join([*scopes, stack])
    return f"{bound} = @{stack}()"


def _in_scopes(scopes: Sequence[str], parameter: str) -> Any:
    """What a parameter is bound to in the innermost of nested scopes that binds it."""
    try:
        return gin.query_parameter("/".join([*scopes, parameter]))
    except ValueError:
        if not scopes:
            raise
        return _in_scopes(scopes[:-1], parameter)
