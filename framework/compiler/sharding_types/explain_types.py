"""The sharding types of a program: checked, and shown."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from jax.extend.mlir import ir
from tensorflow.python.util import nest

from meshwright.framework.compiler.boundary.borders import filled
from meshwright.framework.compiler.explaining.explain import Kind
from meshwright.framework.compiler.lowering.lower import (
    LoweredFunction,
    LoweringError,
    lower,
)
from meshwright.framework.compiler.lowering.sources import (
    PLACEHOLDER,
    Source,
    program_name,
)
from meshwright.framework.compiler.sharding_types.checker import (
    Checker,
    ShardingTypeError,
    Typed,
)
from meshwright.framework.compiler.sharding_types.tensor_type import TensorType
from meshwright.framework.compiler.sharding_types.text import program_text
from meshwright.framework.compiler.stablehlo.modules import neutral_module
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    WHILE,
    Blame,
    end_of,
    op_name,
)
from meshwright.framework.compiler.stablehlo.tidy import tidy
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

_TELLING = frozenset(
    {"dot_general", "dot", "convolution", "reduce", "gather", "scatter", "custom_call"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TypedTensor:
    """One tensor of a program and its sharding type.

    Args:
      kind: argument, result, or inside.
      name: of arguments and results their path, such as "w.kernel"; of others the name
        of the TF op that makes it.
      layer: dotted path of its layer, or of its name scopes outside of any.
      source: where the op was made, None if unknown.
      is_gradient: whether it is of a gradient, or made of one.
      type: the sharding type; `str` of it reads `f32[seq, batch@dp, 16]{U:tp}`.
      is_told: whether the program's text is to show it.
    """

    kind: Kind
    name: str
    layer: str
    source: Source | None
    is_gradient: bool
    type: TensorType
    is_told: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class TypedProgram:
    """A function's tensors with their sharding types; `str` of it is meant to be read.

    Args:
      name: the program's.
      mesh: its device mesh.
      tensors: arguments, those of its ops in the order of the program, results.
      errors: in the order of the program; after one what depends on it has no type up
        to the next annotation.
    """

    name: str
    mesh: DeviceMesh
    tensors: tuple[TypedTensor, ...]
    errors: tuple[ShardingTypeError, ...]

    def type_of(self, name: str) -> str:
        """The type of the tensor of this name, or of the only one that it ends.

        Raises:
          ValueError: there is none, or several.
        """
        exact = [one for one in self.tensors if one.name == name]
        found = exact or [t for t in self.tensors if f"/{t.name}".endswith(f"/{name}")]
        if len(found) != 1:
            names = [one.name for one in found or self.tensors]
            raise ValueError(
                f"{self.name}: {len(found)} tensors are named {name!r}: give one of "
                f"{names}"
            )
        return str(found[0].type)

    def __str__(self) -> str:
        return program_text(self)


def check_types(
    fn: Callable[..., Any], args: Sequence[Any], mesh: DeviceMesh, **how: Any
) -> TypedProgram:
    """Checks the sharding types of a TF function, without compiling it.

    Types follow from those of the arguments and from annotations, op by op, forward;
    the ops of a gradient that `fn` computes are checked by the same rules. What would
    need communication that no annotation asks for is an error: a program that passes
    communicates where `mesh_split` and `reshard` say so, and nowhere else.

    Args:
      fn: a function as for `compile_program`.
      args: for each argument a nest of `tf.TensorSpec`.
      mesh: the device mesh.
      **how: see `explain_types`.

    Raises:
      ShardingTypeError: the first error; it names the op, its layer and line, the types
        of its operands, the rule, and a conversion that makes it right.
      LoweringError: see `lower`.
      ValueError: structures or ranks do not agree.
    """
    program = explain_types(fn, args, mesh, **how)
    if program.errors:
        raise program.errors[0]
    return program


def explain_types(
    fn: Callable[..., Any],
    args: Sequence[Any],
    mesh: DeviceMesh,
    *,
    in_shardings: Sequence[Any] | None = None,
    out_shardings: Any = None,
    dim_names: Sequence[Any] | None = None,
    name: str | None = None,
) -> TypedProgram:
    """The sharding types of a TF function's tensors, and the errors that are in them.

    Args:
      fn: a function as for `compile_program`.
      args: for each argument a nest of `tf.TensorSpec`.
      mesh: the device mesh.
      in_shardings: for each argument None, or a nest of its structure with a `Sharding`
        for each leaf, unreduced ones too. None is replicated.
      out_shardings: the same for the result. None is as it is, if that is decided.
      dim_names: for each argument None, or a nest of its structure with a tuple of
        names for each leaf's dims, for types to be shown by.
      name: for messages.

    Raises:
      LoweringError: see `lower`.
      ValueError: structures or ranks do not agree.
    """
    name = name or getattr(fn, "__name__", "program").strip("<>")

    def of_tensors(*args):
        out = fn(*args)
        if any(leaf is None for leaf in nest.flatten(out)):
            raise LoweringError(f"{name}: the function returns None, or a nest with it")
        return nest.map_structure(tf.convert_to_tensor, out)

    lowered = lower(of_tensors, args, name=name)
    arguments = _arguments(fn, lowered)
    shardings = _leaves(lowered.inputs, in_shardings)
    names = _leaves(lowered.inputs, dim_names)
    asked = _leaves(lowered.outputs, out_shardings)
    with neutral_module(lowered) as module:
        tidy(module)
        main = ir.SymbolTable(module.operation)["main"].operation
        block = main.regions[0].blocks[0]
        checker = Checker(mesh, Blame(lowered.name, lowered.sources))
        before = [
            _argument(path, value, mesh, sharding, own)
            for path, value, sharding, own in zip(
                arguments, block.arguments, shardings, names, strict=True
            )
        ]
        checker.types.update(zip(block.arguments, before, strict=True))
        checker.visit(block)
        results = list(zip(end_of(block).operands, asked, strict=True))
        for number, (value, sharding) in enumerate(results):
            _check_fits(f"result {number}", value, mesh, sharding)
        given = [checker.given(value, sharding) for value, sharding in results]
        return _Program(lowered, mesh, checker).typed(
            zip(arguments, before, strict=True), given
        )


def _arguments(fn: Callable[..., Any], lowered: LoweredFunction) -> list[str]:
    """The paths of the arguments' leaves, that of each argument by its name."""
    parameters = list(inspect.signature(fn).parameters.values())
    paths = nest.flatten_with_joined_string_paths(lowered.inputs, separator=".")
    found = []
    for path, _ in paths:
        number, *rest = path.split(".")
        one = parameters[min(int(number), len(parameters) - 1)]
        several = one.kind is one.VAR_POSITIONAL
        found.append(".".join([number if several else one.name, *rest]))
    return found


def _leaves(structure: Any, given: Any) -> list:
    return nest.flatten_up_to(structure, filled(structure, given), check_types=False)


def _argument(
    path: str,
    value: ir.Value,
    mesh: DeviceMesh,
    sharding: Sharding | None,
    names: Sequence[str | None] | None,
) -> TensorType:
    rank = ir.RankedTensorType(value.type).rank
    if names is not None and len(names) != rank:
        raise ValueError(
            f"argument {path!r} has {rank} dims and the dim names {tuple(names)}: give "
            "one for each, or None"
        )
    _check_fits(f"argument {path!r}", value, mesh, sharding)
    sharding = sharding or Sharding.replicated(mesh, rank)
    return TensorType.said(value, sharding, names or ())


def _check_fits(
    what: str, value: ir.Value, mesh: DeviceMesh, sharding: Sharding | None
) -> None:
    rank = ir.RankedTensorType(value.type).rank
    if sharding is not None and (sharding.rank, sharding.mesh) != (rank, mesh):
        raise ValueError(
            f"{what} has {rank} dims and is over the mesh ({mesh}), its sharding is "
            f"{sharding} over ({sharding.mesh}): give one of as many dims over the "
            "same mesh"
        )


def _border(kind: Kind, named: Iterable[tuple[str, Typed]]) -> Iterator[TypedTensor]:
    for path, found in named:
        if isinstance(found, TensorType):
            yield TypedTensor(
                kind=kind,
                name=path or kind.value,
                layer="",
                source=None,
                is_gradient=False,
                type=found.without_origins(),
                is_told=True,
            )


class _Program:
    """What the checker found, by TF ops."""

    def __init__(self, lowered: LoweredFunction, mesh: DeviceMesh, checker: Checker):
        self.lowered = lowered
        self.mesh = mesh
        self.checker = checker
        self.gradients: set[ir.Operation] = set()

    def typed(
        self, arguments: Iterable[tuple[str, TensorType]], results: Sequence[Typed]
    ) -> TypedProgram:
        paths = nest.flatten_with_joined_string_paths(
            self.lowered.outputs, separator="."
        )
        made = zip((path for path, _ in paths), results, strict=True)
        errors = sorted(self.checker.errors.items(), key=lambda e: self._order(e[0]))
        return TypedProgram(
            name=self.lowered.name,
            mesh=self.mesh,
            tensors=(
                *_border(Kind.ARGUMENT, arguments),
                *self._inside(),
                *_border(Kind.RESULT, made),
            ),
            errors=tuple(error for _, found in errors for error in found),
        )

    def _order(self, op) -> int:
        source = None if isinstance(op, ir.Block) else self._source(op)
        return -1 if source is None else self.lowered.sources.order[source.op_name]

    def _source(self, op) -> Source | None:
        shape = ()
        if len(op.results) and isinstance(op.results[0].type, ir.RankedTensorType):
            shape = tuple(ir.RankedTensorType(op.results[0].type).shape)
        return self.lowered.sources.find(op_name(op), shape)

    def _inside(self) -> list[TypedTensor]:
        """One for each TF op whose result has a type, and is not of constants alone."""
        by_op: dict[str, list[tuple[ir.Operation, TensorType]]] = {}
        for value, found in self.checker.types.items():
            known = isinstance(found, TensorType) and not found.free
            if known and not isinstance(value.owner, ir.Block):
                source = self._source(value.owner)
                if source is not None and value.owner.name != WHILE:
                    self._note_gradient(value.owner, source)
                    by_op.setdefault(source.op_name, []).append((value.owner, found))
        order = self.lowered.sources.order
        names = sorted(by_op, key=order.__getitem__)
        return [self._tensor(name, by_op[name]) for name in names]

    def _note_gradient(self, op, source: Source) -> None:
        """Names tell it of TF's own ops; annotations in between have others."""
        made = any(value.owner in self.gradients for value in op.operands)
        if made or source.is_gradient:
            self.gradients.add(op)

    def _tensor(self, name: str, parts: Sequence[tuple]) -> TypedTensor:
        source = self._source(parts[-1][0])
        # An op lowers to several; its own value has its own shape.
        own = [type_ for _, type_ in parts if type_.shape in source.shapes]
        return TypedTensor(
            kind=Kind.INSIDE,
            name=program_name(name).removesuffix(f"/{PLACEHOLDER}"),
            layer=source.layer,
            source=source,
            is_gradient=any(op in self.gradients for op, _ in parts),
            type=(own[-1] if own else parts[-1][1]).without_origins(),
            is_told=any(self._tells(op, type_) for op, type_ in parts),
        )

    def _tells(self, op, found: TensorType) -> bool:
        """Whether an op is a contraction or the like, or changes what is unreduced."""
        before = [self.checker.types[value] for value in op.operands]
        states = {
            (one.uncombined, one.reduced)
            for one in before
            if isinstance(one, TensorType) and not one.free
        }
        changes = states and states != {(found.uncombined, found.reduced)}
        return bool(changes) or op.name.split(".")[-1] in _TELLING
