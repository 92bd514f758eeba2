"""Volumes in memory, for those that read them again and again."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable

import numpy as np

from meshwright.tasks.segmentation.volume_files import Case, Volume


@dataclasses.dataclass(frozen=True, eq=False)
class KeptVolume:
    """A volume, and where its classes are."""

    volume: Volume

    @functools.cached_property
    def voxels(self) -> list[np.ndarray]:
        """Flat places of the voxels of each class there is but the background."""
        flat = self.volume.label.ravel()
        kinds = np.flatnonzero(np.bincount(flat))
        return [np.flatnonzero(flat == k).astype(np.uint32) for k in kinds if k > 0]

    @property
    def size(self) -> int:
        """Bytes."""
        arrays = [
            self.volume.image,
            self.volume.label,
            *self.__dict__.get("voxels", []),
        ]
        return sum(one.nbytes for one in arrays)


@dataclasses.dataclass(eq=False)
class _Slot:
    """A place for a volume, and who may load it."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    kept: KeptVolume | None = None


class VolumeCache:
    """The volumes used last, at most so many bytes, and at least one.

    Threads load different volumes at the same time, and each only once.

    Args:
      load: reads a case.
      limit: bytes.
    """

    def __init__(self, load: Callable[[Case], Volume], limit: int):
        self._load, self._limit = load, limit
        self._lock = threading.Lock()
        self._slots: collections.OrderedDict[Case, _Slot] = collections.OrderedDict()

    def get(self, case: Case) -> KeptVolume:
        """A volume, from memory if it is there; raises what loading does."""
        with self._lock:
            slot = self._slots.setdefault(case, _Slot())
            self._slots.move_to_end(case)
        with slot.lock:
            if slot.kept is None:
                slot.kept = KeptVolume(self._load(case))
        with self._lock:
            while len(self._slots) > 1 and self._size() > self._limit:
                self._slots.popitem(last=False)
        return slot.kept

    def _size(self) -> int:
        return sum(one.kept.size for one in self._slots.values() if one.kept)
