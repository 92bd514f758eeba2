"""Any `tf.data.Dataset` of rows of tokens as a language model's input.

S sequence, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.input.batched_input import TokenInput
from meshwright.tasks.input.dataset_input import ROW_WEIGHTS, DatasetInput

_INTS = ("ids", "labels", "segment_ids", "segment_positions")
_NEEDED = ("ids", "labels")


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenDataset(DatasetInput, TokenInput):
    """Batches of rows of tokens that your `tf.data` pipeline has packed.

    An example is a dict of tensors [S], of one S:
      ids: int32, tokens to read.
      labels: int32, tokens to predict, 0 <= id < V.
      weights: float32, of each label in the loss; by default 1.
      segment_ids: int32, texts counted from 1 within the row; 0 is padding. By default
        the row is one text.
      segment_positions: int32, position within the text; by default within the row.

    The last batch of held-out examples is filled up with rows of weight 0. To generate
    text, give the task a `TextInput` with the tokens' vocabulary in its place.

    Args:
      vocab_size: V, above every id; another id stops the run.

    Raises:
      ValueError: a tensor is missing, unknown, or of another shape or kind; see
        `DatasetInput`.
    """

    vocab_size: int = bounded(at_least=1)

    def __post_init__(self):
        super().__post_init__()
        given = self.structure
        if not isinstance(given, Mapping):
            raise ValueError(
                f"TokenDataset.train returns examples of {type(given).__name__}; it "
                f"must return dicts with {' and '.join(_NEEDED)}"
            )
        if missing := [name for name in _NEEDED if name not in given]:
            raise ValueError(
                f"TokenDataset.train returns examples without {', '.join(missing)}: "
                f"they have {', '.join(given)}"
            )
        known = self.element_spec(None)
        for name, leaf in given.items():
            if name not in known:
                raise ValueError(
                    f"TokenDataset.train returns examples with {name!r}; a language "
                    f"model reads {', '.join(known)}: leave it out"
                )
            is_number = name == "weights" or leaf.dtype.is_integer
            if leaf.shape != [self.sequence_length] or not is_number:
                raise ValueError(
                    f"TokenDataset.train: {name} of an example is {leaf.dtype.name} "
                    f"{leaf.shape.as_list()}; it must be {known[name].dtype.name} "
                    f"[{self.sequence_length}]"
                )

    @property
    def sequence_length(self) -> int:
        """S."""
        shape = self.structure["ids"].shape
        if shape.rank != 1:
            raise ValueError(
                f"TokenDataset.train: ids of an example have shape {shape}; it must be "
                "[S], a row of tokens"
            )
        return shape[0]

    def element_spec(self, batch: int | None) -> NestedMap:
        shape = [batch, self.sequence_length]
        spec = NestedMap({name: tf.TensorSpec(shape, tf.int32) for name in _INTS})
        return NestedMap(spec, weights=tf.TensorSpec(shape, tf.float32))

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
        ids = batch["ids"]
        is_row = batch[ROW_WEIGHTS][:, None]
        by_default = {
            "weights": tf.ones_like(ids, tf.float32),
            "segment_ids": tf.ones_like(ids),
            "segment_positions": tf.zeros_like(ids) + tf.range(self.sequence_length),
        }
        full = NestedMap(
            {
                name: tf.cast(batch.get(name, by_default.get(name)), leaf.dtype)
                for name, leaf in self.element_spec(None).items()
            }
        )
        full.weights *= is_row
        full.segment_ids *= tf.cast(is_row, tf.int32)
        for name in _NEEDED:
            self._check(name, full[name])
        return full

    def _check(self, name: str, ids: tf.Tensor) -> None:
        inside = tf.reduce_all((ids >= 0) & (ids < self.vocab_size))
        message = (
            f"TokenDataset: {name} has an id that is not below vocab_size = "
            f"{self.vocab_size}, or is negative: set it to that of the tokens, "
            "the least and the largest of which are"
        )
        tf.debugging.Assert(inside, [message, tf.reduce_min(ids), tf.reduce_max(ids)])
