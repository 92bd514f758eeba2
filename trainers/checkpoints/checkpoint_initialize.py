"""Starts a training from the weights of another model."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import itertools
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.framework.compiler.boundary.wide_elements import wide_elements
from meshwright.framework.modeling.layer_order import LayerOrder
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.keras.keras_model import KerasModel
from meshwright.tasks.task import Task
from meshwright.trainers.checkpoints.checkpoint_digests import CheckpointError
from meshwright.trainers.checkpoints.checkpoint_keras import (
    FileArray,
    is_keras_file,
    opened_keras_file,
)
from meshwright.trainers.checkpoints.checkpoint_manifest import (
    ArraySpec,
    bullet_list,
    check_orders,
    forms,
    restacked,
)
from meshwright.trainers.checkpoints.checkpoint_parts import Bounds, read_part
from meshwright.trainers.checkpoints.checkpoint_rules import (
    Change,
    InitializeFrom,
    Missing,
    Place,
    Unused,
)
from meshwright.trainers.checkpoints.checkpoint_tf import (
    read_tf_checkpoint,
    tf_checkpoint,
)
from meshwright.trainers.checkpoints.checkpoints import Access, Checkpoints
from meshwright.trainers.checkpoints.published.published_weights import (
    published_places,
)
from meshwright.trainers.checkpoints.published.safetensors_files import (
    Tensor,
    is_safetensors,
    opened_safetensors,
)
from meshwright.trainers.startup.messages import log_line

log = logging.getLogger("absl")

_MOST_LINES = 100  # Of lists by which users write rules.


def check_is_there(source: InitializeFrom) -> None:
    """Checks that there is a checkpoint at a path, of any kind; reads no arrays.

    Raises:
      CheckpointError: there is nothing, nothing of that step, or a checkpoint of T5X.
    """
    path = os.path.expanduser(source.checkpoint)
    if tf_checkpoint(path):
        return
    if "://" not in path and not os.path.exists(path):
        raise CheckpointError(
            f"InitializeFrom.checkpoint is {path}, and nothing is there: name the "
            "folder or file of weights to start from"
        )
    if not (is_keras_file(path) or is_safetensors(path)):
        with _steps(path) as checkpoints:
            checkpoints.existing(source.step)


def weights_from(
    source: InitializeFrom,
    theta: NestedMap,
    task: Task | None = None,
    *,
    orders: Mapping[str, LayerOrder] | None = None,
) -> dict[str, jax.Array]:
    """Weights of another model, by the dotted paths that they have in this one.

    Logs which were taken, which are to be initialized, and which were not used.

    Args:
      source: the other model's checkpoint, and the names of its weights.
      theta: this model's weights, nested map of `jax.ShapeDtypeStruct` with shardings,
        in logical shapes.
      task: what is trained; a `KerasModel` knows the names of its weights in files of
        Keras, a `LanguageModel` those in published safetensors.
      orders: in which order leaves of this model's state stack layers, by path, such as
        `theta.decoder.w`.

    Raises:
      CheckpointError: there is no such checkpoint, none is intact, or it does not fit,
        or has its layers in another order; the message lists where.
    """
    fitting = _Fitting(source, theta, orders or {})
    with contextlib.ExitStack() as files:
        arrays = _read(source, fitting, task, files)
        taken = {path: fitting.assembled(path, arrays) for path in fitting.pieces}
    fitting.report()
    return taken


def with_weights(state: NestedMap, taken: Mapping[str, jax.Array]) -> NestedMap:
    """An initial state, with its weights and their moving average replaced.

    Args:
      state: nested map of `jax.Array`, in logical shapes.
      taken: the new weights, see `weights_from`.
    """

    def leaf(path: str, initial: jax.Array) -> jax.Array:
        part, _, name = path.partition(".")
        if part == "theta" and name in taken:
            return taken[name]
        if part == "ema" and name in taken:
            with wide_elements():
                return jnp.copy(taken[name])  # Both are donated: never one array.
        return initial

    return state.map_with_path(leaf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Piece:
    """An array of the checkpoint, and where it goes."""

    name: str
    place: Place


_Array = jax.Array | np.ndarray | FileArray | Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Known:
    """Where arrays go that no rule is for.

    Args:
      places: by the name of the array.
      problems: why some weights get nothing.
      widens: whether arrays may have narrower floats than the weights.
      unused: what becomes of arrays that go nowhere, if `InitializeFrom` does not say.
      derived: names of arrays that may go nowhere, as they follow from others.
      none: for some paths the indices of layers that are none, and become zeros.
    """

    places: Mapping[str, Place] = dataclasses.field(default_factory=dict)
    problems: Sequence[str] = ()
    widens: bool = False
    unused: Unused = Unused.IGNORE
    derived: Set[str] = frozenset()
    none: Mapping[str, Set[tuple[int, ...]]] = dataclasses.field(default_factory=dict)


class _Fitting:
    """Which arrays of a checkpoint make up which weights.

    Args:
      source: the other model's checkpoint, and the names of its weights.
      theta: this model's weights, nested map of `jax.ShapeDtypeStruct` with shardings.
      orders: as in `weights_from`.
    """

    def __init__(
        self,
        source: InitializeFrom,
        theta: NestedMap,
        orders: Mapping[str, LayerOrder],
    ):
        self._source, self._orders = source, orders
        self._weights = dict(theta.items_by_path())
        self._wanted = forms(theta)
        self.pieces: dict[str, list[_Piece]] = {}
        self.unused: list[str] = []
        self._known = _Known()

    def fit(
        self, saved: Mapping[str, ArraySpec], known: _Known = _Known()
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays to read; an array that is a weight as it is gets its sharding.

        Raises:
          CheckpointError: the arrays do not make up the weights.
        """
        self._known = known
        problems = self._match(saved)
        for path, pieces in self.pieces.items():
            problems += self._misfits(path, pieces, saved)
        if self._source.missing is Missing.ERROR:
            lacking = [p for p in self._initialized() if self._source.takes(p)]
            problems += [
                f"{path} {self._wanted[path]} gets nothing{_nearest(path, saved)}"
                for path in lacking
            ]
            problems += known.problems if lacking else ()
        if (self._source.unused or known.unused) is Unused.ERROR:
            problems += [
                f"{name} {saved[name]} goes nowhere"
                for name in self.unused
                if name not in known.derived
            ]
        if not (problems or self.pieces):
            problems = ["there is nothing in it for this model"]
        if problems:
            raise CheckpointError(
                f"the weights of {self._source.checkpoint} do not fit this model:"
                f"{bullet_list(problems, _MOST_LINES)}\nsee InitializeFrom.rules, "
                "only, missing and unused"
            )
        self._check_orders(saved)
        return {
            piece.name: self._abstract(path, piece, saved[piece.name])
            for path, pieces in self.pieces.items()
            for piece in pieces
        }

    def _check_orders(self, saved: Mapping[str, ArraySpec]) -> None:
        """Refuses whole stacks that number their layers otherwise than this model."""
        pairs = {}
        for path, (piece, *_) in self.pieces.items():
            if not piece.place.index:
                form = restacked(saved[piece.name], self._wanted[path].shape)
                pairs[f"theta.{path}"] = (form, self._orders.get(f"theta.{path}"))
        check_orders(f"checkpoint {self._source.checkpoint}", pairs)

    def assembled(self, path: str, arrays: Mapping[str, _Array]) -> jax.Array:
        """The weight at `path`, with the initial weight's sharding, from `arrays`."""
        weight, pieces = self._weights[path], self.pieces[path]
        value = arrays[pieces[0].name]
        if _is_whole(pieces) and isinstance(value, jax.Array):
            return value
        by_place = {
            piece.place.index: (_readable(arrays[piece.name]), piece.place.changes)
            for piece in pieces
        }
        none = self._none(path)

        @functools.cache  # Devices that hold the same part read it once.
        def part(bounds: Bounds) -> np.ndarray:
            value = np.empty([end - start for start, end in bounds], weight.dtype)
            rank = len(pieces[0].place.index)
            for at in itertools.product(*(range(*ends) for ends in bounds[:rank])):
                here = tuple(i - bounds[dim][0] for dim, i in enumerate(at))
                if at in none:
                    value[here] = 0
                    continue
                array, changes = by_place[at]
                form = array.form if hasattr(array, "form") else array
                value[here] = read_part(
                    array, form.shape, changes, weight.shape[rank:], bounds[rank:]
                )
            return value

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            sizes = zip(index, weight.shape, strict=True)
            return part(tuple(cut.indices(size)[:2] for cut, size in sizes))

        with wide_elements():
            return jax.make_array_from_callback(weight.shape, weight.sharding, shard)

    def report(self) -> None:
        """Logs which weights were taken, and which were not."""
        log_line("took %d weights from %s", len(self.pieces), self._source.checkpoint)
        for problem in self._known.problems:
            log.warning("not taken, as Keras would not load it: %s", problem)
        if initialized := self._initialized():
            names = bullet_list(initialized, _MOST_LINES)
            log_line("initialized %d others:%s", len(initialized), names)
        if unused := self.unused:
            names = bullet_list(unused, _MOST_LINES)
            log_line("not used, %d of its arrays:%s", len(unused), names)

    def _match(self, saved: Mapping[str, ArraySpec]) -> list[str]:
        """Fills `pieces` and `unused`; returns the errors of rules and patterns."""
        self.pieces, self.unused = {}, []
        rules, problems, matched = self._source.read_rules(), [], set()
        for name in sorted(saved):
            rule = next((rule for rule in rules if rule.source.fullmatch(name)), None)
            matched.add(rule)
            try:
                place = rule.place(name) if rule else self._known_place(name)
            except ValueError as error:
                problems.append(str(error))
                continue
            if place.path not in self._wanted or not self._source.takes(place.path):
                self.unused.append(name)
                if rule is not None and place.path not in self._wanted:
                    problems.append(
                        f"{name} is to become {place.path}, which this model does not "
                        f"have{_nearest(place.path, self._wanted)}"
                    )
                continue
            piece = _Piece(name=name, place=place)
            self.pieces.setdefault(place.path, []).append(piece)
        problems += [
            f"the rule '{rule.line}' matches nothing"
            f"{_nearest(rule.source.pattern, saved)}"
            for rule in rules
            if rule not in matched
        ]
        problems += [
            f"InitializeFrom.only has {pattern!r}, which matches no weight of this "
            f"model{_nearest(pattern, self._wanted)}"
            for pattern in self._source.only
            if not any(re.fullmatch(pattern, path) for path in self._wanted)
        ]
        return problems

    def _misfits(
        self, path: str, pieces: Sequence[_Piece], saved: Mapping[str, ArraySpec]
    ) -> list[str]:
        """The reasons why the pieces do not make up the weight."""
        wanted, places = self._wanted[path], {}
        rank = len(pieces[0].place.index)
        for piece in pieces:
            place, form = piece.place, saved[piece.name]
            if place.index in places:
                return [f"{place} is to be both {places[place.index]} and {piece.name}"]
            places[place.index] = piece.name
            bounds = zip(place.index, wanted.shape, strict=False)
            if (
                len(place.index) != rank
                or rank > len(wanted.shape)
                or not all(0 <= i < size for i, size in bounds)
            ):
                return [f"{piece.name} is to be {place}, of {path} {wanted}"]
            shape = form.shape
            if Change.TRANSPOSE in place.changes:
                shape = shape[::-1]
            part = ArraySpec(wanted.shape[rank:], wanted.dtype)
            if Change.RESHAPE in place.changes:
                fits = math.prod(shape) == math.prod(part.shape)
            else:
                fits = shape == part.shape
            if not fits or not self._holds_all_values(form.dtype, part.dtype):
                there = "" if str(place) == piece.name else f"{place} is "
                return [
                    f"{piece.name} is {form} in the checkpoint, {there}{part} in this "
                    "model"
                ]
        count = math.prod(wanted.shape[:rank]) - len(self._none(path))
        if len(pieces) != count:
            return [f"{path} {wanted} gets {len(pieces)} of its {count} layers"]
        return []

    def _abstract(
        self, path: str, piece: _Piece, form: ArraySpec
    ) -> jax.ShapeDtypeStruct:
        weight = self._weights[path]
        sharding = weight.sharding
        if not _is_whole(self.pieces[path]) and isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(form.shape, weight.dtype, sharding=sharding)

    def _known_place(self, name: str) -> Place:
        return self._known.places.get(name) or Place(path=name)

    def _holds_all_values(self, dtype: str, wanted: str) -> bool:
        """Whether a weight of dtype `wanted` can have all values of another's."""
        is_narrow = self._known.widens and dtype in ("float16", "bfloat16")
        return dtype == wanted or (is_narrow and wanted == "float32")

    def _none(self, path: str) -> Set[tuple[int, ...]]:
        return self._known.none.get(path, frozenset())

    def _initialized(self) -> list[str]:
        return [path for path in self._wanted if path not in self.pieces]


def _is_whole(pieces: Sequence[_Piece]) -> bool:
    """Whether a single array is the weight as it is."""
    return not pieces[0].place.index and not pieces[0].place.changes


def _readable(array: _Array) -> np.ndarray | FileArray | Tensor:
    """What a part can be read of on this host."""
    return np.asarray(array) if isinstance(array, jax.Array) else array


def _read(
    source: InitializeFrom,
    fitting: _Fitting,
    task: Task | None,
    files: contextlib.ExitStack,
) -> Mapping[str, _Array]:
    """The arrays to use, by their names in the checkpoint; `files` stay open."""
    path = os.path.expanduser(source.checkpoint)
    if source.mapping and not is_safetensors(path):
        raise CheckpointError(
            f"InitializeFrom.mapping is for safetensors, and {path} is none: set "
            "InitializeFrom.rules"
        )
    if is_keras_file(path):
        _check_has_no_steps(source, f"{path} is a file of Keras: leave them out")
        return _read_keras_file(source, path, fitting, task, files)
    if is_safetensors(path):
        _check_has_no_steps(source, f"{path} is of safetensors: leave them out")
        return _read_safetensors(source, path, fitting, task, files)
    if prefix := tf_checkpoint(path):
        _check_has_no_steps(
            source,
            f"{prefix} is TensorFlow's: leave them out, and name the checkpoint that "
            "you want by its prefix",
        )
        return read_tf_checkpoint(prefix, fitting.fit)

    def choose(step: int, saved: dict[str, ArraySpec]) -> NestedMap:
        del step
        prefix = f"{source.part}."
        part = {
            p.removeprefix(prefix): f for p, f in saved.items() if p.startswith(prefix)
        }
        chosen = NestedMap()
        for path, array in fitting.fit(part).items():
            chosen.set_path(f"{prefix}{path}", array)
        return chosen

    with _steps(path) as checkpoints:
        state = checkpoints.restore_part(source.step, choose)
    return dict(state[source.part].items_by_path())


def _steps(path: str) -> Checkpoints:
    """The checkpoints of a run, or in a folder of some."""
    folder = epath.Path(path) / "checkpoints"
    return Checkpoints(folder if folder.exists() else path, access=Access.READ)


def _check_has_no_steps(source: InitializeFrom, why: str) -> None:
    if (source.step, source.part) != (None, "theta"):
        raise CheckpointError(
            f"InitializeFrom.step and part are for a model_dir, but {why}"
        )


def _read_keras_file(
    source: InitializeFrom,
    path: str,
    fitting: _Fitting,
    task: Task | None,
    files: contextlib.ExitStack,
) -> dict[str, FileArray]:
    file = files.enter_context(opened_keras_file(path))
    known = _Known()
    if isinstance(task, KerasModel):
        if file.is_old and not source.read_rules():
            raise CheckpointError(
                f"{path} is in the format of Keras 2's .h5 files, in which arrays have "
                f"other names, such as {next(iter(file.arrays), 'none')}: load it by "
                "Keras and save it by model.save_weights as .weights.h5, or set "
                "InitializeFrom.rules"
            )
        paths, problems = task.names_in_file(file.arrays)
        places = {name: Place(path=path) for name, path in paths.items()}
        known = _Known(places=places, problems=problems)
    forms_of = {name: array.form for name, array in file.arrays.items()}
    return {name: file.arrays[name] for name in fitting.fit(forms_of, known)}


def _read_safetensors(
    source: InitializeFrom,
    path: str,
    fitting: _Fitting,
    task: Task | None,
    files: contextlib.ExitStack,
) -> dict[str, Tensor]:
    opened = files.enter_context(opened_safetensors(path))
    known = _Known(widens=True)
    if not source.read_rules():
        published = published_places(opened, task, source)
        known = dataclasses.replace(
            known,
            places=published.places,
            unused=Unused.IGNORE if source.only else Unused.ERROR,
            derived=published.derived,
            none=published.none,
        )
    forms_of = {name: tensor.form for name, tensor in opened.tensors.items()}
    return {name: opened.tensors[name] for name in fitting.fit(forms_of, known)}


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=2, cutoff=0.4)
    return f" (nearest: {', '.join(near)})" if near else ""
