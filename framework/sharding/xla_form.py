"""Shardings in XLA's languages: OpSharding, HLO text, Shardy's attributes.

XLA numbers devices: a tile assignment says which device has which shard. A sharding
names mesh axes. They are related by each device's index along some axes, as a number in
mixed radix with the axes, or sub-axes, as its digits.

Shardings are read as the fields of a `Sharding`, which is defined on top of this.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tensorflow.compiler.xla import xla_data_pb2

from meshwright.framework.sharding.mesh import DeviceMesh, SubAxis, places_in

if TYPE_CHECKING:
    from meshwright.framework.sharding.sharding import Sharding

_OpSharding = xla_data_pb2.OpSharding
_ONE_DEVICE = "{maximal device=0}"
# A list of more devices is not written: meshes of names in place of axes have many.
_LISTED = 2**12
_MANUAL, _REPLICATED = "manual", "replicated"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiles:
    """XLA's tile assignment.

    Args:
      devices: device ids by shard: a dim for each of the tensor's, then `groups`.
      groups: the meaning of each further dim: devices of a `manual` subgroup, or
        devices among which a shard is `replicated`.
    """

    devices: np.ndarray
    groups: tuple[str, ...]


def place_along(mesh: DeviceMesh, axes: Sequence[str]) -> np.ndarray:
    """The index of each device along `axes` together, an array of the mesh's shape."""
    place = np.zeros(mesh.shape, int)
    for axis in axes:
        place = place * mesh.axis_size(axis) + mesh.place_along(axis)
    return place


def axis_groups(mesh: DeviceMesh, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The device groups of a collective along `axes`, counted by place in the mesh.

    In a group devices come in the order of their places along `axes`, major first.
    """
    # Devices of the same place along the axes come in the order of their groups.
    order = np.argsort(place_along(mesh, axes), axis=None, kind="stable")
    groups = order.reshape(mesh.axes_size(axes), -1).T
    return tuple(map(tuple, groups.tolist()))


def logical(sharding: Sharding, mesh: DeviceMesh) -> Sharding:
    """`sharding` with devices numbered by their index in `mesh`, as programs do."""
    devices = sharding.mesh
    if devices.device_ids is None and mesh.device_ids is None:
        return sharding
    places = places_in(mesh.ids, devices.ids)
    numbered = DeviceMesh(
        devices.axis_names, devices.shape, tuple(int(p) for p in places.flat)
    )
    return dataclasses.replace(sharding, mesh=numbered)


def _axes_of_place(
    mesh: DeviceMesh, place: np.ndarray, count: int
) -> tuple[str, ...] | None:
    """The axes along which devices have these indices; None if there are no such axes.

    Args:
      mesh: the device mesh.
      place: the indices, an int array of the mesh's shape, from 0 to `count` - 1.
      count: the number of indices.
    """
    weighted = []
    for digit in _digits(mesh):
        # What one step along the digit adds to the place is its weight in the number.
        one_step = [0] * len(mesh.shape)
        number = mesh.axis_names.index(digit.axis)
        one_step[number] = mesh.shape[number] // digit.end
        if weight := int(place[tuple(one_step)] - place.flat[0]):
            weighted.append((weight, digit))
    weighted.sort(key=lambda pair: -pair[0])
    axes = _joined(mesh, [digit for _, digit in weighted])
    if mesh.axes_size(axes) != count or not np.array_equal(
        place_along(mesh, axes), place
    ):
        return None
    return axes


@functools.lru_cache(maxsize=64)
def _digits(mesh: DeviceMesh) -> tuple[SubAxis, ...]:
    """The mesh axes cut into parts of prime size, major first."""
    digits = []
    for axis, size in zip(mesh.axis_names, mesh.shape, strict=True):
        before = 1
        while before < size:
            rest = size // before
            prime = next(p for p in range(2, rest + 1) if rest % p == 0)
            digits.append(SubAxis(axis, before, prime))
            before *= prime
    return tuple(digits)


def _joined(mesh: DeviceMesh, digits: Sequence[SubAxis]) -> tuple[str, ...]:
    """Names of the digits, with consecutive parts of an axis joined."""
    parts: list[SubAxis] = []
    for digit in digits:
        last = parts[-1] if parts else None
        if last and last.axis == digit.axis and last.end == digit.before:
            parts[-1] = SubAxis(last.axis, last.before, last.size * digit.size)
        else:
            parts.append(digit)
    return tuple(map(mesh.name, parts))


def _tiles(sharding: Sharding) -> _Tiles:
    mesh = sharding.mesh
    sizes, groups = list(sharding.splits()), []
    places = [place_along(mesh, axes) for axes in sharding.dims]
    if (count := mesh.axes_size(sharding.manual)) > 1:
        sizes.append(count)
        groups.append(_MANUAL)
        places.append(place_along(mesh, sharding.manual))
    if (replicas := mesh.size // math.prod(sizes)) > 1:
        sizes.append(replicas)
        groups.append(_REPLICATED)
    # By shard, and in mesh order where a shard has several devices.
    keys = [np.arange(mesh.size), *(place.flatten() for place in reversed(places))]
    devices = mesh.ids.flatten()[np.lexsort(keys)]
    return _Tiles(devices=devices.reshape(sizes), groups=tuple(groups))


def _all_manual(sharding: Sharding) -> bool:
    return 1 < sharding.mesh.size == sharding.mesh.axes_size(sharding.manual)


def to_op_sharding(sharding: Sharding) -> xla_data_pb2.OpSharding:
    """See `Sharding.to_op_sharding`."""
    if sharding.mesh.size > _LISTED and _is_plain(sharding):
        return _in_short(sharding)
    tiles = _tiles(sharding)
    if _all_manual(sharding):
        return _OpSharding(type=_OpSharding.MANUAL)
    if all(n == 1 for n in tiles.devices.shape[: sharding.rank]) and (
        _MANUAL not in tiles.groups
    ):
        return _OpSharding(type=_OpSharding.REPLICATED)
    proto = _OpSharding(type=_OpSharding.OTHER)
    proto.tile_assignment_dimensions.extend(tiles.devices.shape)
    proto.tile_assignment_devices.extend(int(d) for d in tiles.devices.flat)
    if _MANUAL in tiles.groups:
        proto.last_tile_dims.extend(
            _OpSharding.Type.Value(g.upper()) for g in tiles.groups
        )
    else:
        proto.replicate_on_last_tile_dim = bool(tiles.groups)
    return proto


def _is_plain(sharding: Sharding) -> bool:
    """Whether it is over entire axes, of devices in their order."""
    used = {axis for axes in sharding.dims for axis in axes}
    mesh = sharding.mesh
    in_order = mesh.device_ids is None and used <= set(mesh.axis_names)
    return in_order and not sharding.manual


def _in_short(sharding: Sharding) -> xla_data_pb2.OpSharding:
    """The tile assignment as a transposed count of devices, without a list of them."""
    mesh, used = sharding.mesh, [axis for axes in sharding.dims for axis in axes]
    if not used:
        return _OpSharding(type=_OpSharding.REPLICATED)
    rest = [axis for axis in mesh.axis_names if axis not in used]
    proto = _OpSharding(type=_OpSharding.OTHER)
    proto.tile_assignment_dimensions.extend(sharding.splits())
    proto.replicate_on_last_tile_dim = mesh.axes_size(rest) > 1
    if proto.replicate_on_last_tile_dim:
        proto.tile_assignment_dimensions.append(mesh.axes_size(rest))
    proto.iota_reshape_dims.extend(mesh.shape)
    proto.iota_transpose_perm.extend(map(mesh.axis_names.index, used + rest))
    return proto


def _of_iota(
    mesh: DeviceMesh, tiles: Sequence[int], shape: Sequence[int], perm: Sequence[int]
) -> tuple[tuple[str, ...], ...] | None:
    """The axes of each dim of a tile assignment that is a transposed count of devices.

    None if these are no axes of the mesh.
    """
    digits = list(_digits(mesh)) if mesh.device_ids is None else []
    counted = _taken(digits, shape)
    if counted is None:
        return None
    ordered = [digit for p in perm or range(len(shape)) for digit in counted[p]]
    by_dim = _taken(ordered, tiles)
    return by_dim and tuple(_joined(mesh, part) for part in by_dim)


def _taken(digits: list[SubAxis], sizes: Sequence[int]) -> list[list[SubAxis]] | None:
    """The digits in runs whose products are `sizes`; None if there are no such runs."""
    left, runs = list(digits), []
    for size in sizes:
        run: list[SubAxis] = []
        while left and math.prod(digit.size for digit in run) < size:
            run.append(left.pop(0))
        if math.prod(digit.size for digit in run) != size:
            return None
        runs.append(run)
    return None if left else runs


def from_op_sharding(
    mesh: DeviceMesh, proto: xla_data_pb2.OpSharding, rank: int
) -> dict[str, Any]:
    """See `Sharding.from_op_sharding`."""
    if proto.type == _OpSharding.REPLICATED:
        return _fields(mesh, dims=((),) * rank)
    if proto.type == _OpSharding.MAXIMAL and [*proto.tile_assignment_devices] == [0]:
        return _of_one_device(mesh, rank)
    if proto.type == _OpSharding.MANUAL:
        return _fields(mesh, dims=((),) * rank, manual=mesh.axis_names)
    groups = tuple(_OpSharding.Type.Name(t).lower() for t in proto.last_tile_dims)
    if proto.replicate_on_last_tile_dim:
        groups = (_REPLICATED,)
    if proto.type != _OpSharding.OTHER or not {_MANUAL, _REPLICATED} >= {*groups}:
        kind = _OpSharding.Type.Name(proto.type).lower()
        raise ValueError(f"sharding of kind {kind} {groups} is not supported here")
    shape = list(proto.tile_assignment_dimensions)
    if proto.iota_reshape_dims:
        short = proto.iota_reshape_dims, proto.iota_transpose_perm
        by_dim = _of_iota(mesh, shape, *short)
        fits = groups in ((), (_REPLICATED,)) and len(shape) == rank + len(groups)
        if by_dim is not None and fits:
            return _fields(mesh, dims=by_dim[:rank])
        devices = iota(proto.iota_reshape_dims, proto.iota_transpose_perm)
        devices = devices.reshape(shape)
    else:
        devices = np.array(proto.tile_assignment_devices, int).reshape(shape)
    return _from_tiles(mesh, _Tiles(devices=devices, groups=groups), rank)


def _of_one_device(mesh: DeviceMesh, rank: int) -> dict[str, Any]:
    """The sharding of an annotation over a mesh of one device."""
    if mesh.size > 1:
        raise ValueError(
            "it is over a mesh of one device, or of the mesh None in a function that "
            f"was traced before, outside of programs, and the program's ({mesh}) has "
            f"{mesh.size}: give the plan, or the annotation, the program's mesh"
        )
    return _fields(mesh, dims=((),) * rank)


def _from_tiles(mesh: DeviceMesh, tiles: _Tiles, rank: int) -> dict[str, Any]:
    ids = tiles.devices.flatten()
    if sorted(ids) != sorted(mesh.ids.flat):
        raise ValueError(
            f"it splits over {ids.size} devices, {ids.min()} to {ids.max()}, and the "
            f"mesh ({mesh}) has {mesh.size}: two meshes are in use. Annotate with the "
            "program's mesh (over some of its axes by mesh_split), or compile for the "
            "annotation's"
        )
    if tiles.devices.ndim != rank + len(tiles.groups):
        raise ValueError(
            f"its tile assignment {list(tiles.devices.shape)} does not fit rank {rank}"
        )
    return _over_axes(mesh, tiles, rank) or _reordered(mesh, tiles, rank)


def _over_axes(mesh: DeviceMesh, tiles: _Tiles, rank: int) -> dict[str, Any] | None:
    """The sharding over the axes of `mesh`, if they give its device order."""
    dims: list[tuple[str, ...]] = []
    manual: tuple[str, ...] = ()
    # The index in the tile assignment of each device, in the mesh's order.
    where = places_in(tiles.devices, mesh.ids)
    places = np.unravel_index(where, tiles.devices.shape)
    for dim, (place, count) in enumerate(zip(places, tiles.devices.shape, strict=True)):
        if dim >= rank and tiles.groups[dim - rank] == _REPLICATED:
            continue  # Devices with the same shard may come in any order.
        axes = _axes_of_place(mesh, place, count)
        if axes is None:
            return None
        if dim < rank:
            dims.append(axes)
        else:
            manual += axes
    return _fields(mesh, dims=tuple(dims), manual=manual)


def _reordered(mesh: DeviceMesh, tiles: _Tiles, rank: int) -> dict[str, Any]:
    """The sharding over the axes of `mesh`, with its devices in the required order."""
    free = list(_digits(mesh))
    dims: list[tuple[str, ...]] = []
    for count in tiles.devices.shape:
        chosen = []
        while math.prod(digit.size for digit in chosen) < count:
            left = count // math.prod(digit.size for digit in chosen)
            digit = next(d for d in free if left % d.size == 0)
            free.remove(digit)
            chosen.append(digit)
        dims.append(_joined(mesh, chosen))
    place = np.zeros(mesh.shape, int)
    for axes in dims:
        place = place * mesh.axes_size(axes) + place_along(mesh, axes)
    ids = tuple(int(i) for i in tiles.devices.flatten()[place.flatten()])
    manual = [
        axis
        for axes, group in zip(dims[rank:], tiles.groups, strict=True)
        for axis in axes
        if group == _MANUAL
    ]
    ordered = DeviceMesh(mesh.axis_names, mesh.shape, ids)
    return _fields(ordered, dims=tuple(dims[:rank]), manual=tuple(manual))


def _fields(
    mesh: DeviceMesh, *, dims: tuple, manual: tuple[str, ...] = ()
) -> dict[str, Any]:
    return {"mesh": mesh, "dims": dims, "manual": manual}


def to_hlo(sharding: Sharding) -> str:
    """See `Sharding.to_hlo`."""
    proto = to_op_sharding(sharding)
    if proto.type == _OpSharding.MANUAL:
        return "{manual}"
    if proto.type == _OpSharding.REPLICATED:
        return "{replicated}"
    tiles = ",".join(map(str, proto.tile_assignment_dimensions))
    ids = ",".join(map(str, proto.tile_assignment_devices))
    last = " last_tile_dim_replicate" if proto.replicate_on_last_tile_dim else ""
    if proto.last_tile_dims:
        names = [_OpSharding.Type.Name(t).lower() for t in proto.last_tile_dims]
        last = f" last_tile_dims={{{', '.join(names)}}}"
    return f"{{devices=[{tiles}]{ids}{last}}}"


_HLO = re.compile(
    r"\{devices=\[(?P<tiles>[\d,]+)\]"
    r"(?:<=\[(?P<iota>[\d,]+)\](?:T\((?P<perm>[\d,]+)\))?|(?P<ids>[\d,]+))"
    r"(?P<last> last_tile_dim_replicate)?"
    r"(?: last_tile_dims=\{(?P<groups>[a-z, ]*)\})?\}"
)


@functools.lru_cache(maxsize=4096)
def from_hlo(mesh: DeviceMesh, text: str, rank: int) -> dict[str, Any]:
    """See `Sharding.from_hlo`."""
    if text == "{replicated}":
        return _fields(mesh, dims=((),) * rank)
    if text == _ONE_DEVICE:
        return _of_one_device(mesh, rank)
    if text == "{manual}":
        return _fields(mesh, dims=((),) * rank, manual=mesh.axis_names)
    match = _HLO.fullmatch(text)
    groups = tuple(match["groups"].split(", ")) if match and match["groups"] else ()
    if match is None or not {_MANUAL, _REPLICATED} >= {*groups}:
        raise ValueError(
            f"sharding {_short(text)} is of a kind that is not supported here"
        )
    if match["ids"]:
        ids = np.array(ints(match["ids"]))
    else:
        short = ints(match["iota"]), ints(match["perm"] or "")
        by_dim = _of_iota(mesh, ints(match["tiles"]), *short)
        fits = not groups and len(by_dim or ()) == rank + bool(match["last"])
        if by_dim is not None and fits:
            return _fields(mesh, dims=by_dim[:rank])
        ids = iota(ints(match["iota"]), ints(match["perm"] or ""))
    tiles = _Tiles(
        devices=ids.reshape(ints(match["tiles"])),
        groups=(_REPLICATED,) if match["last"] else groups,
    )
    try:
        return _from_tiles(mesh, tiles, rank)
    except ValueError as e:
        raise ValueError(f"sharding {_short(text)}: {e}") from None


def iota(shape: Sequence[int], perm: Sequence[int] = ()) -> np.ndarray:
    """The device ids that XLA abbreviates as `<=[2,4]T(1,0)`; as is without `perm`."""
    ids = np.arange(math.prod(shape)).reshape(tuple(shape))
    return ids.transpose(tuple(perm)) if perm else ids


def _short(text: str) -> str:
    """Abbreviates a sharding's text: device numbers of a pod would fill pages."""
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-17:]}"


def ints(text: str) -> list[int]:
    """The numbers in `2,3,4`; none in an empty text."""
    return [int(n) for n in text.split(",") if n]


def to_sdy(sharding: Sharding) -> str:
    """See `Sharding.to_sdy`."""
    entries = []
    for dim, axes in enumerate(sharding.dims):
        names = [_sdy_axis(sharding.mesh, axis) for axis in axes]
        names += ["?"] if dim in sharding.unspecified else []
        entries.append("{" + ", ".join(names) + "}")
    return f"[{', '.join(entries)}]"


def _sdy_axis(mesh: DeviceMesh, axis: str) -> str:
    part = mesh.part(axis)
    return f'"{part.axis}"{mesh.name(part).removeprefix(part.axis)}'


_SDY_DIMS = re.compile(r"\[(?P<dims>(?:\{[^{}]*\}(?:, )?)*)\]")
_SDY_AXIS = re.compile(r'"(?P<axis>[^"]+)"(?P<part>:\(\d+\)\d+)?')


def from_sdy(mesh: DeviceMesh, text: str) -> dict[str, Any]:
    """See `Sharding.from_sdy`."""
    match = _SDY_DIMS.search(text)
    if match is None or "unreduced=" in text:
        raise ValueError(f"{text} is no Shardy sharding that is supported here")
    entries = re.findall(r"\{([^{}]*)\}", match["dims"])
    dims = tuple(
        tuple(a["axis"] + (a["part"] or "") for a in _SDY_AXIS.finditer(entry))
        for entry in entries
    )
    unspecified = tuple(d for d, entry in enumerate(entries) if entry.endswith("?"))
    return {"mesh": mesh, "dims": dims, "unspecified": unspecified}
