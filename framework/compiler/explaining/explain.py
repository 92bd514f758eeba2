"""The completion report: every tensor's sharding, the reason, and what it costs."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import re
from collections.abc import Sequence

from tensorflow.python.util import nest

from meshwright.framework.compiler.boundary.borders import no_program
from meshwright.framework.compiler.boundary.form_notes import FormNotes
from meshwright.framework.compiler.explaining.explain_why import (
    Known,
    known,
    with_reasons,
)
from meshwright.framework.compiler.explaining.inserted import (
    InsertedCollective,
    inserted_collectives,
)
from meshwright.framework.compiler.explaining.provenance import (
    Competition,
    Provenance,
)
from meshwright.framework.compiler.explaining.texts.explain_text import explanation_text
from meshwright.framework.compiler.hlo.hlo_text import HloModule, Instruction, itemsize
from meshwright.framework.compiler.hlo.rematerialization import Rematerialization
from meshwright.framework.compiler.lowering.sources import (
    Kind,
    Source,
    Sources,
    innermost_name,
    program_name,
)
from meshwright.framework.compiler.program import Program
from meshwright.framework.compiler.repair.repaired import Repair
from meshwright.framework.compiler.weight_update_sharding.decisions import UpdateReport
from meshwright.framework.compiler.xla.completion import (
    AdjacentTensor,
    Completion,
    complete,
)
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

# Ops whose results have no data of their own.
_NO_TENSOR = frozenset(
    {"parameter", "tuple", "get-tuple-element", "constant", "while", "conditional"}
)
_HLO_DTYPES = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "bfloat16": "bf16",
    "complex64": "c64",
    "complex128": "c128",
    "bool": "pred",
}


class Why(enum.Enum):
    """Why a tensor is replicated."""

    ANNOTATED = "annotated so"
    PLAN = "its plan names no axis for these dims"
    UNEVEN = "its size does not divide; give its sharding and it is stored padded"
    NOTHING_SPLIT = "nothing around it is split"
    UPDATE = "weight-update sharding gathers it, updated in shards"
    UNDECIDED = "no axis reaches it from the split tensors around it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorReport:
    """One tensor of a partitioned program.

    Args:
      kind: argument, result, or inside.
      layer: dotted path of its layer; "" for arguments, results, and ops in no layer.
      op_name: of the TF op that makes it; for arguments and results the path in the
        nest.
      op_type: TF's type of the op, "" if unknown.
      source: where the op was made, None if unknown.
      shape: logical shape; for arguments and results the stored shape.
      dtype: element type in HLO's words: "f32", "bf16", ...
      sharding: completed; HLO's text where mesh axes cannot express it.
      annotated: whether the program annotates it; else its sharding is inferred, or
        kept.
      kept_from: of an argument, the program that gave its variable this sharding.
      logical_shape: of what is stored in another shape, else None.
      note: of an argument or a result, which row of a layout gave its sharding, or why
        none did; "" if nothing is known.
      requested: the annotated sharding if it is another one, else None.
      resharded_from: sharding of the annotated tensor that this one annotates again,
        differently; None for others. Two annotations in a row are a reshard, for
        instance where an AllToAll is wanted (GShard 3.2).
      why_replicated: the reason if no axis splits it, else None.
      bytes: the bytes of the full tensor.
      bytes_per_device: of one device's shard.
      collectives: inserted at its op.
      provenances: with reasons, where its axes come from.
      competitions: with reasons, the axes that it did not get.
      propagated: with reasons, its sharding by Shardy's propagation alone if XLA has
        another, as it simplifies a program before it propagates; else None.
    """

    kind: Kind
    layer: str
    op_name: str
    op_type: str
    source: Source | None
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding | str
    annotated: bool
    why_replicated: Why | None
    bytes: int
    bytes_per_device: int
    requested: Sharding | None = None
    resharded_from: Sharding | str | None = None
    collectives: tuple[InsertedCollective, ...] = ()
    provenances: tuple[Provenance, ...] = ()
    competitions: tuple[Competition, ...] = ()
    propagated: Sharding | None = None
    kept_from: str = ""
    logical_shape: tuple[int, ...] | None = None
    note: str = ""

    @property
    def why_text(self) -> str:
        """Why no axis splits it, in words; "" if one does."""
        if self.why_replicated is None:
            return ""
        if self.note and self.why_replicated is Why.PLAN:
            return self.note
        return "; ".join(filter(None, (self.why_replicated.value, self.note)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematerializedTensor:
    """A tensor gathered on every device without an annotation for it.

    Args:
      tensor: source of the tensor.
      at: source of the op that needs it in another sharding, or that all do alike.
      tensor_name, at_name: the names of both ops.
      shape, dtype, bytes: of what each device holds.
      alike: whether all devices do the op at `at` alike, as XLA has no way to do it in
        parts; else the tensor is split again there.
    """

    tensor: Source | None
    at: Source | None
    tensor_name: str
    at_name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    alike: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """What was decided about a program; its `str` is a report to read.

    Args:
      name: the program's.
      mesh: its device mesh.
      partitioner: "shardy" or "gspmd".
      tensors: of all its ops; arguments and results first, then in program order.
      elsewhere: collectives that belong to no tensor of the program.
      repairs: ops that XLA's partitioner would get wrong, laid out otherwise.
      has_reasons: whether it tells where axes come from.
    """

    name: str
    mesh: DeviceMesh
    partitioner: str
    tensors: tuple[TensorReport, ...]
    elsewhere: tuple[InsertedCollective, ...]
    _rematerialized: tuple[RematerializedTensor, ...]
    repairs: tuple[Repair, ...] = ()
    has_reasons: bool = False

    def replicated(self, at_least: int = 0) -> list[TensorReport]:
        """The tensors of `at_least` bytes that no axis splits, largest first."""
        tensors = [
            tensor
            for tensor in self.tensors
            if tensor.why_replicated is not None and tensor.bytes >= at_least
        ]
        return sorted(tensors, key=lambda tensor: -tensor.bytes)

    def rematerialized(self) -> list[RematerializedTensor]:
        """The tensors gathered without an annotation for it, largest first.

        Gathered for a reshard, XLA warns of it as "involuntary full rematerialization"
        (GSPMD 4.5: resharding in several steps, the last resort of which is to
        replicate); for an op that the partitioner cannot split, XLA says nothing.
        Results and tensors that completion itself leaves unsharded are `replicated`.
        """
        return sorted(self._rematerialized, key=lambda tensor: -tensor.bytes)

    def text(self, *, match: str = "", at_least: int = 0, axis: str = "") -> str:
        """A part of `str(self)`: see `explanation_text`."""
        return explanation_text(self, match=match, at_least=at_least, axis=axis)

    def known(self) -> Known:
        """With reasons, of how many axes the reason is known."""
        return known(self.tensors)

    def __str__(self) -> str:
        return explanation_text(self)


def explain(program: Program, *, reasons: bool = False) -> Explanation:
    """Reports what completion and the partitioner decided about a program.

    The program is compiled once more, if possible without the backend's own
    optimizations (the default job: 3 s). Collectives are those of the compiled program.

    Args:
      program, reasons: the program; whether to tell where axes come from.

    Raises:
      LoweringError: XLA used another partitioner than requested.
      TypeError: it is no program.
      ValueError: the mesh has one device.
    """
    if not isinstance(program, Program):
        raise no_program("explain", program)
    completion = complete(program.unpartitioned)
    at, elsewhere = inserted_collectives(program)
    arguments, results = _arguments(program, completion), _results(program, completion)
    root = completion.completed.root()  # With several results a tuple, no op's tensor.
    root_why = {root.name: results[0].why_replicated} if root.dtype else {}
    inside = _Report(completion, program.sources, at, root_why, program.updates)
    tensors = (*arguments, *results, *inside.tensors())
    elsewhere += inside.unclaimed()
    gathered = tuple(
        _rematerialized(tensor, program.sources)
        for tensor in completion.rematerializations()
    )
    if reasons:
        tensors, elsewhere = with_reasons(tensors, elsewhere, program.reasons, gathered)
    return Explanation(
        name=program.name,
        mesh=program.mesh,
        partitioner=program.partitioner.value,
        tensors=tensors,
        elsewhere=tuple(elsewhere),
        _rematerialized=gathered,
        repairs=program.repairs,
        has_reasons=reasons,
    )


def _arguments(program: Program, completion: Completion) -> list[TensorReport]:
    module = completion.completed
    parameters = [
        instruction
        for instruction in module.instructions
        if instruction.opcode == "parameter" and instruction.computation == module.entry
    ]
    parameters.sort(key=lambda parameter: parameter.number)
    shardings = [completion.sharding(parameter) for parameter in parameters]
    whys = [_why_border(completion.around(p), p.shape) for p in parameters]
    forms = program.arguments.forms
    return _leaves(Kind.ARGUMENT, program.inputs, shardings, forms, whys, program.notes)


def _results(program: Program, completion: Completion) -> list[TensorReport]:
    ranks = [len(spec.shape) for spec in nest.flatten(program.outputs)]
    shardings = completion.result_shardings(ranks)
    root = completion.completed.root()
    if root.dtype:
        whys = [_why_border(completion.around(root), root.shape)]
    else:
        makers = completion.completed.operands(root)
        whys = [_why_element(completion, maker) for maker in makers]
    forms = program.out_forms
    return _leaves(Kind.RESULT, program.outputs, shardings, forms, whys, program.notes)


def _why_element(completion: Completion, maker: Instruction) -> Why:
    """Why the result that `maker` makes is left unsharded."""
    why = _why_border([completion.as_neighbour(maker)], maker.shape)
    if why is not Why.NOTHING_SPLIT:
        return why
    return _why_inside(completion.around(completion.unpacked(maker)))


def _why_border(near: Sequence[AdjacentTensor], shape: tuple[int, ...]) -> Why:
    """Why an argument or a result of `shape` next to these is left unsharded.

    JAX splits arrays between programs evenly. It therefore leaves an array without a
    sharding of its own unsharded where a dim does not divide.
    """
    for tensor in near:
        if not isinstance(tensor.sharding, Sharding):
            continue
        pairs = zip(tensor.shape, tensor.sharding.splits(), strict=True)
        if any(size % count and size in shape for size, count in pairs):
            return Why.UNEVEN
    return _why_inside(near)


def _why_inside(near: Sequence[AdjacentTensor]) -> Why:
    """Why a tensor next to these is left unsharded."""
    if all(_is_replicated(tensor.sharding) for tensor in near):
        return Why.NOTHING_SPLIT
    return Why.UNDECIDED


def _leaves(
    kind: Kind, specs, shardings, forms, whys, notes: FormNotes
) -> list[TensorReport]:
    """The arguments or results; `whys` are for those that completion left unsharded."""
    paths = nest.flatten_with_joined_string_paths(specs, separator=".")
    reports = []
    for number, ((path, spec), sharding, form, why) in enumerate(
        zip(paths, shardings, forms, whys, strict=True)
    ):
        shape = tuple(spec.shape)
        is_given = form is not None and not notes.is_completed(number, form)
        why = Why.PLAN if is_given else why
        kept_from = form.kept_from if form else ""
        size = itemsize(_hlo_dtype(spec.dtype))
        reports.append(
            TensorReport(
                kind=kind,
                layer="",
                op_name=path or kind.value,
                op_type="",
                source=None,
                shape=shape,
                dtype=_hlo_dtype(spec.dtype),
                sharding=sharding,
                annotated=is_given and not kept_from,
                note=notes.text(kind, number)
                if _is_replicated(sharding)
                else notes.giver(kind, number, form),
                kept_from=kept_from,
                logical_shape=None if not form or form.is_logical else form.shape,
                why_replicated=why if _is_replicated(sharding) else None,
                **_sizes(sharding, shape, size),
            )
        )
    return reports


class _Report:
    """The tensors inside a program, one for each TF op."""

    def __init__(
        self,
        completion: Completion,
        sources: Sources,
        collectives: dict[str, list[InsertedCollective]],
        root_why: dict[str, Why | None],
        updates: UpdateReport | None,
    ):
        self.completion = completion
        self.module = completion.completed
        self.sources = sources
        self.collectives = collectives
        self.root_why = root_why
        self.updates = updates
        self.by_op: dict[str, list[Instruction]] = collections.defaultdict(list)
        inside = _running(self.module)
        for part in self.module.instructions:
            if part.opcode not in _NO_TENSOR and part.computation in inside:
                self.by_op[innermost_name(part.op_name)].append(part)

    def tensors(self) -> list[TensorReport]:
        return [self._tensor(name, parts) for name, parts in self.by_op.items() if name]

    def unclaimed(self) -> list[InsertedCollective]:
        """The collectives at ops that have no tensor of their own."""
        return [
            collective
            for name, inserted in self.collectives.items()
            if name not in self.by_op
            for collective in inserted
        ]

    def _tensor(self, name: str, parts: Sequence[Instruction]) -> TensorReport:
        instruction = max(parts, key=lambda part: part.bytes)
        source = self.sources.find(name, instruction.shape)
        # An op lowers to several instructions; those of its value have its shape.
        of_value = [p for p in parts if source is not None and p.shape in source.shapes]
        instruction = of_value[-1] if of_value else instruction
        sharding = self.completion.sharding(instruction)
        annotated = source is not None and source.annotation is not None
        requested = None
        if annotated and of_value:
            requested = source.annotation.sharding(
                self.completion.mesh, len(instruction.shape)
            )
        followed = requested is None or self.completion.follows(sharding, requested)
        return TensorReport(
            kind=Kind.INSIDE,
            layer=source.layer if source else "",
            op_name=name,
            op_type=source.op_type if source else "",
            source=source,
            shape=instruction.shape,
            dtype=instruction.dtype,
            sharding=sharding,
            annotated=annotated,
            why_replicated=self._why(parts, instruction, requested),
            collectives=tuple(self.collectives.get(name, ())),
            requested=None if followed else requested,
            resharded_from=self._resharded_from(instruction) if annotated else None,
            **_sizes(sharding, instruction.shape, itemsize(instruction.dtype)),
        )

    def _why(self, parts, of: Instruction, requested: Sharding | None) -> Why | None:
        if not _is_replicated(self.completion.sharding(of)):
            return None
        if requested is not None and requested.is_replicated():
            return Why.ANNOTATED
        for part in parts:
            if why := self.root_why.get(part.name):
                return why
        why = _why_inside(
            [near for part in parts for near in self.completion.around(part)]
        )
        is_update = why is Why.UNDECIDED and self._is_gathered(parts, of.shape)
        return Why.UPDATE if is_update else why

    def _is_gathered(self, parts: Sequence[Instruction], shape) -> bool:
        """Whether weight-update sharding annotates it unsplit, and not split after.

        Completion makes a copy of an annotation, here of one that no TF op made.
        """
        copies = [
            self.completion.sharding(part)
            for part in parts
            if part.opcode == "copy" and self.module.by_name[part.operands[0]] in parts
        ]
        may = self.updates is not None and self.updates.may_gather(shape)
        return may and bool(copies) and all(map(_is_replicated, copies))

    def _resharded_from(self, instruction: Instruction) -> Sharding | str | None:
        """The sharding of the tensor that is annotated again, if it is another one."""
        for annotated in self.module.operands(instruction):
            source = self.sources.find(annotated.op_name, annotated.shape)
            if source is not None and source.annotation is not None:
                before = self.completion.sharding(annotated)
                after = self.completion.sharding(instruction)
                return before if before != after else None
        return None


def _running(module: HloModule) -> set[str]:
    """The computations that run as such, without the scalar ones inside reduces."""
    names = {module.entry}
    for instruction in module.instructions:
        if instruction.opcode in ("while", "conditional", "call"):
            names.update(instruction.called)
    return names


def _rematerialized(
    tensor: Rematerialization, sources: Sources
) -> RematerializedTensor:
    return RematerializedTensor(
        tensor=sources.find(tensor.tensor),
        at=sources.find(tensor.at),
        tensor_name=program_name(tensor.tensor),
        at_name=program_name(tensor.at),
        shape=tensor.shape,
        dtype=tensor.dtype,
        bytes=tensor.bytes,
        alike=tensor.alike,
    )


def _is_replicated(sharding: Sharding | str) -> bool:
    return isinstance(sharding, Sharding) and sharding.is_replicated()


def _sizes(sharding, shape: tuple[int, ...], size: int) -> dict[str, int]:
    # A sharding that mesh axes cannot express splits the tensor by an unknown factor.
    shard = sharding.shard_shape(shape) if isinstance(sharding, Sharding) else shape
    return {
        "bytes": math.prod(shape) * size,
        "bytes_per_device": math.prod(shard) * size,
    }


def _hlo_dtype(dtype) -> str:
    name = dtype.name
    return _HLO_DTYPES.get(name) or re.sub(r"^(u?)int", lambda m: m[1] or "s", name)
