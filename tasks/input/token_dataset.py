"""Any `tf.data.Dataset` of rows of tokens as the input of a task on text.

Dims: S sequence or source, T target, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import gin
import numpy as np
import tensorflow as tf

from meshwright.tasks.input.packed_rows import PackedRows, Side

_TEXT = Side(
    ids="ids",
    labels="labels",
    segments="segment_ids",
    positions="segment_positions",
    weights="weights",
    is_token=tf.ones_like,
)
_SOURCE, _TARGET = (
    Side(
        ids=f"{name}_ids",
        segments=f"{name}_segment_ids",
        positions=f"{name}_positions",
        is_token=lambda ids: ids != 0,
        **more,
    )
    for name, more in (
        ("source", {}),
        ("target", {"labels": "target_labels", "weights": "target_weights"}),
    )
)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenDataset(PackedRows):
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

    sides = (_TEXT,)
    reader = "a language model"
    of_seqio = {
        "decoder_input_tokens": "ids",
        "decoder_target_tokens": "labels",
        "decoder_loss_weights": "weights",
        "decoder_segment_ids": "segment_ids",
        "decoder_positions": "segment_positions",
    }

    @property
    def sequence_length(self) -> int:
        """S."""
        return self.length(_TEXT)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class PairDataset(PackedRows):
    """Batches of sources and targets as tokens, from your `tf.data` pipeline.

    An example is a dict of tensors, source_* [S] and target_* [T]; a row may have one
    pair, or several that are packed:
      source_ids: int32, tokens that the encoder reads, 0 <= id < V.
      target_ids: int32, tokens that the decoder reads: a start, and the target.
      target_labels: int32, tokens to predict: the target, and an end.
      target_weights: float32, of each label in the loss.
      source_segment_ids, target_segment_ids: int32, pairs counted from 1 within the
        row; 0 is padding.
      source_positions, target_positions: int32, position within the source or target;
        by default within the row.

    Without weights and segments a row is one pair, in which source ids and labels that
    are 0 are padding. The last batch of held-out examples is filled up with rows of
    weight 0. To translate, give the task a `TranslationInput` with the tokens'
    vocabulary in its place.

    Args:
      vocab_size: V, above every id; another id stops the run.

    Raises:
      ValueError: a tensor is missing, unknown, or of another shape or kind; there are
        segments of one side alone; see `DatasetInput`.
    """

    sides = (_SOURCE, _TARGET)
    reader = "a translation model"
    of_seqio = {
        "encoder_input_tokens": "source_ids",
        "encoder_segment_ids": "source_segment_ids",
        "encoder_positions": "source_positions",
        "decoder_input_tokens": "target_ids",
        "decoder_target_tokens": "target_labels",
        "decoder_loss_weights": "target_weights",
        "decoder_segment_ids": "target_segment_ids",
        "decoder_positions": "target_positions",
    }

    def __post_init__(self):
        super().__post_init__()
        segments = [side.segments for side in self.sides]
        given = [name for name in segments if name in self.structure]
        if len(given) == 1:
            raise ValueError(
                f"PairDataset.train returns examples with {given[0]} alone: a target "
                f"attends to the source of its number, so give {' and '.join(segments)}"
            )

    def doubts(self, batches: Sequence[Mapping[str, np.ndarray]]) -> list[str]:
        lines = super().doubts(batches)
        if batches and "target_segment_ids" not in self.structure:
            ids, labels = (
                np.concatenate([batch[f"target_{name}"] for batch in batches])
                for name in ("ids", "labels")
            )
            starts = ((ids == 0) & (labels != 0))[:, 1:].any(axis=1)
            if starts.any():
                lines.append(
                    f"{self._name}: in {starts.sum():,} of the first {len(ids):,} rows "
                    "a target begins anew, by token 0, and rows have no segment ids: "
                    "if they are packed, give source_segment_ids and target_segment_ids"
                )
        return lines

    @property
    def source_length(self) -> int:
        """S."""
        return self.length(_SOURCE)

    @property
    def target_length(self) -> int:
        """T."""
        return self.length(_TARGET)
