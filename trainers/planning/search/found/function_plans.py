"""Plans for any function: how its arguments are best split, from Python.

    from meshwright.trainers import search

    found = search(step, [weights, batch], "v3:4x4")
    print(found.text())
    program = compile_program(
        step,
        [weights, batch],
        found.mesh,
        in_shardings=found.in_shardings,
        out_shardings=found.out_shardings,
    )

The dims of arguments are the names. What lies between them is left to propagation, so a
function needs no annotation; those that it has are over a mesh of its own, and refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.out_of_memory import OutOfMemoryError
from meshwright.framework.compiler.hlo.step_time import step_time
from meshwright.framework.compiler.program import Program, compile_program
from meshwright.framework.devices.device_order import device_orders
from meshwright.framework.devices.gpu_topology import GpuTopology
from meshwright.framework.devices.topology import (
    Topology,
    topology,
    topology_devices,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.trainers.planning.search.found.alike import distinct, plainest
from meshwright.trainers.planning.search.found.finding import (
    Finder,
    Found,
    Point,
    Progress,
)
from meshwright.trainers.planning.search.found.named_function import (
    NamedFunction,
    Names,
    names_by_path,
)
from meshwright.trainers.planning.search.found.propagated import AXES, Priced
from meshwright.trainers.startup.messages import told_bar


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionPlan:
    """How a function's arguments are split.

    Args:
      mesh: the device mesh.
      topology: name of the TPU topology that its times are of.
      paths: the path of each leaf of the arguments, as `0.weights.kernel`.
      leaves: the sharding of each leaf; None: left to propagation.
      args: the arguments' nests of `tf.TensorSpec`.
      results: the same for the result.
      results_like: how many of its first leaves are split like those of the arguments.
      priced: what the plan costs, by propagation.
      progress: how many plans were looked at.
      compiled: seconds by the estimate of its compiled program; None if it was not
        compiled.
    """

    mesh: DeviceMesh
    topology: str
    paths: tuple[str, ...]
    leaves: tuple[Sharding | None, ...]
    args: tuple[Any, ...]
    results: Any
    results_like: int
    priced: Priced
    progress: Progress
    compiled: float | None = None

    @property
    def seconds(self) -> float:
        """Estimated time of a call: of the compiled program, else by propagation."""
        return self.priced.seconds if self.compiled is None else self.compiled

    @property
    def in_shardings(self) -> list[Any]:
        """For each argument a nest of shardings, as `compile_program` takes them."""
        return list(tf.nest.pack_sequence_as(self.args, list(self.leaves)))

    @property
    def out_shardings(self) -> Any:
        """A nest of shardings of the result; None: left to completion."""
        rest = len(tf.nest.flatten(self.results)) - self.results_like
        leaves = [*self.leaves[: self.results_like], *[None] * rest]
        return tf.nest.pack_sequence_as(self.results, leaves)

    def text(self) -> str:
        """A line for each leaf that is split."""
        width = max(map(len, self.paths), default=0)
        how = "by propagation" if self.compiled is None else "compiled"
        time = f"{1e3 * self.seconds:.4g} ms on {self.topology}"
        lines = [f"mesh {self.mesh}: {time} {how}"]
        lines += [
            f"  {path:<{width}}  {sharding}"
            for path, sharding in zip(self.paths, self.leaves, strict=True)
            if sharding is not None and any(sharding.dims)
        ]
        return "\n".join(lines)


def search(
    fn: Callable[..., Any],
    args: Sequence[Any],
    topology: str,
    *,
    results_like: int = 0,
    most: int = 300,
    most_axes: int = 2,
    compiled: int = 0,
    names: Names = names_by_path,
) -> FunctionPlan:
    """Looks for the split of a function's arguments that takes least time.

    A bar, or lines on stderr, say how far it is, each minute at least.

    Args:
      fn: a pure function of tensors, such as a step from weights to weights.
      args: for each argument a nest of `tf.TensorSpec`.
      topology: name of a TPU topology, as in `--topology`.
      results_like: so many of the first leaves of the result are split like those of
        the arguments: a step's weights.
      most: plans propagated at most.
      most_axes: mesh axes at most.
      compiled: how many of the fastest are compiled, of which the fastest is taken; 0:
        propagation decides, and libtpu is not needed.
      names: what is split alike; by default leaves of equal shapes whose paths differ
        in numbers alone: layers of a model.

    Raises:
      LoweringError: see `lower`; or the function has annotations of its own.
      ValueError: there are too many dims; results are not like the arguments; the
        topology is of GPUs, or of one device; no plan fits; or the program has manual
        regions.
      ImportError: libtpu is not installed.
    """
    name = getattr(fn, "__name__", "function")
    torus = searchable(name, topology)
    check_counts(name, most=(most, 1), most_axes=(most_axes, 1), compiled=(compiled, 0))
    with told_bar(1, "tracing") as bar:
        named = NamedFunction(fn, tuple(args), results_like, names)
        bar.update()
    finder = Finder([named.step], [1.0], torus, most_axes=most_axes)
    run_finder(finder, most)
    best = finder.best()
    if best is None:
        raise _nothing_fits(name, len(finder.found), topology)
    if not compiled:
        return function_plan(named, finder, plainest(finder, best))
    fastest = distinct(finder, compiled)
    plans = []
    with told_bar(len(fastest), "compiling") as bar:
        for found in fastest:
            plan = function_plan(named, finder, plainest(finder, found))
            plans.append(compiled_plan(fn, plan, torus))
            bar.update()
    fits = [plan for plan in plans if plan is not None]
    if not fits:
        raise _nothing_fits(name, len(plans), topology)
    return min(fits, key=lambda plan: plan.seconds)


def searchable(name: str, on: str) -> Topology:
    """The topology that plans are searched for.

    Args:
      name: of the function or the model, for messages.
      on: the topology's name.

    Raises:
      ValueError: it is none, of GPUs, or of one device.
    """
    torus = topology(on)
    if isinstance(torus, GpuTopology):
        raise ValueError(
            f"{name}: {on!r} are GPUs, and a search compares what steps take on TPUs: "
            "pass a TPU topology, such as 'v5e:2x4'"
        )
    if torus.size == 1:
        raise ValueError(
            f"{name}: TPU topology {on!r} has one device: nothing can be split; pass a "
            "larger one"
        )
    return torus


def check_counts(name: str, **counts: tuple[int, int]) -> None:
    """Raises for a count that is no int, or less than the second of its pair."""
    for option, (count, least) in counts.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{name}: {option} is {count!r}; pass an int")
        if count < least:
            raise ValueError(f"{name}: {option} is {count}; pass {least} or more")


def run_finder(finder: Finder, most: int, starts: Sequence[Point] = ()) -> None:
    """Propagates plans, with a bar of how many."""
    with told_bar(most, "propagating") as bar:
        finder.run(starts, most=most, tell=lambda made: made.show(bar, "ms"))


def _nothing_fits(name: str, count: int, on: str) -> ValueError:
    """That none of the plans fits into memory."""
    return ValueError(
        f"{name}: none of {count} plans fits TPU topology {on!r}: choose a larger "
        "topology"
    )


def function_plan(named: NamedFunction, finder: Finder, found: Found) -> FunctionPlan:
    """A plan that a finder found for a function, not compiled."""
    mesh = DeviceMesh(AXES[: len(found.point.shape)], found.point.shape)
    return FunctionPlan(
        mesh=mesh,
        topology=finder.torus.name,
        paths=named.paths,
        leaves=tuple(named.shardings(mesh, found.point.masks)),
        args=named.args,
        results=named.results,
        results_like=named.results_like,
        priced=found.priced,
        progress=finder.progress,
    )


def compiled_plan(
    fn: Callable[..., Any], plan: FunctionPlan, torus: Topology
) -> FunctionPlan | None:
    """A plan with the estimate of its compiled program, in its best device order.

    None if a device has too little memory for it.

    Raises:
      LoweringError: the program cannot be partitioned.
      ImportError: libtpu is not installed.
    """
    try:
        program = compile_program(
            fn,
            plan.args,
            plan.mesh,
            in_shardings=plan.in_shardings,
            out_shardings=plan.out_shardings,
            devices=topology_devices(torus.name),
        )
    except OutOfMemoryError:
        return None
    mesh, seconds = in_best_order(program, torus)
    leaves = tuple(leaf and Sharding(mesh, leaf.dims) for leaf in plan.leaves)
    return dataclasses.replace(plan, mesh=mesh, leaves=leaves, compiled=seconds)


def in_best_order(program: Program, torus: Topology) -> tuple[DeviceMesh, float]:
    """A program's mesh in the device order that is best for it, and seconds a call."""
    module, mesh = HloModule(program.hlo_text()), program.mesh
    orders = device_orders(mesh.shape, torus)
    times = [step_time(module, mesh, order).seconds for order in orders]
    seconds = min(times)
    best = times.index(seconds)
    if best:  # The first is the trainer's, for which a mesh needs no numbers.
        ids = tuple(map(int, orders[best].ids.flat))
        mesh = dataclasses.replace(mesh, device_ids=ids)
    return mesh, seconds
