"""The facts that config.json files of several families say alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.layers.attention.positions import InputPositions, PositionKind
from meshwright.layers.basic.feed_forward import Activation
from meshwright.layers.basic.normalization import RMSNorm
from meshwright.layers.transformer import TransformerLayer
from meshwright.trainers.checkpoints.published.published_facts import (
    Config,
    Fact,
    Model,
    by_key,
    implied,
    window,
)
from meshwright.trainers.checkpoints.published.published_rotary import (
    rotary_keys,
    rotary_said,
)

_SLIDING, _FULL = "sliding_attention", "full_attention"
_ACTIVATIONS = {
    "silu": Activation.GATED_SILU,
    "gelu_pytorch_tanh": Activation.GATED_GELU,
}


def _norms(layer: TransformerLayer) -> list[RMSNorm]:
    norms = [layer.attention_norm, layer.feed_forward_norm]
    norms += [layer.attention_post_norm, layer.feed_forward_post_norm]
    if layer.attention.qk_norm:
        norms.append(layer.attention.head_norm)
    return [norm for norm in norms if norm is not None]


def _one(values: Any) -> Any:
    """The value that all have, or all that they have."""
    values = sorted(set(values))
    return values[0] if len(values) == 1 else values


def activation(key: str) -> Fact:
    names = {activation: name for name, activation in _ACTIVATIONS.items()}

    def said(config: Config, number: int) -> Any:
        del number
        usual = "silu" if key == "hidden_act" else "gelu_pytorch_tanh"
        name = config.get(key) or usual
        return _ACTIVATIONS.get(str(name), name)

    def of(layer: TransformerLayer) -> Activation:
        return layer.feed_forward.activation

    def keys(model: Model) -> dict[str, Any]:
        ours = of(model.layers[0].layer)
        return {key: names.get(ours, ours.value)}

    return Fact(
        field="FeedForward.activation", of=of, said=said, key=key, keys=keys, each=True
    )


def norms(*, offset: float, post_norms: bool, qk_norm: bool) -> list[Fact]:
    """Epsilons, Gemma's offset of scales, and which norms there are."""

    def epsilon(layer: TransformerLayer) -> Any:
        return _one(norm.epsilon for norm in _norms(layer))

    def offset_of(layer: TransformerLayer) -> Any:
        return _one(norm.offset for norm in _norms(layer))

    key, field = "rms_norm_eps", "RMSNorm.epsilon"
    return [
        by_key(key, field, lambda m: m.task.final_norm.epsilon, 1e-6),
        by_key(key, field, epsilon, 1e-6, each=True),
        implied("RMSNorm.offset", lambda m: m.task.final_norm.offset, offset),
        implied("RMSNorm.offset", offset_of, offset, each=True),
        *(
            implied(
                f"whether there is TransformerLayer.{name}",
                lambda layer, name=name: getattr(layer, name) is not None,
                wanted,
                each=True,
            )
            for name, wanted in (
                ("attention_post_norm", post_norms),
                ("feed_forward_post_norm", post_norms),
                ("cross_attention", False),
            )
        ),
        implied(
            "whether there is MultiHeadAttention.qk_norm",
            lambda layer: bool(layer.attention.qk_norm),
            qk_norm,
            each=True,
        ),
    ]


def rotary(*, local: bool = False) -> list[Fact]:
    """Facts of rotary positions; `local`, if layers with a window have their own."""

    def kind(config: Config, number: int) -> str:
        return _SLIDING if local and _gemma3_window(config, number) else _FULL

    def keys(model: Model) -> dict[str, Any]:
        windowed = [each.layer for each in model.layers if window(each.layer)]
        wide = [
            each.layer for each in model.layers if not (local and window(each.layer))
        ]
        return rotary_keys(
            (wide or windowed)[0].attention,
            windowed[0].attention if local and windowed else None,
            length=model.task.text.sequence_length,
        )

    return [
        Fact(
            field="MultiHeadAttention.rotary_base",
            of=lambda layer: layer.attention.rotary_base,
            said=lambda config, i: rotary_said(config, kind(config, i)).base,
            key="rope_theta",
            keys=keys,
            each=True,
        ),
        Fact(
            field="MultiHeadAttention.rotary_scaling",
            of=lambda layer: layer.attention.rotary_scaling,
            said=lambda config, i: rotary_said(config, kind(config, i)).scaling,
            key="rope_scaling",
            each=True,
        ),
        implied(
            "MultiHeadAttention.positions",
            lambda layer: layer.attention.positions,
            PositionKind.ROTARY,
            each=True,
        ),
        implied(
            "LanguageModel.input_positions",
            lambda model: model.task.input_positions,
            InputPositions.NONE,
        ),
    ]


def _windows(
    said: Callable[[Config, int], Any], keys: Callable[[list], dict[str, Any]]
) -> Fact:
    def sizes(model: Model) -> list[int | None]:
        windows = [window(each.layer) for each in model.layers]
        return [size if isinstance(size, int) else None for size in windows]

    return Fact(
        field="the window of MultiHeadAttention.mask",
        of=window,
        said=said,
        key="sliding_window",
        keys=lambda model: keys(sizes(model)),
        each=True,
    )


def _by_types(config: Config, number: int, *, is_sliding: bool) -> Any:
    """The window of a layer; `is_sliding` where the config has no types of layers."""
    kinds = config.get("layer_types")
    kind = _SLIDING if is_sliding else _FULL
    if isinstance(kinds, list):
        kind = kinds[number] if number < len(kinds) else "no kind"
    if kind not in (_SLIDING, _FULL):
        return kind
    return config.get("sliding_window", 4096) if kind == _SLIDING else None


def _types(windows: list) -> dict[str, Any]:
    sizes = [size for size in windows if size is not None]
    return {
        "layer_types": [_FULL if size is None else _SLIDING for size in windows],
        "sliding_window": sizes[0] if sizes else None,
    }


def _qwen_window(config: Config, number: int) -> Any:
    if not config.get("use_sliding_window", False):
        return None
    first = config.get("max_window_layers", 28)
    return _by_types(config, number, is_sliding=number >= first)


def _qwen_keys(windows: list) -> dict[str, Any]:
    first = [number for number, size in enumerate(windows) if size is not None]
    return {
        **_types(windows),
        "use_sliding_window": bool(first),
        "max_window_layers": first[0] if first else len(windows),
    }


def _gemma2_window(config: Config, number: int) -> Any:
    return _by_types(config, number, is_sliding=number % 2 == 0)


def _gemma3_window(config: Config, number: int) -> Any:
    pattern = config.get("sliding_window_pattern", 6)
    return _by_types(config, number, is_sliding=(number + 1) % pattern != 0)


NO_WINDOWS = _windows(lambda config, number: None, lambda windows: {})


def sizes() -> list[Fact]:
    def head_dim(config: Config) -> int:
        return config["hidden_size"] // config["num_attention_heads"]

    return [
        by_key("num_hidden_layers", "the number of layers", lambda m: len(m.layers)),
        by_key(
            "vocab_size",
            "TokenEmbedding.vocab_size",
            lambda m: m.task.embedding.vocab_size,
        ),
        by_key(
            "hidden_size",
            "TokenEmbedding.model_dims",
            lambda m: m.task.embedding.model_dims,
        ),
        by_key(
            "intermediate_size",
            "FeedForward.hidden_dims",
            lambda layer: layer.feed_forward.hidden_dims,
            each=True,
        ),
        by_key(
            "num_attention_heads",
            "MultiHeadAttention.num_heads",
            lambda layer: layer.attention.num_heads,
            each=True,
        ),
        by_key(
            "num_key_value_heads",
            "MultiHeadAttention.num_kv_heads",
            lambda layer: layer.attention.kv_heads,
            lambda config: config["num_attention_heads"],
            each=True,
            null_is_default=True,
        ),
        by_key(
            "head_dim",
            "MultiHeadAttention.head_dim",
            lambda layer: layer.attention.head_dim,
            head_dim,
            each=True,
            null_is_default=True,
        ),
    ]


def embedding(*, tied: bool, scaled: bool) -> list[Fact]:
    """Whether the table is shared, `tied` by default, and scaled when it is read."""

    def scale(config: Config) -> float:
        return config["hidden_size"] ** 0.5 if scaled else 1.0

    return [
        by_key(
            "tie_word_embeddings",
            "whether TokenEmbedding.softmax is SHARED",
            lambda m: m.task.softmax is None,
            tied,
        ),
        implied("TokenEmbedding.input_scale", lambda m: m.task.embedding.scale, scale),
    ]


def scale_and_caps(*, by_keys: bool) -> list[Fact]:
    """The scale of queries and caps of logits: Gemma's keys, or the usual ones."""

    def cap(layer: TransformerLayer) -> float | None:
        return layer.attention.logit_cap

    def final_cap(model: Model) -> float | None:
        return model.task.logit_cap

    def scale(layer: TransformerLayer) -> float:
        # As configs say it: 256, and not what the power makes of a power.
        size = float(f"{layer.attention.scale**-2:.12g}")
        return int(size) if size.is_integer() else size

    def said(config: Config, number: int) -> Any:
        del number
        if by_keys:
            return config.get("query_pre_attn_scalar", 256)
        return config.get("head_dim") or (
            config["hidden_size"] // config["num_attention_heads"]
        )

    query = Fact(
        field="MultiHeadAttention.query_scale ** -2",
        of=scale,
        said=said,
        key="query_pre_attn_scalar" if by_keys else "",
        keys=lambda m: (
            {"query_pre_attn_scalar": scale(m.layers[0].layer)} if by_keys else {}
        ),
        each=True,
    )
    fields = "MultiHeadAttention.logit_cap", "LanguageModel.logit_cap"
    if not by_keys:
        return [
            query,
            implied(fields[0], cap, None, each=True),
            implied(fields[1], final_cap, None),
        ]
    return [
        query,
        by_key("attn_logit_softcapping", fields[0], cap, None, each=True),
        by_key("final_logit_softcapping", fields[1], final_cap, None),
    ]


def biases(
    *, attention: bool | None, feed_forward: bool | None, out: bool | None = None
) -> list[Fact]:
    """What has biases; None: what the keys `attention_bias` and `mlp_bias` say.

    `out` is that of the projection of what heads found; None: as `attention`.
    """

    def fact(key, field, of, value):
        if value is None:
            return by_key(key, field, of, False, each=True)
        return implied(field, of, value, each=True)

    return [
        fact(
            "attention_bias",
            "MultiHeadAttention.use_bias",
            lambda layer: layer.attention.use_bias,
            attention,
        ),
        fact(
            "attention_bias",
            "MultiHeadAttention.use_out_bias",
            lambda layer: layer.attention.has_out_bias,
            attention if out is None else out,
        ),
        fact(
            "mlp_bias",
            "FeedForward.use_bias",
            lambda layer: layer.feed_forward.use_bias,
            feed_forward,
        ),
    ]


QWEN_WINDOWS = _windows(_qwen_window, _qwen_keys)
GEMMA2_WINDOWS = _windows(_gemma2_window, _types)
GEMMA3_WINDOWS = _windows(_gemma3_window, _types)
