"""A function's program with a name for each dim of its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
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
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.trainers.planning.search.found.named_step import (
    DimName,
    Held,
    NamedStep,
    check_count,
    sizes_of,
)

_NUMBER = re.compile(r"_?\d+")


class NamedFunction:
    """A function's program, with a name for each dim of its arguments.

    Leaves whose paths differ in numbers alone, and whose shapes are equal, have the
    same names.

    Args:
      fn: a pure function of tensors.
      args: for each argument a nest of `tf.TensorSpec`.
      results_like: how many leaves of the result have the names of the arguments'.

    Attributes:
      paths: the path of each leaf of the arguments.
      results: a nest of the results' specs.
      step: the program, as a step that a `Finder` takes.

    Raises:
      LoweringError, ValueError: see `function_plans.search`.
    """

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], results_like: int
    ):
        self.args, self.results_like = args, results_like
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

    def shardings(self, mesh: DeviceMesh, masks: Sequence[int]) -> Iterator[Sharding]:
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
