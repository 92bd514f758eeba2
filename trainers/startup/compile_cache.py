"""Compiled programs are kept, so that the next start need not compile them.

The cache is JAX's persistent cache, in the user's cache folder or in one that is named.
It never stops a run: a program that cannot be read is compiled anew; one that cannot be
written, or that XLA compiles in less than 0.1 s, is not kept. Several processes that
run together keep none, unless a folder is named.
"""

from __future__ import annotations

import hashlib
import pathlib
import platform

from absl import logging

from meshwright.trainers.startup.files import writable

OFF = "off"
# XLA's programs for CPUs take from milliseconds to minutes.
_LEAST_SECONDS = 0.1
_MOST_BYTES = 4 << 30


def use(wanted: str | None, *, is_alone: bool = True) -> None:
    """Keeps and reuses the programs that JAX compiles in this process from now on.

    Args:
      wanted: a folder, or "off"; None for the user's cache folder, unless JAX has been
        given another or none, or several processes run together: their caches may
        differ, and processes must not wait in vain for a process that has nothing to
        compile.
      is_alone: whether this process runs the program by itself.
    """
    import jax

    from meshwright.framework.user_cache import user_cache

    given = jax.config.jax_compilation_cache_dir
    is_on = jax.config.jax_enable_compilation_cache
    if wanted == OFF:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if wanted is None and (given is not None or not is_on or not is_alone):
        return
    folder = pathlib.Path(wanted).expanduser() if wanted else user_cache("compiled")
    # XLA compiles for this very processor, and JAX's keys do not say which one it is.
    folder = folder / _processor()
    if reason := writable(folder):
        logging.warning(
            "compiled programs are not kept: %s cannot be written (%s); name another "
            "folder with --compile_cache, or switch it off with --compile_cache=off",
            folder,
            reason,
        )
        return
    _make_room(folder)
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)
    # Else a program could name the layers and source lines of another that is equal.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)


def _processor() -> str:
    """A short name for the kind of processor of this machine."""
    text = platform.machine() + platform.processor()
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        kinds = ("model name", "flags", "Features", "CPU part")
        text += "".join(sorted({line for line in lines if line.startswith(kinds)}))
    except OSError:
        pass  # No Linux.
    return f"{platform.machine()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _make_room(folder: pathlib.Path) -> None:
    """Removes programs unused for the longest time, if they take too much room."""
    try:
        programs = [(path, path.stat()) for path in folder.glob("*-cache")]
        programs.sort(key=lambda p: max(p[1].st_atime, p[1].st_mtime), reverse=True)
        total = 0
        for path, status in programs:
            total += status.st_size
            if total > _MOST_BYTES:
                path.unlink(missing_ok=True)
    except OSError as error:
        logging.warning("compiled programs are kept beyond %s: %s", folder, error)
