"""Reading a compiled program: its collectives and the mesh axes they span."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import numpy as np

from meshwright.framework.sharding.mesh import DeviceMesh

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_COLLECTIVE = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.+?) "
    rf"(?P<kind>{'|'.join(_KINDS)})(?:-start)?\((?P<rest>.*)$",
    re.MULTILINE,
)
_ARRAY = re.compile(r"\b(?P<dtype>pred|[suf]\d+|bf16|f8\w*|c\d+)\[(?P<dims>[\d,]*)\]")
_IOTA_GROUPS = re.compile(
    r"replica_groups=\[(?P<dims>[\d,]+)\]<=\[(?P<iota>[\d,]+)\](?:T\((?P<perm>[\d,]+)\))?"
)
_LIST_GROUPS = re.compile(r"replica_groups=\{(?P<groups>\{[\d,{}]*\})\}")
_PAIRS = re.compile(r"source_target_pairs=\{(?P<pairs>[\d,{}]*)\}")
_OP_NAME = re.compile(r'op_name="(?P<op_name>[^"]*)"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a partitioned program.

    Args:
      name: HLO name.
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or
        "collective-permute".
      axes: the mesh axes its groups span, in mesh order; None if its groups are no
        product of axes.
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


def collectives_of(hlo_text: str, mesh: DeviceMesh) -> list[Collective]:
    """All collectives in optimized HLO text, in textual order."""
    return [_collective(match, mesh) for match in _COLLECTIVE.finditer(hlo_text)]


def _collective(match: re.Match, mesh: DeviceMesh) -> Collective:
    rest = match["rest"]
    arrays = list(_ARRAY.finditer(match["type"]))
    shapes = tuple(tuple(_ints(a["dims"])) for a in arrays)
    dtypes = tuple(a["dtype"] for a in arrays)
    pairs = zip(shapes, dtypes, strict=True)
    groups = _groups(rest, mesh)
    op_name = _OP_NAME.search(rest)
    return Collective(
        name=match["name"],
        kind=match["kind"],
        axes=_axes_of(groups, mesh),
        groups=groups,
        dtypes=dtypes,
        shapes=shapes,
        bytes=sum(math.prod(shape) * _itemsize(dtype) for shape, dtype in pairs),
        op_name=op_name["op_name"] if op_name else "",
    )


def _groups(text: str, mesh: DeviceMesh) -> tuple[tuple[int, ...], ...]:
    if match := _PAIRS.search(text):
        return tuple(tuple(p) for p in _lists(match["pairs"]))
    if match := _IOTA_GROUPS.search(text):
        ids = np.arange(math.prod(_ints(match["iota"]))).reshape(_ints(match["iota"]))
        if match["perm"]:
            ids = ids.transpose(_ints(match["perm"]))
        grouped = ids.reshape(_ints(match["dims"]))
        return tuple(tuple(int(i) for i in row) for row in grouped)
    if match := _LIST_GROUPS.search(text):
        return tuple(tuple(g) for g in _lists(match["groups"]))
    return (tuple(range(mesh.size)),)


def _axes_of(groups, mesh: DeviceMesh) -> tuple[str, ...] | None:
    """The axes along which devices of a group differ, if groups are whole in them."""
    wanted = _partition(groups)
    real = [a for a in mesh.axis_names if mesh.axis_size(a) > 1]
    for count in range(len(real) + 1):
        for axes in itertools.combinations(real, count):
            if _partition(axis_groups(mesh, axes)) >= wanted:
                return axes
    return None


def _partition(groups) -> frozenset:
    return frozenset(frozenset(group) for group in groups)


def axis_groups(mesh: DeviceMesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The device groups of a collective along `axes`, counted by place in the mesh."""
    places = np.arange(mesh.size).reshape(mesh.shape)
    names = mesh.axis_names
    inner = [names.index(a) for a in names if a in axes]
    outer = [i for i in range(len(names)) if i not in inner]
    rows = places.transpose(outer + inner).reshape(-1, mesh.axes_size(axes))
    return tuple(tuple(int(i) for i in row) for row in rows)


def _lists(text: str) -> list[list[int]]:
    return [_ints(group) for group in re.findall(r"\{([\d,]*)\}", text)]


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _itemsize(dtype: str) -> int:
    if dtype == "pred" or dtype.startswith("f8"):
        return 1
    return int(re.sub(r"\D", "", dtype)) // 8
