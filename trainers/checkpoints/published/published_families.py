"""The families of published models: names of their tensors, keys of their config.json.

A line of a table is `tensor -> weight here`, with `*` for the number of a layer and for
where that layer's weights are. A tensor is the weight as a matrix, its rows first: with
`transpose` columns and rows change places, with `flat` it has a single dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.trainers.checkpoints.checkpoint_digests import CheckpointError
from meshwright.trainers.checkpoints.published import family_facts as facts
from meshwright.trainers.checkpoints.published.published_facts import (
    Config,
    Fact,
    Model,
    shown,
)

_COMMON = """
model.embed_tokens.weight                   -> embedding.table
model.norm.weight                           -> final_norm.scale
lm_head.weight                              -> softmax.kernel           transpose
model.layers.*.input_layernorm.weight       -> *.attention_norm.scale
model.layers.*.self_attn.q_proj.weight      -> *.attention.w_q          transpose
model.layers.*.self_attn.k_proj.weight      -> *.attention.w_k          transpose
model.layers.*.self_attn.v_proj.weight      -> *.attention.w_v          transpose
model.layers.*.self_attn.o_proj.weight      -> *.attention.w_o          transpose
model.layers.*.self_attn.q_proj.bias        -> *.attention.b_q          flat
model.layers.*.self_attn.k_proj.bias        -> *.attention.b_k          flat
model.layers.*.self_attn.v_proj.bias        -> *.attention.b_v          flat
model.layers.*.self_attn.o_proj.bias        -> *.attention.b_o
model.layers.*.self_attn.q_norm.weight      -> *.attention.query_norm.scale
model.layers.*.self_attn.k_norm.weight      -> *.attention.key_norm.scale
model.layers.*.mlp.gate_proj.weight         -> *.feed_forward.w_gate    transpose
model.layers.*.mlp.up_proj.weight           -> *.feed_forward.w_in      transpose
model.layers.*.mlp.down_proj.weight         -> *.feed_forward.w_out     transpose
model.layers.*.mlp.gate_proj.bias           -> *.feed_forward.b_gate
model.layers.*.mlp.up_proj.bias             -> *.feed_forward.b_in
model.layers.*.mlp.down_proj.bias           -> *.feed_forward.b_out
"""
_PRE_NORMS = """
model.layers.*.post_attention_layernorm.weight   -> *.feed_forward_norm.scale
"""
_PRE_AND_POST_NORMS = """
model.layers.*.post_attention_layernorm.weight   -> *.attention_post_norm.scale
model.layers.*.pre_feedforward_layernorm.weight  -> *.feed_forward_norm.scale
model.layers.*.post_feedforward_layernorm.weight -> *.feed_forward_post_norm.scale
"""

# What a config may say of what is not here, where it says that it is not there.
_INERT: Mapping[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "use_bidirectional_attention": (None, False),
    "quantization_config": (None,),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of published models.

    Args:
      name: what its config.json calls `model_type`.
      architecture: the class that its config.json names.
      tensors: the table of names.
      facts: what its config.json says of a model.
    """

    name: str
    architecture: str
    tensors: str
    facts: tuple[Fact, ...]

    def names(self) -> list[tuple[str, str, str]]:
        """The tensor, the weight and the change of each line."""
        lines = [line.replace("->", " ").split() for line in self.tensors.splitlines()]
        return [(*line, "")[:3] for line in lines if line]

    def problems(self, model: Model, config: Config) -> list[str]:
        """Where a model and a config do not agree, a line each.

        Raises:
          CheckpointError: values of the config are of the wrong kind.
        """
        problems = [
            f"{key} in config.json has {shown(config[key])}, which is not here"
            for key, inert in _INERT.items()
            if config.get(key) not in inert
        ]
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
            f"{', '.join(FAMILIES)}: set InitializeFrom.rules, which say where each "
            "tensor goes"
        )
    return FAMILIES[name]


def _llama_like(
    name: str, architecture: str, *, biases: list[Fact], windows: Fact, qk_norm: bool
) -> Family:
    return Family(
        name=name,
        architecture=architecture,
        tensors=_COMMON + _PRE_NORMS,
        facts=(
            *facts.sizes(),
            facts.activation("hidden_act"),
            *facts.norms(offset=0.0, post_norms=False, qk_norm=qk_norm),
            *facts.embedding(tied=False, scaled=False),
            *biases,
            *facts.rotary(),
            windows,
            *facts.scale_and_caps(by_keys=False),
        ),
    )


def _gemma(
    name: str, architecture: str, *, qk_norm: bool, windows: Fact, rotary: list[Fact]
) -> Family:
    return Family(
        name=name,
        architecture=architecture,
        tensors=_COMMON + _PRE_AND_POST_NORMS,
        facts=(
            *facts.sizes(),
            facts.activation("hidden_activation"),
            *facts.norms(offset=1.0, post_norms=True, qk_norm=qk_norm),
            *facts.embedding(tied=True, scaled=True),
            *facts.biases(attention=None, feed_forward=False),
            *rotary,
            windows,
            *facts.scale_and_caps(by_keys=True),
        ),
    )


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        _llama_like(
            "llama",
            "LlamaForCausalLM",
            biases=facts.biases(attention=None, feed_forward=None),
            windows=facts.NO_WINDOWS,
            qk_norm=False,
        ),
        _llama_like(
            "qwen2",
            "Qwen2ForCausalLM",
            biases=facts.biases(attention=True, out=False, feed_forward=False),
            windows=facts.QWEN_WINDOWS,
            qk_norm=False,
        ),
        _llama_like(
            "qwen3",
            "Qwen3ForCausalLM",
            biases=facts.biases(attention=None, feed_forward=False),
            windows=facts.QWEN_WINDOWS,
            qk_norm=True,
        ),
        _gemma(
            "gemma2",
            "Gemma2ForCausalLM",
            qk_norm=False,
            windows=facts.GEMMA2_WINDOWS,
            rotary=facts.rotary(),
        ),
        _gemma(
            "gemma3_text",
            "Gemma3ForCausalLM",
            qk_norm=True,
            windows=facts.GEMMA3_WINDOWS,
            rotary=facts.rotary(local=True),
        ),
    )
}
"""By `model_type` of their config.json."""
