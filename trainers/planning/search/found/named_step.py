"""The train step of an experiment with the names of its dims in place of mesh axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from meshwright.framework.compiler.lowering.errors import LoweringError
from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.compiler.passes import simplify
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.stablehlo.rewrites.workarounds import (
    Stage,
    work_around,
)
from meshwright.framework.compiler.stablehlo.shardy.named_module import (
    NamedDims,
    NamedModule,
    OnePlanError,
)
from meshwright.framework.compiler.stablehlo.shardy.named_products import (
    NamedProduct,
    named_products,
)
from meshwright.framework.modeling.layer import STACK_DIM, WeightSpec
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.plan import SequenceAttention
from meshwright.framework.sharding.sharding import Sharding
from meshwright.layers.stacks.repeat import Unroll
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.stacks import pipelines, repeats
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.search.search_memory import saved_tensors
from meshwright.trainers.planning.search.search_space import dims_of

# Shardy counts the devices of a mesh of names in 64 bits.
_MOST_NAMES = 60

WEIGHTS, ACTIVATIONS = "weights", "activations"


@dataclasses.dataclass(frozen=True, order=True)
class DimName:
    """A name of a dim, in one of a plan's tables.

    Args:
      table: `WEIGHTS` or `ACTIVATIONS`.
      dim: the name.
    """

    table: str
    dim: str

    def __str__(self) -> str:
        return f"{self.table}[{self.dim!r}]"


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes that are in memory together with all others of a list.

    Args:
      bytes: of the full tensors.
      dims: the names that split them; None for what may be split over all devices.
    """

    bytes: float
    dims: NamedDims | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedStep:
    """A step, for all plans.

    Args:
      names: the names of its dims; the axes of `module` are n0, n1, ... for them.
      sizes: for each name the sizes of the dims that have it.
      module: the program.
      products: its products.
      held: what must be in memory while gradients are computed.
    """

    names: tuple[DimName, ...]
    sizes: Mapping[str, frozenset[int]]
    module: NamedModule
    products: tuple[NamedProduct, ...]
    held: tuple[Held, ...]


def names_of(experiment: Experiment) -> tuple[DimName, ...]:
    """The names that a plan may split.

    Loops read one layer at a time, so the dim of all layers is not split; nor is one of
    which a tensor has several, such as a kernel's windows.
    """
    weights, activations = dims_of(experiment)
    for spec in experiment.task.weights().leaves():
        weights -= {dim for dim in spec.dims if spec.dims.count(dim) > 1}
    # Without an entry of its own the stream is split like the sequence.
    between = {"stream"} if "sequence" in activations else set()
    return (
        *(DimName(WEIGHTS, dim) for dim in sorted(weights - {STACK_DIM})),
        *(DimName(ACTIVATIONS, dim) for dim in sorted(activations | between)),
    )


def check_count(count: int) -> None:
    """Checks that so many names can be searched.

    Raises:
      OnePlanError: there are none, or more than Shardy can have axes for.
    """
    if not 0 < count <= _MOST_NAMES:
        raise OnePlanError(
            f"there are {count} dims of different names, and 1 to {_MOST_NAMES} can be "
            "searched: give dims that are split alike the same name, or stack layers"
        )


def named_step(experiment: Experiment, names: Sequence[DimName]) -> NamedStep:
    """Traces the step of an experiment once, whatever its plan.

    Raises:
      OnePlanError: the step has pipelines, whose stages and microbatches must fit their
        axes; manual regions; too many names; or annotations that fit no mesh of names.
    """
    check_count(len(names))
    if stacks := pipelines(experiment.task):
        raise OnePlanError(
            f"the step has a pipeline, {next(iter(stacks))!r}, whose stages must fit "
            "their axis"
        )
    try:
        return _traced(experiment, names)
    except LoweringError as error:
        raise OnePlanError(f"cannot be traced for all plans: {error}") from error


def _traced(experiment: Experiment, names: Sequence[DimName]) -> NamedStep:
    axes = {name: f"n{i}" for i, name in enumerate(names)}
    tables = {
        table: {name.dim: axis for name, axis in axes.items() if name.table == table}
        for table in (WEIGHTS, ACTIVATIONS)
    }
    plan = dataclasses.replace(
        experiment.plan,
        mesh_axes=tuple(axes.values()),
        mesh_shape=(2,) * len(axes),
        device_ids=None,
        unreduced_gradient_axes=(),
        sequence_attention=SequenceAttention.GATHER,
        **tables,
    )
    programs = StepPrograms(dataclasses.replace(experiment, plan=plan))
    lowered = lower(
        lambda state, batches: dict(programs.train_loop(state, batches)),
        [programs.abstract_state(), programs.abstract_batches()],
        name="train",
    )
    module = Module(lowered, plan.mesh)
    with module.opened():
        simplify(module)
        work_around(Stage.SPLITTABLE, module.write())
        work_around(Stage.COMPUTED_ONCE, module.write())
    state = [spec.sharding(plan) for spec in programs.state_specs.leaves()]
    batches = [_stacked(one) for one in programs.batch_shardings().leaves()]
    results = len(lowered.signature.outputs["metrics"].leaves())
    yields = {
        axes[DimName(ACTIVATIONS, "batch")]: axes[DimName(ACTIVATIONS, "experts")]
        for both in [{DimName(ACTIVATIONS, "batch"), DimName(ACTIVATIONS, "experts")}]
        if both <= set(axes)
    }
    named = NamedModule(
        module, [*state, *batches], [*[None] * results, *state], yields=yields
    )
    with named.opened():
        products = tuple(named_products(named.named()))
    return NamedStep(
        names=tuple(names),
        sizes=sizes_of(named),
        module=named,
        products=products,
        held=tuple(_held(programs)),
    )


def _stacked(sharding: Sharding) -> Sharding:
    return Sharding(sharding.mesh, ((), *sharding.dims))


def sizes_of(module: NamedModule) -> dict[str, frozenset[int]]:
    sizes: dict[str, set[int]] = {}
    for tensor in module.tensors:
        for names, size in zip(tensor.dims, tensor.shape, strict=True):
            for name in names:
                sizes.setdefault(name, set()).add(size)
    return {name: frozenset(found) for name, found in sizes.items()}


def _held(programs: StepPrograms) -> list[Held]:
    """State, gradients of repeated layers, and what those save; equal dims are one."""
    experiment = programs.experiment
    plan, specs = experiment.plan, programs.state_specs
    weights = list(specs.leaves())
    if all(stack.unroll is Unroll.LOOP for stack in repeats(experiment.task)):
        weights += [spec for spec in specs.theta.leaves() if spec.stack_rank]
    by_dims: dict[NamedDims | None, float] = {}

    def hold(dims: NamedDims | None, size: float) -> None:
        by_dims[dims] = by_dims.get(dims, 0.0) + size

    for spec in weights:
        hold(tuple(sorted(filter(None, spec.sharding(plan).dims))), _bytes(spec))
    for saved in saved_tensors(experiment) if repeats(experiment.task) else []:
        stack, spec = saved.stack, saved.stack.tensor.spec
        size = spec.dtype.size * stack.count * stack.stages
        size *= spec.shape.num_elements()
        dims = None
        if saved.sharding is not None and not saved.sharding.unspecified:
            split = (*saved.sharding.dims, stack.stage_axes)
            dims = tuple(sorted(filter(None, split)))
        hold(dims, size)
    return [Held(size, dims) for dims, size in by_dims.items()]


def _bytes(spec: WeightSpec) -> int:
    return spec.size * spec.dtype.size


def axes_by_name(
    mesh: DeviceMesh, step: NamedStep, masks: Sequence[int]
) -> dict[str, tuple[str, ...]]:
    """For each name of a step the axes of its mask: bit i is the mesh's axis i."""
    return {
        f"n{number}": tuple(
            axis for i, axis in enumerate(mesh.axis_names) if mask >> i & 1
        )
        for number, mask in enumerate(masks)
    }
