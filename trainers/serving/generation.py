"""Continuation of prompts by an experiment's language model, on its mesh.

Two programs do it: one reads the prompts and fills the cache, the other chooses tokens
until it has as many as it is told. Between its calls the tokens so far can be shown.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import tensorflow as tf

from meshwright.framework.compiler.program import Program
from meshwright.framework.compiler.xla.processes import to_host
from meshwright.framework.modeling import random
from meshwright.framework.modeling.checks import check_value
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.input.example_order import SEEDS
from meshwright.tasks.text.continuation import Continuation
from meshwright.tasks.text.decoding import Decoder
from meshwright.tasks.text.language_model import LanguageModel
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.stacks import pipelines
from meshwright.trainers.experiment.step_programs import StepPrograms

# Programs are compiled for prompts up to a power of two, so that they serve others too.
_SHORTEST = 16
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a byte decodes to that does not complete a character yet."""

# New tokens of a call where nobody looks at them: rows that fill up the batch may go on
# when all others have ended.
_TOKENS_OF_A_CALL = 32


class TooLongError(ValueError):
    """A prompt has more tokens than the model has place for."""


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
      ValueError: it is no language model, or one whose input is no text.
    """
    task = experiment.task
    if not isinstance(task, LanguageModel):
        raise ValueError(
            f"Experiment.task is {type(task).__name__}, which does not continue text: "
            "generate with an experiment whose task is a LanguageModel, such as "
            "lm/stdlib_tiny.gin, or a Translation; other models answer once they are "
            "exported, by meshwright-export"
        )
    needed = ("sequence_length", "end_id", "encode", "decode", "vocabulary")
    lacking = [name for name in needed if not hasattr(task.text, name)]
    if lacking:
        raise ValueError(
            f"LanguageModel.text is {type(task.text).__name__}, which has no "
            f"{' and no '.join(lacking)}: generate with @TextInput() in its place"
        )
    return task


def check_prompt(
    task: LanguageModel, prompt: Sequence[int], cache_length: int | None, name: str
) -> None:
    """Checks the ids of a prompt, which messages call `name`.

    Raises:
      ValueError: there is none, or one is unknown.
      TooLongError: there are as many as the cache has places.
    """
    if not prompt:
        raise ValueError(f"{name} is empty: give text to continue")
    # Padding is no token, unless it starts a text as in T5.
    least, size = min(task.text.start_id, 1), task.embedding.vocab_size
    unknown = [i for i in prompt if not least <= i < size]
    if unknown:
        raise ValueError(
            f"{name} has the id {unknown[0]}, but ids of tokens are from {least} to "
            f"{size - 1}, as TokenEmbedding.vocab_size is {size}: leave it out"
        )
    places = _places(task, cache_length)
    if len(prompt) >= places:
        raise TooLongError(
            f"{name} has {len(prompt)} tokens, which leaves no place for another in a "
            f"cache of {places}: shorten it, or make the cache longer, by "
            f"--cache_length={len(prompt) + 1} or more"
        )


def check_beams(task: LanguageModel, search: Decoder) -> None:
    """Refuses more beams than there are first tokens for them.

    Raises:
      ValueError: there are more.
    """
    size = task.text.vocab_size
    if search.beams > size:
        raise ValueError(
            f"there are {search.beams} beams, but the vocabulary has {size} tokens: "
            f"take at most {size}"
        )


def row_multiple(experiment: Experiment) -> int:
    """The number of rows whose multiples divide among devices, in pipelines too."""
    plan, dims = experiment.plan, ["batch"]
    if "microbatch" in plan.activations and pipelines(experiment.task):
        dims.append("microbatch")
    return math.lcm(*(plan.activation_sharding([d]).splits()[0] for d in dims))


def _places(task: LanguageModel, cache_length: int | None) -> int:
    """How many tokens the cache has place for."""
    return task.text.sequence_length if cache_length is None else cache_length


def text_after(task: LanguageModel, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text that `ids` add to a prompt's.

    Both are decoded together: a vocabulary that puts a space before each text takes it
    off the first piece, which of `ids` alone is the space between two words.
    """
    ends = [i for i, each in enumerate(prompt) if each == task.text.end_id]
    begun = [*prompt[ends[-1] + 1 :]] if ends else [*prompt]  # Decoding ends there.
    before, whole = task.text.decode(begun), task.text.decode([*begun, *ids])
    if not whole.startswith(before):  # Its last character was not complete.
        before = before.rstrip(INCOMPLETE)
    return whole[len(before) :]


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
      ValueError: the task is no language model; a size is below 1; the seed is negative
        or has more than 63 bits; there are more beams than the vocabulary has tokens.
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
        for name, size in (("cache_length", cache_length), ("max_tokens", max_tokens)):
            if size is not None:
                check_value(f"Generator's {name}", size, at_least=1, whole=True)
        check_value("Generator's seed", seed, whole=True, **SEEDS)
        check_beams(self.task, search)
        self._cache_length = _places(self.task, cache_length)
        self._max_tokens = max_tokens
        self._programs, self._theta, self.search = programs, theta, search
        self._key = random.key_from_seed(seed)
        self._row_multiple = row_multiple(programs.experiment)
        self._run = functools.cache(self._compiled)

    def all(
        self, prompts: Sequence[Sequence[int]], *, number: int = 0
    ) -> list[list[Continued]]:
        """The continuations of each prompt, the best first.

        Args:
          prompts: the ids of each, one or more.
          number: of this batch; others have other draws.

        Raises:
          ValueError: there are no prompts; see `check_prompt`.
        """
        *_, last = self._results(prompts, number, _TOKENS_OF_A_CALL)
        return [self._continued(last, row) for row in range(len(prompts))]

    def stream(
        self, prompt: Sequence[int], *, number: int = 0
    ) -> Iterator[tuple[int, ...]]:
        """The ids so far of the best continuation of a prompt, after each token.

        With several beams those after a token may be of another beam than those before.

        Raises:
          ValueError: see `check_prompt`.
        """
        for result in self._results([prompt], number, 1):
            yield self._continued(result, 0)[0].ids

    def _continued(self, result: NestedMap, row: int) -> list[Continued]:
        """The continuations of a row."""
        end, continued = self.task.text.end_id, []
        for ids, score in zip(result.ids[row], result.scores[row], strict=True):
            tokens = ids[: result.count].tolist()
            ended = end in tokens
            if ended:
                tokens = tokens[: tokens.index(end)]
            continued.append(
                Continued(ids=tuple(tokens), score=float(score), ended=ended)
            )
        return continued

    def _results(
        self, prompts: Sequence[Sequence[int]], number: int, step: int
    ) -> Iterator[NestedMap]:
        """What `_Run.go_on` has so far, after each `step` new tokens."""
        if not prompts:
            raise ValueError("there are no prompts: give one or more to continue")
        for row, prompt in enumerate(prompts):
            check_prompt(self.task, prompt, self._cache_length, f"prompt {row}")
        longest = max(map(len, prompts))
        place = self._cache_length - longest
        most = place if self._max_tokens is None else min(self._max_tokens, place)
        rows = -(-len(prompts) // self._row_multiple) * self._row_multiple
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
        length = self._cache_length - shortest
        if self._max_tokens is not None:
            length = min(length, self._max_tokens)
        continuation = Continuation(
            task=self.task,
            search=self.search,
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
            return state, NestedMap(result, count=state.position)

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
        """The next state and, as arrays, what was found; takes over `state`.

        That is `ids` [B, K, N] and `scores` [B, K], see `Decoded`; `done` [B], the rows
        that have ended; and `count`, how many new tokens there are.
        """
        state, result = self._go_on(state, theta, batch, key, np.int32(until))
        return state, result.map(to_host)
