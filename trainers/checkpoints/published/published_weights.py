"""Which published tensor is which weight of a language model."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Set

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
from meshwright.trainers.checkpoints.published.mapping_files import TensorMapping
from meshwright.trainers.checkpoints.published.published_facts import (
    Config,
    Model,
    check_numbers,
    shown,
)
from meshwright.trainers.checkpoints.published.published_families import (
    Family,
    family_of,
)
from meshwright.trainers.checkpoints.published.safetensors_files import (
    SafetensorsFiles,
)

log = logging.getLogger("absl")

_NUMBERS = ("hidden_size", "num_attention_heads", "num_hidden_layers")
# Models have at most one in so many ids that their tokenizer has not, by rounding up.
_UNUSED_IDS = 10
_PIECE_BYTES = 2**26


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


def tensors_of(mapping: TensorMapping, model: Model) -> list[PublishedTensor]:
    """All tensors of a model, in the order of layers.

    Raises:
      CheckpointError: a weight of the model has no line.
    """
    specs = dict(model.task.weights().items_by_path())
    tensors, used = [], set()

    def note(name: str, path: str, index: tuple[int, ...], change: str) -> None:
        if path in specs:
            used.add(path)
            place = Place(path=path, index=index)
            tensors.append(_tensor(name, place, change, specs[path]))

    for line in mapping.lines:
        if "*" not in line.tensor:
            note(line.tensor, line.weight, (), line.change)
    for number, layer in enumerate(model.layers):
        for line in mapping.lines:
            if "*" in line.tensor:
                path = line.weight.replace("*", layer.path)
                name = line.tensor.replace("*", str(number))
                note(name, path, layer.index, line.change)
    if others := sorted(specs.keys() - used):
        raise CheckpointError(
            f"{mapping.name} have no tensors for these weights:{bullet_list(others)}"
        )
    return tensors


@dataclasses.dataclass(frozen=True)
class PublishedPlaces:
    """What becomes of the tensors of files.

    Args:
      places: where they go, by their names.
      derived: names of those that follow from others, as some files have them.
    """

    places: dict[str, Place]
    derived: Set[str]


def published_places(
    files: SafetensorsFiles, task: Task | None, source: InitializeFrom
) -> PublishedPlaces:
    """Where the tensors of files go.

    Args:
      files: with the config.json that describes them.
      task: the language model that gets them.
      source: which weights are taken. Where some may be missing, or only some are
        taken, a config.json of another model is no error.

    Raises:
      CheckpointError: the files are those of another model, or of another tokenizer;
        the message lists why.
    """
    mapping = source.read_mapping()
    if mapping is not None:
        model = Model.of(task, any_parts=True)
    else:
        family, model = _checked_family(files, task, source)
        mapping = family.mapping
    tensors = {each.name: each for each in tensors_of(mapping, model)}
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
            if name not in files.tensors and source.takes(each.place.path)
        ]
    derived = {name for name in files.tensors if name.endswith(".rotary_emb.inv_freq")}
    head, table = map(mapping.tensor_of, ("softmax.kernel", "embedding.table"))
    if head is not None and head not in tensors:
        derived.add(head)
        may_be_left = source.only or source.unused is Unused.IGNORE
        if not may_be_left and _is_another_head(files, head, table):
            problems.append(
                f"{head} has other values than {table}, which this model has for "
                "both: set LanguageModel.softmax"
            )
    if problems:
        raise CheckpointError(
            f"the tensors of {source.checkpoint} do not fit this model:"
            f"{bullet_list(problems)}\nget the files again that belong to its "
            "config.json, or see InitializeFrom.missing, unused and mapping"
        )
    places = {name: each.place for name, each in tensors.items()}
    return PublishedPlaces(places, derived)


def _checked_family(
    files: SafetensorsFiles, task: Task | None, source: InitializeFrom
) -> tuple[Family, Model]:
    """The family of files, and the model, which is of it."""
    if files.config is None:
        raise CheckpointError(
            f"there is no {files.config_file}, which says what model the tensors are "
            "of: put the published one there, or set InitializeFrom.mapping"
        )
    family = family_of(files.config, files.config_file)
    check_numbers(files.config, _NUMBERS, files.config_file)
    model = Model.of(task)
    _check_model(family, model, files, source)
    return family, model


def _check_model(
    family: Family, model: Model, files: SafetensorsFiles, source: InitializeFrom
) -> None:
    """Checks that the config is the model's, and that its tokens may be the text's."""
    config = files.config
    named = config.get("architectures")
    if named and named != [family.architecture]:
        log.warning(
            "%s names %s, and not %s: its weights are taken as those of the latter",
            files.config_file,
            shown(named),
            family.architecture,
        )
    told = []
    if problems := family.problems(model, config):
        told.append(
            f"{files.config_file} is not of this model:{bullet_list(problems)}\nset in "
            "the gin files what it says"
        )
    text = model.task.text
    if not source.any_tokenizer and _has_other_ids(config, text.vocab_size):
        told.append(
            f"{files.config_file} has vocab_size {config['vocab_size']}, but "
            f"LanguageModel.text, a {type(text).__name__}, has {text.vocab_size} ids, "
            "which are those of another tokenizer: give it an input of the published "
            "tokenizer's ids, or set InitializeFrom.any_tokenizer to take the weights "
            "nevertheless"
        )
    if told and source.missing is Missing.ERROR and not source.only:
        raise CheckpointError("\n".join(told))
    for line in told:
        log.warning("%s", line)


def _has_other_ids(config: Config, ids: int) -> bool:
    size = config.get("vocab_size")
    return isinstance(size, int) and ids < size - size // _UNUSED_IDS


def _is_another_head(files: SafetensorsFiles, head: str, table: str | None) -> bool:
    """Whether there is an output layer that is not the table of embeddings."""
    head, table = (files.tensors.get(name) for name in (head, table))
    if head is None or table is None:
        return False
    if head.form != table.form or len(head.form.shape) != 2:
        return True
    rows, width = head.form.shape
    step = max(_PIECE_BYTES // (4 * max(width, 1)), 1)
    cuts = [
        (slice(at, min(at + step, rows)), slice(None)) for at in range(0, rows, step)
    ]
    return any(head[cut].tobytes() != table[cut].tobytes() for cut in cuts)


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
