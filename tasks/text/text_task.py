"""The base of tasks on rows of tokens.

Dims: B batch, S sequence, M model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import tensorflow as tf
from absl import logging

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.layer import Context
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.positions import InputPositions, sinusoids
from meshwright.layers.basic.embedding import (
    Softmax,
    SoftmaxKind,
    TokenEmbedding,
    check_vocab_size,
)
from meshwright.layers.basic.linear import BSM
from meshwright.layers.basic.token_loss import TokenLoss, token_loss
from meshwright.layers.experts.moe import merge_aux, x_and_aux
from meshwright.layers.stacks.loss_by_parts import check_parts, loss_by_parts
from meshwright.tasks.input.batched_input import TokenInput
from meshwright.tasks.input.dataset_input import OF_DATASET
from meshwright.tasks.task import Task, TaskLoss
from meshwright.tasks.text.expert_metrics import expert_heat_maps, expert_metrics
from meshwright.tasks.text.vocabulary import VOCABULARY_FILE, SentencePieceVocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """Base of tasks that read and predict tokens of one vocabulary.

    Args:
      text: the input; all its tensors are [B, S].
      embedding: the embedding of tokens, V x M.
      softmax: output layer, or None if it shares the embedding's table.
      input_positions: what is added to embeddings.
      logit_cap: logits are cap * tanh(logits / cap), as in Gemma 2 with a cap of 30.
      label_smoothing: the share of the loss in which all tokens are equally right.
      z_loss: the factor of the squared logarithm of the softmax's denominator in the
        loss, as in PaLM with 1e-4.
      loss_parts: into how many parts the predicted sequence is divided, of which
        logits and loss are computed one after another; above 1 no tensor has all
        logits [B, S, V], and the backward pass computes them again.

    Raises:
      ValueError: a layer's vocabulary is smaller than the input's; the embedding and
        `softmax` disagree on whether the table is shared; a field is out of range.
    """

    token_name: ClassVar[str] = "tokens"
    stacks: ClassVar[tuple[str, ...]]
    """The fields that are stacks of layers; any may hold mixtures of experts."""

    text: TokenInput
    embedding: TokenEmbedding
    softmax: Softmax | None = None
    input_positions: InputPositions = InputPositions.NONE
    logit_cap: float | None = bounded(None, above=0)
    label_smoothing: float = bounded(0.0, at_least=0, below=1)
    z_loss: float = bounded(0.0, at_least=0)
    loss_parts: int = bounded(1, at_least=1)

    def __post_init__(self):
        super().__post_init__()
        tokens = f"{type(self.text).__name__}'s tokens"
        for layer in filter(None, (self.embedding, self.softmax)):
            check_vocab_size(layer, self.text.vocab_size, tokens)
        if self.input_positions is not InputPositions.NONE and (
            self.embedding.model_dims % 2
        ):
            raise ValueError(
                f"{type(self).__name__}.input_positions come in pairs of a sine and a "
                f"cosine, but TokenEmbedding.model_dims is "
                f"{self.embedding.model_dims}: make it even"
            )
        shared = self.embedding.softmax is SoftmaxKind.SHARED
        if shared == (self.softmax is not None):
            raise ValueError(
                f"TokenEmbedding.softmax is {self.embedding.softmax} but "
                f"{type(self).__name__}.softmax is {self.softmax}: give a softmax "
                "layer, if and only if the table is SEPARATE"
            )

    def embed(
        self, ctx: Context, theta: NestedMap, *tokens: tuple[tf.Tensor, tf.Tensor]
    ) -> list[tf.Tensor]:
        """Embeddings [B, S, M] of each pair of ids [B, S] and positions [B or 1, S]."""
        with ctx.scope("embedding") as c:
            ids = [each for each, _ in tokens]
            embedded = self.embedding.fprop_each(c, theta.embedding, ids)
            if self.input_positions is InputPositions.NONE:
                return embedded
            waves = [
                c.cast(sinusoids(positions, self.embedding.model_dims))
                for _, positions in tokens
            ]
            pairs = zip(embedded, waves, strict=True)
            return [c.split(x + wave, BSM) for x, wave in pairs]

    def run_stack(
        self, ctx: Context, theta: NestedMap, name: str, x: tf.Tensor, **inputs
    ) -> tuple[tf.Tensor, NestedMap]:
        """The output of stack `name`, and `aux` of its mixtures of experts by its name.

        `aux` is empty if there are no mixtures.
        """
        with ctx.scope(name) as c:
            out = getattr(self, name).fprop(c, theta[name], x, **inputs)
        x, aux = x_and_aux(out)
        return x, NestedMap() if aux is None else NestedMap({name: merge_aux(aux)})

    def to_logits(self, ctx: Context, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Logits [B, S, V] of normalized `x` [B, S, M], in the activation dtype."""
        with ctx.scope("softmax") as c:
            if self.softmax is None:
                logits = self.embedding.attend(c, theta.embedding, x)
            else:
                logits = self.softmax.fprop(c, theta.softmax, x)
            if self.logit_cap is None:
                return logits
            return self.logit_cap * tf.tanh(logits / self.logit_cap)

    def token_loss(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        labels: tf.Tensor,
        weights: tf.Tensor,
    ) -> TokenLoss:
        """Sums of the loss of normalized `x` [B, S, M], over tokens by their weights.

        Args:
          ctx: the task's context.
          theta: the task's weights.
          x: what the last stack says, normalized.
          labels: int32 [B, S].
          weights: float32 [B, S].

        Raises:
          ValueError: `loss_parts` do not divide the sequence that a device has.
        """

        def of(ctx, theta, inputs):
            x, labels, weights = inputs
            logits = self.to_logits(ctx, theta, x)
            with ctx.scope("loss"):
                return token_loss(
                    logits,
                    labels,
                    weights,
                    label_smoothing=self.label_smoothing,
                    z_loss=self.z_loss,
                )

        if self.loss_parts == 1:
            return of(ctx, theta, [x, labels, weights])
        field = f"{type(self).__name__}.loss_parts"
        check_parts(ctx, field, self.loss_parts, x.shape[1])
        name = "embedding" if self.softmax is None else "softmax"
        read, specs = (
            NestedMap({name: tree[name]}) for tree in (theta, self.weights())
        )
        return loss_by_parts(
            ctx, of, read, specs, x, [labels, weights], parts=self.loss_parts
        )

    def total_loss(self, loss: tf.Tensor, sums: NestedMap, aux: NestedMap) -> TaskLoss:
        """`loss` and `sums`, with those of mixtures of experts by stack."""
        for name, stack_aux in aux.items():
            loss += stack_aux.loss
            sums[name] = stack_aux.sums
        return TaskLoss(loss=loss, sums=sums)

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        metrics = {"loss": float(sums["nats"] / max(sums["tokens"], 1.0))}
        for name in self.stacks:
            metrics |= expert_metrics(sums, name)
        return metrics

    def heat_maps(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        maps = {}
        for name in self.stacks:
            maps |= expert_heat_maps(sums, name)
        return maps

    def stacks_flops(self, global_batch: int, lengths: Mapping[str, int]) -> float:
        """Six FLOPs per token and matrix weight, plus those of layers beyond weights.

        The backward pass costs twice the forward pass; embedding lookup does not count.

        Args:
          global_batch: B.
          lengths: S of each stack and of "softmax".
        """
        weights = self.weights()
        parts = {name: weights[name] for name in self.stacks}
        parts["softmax"] = weights.get("softmax", weights.embedding)
        total = 0.0
        for name, specs in parts.items():
            size = sum(spec.size for spec in specs.leaves() if spec.is_matrix)
            extra = 0.0
            if name in self.stacks:
                extra = getattr(self, name).extra_flops(lengths[name])
            total += global_batch * lengths[name] * (6.0 * size + 3.0 * extra)
        return total

    @property
    def loss_extras(self) -> str:
        extras = {"label smoothing": self.label_smoothing, "z-loss": self.z_loss}
        return " and ".join(f"{name} ({x:g})" for name, x in extras.items() if x)

    @property
    def subwords(self) -> SentencePieceVocabulary | None:
        """The settings of the input's vocabulary of subwords, if it has one."""
        vocabulary = getattr(self.text, "vocabulary", None)
        is_subwords = isinstance(vocabulary, SentencePieceVocabulary)
        return vocabulary if is_subwords else None

    def trained_files(self) -> dict[str, bytes]:
        if self.subwords is None:
            return {}
        return {VOCABULARY_FILE: self.text.trained_vocabulary().model}

    def as_trained(self, folder: str) -> Self:
        """The task with the vocabulary of the training whose folder that is.

        It is as it was if it has no vocabulary, or one of a file, and if there is no
        vocabulary in the folder. The folder may be in a bucket.
        """
        vocabulary = self.subwords
        if vocabulary is None or vocabulary.model_file:
            return self
        file = os.path.join(os.path.expanduser(folder), VOCABULARY_FILE)
        if not tf.io.gfile.exists(file):
            return self
        vocabulary = dataclasses.replace(vocabulary, model_file=file)
        text = dataclasses.replace(self.text, vocabulary=vocabulary)
        return dataclasses.replace(self, text=text)

    def check_vocabulary(self, trained: Mapping[str, Any]) -> None:
        """Checks the vocabulary against that in a training's `data_fingerprint`.

        Warns where there is none, as the tokens were a pipeline's.

        Raises:
          ValueError: it is another.
        """
        wanted = trained.get("vocabulary")
        if wanted is None:
            if any(name.startswith(OF_DATASET) for name in trained):
                name = "TextInput's bytes"
                if self.subwords is not None:
                    digest = self.text.trained_vocabulary().sha256[:12]
                    name = f"{self.subwords.model_file} (SHA-256 {digest}...)"
                logging.warning(
                    "the weights were trained on ids of a pipeline, of which no "
                    "vocabulary was saved: text is read and written by %s, and nothing "
                    "checks that it is the pipeline's",
                    name,
                )
            return
        if self.subwords is None or self.text.trained_vocabulary().sha256 != wanted:
            raise ValueError(
                "the vocabulary is not the one that the weights were trained with, "
                f"whose model has the SHA-256 {wanted}: set "
                "SentencePieceVocabulary.model_file to that model, which a training "
                f"writes into its folder as {VOCABULARY_FILE}, or bring back the "
                "training files as they were"
            )

    @property
    def input(self) -> TokenInput:
        return self.text

    def batch_dims(self) -> NestedMap:
        return self.batch_spec(1).map(lambda _: ("batch", "sequence"))
