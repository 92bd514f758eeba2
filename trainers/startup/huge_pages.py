"""Memory of CPU programs in huge pages, where the system has them.

XLA's CPU backend takes the buffers of every call from malloc, which maps them anew: a
step of 5 GB touches a million pages of 4 KiB for the first time, each a fault. In pages
of 2 MiB they are some hundreds.
"""

from __future__ import annotations

import os
import pathlib
import sys

TUNABLE = "glibc.malloc.hugetlb"
_VARIABLE = "GLIBC_TUNABLES"
_ENABLED = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SINCE = (2, 35)  # Older versions of glibc do not know the tunable.


def use_huge_pages() -> None:
    """Starts this process again with huge pages for malloc, if it has none yet.

    The allocator reads the variable only as a process starts, so this comes before
    anything else. A value that the user set is kept: `glibc.malloc.hugetlb=0` is none.
    """
    given = os.environ.get(_VARIABLE, "")
    if TUNABLE in given or not has_huge_pages():
        return
    os.environ[_VARIABLE] = ":".join(filter(None, [given, f"{TUNABLE}=1"]))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, sys.orig_argv)


def has_huge_pages() -> bool:
    """Whether the kernel has huge pages and the C library can ask for them."""
    if not sys.platform.startswith("linux"):
        return False
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    numbers = version.split(".")[:2]
    if name != "glibc" or not all(number.isdigit() for number in numbers):
        return False
    try:
        enabled = _ENABLED.read_text()
    except OSError:
        return False
    return tuple(map(int, numbers)) >= _SINCE and "[never]" not in enabled
