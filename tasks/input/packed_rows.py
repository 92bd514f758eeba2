"""The base of inputs whose rows of tokens a `tf.data` pipeline has packed.

Dims: S the length of a row of a side, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.input.batched_input import TokenInput
from meshwright.tasks.input.dataset_input import ROW_WEIGHTS, DatasetInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """The names of tensors of one length: all of a text, its source, or its target.

    Args:
      ids: tokens to read.
      segments: texts counted from 1 within the row; 0 is padding.
      positions: within the text.
      labels: tokens to predict, if this side predicts any.
      weights: of each label in the loss, likewise.
      is_token: ids, or labels if there are any -> which of them are tokens, for what
        a pipeline does not say.
    """

    ids: str
    segments: str
    positions: str
    labels: str = ""
    weights: str = ""
    is_token: Callable[[tf.Tensor], tf.Tensor]

    @property
    def needed(self) -> list[str]:
        """What an example must have."""
        return [name for name in (self.ids, self.labels) if name]

    @property
    def ints(self) -> list[str]:
        """All tensors but the weights."""
        return [*self.needed, self.segments, self.positions]

    def completed(self, batch: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """The tensors of a batch, with those that it lacks by their defaults."""
        ids = batch[self.ids]
        is_token = self.is_token(batch[self.labels or self.ids])
        full = {
            self.segments: tf.cast(is_token, tf.int32),
            self.positions: tf.zeros_like(ids)
            + tf.range(ids.shape[1], dtype=ids.dtype),
        }
        if self.weights:
            full[self.weights] = tf.cast(is_token, tf.float32)
        names = [*self.ints, *([self.weights] if self.weights else [])]
        return {name: batch[name] if name in batch else full[name] for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRows(DatasetInput, TokenInput):
    """Base: subclass as a frozen, keyword-only dataclass with `sides` and `reader`.

    Args:
      vocab_size: V, above every id; another id stops the run.

    Raises:
      ValueError: a tensor is missing, unknown, or of another shape or kind; see
        `DatasetInput`.
    """

    _held_out_hint: ClassVar[str] = (
        "; if train alone is packed, give held_out segment ids, 1 and in padding 0, "
        "and positions, 0, 1, 2, ..."
    )
    sides: ClassVar[tuple[Side, ...]]
    of_seqio: ClassVar[Mapping[str, str]] = {}
    """The names of tensors here, by those of seqio's feature converter."""
    reader: ClassVar[str]
    """Who reads the rows, for messages."""

    vocab_size: int = bounded(at_least=1)

    def __post_init__(self):
        super().__post_init__()
        given = self.structure
        needed = [name for side in self.sides for name in side.needed]
        if not isinstance(given, Mapping):
            raise ValueError(
                f"{self._name}.train returns examples of {type(given).__name__}; it "
                f"must return dicts with {' and '.join(needed)}"
            )
        if missing := [name for name in needed if name not in given]:
            raise ValueError(
                f"{self._name}.train returns examples without {', '.join(missing)}: "
                f"they have {', '.join(given)}{self._renames(given)}"
            )
        known = self.element_spec(None)
        for name, leaf in given.items():
            if name not in known:
                ours = self.of_seqio.get(name)
                remedy = f"call it {ours!r}" if ours else "leave it out"
                raise ValueError(
                    f"{self._name}.train returns examples with {name!r}; {self.reader} "
                    f"reads {', '.join(known)}: {remedy}"
                )
            wanted = known[name]
            is_number = wanted.dtype.is_floating or leaf.dtype.is_integer
            if leaf.shape != wanted.shape[1:] or not is_number:
                raise ValueError(
                    f"{self._name}.train: {name} of an example is {leaf.dtype.name} "
                    f"{leaf.shape.as_list()}; it must be {wanted.dtype.name} "
                    f"{wanted.shape[1:].as_list()}"
                )

    def _renames(self, given: Iterable[str]) -> str:
        """Which of the names given are seqio's, for a message."""
        pairs = [(name, ours) for name, ours in self.of_seqio.items() if name in given]
        listed = ", ".join(f"{name} {ours}" for name, ours in pairs)
        return f"; these are seqio's names: call {listed}" if pairs else ""

    def fullness(self, batches: Sequence[Mapping[str, np.ndarray]]) -> list[str]:
        """How much of the rows in some batches is padding, in a line for each side.

        A pair or a text that a pipeline cuts fills its row: of rows with one of them
        each, as many may be cut as are full.
        """
        lines = []
        for side in self.sides if batches else ():
            segments = np.concatenate([batch[side.segments] for batch in batches])
            tokens, full = segments != 0, (segments != 0).all(axis=1)
            lines.append(
                f"first {len(full):,} rows of {side.ids}: {tokens.sum():,} tokens, "
                f"{1 - tokens.mean():.1%} padding, {full.sum():,} full rows"
            )
        return lines

    def doubts(self, batches: Sequence[Mapping[str, np.ndarray]]) -> list[str]:
        """Warnings, such as of ids that are the labels: there is nothing to predict."""
        lines = []
        for side in self.sides if batches else ():
            if not side.labels:
                continue
            ids, labels, weights = (
                np.concatenate([batch[name] for batch in batches])
                for name in (side.ids, side.labels, side.weights)
            )
            same = (ids == labels)[weights > 0]
            if same.size and same.all():
                lines.append(
                    f"{self._name}: in the first {len(ids):,} rows {side.ids} are "
                    f"{side.labels}, so that the model reads what it is to predict: "
                    f"shift {side.ids} by one, as in tf.concat([[0], labels[:-1]], 0)"
                )
        return lines

    def length(self, side: Side) -> int:
        """S of a side.

        Raises:
          ValueError: its ids are no row.
        """
        shape = self.structure[side.ids].shape
        if shape.rank != 1:
            raise ValueError(
                f"{self._name}.train: {side.ids} of an example have shape {shape}; it "
                "must be [S], a row of tokens"
            )
        return shape[0]

    def element_spec(self, batch: int | None) -> NestedMap:
        spec = NestedMap()
        for side in self.sides:
            shape = [batch, self.length(side)]
            spec |= {name: tf.TensorSpec(shape, tf.int32) for name in side.ints}
            if side.weights:
                spec[side.weights] = tf.TensorSpec(shape, tf.float32)
        return NestedMap(spec)

    def train_batches(
        self, start_step: int, *, global_batch: int, rows: range
    ) -> tf.data.Dataset:
        batches = super().train_batches(
            start_step, global_batch=global_batch, rows=rows
        )
        return batches.map(self._complete)

    def held_out_batches(
        self, *, global_batch: int, rows: range, max_batches: int | None = None
    ) -> tf.data.Dataset:
        batches = super().held_out_batches(
            global_batch=global_batch, rows=rows, max_batches=max_batches
        )
        return batches.map(self._complete)

    def _complete(self, batch: NestedMap) -> NestedMap:
        """A batch with all tensors, of which rows that fill it up are padding."""
        is_row = batch[ROW_WEIGHTS][:, None]
        full = NestedMap()
        for side in self.sides:
            full |= side.completed(batch)
        spec = self.element_spec(None)
        full = NestedMap({n: tf.cast(full[n], leaf.dtype) for n, leaf in spec.items()})
        for side in self.sides:
            full[side.segments] *= tf.cast(is_row, tf.int32)
            if side.weights:
                full[side.weights] *= is_row
            for name in side.needed:
                self._check(name, full[name])
        return full

    def _check(self, name: str, ids: tf.Tensor) -> None:
        inside = tf.reduce_all((ids >= 0) & (ids < self.vocab_size))
        message = tf.strings.format(
            f"{self._name}: {name} has ids from {{}} to {{}}, which must be from 0 to "
            f"{self.vocab_size - 1}, as vocab_size is {self.vocab_size}: set it to "
            "that of the tokens",
            [tf.reduce_min(ids), tf.reduce_max(ids)],
        )
        tf.debugging.Assert(inside, [message])
