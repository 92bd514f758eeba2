"""The pages of docs/reference that are made: gin files, what they can bind, and `mw`.

`make reference` writes them. A gin file's section is its opening comment and its text;
a configurable's, its docstring and a row for each parameter.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re
from collections.abc import Callable, Iterable

from gin import config as gin_config

import meshwright.layers
import meshwright.tasks  # noqa: F401  All that gin files can name is registered now.
from meshwright.trainers.experiment import experiment  # noqa: F401
from tests.house.docs.api_page import api_page

ROOT = pathlib.Path(__file__).parents[3]
REFERENCE = ROOT / "docs" / "reference"
PARAMS = ROOT / "params"
MADE = "<!-- Written by `make reference`. -->\n"
_BINDING = """\
A gin file binds a parameter by `Name.parameter = value`, and a flag does by
`--gin_param='Name.parameter = value'`. `@Name()` is an instance, `%NAME` a macro, and
`%Recompute.NOTHING` a member of an enum.
"""

GIN_FOLDERS = {
    "lm": "language models",
    "mt": "translation",
    "asr": "speech recognition",
    "seg": "segmentation",
    "image": "image classification",
    "rec": "recommendation",
    "layers": "parts of models, for other files to include",
    "plans": "sharding plans",
    "paper": "the models of the papers' tables",
}
CONFIGURABLES = {
    "experiment": (
        "An experiment",
        "What every job binds: the experiment, its plan, and where it starts from.",
        ("trainers.", "framework.sharding."),
    ),
    "optimizers": (
        "Optimizers, schedules, initializers",
        "How weights begin, and how they are updated. "
        "[Losses, optimizers, schedules](../programs/optimizers.md) introduces them.",
        ("framework.modeling.",),
    ),
    "layers": (
        "Layers",
        "What models are made of. [Layers](../programs/layers.md) introduces them.",
        ("layers.",),
    ),
    "tasks": (
        "Tasks and their inputs",
        "Models with a loss, metrics and data. "
        "[Tasks](../programs/tasks.md) introduces them.",
        ("tasks.",),
    ),
}


def pages() -> dict[str, str]:
    """Each page's text, by its path below docs/reference."""
    made = {f"gin_files/{folder}.md": _gin_page(folder) for folder in GIN_FOLDERS}
    for name in CONFIGURABLES:
        made[f"configurables/{name}.md"] = _configurables_page(name)
    made["programs/api.md"] = f"{MADE}\n{api_page(_escaped)}"
    return made


def gin_files(folder: str) -> list[pathlib.Path]:
    """A folder's gin files; those that run by themselves come first."""
    files = (PARAMS / folder).glob("*.gin")
    return sorted(files, key=lambda file: (command_of(file) is None, file.name))


def command_of(file: pathlib.Path) -> str | None:
    """The command in a gin file's opening comment, on one line."""
    text = re.sub(r" \\\n# +", " ", _comment(file))
    found = re.search(r"^# {5}(meshwright-.*)$", text, re.MULTILINE)
    return found[1] if found else None


def _comment(file: pathlib.Path) -> str:
    return re.match(r"(#.*\n)*", file.read_text())[0]


def _gin_page(folder: str) -> str:
    parts = [MADE, f"# `{folder}/`: {GIN_FOLDERS[folder]}\n"]
    for file in gin_files(folder):
        comment = _comment(file)
        rest = file.read_text().removeprefix(comment).strip()
        parts += [f"## {folder}/{file.name}\n", _about(file), f"```\n{rest}\n```\n"]
    return "\n".join(parts)


def _about(file: pathlib.Path) -> str:
    """A gin file's opening comment as Markdown."""
    lines = []
    for line in _comment(file).splitlines():
        text = re.sub("^# ?", "", line)
        if not text.startswith("    "):
            text = re.sub(r"\b\w+/\w+\.gin", _linked, _escaped(text.strip()))
            marked = re.sub(
                "^(Must be set|Commonly overridden|Measured):", r"**\1:**", text
            )
            lines += [""] if marked != text else []
            text = marked
        lines.append(text)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _linked(name: re.Match) -> str:
    """A gin file's name as a link to its section."""
    if not (PARAMS / name[0]).is_file():
        return name[0]
    anchor = re.sub("[/.]", "", name[0])
    return f"[{name[0]}]({name[0].partition('/')[0]}.md#{anchor})"


def _configurables_page(page: str) -> str:
    title, about, rooms = CONFIGURABLES[page]
    parts = [MADE, f"# {title}\n", f"{about}\n"]
    if page == "experiment":
        parts.append(_BINDING)
    for one in sorted(_configurables(rooms), key=_order):
        parts += [f"## {one.__name__}\n", _description(one), _table(one)]
    return "\n".join(parts)


def _configurables(rooms: Iterable[str]) -> list[Callable]:
    """What is registered with gin by modules of ours whose names begin so."""
    wrapped = [one.wrapped for _, one in gin_config._REGISTRY.items()]
    names = tuple(f"meshwright.{room}" for room in rooms)
    return [one for one in dict.fromkeys(wrapped) if one.__module__.startswith(names)]


def _order(one: Callable) -> tuple[bool, str]:
    return one.__name__ != "Experiment", one.__name__.lower()


def _description(one: Callable) -> str:
    text = inspect.getdoc(one) or ""
    text = re.split(r"^(?:Args|Raises|Returns|Attributes):", text, flags=re.MULTILINE)[
        0
    ]
    return _escaped(text).strip() + "\n"


def _table(one: Callable) -> str:
    """A row for each parameter: its name and default, and its meaning."""
    meanings = _meanings(one)
    rows = [f"| `{one.__name__}.`, default | meaning |", "|---|---|"]
    for parameter in inspect.signature(one).parameters.values():
        default = parameter.default
        shown = "" if default is parameter.empty else f"<br>`{_gin(default)}`"
        meaning = _escaped(meanings.get(parameter.name, "")).replace("|", "\\|")
        rows.append(f"| `{parameter.name}`{shown} | {meaning} |")
    return "\n".join(rows) + "\n" if len(rows) > 2 else ""


def _meanings(one: Callable) -> dict[str, str]:
    """What the docstrings of a class and of its bases say of each parameter."""
    meanings = {}
    for owner in reversed(inspect.getmro(one) if inspect.isclass(one) else [one]):
        text = inspect.cleandoc(owner.__doc__ or "").partition("Args:\n")[2]
        text = re.split(r"^\S", text, flags=re.MULTILINE)[0]
        entries = re.findall(r"^  ([\w, ]+): (.*(?:\n    .*)*)", text, re.MULTILINE)
        for names, meaning in entries:
            for name in names.split(", "):
                meanings[name] = " ".join(meaning.split())
    return meanings


def _escaped(text: str) -> str:
    """A docstring's prose as Markdown: outside of code no `*` or `<` is markup."""
    parts = re.split(r"(`[^`\n]*`)", text)
    plain = [re.sub(r"([*<\[])", r"\\\1", part) for part in parts[::2]]
    return "".join(a + b for a, b in zip(plain, [*parts[1::2], ""], strict=True))


def _gin(value) -> str:
    """A default as a gin file has it."""
    if hasattr(value, "as_numpy_dtype"):
        return f"%{value.name}"
    if type(value).__name__ == "WeightUpdateSharding":
        return repr(value.value)
    if dataclasses.is_dataclass(value):
        return f"@{type(value).__name__}()"
    if inspect.isclass(value) or inspect.isfunction(value):
        return f"@{value.__name__}"
    return f"%{value}" if hasattr(value, "name") else repr(value)


def main() -> None:
    """Writes all pages."""
    for path, text in pages().items():
        file = REFERENCE / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    main()
