"""The families of published models: their mapping files, keys of their config.json.

Defaults are those of the classes of Transformers that read such a config.json: a file
leaves out keys that have them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.trainers.checkpoints.checkpoint_digests import CheckpointError
from meshwright.trainers.checkpoints.published import family_facts as facts
from meshwright.trainers.checkpoints.published.mapping_files import (
    MappingLine,
    TensorMapping,
    of_family,
)
from meshwright.trainers.checkpoints.published.published_facts import (
    Config,
    Fact,
    Model,
    shown,
)

_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
}
_LLAMA_DEFAULTS = {
    **_DEFAULTS,
    "hidden_act": "silu",
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_QWEN_DEFAULTS = {
    **_DEFAULTS,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA_DEFAULTS = {
    **_DEFAULTS,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

# What a config may say of what is not here, where it says that it is not there.
_INERT: Mapping[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
    "quantization_config": (None,),
    "compression_config": (None,),
    "auto_map": (None,),  # Code of its own.
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of published models.

    Args:
      name: what its config.json calls `model_type`.
      architecture: the class that its config.json names.
      lines: those of its mapping file.
      defaults: what a config.json says by having no such key.
      facts: what its config.json says of a model.
    """

    name: str
    architecture: str
    lines: tuple[MappingLine, ...]
    defaults: Mapping[str, Any]
    facts: tuple[Fact, ...]

    def problems(self, model: Model, config: Config) -> list[str]:
        """Where a model and a config do not agree, a line each.

        Raises:
          CheckpointError: values of the config are of the wrong kind.
        """
        problems = [
            f"{key} in config.json has {shown(config[key])}, which is not here: take "
            "it out of the file only if it changes nothing"
            for key, inert in _INERT.items()
            if config.get(key) not in inert
        ]
        config = {**self.defaults, **config}
        alike = config.get("num_hidden_layers") == len(model.layers)
        for fact in self.facts:
            if not alike and fact.each:
                continue
            try:
                problems += fact.differences(model, config, self.name)
            except (ArithmeticError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{fact.key or fact.field} in config.json makes no sense "
                    f"({error}): take the one that was published with the weights"
                ) from error
        return problems

    @property
    def mapping(self) -> TensorMapping:
        """Which of its tensors are which weights."""
        return TensorMapping(name=f"{self.name} models", lines=self.lines)

    def config(self, model: Model) -> dict[str, Any]:
        """A config.json's architecture keys, of our model."""
        keys = {"architectures": [self.architecture], "model_type": self.name}
        for fact in self.facts:
            keys |= fact.keys(model)
        return keys


def family_of(config: Config, file: str) -> Family:
    """The family of a config.

    Raises:
      CheckpointError: it is of none that is known here.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"{file} has model_type {name!r}, which is none of "
            f"{', '.join(FAMILIES)}: set InitializeFrom.mapping, a file that "
            "says which weight each tensor is"
        )
    return FAMILIES[name]


def _llama_like(
    name: str,
    architecture: str,
    *,
    defaults: Mapping[str, Any],
    biases: list[Fact],
    windows: Fact,
    qk_norm: bool,
) -> Family:
    return Family(
        name=name,
        architecture=architecture,
        lines=of_family("llama"),
        defaults=defaults,
        facts=(
            *facts.sizes(),
            facts.activation("hidden_act"),
            *facts.norms(offset=0.0, post_norms=False, qk_norm=qk_norm),
            *facts.embedding(scaled=False),
            *biases,
            *facts.rotary(),
            windows,
            facts.query_scale(None),
            *facts.caps(attention=None, final=None),
        ),
    )


def _gemma(
    name: str,
    architecture: str,
    *,
    defaults: Mapping[str, Any],
    qk_norm: bool,
    windows: Fact,
    rotary: list[Fact],
    attention_cap: str | None,
) -> Family:
    biases = {"attention": "attention_bias", "out": "attention_bias"}
    return Family(
        name=name,
        architecture=architecture,
        lines=of_family("gemma"),
        defaults=_GEMMA_DEFAULTS | defaults,
        facts=(
            *facts.sizes(),
            facts.activation("hidden_activation"),
            *facts.norms(offset=1.0, post_norms=True, qk_norm=qk_norm),
            *facts.embedding(scaled=True),
            *facts.biases(**biases, feed_forward=False),
            *rotary,
            windows,
            facts.query_scale("query_pre_attn_scalar"),
            *facts.caps(attention=attention_cap, final="final_logit_softcapping"),
        ),
    )


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        _llama_like(
            "llama",
            "LlamaForCausalLM",
            defaults=_LLAMA_DEFAULTS,
            biases=facts.biases(
                attention="attention_bias",
                out="attention_bias",
                feed_forward="mlp_bias",
            ),
            windows=facts.NO_WINDOWS,
            qk_norm=False,
        ),
        _llama_like(
            "qwen2",
            "Qwen2ForCausalLM",
            defaults=_QWEN_DEFAULTS,
            biases=facts.biases(attention=True, out=False, feed_forward=False),
            windows=facts.QWEN_WINDOWS,
            qk_norm=False,
        ),
        _llama_like(
            "qwen3",
            "Qwen3ForCausalLM",
            defaults=_QWEN_DEFAULTS | {"head_dim": 128},
            biases=facts.biases(
                attention="attention_bias", out="attention_bias", feed_forward=False
            ),
            windows=facts.QWEN_WINDOWS,
            qk_norm=True,
        ),
        _gemma(
            "gemma2",
            "Gemma2ForCausalLM",
            defaults={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            qk_norm=False,
            windows=facts.GEMMA2_WINDOWS,
            rotary=facts.rotary(),
            attention_cap="attn_logit_softcapping",
        ),
        _gemma(
            "gemma3_text",
            "Gemma3ForCausalLM",
            defaults={
                "rope_theta": 1e6,
                "rope_local_base_freq": 10000.0,
                "sliding_window_pattern": 6,
            },
            qk_norm=True,
            windows=facts.GEMMA3_WINDOWS,
            rotary=facts.rotary(local=True),
            attention_cap=None,  # Its key is there, but no program reads it.
        ),
    )
}
"""By `model_type` of their config.json."""
