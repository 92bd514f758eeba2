"""Runs BUNDLE/run_bundle.py, its first argument, where only jax and numpy are.

TensorFlow, Meshwright and what they bring cannot be imported; flatbuffers, which jax
needs and does not bring, only from the bundle.
"""

import runpy
import sys
from importlib.machinery import PathFinder

_MISSING = {"absl", "etils", "meshwright", "orbax", "tensorflow"}


class OnlyJax:
    """Finds nothing that a machine with jax alone has not."""

    def find_spec(self, name, path=None, target=None):
        result = None
        if name == "flatbuffers":
            ours = [folder for folder in sys.path if "packages" not in folder]
            result = PathFinder.find_spec(name, ours, target)
        if result is None and name in {*_MISSING, "flatbuffers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return result


sys.meta_path.insert(0, OnlyJax())
del sys.argv[0]
sys.path[0] = ""
runpy.run_path(sys.argv[0], run_name="__main__")
