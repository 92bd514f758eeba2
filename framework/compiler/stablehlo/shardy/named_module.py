"""A program whose annotations name dims in place of mesh axes, for many plans.

It is traced once, over a mesh that has an axis of two devices for each name of a dim.
To complete it for a plan, the axes that the plan gives each name are written in place
of the name, into a copy; Shardy's propagation and its pass for explicit collectives
then take some hundredths of a second.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from jax.extend.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from meshwright.framework.compiler.stablehlo.constraints import SHARDING_ATTRIBUTE
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.stablehlo.stable_hlo import shape_of, walk
from meshwright.framework.compiler.stablehlo.written import write_borders, write_for
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

# XLA inlines calls first, as in `Propagated`. The rest are the passes of propagation,
# and those that make of what it leaves open collectives that Shardy has ops for.
_PASSES = (
    "builtin.module(inline,symbol-dce,sdy-import-pipeline,sdy-user-priority-propagate,"
    "func.func(sdy-sink-data-flow-edges,sdy-sharding-constraint-to-reshard),"
    "sdy-close-shardings,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true},"
    "sdy-reshard-to-collectives))"
)
# The first of them alone, with names in the place of axes.
_NAMING = (
    "builtin.module(inline,symbol-dce,sdy-import-pipeline,sdy-user-priority-propagate,"
    "func.func(sdy-sink-data-flow-edges),sdy-close-shardings)"
)
_DIM = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r'"([^"]+)"')
_CONSTRAINT = "sdy.sharding_constraint"
_MANUAL = "sdy.manual_computation"

NamedDims = tuple[tuple[str, ...], ...]
"""For each dim of a tensor the names that it is annotated with."""


@dataclasses.dataclass(frozen=True)
class NamedTensor:
    """The names of a tensor's dims, and their sizes."""

    dims: NamedDims
    shape: tuple[int, ...]


class OnePlanError(ValueError):
    """A program that each plan makes another one: names cannot stand for axes."""


class CompletionError(ValueError):
    """A plan for which a program cannot be completed."""


class ClashError(CompletionError):
    """A plan splits two dims of a tensor by the same mesh axis."""


@dataclasses.dataclass(frozen=True)
class _Written:
    """An annotation as it is written over names.

    Args:
      dims: its names.
      is_open: for each dim, whether propagation may split it further.
    """

    dims: NamedDims
    is_open: tuple[bool, ...]

    @classmethod
    def of(cls, text: str) -> _Written:
        """From Shardy's text, `<mesh<...>, [{"n0"}, {?}]>`."""
        dims = _DIM.findall(text[text.rindex("[{") :] if "[{" in text else "")
        return cls(
            tuple(tuple(_NAME.findall(dim)) for dim in dims),
            tuple("?" in dim for dim in dims),
        )


class NamedModule:
    """A program for plans to come; use it in a single thread.

    Args:
      module: the program, traced over a mesh whose axes are names of dims; it is
        changed in place.
      in_shardings: for each argument its sharding over that mesh; None: left open.
      out_shardings: the same for the results.
      yields: by name, another one that keeps an axis which both are given in the same
        tensor; the first then goes without.

    Attributes:
      tensors: the annotations that the program has, each once.
      yields: see above.

    Raises:
      LoweringError: an annotation cannot be honoured.
      OnePlanError: the program has manual regions, whose shards have a size.
    """

    def __init__(
        self,
        module: Module,
        in_shardings: Sequence[Sharding | None],
        out_shardings: Sequence[Sharding | None],
        *,
        yields: Mapping[str, str] | None = None,
    ):
        self._module = module
        self.yields: Mapping[str, str] = yields or {}
        with module.opened():
            operation = module.write()
            write_for(module.blame, operation, module.mesh, Partitioner.SHARDY)
            write_borders(operation, module.mesh, in_shardings, out_shardings)
            if any(op.name == _MANUAL for op in walk(operation)):
                raise OnePlanError(
                    f"{module.signature.name}: has manual regions, whose shards are "
                    "of one plan's sizes"
                )
            self._passes = PassManager.parse(_PASSES)
            self._passes.enable_verifier(False)
            self._main = ir.SymbolTable(operation)["main"].operation
            self._constraints = [
                (op, _Written.of(str(op.attributes["sharding"])))
                for op in walk(operation)
                if op.name == _CONSTRAINT
            ]
            kinds = ("arg_attrs", "res_attrs")
            self._borders = [(kind, list(self._of_border(kind))) for kind in kinds]
            self.tensors = tuple(dict.fromkeys(self._tensors()))

    def _tensors(self) -> Iterator[NamedTensor]:
        for op, written in self._constraints:
            yield NamedTensor(written.dims, shape_of(op.operands[0]))
        function = ir.TypeAttr(self._main.attributes["function_type"]).value
        types = ir.FunctionType(function)
        both = (types.inputs, types.results)
        for (_, border), kinds in zip(self._borders, both, strict=True):
            for (_, written), type_ in zip(border, kinds, strict=True):
                if written is not None:
                    shape = tuple(ir.RankedTensorType(type_).shape)
                    yield NamedTensor(written.dims, shape)

    def _of_border(self, name: str) -> Iterator[tuple[dict, _Written | None]]:
        for attributes in ir.ArrayAttr(self._main.attributes[name]):
            given = {n.name: n.attr for n in ir.DictAttr(attributes)}
            sharding = given.pop(SHARDING_ATTRIBUTE, None)
            yield given, sharding and _Written.of(str(sharding))

    def split(self, dims: NamedDims, axes: Mapping[str, Sequence[str]]) -> NamedDims:
        """The axes that split each dim of a tensor.

        Args:
          dims: the tensor's names.
          axes: for each name the axes that the plan gives it; none if it is missing.

        Raises:
          ClashError: two names of the tensor have an axis in common.
        """
        present = {name for names in dims for name in names}
        split = [
            tuple(axis for name in names for axis in self._kept(name, present, axes))
            for names in dims
        ]
        flat = [axis for axes_of in split for axis in axes_of]
        if len(set(flat)) < len(flat):
            raise ClashError(dims)
        return tuple(split)

    def _kept(self, name: str, present: set[str], axes) -> list[str]:
        to = self.yields.get(name)
        taken = axes.get(to, ()) if to in present else ()
        return [axis for axis in axes.get(name, ()) if axis not in taken]

    def complete(
        self, mesh: DeviceMesh, axes: Mapping[str, Sequence[str]]
    ) -> ir.Operation:
        """The program with Shardy's collectives in it; use it within `opened`.

        Args:
          mesh: the plan's mesh.
          axes: for each name the axes that the plan gives it.

        Raises:
          ClashError: see `split`.
          CompletionError: Shardy cannot complete it.
        """
        self._write(mesh, axes)
        return self._completed(self._passes)

    def _completed(self, passes: PassManager) -> ir.Operation:
        copy = self._module.operation.clone()
        try:
            passes.run(copy)
        except ir.MLIRError as e:
            name = self._module.signature.name
            raise CompletionError(f"{name}: Shardy cannot complete it: {e}") from e
        return copy

    def _write(self, mesh: DeviceMesh, axes: Mapping[str, Sequence[str]]) -> None:
        """Writes the plan's axes in the place of names."""
        known: dict[_Written, ir.Attribute] = {}

        def attribute(written: _Written) -> ir.Attribute:
            if written not in known:
                known[written] = self._attribute(mesh, axes, written)
            return known[written]

        for op, written in self._constraints:
            op.attributes["sharding"] = attribute(written)
        for name, border in self._borders:
            attributes = [
                {**given, SHARDING_ATTRIBUTE: attribute(written)} if written else given
                for given, written in border
            ]
            self._main.attributes[name] = ir.ArrayAttr.get(
                [*map(ir.DictAttr.get, attributes)]
            )

    def named(self) -> ir.Operation:
        """The program as Shardy completes it with names, as if all were axes.

        Raises:
          CompletionError: Shardy cannot complete it.
        """
        axes = {name: (name,) for name in self._module.mesh.axis_names}
        self._write(self._module.mesh, axes)
        return self._completed(PassManager.parse(_NAMING))

    def opened(self):
        """The MLIR context of the program."""
        return self._module.opened()

    def _attribute(self, mesh, axes, written: _Written) -> ir.Attribute:
        split = self.split(written.dims, axes)
        dims = []
        for axes_of, is_open in zip(split, written.is_open, strict=True):
            parts = [f'"{axis}"' for axis in axes_of] + ["?"] * is_open
            dims.append(f"{{{', '.join(parts)}}}")
        sizes = zip(mesh.axis_names, mesh.shape, strict=True)
        named = ", ".join(f'"{axis}"={size}' for axis, size in sizes)
        return ir.Attribute.parse(
            f"#sdy.sharding<mesh<[{named}]>, [{', '.join(dims)}]>"
        )
