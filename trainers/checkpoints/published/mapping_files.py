"""Mapping files: on each line a tensor of safetensors, and the weight here that it is.

    # What is behind this sign is a comment.
    model.norm.weight                   -> final_norm.scale
    model.layers.*.mlp.up_proj.weight   -> *.feed_forward.w_in    transpose

`*` stands for the number of a layer, from 0, and for where that layer's weights are. A
tensor is the weight as a matrix, its rows first: with `transpose` columns and rows
change places, with `flat` it has a single dim. Lines of weights that a model does not
have are passed over; all weights that it has need one.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re

from etils import epath

_LINE = re.compile(r"(?P<tensor>\S+)\s+->\s+(?P<weight>\S+)(?:\s+(?P<change>\S+))?")
_CHANGES = ("transpose", "flat")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MappingLine:
    """A line.

    Args:
      tensor: its name, with `*` for the number of a layer.
      weight: its dotted path, with `*` for where a layer's weights are.
      change: "transpose", "flat" or "".
    """

    tensor: str
    weight: str
    change: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorMapping:
    """Which tensors are which weights.

    Args:
      name: what has it, for messages.
      lines: in the order of the file.
    """

    name: str
    lines: tuple[MappingLine, ...]

    def tensor_of(self, weight: str) -> str | None:
        """The name of the tensor that is a weight of no layer, if there is one."""
        return next((x.tensor for x in self.lines if x.weight == weight), None)


def read_mapping(file: str) -> TensorMapping:
    """The mapping of a file.

    Raises:
      ValueError: it cannot be read, or a line of it, whose number the message says.
    """
    try:
        text = epath.Path(file).expanduser().read_text()
    except OSError as error:
        raise ValueError(
            f"the mapping {file} cannot be read ({error.strerror or error}): name a "
            "file of lines `tensor -> weight`"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the mapping {file} is not in UTF-8 ({error}): save it as plain text"
        ) from error
    lines: list[MappingLine] = []
    numbers: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if not line:
            continue
        parsed = _parsed(line, f"{file}:{number}: ")
        for name in (parsed.tensor, parsed.weight):
            if name in numbers:
                raise ValueError(
                    f"{file}:{number}: {name} is on line {numbers[name]} already: "
                    "leave out one of them"
                )
            numbers[name] = number
        lines.append(parsed)
    if not lines:
        raise ValueError(f"the mapping {file} has no line `tensor -> weight`: add some")
    return TensorMapping(name=file, lines=tuple(lines))


def _parsed(line: str, where: str) -> MappingLine:
    match = _LINE.fullmatch(line)
    change = "" if match is None else match["change"] or ""
    if match is None or change not in ("", *_CHANGES):
        raise ValueError(
            f"{where}`{line}` must read `tensor -> weight`, with "
            f"{' or '.join(_CHANGES)} behind it or nothing"
        )
    tensor, weight = match["tensor"], match["weight"]
    if tensor.count("*") > 1 or ("*" in tensor) != weight.startswith("*."):
        raise ValueError(
            f"{where}`{line}` must have `*` once in the tensor, for the number of a "
            "layer, where the weight begins with `*.`, and nowhere else"
        )
    if not all(part.isidentifier() for part in weight.removeprefix("*.").split(".")):
        raise ValueError(
            f"{where}{weight} is no path of a weight: write names with dots between "
            "them, such as final_norm.scale or *.attention.w_q"
        )
    return MappingLine(tensor=tensor, weight=weight, change=change)


def of_family(name: str) -> tuple[MappingLine, ...]:
    """The lines of a file that is beside this one, without its ending."""
    file = pathlib.Path(__file__).with_name(f"{name}.map")
    return read_mapping(str(file)).lines
