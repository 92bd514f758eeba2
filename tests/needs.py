"""What some tests cannot do without."""

import importlib.util

import pytest

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu is not installed")
