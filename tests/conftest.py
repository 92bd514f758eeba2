"""Eight virtual CPU devices for every test, set before JAX starts its backend."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # For the processes that tests start.

from meshwright.framework import set_platform  # noqa: E402

set_platform("cpu", 8)
