"""What some tests cannot do without."""

import importlib.util

import pytest

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
HAS_CUDA_PLUGIN = importlib.util.find_spec("jax_cuda12_plugin") is not None
libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu is not installed")
cuda_plugin = pytest.mark.skipif(
    not HAS_CUDA_PLUGIN, reason="JAX's CUDA plugin is not installed"
)
