"""What a config.json says of a model, compared with a model of ours.

A family has a list of facts. Each is a field here, read of our model or of one of its
layers, and what a config.json says of it: by a key, or by being of that family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.attention.mask_rules import MaskKind, NearMask
from meshwright.layers.basic.feed_forward import FeedForward
from meshwright.layers.basic.normalization import RMSNorm
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.stacks.sequential import Sequential
from meshwright.layers.stacks.shared_bias import SharedRelativeBias
from meshwright.layers.transformer import TransformerLayer
from meshwright.tasks.task import Task
from meshwright.tasks.text.language_model import LanguageModel
from meshwright.trainers.checkpoints.checkpoint_digests import CheckpointError

Config = Mapping[str, Any]  # With its family's defaults, as facts take it.
Value = Any | Callable[[Config], Any]


@dataclasses.dataclass(frozen=True)
class PlacedLayer:
    """A layer of a model, and where its weights are.

    Args:
      layer: the layer.
      path: dotted path of its weights.
      index: into the first dims of its weights, () where they are not stacked.
    """

    layer: TransformerLayer
    path: str
    index: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model as facts are read of it.

    Args:
      task: the language model.
      layers: in the stream's order.
    """

    task: LanguageModel
    layers: tuple[PlacedLayer, ...]

    @classmethod
    def of(cls, task: Task | None, *, any_parts: bool = False) -> Model:
        """The model of a task; with `any_parts`, of layers that no family has too.

        Raises:
          CheckpointError: no family has such parts; the message lists them.
        """
        if not isinstance(task, LanguageModel):
            raise CheckpointError(
                f"published weights are those of a LanguageModel, not of a "
                f"{type(task).__name__}: set InitializeFrom.rules, which say where "
                "each tensor goes"
            )
        layers = tuple(_placed(task.stack, "stack"))
        if any_parts:
            return cls(task, layers)
        problems = _foreign("LanguageModel.final_norm", task.final_norm, RMSNorm)
        for each in layers:
            for name, kind in _PARTS.items():
                part = getattr(each.layer, name, None)
                if part is None and name.endswith("post_norm"):
                    continue
                problems += _foreign(f"TransformerLayer.{name}", part, kind)
        if problems:
            raise CheckpointError(
                "no published family has such a model:"
                + "".join(f"\n  {problem}" for problem in dict.fromkeys(problems))
            )
        return cls(task, layers)


_PARTS = {
    "attention_norm": RMSNorm,
    "attention": MultiHeadAttention,
    "attention_post_norm": RMSNorm,
    "feed_forward_norm": RMSNorm,
    "feed_forward": FeedForward,
    "feed_forward_post_norm": RMSNorm,
}


def _foreign(field: str, part: Any, kind: type) -> list[str]:
    if isinstance(part, kind):
        return []
    given = type(part).__name__
    return [f"{field} is of class {given}: set it to @{kind.__name__}()"]


def _placed(stack: Any, path: str) -> list[PlacedLayer]:
    """The layers of a stack or of a single layer, in the stream's order."""
    if isinstance(stack, Pipeline):
        # A microbatch passes all stages before it comes to the next of their parts. The
        # last may be no layers: their number is that of the `Repeat`'s.
        stages, repeats = stack.num_stages, stack.num_repeats
        in_a_row = stack.layers_of_stage // repeats
        body = _placed(stack.stack.body, path)
        indices = [
            (stage, repeat * in_a_row + i)
            for repeat in range(repeats)
            for stage in range(stages)
            for i in range(in_a_row)
        ]
        indices = indices[: stack.stack.count]
        return [_at(each, index) for index in indices for each in body]
    if isinstance(stack, SharedRelativeBias):
        return _placed(stack.stack, f"{path}.stack")
    if isinstance(stack, Repeat):
        body = _placed(stack.body, path)
        return [_at(each, (i,)) for i in range(stack.count) for each in body]
    if isinstance(stack, Sequential):
        return [
            each
            for i, layer in enumerate(stack.layers)
            for each in _placed(layer, f"{path}.layer_{i}")
        ]
    return [PlacedLayer(stack, path)]


def _at(each: PlacedLayer, index: tuple[int, ...]) -> PlacedLayer:
    return dataclasses.replace(each, index=(*index, *each.index))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fact:
    """One thing that our model and a config.json have to agree on.

    Args:
      field: the field here, for messages.
      of: its value in a `Model`, or in one of its layers if `each`.
      said: what a config says of it; takes the config and, if `each`, the number of the
        layer.
      key: the config's key, for messages; "" if it follows from the family.
      keys: the keys and values that say it of a `Model`.
      each: whether it is a fact of each layer.
    """

    field: str
    of: Callable[[Any], Any]
    said: Callable[..., Any]
    key: str = ""
    keys: Callable[[Model], dict[str, Any]] = lambda model: {}
    each: bool = False

    def differences(self, model: Model, config: Config, family: str) -> list[str]:
        """One line where they do not agree, for the first layer that does not."""
        for number, layer in enumerate(model.layers if self.each else [model]):
            ours = self.of(layer.layer) if self.each else self.of(layer)
            theirs = self.said(config, number) if self.each else self.said(config)
            if ours != theirs:
                where = f"layer {number}: " if self.each else ""
                by = f"{self.key} in config.json" if self.key else f"a {family} model"
                return [f"{where}{self.field} is {ours}, but {by} has {shown(theirs)}"]
        return []


def shown(value: Any) -> str:
    """A value for messages, not longer than a line."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def by_key(
    key: str,
    field: str,
    of: Callable[[Any], Any],
    *,
    each: bool = False,
    null: Callable[[Config], Any] = lambda config: None,
) -> Fact:
    """A fact that a key says as it is.

    Args:
      key: the config's key.
      field: the field here.
      of: as in `Fact`.
      each: whether it is a fact of each layer; all layers have the same value.
      null: what null says, made of the config.
    """

    def said(config: Config, number: int = 0) -> Any:
        del number
        value = config.get(key)
        return null(config) if value is None else value

    def keys(model: Model) -> dict[str, Any]:
        return {key: of(model.layers[0].layer if each else model)}

    return Fact(field=field, of=of, said=said, key=key, keys=keys, each=each)


def implied(
    field: str, of: Callable[[Any], Any], value: Value, *, each: bool = False
) -> Fact:
    """A fact that follows from being of a family; `value` may be made of the config."""

    def said(config: Config, number: int = 0) -> Any:
        del number
        return value(config) if callable(value) else value

    return Fact(field=field, of=of, said=said, each=each)


def window(layer: TransformerLayer) -> int | str | None:
    """How many tokens a causal query sees, itself included; None for all.

    A text of the mask, if it is another than these.
    """
    mask = layer.attention.mask
    if mask is MaskKind.CAUSAL or mask == NearMask(right=0):
        return None
    if isinstance(mask, NearMask) and mask.right == mask.first == 0:
        return mask.left + 1
    return str(mask)


def check_numbers(config: Config, keys: Sequence[str], file: str) -> None:
    """Checks that a config has a number above 0 for each key.

    Raises:
      CheckpointError: it has something else, or nothing.
    """
    for key in keys:
        value = config.get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(
                f"{file} has {key} {shown(repr(value))}, which must be a number above "
                "0: take the "
                "config.json that was published with the weights"
            )
