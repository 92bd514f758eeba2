"""The candidates of a search: mesh shapes, plans, recomputation, (micro)batches.

A candidate is a few gin bindings over the user's files, so that the best can be
written as a gin file.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gin

from meshwright.framework.devices.device_order import device_order
from meshwright.framework.devices.topology import Topology
from meshwright.framework.modeling.layer import STAGE_DIM
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan, as_axes
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.trainers.experiment import config
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.stacks import Stack, map_stacks, pipelines, repeats
from meshwright.trainers.experiment.step_programs import StepPrograms

_INCLUDED = re.compile(r"""^include\s+['"]([^'"]+)['"]""", re.MULTILINE)
_CLASS = re.compile(r"^(?:[\w.]+[/.])*(\w+)\.\w+\s*=", re.MULTILINE)
# The bindings of a candidate, for all that is built of these classes.
_BOUND = re.compile(
    r"^((?:[\w.]+/)+)((?:\w+\.)*(?:"
    r"ShardingPlan\.(?:mesh_shape|mesh_axes|weights|activations|device_ids)|"
    r"Repeat\.(?:recompute|saved_names)|"
    r"Pipeline\.num_microbatches|Experiment\.global_batch))\s*=",
    re.MULTILINE,
)
AS_CONFIGURED = "as given"
"""The name of a plan that the user's files spell out; with "off" it fits a column."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedPlan:
    """A sharding plan on no particular mesh.

    Args:
      name: of its gin file, without folder and suffix.
      gin_file: the gin file to include; None for the plan of the user's files, which
        is named `AS_CONFIGURED`, and for plans that a search found.
      tables: the plan.
    """

    name: str
    gin_file: str | None
    tables: ShardingPlan

    @property
    def is_found(self) -> bool:
        """Whether it is in no file."""
        return self.gin_file is None and self.name != AS_CONFIGURED

    def on(self, mesh: Sequence[int]) -> ShardingPlan:
        """The plan on a mesh of this shape, devices in the trainer's order."""
        return dataclasses.replace(self.tables, mesh_shape=mesh, device_ids=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """The recomputation of an experiment's stacks; fields as of `Repeat`.

    A pipeline has the policy of its layers.
    """

    recompute: Recompute
    saved_names: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.recompute is Recompute.ALL_BUT_NAMED:
            return f"all but {len(self.saved_names)}"
        return self.recompute.value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A choice of mesh, plan, policy, batch and microbatches.

    Args:
      mesh: devices along each of the plan's axes.
      plan: the sharding plan.
      policy: what is recomputed; None where nothing is repeated.
      batch: examples a step.
      microbatches: into how many each pipeline divides them; None without pipelines.
    """

    mesh: tuple[int, ...]
    plan: NamedPlan
    policy: Policy | None
    batch: int
    microbatches: int | None = None

    def bindings(self) -> tuple[str, ...]:
        """Lines of gin, to be read after the user's files and bindings."""
        lines = []
        if self.plan.gin_file is not None:
            lines.append(f"include '{self.plan.gin_file}'")
        elif self.plan.is_found:
            lines += _table_lines(self.plan.tables)
        lines.append(f"ShardingPlan.mesh_shape = {self.mesh}")
        if self.plan.tables.device_ids is not None:
            lines.append("ShardingPlan.device_ids = None")
        if self.policy is not None:
            name = self.policy.recompute.name
            lines.append(f"Repeat.recompute = %Recompute.{name}")
            lines.append(f"Repeat.saved_names = {self.policy.saved_names}")
        if self.microbatches is not None:
            lines.append(f"Pipeline.num_microbatches = {self.microbatches}")
        lines.append(f"Experiment.global_batch = {self.batch}")
        return tuple(lines)

    def of(self, experiment: Experiment) -> Experiment:
        """The user's experiment with this plan, policy, batch and microbatches."""

        def changed(_: str, stack: Stack) -> Stack:
            if isinstance(stack, Pipeline):
                layers = changed("", stack.stack)
                return dataclasses.replace(
                    stack, stack=layers, num_microbatches=self.microbatches
                )
            return dataclasses.replace(stack, **vars(self.policy))

        return dataclasses.replace(
            experiment,
            plan=self.plan.on(self.mesh),
            global_batch=self.batch,
            task=map_stacks(experiment.task, changed),
        )

    def __str__(self) -> str:
        shape = "x".join(map(str, self.mesh))
        micro = "" if self.microbatches is None else f" in {self.microbatches}"
        return f"{shape} {self.plan.name}, recompute {self.policy}, {self.batch}{micro}"


def _table_lines(plan: ShardingPlan) -> list[str]:
    """Bindings of a plan that is in no file."""
    lines = [f"ShardingPlan.mesh_axes = {plan.mesh_axes}"]
    for name in ("weights", "activations"):
        entries = [
            f"{dim!r}: {(axes[0] if len(axes) == 1 else tuple(axes) or None)!r}"
            for dim, axes in getattr(plan, name).items()
        ]
        text = textwrap.fill(", ".join(entries), 76)
        lines.append(
            f"ShardingPlan.{name} = {{\n{textwrap.indent(text, ' ' * 4)}}}"
            if entries
            else f"ShardingPlan.{name} = {{}}"
        )
    lines.append("ShardingPlan.unreduced_gradient_axes = ()")
    lines.append("ShardingPlan.sequence_attention = %SequenceAttention.GATHER")
    return lines


def built(gin_files: Sequence[str], gin_params: Sequence[str]) -> Experiment:
    """The experiment of these files and bindings, which must all take effect."""
    return config.load_and_build(Experiment, gin_files, gin_params)[0]


def check_unscoped(gin_files: Sequence[str], gin_params: Sequence[str]) -> None:
    """Checks that no binding of the user's files overrides those of candidates.

    Raises:
      ValueError: a scope has a binding of what a search chooses; the message names it.
    """
    config.load(gin_files, gin_params)
    bound = _BOUND.search(gin.config_str())
    if bound:
        scope, name = bound.groups()
        raise ValueError(
            f"--search chooses {name} for all that is built of its class, but "
            f"{scope}{name} is bound for a scope, and would stay: bind it without "
            f"{scope!r}, or leave it to the search"
        )


def candidates(
    experiment: Experiment,
    plans: Sequence[NamedPlan],
    *,
    devices: int,
    batches: Sequence[int],
    microbatches: Sequence[int] = (),
    more_names: Sequence[str] = (),
) -> Iterator[Candidate]:
    """Every choice of mesh shape, plan, policy, batch and microbatches."""
    divided = [
        (batch, count)
        for batch in batches
        for count in microbatch_counts(experiment, batch, microbatches)
    ]
    for plan in plans:
        axes = len(plan.tables.mesh_axes)
        for mesh, policy, (batch, count) in itertools.product(
            factorizations(devices, axes), policies(experiment, more_names), divided
        ):
            yield Candidate(
                mesh=mesh, plan=plan, policy=policy, batch=batch, microbatches=count
            )


def microbatch_counts(
    experiment: Experiment, batch: int, wanted: Sequence[int] = ()
) -> list[int | None]:
    """The numbers of microbatches into which pipelines might divide a batch.

    They are the wanted counts; else the configured ones, and powers of two that divide
    the batch: from one microbatch a stage, with half bubbles, to 16, with 6% bubbles.
    """
    divided = pipelines(experiment.task).values()
    if not divided:
        return [None]
    if wanted:
        return list(wanted)
    stages = max(pipeline.num_stages for pipeline in divided)
    powers = (2**n for n in range(batch.bit_length()))
    counts = {n for n in powers if stages <= n <= 16 * stages and batch % n == 0}
    return sorted(counts | {pipeline.num_microbatches for pipeline in divided})


def factorizations(number: int, count: int) -> list[tuple[int, ...]]:
    """All tuples of `count` positive integers with this product."""
    if count == 0:
        return [()] if number == 1 else []
    return [
        (first, *rest)
        for first in range(1, number + 1)
        if number % first == 0
        for rest in factorizations(number // first, count - 1)
    ]


def policies(
    experiment: Experiment, more_names: Sequence[str] = ()
) -> list[Policy | None]:
    """The policies that the experiment's stacks might have: all, nothing, all but some.

    The last of the names that they save are given up first, so the subsets tried are
    those that leave off the last third, and the last two thirds. Those that save more
    save all of `more_names` too, or the first half.
    """
    stacks = repeats(experiment.task)
    if not stacks:
        return [None]
    choices = [
        Policy(recompute=Recompute.EVERYTHING),
        Policy(recompute=Recompute.NOTHING),
    ]
    names = max((tuple(stack.saved_names) for stack in stacks), key=len)
    kept = [names[: math.ceil(len(names) * thirds / 3)] for thirds in (3, 2, 1)]
    more = tuple(name for name in more_names if name not in names)
    if names and more:
        kept += [(*names, *more[: math.ceil(len(more) / 2)]), (*names, *more)]
    for saved in filter(None, kept):
        policy = Policy(recompute=Recompute.ALL_BUT_NAMED, saved_names=saved)
        if policy not in choices:
            choices.append(policy)
    return choices


def more_names(experiment: Experiment) -> tuple[str, ...]:
    """The names that its only stack gives and does not save; traces the task once.

    None of several stacks, whose names may differ.
    """
    stacks = repeats(experiment.task)
    if len(stacks) != 1 or not stacks[0].saved_names:
        return ()
    given = StepPrograms(experiment).names_given()
    return tuple(name for name in given if name not in stacks[0].saved_names)


def named_plans(
    experiment: Experiment,
    gin_files: Sequence[str],
    gin_params: Sequence[str],
    wanted: Sequence[str] = (),
) -> list[NamedPlan]:
    """The plans to choose from.

    Args:
      experiment: the experiment of the user's files; its plan is among the result.
      gin_files: the user's files.
      gin_params: the user's bindings.
      wanted: gin files of plans; empty for those under `params/plans` that have the
        experiment's mesh axes.

    Raises:
      ConfigError: a plan's file does not exist, or does not fit the user's files.
    """
    configured = experiment.plan
    shipped = sorted((config.PARAMS / "plans").glob("*.gin"))
    plans = []
    for file in wanted or [f"plans/{path.name}" for path in shipped]:
        gin_file = portable(file)
        mesh = f"ShardingPlan.mesh_shape = {tuple(configured.mesh_shape)}"
        lines = [*gin_params, f"include '{gin_file}'", mesh]
        if wanted and not _binds_plan(file):
            raise config.ConfigError(
                f"--search_plans: {file} binds nothing of ShardingPlan: name a plan, "
                "such as plans/finalized.gin"
            )
        tables = built(gin_files, lines).plan
        if wanted or tuple(tables.mesh_axes) == tuple(configured.mesh_axes):
            name = pathlib.PurePath(file).stem
            plans.append(NamedPlan(name=name, gin_file=gin_file, tables=tables))
    if not wanted and not any(_same(plan.tables, configured) for plan in plans):
        plans.insert(0, NamedPlan(name=AS_CONFIGURED, gin_file=None, tables=configured))
    return plans


def _binds_plan(file: str, included_by: str | None = None) -> bool:
    """Whether a gin file binds a plan, itself or, if it binds nothing, by inclusion."""
    path = config.find_gin_file(file, included_by)
    text = path.read_text()
    classes = _CLASS.findall(text)
    included = [] if classes else _INCLUDED.findall(text)
    return "ShardingPlan" in classes or any(
        _binds_plan(each, str(path)) for each in included
    )


def portable(file: str) -> str:
    """The name by which any gin file can include a gin file.

    Raises:
      ConfigError: the file does not exist.
    """
    path = config.find_gin_file(file).resolve()
    if path.is_relative_to(config.PARAMS.resolve()):
        return path.relative_to(config.PARAMS.resolve()).as_posix()
    return str(path)


def misfit(experiment: Experiment, candidate: Candidate, torus: Topology) -> str | None:
    """Why a candidate need not be compiled, by its shapes alone; None if it may do.

    Args:
      experiment: the experiment of the user's files.
      candidate: the candidate.
      torus: the topology.
    """
    try:
        device_order(candidate.mesh, torus)
    except ValueError:
        return "mesh cannot be laid onto the topology"
    sizes = _dim_sizes(experiment, candidate.batch)
    plan = candidate.plan.on(candidate.mesh)
    for dim in sorted({*plan.weights, *plan.activations} & set(sizes)):
        for sharding_of in (plan.weight_sharding, plan.activation_sharding):
            (shards,) = sharding_of([dim]).splits()
            if shards > sizes[dim]:
                return f"more shards than there are {dim!r}"
    (shards,) = plan.activation_sharding(["batch"]).splits()
    if candidate.batch % shards:
        return "shards of unequal batches"
    for pipeline in pipelines(experiment.task).values():
        if reason := _misfit_of_pipeline(pipeline, candidate, plan):
            return reason
    return None


def _misfit_of_pipeline(
    pipeline: Pipeline, candidate: Candidate, plan: ShardingPlan
) -> str | None:
    stages = plan.weight_sharding([STAGE_DIM])
    if pipeline.num_stages % stages.splits()[0]:
        return "stages that their mesh axis does not divide"
    if candidate.batch % candidate.microbatches:
        return "microbatches that do not divide the batch"
    rows = candidate.batch // candidate.microbatches
    inside = plan.inside_pipeline(stages.dims[0])
    if rows % inside.activation_sharding(["batch"]).splits()[0]:
        return "shards of unequal microbatches"
    return None


def configured(experiment: Experiment) -> Candidate:
    """The experiment as it is; of several stacks with the first one's recomputation."""
    counts = [p.num_microbatches for p in pipelines(experiment.task).values()]
    policy = None
    if stacks := repeats(experiment.task):
        saved = tuple(stacks[0].saved_names)
        policy = Policy(recompute=stacks[0].recompute, saved_names=saved)
    plan = experiment.plan
    return Candidate(
        mesh=tuple(plan.mesh_shape),
        plan=NamedPlan(name=AS_CONFIGURED, gin_file=None, tables=plan),
        policy=policy,
        batch=experiment.global_batch,
        microbatches=counts[0] if counts else None,
    )


def is_configured(experiment: Experiment, candidate: Candidate) -> bool:
    """Whether a candidate is the user's configuration."""
    stacks = repeats(experiment.task)
    policy = candidate.policy
    return (
        _same(candidate.plan.tables, experiment.plan)
        and tuple(experiment.plan.mesh_shape) == candidate.mesh
        and experiment.global_batch == candidate.batch
        and all(
            stack.recompute is policy.recompute
            and tuple(stack.saved_names) == policy.saved_names
            for stack in stacks
        )
        and all(
            pipeline.num_microbatches == candidate.microbatches
            for pipeline in pipelines(experiment.task).values()
        )
    )


def _dim_sizes(experiment: Experiment, batch: int) -> dict[str, int]:
    """The largest size of each dim that weights or batches have, by logical name."""
    task = experiment.task
    pairs = [(spec.dims, spec.shape) for spec in task.weights().leaves()]
    specs, names = NestedMap(task.batch_spec(batch)), NestedMap(task.batch_dims())
    pairs += [
        (names.get_path(path), tuple(spec.shape))
        for path, spec in specs.items_by_path()
    ]
    sizes: dict[str, int] = {}
    for dims, shape in pairs:
        for dim, size in zip(dims, shape, strict=True):
            sizes[dim] = max(size, sizes.get(dim, 0))
    return sizes


def dims_of(experiment: Experiment) -> tuple[set[str], set[str]]:
    """The names of the weights' dims, and the activations'; traces the task once."""
    plan = experiment.plan
    unsplit = dataclasses.replace(
        plan, mesh_shape=(1,) * len(plan.mesh_axes), device_ids=None
    )
    programs = StepPrograms(dataclasses.replace(experiment, plan=unsplit))
    weights = {dim for spec in programs.state_specs.leaves() for dim in spec.dims}
    # This dim stands for the batch within a pipeline.
    inside = {"microbatch"} if pipelines(experiment.task) else set()
    return weights, set(programs.noted_dims().noted) | inside


def essence(candidate: Candidate, dims: tuple[set[str], set[str]]) -> tuple:
    """A key that is equal for candidates whose programs are equal.

    Neither axes of one device nor splits of dims that the model lacks do anything.

    Args:
      candidate: the candidate.
      dims: the dims of the model, see `dims_of`.
    """
    plan = candidate.plan.on(candidate.mesh)
    sizes = dict(zip(plan.mesh_axes, plan.mesh_shape, strict=True))
    tables = []
    for table, known in zip((plan.weights, plan.activations), dims, strict=True):
        split = {
            dim: tuple(a for a in as_axes(axes) if sizes[a] > 1)
            for dim, axes in table.items()
            if dim in known
        }
        tables.append(frozenset(item for item in split.items() if item[1]))
    rest = (candidate.policy, candidate.batch, candidate.microbatches)
    return candidate.mesh, *tables, *rest


def _same(a: ShardingPlan, b: ShardingPlan) -> bool:
    """Whether two plans differ in nothing but their mesh's shape."""
    fields = ("mesh_axes", "weights", "activations")
    return all(
        _frozen(getattr(a, name)) == _frozen(getattr(b, name)) for name in fields
    )


def _frozen(value: Any) -> Any:
    """The value, with tuples where there may be lists."""
    if isinstance(value, Mapping):
        return {key: _frozen(each) for key, each in value.items()}
    return tuple(value) if isinstance(value, (list, tuple)) else value
