"""How one tensor lies on a device mesh, and its forms in XLA's languages."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Sequence

import numpy as np
from tensorflow.compiler.xla import xla_data_pb2

from meshwright.framework.sharding.mesh import DeviceMesh


@dataclasses.dataclass(frozen=True)
class Sharding:
    """The mesh axes that split each dim of a tensor.

    `dims[i]` are the axes splitting tensor dim i, major first; () leaves it unsplit.
    No axis at all is the paper's replicated, every axis its tiled, and some axes its
    partially tiled sharding (GSPMD 3.1).

    Raises:
      ValueError: an unknown axis, or one axis splitting the tensor twice.
    """

    mesh: DeviceMesh
    dims: tuple[tuple[str, ...], ...]

    def __post_init__(self):
        used: dict[str, int] = {}
        for dim, axes in enumerate(self.dims):
            for axis in axes:
                self.mesh.axis_size(axis)
                if axis in used:
                    raise ValueError(
                        f"mesh axis {axis!r} is used twice in one tensor: on dim "
                        f"{used[axis]} and on dim {dim}; an axis can split one dim only"
                    )
                used[axis] = dim

    @classmethod
    def from_dims_mapping(
        cls, mesh: DeviceMesh, dims_mapping: Sequence, rank: int | None = None
    ) -> Sharding:
        """Reads the paper's `dims_mapping`.

        Args:
          mesh: the device mesh.
          dims_mapping: for each tensor dim a mesh axis, as its index or its name, -1 or
            None for no split, or a sequence of axes for a dim split by several.
          rank: the tensor's rank, to check the mapping against.

        Raises:
          ValueError: wrong length, an axis that is not there, an axis used twice.
        """
        if rank is not None and len(dims_mapping) != rank:
            raise ValueError(
                f"dims_mapping {list(dims_mapping)} has {len(dims_mapping)} entries "
                f"but the tensor has rank {rank}; give one entry for each dim"
            )
        return cls(mesh, tuple(_axes(mesh, entry) for entry in dims_mapping))

    @classmethod
    def replicated(cls, mesh: DeviceMesh, rank: int) -> Sharding:
        """Every device holds the whole tensor."""
        return cls(mesh, ((),) * rank)

    @property
    def rank(self) -> int:
        return len(self.dims)

    def splits(self) -> tuple[int, ...]:
        """Into how many shards each dim is split."""
        return tuple(self.mesh.axes_size(axes) for axes in self.dims)

    def is_replicated(self) -> bool:
        return all(n == 1 for n in self.splits())

    def padded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """`shape` with each dim raised to a multiple of its number of shards."""
        pairs = zip(shape, self.splits(), strict=True)
        return tuple(-(-size // n) * n for size, n in pairs)

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one device's shard, the last shards padded to it."""
        pairs = zip(shape, self.splits(), strict=True)
        return tuple(-(-size // n) for size, n in pairs)

    def even(self, shape: Sequence[int]) -> Sharding:
        """This sharding without the axes of dims that they do not divide."""
        dims = tuple(
            axes if size % n == 0 else ()
            for axes, size, n in zip(self.dims, shape, self.splits(), strict=True)
        )
        return Sharding(self.mesh, dims)

    def __str__(self) -> str:
        """Text form, a dim's axes joined by `.`: `[X,_,Y]`, `[X.Y,_]`; `[]` scalar."""
        return "[" + ",".join(".".join(axes) or "_" for axes in self.dims) + "]"

    def to_op_sharding(self) -> xla_data_pb2.OpSharding:
        """XLA's OpSharding over the mesh's device ids."""
        proto = xla_data_pb2.OpSharding()
        if self.is_replicated():
            proto.type = xla_data_pb2.OpSharding.REPLICATED
            return proto
        proto.type = xla_data_pb2.OpSharding.OTHER
        tiles, devices = self._tile_assignment()
        proto.tile_assignment_dimensions.extend(tiles)
        proto.tile_assignment_devices.extend(int(d) for d in devices.flat)
        proto.replicate_on_last_tile_dim = len(tiles) > self.rank
        return proto

    def to_hlo(self) -> str:
        """HLO's text form over the mesh's device ids."""
        if self.is_replicated():
            return "{replicated}"
        tiles, devices = self._tile_assignment()
        last = " last_tile_dim_replicate" if len(tiles) > self.rank else ""
        ids = ",".join(str(d) for d in devices.flat)
        return f"{{devices=[{','.join(map(str, tiles))}]{ids}{last}}}"

    def _tile_assignment(self) -> tuple[list[int], np.ndarray]:
        used = [axis for axes in self.dims for axis in axes]
        rest = [axis for axis in self.mesh.axis_names if axis not in used]
        order = [self.mesh.axis_names.index(axis) for axis in used + rest]
        tiles = list(self.splits())
        if (replicas := self.mesh.axes_size(rest)) > 1:
            tiles.append(replicas)
        return tiles, self.mesh.ids.transpose(order).reshape(tiles)

    def to_sdy(self) -> str:
        """Shardy's dim shardings over the mesh's axes: `[{"X"}, {}, {"Y"}]`."""
        dims = ", ".join(
            "{" + ", ".join(f'"{axis}"' for axis in axes) + "}" for axes in self.dims
        )
        return f"[{dims}]"

    @classmethod
    def from_hlo(cls, mesh: DeviceMesh, text: str, rank: int) -> Sharding:
        """Reads an HLO sharding (`{devices=[2,1,4]0,1,...}`) back into mesh axes.

        Raises:
          ValueError: no assignment of mesh axes to dims gives this device order.
        """
        return _sharding_from_hlo(mesh, text, rank)


def _axes(mesh: DeviceMesh, entry) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, (int, np.integer)):
        if entry == -1:
            return ()
        if not 0 <= entry < len(mesh.shape):
            raise ValueError(
                f"dims_mapping entry {entry} is no axis of the mesh ({mesh}): use "
                f"0..{len(mesh.shape) - 1}, -1 for unsplit, or an axis name"
            )
        return (mesh.axis_names[entry],)
    return tuple(axis for one in entry for axis in _axes(mesh, one))


_HLO_SHARDING = re.compile(
    r"\{devices=\[(?P<tiles>[\d,]+)\]"
    r"(?:<=\[(?P<iota>[\d,]+)\](?:T\((?P<perm>[\d,]+)\))?|(?P<ids>[\d,]+))"
    r"(?P<last> last_tile_dim_replicate)?(?P<other>[^}]*)\}"
)


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


@functools.lru_cache(maxsize=4096)
def _sharding_from_hlo(mesh: DeviceMesh, text: str, rank: int) -> Sharding:
    if text == "{replicated}" or (text == "{maximal device=0}" and mesh.size == 1):
        return Sharding.replicated(mesh, rank)
    match = _HLO_SHARDING.fullmatch(text)
    if match is None or match["other"].strip():
        raise ValueError(f"sharding {text} is of a kind that is not supported here")
    tiles = _ints(match["tiles"])
    if match["ids"]:
        ids = np.array(_ints(match["ids"]))
    else:
        iota = _ints(match["iota"])
        ids = np.arange(np.prod(iota)).reshape(iota)
        if match["perm"]:
            ids = ids.transpose(_ints(match["perm"]))
    splits = tiles[:rank]
    # Devices that hold the same shard may come in any order.
    want = np.sort(ids.reshape([*splits, -1]), axis=-1)
    for dims in _factorings(mesh, splits):
        candidate = Sharding(mesh, dims)
        _, devices = candidate._tile_assignment()
        have = np.sort(devices.reshape([*splits, -1]), axis=-1)
        if np.array_equal(want, have):
            return candidate
    raise ValueError(
        f"sharding {text} cannot be written over the axes of the program's mesh "
        f"({mesh}): annotate with that mesh, or compile for the annotation's"
    )


def _factorings(mesh: DeviceMesh, splits: Sequence[int]) -> Iterator[tuple]:
    """All ways to give each dim axes whose sizes multiply to its number of shards."""
    axes = [axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1]

    def assign(dim: int, free: tuple[str, ...]) -> Iterator[tuple]:
        if dim == len(splits):
            yield ()
            return
        for count in range(len(free) + 1):
            for chosen in itertools.permutations(free, count):
                if mesh.axes_size(chosen) == splits[dim]:
                    left = tuple(a for a in free if a not in chosen)
                    for others in assign(dim + 1, left):
                        yield (chosen, *others)

    return assign(0, tuple(axes))
