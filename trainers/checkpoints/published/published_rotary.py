"""Rotary positions as a config.json says them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.attention.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    RotaryScaling,
    YarnScaling,
)
from meshwright.trainers.checkpoints.checkpoint_digests import CheckpointError
from meshwright.trainers.checkpoints.published.published_facts import shown

_LENGTH = "original_max_position_embeddings"
_KINDS: Mapping[str, tuple[type[RotaryScaling], Mapping[str, str]]] = {
    "linear": (LinearScaling, {"factor": "factor"}),
    "llama3": (
        Llama3Scaling,
        {
            "factor": "factor",
            "low_freq_factor": "low_turns",
            "high_freq_factor": "high_turns",
            _LENGTH: "original_length",
        },
    ),
    "yarn": (
        YarnScaling,
        {
            "factor": "factor",
            _LENGTH: "original_length",
            "beta_fast": "fast_turns",
            "beta_slow": "slow_turns",
            "attention_factor": "attention_factor",
        },
    ),
}
# What no kind reads, or any may have.
_OTHERS = ("rope_type", "type", "rope_theta", _LENGTH)


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The rotary positions of a layer.

    Args:
      base: as the config says it.
      scaling: what changes the frequencies.
    """

    base: Any
    scaling: RotaryScaling | None


def rotary_said(config: Mapping[str, Any], kind: str) -> Rotary:
    """What a config says of layers of a kind.

    Newer files have all in `rope_parameters`, which may have parameters of each kind of
    layer; older ones have `rope_theta`, `rope_scaling` and, Gemma 3's,
    `rope_local_base_freq`, the base of layers with a window, without scaling.

    Args:
      config: of config.json.
      kind: the kind of layer, "full_attention" or "sliding_attention".

    Raises:
      CheckpointError: a kind of scaling that is not here, or that makes no sense.
    """
    both = config.get("rope_parameters")
    if isinstance(both, dict):
        one = both.get(kind, both)
        base = one.get("rope_theta") if isinstance(one, dict) else None
        return Rotary(base or config.get("rope_theta", 10000.0), _scaling(one, config))
    if kind == "sliding_attention":
        return Rotary(config.get("rope_local_base_freq", 10000.0), None)
    # Gemma 3's files may leave out its base, as those of Llama may leave out theirs.
    usual = 1e6 if config.get("model_type") == "gemma3_text" else 10000.0
    scaling = _scaling(config.get("rope_scaling"), config)
    return Rotary(config.get("rope_theta", usual), scaling)


def rotary_keys(
    attention: MultiHeadAttention, local: MultiHeadAttention | None, *, length: int
) -> dict[str, Any]:
    """The keys that say the rotary positions of a model.

    Args:
      attention: of layers that see all.
      local: of layers with a window, where these have a base of their own.
      length: tokens of a row, where no scaling says how long contexts are.
    """
    keys = {"rope_theta": attention.rotary_base, "rope_scaling": None}
    if local is not None:
        keys["rope_local_base_freq"] = local.rotary_base
    scaling = attention.rotary_scaling
    for kind, (cls, names) in _KINDS.items():
        if isinstance(scaling, cls):
            said = {theirs: getattr(scaling, ours) for theirs, ours in names.items()}
            said = {name: value for name, value in said.items() if value is not None}
            keys["rope_scaling"] = {"rope_type": kind, **said}
            length = round(scaling.factor * said.get(_LENGTH, length))
    return {**keys, "max_position_embeddings": length}


def _scaling(said: Any, config: Mapping[str, Any]) -> RotaryScaling | None:
    if said is None:
        return None
    if not isinstance(said, dict):
        raise _unknown(f"is {shown(said)}, no object")
    kind = said.get("rope_type", said.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise _unknown(f"has rope_type {shown(repr(kind))}")
    cls, names = _KINDS[kind]
    others = [name for name in said if name not in (*names, *_OTHERS)]
    if others:
        raise _unknown(f"has {shown(', '.join(others))} of rope_type {kind!r}")
    fields = {ours: said[name] for name, ours in names.items() if said.get(name)}
    if kind == "yarn":
        fields.setdefault("original_length", config.get("max_position_embeddings"))
    try:
        return cls(**fields)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise _unknown(f"makes no sense ({error})") from error


def _unknown(what: str) -> CheckpointError:
    return CheckpointError(
        f"rope_scaling in config.json {what}: known here are default, "
        f"{', '.join(_KINDS)}, with the keys that these have; set InitializeFrom.rules "
        "to take the weights alone"
    )
