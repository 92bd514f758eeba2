"""Which published tensor is which weight of a language model."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable

import numpy as np

from meshwright.framework.modeling.layer import WeightSpec
from meshwright.tasks.task import Task
from meshwright.trainers.checkpoints.checkpoint_digests import CheckpointError
from meshwright.trainers.checkpoints.checkpoint_manifest import bullet_list
from meshwright.trainers.checkpoints.checkpoint_rules import (
    Change,
    InitializeFrom,
    Missing,
    Place,
    Unused,
)
from meshwright.trainers.checkpoints.published.published_facts import Model, needed
from meshwright.trainers.checkpoints.published.published_families import (
    Family,
    family_of,
)
from meshwright.trainers.checkpoints.published.safetensors_files import (
    SafetensorsFiles,
)

log = logging.getLogger("absl")

_NUMBERS = ("hidden_size", "num_attention_heads", "num_hidden_layers")


@dataclasses.dataclass(frozen=True)
class PublishedTensor:
    """A tensor as it is published.

    Args:
      name: such as `model.norm.weight`.
      place: where it goes.
      shape: its own.
    """

    name: str
    place: Place
    shape: tuple[int, ...]

    def of(self, weight: np.ndarray) -> np.ndarray:
        """The tensor, made of the weight that it is a part of."""
        part = weight[self.place.index]
        if Change.TRANSPOSE in self.place.changes:
            return np.ascontiguousarray(part.reshape(self.shape[::-1]).T)
        return np.ascontiguousarray(part.reshape(self.shape))


def tensors_of(family: Family, model: Model) -> list[PublishedTensor]:
    """All tensors of a model, in the order of layers.

    Raises:
      CheckpointError: a weight of the model is none of the family's.
    """
    specs = dict(model.task.weights().items_by_path())
    found, used = [], set()

    def note(name: str, path: str, index: tuple[int, ...], change: str) -> None:
        if path in specs:
            used.add(path)
            place = Place(path=path, index=index)
            found.append(_tensor(name, place, change, specs[path]))

    lines = family.names()
    for name, path, change in lines:
        if "*" not in name:
            note(name, path, (), change)
    for number, layer in enumerate(model.layers):
        for name, path, change in lines:
            if "*" in name:
                path = path.replace("*", layer.path)
                note(name.replace("*", str(number)), path, layer.index, change)
    if others := sorted(specs.keys() - used):
        raise CheckpointError(
            f"{family.name} models have no tensors for these weights:"
            f"{bullet_list(others)}"
        )
    return found


def published_places(
    files: SafetensorsFiles,
    task: Task | None,
    source: InitializeFrom,
    is_chosen: Callable[[str], bool],
) -> dict[str, Place]:
    """Where the tensors of files go, by their names.

    Args:
      files: with the config.json that describes them.
      task: the language model that gets them.
      source: what becomes of what is missing or not used. Where weights may be missing,
        or only some are taken, a config.json of another model is no error.
      is_chosen: whether the weight at a path gets any.

    Raises:
      CheckpointError: the files are those of another model; the message lists why.
    """
    if files.config is None:
        raise CheckpointError(
            f"there is no {files.config_file}, which says what model the tensors are "
            "of: put the published one there, or set InitializeFrom.rules"
        )
    family = family_of(files.config, files.config_file)
    needed(files.config, _NUMBERS, files.config_file)
    model = Model.of(task)
    whole = source.missing is Missing.ERROR and not source.only
    if problems := family.problems(model, files.config):
        text = f"{files.config_file} is not of this model:{bullet_list(problems)}"
        if whole:
            raise CheckpointError(f"{text}\nset in the gin files what it says")
        log.warning("%s", text)
    tensors = {each.name: each for each in tensors_of(family, model)}
    problems = [
        f"{name} is {files.tensors[name].form}, and {each.place} needs "
        f"{list(each.shape)}"
        for name, each in tensors.items()
        if name in files.tensors and files.tensors[name].form.shape != each.shape
    ]
    if source.missing is Missing.ERROR:
        problems += [
            f"{name} {list(each.shape)} is missing, which is to be {each.place}"
            for name, each in tensors.items()
            if name not in files.tensors and is_chosen(each.place.path)
        ]
    if source.unused is not Unused.IGNORE and not source.only:
        problems += [
            f"{name} {tensor.form} is none of this model's"
            for name, tensor in files.tensors.items()
            if name not in tensors and not _is_derived(name, tensors)
        ]
    if problems:
        raise CheckpointError(
            f"the tensors of {source.checkpoint} do not fit this model:"
            f"{bullet_list(problems)}\nget the files again that belong to its "
            "config.json, or see InitializeFrom.missing, unused and rules"
        )
    return {name: each.place for name, each in tensors.items()}


def _tensor(name: str, place: Place, change: str, spec: WeightSpec) -> PublishedTensor:
    shape = spec.shape[len(place.index) :]
    changes: tuple[Change, ...] = ()
    if change == "transpose":
        rows = spec.rows or 1
        matrix = (math.prod(shape[rows:]), math.prod(shape[:rows]))
        reshapes = (Change.RESHAPE,) if len(shape) > 2 else ()
        shape, changes = matrix, (Change.TRANSPOSE, *reshapes)
    elif change == "flat":
        shape, changes = (math.prod(shape),), (Change.RESHAPE,)
    place = dataclasses.replace(place, changes=changes)
    return PublishedTensor(name, place, shape)


def _is_derived(name: str, tensors: dict[str, PublishedTensor]) -> bool:
    """Whether a tensor follows from others, as some files have them."""
    tied = name == "lm_head.weight" and name not in tensors
    return tied or name.endswith(".rotary_emb.inv_freq")
