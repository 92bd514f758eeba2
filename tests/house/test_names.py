"""Names in backquotes, in docstrings, comments and the heads of gin files, exist."""

from __future__ import annotations

import ast
import collections
import functools
import io
import re
import tokenize
from collections.abc import Iterator, Mapping

from tests.house.test_rooms import ROOMS, ROOT, code_files

_QUOTED = re.compile(r"`([^`\n]+)`")
_NAME = re.compile(r"[A-Za-z_][\w.]*(\(.*\))?")
_FIELD = re.compile(r"\b[A-Z]\w+\.\w+\b")
# Names of TensorFlow, XLA, Shardy and of formats of files.
OF_OTHERS = {
    "Defun",
    "GetNonPod2dMesh",
    "PartitionConvolutionWithSpatialDimensionHaloExchangeOnLHS",
    "SHA256SUMS",
    "estimated_cycles",
    "index_shuffle",
    "manual_computation",
    "sharding_constraint",
}


@functools.cache
def tokens() -> Mapping[str, tuple[tokenize.TokenInfo, ...]]:
    """The tokens of each source file, by its path."""
    by_path = {}
    for path in code_files(*ROOMS):
        text = path.read_text()
        where = str(path.relative_to(ROOT))
        by_path[where] = tuple(tokenize.generate_tokens(io.StringIO(text).readline))
    return by_path


def gin_lines() -> Iterator[tuple[str, str]]:
    """(file, line) of every shipped configuration."""
    for path in sorted((ROOT / "params").rglob("*.gin")):
        for line in path.read_text().splitlines():
            yield str(path.relative_to(ROOT)), line


def is_prose(token: tokenize.TokenInfo) -> bool:
    string = token.type == tokenize.STRING and token.string.startswith('"""')
    return string or token.type == tokenize.COMMENT


def quoted() -> Iterator[tuple[str, str]]:
    """(file, name in backquotes), and fields that the heads of gin files name.

    Code in backquotes that is no name is left out.
    """
    for where, listed in tokens().items():
        for token in filter(is_prose, listed):
            for name in _QUOTED.findall(token.string):
                if _NAME.fullmatch(name):
                    yield where, name.partition("(")[0]
    for where, line in gin_lines():
        if line.startswith("#"):
            yield from ((where, name) for name in _FIELD.findall(line))


@functools.cache
def known() -> frozenset[str]:
    """Identifiers, words of strings that are no docstrings, files and folders."""
    names = set(OF_OTHERS)
    for where, listed in tokens().items():
        names.update(where.removesuffix(".py").split("/"))
        for token in listed:
            if token.type in (tokenize.NAME, tokenize.STRING) and not is_prose(token):
                names.update(re.findall(r"\w+", token.string))
    for _, line in gin_lines():
        if not line.startswith("#"):
            names.update(re.findall(r"\w+", line))
    return frozenset(names)


@functools.cache
def members() -> Mapping[str, frozenset[str]]:
    """What classes have, those of the project that they inherit from included."""
    own_members, bases = collections.defaultdict(set), collections.defaultdict(set)
    for path in code_files(*ROOMS):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name].update(ast.unparse(base) for base in node.bases)
                own_members[node.name].update(_assigned(node))

    def all_of(name: str) -> set[str]:
        return own_members[name].union(
            *(all_of(base) for base in bases[name] & set(own_members))
        )

    return {name: frozenset(all_of(name)) for name in list(own_members)}


def _assigned(node: ast.ClassDef) -> Iterator[str]:
    for part in ast.walk(node):
        match part:
            case ast.FunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (t.id for t in targets if isinstance(t, ast.Name))
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                yield name


def exists(name: str) -> bool:
    parts = name.removesuffix(".py").split(".")
    owner = members().get(parts[-2]) if len(parts) > 1 else None
    return set(parts) <= known() and (not owner or parts[-1] in owner)


def test_names_that_do_not_exist_are_noticed():
    assert exists("Repeat.saved_names") and exists("tf.Module")
    assert not exists("Repeat.mesh_split") and not exists("_no".upper() + "_SUCH_NAME")


def test_names_in_backquotes_exist():
    missing = [f"{where}: `{name}`" for where, name in quoted() if not exists(name)]
    assert not missing, "\n".join(missing)
