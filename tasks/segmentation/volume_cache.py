"""Volumes in memory, for repeated reading."""

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
    """A volume, and the voxels of its classes."""

    volume: Volume

    @functools.cached_property
    def voxels(self) -> list[np.ndarray]:
        """Flat indices of the voxels of each class present but the background."""
        flat = self.volume.label.ravel()
        classes = np.flatnonzero(np.bincount(flat))
        return [np.flatnonzero(flat == k).astype(np.uint32) for k in classes if k > 0]

    @property
    def size(self) -> int:
        """Size in bytes."""
        arrays = [
            self.volume.image,
            self.volume.label,
            *self.__dict__.get("voxels", []),
        ]
        return sum(array.nbytes for array in arrays)


@dataclasses.dataclass(eq=False)
class _Slot:
    """A place for a volume, and a lock for loading it."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    kept: KeptVolume | None = None


class VolumeCache:
    """The last used volumes: `limit` bytes at most, but at least one volume.

    Threads load different volumes at the same time, and each only once.

    Args:
      load: reads a case.
      limit: most bytes to keep.
    """

    def __init__(self, load: Callable[[Case], Volume], limit: int):
        self._load, self._limit = load, limit
        self._lock = threading.Lock()
        self._slots: collections.OrderedDict[Case, _Slot] = collections.OrderedDict()

    def get(self, case: Case) -> KeptVolume:
        """A volume, from memory if it is there; raises as `load` does."""
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
        return sum(slot.kept.size for slot in self._slots.values() if slot.kept)
