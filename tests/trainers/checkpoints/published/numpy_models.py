"""Published language models in plain NumPy, from config.json and tensors alone.

Dims: S sequence, M model, N heads, K heads of keys and values, D head size.
"""

from __future__ import annotations

import math

import numpy as np


def logits(config: dict, tensors: dict, ids) -> np.ndarray:
    """float64 [S, V] of a row of tokens [S]."""
    w = {name: np.asarray(t).astype(np.float64) for name, t in tensors.items()}
    gemma = config["model_type"].startswith("gemma")
    x = w["model.embed_tokens.weight"][np.asarray(ids)]
    if gemma:
        x = x * math.sqrt(config["hidden_size"])

    def norm(x, name):
        scale = w[f"{name}.weight"] + (1 if gemma else 0)
        square = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(square + config["rms_norm_eps"]) * scale

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        y = _attention(config, w, norm, norm(x, f"{layer}.input_layernorm"), i)
        if gemma:
            x = x + norm(y, f"{layer}.post_attention_layernorm")
            y = _mlp(config, w, norm(x, f"{layer}.pre_feedforward_layernorm"), layer)
            x = x + norm(y, f"{layer}.post_feedforward_layernorm")
        else:
            x = x + y
            x = x + _mlp(config, w, norm(x, f"{layer}.post_attention_layernorm"), layer)
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return _capped(
        norm(x, "model.norm") @ w[f"{head}.weight"].T,
        config.get("final_logit_softcapping"),
    )


def greedy(config: dict, tensors: dict, ids, count: int) -> list[int]:
    """`count` tokens after some, each the likeliest."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(np.argmax(logits(config, tensors, ids)[-1])))
    return ids[-count:]


def frequencies(config: dict, i: int) -> tuple[np.ndarray, float]:
    """Radians a token [D / 2] of layer i, and what cosines and sines are scaled by."""
    dims = config["head_dim"]
    base, scaling = config["rope_theta"], config.get("rope_scaling")
    if config["model_type"] == "gemma3_text" and _window(config, i) is not None:
        base, scaling = config["rope_local_base_freq"], None
    plain = np.array([base ** (-2 * k / dims) for k in range(dims // 2)])
    kind = "default" if scaling is None else scaling["rope_type"]
    if kind == "default":
        return plain, 1.0
    factor = scaling["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    length = scaling["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        out = []
        for f in plain:
            wave = 2 * math.pi / f
            if wave < length / high:
                out.append(f)
            elif wave > length / low:
                out.append(f / factor)
            else:
                smooth = (length / wave - low) / (high - low)
                out.append((1 - smooth) * f / factor + smooth * f)
        return np.array(out), 1.0
    assert kind == "yarn"

    def pair(turns):
        return dims * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair(scaling.get("beta_fast", 32))), 0)
    last = min(math.ceil(pair(scaling.get("beta_slow", 1))), dims - 1)
    out = []
    for k, f in enumerate(plain):
        slowed = min(max((k - first) / (last - first), 0), 1)
        out.append(f * (1 - slowed) + f / factor * slowed)
    return np.array(out), scaling.get("attention_factor", 0.1 * math.log(factor) + 1)


def _rotated(x, frequency, magnitude):
    """x [S, N, D], features of the first half paired with those of the second."""
    angle = np.arange(len(x))[:, None, None] * np.concatenate([frequency] * 2)
    a, b = np.split(x, 2, axis=-1)
    turned = np.concatenate([-b, a], axis=-1)
    return (x * np.cos(angle) + turned * np.sin(angle)) * magnitude


def _window(config, i):
    kinds = config.get("layer_types")
    if kinds is None or kinds[i] == "full_attention":
        return None
    return config["sliding_window"]


def _attention(config, w, norm, x, i):
    name, dims = f"model.layers.{i}.self_attn", config["head_dim"]

    def heads(letter):
        y = x @ w[f"{name}.{letter}_proj.weight"].T
        return (y + w.get(f"{name}.{letter}_proj.bias", 0)).reshape(len(x), -1, dims)

    q, k, v = heads("q"), heads("k"), heads("v")
    if f"{name}.q_norm.weight" in w:
        q, k = norm(q, f"{name}.q_norm"), norm(k, f"{name}.k_norm")
    turn = frequencies(config, i)
    q, k = _rotated(q, *turn), _rotated(k, *turn)
    shared = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, shared, axis=1), np.repeat(v, shared, axis=1)
    scale = config.get("query_pre_attn_scalar", dims) ** -0.5
    products = _capped(
        np.einsum("snd,tnd->nst", q, k) * scale, config.get("attn_logit_softcapping")
    )
    back = np.arange(len(x))[:, None] - np.arange(len(x))
    window = _window(config, i)
    seen = (back >= 0) & (back < (len(x) if window is None else window))
    products = np.where(seen, products, -np.inf)
    chances = np.exp(products - products.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    y = np.einsum("nst,tnd->snd", chances, v).reshape(len(x), -1)
    return y @ w[f"{name}.o_proj.weight"].T + w.get(f"{name}.o_proj.bias", 0)


def _mlp(config, w, x, layer):
    def product(x, which):
        name = f"{layer}.mlp.{which}_proj"
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    gate = product(x, "gate")
    if config.get("hidden_activation") == "gelu_pytorch_tanh":
        cubic = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        gate = 0.5 * gate * (1 + np.tanh(cubic))
    else:
        assert config["hidden_act"] == "silu"
        gate = gate / (1 + np.exp(-gate))
    return product(gate * product(x, "up"), "down")


def _capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)
