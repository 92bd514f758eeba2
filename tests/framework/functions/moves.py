"""Watches what moves between the host and a mesh."""

import numpy as np

from meshwright.framework.compiler.boundary.arguments import Arguments


def watched(monkeypatch, *modules):
    """Two lists that get the shapes of values put on a mesh, and of those fetched.

    Args:
      monkeypatch: the test's.
      *modules: those whose `to_host` is watched.
    """
    placed, fetched = [], []
    put = Arguments.put

    def watched_put(self, index, value):
        placed.append(np.shape(value))
        return put(self, index, value)

    monkeypatch.setattr(Arguments, "put", watched_put)
    for module in modules:

        def watched_to_host(array, to_host=module.to_host):
            fetched.append(array.shape)
            return to_host(array)

        monkeypatch.setattr(module, "to_host", watched_to_host)
    return placed, fetched
