"""Rotary positions as a config.json says them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.attention.positions import (
    LinearScaling,
    Llama3Scaling,
    RotaryScaling,
    YarnScaling,
)
from meshwright.trainers.checkpoints.checkpoint_digests import CheckpointError
from meshwright.trainers.checkpoints.published.published_facts import shown

_LENGTH = "original_max_position_embeddings"


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A kind of scaling.

    Args:
      cls: its class here.
      fields: the fields of that class, by a config's keys.
      needed: the keys that no config may leave out.
    """

    cls: type[RotaryScaling]
    fields: Mapping[str, str]
    needed: tuple[str, ...]


_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_turns",
    "high_freq_factor": "high_turns",
    _LENGTH: "original_length",
}
_YARN = {
    "factor": "factor",
    _LENGTH: "original_length",
    "beta_fast": "fast_turns",
    "beta_slow": "slow_turns",
    "attention_factor": "attention_factor",
}
_KINDS: Mapping[str, _Kind] = {
    "linear": _Kind(LinearScaling, {"factor": "factor"}, ("factor",)),
    "llama3": _Kind(Llama3Scaling, _LLAMA3, tuple(_LLAMA3)),
    "yarn": _Kind(YarnScaling, _YARN, ("factor",)),
}
# What no kind reads, or any may have; and what may be there with this value.
_OTHERS = ("rope_type", "type", "rope_theta", _LENGTH)
_INERT = {"partial_rotary_factor": 1, "truncate": True}
_BASES = {
    None: "rope_theta",
    "full_attention": "rope_theta",
    "sliding_attention": "rope_local_base_freq",
}


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The rotary positions of a layer.

    Args:
      base: as the config says it.
      scaling: what changes the frequencies.
    """

    base: Any
    scaling: RotaryScaling | None


def rotary_said(config: Mapping[str, Any], kind: str | None) -> Rotary:
    """What a config says of layers of a kind.

    Newer files have all in `rope_parameters`, and parameters of each kind of layer if
    these differ; older ones have `rope_theta`, `rope_scaling` and, Gemma 3's,
    `rope_local_base_freq`, the base of layers with a window, without scaling.

    Args:
      config: of config.json, with its family's defaults.
      kind: the kind of layer, "full_attention" or "sliding_attention", where a family's
        layers differ; else None.

    Raises:
      CheckpointError: a kind of scaling that is not here, or that makes no sense; newer
        and older keys that differ.
    """
    base, scaling = config.get(_BASES[kind]), config.get("rope_scaling")
    older = Rotary(base, None)
    if scaling is not None and kind != "sliding_attention":
        older = _rotary("rope_scaling", scaling, base, config)
    if config.get("rope_parameters") is None:
        return older
    name, parameters = "rope_parameters", config["rope_parameters"]
    if kind is not None:
        if not isinstance(parameters, dict) or not isinstance(
            parameters.get(kind), dict
        ):
            raise _unknown(name, f"has no object {kind}, of such layers")
        name, parameters = f"{name}.{kind}", parameters[kind]
    newer = _rotary(name, parameters, base, config)
    if scaling and newer != older:
        raise CheckpointError(
            f"{name} in config.json makes {newer}, but rope_scaling {older}: leave the "
            "wrong one out"
        )
    return newer


def rotary_keys(
    attention: MultiHeadAttention, local: MultiHeadAttention | None, *, length: int
) -> dict[str, Any]:
    """The keys that say the rotary positions of a model.

    Args:
      attention: of layers that see all.
      local: of layers with a window, where these have a base of their own.
      length: tokens of a row.
    """
    keys = {"rope_theta": attention.rotary_base, "rope_scaling": None}
    if local is not None:
        keys["rope_local_base_freq"] = local.rotary_base
    scaling = attention.rotary_scaling
    for name, kind in _KINDS.items():
        if isinstance(scaling, kind.cls):
            values = {
                key: getattr(scaling, field) for key, field in kind.fields.items()
            }
            values = {key: value for key, value in values.items() if value is not None}
            keys["rope_scaling"] = {"rope_type": name, **values}
            length = max(length, round(scaling.factor * values.get(_LENGTH, 0)))
    return {**keys, "max_position_embeddings": length}


def plain_scaling(scaling: RotaryScaling | None) -> RotaryScaling | None:
    """A scaling without an attention factor that is the one of its formula."""
    if isinstance(scaling, YarnScaling) and scaling.attention_factor is not None:
        plain = dataclasses.replace(scaling, attention_factor=None)
        if math.isclose(scaling.magnitude, plain.magnitude, rel_tol=1e-6):
            return plain
    return scaling


def _rotary(name: str, given: Any, base: Any, config: Mapping[str, Any]) -> Rotary:
    """What an object says, with the base that it has if it says none."""
    if not isinstance(given, dict):
        raise _unknown(name, f"is {shown(given)}, no object")
    return Rotary(given.get("rope_theta", base), _scaling(name, given, config))


def _scaling(
    name: str, given: Mapping[str, Any], config: Mapping[str, Any]
) -> RotaryScaling | None:
    given = {key: value for key, value in given.items() if value is not None}
    type_ = given.get("rope_type", given.get("type", "default"))
    if not isinstance(type_, str) or type_ not in ("default", *_KINDS):
        raise _unknown(name, f"has rope_type {shown(repr(type_))}")
    kind = _KINDS.get(type_, _Kind(RotaryScaling, {}, ()))
    others = [
        key
        for key, value in given.items()
        if key not in (*kind.fields, *_OTHERS) and _INERT.get(key) != value
    ]
    if others:
        raise _unknown(name, f"has {shown(', '.join(others))} of rope_type {type_!r}")
    if lacking := [key for key in kind.needed if key not in given]:
        raise _unknown(
            name, f"of rope_type {type_!r} has no {', '.join(lacking)}, which it needs"
        )
    if type_ == "default":
        return None
    fields = {ours: given[key] for key, ours in kind.fields.items() if key in given}
    if type_ == "yarn" and "original_length" not in fields:
        fields["original_length"] = config.get("max_position_embeddings")
    try:
        return plain_scaling(kind.cls(**fields))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise _unknown(name, f"makes no sense ({error})") from error


def _unknown(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{name} in config.json {what}: known here are default, {', '.join(_KINDS)}, "
        "with the keys that these have; set InitializeFrom.rules to take the weights "
        "alone"
    )
