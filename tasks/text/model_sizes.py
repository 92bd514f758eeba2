"""Sizes of language models by name, and what follows from them.

Shapes are those of published models, all with one table for embedding and softmax. The
weights N that a token meets and published rules then give how long to train, on how
large batches and at which learning rate:

- tokens: 20 N (Hoffmann et al. 2022, table 3: about 20 for each weight).
- compute: C = 6 N FLOPs for each token (Kaplan et al. 2020, section 2.1).
- batch: 0.2920 C^0.3271 tokens, and learning rate: 0.3118 C^-0.1250 (DeepSeek-AI 2024,
  DeepSeek LLM, equation 1, fitted to dense models from 1e17 to 2e19 FLOPs: other sizes
  here extrapolate it). Rows are rounded to the nearest power of two.
- warm-up: 2000 steps, or a tenth of the training; then down to a tenth of the learning
  rate (section 2.3 of the same for the first, Hoffmann et al. 2022 for the second).

Dims: M model, H hidden, N heads, K heads of keys and values, D head size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import TypeVar

import gin

_TOKENS_OF_A_WEIGHT = 20
_WARMUP_STEPS = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The shape of a decoder-only Transformer with gated feed-forward layers.

    Args:
      num_layers: how many layers.
      model_dims: M.
      hidden_dims: H of the three matrices of a feed-forward layer, or of an expert's.
      num_heads: N.
      num_kv_heads: K.
      head_dim: D.
      vocab_size: V.
      sequence_length: tokens of a row.
    """

    num_layers: int
    model_dims: int
    hidden_dims: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    sequence_length: int

    @property
    def active_weights(self) -> int:
        """Weights that a token meets, those of embedding and softmax once."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = self.model_dims * (heads + 3 * self.hidden_dims)
        return self.num_layers * layer + self.vocab_size * self.model_dims

    @property
    def train_tokens(self) -> int:
        return _TOKENS_OF_A_WEIGHT * self.active_weights

    @property
    def train_flops(self) -> float:
        return 6.0 * self.active_weights * self.train_tokens

    @property
    def global_batch(self) -> int:
        """Rows of a step."""
        rows = 0.2920 * self.train_flops**0.3271 / self.sequence_length
        return 2 ** round(math.log2(rows))

    @property
    def num_steps(self) -> int:
        return round(self.train_tokens / (self.global_batch * self.sequence_length))

    @property
    def warmup_steps(self) -> int:
        return min(_WARMUP_STEPS, self.num_steps // 10)

    @property
    def learning_rate(self) -> float:
        """After the warm-up."""
        return 0.3118 * self.train_flops**-0.1250

    @property
    def last_learning_rate(self) -> float:
        return self.learning_rate / 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsSize(ModelSize):
    """The shape of one with a mixture of experts in each layer.

    Args:
      num_experts: how many experts a layer has.
      experts_of_a_token: how many of them a token goes to.
    """

    num_experts: int
    experts_of_a_token: int

    @property
    def active_weights(self) -> int:
        experts = (self.experts_of_a_token - 1) * 3 * self.hidden_dims
        gating = self.num_experts
        more = self.num_layers * self.model_dims * (experts + gating)
        return super().active_weights + more

    @property
    def capacity_factor(self) -> float:
        """A quarter more slots than choices (Zoph et al. 2022)."""
        return 1.25 * self.experts_of_a_token

    @property
    def group_size(self) -> int:
        """Tokens of a group; dispatch grows with its square."""
        return min(self.sequence_length, 512)


def _dense(layers, model, hidden, heads, kv_heads, head, vocab, length) -> ModelSize:
    return ModelSize(
        num_layers=layers,
        model_dims=model,
        hidden_dims=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head,
        vocab_size=vocab,
        sequence_length=length,
    )


def _experts(count: int, chosen: int, *shape: int) -> ExpertsSize:
    sizes = dataclasses.asdict(_dense(*shape))
    return ExpertsSize(**sizes, num_experts=count, experts_of_a_token=chosen)


_BYTES = 264
_GPT2 = 50304  # 50257, rounded up to a multiple of 128.
_LLAMA_3 = 128256

DENSE: Mapping[str, ModelSize] = {
    "tiny": _dense(4, 128, 384, 4, 4, 32, _BYTES, 128),
    # Brown et al. 2020, table 2.1: Small, Medium, Large. Gated layers of two thirds of
    # the hidden dims have as many weights (Shazeer 2020).
    "125m": _dense(12, 768, 2048, 12, 12, 64, _GPT2, 2048),
    "350m": _dense(24, 1024, 2736, 16, 16, 64, _GPT2, 2048),
    "760m": _dense(24, 1536, 4096, 16, 16, 96, _GPT2, 2048),
    # Llama 3.2 (Meta 2024, model card), with another vocabulary.
    "1b": _dense(16, 2048, 8192, 32, 8, 64, _GPT2, 4096),
    "3b": _dense(28, 3072, 8192, 24, 8, 128, _GPT2, 4096),
    # Llama 3 (Dubey et al. 2024), table 3.
    "8b": _dense(32, 4096, 14336, 32, 8, 128, _LLAMA_3, 8192),
    "70b": _dense(80, 8192, 28672, 64, 8, 128, _LLAMA_3, 8192),
    "405b": _dense(126, 16384, 53248, 128, 8, 128, _LLAMA_3, 8192),
    # GSPMD (Xu et al. 2021), table 2, with gated layers of two thirds of the hidden
    # dims, to a multiple of 256.
    "1t": _dense(128, 16384, 87296, 256, 256, 256, _LLAMA_3, 8192),
}
"""Sizes of `params/lm/dense.gin`."""

EXPERTS: Mapping[str, ExpertsSize] = {
    "tiny": _experts(8, 2, 4, 128, 192, 4, 4, 32, _BYTES, 128),
    # OLMoE (Muennighoff et al. 2024), 1B-7B.
    "7b": _experts(64, 8, 16, 2048, 1024, 16, 16, 128, _GPT2, 4096),
    # Mixtral 8x7B (Jiang et al. 2024), table 1, and 8x22B (its configuration).
    "47b": _experts(8, 2, 32, 4096, 14336, 32, 8, 128, 32000, 8192),
    "141b": _experts(8, 2, 56, 6144, 16384, 48, 8, 128, 32768, 8192),
    # Qwen3 (Yang et al. 2025), 235B-A22B.
    "235b": _experts(128, 8, 94, 4096, 1536, 64, 4, 128, 151936, 4096),
    # Kimi K2 (Kimi Team 2025), with grouped heads for its latent attention, and without
    # its shared expert and its dense first layer.
    "1t": _experts(384, 8, 61, 7168, 2048, 64, 8, 128, 163840, 4096),
}
"""Sizes of `params/lm/experts.gin`."""

_Size = TypeVar("_Size", bound=ModelSize)


@gin.register
def dense_size(*, size: str, field: str) -> int | float:
    """A field or a property of one of the sizes `DENSE`, by its name.

    Raises:
      ValueError: there is no such size, or no such field.
    """
    return _looked_up("dense_size", DENSE, size, field)


@gin.register
def experts_size(*, size: str, field: str) -> int | float:
    """A field or a property of one of the sizes `EXPERTS`, by its name.

    Raises:
      ValueError: there is no such size, or no such field.
    """
    return _looked_up("experts_size", EXPERTS, size, field)


def _looked_up(
    function: str, sizes: Mapping[str, _Size], size: str, field: str
) -> int | float:
    if size not in sizes:
        raise ValueError(
            f"SIZE is {size!r}; it must be one of {', '.join(map(repr, sizes))}"
        )
    found = sizes[size]
    known = [name for name in dir(found) if not name.startswith("_")]
    if field not in known:
        near = difflib.get_close_matches(field, known, 1)
        raise ValueError(
            f"{function}.field is {field!r}; it must be one of {', '.join(known)}"
            f"{f'. Did you mean {near[0]}?' if near else ''}"
        )
    return getattr(found, field)
