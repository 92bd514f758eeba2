"""docs/internals/code.md names files that exist, in the order in which they run."""

import ast
import pathlib
import re
import sys

import tensorflow as tf

from meshwright.framework.compiler import passes
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.sharding import Sharding
from tests.framework.compiler.programs import MESH

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "internals" / "code.md").read_text()


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


def called(function: ast.FunctionDef) -> list[str]:
    """The names of functions that a function calls, in their order."""
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return [call.func.id for call in calls if isinstance(call.func, ast.Name)]


def test_all_passes_are_named_in_order():
    """Those that change the module or note something: `run_passes` names them first.

    `simplify`, which it calls, has the first of them.
    """
    tree = ast.parse(pathlib.Path(passes.__file__).read_text())
    made_in = {
        alias.name: node.module.removeprefix("meshwright.").replace(".", "/")
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    names = called(functions["run_passes"])
    first = names.index("simplify")
    names[first : first + 1] = called(functions["simplify"])
    files = dict.fromkeys(f"{made_in[n]}.py" for n in names if n in made_in)
    refuses = "framework/compiler/stablehlo/constraints.py"  # That is no pass.
    listed = named("## A function, compiled")
    listed = listed[listed.index("framework/compiler/passes.py") + 1 :]
    places = [
        next((n for n, name in enumerate(listed) if file.startswith(name)), file)
        for file in files
        if file != refuses
    ]
    assert places == list(range(len(places)))


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
