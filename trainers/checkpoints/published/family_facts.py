"""The facts that config.json files of several families say alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.layers.attention.learned_terms import Sink
from meshwright.layers.attention.positions import InputPositions, PositionKind
from meshwright.layers.basic.feed_forward import Activation
from meshwright.layers.basic.normalization import RMSNorm
from meshwright.layers.transformer import Order, TransformerLayer
from meshwright.trainers.checkpoints.published.published_facts import (
    Config,
    Fact,
    Model,
    by_key,
    implied,
    window,
)
from meshwright.trainers.checkpoints.published.published_rotary import (
    Rotary,
    plain_scaling,
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
        name = config.get(key)
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
        by_key(key, field, lambda m: m.task.final_norm.epsilon),
        by_key(key, field, epsilon, each=True),
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
            "TransformerLayer.order",
            lambda layer: layer.order,
            Order.SEQUENTIAL,
            each=True,
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

    def said(config: Config, number: int) -> Rotary:
        if not local:
            return rotary_said(config, None)
        is_sliding = _gemma3_window(config, number) is not None
        return rotary_said(config, _SLIDING if is_sliding else _FULL)

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
            said=lambda config, i: said(config, i).base,
            key="rope_theta",
            keys=keys,
            each=True,
        ),
        Fact(
            field="MultiHeadAttention.rotary_scaling",
            of=lambda layer: plain_scaling(layer.attention.rotary_scaling),
            said=lambda config, i: said(config, i).scaling,
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
    return config.get("sliding_window") if kind == _SLIDING else None


def _types(windows: list) -> dict[str, Any]:
    sizes = [size for size in windows if size is not None]
    return {
        "layer_types": [_FULL if size is None else _SLIDING for size in windows],
        "sliding_window": sizes[0] if sizes else None,
    }


def _qwen_window(config: Config, number: int) -> Any:
    if not config.get("use_sliding_window"):
        return None
    return _by_types(config, number, is_sliding=number >= config["max_window_layers"])


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
    pattern = config["sliding_window_pattern"]
    return _by_types(config, number, is_sliding=(number + 1) % pattern != 0)


NO_WINDOWS = _windows(lambda config, number: None, lambda windows: {})


def _head_dim(config: Config) -> Any:
    """The size of heads; null says that they share the model's dims."""
    size = config.get("head_dim")
    if size is None:
        return config["hidden_size"] // config["num_attention_heads"]
    return size


def sizes() -> list[Fact]:
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
            each=True,
            null=lambda config: config["num_attention_heads"],
        ),
        by_key(
            "head_dim",
            "MultiHeadAttention.head_dim",
            lambda layer: layer.attention.head_dim,
            each=True,
            null=_head_dim,
        ),
    ]


def embedding(*, scaled: bool) -> list[Fact]:
    """Whether the table is shared, and whether it is `scaled` when it is read."""

    def scale(config: Config) -> float:
        return config["hidden_size"] ** 0.5 if scaled else 1.0

    return [
        by_key(
            "tie_word_embeddings",
            "whether TokenEmbedding.softmax is SHARED",
            lambda m: m.task.softmax is None,
        ),
        implied("TokenEmbedding.input_scale", lambda m: m.task.embedding.scale, scale),
    ]


def query_scale(key: str | None) -> Fact:
    """What queries are multiplied by: by a key, or by the size of heads."""

    def scale(layer: TransformerLayer) -> float:
        # As configs say it: 256, and not what the power makes of a power.
        size = float(f"{layer.attention.scale**-2:.12g}")
        return int(size) if size.is_integer() else size

    field = "MultiHeadAttention.query_scale ** -2"
    if key is None:
        return implied(field, scale, _head_dim, each=True)
    return by_key(key, field, scale, each=True)


def caps(*, attention: str | None, final: str | None) -> list[Fact]:
    """The caps of logits: by a key each, or none; and that there are no sinks."""
    return [
        implied(
            "MultiHeadAttention.sink",
            lambda layer: layer.attention.sink,
            Sink.NONE,
            each=True,
        ),
        _by_key_or_always(
            attention,
            None,
            "MultiHeadAttention.logit_cap",
            lambda layer: layer.attention.logit_cap,
            each=True,
        ),
        _by_key_or_always(
            final, None, "LanguageModel.logit_cap", lambda model: model.task.logit_cap
        ),
    ]


def biases(
    *, attention: str | bool, out: str | bool, feed_forward: str | bool
) -> list[Fact]:
    """What has biases: by a key each, or always or never.

    Args:
      attention: the projections to queries, keys and values.
      out: the projection of what heads found.
      feed_forward: all projections of a feed-forward layer.
    """
    return [
        _by_key_or_always(said, said, field, of, each=True)
        for said, field, of in (
            (
                attention,
                "MultiHeadAttention.use_bias",
                lambda layer: layer.attention.use_bias,
            ),
            (
                out,
                "MultiHeadAttention.use_out_bias",
                lambda layer: layer.attention.has_out_bias,
            ),
            (
                feed_forward,
                "FeedForward.use_bias",
                lambda layer: layer.feed_forward.use_bias,
            ),
        )
    ]


def _by_key_or_always(
    key: Any, value: Any, field: str, of: Callable[[Any], Any], *, each: bool = False
) -> Fact:
    """What a key says; or `value`, if `key` is no text."""
    if isinstance(key, str):
        return by_key(key, field, of, each=each)
    return implied(field, of, value, each=each)


QWEN_WINDOWS = _windows(_qwen_window, _qwen_keys)
GEMMA2_WINDOWS = _windows(_gemma2_window, _types)
GEMMA3_WINDOWS = _windows(_gemma3_window, _types)
