"""Runs code in a process of its own that has imported TensorFlow already."""

import multiprocessing
import os
import pathlib

# Forked from a process that has done the slow imports and started no backend.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tensorflow", "jax", "meshwright.layers", __name__])


def run(code: str, folder: pathlib.Path) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of Python code, from "/"."""
    files = [folder / "stdout", folder / "stderr"]
    process = _FORKS.Process(target=_run, args=(code, *map(str, files)))
    process.start()
    process.join()
    return process.exitcode, *(file.read_text() for file in files)


def _run(code: str, *files: str) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.chdir("/")
    exec(compile(code, "<snippet>", "exec"), {"__name__": "__main__"})
