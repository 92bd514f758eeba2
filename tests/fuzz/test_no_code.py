"""Nothing that is read as data is run: no unpickling, no eval, no calls by name."""

import ast
import io
import pathlib
import pickle

import numpy as np
import pytest

from meshwright.trainers.experiment import config
from meshwright.trainers.experiment.experiment import Experiment
from tests.fuzz.child import Ending, read
from tests.fuzz.readers import READERS
from tests.fuzz.valid import VALID

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = ("framework", "layers", "tasks", "trainers")

# Modules that run what they read, and functions that do.
MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
MODULES += ("yaml", "torch", "code", "runpy")
FUNCTIONS = ("eval", "exec", "compile", "__import__")
# Of these only with what is read: np.load(path, allow_pickle=True) unpickles.
METHODS = (
    "read_pickle",
    "unsafe_load",
    "allow_pickle",
    "enable_unsafe_deserialization",
)


def runs_data(source: str) -> list[str]:
    """What in a source could run what it reads, as `line: code`."""
    calls = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").partition(".")[0]]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = [f"{node.func.id}()"]
        elif isinstance(node, ast.Attribute):
            names = [f".{node.attr}"]
        elif isinstance(node, ast.keyword) and ast.unparse(node.value) != "False":
            names = [f".{node.arg}"]
        wrong = {*MODULES, *(f"{f}()" for f in FUNCTIONS), *(f".{m}" for m in METHODS)}
        if wrong & {*names}:
            calls.append(f"{node.lineno}: {ast.unparse(node)}")
    return calls


def test_no_source_runs_what_it_reads():
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    assert len(files) > 20, "the rooms were not found"
    assert not {
        str(file): reasons for file in files if (reasons := runs_data(file.read_text()))
    }


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from yaml import load",
        "import torch.nn",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "exec(text)",
        "pandas.read_pickle(path)",
    ],
)
def test_what_runs_data_is_found(source):
    assert runs_data(source)


@pytest.mark.parametrize(
    "source",
    ["programs.eval(x)", "lowered.compile()", "np.load(f, allow_pickle=False)"],
)
def test_what_does_not_is_let_through(source):
    assert not runs_data(source)


class Payload:
    """Unpickled, it writes a file where the reader runs."""

    def __reduce__(self):
        return pathlib.Path.write_text, (pathlib.Path("pwned"), "pwned")


def planted() -> dict[str, bytes]:
    """The payload as a pickle, and in numpy's files of objects."""
    array, zipped = io.BytesIO(), io.BytesIO()
    objects = np.array([Payload()], object)
    np.save(array, objects, allow_pickle=True)
    np.savez(zipped, objects)
    return {
        "pkl": pickle.dumps(Payload()),
        "npy": array.getvalue(),
        "npz": zipped.getvalue(),
    }


@pytest.mark.parametrize("reader", sorted({*READERS} - {"flags"}))
@pytest.mark.parametrize("form", ["pkl", "npy", "npz"])
def test_a_pickle_in_the_place_of_a_file_is_refused(reader, form):
    (name, *_), content = VALID[reader], planted()[form]
    outcome = read(reader, {**VALID[reader], name: content})
    assert outcome.ending is Ending.REFUSED and not outcome.did, outcome


def test_a_planted_pickle_would_be_seen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(planted()["pkl"])
    assert (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import os", "`import os` is for modules that register classes"),
        ("from os import path", "no standard module does: take it out"),
        ("import webbrowser as w", "`import webbrowser as w` is for modules"),
        (
            "from __gin__ import dynamic_registration",
            "let a gin file call any function",
        ),
        ("Experiment.task = @os.system()", r"No configurable matching.*os\.system"),
        ("Experiment.task = __import__('os').getcwd()", "cannot be read as a value"),
        ("Experiment.seed = (lambda: 1)()", "Failed to parse token"),
    ],
)
def test_gin_text_calls_nothing_but_what_is_registered(line, message):
    with pytest.raises(config.ConfigError, match=f"(?s){message}"):
        config.load_and_build(Experiment, ["lm/stdlib_tiny"], [line])
