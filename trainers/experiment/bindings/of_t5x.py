"""What T5X and Lingvo call flags, macros and parameters, and what they are here."""

from __future__ import annotations

import re
import shlex

PARAMETERS = {
    "Adafactor.decay_rate": "decay_exponent",
    "Adafactor.step_offset": "decay_offset",
    "SentencePieceVocabulary.sentencepiece_model_file": "model_file",
    "transformer_layer.emb_dim": "model_dims",
    "transformer_layer.mlp_activations": "activation",
    "transformer_layer.mlp_dim": "hidden_dims",
}
"""The names here of parameters that have others in T5X and seqio."""
_MACROS = {
    "BATCH_SIZE": "Experiment.global_batch",
    "DROPOUT_RATE": "transformer_layer.dropout_rate",
    "EVAL_PERIOD": "Experiment.eval_interval",
    "EVAL_STEPS": "Experiment.eval_batches",
    "TRAIN_STEPS": "Experiment.num_steps",
}
"""What T5X's macros set, by a binding of the same value."""
_SEQIO = (
    "of seqio: here the task's input reads files, or what functions of yours return as "
    "a tf.data.Dataset, by Translation.text = @PairDataset() or LanguageModel.text = "
    "@TokenDataset(); docs/examples/my_pairs.py shows where a seqio task goes"
)
_MACROS_IN_WORDS = {
    "CHECKPOINT_PATH": (
        "the flag --model_dir, the folder of a run, whose newest checkpoint "
        "--mode=eval and meshwright-generate take"
    ),
    "INITIAL_CHECKPOINT_PATH": (
        "InitializeFrom.checkpoint, with Experiment.initialize_from = @InitializeFrom()"
    ),
    "logical_axis_rules": (
        "ShardingPlan.weights and ShardingPlan.activations, or a plan of params/plans"
    ),
    "LOSS_NORMALIZING_FACTOR": (
        "not needed: the loss is the mean over the tokens of the batch, or over their "
        "weights"
    ),
    "MIXTURE_OR_TASK_MODULE": _SEQIO,
    "MIXTURE_OR_TASK_NAME": _SEQIO,
    "MODEL_DIR": "the flag --model_dir",
    "TASK_FEATURE_LENGTHS": (
        "SEQUENCE_LENGTH of a language model, SOURCE_LENGTH and TARGET_LENGTH of a "
        "translation; a PairDataset has the lengths of the rows that it is given"
    ),
    "USE_CACHED_TASKS": _SEQIO,
}
"""What stands here for other macros of T5X, and parameters written as macros.

Behind `T5X's NAME is`.
"""
_LOSS_FACTOR = _MACROS_IN_WORDS["LOSS_NORMALIZING_FACTOR"]
_T5_CONFIG = {
    "vocab_size": "VOCAB_SIZE",
    "dtype": "Experiment.activation_dtype, such as %bfloat16",
    "emb_dim": "MODEL_DIMS",
    "num_heads": "NUM_HEADS",
    "num_layers": "NUM_LAYERS",
    "num_encoder_layers": "encoder/Repeat.num_layers, or NUM_LAYERS for both stacks",
    "num_decoder_layers": "NUM_LAYERS, or decoder/Repeat.num_layers of a translation",
    "head_dim": "HEAD_DIM",
    "mlp_dim": "HIDDEN_DIMS",
    "mlp_activations": (
        "transformer_layer.activation: %Activation.GATED_GELU for ('gelu', 'linear'), "
        "GATED_SILU for ('silu', 'linear'), RELU for ('relu',)"
    ),
    "dropout_rate": "transformer_layer.dropout_rate",
    "logits_via_embedding": (
        "TokenEmbedding.softmax: %SoftmaxKind.SHARED for True, SEPARATE for False"
    ),
    "scan_layers": "Repeat, which loops over layers; Repeat.unroll",
    "remat_policy": "Repeat.recompute",
}
_CLASSES = {
    **{f"T5Config.{name}": here for name, here in _T5_CONFIG.items()},
    # Of T5X's decoder-only model, in which num_layers has no prefix.
    **{f"TransformerConfig.{name}": here for name, here in _T5_CONFIG.items()},
    "EncoderDecoderModel.z_loss": "Translation.z_loss",
    "EncoderDecoderModel.label_smoothing": (
        "Translation.label_smoothing, by default 0.1 rather than T5X's 0"
    ),
    "EncoderDecoderModel.loss_normalizing_factor": _LOSS_FACTOR,
    "EncoderDecoderModel.input_vocabulary": "TranslationInput.vocabulary",
    "EncoderDecoderModel.output_vocabulary": "TranslationInput.vocabulary, of both",
    "EncoderDecoderModel.optimizer_def": "Experiment.optimizer",
    "EncoderDecoderModel.module": "Translation.encoder and Translation.decoder",
    "EncoderDecoderModel.decode_fn": "Translation.search, such as @BeamSearch()",
    "DecoderOnlyModel.z_loss": "LanguageModel.z_loss",
    "DecoderOnlyModel.label_smoothing": "LanguageModel.label_smoothing",
    "DecoderOnlyModel.loss_normalizing_factor": _LOSS_FACTOR,
    "DecoderOnlyModel.vocabulary": "TextInput.vocabulary",
    "DecoderOnlyModel.optimizer_def": "Experiment.optimizer",
    "DecoderOnlyModel.module": "LanguageModel.stack",
    "PjitPartitioner.num_partitions": (
        "an axis of the mesh: MESH_SHAPE = (4, 2) with plans/data_tensor.gin splits "
        "weights in 2"
    ),
    "PjitPartitioner.model_parallel_submesh": "MESH_SHAPE, with a plan of params/plans",
    "PjitPartitioner.logical_axis_rules": (
        "ShardingPlan.weights and ShardingPlan.activations"
    ),
    "RelativePositionBiases.num_buckets": "SharedRelativeBias.num_buckets",
    "RelativePositionBiases.max_distance": "transformer_layer.max_distance",
    "RelativePositionBiases.num_heads": "NUM_HEADS",
    "standard_logical_axis_rules.additional_rules": (
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
_FLAGS = {
    "gin_bindings": "Here it is --gin_param",  # T5X's older name, and gin's own.
    "gin_search_paths": (
        "Here a gin file is named by its path from the working directory or under "
        "params/; in include also by that from the file with the include"
    ),
    "logdir": "Here it is --model_dir",  # Lingvo's.
    "model": "Here it is --gin_file",
    "run_mode": "Here it is --mode",
}
_VALUES = {
    "mode=export": "Here it is meshwright-export",
    "mode=infer": "Here it is meshwright-generate, of texts or ids",
    "mode=precompile": "Here it is meshwright-plan",
}
"""What stands here for values of flags."""
PAGE = "docs/coming_from/lingvo_t5x_praxis.md"
"""What is written of T5X in the docs."""
_PACKAGES = ("seqio", "t5", "t5x")


def of_macro(name: str) -> str:
    """What stands here for T5X's macro `name`, as a sentence; "" if it has none."""
    if name in _MACROS:
        return f"T5X's {name} is {_MACROS[name]} here"
    if here := _MACROS_IN_WORDS.get(name):
        return f"T5X's {name} is {here}"
    parameter = f"train.{name.rpartition('/')[2]}"
    if here := _CLASSES.get(parameter):
        return f"T5X's {parameter} is {here}"
    return ""


def of_class(name: str) -> str:
    """What stands here for `scope/module.Class.parameter` of T5X; "" if nothing does.

    Of a class alone, or with a parameter that is not known, what stands for those of
    its parameters that are.
    """
    parts = name.rpartition("/")[2].split(".")
    if here := _CLASSES.get(".".join(parts[-2:])):
        return f"T5X's {'.'.join(parts[-2:])} is {here}"
    for owner in reversed(parts[-2:]):
        if owner == "train" != name:  # Modules of one's own have such functions too.
            continue
        owned = [
            f"{known.partition('.')[2]} is {here}"
            for known, here in _CLASSES.items()
            if known.startswith(f"{owner}.")
        ]
        if owned:
            return f"Of T5X's {owner}, " + ";\n    ".join(owned)
    return ""


def of_flag(name: str, given: str) -> str:
    """What stands here for an unknown flag, as a sentence; "" if it has none.

    Args:
      name: the flag's name, without hyphens.
      given: the flag as it was given, `--name=value` or `--name`.
    """
    if name in _FLAGS:
        return _FLAGS[name]
    prefix, _, macro = name.partition(".")
    if prefix != "gin" or not macro:
        return ""
    value = given.partition("=")[2] or "VALUE"
    if macro == "MODEL_DIR":
        folder = shlex.quote(value.strip("'\""))
        return f"Here it is --model_dir={folder}"
    if macro in _MACROS_IN_WORDS:
        return of_macro(macro)
    if here := of_class(macro):
        return here
    binding = f"{_MACROS.get(macro, macro)} = {value}"
    return f"Bindings are given as --gin_param={_quoted(binding)}"


def of_value(flag: str, value: str) -> str:
    """What stands here for a flag with T5X's value, as a sentence; "" if nothing."""
    return _VALUES.get(f"{flag}={value}", "")


def of_package(name: str) -> str:
    """Where it is said what to write for a module or a gin file of T5X's packages.

    "" if `name`, with dots or slashes, is of none.
    """
    if re.split(r"[./]", name)[0] not in _PACKAGES:
        return ""
    return f"\n  {PAGE} lists what replaces the names in T5X's gin files."


def _quoted(text: str) -> str:
    """For a shell; with double quotes only where the text has single ones."""
    return f'"{text}"' if "'" in text else f"'{text}'"
