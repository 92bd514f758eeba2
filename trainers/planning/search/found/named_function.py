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
from meshwright.framework.compiler.stablehlo.stable_hlo import is_annotation, walk
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


Names = Callable[[str, tf.TensorSpec], Sequence[str | None] | None]
"""Of a leaf by its path: for each dim its name, or None if nothing is to split it; None
for a leaf that is left to propagation. Dims of one name are split alike."""


def names_by_path(path: str, spec: tf.TensorSpec) -> list[str]:
    """The same for leaves of equal shapes whose paths differ in numbers alone."""
    shape = "x".join(map(str, spec.shape))
    return [f"{_NUMBER.sub('', path)} {shape}:{dim}" for dim in range(spec.shape.rank)]


def _refuse_annotations(module: Module) -> None:
    for op in walk(module.operation):
        if is_annotation(op):
            raise module.blame.error(
                op,
                "is annotated, and a search has meshes of its own: leave annotations "
                "out of what it searches, and put them back afterwards",
            )


class NamedFunction:
    """A function's program, with a name for each dim of its arguments.

    Args:
      fn: a pure function of tensors.
      args: for each argument a nest of `tf.TensorSpec`.
      results_like: how many leaves of the result are split like the arguments'.
      names: the names.

    Attributes:
      paths: the path of each leaf of the arguments.
      results: a nest of the results' specs.
      step: the program, as a step that a `Finder` takes.

    Raises:
      LoweringError, ValueError: see `function_plans.search`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        results_like: int,
        names: Names = names_by_path,
    ):
        self.args, self.results_like = args, results_like
        leaves = list(leaves_of(args))
        self.paths = tuple(path for path, _ in leaves)
        specs = [spec for _, spec in leaves]
        given = [names(path, spec) for path, spec in leaves]
        known = dict.fromkeys(name for dims in given for name in dims or () if name)
        check_count(len(known))
        numbers = {name: number for number, name in enumerate(known)}
        self._numbers = [
            None if dims is None else [numbers.get(name) for name in dims]
            for dims in given
        ]
        axes = [f"n{number}" for number in range(len(known))]
        mesh = DeviceMesh(tuple(axes), (2,) * len(axes))
        split = list(self._shardings(mesh, [(axis,) for axis in axes]))
        lowered = lower(fn, args)
        self.results = lowered.signature.outputs
        results = len(tf.nest.flatten(self.results))
        _check_alike(specs, tf.nest.flatten(self.results), results_like)
        module = Module(lowered, mesh)
        with module.opened():
            _refuse_annotations(module)
            simplify(module)
        program = NamedModule(
            module, split, [*split[:results_like], *[None] * (results - results_like)]
        )
        with program.opened():
            products = tuple(named_products(program.named()))
        self.step = NamedStep(
            names=tuple(DimName("arguments", name) for name in known),
            sizes=sizes_of(program),
            module=program,
            products=products,
            held=tuple(
                Held(
                    spec.shape.num_elements() * spec.dtype.size,
                    sharding and tuple(filter(None, sharding.dims)),
                )
                for spec, sharding in zip(specs, split, strict=True)
            ),
        )

    def shardings(
        self, mesh: DeviceMesh, masks: Sequence[int]
    ) -> Iterator[Sharding | None]:
        """The sharding of each leaf by a plan; None: left to propagation."""
        axes = [
            tuple(axis for i, axis in enumerate(mesh.axis_names) if mask >> i & 1)
            for mask in masks
        ]
        return self._shardings(mesh, axes)

    def masks(
        self, axes: Sequence[str], shardings: Sequence[Sharding | None]
    ) -> tuple[int, ...] | None:
        """The plan that has such leaves; None if one name is split in two ways.

        Args:
          axes: the mesh axes in the order of the masks' bits.
          shardings: of each leaf; None: left to propagation.
        """
        masks: dict[int, int] = {}
        for numbers, sharding in zip(self._numbers, shardings, strict=True):
            if numbers is None or sharding is None:
                continue
            for number, split in zip(numbers, sharding.dims, strict=True):
                mask = sum(1 << axes.index(axis) for axis in split)
                if number is not None and masks.setdefault(number, mask) != mask:
                    return None
        return tuple(masks.get(number, 0) for number in range(len(self.step.names)))

    def _shardings(
        self, mesh: DeviceMesh, axes: Sequence[tuple[str, ...]]
    ) -> Iterator[Sharding | None]:
        for numbers in self._numbers:
            if numbers is None:
                yield None
            else:
                dims = tuple(() if n is None else axes[n] for n in numbers)
                yield Sharding(mesh, dims)


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
