"""Who took what: interactions of users and items, read from a file of ratings."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pathlib
from typing import Protocol, runtime_checkable

import gin
import numpy as np

from meshwright.tasks.input.places import on_disk

# The columns that are read of a file, as MovieLens names them.
_COLUMNS = ("userId", "movieId", "timestamp")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Interactions:
    """Pairs of users and items, both numbered from 0 on, with one held out per user.

    Args:
      user_count: number of users.
      item_count: number of items.
      user: int32 [P], users of the pairs to train on, sorted by user and then by item.
      item: int32 [P], items of the same pairs.
      held_out: int32 [users], the item that each user took last.
    """

    user_count: int
    item_count: int
    user: np.ndarray
    item: np.ndarray
    held_out: np.ndarray

    @classmethod
    def from_events(
        cls, user: np.ndarray, item: np.ndarray, time: np.ndarray, *, source: str
    ) -> Interactions:
        """Numbers users and items in the order of their ids, and holds out the last
        items.

        Of events at the same time, and of events of the same pair, the last one given
        counts.

        Args:
          user: int64 [N], ids; N is at least 1.
          item: int64 [N], ids.
          time: int64 [N].
          source: the name of the data, for messages.

        Raises:
          ValueError: a user has one item only; the message names it.
        """
        users, user = np.unique(user, return_inverse=True)
        items, item = np.unique(item, return_inverse=True)
        order = np.lexsort((time, user))  # It is stable.
        user, item = user[order], item[order]
        pair = user * len(items) + item
        _, from_end = np.unique(pair[::-1], return_index=True)
        kept = np.sort(len(pair) - 1 - from_end)
        user, item = user[kept], item[kept]
        counts = np.bincount(user, minlength=len(users))
        if counts.min() < 2:
            raise ValueError(
                f"{source}: user {users[counts.argmin()]} has one item only: the last "
                "item of each user is held out, so leave out users with fewer than two"
            )
        last = np.cumsum(counts) - 1
        held_out = item[last]
        user, item = np.delete(user, last), np.delete(item, last)
        order = np.lexsort((item, user))
        return cls(
            user_count=len(users),
            item_count=len(items),
            user=user[order].astype(np.int32),
            item=item[order].astype(np.int32),
            held_out=held_out.astype(np.int32),
        )

    @functools.cached_property
    def pairs(self) -> np.ndarray:
        """int64 [P], increasing: the training pairs as one number each."""
        return self._pair(self.user, self.item)

    @functools.cached_property
    def bounds(self) -> np.ndarray:
        """int64 [users + 1]: where each user's training pairs begin, and P."""
        return np.searchsorted(self.user, np.arange(self.user_count + 1))

    def are_trained_on(self, user: np.ndarray, item: np.ndarray) -> np.ndarray:
        """bool [N]: whether pairs of users and items, int32 [N], are training pairs."""
        pair = self._pair(user, item)
        index = np.searchsorted(self.pairs, pair)
        return self.pairs[np.minimum(index, len(self.pairs) - 1)] == pair

    def taken_by(self, user: int) -> np.ndarray:
        """int32: the items that a user took, with the held-out item at the end."""
        start, end = self.bounds[user : user + 2]
        return np.append(self.item[start:end], self.held_out[user])

    def sha256(self) -> str:
        """Digest of the training pairs."""
        return hashlib.sha256(self.pairs).hexdigest()

    def _pair(self, user: np.ndarray, item: np.ndarray) -> np.ndarray:
        return user.astype(np.int64) * self.item_count + item


@runtime_checkable
class InteractionFiles(Protocol):
    """A source of interactions, such as `RatingsFile` or `SyntheticInteractions`."""

    def read(self) -> Interactions:
        """All interactions, the same each time."""


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RatingsFile:
    """MovieLens' `ratings.csv`. Construction does not touch the file system.

    Its first line names the columns, among them userId, movieId and timestamp, in any
    order; their values are whole numbers. A user took the items that the user rated,
    whether the rating is good or bad.

    Args:
      path: the file.
    """

    path: str

    def read(self) -> Interactions:
        """The file's interactions; read once in a process.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: a column is missing; a line is shorter than the first, or has no
            number in a column; a user has one item only. The message names file and
            line.
        """
        return _read(on_disk(self.path, "RatingsFile.path"))


@functools.cache
def _read(path: str) -> Interactions:
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"no file {path!r}: set RatingsFile.path to MovieLens' ratings.csv, which "
            "is in the archives of https://grouplens.org/datasets/movielens"
        )
    try:
        events = _events(path)
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not in UTF-8: {e}") from e
    if not len(events):
        raise ValueError(f"{path} has no lines but the first: there is nothing to read")
    return Interactions.from_events(*events.T, source=path)


def _events(path: str) -> np.ndarray:
    """The events of a file, int64 [N, columns]."""
    with open(path, encoding="utf-8") as file:
        header = file.readline().strip().split(",")
    missing = [name for name in _COLUMNS if name not in header]
    if missing:
        raise ValueError(
            f"{path}, line 1: no column {' or '.join(missing)} among "
            f"{', '.join(header)}; the first line must name the columns"
        )
    columns = [header.index(name) for name in _COLUMNS]
    try:
        return np.loadtxt(
            path,
            np.int64,
            comments=None,
            delimiter=",",
            skiprows=1,
            usecols=columns,
            ndmin=2,
            # Other files are read line by line: NumPy 2.4 looks up any character in
            # C's tables of 256, which may end the process (3, U+BA330, U+F8 does).
            encoding="ascii",
        )
    except ValueError:
        return _checked(path, header, columns)


def _checked(path: str, header: list[str], columns: list[int]) -> np.ndarray:
    """int64 [N, columns], read line by line, to name the line that is wrong."""
    numbers = []
    lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[1:], start=2):
        values = line.split(",")
        if not line:
            continue
        if len(values) != len(header):
            raise ValueError(
                f"{path}, line {number}: {len(values)} columns in {line!r}, but the "
                f"first line names {len(header)}"
            )
        for column in columns:
            try:
                numbers.append(np.int64(int(values[column])))
            except (ValueError, OverflowError):
                raise ValueError(
                    f"{path}, line {number}: {header[column]} is {values[column]!r}, "
                    "which is no whole number of 64 bits"
                ) from None
    return np.array(numbers, np.int64).reshape(-1, len(columns))
