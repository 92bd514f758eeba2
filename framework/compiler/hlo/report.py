"""Reads a compiled program: its collectives and the mesh axes they span."""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np

from meshwright.framework.compiler.hlo.hlo_text import (
    HloModule,
    Instruction,
    arrays_of,
    elements,
    type_bytes,
)
from meshwright.framework.sharding.mesh import DeviceMesh, SubAxis
from meshwright.framework.sharding.xla_form import axis_groups, ints, iota

PERMUTE = "collective-permute"
ASYNC_START = 'custom_call_target="AsyncCollectiveStart"'
ASYNC_DONE = 'custom_call_target="AsyncCollectiveDone"'
"""In fusions of the TPU compiler, of which one starts a collective, and one ends it."""
_CARRYING = "async_collective_fusion"
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", PERMUTE)
_IOTA = r"\[(?P<iota>[\d,]+)\](?:T\((?P<perm>[\d,]+)\))?"
_IOTA_GROUPS = re.compile(rf"\[(?P<dims>[\d,]+)\]<={_IOTA}")
_MESH_GROUPS = re.compile(
    r"(?:@?\w+)?\[(?P<axes>[^\]]+)\]"
    r"(?:, device_ids=\((?P<order>.*?)\))? \{(?P<chosen>[^}]*)\}"
)
_DEVICE_ORDER = re.compile(rf"{_IOTA}|[\d,]+")
_MESH_AXIS = re.compile(r"'(?P<name>[^']+)'(?:=(?P<size>\d+))?(?P<part>:\(\d+\)\d+)?")
_LISTS = re.compile(r"\{[\d,{}]*\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a partitioned program.

    Args:
      name: HLO name.
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or
        "collective-permute".
      axes: the mesh axes that its groups span, in mesh order, or parts of them such as
        `Y:(1)2`; None if no axes or parts make these groups. For permutes the axes
        along which any source and target differ.
      groups: device numbers, counted by place in the mesh; for permutes the pairs.
      dtypes: element types of its results.
      shapes: shapes of its results on one device.
      bytes: size of its results on one device.
      op_name: the TF op it came from.
    """

    name: str
    kind: str
    axes: tuple[str, ...] | None
    groups: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    op_name: str

    @property
    def group_bytes(self) -> int:
        """Size of the full tensors of one of its groups."""
        parts = len(self.groups[0]) if self.kind == "reduce-scatter" else 1
        return self.bytes * parts


def collectives_of(module: HloModule, mesh: DeviceMesh) -> list[Collective]:
    """All collectives of an optimized module for `mesh`, in textual order.

    TPU programs have a collective that products carry on again in each of their
    fusions, and where it ends; here it is where it starts.

    Raises:
      ValueError: a collective has device groups of an unknown form.
    """

    @functools.cache  # Thousands of collectives have few different groups.
    def read(text: str, moves: bool):
        groups = _groups(text, () if moves else (tuple(range(mesh.size)),))
        return groups, (_axes_between if moves else _axes_of)(groups, mesh)

    carries_on = functools.cache(lambda name: _carries_on(module, name))
    return [
        _collective(instruction, kind, *read(instruction.groups, kind == PERMUTE))
        for instruction in module.instructions
        if (kind := instruction.opcode.removesuffix("-start")) in KINDS
        and not carries_on(instruction.computation)
    ]


def _carries_on(module: HloModule, computation: str) -> bool:
    """Whether the collectives of a computation are those that others started."""
    return computation.startswith(_CARRYING) or any(
        ASYNC_DONE in op.attributes for op in module.inside[computation]
    )


def _collective(instruction: Instruction, kind: str, groups, axes) -> Collective:
    result = _result_type(instruction, kind)
    arrays = arrays_of(result)
    return Collective(
        name=instruction.name,
        kind=kind,
        axes=axes,
        groups=groups,
        dtypes=tuple(dtype for dtype, _ in arrays),
        shapes=tuple(shape for _, shape in arrays),
        bytes=type_bytes(result),
        op_name=instruction.op_name,
    )


def _result_type(instruction: Instruction, kind: str) -> str:
    """The text of the result's type; the type of a start is (operand, result, ...)."""
    if instruction.opcode == kind or kind == "all-reduce":
        return instruction.type
    return elements(instruction.type)[1]


def _groups(
    text: str, none: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """The device groups, or pairs, of a collective; `none` if its text has none.

    Raises:
      ValueError: the text has an unknown form.
    """
    if text == "{}":
        return none
    if _LISTS.fullmatch(text):
        return tuple(tuple(ints(group)) for group in re.findall(r"\{([\d,]*)\}", text))
    if match := _IOTA_GROUPS.fullmatch(text):
        return _rows(_device_order(match).reshape(ints(match["dims"])))
    if match := _MESH_GROUPS.fullmatch(text):
        return _mesh_groups(match)
    raise ValueError(f"collective with replica groups of an unknown form: {text[:200]}")


def _mesh_groups(match: re.Match) -> tuple[tuple[int, ...], ...]:
    """Groups over a mesh of XLA's own: `mesh['a'=2,'b'=4], device_ids=(...) {'b'}`.

    `'b':(2)4` is the part of axis b with 4 entries after a part with 2.
    """
    order = _DEVICE_ORDER.fullmatch(match["order"] or "")
    if match["order"] and order is None:
        raise ValueError(f"replica groups of an unknown form: {match[0][:200]}")
    axes = list(_MESH_AXIS.finditer(match["axes"]))
    mesh = DeviceMesh(
        [axis["name"] for axis in axes],
        [int(axis["size"]) for axis in axes],
        order and _device_order(order),
    )
    chosen = [
        axis["name"] + (axis["part"] or "")
        for axis in _MESH_AXIS.finditer(match["chosen"])
    ]
    return _rows(mesh.ids.flatten()[np.array(axis_groups(mesh, chosen))])


def _device_order(match: re.Match) -> np.ndarray:
    """Device numbers from `[2,4]T(1,0)`, or written out."""
    if match["iota"]:
        return iota(ints(match["iota"]), ints(match["perm"] or "")).flatten()
    return np.array(ints(match[0]))


def _axes_of(groups, mesh: DeviceMesh) -> tuple[str, ...] | None:
    """The axes along which devices of a group differ, if groups span them in full."""
    places = np.unravel_index(groups[0], mesh.shape)
    axes = tuple(
        mesh.name(part)
        for axis, along in zip(mesh.axis_names, places, strict=True)
        for part in _parts(mesh, axis, along)
    )
    spans_all = _partition(axis_groups(mesh, axes)) >= _partition(groups)
    return axes if spans_all else None


def _parts(mesh: DeviceMesh, axis: str, places: np.ndarray) -> list[SubAxis]:
    """The parts of an axis that together make these places; none if no parts do."""
    parts, size = [], mesh.axis_size(axis)
    steps = np.unique(places) - places.min()
    while steps.size > 1:
        stride = int(steps[1])
        # The finest part's steps come first, and then repeat.
        in_a_row = steps == stride * np.arange(steps.size)
        count = int(in_a_row.argmin()) or steps.size
        if size % (stride * count):
            return []
        parts.insert(0, SubAxis(axis, size // (stride * count), count))
        steps = steps[::count]
    return parts


def _axes_between(pairs, mesh: DeviceMesh) -> tuple[str, ...]:
    """The axes along which the places of any pair differ."""
    source, target = np.array(pairs, int).reshape(-1, 2).T
    along = {axis: mesh.place_along(axis).flatten() for axis in mesh.axis_names}
    return tuple(a for a, p in along.items() if (p[source] != p[target]).any())


def _partition(groups) -> frozenset:
    return frozenset(frozenset(group) for group in groups)


def _rows(array: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, array.tolist()))
