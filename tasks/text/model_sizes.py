"""Sizes of language models by name, and what follows from them.

The weights N that a token meets and published rules give how long to train, on how
large batches and at which learning rate:

- tokens: D = 20 N (Hoffmann et al. 2022, table 3: about 20 for each weight).
- compute: C = 6 N D FLOPs, 6 N for each token (Kaplan et al. 2020, section 2.1, whose N
  has no embeddings; this one has).
- batch: 0.2920 C^0.3271 tokens, and learning rate: 0.3118 C^-0.1250 (DeepSeek-AI 2024,
  DeepSeek LLM, equation 1). There C is M D, and M the FLOPs of a token without
  embeddings but with attention. The law was fitted to dense models from 1e17 to 2e19
  FLOPs: other sizes here extrapolate it. Rows are rounded to the nearest power of two.
- at most 2^24 tokens a step, the largest batch of Llama 3 405B (Dubey et al. 2024,
  section 3.4.1). The learning rate has no such bound.
- warm-up: 2000 steps, or a tenth of the training; then down to a tenth of the learning
  rate (section 2.3 of DeepSeek LLM for the first, Hoffmann et al. 2022 for the second).

A paper named in a table gives layers, model dims, heads, head size and, unless the
table says otherwise, hidden dims, heads of keys and values, and experts. The rest is
chosen here: lengths of rows, vocabularies, some of which are the papers', and one table
for embedding and softmax.

Dims: M model, H hidden, N heads, K heads of keys and values, D head size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Mapping

import gin

_TOKENS_OF_A_WEIGHT = 20
_MOST_TOKENS_OF_A_STEP = 2**24
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
        tokens = min(0.2920 * self.train_flops**0.3271, _MOST_TOKENS_OF_A_STEP)
        return 2 ** round(math.log2(tokens / self.sequence_length))

    @property
    def num_steps(self) -> int:
        return round(self.train_tokens / (self.global_batch * self.sequence_length))

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
        """A quarter more slots than choices."""
        return 1.25 * self.experts_of_a_token

    @property
    def group_size(self) -> int:
        """Tokens of a group; dispatch grows with its square."""
        return min(self.sequence_length, 512)


_BYTES = 264
_GPT2 = 50304  # 50257, rounded up to a multiple of 128.
_LLAMA_3 = 128256

DENSE: Mapping[str, ModelSize] = {
    # Of no paper.
    "tiny": ModelSize(
        num_layers=4,
        model_dims=128,
        hidden_dims=384,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        vocab_size=_BYTES,
        sequence_length=128,
    ),
    # Brown et al. 2020, table 2.1: Small, Medium, Large. Gated layers of two thirds of
    # the hidden dims have as many weights (Shazeer 2020). No grouped heads.
    "125m": ModelSize(
        num_layers=12,
        model_dims=768,
        hidden_dims=2048,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        vocab_size=_GPT2,
        sequence_length=2048,
    ),
    "350m": ModelSize(
        num_layers=24,
        model_dims=1024,
        hidden_dims=2736,
        num_heads=16,
        num_kv_heads=16,
        head_dim=64,
        vocab_size=_GPT2,
        sequence_length=2048,
    ),
    "760m": ModelSize(
        num_layers=24,
        model_dims=1536,
        hidden_dims=4096,
        num_heads=16,
        num_kv_heads=16,
        head_dim=96,
        vocab_size=_GPT2,
        sequence_length=2048,
    ),
    # Llama 3.2 (Meta 2024, model card), with another vocabulary.
    "1b": ModelSize(
        num_layers=16,
        model_dims=2048,
        hidden_dims=8192,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=_GPT2,
        sequence_length=4096,
    ),
    "3b": ModelSize(
        num_layers=28,
        model_dims=3072,
        hidden_dims=8192,
        num_heads=24,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=_GPT2,
        sequence_length=4096,
    ),
    # Llama 3 (Dubey et al. 2024), table 3.
    "8b": ModelSize(
        num_layers=32,
        model_dims=4096,
        hidden_dims=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=_LLAMA_3,
        sequence_length=8192,
    ),
    "70b": ModelSize(
        num_layers=80,
        model_dims=8192,
        hidden_dims=28672,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=_LLAMA_3,
        sequence_length=8192,
    ),
    "405b": ModelSize(
        num_layers=126,
        model_dims=16384,
        hidden_dims=53248,
        num_heads=128,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=_LLAMA_3,
        sequence_length=8192,
    ),
    # GSPMD (Xu et al. 2021), table 2, with gated layers of two thirds of the hidden
    # dims, to a multiple of 256, and Llama 3's vocabulary. No grouped heads.
    "1t": ModelSize(
        num_layers=128,
        model_dims=16384,
        hidden_dims=87296,
        num_heads=256,
        num_kv_heads=256,
        head_dim=256,
        vocab_size=_LLAMA_3,
        sequence_length=8192,
    ),
}
"""Sizes of `params/lm/dense.gin`."""

EXPERTS: Mapping[str, ExpertsSize] = {
    # Of no paper.
    "tiny": ExpertsSize(
        num_layers=4,
        model_dims=128,
        hidden_dims=192,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        vocab_size=_BYTES,
        sequence_length=128,
        num_experts=8,
        experts_of_a_token=2,
    ),
    # OLMoE (Muennighoff et al. 2024), 1B-7B. No grouped heads.
    "7b": ExpertsSize(
        num_layers=16,
        model_dims=2048,
        hidden_dims=1024,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        vocab_size=_GPT2,
        sequence_length=4096,
        num_experts=64,
        experts_of_a_token=8,
    ),
    # Mixtral 8x7B (Jiang et al. 2024), table 1, and 8x22B (its configuration).
    "47b": ExpertsSize(
        num_layers=32,
        model_dims=4096,
        hidden_dims=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=32000,
        sequence_length=8192,
        num_experts=8,
        experts_of_a_token=2,
    ),
    "141b": ExpertsSize(
        num_layers=56,
        model_dims=6144,
        hidden_dims=16384,
        num_heads=48,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=32768,
        sequence_length=8192,
        num_experts=8,
        experts_of_a_token=2,
    ),
    # Qwen3 (Yang et al. 2025), 235B-A22B.
    "235b": ExpertsSize(
        num_layers=94,
        model_dims=4096,
        hidden_dims=1536,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
        sequence_length=4096,
        num_experts=128,
        experts_of_a_token=8,
    ),
    # Kimi K2 (Kimi Team 2025), with grouped heads for its latent attention, and without
    # its shared expert and its dense first layer.
    "1t": ExpertsSize(
        num_layers=61,
        model_dims=7168,
        hidden_dims=2048,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=163840,
        sequence_length=4096,
        num_experts=384,
        experts_of_a_token=8,
    ),
}
"""Sizes of `params/lm/experts.gin`."""

_FAMILIES: Mapping[str, Mapping[str, ModelSize]] = {"dense": DENSE, "experts": EXPERTS}


@gin.register
def model_size(*, family: str, size: str) -> int | float:
    """The value of a size that gin's scope names: `@num_layers/model_size()`.

    Args:
      family: "dense" for the sizes `DENSE`, or "experts" for `EXPERTS`.
      size: one of them, by its name.

    Raises:
      ValueError: there is no such family, size or field.
    """
    _check_known("model_size.family", family, _FAMILIES)
    _check_known("SIZE", size, _FAMILIES[family])
    shape = _FAMILIES[family][size]
    fields = [name for name in dir(shape) if not name.startswith("_")]
    field = gin.current_scope_str()
    _check_known("the scope of model_size", field, fields)
    return getattr(shape, field)


@gin.register
def warmup_steps(*, num_steps: int) -> int:
    """2000 steps, or a tenth of `num_steps`, but at least one."""
    return max(1, min(_WARMUP_STEPS, num_steps // 10))


def _check_known(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(str(name), known, 1)
        raise ValueError(
            f"{what} is {name!r}; it must be one of {', '.join(map(repr, known))}"
            f"{f'. Did you mean {near[0]!r}?' if near else ''}"
        )
