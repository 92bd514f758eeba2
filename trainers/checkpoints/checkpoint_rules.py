"""Which weights of another model's checkpoint become which weights of this model."""

from __future__ import annotations

import dataclasses
import enum
import re

import gin
from etils import epath

from meshwright.framework.modeling.checks import Checked
from meshwright.trainers.checkpoints.published.mapping_files import (
    TensorMapping,
    read_mapping,
)

_RULE = re.compile(
    r"(?P<source>\S+)\s+->\s+(?P<path>[^\s\[]+)(?:\[(?P<index>[^\]]+)\])?"
    r"(?P<changes>(?:\s+transpose)?(?:\s+reshape)?)"
)


class Missing(enum.Enum):
    """What becomes of weights for which the checkpoint has no array."""

    ERROR = "error"
    INITIALIZE = "initialize"


class Unused(enum.Enum):
    """What becomes of the checkpoint's arrays that go nowhere."""

    IGNORE = "ignore"
    ERROR = "error"


class Change(enum.Enum):
    """What is done to an array on its way; if both, then in this order."""

    TRANSPOSE = "transpose"
    """Reverses the order of its dims."""
    RESHAPE = "reshape"
    """Gives it the shape of its place, which has as many elements."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where an array of a checkpoint goes.

    Args:
      path: dotted path of the weight.
      index: into the weight's first dims, () for all of the weight.
      changes: what is done to the array.
    """

    path: str
    index: tuple[int, ...] = ()
    changes: tuple[Change, ...] = ()

    def __str__(self) -> str:
        return f"{self.path}[{', '.join(map(str, self.index))}]".removesuffix("[]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Where the arrays go whose names in the checkpoint match a pattern.

    Args:
      line: the text that the rule was parsed from.
      source: the pattern, which matches all of a name.
      path: the weight's path, with groups of the match.
      index: into the weight's first dims, with groups too; "" for none.
      changes: what is done to the array.
    """

    line: str
    source: re.Pattern
    path: str
    index: str
    changes: tuple[Change, ...]

    def place(self, name: str) -> Place:
        """Where the array goes whose `name` is matched by `source`.

        Raises:
          ValueError: an index is no number.
        """
        match = self.source.fullmatch(name)
        index = match.expand(self.index)
        try:
            numbers = tuple(int(number) for number in index.split(",")) if index else ()
        except ValueError:
            raise ValueError(
                f"the rule '{self.line}' makes {index!r} an index for {name}: it must "
                "be a number, or several with commas"
            ) from None
        return Place(path=match.expand(self.path), index=numbers, changes=self.changes)


def parse_rule(line: str) -> Rule:
    r"""The rule of a line such as `layer_(\d+)/kernel -> body.w[\1] transpose`.

    Raises:
      ValueError: the line reads otherwise, or does not begin with a regular expression.
    """
    match = _RULE.fullmatch(line)
    if match is None:
        raise ValueError(
            f"the rule '{line}' must read `name -> path`, `name -> path[1]`, or one of "
            "these with `transpose`, `reshape` or both behind"
        )
    try:
        source = re.compile(match["source"])
    except re.error as error:
        raise ValueError(
            f"the rule '{line}' begins with no regular expression: {error}"
        ) from None
    path, index = match["path"], match["index"] or ""
    groups = [int(group) for group in re.findall(r"\\(\d+)", path + index)]
    if max(groups, default=0) > source.groups:
        raise ValueError(
            f"the rule '{line}' has no group \\{max(groups)}: put parentheses around "
            "what it is to match"
        )
    return Rule(
        line=line,
        source=source,
        path=path,
        index=index,
        changes=tuple(map(Change, match["changes"].split())),
    )


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class InitializeFrom(Checked):
    r"""Weights of another model for a training to start from; it counts from step 0.

    Optimizer slots start afresh, and a moving average starts at these weights.

    A rule is a line `name -> path`: a regular expression for all of a name in the
    checkpoint, and the dotted path of a weight of this model, with `\1` for what the
    first group matched. `path[\1]` is one of the layers that `Repeat` stacks;
    `transpose` and `reshape` behind it change the array. The first rule that matches a
    name counts; an array without a rule keeps its name.

    Args:
      checkpoint: a model_dir, its folder of checkpoints, the prefix or folder of a
        TensorFlow checkpoint, the folder of a SavedModel, or a file of Keras: `.keras`,
        `.weights.h5`, or `.weights.json` with its parts beside it; or published weights
        in safetensors: their folder, a file, or an index.
      step: the step of a model_dir's checkpoint; None for the newest.
      part: the part of the state to take, "theta" or "ema".
      rules: lines as above.
      rules_file: a file of more such lines, with comments behind `#`; "" for none.
      mapping: a file that maps tensors to weights, for published weights of your own
        family (`mapping_files.py`); then config.json is not read. "" for the families
        of published models.
      only: regular expressions of paths; other weights are initialized as usual. ()
        for all.
      missing: "error" or "initialize", for weights that the checkpoint lacks.
      unused: "ignore" or "error", for arrays of the checkpoint that go nowhere; None:
        an error of published weights that are taken without rules and `only`, which
        have no more than the model.
      any_tokenizer: takes published weights of a vocabulary that has far more ids than
        `LanguageModel.text`, whose tokens then are not those of their tokenizer.

    Raises:
      ValueError: a field has none of these values; a line of the mapping cannot be
        read; there are rules beside it.
      OSError: the file of rules cannot be read.
    """

    checkpoint: str
    step: int | None = None
    part: str = "theta"
    rules: tuple[str, ...] = ()
    rules_file: str = ""
    mapping: str = ""
    only: tuple[str, ...] = ()
    missing: Missing | str = Missing.ERROR
    unused: Unused | str | None = None
    any_tokenizer: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.part not in ("theta", "ema"):
            raise ValueError(
                f"InitializeFrom.part is {self.part!r}; it must be 'theta' or 'ema'"
            )
        for name, kind in (("missing", Missing), ("unused", Unused)):
            if name == "unused" and self.unused is None:
                continue
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError:
                known = " or ".join(repr(value.value) for value in kind)
                raise ValueError(
                    f"InitializeFrom.{name} is {getattr(self, name)!r}; it must be "
                    f"{known}"
                ) from None
        for name in ("rules", "only"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"InitializeFrom.{name} must be a list of lines")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        try:
            for pattern in self.only:
                re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"InitializeFrom.only has {pattern!r}, no regular expression: {error}"
            ) from None
        rules = self.read_rules()
        if self.read_mapping() is not None and rules:
            raise ValueError(
                "InitializeFrom.mapping says where each tensor goes, and rules say it "
                "too: leave out one of them"
            )

    def takes(self, path: str) -> bool:
        """Whether the weight at a path is to be taken."""
        return not self.only or any(re.fullmatch(line, path) for line in self.only)

    def read_mapping(self) -> TensorMapping | None:
        """What the file of `mapping` says."""
        return read_mapping(self.mapping) if self.mapping else None

    def read_rules(self) -> list[Rule]:
        """The rules; those of the file come last."""
        lines = list(self.rules)
        if self.rules_file:
            lines += _lines(self.rules_file)
        bare = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
        return [parse_rule(line) for line in bare if line]


def _lines(file: str) -> list[str]:
    try:
        return epath.Path(file).read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"InitializeFrom.rules_file {file} is not in UTF-8: {error}"
        ) from None
