"""The shape of the house: who imports whom, what is pinned, what is installed."""

import ast
import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = ("framework", "layers", "tasks", "params", "trainers")

# Each part, and which others of ours it may import. A file belongs to the first part
# that it lies in; "framework" is what lies on no floor: its public face.
MAY_IMPORT = {
    "framework.nested_map": (),
    "framework.sizes": (),
    "framework.markup": (),
    "framework.devices": ("framework.sharding",),
    "framework.sharding": ("framework.nested_map", "framework.markup"),
    "framework.compiler": (
        "framework.nested_map",
        "framework.sizes",
        "framework.markup",
        "framework.devices",
        "framework.sharding",
    ),
    "framework.functions": (
        "framework.sizes",
        "framework.devices",
        "framework.sharding",
        "framework.compiler",
    ),
    "framework.modeling": ("framework.nested_map", "framework.sharding"),
    "framework.showing": (
        "framework.sizes",
        "framework.markup",
        "framework.sharding",
        "framework.compiler",
        "framework.functions",
    ),
    "framework": ("framework",),
    "layers": ("framework",),
    "tasks": ("framework", "layers"),
    "trainers": ("framework", "layers", "tasks"),
}
COMPILER_INTERFACES = ("jaxlib", "jax.extend", "jax.interpreters", "jax._src")
# A child process in which XLA compiles imports nothing of ours.
BRIDGES = ("framework/compiler/xla/jax_bridge.py", "framework/compiler/xla/child.py")
# MLIR's own Python form, for rewriting a module.
MLIR = ("jax.extend.mlir", "jaxlib.mlir")
# Distributions that are imported under another name; jax pins its jaxlib.
IMPORTED_AS = {
    "absl": "absl-py",
    "gin": "gin-config",
    "jaxlib": "jax",
    "orbax": "orbax-checkpoint",
}


def python_files(*folders: str) -> list[str]:
    return sorted(
        file.relative_to(ROOT).as_posix()
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
    )


def under(name: str, parents: tuple[str, ...]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def imports(source: str, *, late: bool = True) -> list[str]:
    """Dotted names that a source imports, or reads off jax as attributes.

    Without `late`, neither what a function imports nor what is tried: that it may be
    missing is provided for.
    """
    faults = []
    nodes = list(ast.walk(ast.parse(source)))
    around = (n for n in nodes if isinstance(n, ast.FunctionDef | ast.Try))
    later = {id(node) for block in around for node in ast.walk(block)}
    tried = {
        alias.name
        for node in nodes
        if isinstance(node, ast.Import) and id(node) in later
        for alias in node.names
    }
    for node in nodes:
        module = getattr(node, "module", None) or ""
        if not late and (id(node) in later or module.split(".")[0] in tried):
            continue
        if isinstance(node, ast.Import):
            faults += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            faults += [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            faults += [name] if under(name, COMPILER_INTERFACES) else []
    return faults


def faults(file: str, source: str) -> list[str]:
    """What the imports of a file in one of the rooms break, in words."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    part = next(part for part in MAY_IMPORT if under(module, (part,)))
    allowed = (part, *MAY_IMPORT[part])
    broken = []
    for name in imports(source):
        ours = name.removeprefix("meshwright.")
        if name.startswith(".") or name.split(".")[0] in ROOMS:
            broken.append(f"{file} imports {name}: write meshwright.<room>.<module>")
        elif ours != name and not under(ours, allowed):
            broken.append(f"{file} imports {name}: {part} imports only {allowed}")
        elif part == "framework.compiler" and under(name, MLIR):
            continue
        elif under(name, COMPILER_INTERFACES) and file not in BRIDGES:
            broken.append(f"{file} uses {name}: only {BRIDGES[0]} may")
    return broken


def setup_argument(name: str):
    """The literal that setup.py hands to setup() under a name."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    return next(
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == name
    )


def requirements(*extras: str) -> list[Requirement]:
    """Direct dependencies: those of the package and those of the named extras."""
    by_extra = setup_argument("extras_require")
    texts = setup_argument("install_requires") + sum((by_extra[e] for e in extras), [])
    return [Requirement(text) for text in texts]


ALL_REQUIREMENTS = requirements(*setup_argument("extras_require"))


def test_rooms_import_only_what_they_may():
    files = python_files(*ROOMS)
    assert len(files) > 20, "the rooms were not found"
    found = [line for file in files for line in faults(file, (ROOT / file).read_text())]
    assert not found, "\n".join(found)


def test_the_table_of_rooms_says_what_they_may_import():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\|( `framework/.*\w(?:/|\.py)` )\|.*\|(.*)\|$", text, re.M)
    in_the_table = {
        part.strip("/").removesuffix(".py").replace("/", "."): tuple(
            f"framework.{name}" for name in re.findall(r"\w+", allowed)
        )
        for parts, allowed in rows
        for part in re.findall(r"`(.*?)`", parts)
    }
    in_the_framework = {p: a for p, a in MAY_IMPORT.items() if "framework." in p}
    assert in_the_table == in_the_framework


@pytest.mark.parametrize(
    "file, source",
    [
        ("framework/nested_map.py", "import meshwright.framework.sharding.mesh"),
        ("framework/sharding/mesh.py", "from meshwright.framework import NestedMap"),
        (
            "framework/sharding/mesh.py",
            "import meshwright.framework.compiler.lowering.lower",
        ),
        ("framework/compiler/x.py", "from meshwright.framework.modeling import layer"),
        ("framework/functions/x.py", "from meshwright.framework.modeling import ema"),
        ("framework/modeling/x.py", "from meshwright.framework.compiler import lower"),
        ("framework/testing.py", "from meshwright.layers import linear"),
        ("layers/experts/moe.py", "from meshwright.tasks.task import Task"),
        ("tasks/task.py", "def f():\n    import meshwright.trainers.training.loop"),
        ("trainers/training/loop.py", "from framework.sharding import mesh"),
        ("trainers/training/loop.py", "from . import state"),
        ("framework/compiler/lowering/lower.py", "from jax.interpreters import mlir"),
        ("framework/compiler/lowering/lower.py", "from jax import extend"),
        ("trainers/training/loop.py", "import jaxlib"),
        ("framework/sharding/mesh.py", "from jaxlib.mlir.dialects import sdy"),
        ("trainers/training/loop.py", "import jax\njax._src.core.jaxpr_as_fun"),
    ],
)
def test_a_forbidden_import_is_found(file, source):
    assert faults(file, source)


@pytest.mark.parametrize(
    "file, source",
    [
        ("framework/__init__.py", "from meshwright.framework.compiler import lower"),
        ("framework/sharding/mesh.py", "import meshwright.framework.nested_map"),
        ("framework/functions/x.py", "from meshwright.framework.compiler import x"),
        ("framework/modeling/adam.py", "import meshwright.framework.modeling.layer"),
        ("trainers/train.py", "from meshwright.framework import NestedMap"),
        (BRIDGES[0], "from jax.interpreters import mlir\nimport jaxlib"),
        ("framework/compiler/x.py", "from jaxlib.mlir.dialects import sdy"),
        ("trainers/training/loop.py", "import jax\njax.extended, jax.profiler.trace"),
    ],
)
def test_an_allowed_import_is_let_through(file, source):
    assert not faults(file, source)


def test_files_stay_small():
    files = python_files(*ROOMS, "benchmarks", "tests")
    lines = {file: (ROOT / file).read_text().count("\n") for file in files}
    long = {file: n for file, n in lines.items() if n > 500}
    assert not long, f"more than 500 lines, to be split: {long}"


@pytest.mark.parametrize("late", [False, True])
def test_every_third_party_import_is_declared(late):
    """What is imported late, when it is needed, may belong to an extra."""
    known = ALL_REQUIREMENTS if late else requirements()
    declared = {canonicalize_name(r.name) for r in known}
    ours_or_python = {"meshwright", *sys.stdlib_module_names}
    imported = {
        name.split(".")[0]
        for file in python_files(*ROOMS)
        for name in imports((ROOT / file).read_text(), late=late)
    }
    undeclared = {
        name
        for name in imported - ours_or_python
        if canonicalize_name(IMPORTED_AS.get(name, name)) not in declared
    }
    assert not undeclared, "add to install_requires in setup.py, and to CONTRIBUTING.md"


def test_every_dependency_is_pinned_within_its_bounds():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines()[1:]:
        assert re.fullmatch(r"[\w.-]+==[\w.]+", line), f"not an exact pin: {line}"
        name, _, version = line.partition("==")
        pins[canonicalize_name(name)] = version
    for requirement in ALL_REQUIREMENTS:
        version = pins.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} has no pin: run `make constraints`"
        assert requirement.specifier.contains(version), f"{requirement} has {version}"


@pytest.mark.parametrize("name", sorted({r.name for r in ALL_REQUIREMENTS}))
def test_every_dependency_is_explained(name):
    table = (ROOT / "CONTRIBUTING.md").read_text()
    row = re.search(rf"^\| {re.escape(name)} \|.*\| *(\S.*?) *\|$", table, re.MULTILINE)
    assert row, f"CONTRIBUTING.md has no row that says why we need {name}"


def test_the_console_scripts_lead_to_functions():
    scripts = importlib.metadata.entry_points(group="console_scripts")
    ours = [script for script in scripts if script.dist.name == "meshwright"]
    assert {script.name for script in ours} == {
        "meshwright-export",
        "meshwright-generate",
        "meshwright-plan",
        "meshwright-train",
    }
    assert all(callable(script.load()) for script in ours)


def test_the_wheel_holds_every_file_of_the_rooms(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, tmp_path / room, ignore=ignored)
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"meshwright/{file.relative_to(ROOT).as_posix()}"
        for room in ROOMS
        for file in (ROOT / room).rglob("*")
        if file.suffix in (".py", ".gin", ".map", ".html", ".css", ".js")
    }
    for suffix in (".gin", ".map", ".html", ".css", ".js"):
        assert any(name.endswith(suffix) for name in expected)
    assert {n for n in names if n.startswith("meshwright/")} == expected
    assert any(name.endswith("/LICENSE") for name in names)
