"""Continuation of prompts by an experiment's language model, on its mesh.

Two programs do it: one reads the prompts and fills the cache, the other chooses tokens
until it has as many as it is told. Between its calls the tokens so far can be shown.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import tensorflow as tf

from meshwright.framework.compiler.program import Program
from meshwright.framework.compiler.xla.processes import to_host
from meshwright.framework.modeling import random
from meshwright.framework.modeling.layer import Context
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.text.continuation import Continuation
from meshwright.tasks.text.decoding import Decoder
from meshwright.tasks.text.language_model import LanguageModel
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.step_programs import StepPrograms

# Programs are compiled for prompts up to a power of two, so that they serve others too.
_SHORTEST = 16
# New tokens of a call where nobody looks at them: rows that fill up the batch may go on
# when all others have ended.
_TOKENS_OF_A_CALL = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continued:
    """A continuation of a prompt.

    Args:
      ids: the new tokens, up to and without the end.
      score: see `Decoded.scores`.
      ended: whether it has come to its end, and was not cut.
    """

    ids: tuple[int, ...]
    score: float
    ended: bool


def language_model(experiment: Experiment) -> LanguageModel:
    """The experiment's task.

    Raises:
      ValueError: it is no language model.
    """
    task = experiment.task
    if not isinstance(task, LanguageModel):
        raise ValueError(
            f"Experiment.task is {type(task).__name__}, which does not continue text: "
            "generate with an experiment whose task is a LanguageModel, such as "
            "lm/stdlib_tiny.gin"
        )
    return task


class Generator:
    """Continues prompts, with the same weights each time.

    Args:
      programs: the experiment's; its task is a `LanguageModel`.
      theta: weights as `TrainState.weights` returns them.
      search: how tokens are chosen.
      cache_length: the most tokens of a prompt and its continuation; None: as many as
        the rows that the model was trained on.
      max_tokens: the most new tokens; None: as many as the cache has place for.
      seed: of draws; the same seed and the same prompts give the same tokens.

    Raises:
      ValueError: the task is no language model; a size is below 1.
    """

    def __init__(
        self,
        programs: StepPrograms,
        theta: NestedMap,
        search: Decoder,
        *,
        cache_length: int | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
    ):
        self.task = language_model(programs.experiment)
        self.cache_length = cache_length or self.task.text.sequence_length
        self.max_tokens = max_tokens
        self._programs, self._theta, self._search = programs, theta, search
        self._key = random.key_from_seed(seed)
        (self._batch_splits,) = programs.experiment.plan.activation_sharding(
            ["batch"]
        ).splits()
        self._run = functools.cache(self._compiled)

    def check(self, prompt: Sequence[int], name: str) -> None:
        """Checks the ids of a prompt, which messages call `name`.

        Raises:
          ValueError: there is none; one is unknown; or there are as many as the cache
            has places.
        """
        if not prompt:
            raise ValueError(f"{name} is empty: give a token or more")
        size = self.task.text.vocab_size
        unknown = [i for i in prompt if not 0 < i < size]
        if unknown:
            raise ValueError(
                f"{name} has the id {unknown[0]}: ids of tokens are from 1 to "
                f"{size - 1}, as {type(self.task.text).__name__}.vocab_size is {size}"
            )
        if len(prompt) >= self.cache_length:
            raise ValueError(
                f"{name} has {len(prompt)} tokens, which leaves no place for another "
                f"in a cache of {self.cache_length}: shorten it, or make the cache "
                f"longer, by --cache_length={len(prompt) + 1} or more"
            )

    def all(
        self, prompts: Sequence[Sequence[int]], *, number: int = 0
    ) -> list[list[Continued]]:
        """The continuations of each prompt, the best first.

        Args:
          prompts: the ids of each, as `check` passes them.
          number: of this batch; others have other draws.
        """
        for state in self._states(prompts, number, _TOKENS_OF_A_CALL):
            pass
        ids, scores = state.ids, state.scores
        return [
            [self._continued(*beam) for beam in zip(ids[row], scores[row], strict=True)]
            for row in range(len(prompts))
        ]

    def stream(
        self, prompt: Sequence[int], *, number: int = 0
    ) -> Iterator[tuple[int, ...]]:
        """The ids so far of the best continuation of a prompt, after each token."""
        for state in self._states([prompt], number, 1):
            yield self._continued(state.ids[0, 0], state.scores[0, 0]).ids

    def _continued(self, ids: np.ndarray, score: float) -> Continued:
        end = self.task.text.end_id
        tokens = ids.tolist()
        ended = end in tokens
        tokens = tokens[: tokens.index(end)] if ended else tokens
        # Below the end, and where nothing has come yet, ids are 0: so are no tokens.
        return Continued(
            ids=tuple(i for i in tokens if i), score=float(score), ended=ended
        )

    def _states(
        self, prompts: Sequence[Sequence[int]], number: int, step: int
    ) -> Iterator[NestedMap]:
        """`ids`, `scores` and `done` as arrays, after each `step` new tokens."""
        longest = max(map(len, prompts))
        place = self.cache_length - longest
        most = place if self.max_tokens is None else min(self.max_tokens, place)
        rows = -(-len(prompts) // self._batch_splits) * self._batch_splits
        run = self._run(rows, max(_SHORTEST, 1 << (longest - 1).bit_length()))
        batch = run.batch([*prompts, *[prompts[0]] * (rows - len(prompts))])
        key = random.fold_in(self._key, number).numpy()
        state = run.begin(self._theta, batch)
        until = 0
        while until < most:
            until = min(until + step, most)
            state, result = run.go_on(state, self._theta, batch, key, until)
            yield result
            if result.done[: len(prompts)].all():
                return

    def _compiled(self, rows: int, prompt_length: int) -> _Run:
        shortest = 1 if prompt_length == _SHORTEST else prompt_length // 2 + 1
        length = self.cache_length - shortest
        if self.max_tokens is not None:
            length = min(length, self.max_tokens)
        continuation = Continuation(
            task=self.task,
            search=self._search,
            prompt_length=prompt_length,
            length=length,
        )
        return _Run(self._programs, continuation, rows)


class _Run:
    """The programs for prompts up to a length.

    Args:
      programs: the experiment's.
      continuation: what they compute.
      rows: B.
    """

    def __init__(self, programs: StepPrograms, continuation: Continuation, rows: int):
        self._continuation, self._rows = continuation, rows
        plan = programs.experiment.plan
        theta = programs.abstract_state().theta
        forms = programs.plan_layout.forms.theta
        prompts = continuation.spec(rows)
        by_row = prompts.map(
            lambda spec: plan.activation_sharding(
                ("batch", *[None] * (len(spec.shape) - 1)), "prompts"
            )
        )

        def begin(theta, prompts):
            ctx, theta = programs.to_evaluate(theta)
            return continuation.begin(ctx, theta, prompts)

        def go_on(state, theta, prompts, key, until):
            ctx, theta = programs.to_evaluate(theta)
            ctx = dataclasses.replace(ctx, key=key)
            state = continuation.go_on(ctx, theta, prompts, state, until)
            decoded = continuation.result(state)
            done = continuation.search.is_done(state)
            result = NestedMap(ids=decoded.ids, scores=decoded.scores, done=done)
            return state, result

        self._begin: Program = programs.compile(
            begin, [theta, prompts], [forms, by_row], None, name="prompts"
        )
        state = self._begin.outputs
        others = [
            theta,
            prompts,
            tf.TensorSpec([2], tf.uint32),
            tf.TensorSpec([], tf.int32),
        ]
        self._go_on: Program = programs.compile(
            go_on,
            [state, *others],
            [None, forms, by_row, None, None],
            None,
            name="tokens",
            donate=(0,),
            carried=len(state.leaves()),
        )

    def batch(self, prompts: Sequence[Sequence[int]]) -> NestedMap:
        """Prompts as `Continuation.spec` has them."""
        ids = np.zeros([self._rows, self._continuation.prompt_length], np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            row[-len(prompt) :] = prompt
        return NestedMap(ids=ids, lengths=np.array(list(map(len, prompts)), np.int32))

    def begin(self, theta: NestedMap, batch: NestedMap) -> NestedMap:
        """The state before the first token, as `go_on` takes it."""
        state = self._begin(theta, batch)
        shardings = self._go_on.arguments.shardings[: len(state.leaves())]
        return state.pack(jax.device_put(state.leaves(), shardings))

    def go_on(
        self, state: NestedMap, theta: NestedMap, batch: NestedMap, key, until: int
    ) -> tuple[NestedMap, NestedMap]:
        """The next state and, as arrays, its result; takes over `state`."""
        state, result = self._go_on(state, theta, batch, key, np.int32(until))
        return state, result.map(to_host)
