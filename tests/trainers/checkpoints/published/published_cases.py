"""Small models of each family: a config.json, tensors, and the same model in gin."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling.layer import Context, Mode
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.text.language_model import LanguageModel
from meshwright.trainers.checkpoints.checkpoint_initialize import (
    weights_from,
    with_weights,
)
from meshwright.trainers.checkpoints.checkpoint_rules import InitializeFrom
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.trainers.parity import DATA, initial_state
from tests.trainers.small_run import ROOT

V, M, H, N, K, D, S = 264, 16, 24, 4, 2, 8, 24
SIZES = (
    f"VOCAB_SIZE = {V}",
    f"MODEL_DIMS = {M}",
    f"HIDDEN_DIMS = {H}",
    f"NUM_HEADS = {N}",
    f"NUM_KV_HEADS = {K}",
    f"HEAD_DIM = {D}",
    f"SEQUENCE_LENGTH = {S}",
    f"TextFiles.root = '{ROOT / 'framework'}'",
    "Experiment.global_batch = 8",
    "Experiment.num_steps = 5",
    "LinearWarmup.steps = 2",
    "LinearWarmup.schedule = @ConstantSchedule()",
    "ConstantSchedule.value = 0.01",
)
_SAID = {
    "vocab_size": V,
    "hidden_size": M,
    "intermediate_size": H,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": D,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": S,
    "bos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
_TYPES = {"local": "sliding_attention", "wide": "full_attention"}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 32,
    "sliding_window": 6,
    "rope_theta": 10000.0,
}
_GEMMA_GIN = ("KEYS_BEFORE = 5", "MultiHeadAttention.query_scale = 0.1767766952966369")
_TIED = (
    "LanguageModel.softmax = None",
    "TokenEmbedding.softmax = %SoftmaxKind.SHARED",
    "TokenEmbedding.input_scale = 1.0",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model: its gin file and parameters, and its config.json."""

    gin_file: str
    params: tuple[str, ...]
    config: dict


def _case(gin_file, params, layers, **config) -> Case:
    gin = (f"NUM_LAYERS = {layers}", *params)
    return Case(gin_file, gin, {**_SAID, "num_hidden_layers": layers, **config})


def _scaling(kind, names, said) -> tuple[str, ...]:
    fields = [f"{kind}.{ours} = {said[theirs]}" for ours, theirs in names.items()]
    return (f"MultiHeadAttention.rotary_scaling = @{kind}()", *fields)


_LLAMA3_GIN = _scaling(
    "Llama3Scaling",
    {
        "factor": "factor",
        "low_turns": "low_freq_factor",
        "high_turns": "high_freq_factor",
        "original_length": "original_max_position_embeddings",
    },
    LLAMA3,
)
_YARN_GIN = _scaling(
    "YarnScaling",
    {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "fast_turns": "beta_fast",
        "slow_turns": "beta_slow",
    },
    _YARN,
)
_LINEAR_GIN = (
    "MultiHeadAttention.rotary_scaling = @LinearScaling()",
    "local/MultiHeadAttention.rotary_scaling = None",
    "LinearScaling.factor = 2.0",
)
CASES = {
    "llama": _case(
        "lm/llama.gin",
        ("MultiHeadAttention.rotary_base = 500000.0", *_LLAMA3_GIN),
        2,
        model_type="llama",
        hidden_act="silu",
        rope_theta=500000.0,
        rope_scaling=LLAMA3,
        tie_word_embeddings=False,
    ),
    "llama_tied_biased": _case(
        "lm/llama.gin",
        (
            *_TIED,
            "MultiHeadAttention.use_bias = True",
            "FeedForward.use_bias = True",
            "RMSNorm.epsilon = 1e-5",
        ),
        2,
        model_type="llama",
        hidden_act="silu",
        rope_theta=10000.0,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rms_norm_eps=1e-5,
    ),
    "qwen2": _case(
        "lm/qwen2.gin",
        _YARN_GIN,
        2,
        model_type="qwen2",
        hidden_act="silu",
        rope_theta=1000000.0,
        rope_scaling=_YARN,
        tie_word_embeddings=False,
        use_sliding_window=False,
        sliding_window=4,
    ),
    "qwen3": _case(
        "lm/qwen3.gin",
        (),
        2,
        model_type="qwen3",
        hidden_act="silu",
        rope_theta=1000000.0,
        tie_word_embeddings=False,
        attention_bias=False,
    ),
    "gemma2": _case(
        "lm/gemma2.gin",
        _GEMMA_GIN,
        4,
        model_type="gemma2",
        **_GEMMA,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        layer_types=[_TYPES["local"], _TYPES["wide"]] * 2,
    ),
    "gemma3": _case(
        "lm/gemma3.gin",
        (*_GEMMA_GIN, *_LINEAR_GIN),
        6,
        model_type="gemma3_text",
        **(_GEMMA | {"rope_theta": 1000000.0}),
        rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
        layer_types=[_TYPES["local"]] * 5 + [_TYPES["wide"]],
    ),
    "gemma3_uneven": _case(
        "lm/gemma3.gin",
        (
            *_GEMMA_GIN,
            "NUM_LAYERS = 6",
            "LanguageModel.stack = @whole/Sequential()",
            "whole/Sequential.layers = (@six/Repeat(), @local/TransformerLayer())",
        ),
        7,
        model_type="gemma3_text",
        **(_GEMMA | {"rope_theta": 1000000.0}),
        rope_local_base_freq=10000.0,
        layer_types=[_TYPES["local"]] * 5 + [_TYPES["wide"], _TYPES["local"]],
    ),
}
FAMILIES = ("llama", "qwen2", "gemma2")
"""A case of each, where all of them would say no more."""


@functools.cache
def programs_of(name: str, *params: str, mesh=(1, 1)) -> StepPrograms:
    """The programs of a case, not compiled yet."""
    return StepPrograms(experiment(name, *params, mesh=mesh))


def experiment(name: str, *params: str, mesh=(1, 1)) -> Experiment:
    case = CASES[name]
    files = [case.gin_file, "plans/finalized.gin", str(DATA / "small_adam.gin")]
    params = (*SIZES, *case.params, f"MESH_SHAPE = {mesh}", *params)
    return build_experiment(files, list(params))[0]


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that a config describes."""
    gemma = config["model_type"].startswith("gemma")
    by_name = {"model.embed_tokens.weight": (V, M), "model.norm.weight": (M,)}
    if not config["tie_word_embeddings"]:
        by_name["lm_head.weight"] = (V, M)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if gemma:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        by_name |= {f"{layer}.{norm}.weight": (M,) for norm in norms}
        for which, rows in (("q", N), ("k", K), ("v", K)):
            by_name[f"{layer}.self_attn.{which}_proj.weight"] = (rows * D, M)
            if config.get("attention_bias") or config["model_type"] == "qwen2":
                by_name[f"{layer}.self_attn.{which}_proj.bias"] = (rows * D,)
        by_name[f"{layer}.self_attn.o_proj.weight"] = (M, N * D)
        if config.get("attention_bias"):
            by_name[f"{layer}.self_attn.o_proj.bias"] = (M,)
        if config["model_type"] in ("qwen3", "gemma3_text"):
            for which in "qk":
                by_name[f"{layer}.self_attn.{which}_norm.weight"] = (D,)
        for which, shape in (("gate", (H, M)), ("up", (H, M)), ("down", (M, H))):
            by_name[f"{layer}.mlp.{which}_proj.weight"] = shape
            if config.get("mlp_bias"):
                by_name[f"{layer}.mlp.{which}_proj.bias"] = shape[:1]
    return by_name


def random_tensors(config: dict, dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def draw(name, shape):
        value = rng.standard_normal(shape)
        if len(shape) > 1:
            value = value / np.sqrt(shape[-1])
        elif "norm" in name:
            start = 0 if config["model_type"].startswith("gemma") else 1
            value = start + 0.3 * value
        return value.astype(dtype)

    return {name: draw(name, shape) for name, shape in shapes(config).items()}


_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write_file(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file, made by hand: a header's length, a header, and the bytes."""
    header, start = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(tensors):
        array = tensors[name]
        ends = [start, start + array.nbytes]
        start = ends[1]
        header[name] = {
            "dtype": _NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": ends,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts = [tensors[name].tobytes() for name in sorted(tensors)]
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def write(folder: pathlib.Path, config: dict, tensors: dict, *, files: int = 1) -> None:
    """A published model, in one file or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        write_file(folder / "model.safetensors", tensors)
        return
    weight_map = {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::files]}
        write_file(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    size = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def imported(programs: StepPrograms, path, **fields) -> dict:
    """Weights by path, on the experiment's mesh."""
    theta = TrainState.abstract(programs).theta
    source = InitializeFrom(checkpoint=str(path), **fields)
    return weights_from(source, theta, programs.experiment.task)


def begun(programs: StepPrograms, path) -> NestedMap:
    """A training's first state, host arrays, with weights from a path."""
    taken = imported(programs, path)
    state = initial_state(programs.experiment)
    return with_weights(state, {name: np.asarray(w) for name, w in taken.items()})


def task_logits(task: LanguageModel, taken: dict, ids) -> np.ndarray:
    """float32 [S, V] of our model by TF on one device, for a row of tokens."""
    theta = NestedMap()
    for path, array in taken.items():
        theta.set_path(path, tf.constant(np.asarray(array)))
    length = len(ids)
    batch = NestedMap(
        ids=tf.constant([ids], tf.int32),
        segment_ids=tf.ones([1, length], tf.int32),
        segment_positions=tf.range(length)[None],
    )
    ctx = Context(mode=Mode.EVAL)
    return task.logits(ctx, theta, batch)[0].numpy()


def as_bfloat16(tensors: dict) -> dict[str, np.ndarray]:
    return {name: array.astype(jnp.bfloat16) for name, array in tensors.items()}
