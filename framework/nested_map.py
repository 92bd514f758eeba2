"""Nested maps: the container for weights, slots, states and batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class NestedMap(dict):
    """A `dict` with attribute access; its values are leaves or further nested maps.

    Keys are identifiers, so that a leaf has one dotted path (`layer.w_q`), and no
    names of methods. A plain mapping as a value becomes a nested map. `tf.nest`
    flattens it; `jax.tree` takes it for a leaf.
    """

    def __init__(self, *args, **kwargs):
        super().__init__()
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str) or not key.isidentifier():
            raise ValueError(f"NestedMap key {key!r} is not an identifier")
        if hasattr(NestedMap, key):
            raise ValueError(f"NestedMap key {key!r} is the name of a method")
        if isinstance(value, Mapping) and not isinstance(value, NestedMap):
            value = NestedMap(value)
        super().__setitem__(key, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"NestedMap has no entry {name!r}; it has {sorted(self)}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def items_by_path(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yields (dotted path, leaf), sorted by key at each level."""
        for key in sorted(self):
            path = f"{prefix}.{key}" if prefix else key
            value = self[key]
            if isinstance(value, NestedMap):
                yield from value.items_by_path(path)
            else:
                yield path, value

    def leaves(self) -> list[Any]:
        """The leaves in the order of `items_by_path`, which is `tf.nest`'s."""
        return [leaf for _, leaf in self.items_by_path()]

    def map(self, fn: Callable[..., Any], *others: NestedMap) -> NestedMap:
        """Applies `fn` leaf by leaf; `others` must have this map's structure."""
        return self.map_with_path(lambda _, *leaves: fn(*leaves), *others)

    def map_with_path(
        self, fn: Callable[..., Any], *others: NestedMap, prefix: str = ""
    ) -> NestedMap:
        """Like `map`, with the leaf's dotted path as the first argument of `fn`."""
        for other in others:
            if set(other) != set(self):
                raise ValueError(
                    f"nested maps differ at {prefix or 'the root'!r}: "
                    f"{sorted(self)} against {sorted(other)}"
                )
        out = NestedMap()
        for key in sorted(self):
            path = f"{prefix}.{key}" if prefix else key
            value = self[key]
            peers = [other[key] for other in others]
            if isinstance(value, NestedMap):
                out[key] = value.map_with_path(fn, *peers, prefix=path)
            else:
                out[key] = fn(path, value, *peers)
        return out

    def pack(self, leaves) -> NestedMap:
        """A map of this structure holding `leaves`, in the order of `leaves()`."""
        leaves = list(leaves)
        if len(leaves) != len(self.leaves()):
            raise ValueError(
                f"{len(leaves)} leaves for a structure of {len(self.leaves())}"
            )
        remaining = iter(leaves)
        return self.map(lambda _: next(remaining))

    def get_path(self, path: str) -> Any:
        """The entry at a dotted path; KeyError if there is none."""
        node: Any = self
        for key in path.split("."):
            node = node[key]
        return node

    def set_path(self, path: str, leaf: Any) -> None:
        """Sets the entry at a dotted path; makes the nested maps that lead to it."""
        *folders, name = path.split(".")
        node = self
        for key in folders:
            node = node.setdefault(key, NestedMap())
        node[name] = leaf


def as_key(name: Any) -> str:
    """A name, such as that of a layer or a feature, as a nested map takes it."""
    key = re.sub(r"\W", "_", str(name))
    if not key.isidentifier() or hasattr(NestedMap, key):
        key = f"_{key}"
    return key
