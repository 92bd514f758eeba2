"""docs/code.md names files that exist, in the order in which their code runs."""

import pathlib
import re
import sys

import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.sharding import Sharding
from tests.framework.compiler.programs import MESH

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "code.md").read_text()


def named(section: str) -> list[str]:
    """The files and folders that a section names, in order."""
    return re.findall(
        r"`([\w/]+/(?:\w+\.py)?)`", PAGE.split(section)[1].split("\n## ")[0]
    )


def test_the_files_exist():
    sections = re.findall(r"^## .*", PAGE, re.MULTILINE)
    assert len(sections) == 4
    for section in sections:
        for name in named(section):
            assert (ROOT / name).exists(), name


def files_that_run(fn) -> list[str]:
    """Our files, in the order in which their code first runs."""
    files = {}

    def note(frame, event, arg):
        if event == "call":
            files.setdefault(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(None)
    paths = [pathlib.Path(name).resolve() for name in files]
    return [str(p.relative_to(ROOT)) for p in paths if p.is_relative_to(ROOT)]


def test_a_function_is_compiled_in_that_order():
    def fn(x):
        return tf.tanh(mesh_split(x, MESH, ["X", None]))

    spec, sharding = tf.TensorSpec([8, 4]), Sharding.parse(MESH, "[X,_]")
    files = files_that_run(
        lambda: compile_program(fn, [spec], MESH, in_shardings=[sharding])
    )
    walk = [name for name in named("## A function, compiled") if name in files]
    # Weight updates are not requested, and arguments come with the program's calls.
    assert len(walk) >= 9
    assert walk == sorted(walk, key=files.index)
