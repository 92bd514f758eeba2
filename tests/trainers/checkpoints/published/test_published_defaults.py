"""Keys that a config.json leaves out say what Transformers takes them for."""

import pytest

from meshwright.layers.attention.positions import YarnScaling
from meshwright.trainers.checkpoints.published.published_facts import Model
from meshwright.trainers.checkpoints.published.published_families import FAMILIES
from tests.trainers.checkpoints.published.published_cases import (
    CASES,
    programs_of,
)

LLAMA = {
    "hidden_act": ("silu", "relu"),
    "rms_norm_eps": (1e-6, 1e-5),
    "rope_theta": (10000.0, 20000.0),
    "rope_scaling": (None, {"rope_type": "linear", "factor": 3.0}),
    "rope_parameters": (None, {"rope_type": "linear", "factor": 3.0}),
    "tie_word_embeddings": (False, True),
}
LLAMA_ITSELF = LLAMA | {
    "num_key_value_heads": (None, 1),
    "head_dim": (None, 5),
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
}
QWEN2 = LLAMA | {
    "num_key_value_heads": (32, 33),
    "head_dim": (None, 5),
    "use_sliding_window": (False, True),
    "sliding_window": (4096, 4097),
    "max_window_layers": (28, 0),
}
GEMMA = {
    "hidden_activation": ("gelu_pytorch_tanh", "relu"),
    "rms_norm_eps": (1e-6, 1e-5),
    "tie_word_embeddings": (True, False),
    "num_key_value_heads": (4, 5),
    "head_dim": (256, 257),
    "attention_bias": (False, True),
    "query_pre_attn_scalar": (256, 257),
    "sliding_window": (4096, 4097),
}
# By family: what a config without the key says, and what it could say else.
DEFAULTS = {
    "llama": LLAMA_ITSELF,
    "qwen2": QWEN2,
    "qwen3": QWEN2 | {"head_dim": (128, 129), "attention_bias": (False, True)},
    "gemma2": GEMMA
    | {
        "attn_logit_softcapping": (50.0, None),
        "final_logit_softcapping": (30.0, None),
        "rope_theta": (10000.0, 20000.0),
        "rope_scaling": (None, {"rope_type": "linear", "factor": 3.0}),
    },
    "gemma3": GEMMA
    | {
        "final_logit_softcapping": (None, 30.0),
        "rope_theta": (1000000.0, 10000.0),
        "rope_local_base_freq": (10000.0, 20000.0),
        "rope_scaling": (None, {"rope_type": "linear", "factor": 3.0}),
        "sliding_window_pattern": (6, 5),
    },
}
# Where the other keys have to say something for one to matter.
WITH = {
    "rope_parameters": {"rope_scaling": None},
    "sliding_window": {"use_sliding_window": True, "max_window_layers": 1},
    "max_window_layers": {"use_sliding_window": True},
    "use_sliding_window": {"max_window_layers": 1},
}


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, keys in DEFAULTS.items() for key in keys]
)
def test_a_key_that_is_left_out(name, key):
    model = Model.of(programs_of(name).experiment.task)
    full = {k: v for k, v in CASES[name].config.items() if k != "layer_types"}
    full |= WITH.get(key, {})
    family = FAMILIES[full["model_type"]]

    def problems(**more):
        config = {k: v for k, v in full.items() if k != key}
        return family.problems(model, {**config, **more})

    default, other = DEFAULTS[name][key]
    assert problems() == problems(**{key: default})
    assert problems() != problems(**{key: other})


@pytest.mark.parametrize("theirs", [{}, {"rope_theta": 1e6}, {"rope_theta": 5.0}])
def test_bases_that_parameters_leave_out(theirs):
    """In rope_parameters, of the layers that see all."""
    model = Model.of(programs_of("gemma3_uneven").experiment.task)
    config = dict(CASES["gemma3_uneven"].config)
    del config["rope_theta"], config["rope_local_base_freq"]
    config["rope_parameters"] = {"full_attention": theirs, "sliding_attention": {}}
    problems = FAMILIES["gemma3_text"].problems(model, config)
    assert len(problems) == (theirs == {"rope_theta": 5.0})
    assert all("layer 5: MultiHeadAttention.rotary_base is" in p for p in problems)


@pytest.mark.parametrize(("factor", "count"), [(1.138629436, 0), (1.2, 1), (None, 0)])
def test_an_attention_factor_that_is_yarns_own(factor, count):
    """1 + ln(4) / 10."""
    model = Model.of(programs_of("qwen2").experiment.task)
    assert isinstance(model.layers[0].layer.attention.rotary_scaling, YarnScaling)
    config = dict(CASES["qwen2"].config)
    config["rope_scaling"] = config["rope_scaling"] | {"attention_factor": factor}
    assert len(FAMILIES["qwen2"].problems(model, config)) == count


def test_newer_and_older_keys_that_say_the_same():
    model = Model.of(programs_of("llama").experiment.task)
    config = dict(CASES["llama"].config)
    config["rope_parameters"] = {**config["rope_scaling"], "rope_theta": 500000.0}
    config["rope_parameters"] |= {"partial_rotary_factor": 1.0, "truncate": True}
    assert FAMILIES["llama"].problems(model, config) == []
