"""Translation of texts by an experiment's encoder and decoder, on its mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from meshwright.framework.compiler.xla.processes import to_host
from meshwright.framework.modeling.layer import EXPERT_DIM
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.text.translation import Translation
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.stacks import pipelines
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.serving.generation import (
    Continued,
    TooLongError,
    row_multiple,
)


def for_translating(experiment: Experiment, rows: int, seed: int) -> Experiment:
    """An experiment whose programs translate up to `rows` sources at a time.

    Args:
      experiment: its task is a `Translation`.
      rows: 1 or more; it is raised until the devices can divide it. If the encoder has
        experts, which serve groups of tokens, or is a pipeline, it is raised to a
        multiple of the rows of evaluations.
      seed: of draws.
    """
    task, multiple = experiment.task, row_multiple(experiment)
    weights = task.encoder.weights().leaves()
    if pipelines(task) or any(EXPERT_DIM in spec.dims for spec in weights):
        multiple = experiment.global_batch
    rows = -(-rows // multiple) * multiple
    return dataclasses.replace(experiment, global_batch=rows, seed=seed)


def target_language(task: Translation, wanted: str | None) -> str | None:
    """The language to translate to: the wanted one, or the only one there is.

    None for a vocabulary without languages, such as T5's.

    Raises:
      ValueError: the vocabulary has no such language, or several and none is wanted.
    """
    known = task.text.trained_vocabulary().languages
    if not known:
        if wanted is not None:
            raise ValueError(
                "--target_language is given, but the vocabulary has no tags of "
                "languages: leave it out"
            )
        return None
    if wanted in known or (wanted is None and len(known) == 1):
        return wanted or known[0]
    given = "is needed" if wanted is None else f"is {wanted!r}"
    raise ValueError(
        f"--target_language {given}: the model translates to {', '.join(known)}"
    )


def check_source(
    task: Translation, source: Sequence[int], name: str, language: str | None
) -> None:
    """Checks the ids of a source, which messages call `name`.

    Args:
      task: the model's.
      source: the ids.
      name: of the source.
      language: which its tag must name; None: there may be any, or no tag.

    Raises:
      ValueError: there is none; one is unknown; or the tag is another language's.
      TooLongError: there are more than the model reads.
    """
    if not source:
        raise ValueError(f"{name} is empty: give text to translate")
    size, most = task.embedding.vocab_size, task.text.source_length
    if unknown := [i for i in source if not 1 <= i < size]:
        raise ValueError(
            f"{name} has the id {unknown[0]}, but ids of tokens are from 1 to "
            f"{size - 1}, as TokenEmbedding.vocab_size is {size}: leave it out"
        )
    tag = None if language is None else task.text.trained_vocabulary().tag_id(language)
    if tag not in (None, source[0]):
        raise ValueError(
            f"{name} begins with the id {source[0]}, but --target_language={language} "
            f"has the tag {tag}: leave out the flag, or begin with this tag"
        )
    if len(source) > most:
        raise TooLongError(
            f"{name} has {len(source)} tokens, tag and end among them, but the model "
            f"was trained on {most} at most, TranslationInput.source_length: shorten it"
        )


class Translator:
    """Translates sources, with the same weights each time.

    Args:
      programs: those of `for_translating`.
      theta: weights as `TrainState.weights` returns them.
    """

    def __init__(self, programs: StepPrograms, theta: NestedMap):
        self.task: Translation = programs.experiment.task
        self._programs, self._theta = programs, theta
        self._rows = programs.experiment.global_batch

    def all(
        self, sources: Sequence[Sequence[int]], *, number: int = 0
    ) -> list[list[Continued]]:
        """The translations of each source, the best first.

        Args:
          sources: the ids of each, see `TranslationInput.encode`; at most as many as
            the programs have rows.
          number: of this batch; others have other draws.
        """
        # Not the numbers of sources: rows, and so draws, would depend on the mesh.
        numbers = [number] * len(sources)
        batch = self.task.text.to_translate(sources, numbers, self._rows)
        out = self._programs.decode(self._theta, batch).map(to_host)
        pairs = zip(out.ids[: len(sources)], out.scores, strict=False)
        return [
            [self._continued(*each) for each in zip(ids, scores, strict=True)]
            for ids, scores in pairs
        ]

    def _continued(self, ids: np.ndarray, score: np.ndarray) -> Continued:
        tokens, end = ids.tolist(), self.task.text.vocabulary.special_tokens.end_id
        ended = end in tokens
        # Without an end the search went on to the last token.
        tokens = tokens[: tokens.index(end)] if ended else tokens
        return Continued(ids=tuple(tokens), score=float(score), ended=ended)
