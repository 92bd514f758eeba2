"""Plans for any function: how its arguments are best split, from Python.

    from meshwright.trainers.planning.search.found.function_plans import search

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
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from meshwright.framework.compiler.lowering.errors import leaves_of
from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.compiler.passes import simplify
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.stablehlo.shardy.named_module import NamedModule
from meshwright.framework.compiler.stablehlo.shardy.named_products import (
    named_products,
)
from meshwright.framework.devices.topology import topology
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.trainers.planning.search.found.finding import (
    Finder,
    Progress,
    plainest,
)
from meshwright.trainers.planning.search.found.named_step import (
    DimName,
    Held,
    NamedStep,
    check_count,
    sizes_of,
)
from meshwright.trainers.planning.search.found.propagated import AXES, Priced

_NUMBER = re.compile(r"_?\d+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionPlan:
    """How a function's arguments are split.

    Args:
      mesh: the device mesh.
      paths: the path of each leaf of the arguments, as `0.weights.kernel`.
      leaves: the sharding of each leaf.
      args: the arguments' nests of `tf.TensorSpec`.
      results: the same for the result.
      results_like: how many of its first leaves are split like those of the arguments.
      priced: what the plan costs, by propagation.
      progress: how many plans were looked at.
    """

    mesh: DeviceMesh
    paths: tuple[str, ...]
    leaves: tuple[Sharding, ...]
    args: tuple[Any, ...]
    results: Any
    results_like: int
    priced: Priced
    progress: Progress

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
        lines = [f"mesh {self.mesh}: {1e3 * self.priced.seconds:.4g} ms by propagation"]
        lines += [
            f"  {path:<{width}}  {sharding}"
            for path, sharding in zip(self.paths, self.leaves, strict=True)
            if any(sharding.dims)
        ]
        return "\n".join(lines)


def search(
    fn: Callable[..., Any],
    args: Sequence[Any],
    on: str,
    *,
    results_like: int = 0,
    most: int = 300,
    most_axes: int = 2,
) -> FunctionPlan:
    """Looks for the split of a function's arguments that takes least time.

    Leaves whose paths differ in numbers alone, and whose shapes are equal, are split
    alike: layers of a model.

    Args:
      fn: a pure function of tensors, such as a step from weights to weights.
      args: for each argument a nest of `tf.TensorSpec`.
      on: name of a TPU topology, as in `--topology`.
      results_like: so many of the first leaves of the result are split like those of
        the arguments: a step's weights.
      most: plans propagated at most.
      most_axes: mesh axes at most.

    Raises:
      LoweringError: see `lower`; or the function has annotations of its own.
      ValueError: there are too many dims; results are not like the arguments; there is
        one device; no plan fits; or the program has manual regions.
    """
    args, torus = tuple(args), topology(on)
    if torus.size == 1:
        raise ValueError(f"TPU topology {on!r} has one device: nothing can be split")
    named = _Named(fn, args, results_like)
    finder = Finder([named.step], [1.0], torus, most_axes=most_axes)
    finder.run([], most=most)
    best = finder.best()
    if best is None:
        name = getattr(fn, "__name__", "function")
        raise ValueError(
            f"{name}: none of {len(finder.found)} plans fits TPU topology {on!r}: "
            "choose a larger topology"
        )
    best = plainest(finder, best)
    mesh = DeviceMesh(AXES[: len(best.point.shape)], best.point.shape)
    return FunctionPlan(
        mesh=mesh,
        paths=named.paths,
        leaves=tuple(named.shardings(mesh, best.point.masks)),
        args=args,
        results=named.results,
        results_like=results_like,
        priced=best.priced,
        progress=finder.progress,
    )


class _Named:
    """A function's program, with a name for each dim of its arguments."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], results_like: int
    ):
        leaves = list(leaves_of(args))
        self.paths = tuple(path for path, _ in leaves)
        specs = [spec for _, spec in leaves]
        numbers: dict[tuple, int] = {}
        self.dims: list[list[int]] = []
        for path, spec in leaves:
            like = _NUMBER.sub("", path), tuple(spec.shape)
            keys = [(*like, dim) for dim in range(spec.shape.rank)]
            self.dims.append([numbers.setdefault(key, len(numbers)) for key in keys])
        check_count(len(numbers))
        names = [f"n{number}" for number in range(len(numbers))]
        mesh = DeviceMesh(tuple(names), (2,) * len(names))
        lowered = lower(fn, args)
        self.results = lowered.signature.outputs
        _check_alike(specs, tf.nest.flatten(self.results), results_like)
        module = Module(lowered, mesh)
        with module.opened():
            simplify(module)
        dims_of = [tuple((names[number],) for number in dims) for dims in self.dims]
        split = [Sharding(mesh, dims) for dims in dims_of]
        results = len(tf.nest.flatten(self.results))
        program = NamedModule(
            module, split, [*split[:results_like], *[None] * (results - results_like)]
        )
        with program.opened():
            products = tuple(named_products(program.named()))
        self.step = NamedStep(
            names=tuple(DimName("arguments", f"{path}:{d}") for path, _, d in numbers),
            sizes=sizes_of(program),
            module=program,
            products=products,
            held=tuple(
                Held(spec.shape.num_elements() * spec.dtype.size, dims)
                for spec, dims in zip(specs, dims_of, strict=True)
            ),
        )

    def shardings(self, mesh: DeviceMesh, masks: Sequence[int]):
        """The sharding of each leaf by a plan."""
        for dims in self.dims:
            yield Sharding(
                mesh,
                tuple(
                    tuple(a for i, a in enumerate(mesh.axis_names) if masks[n] >> i & 1)
                    for n in dims
                ),
            )


def _check_alike(args: Sequence, results: Sequence, count: int) -> None:
    """Checks that the first results are like the first arguments."""
    if not 0 <= count <= min(len(args), len(results)):
        raise ValueError(
            f"results_like is {count}, but there are {len(args)} leaves of the "
            f"arguments and {len(results)} of the result"
        )
    for number in range(count):
        arg, result = args[number], results[number]
        if arg.shape != result.shape:
            raise ValueError(
                f"results_like is {count}, but leaf {number} of the result has shape "
                f"{result.shape}, and that of the arguments {arg.shape}"
            )
