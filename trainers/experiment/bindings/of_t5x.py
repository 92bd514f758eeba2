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
_CLASSES = {
    "PjitPartitioner.num_partitions": (
        "an axis of the mesh: MESH_SHAPE = (4, 2) with plans/data_tensor.gin splits "
        "weights in 2"
    ),
    "PjitPartitioner.model_parallel_submesh": "MESH_SHAPE, with a plan of params/plans",
    "PjitPartitioner.logical_axis_rules": (
        "ShardingPlan.weights and ShardingPlan.activations"
    ),
    "Trainer.num_microbatches": "Experiment.gradient_accumulation_steps",
    "Trainer.learning_rate_fn": "learning_rate of the optimizer",
    "SaveCheckpointConfig.period": "Experiment.checkpoint_interval",
    "SaveCheckpointConfig.keep": "Experiment.keep_checkpoints",
    "RestoreCheckpointConfig.path": "InitializeFrom.checkpoint",
    "DatasetConfig.batch_size": "Experiment.global_batch",
    "DatasetConfig.seed": "the input's seed, such as TextInput.seed",
    "train.total_steps": "Experiment.num_steps",
    "train.eval_period": "Experiment.eval_interval",
    "train.eval_steps": "Experiment.eval_batches",
    "train.random_seed": "Experiment.seed",
}
"""What stands here for parameters of T5X's classes, by class and parameter."""
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


def of_class(name: str) -> str:
    """What stands here for `scope/module.Class.parameter` of T5X; "" if nothing does.

    Of a class without a parameter, what stands for all of its parameters that do.
    """
    parts = name.rpartition("/")[2].split(".")
    if here := _CLASSES.get(".".join(parts[-2:])):
        return f"T5X's {'.'.join(parts[-2:])} is {here}"
    owner = parts[-1]
    if owner == "train" != name:  # Modules of one's own have such functions too.
        return ""
    owned = [
        f"{known.partition('.')[2]} is {here}"
        for known, here in _CLASSES.items()
        if known.startswith(f"{owner}.")
    ]
    return f"Of T5X's {owner}, {'; '.join(owned)}" if owned else ""


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
    if here := of_class(macro):
        return here
    binding = f"{_MACROS.get(macro, macro)} = {value}"
    return f"Bindings are given as --gin_param={_quoted(binding)}"


def _quoted(text: str) -> str:
    """For a shell; with double quotes only where the text has single ones."""
    return f'"{text}"' if "'" in text else f"'{text}'"
