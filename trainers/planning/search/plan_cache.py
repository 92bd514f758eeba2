"""A cache of planning results, by content: a search that was cut short goes on.

A result is kept under a hash of all that determines it: the configuration in effect,
the topology, and the versions of the packages that compile and price, this package's
sources among them. So no result needs to be declared stale.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from meshwright.framework.user_cache import user_cache

log = logging.getLogger("absl")

_PACKAGE = pathlib.Path(__file__).parents[3]
_ROOMS = ("framework", "layers", "tasks", "trainers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCache:
    """A folder with a JSON file for each result.

    Args:
      folder: the folder, made at the first write.
    """

    folder: pathlib.Path

    def cached(self, key_parts: Mapping[str, str]) -> dict[str, Any] | None:
        """The result stored for these parts; None, with a warning, if it is damaged."""
        path = self.path(key_parts)
        try:
            entry = json.loads(path.read_text())
            if entry["key"] == dict(key_parts) and isinstance(entry["result"], dict):
                return entry["result"]
            problem = "it is for another key"
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
        log.warning("plan cache: %s is not used, %s", path, problem)
        return None

    def store(self, key_parts: Mapping[str, str], result: Mapping[str, Any]) -> None:
        """Stores a result of JSON's types; readers see all of it or nothing."""
        path = self.path(key_parts)
        text = json.dumps({"key": dict(key_parts), "result": dict(result)}, indent=1)
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise

    def path(self, key_parts: Mapping[str, str]) -> pathlib.Path:
        """The file of these parts."""
        text = json.dumps(dict(key_parts), sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def default_folder() -> pathlib.Path:
    """`meshwright/plans` in the user's cache folder."""
    return user_cache("plans")


def key_parts(config_text: str, topology: str) -> dict[str, str]:
    """All that determines an estimate.

    Args:
      config_text: the configuration in effect.
      topology: the topology's name.
    """
    return {"config": config_text, "topology": topology, **versions()}


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the packages that compile, and a hash of this package's sources."""
    names = ("jax", "jaxlib", "libtpu", "tensorflow")
    return {name: _version(name) for name in names} | {"meshwright": _sources()}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(f for room in _ROOMS for f in (_PACKAGE / room).rglob("*.py")):
        name = path.relative_to(_PACKAGE).as_posix()
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
