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
    rf"(?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?\((?P<rest>.*)$",
    re.MULTILINE,
)
_ARRAY = re.compile(r"\b(?P<dtype>pred|[suf]\d+|bf16|f8\w*|c\d+)\[(?P<dims>[\d,]*)\]")
_IOTA_GROUPS = re.compile(
    r"replica_groups=\[(?P<dims>[\d,]+)\]<=\[(?P<iota>[\d,]+)\](?:T\((?P<perm>[\d,]+)\))?"
)
_MESH_GROUPS = re.compile(
    r"replica_groups=(?:@?\w+)?\[(?P<axes>[^\]]+)\]"
    r"(?:, device_ids=\((?P<order>.*?)\))? \{(?P<chosen>[^}]*)\}"
)
_DEVICE_ORDER = re.compile(r"\[(?P<iota>[\d,]+)\](?:T\((?P<perm>[\d,]+)\))?|[\d,]+")
_MESH_AXIS = re.compile(
    r"'(?P<name>[^']+)'(?:=(?P<size>\d+))?(?::\((?P<before>\d+)\)(?P<part>\d+))?"
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
        product of axes. For permutes those along which any source and target differ.
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
    arrays = list(_ARRAY.finditer(_result_type(match)))
    shapes = tuple(tuple(_ints(a["dims"])) for a in arrays)
    dtypes = tuple(a["dtype"] for a in arrays)
    pairs = zip(shapes, dtypes, strict=True)
    groups = _groups(rest, mesh)
    op_name = _OP_NAME.search(rest)
    return Collective(
        name=match["name"],
        kind=match["kind"],
        axes=(
            _axes_between(groups, mesh)
            if match["kind"] == "collective-permute"
            else _axes_of(groups, mesh)
        ),
        groups=groups,
        dtypes=dtypes,
        shapes=shapes,
        bytes=sum(math.prod(shape) * _itemsize(dtype) for shape, dtype in pairs),
        op_name=op_name["op_name"] if op_name else "",
    )


def _result_type(match: re.Match) -> str:
    """The text of the result's type; a start's is its operand's, its result's, ..."""
    if not match["start"] or match["kind"] == "all-reduce":
        return match["type"]
    depth, parts = 0, [""]
    for char in match["type"][1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts[1]


def _groups(text: str, mesh: DeviceMesh) -> tuple[tuple[int, ...], ...]:
    """The device groups of a collective, from any of the forms that HLO text has."""
    if match := _PAIRS.search(text):
        return _lists(match["pairs"])
    if match := _IOTA_GROUPS.search(text):
        ids = _iota(match["iota"], match["perm"]).reshape(_ints(match["dims"]))
        return tuple(tuple(int(i) for i in row) for row in ids)
    if match := _LIST_GROUPS.search(text):
        return _lists(match["groups"])
    if match := _MESH_GROUPS.search(text):
        return _mesh_groups(match)
    if "replica_groups={}" in text:
        return (tuple(range(mesh.size)),)
    raise ValueError(f"collective with replica groups of an unknown form: {text[:200]}")


def _mesh_groups(match: re.Match) -> tuple[tuple[int, ...], ...]:
    """Groups over a mesh of XLA's own: `mesh['a'=2,'b'=4], device_ids=(...) {'b'}`.

    `'b':(2)4` is the part of axis b with 4 entries after a part with 2.
    """
    sizes = {a["name"]: int(a["size"]) for a in _MESH_AXIS.finditer(match["axes"])}
    order = _DEVICE_ORDER.fullmatch(match["order"] or "")
    if match["order"] and order is None:
        raise ValueError(f"replica groups of an unknown form: {match[0]}")
    if order is None:
        ids = np.arange(math.prod(sizes.values()))
    elif order["iota"]:
        ids = _iota(order["iota"], order["perm"]).flatten()
    else:
        ids = np.array(_ints(order[0]))
    places = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    for axis in _MESH_AXIS.finditer(match["chosen"]):
        size, place = sizes[axis["name"]], places[axis["name"]]
        part = int(axis["part"] or size)
        stride = size // (int(axis["before"] or 1) * part)
        place -= place // stride % part * stride
    # What is left of a device's place is its group's.
    groups: dict[tuple, list[int]] = {}
    for device, *place in zip(ids, *(p.flat for p in places.values()), strict=True):
        groups.setdefault(tuple(place), []).append(int(device))
    return tuple(map(tuple, groups.values()))


def _iota(shape: str, perm: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return ids.transpose(_ints(perm)) if perm else ids


def _axes_of(groups, mesh: DeviceMesh) -> tuple[str, ...] | None:
    """The axes along which devices of a group differ, if groups are whole in them."""
    wanted = _partition(groups)
    real = [a for a in mesh.axis_names if mesh.axis_size(a) > 1]
    for count in range(len(real) + 1):
        for axes in itertools.combinations(real, count):
            if _partition(axis_groups(mesh, axes)) >= wanted:
                return axes
    return None


def _axes_between(pairs, mesh: DeviceMesh) -> tuple[str, ...]:
    """The axes along which the places of any pair differ."""
    places = np.indices(mesh.shape).reshape(len(mesh.shape), -1)
    source, target = np.array(pairs, int).reshape(-1, 2).T
    differ = (places[:, source] != places[:, target]).any(axis=1)
    return tuple(name for name, d in zip(mesh.axis_names, differ, strict=True) if d)


def _partition(groups) -> frozenset:
    return frozenset(frozenset(group) for group in groups)


def axis_groups(mesh: DeviceMesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The device groups of a collective along `axes`, counted by place in the mesh.

    In a group devices come in the order of their places along `axes`, major first.
    """
    places = np.arange(mesh.size).reshape(mesh.shape)
    names = mesh.axis_names
    inner = [names.index(a) for a in axes]
    outer = [i for i in range(len(names)) if i not in inner]
    rows = places.transpose(outer + inner).reshape(-1, mesh.axes_size(axes))
    return tuple(tuple(int(i) for i in row) for row in rows)


def _lists(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(_ints(group)) for group in re.findall(r"\{([\d,]*)\}", text))


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _itemsize(dtype: str) -> int:
    if dtype == "pred" or dtype.startswith("f8"):
        return 1
    return int(re.sub(r"\D", "", dtype)) // 8
