"""The sharding types of a program: checked, and shown."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypedDict, Unpack

import tensorflow as tf
from jax.extend.mlir import ir
from tensorflow.python.util import nest

from meshwright.framework.compiler.boundary.borders import (
    check_results,
    filled,
    requested_leaves,
)
from meshwright.framework.compiler.lowering.lower import Signature, lower
from meshwright.framework.compiler.lowering.sources import (
    PLACEHOLDER,
    Kind,
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
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.stablehlo.shardy.op_rules import OpRules
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    WHILE,
    end_of,
    op_name,
)
from meshwright.framework.compiler.stablehlo.tidy import tidy
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

_SHOWN_OPS = frozenset(
    {"dot_general", "dot", "convolution", "reduce", "gather", "scatter", "custom_call"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TypedTensor:
    """One tensor of a program and its sharding type.

    Args:
      kind: argument, result, or inside.
      name: for arguments and results their path, such as "w.kernel"; for others the
        name of the TF op that makes it.
      type: the sharding type; its `str` reads `f32[seq, batch@dp, 16]{U:tp}`.
      layer: dotted path of its layer, or of its name scopes outside any layer.
      source: where the op was made, None if unknown.
      is_gradient: whether it is a gradient, or made from one.
      is_shown: whether the program's text shows it.
    """

    kind: Kind
    name: str
    type: TensorType
    layer: str = ""
    source: Source | None = None
    is_gradient: bool = False
    is_shown: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class TypedProgram:
    """A function's tensors with their sharding types; its `str` is a report to read.

    Args:
      name: the program's.
      mesh: its device mesh.
      tensors: arguments, ops' tensors in the order of the program, results.
      errors: the errors, in the order of the program; after an error tensors that
        depend on its op have no type up to the next annotation.
    """

    name: str
    mesh: DeviceMesh
    tensors: tuple[TypedTensor, ...]
    errors: tuple[ShardingTypeError, ...]

    def type_of(self, name: str) -> str:
        """The type of the tensor of this name, or of the only one whose path ends so.

        Raises:
          ValueError: there is none, or several.
        """
        exact = [t for t in self.tensors if t.name == name]
        named = exact or [t for t in self.tensors if f"/{t.name}".endswith(f"/{name}")]
        if len(named) != 1:
            names = [tensor.name for tensor in named or self.tensors]
            raise ValueError(
                f"{self.name}: {len(named)} tensors are named {name!r}: give one of "
                f"{names}"
            )
        return str(named[0].type)

    def __str__(self) -> str:
        return program_text(self)


class TypesOptions(TypedDict, total=False):
    """Keyword arguments of `explain_types`, which describes them."""

    in_shardings: Sequence[Any] | None
    out_shardings: Any
    dim_names: Sequence[Any] | None
    name: str | None
    variables: Sequence[tf.Variable]


def check_types(
    fn: Callable[..., Any],
    args: Sequence[Any],
    mesh: DeviceMesh,
    **options: Unpack[TypesOptions],
) -> TypedProgram:
    """Checks the sharding types of a TF function, without compiling it.

    Types follow from those of the arguments and from annotations, op by op, forward;
    the ops of a gradient that `fn` computes are checked by the same rules. An op that
    would need communication without an annotation is an error: a program that passes
    communicates at `mesh_split` and `reshard`, and nowhere else.

    Args:
      fn: a function as for `compile_program`.
      args: for each argument a nest of `tf.TensorSpec`.
      mesh: the device mesh.
      **options: see `explain_types`.

    Raises:
      ShardingTypeError: the first error; it names the op, its layer and line, the types
        of its operands, the rule, and a conversion that satisfies it.
      LoweringError: see `lower`.
      ValueError: structures or ranks do not agree.
    """
    program = explain_types(fn, args, mesh, **options)
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
    variables: Sequence[tf.Variable] = (),
) -> TypedProgram:
    """The sharding types of a TF function's tensors, and the errors in them.

    Args:
      fn: a function as for `compile_program`.
      args: for each argument a nest of `tf.TensorSpec`.
      mesh: the device mesh.
      in_shardings: for each argument None, or a nest of its structure with a `Sharding`
        for each leaf, which may be unreduced. None is replicated.
      out_shardings: the same for the result. None keeps its sharding, if decided.
      dim_names: for each argument None, or a nest of its structure with a tuple of
        names for each leaf's dims, which types then show.
      name: for messages.
      variables: as for `trace_program`.

    Raises:
      LoweringError: see `lower`.
      ValueError: structures or ranks do not agree.
    """
    name = name or getattr(fn, "__name__", "program").strip("<>")

    def of_tensors(*args):
        out = fn(*args)
        check_results(name, out)
        return nest.map_structure(tf.convert_to_tensor, out)

    lowered = lower(of_tensors, args, name=name, variables=variables)
    signature = lowered.signature
    arguments = _arguments(fn, signature)
    shardings = requested_leaves(signature.inputs, in_shardings, mesh)
    filled_names = filled(signature.inputs, dim_names)
    names = nest.flatten_up_to(signature.inputs, filled_names, check_types=False)
    requested = requested_leaves(signature.outputs, out_shardings, mesh)
    module = Module(lowered, mesh)
    with module.opened():
        tidy(module.write())
        main = ir.SymbolTable(module.operation)["main"].operation
        block = main.regions[0].blocks[0]
        checker = Checker(mesh, module.blame, OpRules(module.operation))
        before = [
            _argument(path, value, mesh, sharding, leaf_names)
            for path, value, sharding, leaf_names in zip(
                arguments, block.arguments, shardings, names, strict=True
            )
        ]
        checker.types.update(zip(block.arguments, before, strict=True))
        checker.visit(block)
        results = list(zip(end_of(block).operands, requested, strict=True))
        for number, (value, sharding) in enumerate(results):
            _check_fits(f"result {number}", value, mesh, sharding)
        given = [checker.given(value, sharding) for value, sharding in results]
        return _Program(signature, mesh, checker).typed(
            zip(arguments, before, strict=True), given
        )


def _arguments(fn: Callable[..., Any], signature: Signature) -> list[str]:
    """The paths of the arguments' leaves; each begins with the argument's name."""
    parameters = list(inspect.signature(fn).parameters.values())
    paths = nest.flatten_with_joined_string_paths(signature.inputs, separator=".")
    named = []
    for path, _ in paths:
        number, *rest = path.split(".")
        parameter = parameters[min(int(number), len(parameters) - 1)]
        several = parameter.kind is parameter.VAR_POSITIONAL
        named.append(".".join([number if several else parameter.name, *rest]))
    return named


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
            "a name for each, or None"
        )
    _check_fits(f"argument {path!r}", value, mesh, sharding)
    sharding = sharding or Sharding.replicated(mesh, rank)
    return TensorType.from_annotation(value, sharding, names or ())


def _check_fits(
    what: str, value: ir.Value, mesh: DeviceMesh, sharding: Sharding | None
) -> None:
    rank = ir.RankedTensorType(value.type).rank
    if sharding is not None and (sharding.rank, sharding.mesh) != (rank, mesh):
        raise ValueError(
            f"{what} has {rank} dims and is over the mesh ({mesh}), its sharding is "
            f"{sharding} over ({sharding.mesh}): give a sharding of as many dims over "
            "the same mesh"
        )


def _border(kind: Kind, named: Iterable[tuple[str, Typed]]) -> Iterator[TypedTensor]:
    for path, type_ in named:
        if isinstance(type_, TensorType):
            yield TypedTensor(
                kind=kind,
                name=path or kind.value,
                type=type_.without_origins(),
            )


class _Program:
    """The checker's types and errors, by TF ops."""

    def __init__(self, signature: Signature, mesh: DeviceMesh, checker: Checker):
        self.signature = signature
        self.mesh = mesh
        self.checker = checker
        self.gradients: set[ir.Operation] = set()

    def typed(
        self, arguments: Iterable[tuple[str, TensorType]], results: Sequence[Typed]
    ) -> TypedProgram:
        paths = nest.flatten_with_joined_string_paths(
            self.signature.outputs, separator="."
        )
        made = zip((path for path, _ in paths), results, strict=True)
        errors = sorted(self.checker.errors.items(), key=lambda e: self._order(e[0]))
        return TypedProgram(
            name=self.signature.name,
            mesh=self.mesh,
            tensors=(
                *_border(Kind.ARGUMENT, arguments),
                *self._inside(),
                *_border(Kind.RESULT, made),
            ),
            errors=tuple(error for _, of_op in errors for error in of_op),
        )

    def _order(self, op) -> int:
        source = None if isinstance(op, ir.Block) else self._source(op)
        return -1 if source is None else self.signature.sources.order[source.op_name]

    def _source(self, op) -> Source | None:
        shape = ()
        if len(op.results) and isinstance(op.results[0].type, ir.RankedTensorType):
            shape = tuple(ir.RankedTensorType(op.results[0].type).shape)
        return self.signature.sources.find(op_name(op), shape)

    def _inside(self) -> list[TypedTensor]:
        """A tensor for each TF op with a typed result, except of constants alone."""
        by_op: dict[str, list[tuple[ir.Operation, TensorType]]] = {}
        for value, type_ in self.checker.types.items():
            known = isinstance(type_, TensorType) and not type_.free
            if known and not isinstance(value.owner, ir.Block):
                source = self._source(value.owner)
                if source is not None and value.owner.name != WHILE:
                    self._note_gradient(value.owner, source)
                    by_op.setdefault(source.op_name, []).append((value.owner, type_))
        order = self.signature.sources.order
        names = sorted(by_op, key=order.__getitem__)
        return [self._tensor(name, by_op[name]) for name in names]

    def _note_gradient(self, op, source: Source) -> None:
        """Marks an op of a gradient: TF's own ops by name, annotations by operands."""
        made = any(value.owner in self.gradients for value in op.operands)
        if made or source.is_gradient:
            self.gradients.add(op)

    def _tensor(self, name: str, parts: Sequence[tuple]) -> TypedTensor:
        source = self._source(parts[-1][0])
        # An op lowers to several; those of its value have its shape.
        types = [type_ for _, type_ in parts if type_.shape in source.shapes]
        return TypedTensor(
            kind=Kind.INSIDE,
            name=program_name(name).removesuffix(f"/{PLACEHOLDER}"),
            layer=source.layer,
            source=source,
            is_gradient=any(op in self.gradients for op, _ in parts),
            type=(types[-1] if types else parts[-1][1]).without_origins(),
            is_shown=any(self._is_shown(op, type_) for op, type_ in parts),
        )

    def _is_shown(self, op, type_: TensorType) -> bool:
        """Whether an op is a contraction or the like, or changes what is unreduced."""
        before = [self.checker.types[value] for value in op.operands]
        states = {
            (operand.partial, operand.reduced)
            for operand in before
            if isinstance(operand, TensorType) and not operand.free
        }
        changes = states and states != {(type_.partial, type_.reduced)}
        return bool(changes) or op.name.split(".")[-1] in _SHOWN_OPS
