"""Eight virtual CPU devices for every test, set before JAX starts its backend."""

import ctypes
import gc
import os
import pathlib
import sys

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # For the processes that tests start.
# Binaries that tests start would otherwise share the user's compiled programs.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
# TF's own kernels are what tests compare with. On an AMD EPYC, TF 2.21's by oneDNN give
# garbage for small convolutions and batched products, without any of our code.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# Programs are compiled for one short run each; what partitions them comes before LLVM.
_QUICK = "--xla_backend_optimization_level=0"
if _QUICK not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{_QUICK} {os.environ.get('XLA_FLAGS', '')}".strip()
if sys.dont_write_bytecode:
    # Many tests start a process: TF takes 10 s to import without bytecode, 4 s with it.
    _KEPT = str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = _KEPT
    sys.dont_write_bytecode = False

import gin  # noqa: E402
import jax  # noqa: E402
from tensorflow.python.framework import ops  # noqa: E402

from meshwright.framework import set_platform  # noqa: E402
from tests.house.some_cases import left_cases, mark_of  # noqa: E402

set_platform("cpu", 8)


def pytest_collection_modifyitems(items):
    """Marks what `make test` leaves to `make test-all`; it leaves nothing new."""
    left = left_cases()
    for item in items:
        name, _, case = item.nodeid.partition("[")
        if item.get_closest_marker("always"):
            continue
        if mark_of(case.removesuffix("]")) in left.get(name, ()):
            item.add_marker("more")


@pytest.fixture(scope="module", autouse=True)
def _forget(request):
    """Clears gin's bindings before a module, and memory after it.

    It frees half of what a module's traced programs hold, some 17 MB each.
    JAX keeps what it lowered, which holds TF's graphs; TF keeps each custom gradient,
    which does too; and `functools.cache` what tests share. The other half is TF's
    runtime's, which keeps each function that TF2XLA compiled.
    """
    gradients = ops.gradient_registry._registry
    before = set(gradients)
    gin.clear_config()  # Another module's may be left, and locked.
    yield
    for shared in vars(request.module).values():
        if getattr(shared, "__module__", "") == request.module.__name__:
            getattr(shared, "cache_clear", lambda: None)()
    for name in set(gradients) - before:
        del gradients[name]
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
