"""Where a file stands: small folders, unique names, and imports that go one way."""

import ast
import collections
import graphlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PRODUCT = ("framework", "layers", "tasks", "trainers")
ROOMS = (*PRODUCT, "benchmarks", "tests")
MOST_ENTRIES = 12


def code_files(*rooms: str) -> list[pathlib.Path]:
    return sorted(file for room in rooms for file in (ROOT / room).rglob("*.py"))


def module_of(file: pathlib.Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(file: pathlib.Path, modules: set[str]) -> set[str]:
    """Modules of `modules` that a file imports when it runs, not for types alone."""
    tree = ast.parse(file.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    rooms = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in for_types:
            continue
        parent = (node.module or "").removeprefix("meshwright.")
        for alias in node.names:
            name = f"{parent}.{alias.name}"
            rooms.add(name if name in modules else parent)
    return rooms & modules


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    """For each module of the product those that it imports."""
    files = {module_of(file): file for file in code_files(*PRODUCT)}
    return {module: imported(file, set(files)) for module, file in files.items()}


@pytest.mark.parametrize("room", ROOMS)
def test_a_folder_has_at_most_12_entries(room):
    """Files of data, such as kept texts, are not counted."""
    sizes = {}
    for folder in {file.parent for file in code_files(room)}:
        named = [e for e in folder.iterdir() if not e.name.startswith("_")]
        entries = [e for e in named if e.is_dir() or e.suffix == ".py"]
        sizes[folder.relative_to(ROOT).as_posix()] = len(entries)
    assert sizes
    large = {folder: n for folder, n in sizes.items() if n > MOST_ENTRIES}
    assert not large, f"more than {MOST_ENTRIES} entries: move some to a folder {large}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_file_name_is_unique_in_its_room(room):
    named = collections.defaultdict(list)
    for file in code_files(room):
        named[file.name].append(file.relative_to(ROOT).as_posix())
    shared = [
        " and ".join(files)
        for name, files in named.items()
        if len(files) > 1 and name not in ("__init__.py", "conftest.py")
    ]
    assert not shared, "rename one of:\n" + "\n".join(shared)


def test_no_two_files_import_each_other(arrows):
    assert sum(map(len, arrows.values())) > 100
    mutual = [(a, b) for a in arrows for b in arrows[a] if a < b and a in arrows[b]]
    assert not mutual, f"these import each other: {mutual}"


def folders_between(room: str, arrows) -> dict[str, set[str]]:
    """For each folder of a room the others that it imports from."""
    folder, depth = ROOT / room.replace(".", "/"), room.count(".") + 1
    between = collections.defaultdict(set)
    for here in arrows:
        for there in arrows[here]:
            if here.startswith(f"{room}.") and there.startswith(f"{room}."):
                a, b = here.split(".")[depth], there.split(".")[depth]
                if a != b and (folder / a).is_dir() and (folder / b).is_dir():
                    between[a].add(b)
    assert between
    return between


@pytest.mark.parametrize("room", [*PRODUCT, "framework.compiler"])
def test_folders_of_a_room_import_without_cycles(room, arrows):
    """Neither each other, nor by way of further folders."""
    graphlib.TopologicalSorter(folders_between(room, arrows)).prepare()


def test_nobody_imports_private_names():
    private = [
        f"{module_of(file)} imports {alias.name} from {node.module}"
        for file in code_files(*PRODUCT)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and "meshwright" in (node.module or "")
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert not private, "make the names public:\n" + "\n".join(private)
