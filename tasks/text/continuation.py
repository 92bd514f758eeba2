"""Continuation of prompts by a language model.

Prompts of a batch end together: shorter ones begin with padding, which no token sees,
and positions count from a prompt's first token. A pass over all prompts fills the
cache; the search then begins with their last tokens. Tokens that see later ones, by a
mask that is not causal, see those of the prompt.

Dims: B prompts, P tokens of the longest prompt, K beams, N new tokens.
"""

from __future__ import annotations

import dataclasses
import functools

import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.modeling.shapes import copies_of_each, shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.stacks.beams import Beams
from meshwright.tasks.text.decoding import Decoded, Decoder, TokenModel
from meshwright.tasks.text.language_model import LanguageModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuation:
    """Continues prompts, in programs of fixed shapes.

    Args:
      task: the model.
      search: how tokens are chosen.
      prompt_length: P.
      length: N, the most new tokens.
    """

    task: LanguageModel
    search: Decoder
    prompt_length: int
    length: int

    def spec(self, rows: int) -> NestedMap:
        """`ids` int32 [B, P], which end in the last column, and `lengths` int32 [B].

        What comes before a prompt is not read. A length is 1 or more.
        """
        return NestedMap(
            ids=tf.TensorSpec([rows, self.prompt_length], tf.int32),
            lengths=tf.TensorSpec([rows], tf.int32),
        )

    def begin(self, ctx: Context, theta: NestedMap, prompts: NestedMap) -> NestedMap:
        """The state of the search before the first new token, for `go_on`.

        Raises:
          ValueError: the model's stack decodes nothing, see `LanguageModel.init_cache`.
        """
        P = self.prompt_length
        rows = shape_of(prompts.ids)[0]
        beams = self._beams()
        cache = self.task.init_cache(ctx, rows, beams.length)
        padding = (P - prompts.lengths)[:, None]
        # The last tokens too, which others may see; the search reads them again.
        _, cache = self.task.step(
            ctx,
            theta,
            prompts.ids,
            cache,
            0,
            paddings=self._paddings(prompts),
            segment_positions=tf.maximum(tf.range(P) - padding, 0),
        )
        cache = beams.begin(ctx, cache, rows)
        return self.search.begin(ctx, self._model(ctx, theta, prompts, cache))

    def go_on(
        self,
        ctx: Context,
        theta: NestedMap,
        prompts: NestedMap,
        state: NestedMap,
        until: tf.Tensor,
    ) -> NestedMap:
        """The state when all rows are done or have `until` new tokens, N or less."""
        model = self._model(ctx, theta, prompts, state.cache)
        with ctx.scope("search") as c:
            return self.search.go_on(c, model, state, until)

    def result(self, state: NestedMap) -> Decoded:
        """The new tokens [B, K, N] up to a state."""
        return self.search.result(state)

    def _model(self, ctx, theta, prompts, cache) -> TokenModel:
        beams, K = self._beams(), self.search.beams
        lengths = copies_of_each(prompts.lengths[:, None], K, 1)

        def step(ids, cache, position):
            run = functools.partial(
                self.task.step,
                ctx,
                theta,
                beams.tokens(ids),
                segment_positions=beams.tokens(lengths + position - 1),
            )
            x, cache = beams.step(
                run, cache, position, paddings=self._paddings(prompts)
            )
            logits = self.task.to_logits(ctx, theta, x)
            return tf.reshape(logits, [-1, K, logits.shape[-1]]), cache

        return TokenModel(
            step=step,
            cache=cache,
            batch=shape_of(prompts.ids)[0],
            length=self.length,
            start_id=prompts.ids[:, -1],
            end_id=self.task.text.end_id,
            reordered=beams.reordered,
        )

    def _beams(self) -> Beams:
        """Of the search, whose first step reads the last token of prompts again."""
        return self.search.hypotheses(
            stack=self.task.stack,
            path=f"{type(self.task).__name__}.stack",
            steps=self.length,
            before=self.prompt_length - 1,
        )

    def _paddings(self, prompts: NestedMap) -> tf.Tensor:
        """int32 [B, P], 1 before a prompt's first token."""
        padding = self.prompt_length - prompts.lengths[:, None]
        return tf.cast(tf.range(self.prompt_length) < padding, tf.int32)
