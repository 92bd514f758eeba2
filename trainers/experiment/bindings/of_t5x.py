"""What T5X and Lingvo call flags, macros and parameters, and what they are here."""

from __future__ import annotations

import shlex

PARAMETERS = {
    "Adafactor.decay_rate": "decay_exponent",
    "Adafactor.step_offset": "decay_offset",
    "transformer_layer.emb_dim": "model_dims",
    "transformer_layer.mlp_activations": "activation",
    "transformer_layer.mlp_dim": "hidden_dims",
}
"""The names here of parameters that have others in T5X."""
_MACROS = {
    "BATCH_SIZE": "Experiment.global_batch",
    "DROPOUT_RATE": "transformer_layer.dropout_rate",
    "EVAL_PERIOD": "Experiment.eval_interval",
    "EVAL_STEPS": "Experiment.eval_batches",
    "TASK_FEATURE_LENGTHS": "SEQUENCE_LENGTH",
    "TRAIN_STEPS": "Experiment.num_steps",
}
_MODEL_DIR = "MODEL_DIR"
_SEQIO = ("MIXTURE_OR_TASK_NAME", "MIXTURE_OR_TASK_MODULE", "USE_CACHED_TASKS")
_FLAGS = {
    "gin_bindings": "gin_param",  # T5X's older name, and gin's own.
    "logdir": "model_dir",  # Lingvo's.
    "model": "gin_file",
    "run_mode": "mode",
}


def of_macro(name: str) -> str:
    """What stands here for T5X's macro `name`, as a sentence; "" if it has none."""
    if name in _MACROS:
        return f"T5X's {name} is {_MACROS[name]} here"
    if name == _MODEL_DIR:
        return "T5X's MODEL_DIR is the flag --model_dir here"
    if name in _SEQIO:
        return f"T5X's {name} is of seqio: here the task's input names its files"
    return ""


def of_flag(name: str, given: str) -> str:
    """What stands here for an unknown flag, as a sentence; "" if it has none.

    Args:
      name: the flag's name, without hyphens.
      given: the flag as it was given, `--name=value` or `--name`.
    """
    if name in _FLAGS:
        return f"Here it is --{_FLAGS[name]}"
    prefix, _, macro = name.partition(".")
    if prefix != "gin" or not macro:
        return ""
    value = given.partition("=")[2] or "VALUE"
    if macro == _MODEL_DIR:
        folder = shlex.quote(value.strip("'\""))
        return f"Here it is --model_dir={folder}"
    if macro in _SEQIO:
        return of_macro(macro)
    binding = f"{_MACROS.get(macro, macro)} = {value}"
    return f"Bindings are given as --gin_param={_quoted(binding)}"


def _quoted(text: str) -> str:
    """For a shell; with double quotes only where the text has single ones."""
    return f'"{text}"' if "'" in text else f"'{text}'"
