"""The flags of meshwright-export."""

from __future__ import annotations

from absl import flags

SAVED_MODEL, BUNDLE, KERAS = "saved_model", "bundle", "keras"
SAFETENSORS = "safetensors"

MODEL_DIR = flags.DEFINE_string(
    "model_dir",
    None,
    "Folder of the training whose checkpoint is exported; a bundle can do without.",
    allow_override=True,  # meshwright-train has one too.
)
STEP = flags.DEFINE_integer("step", None, "Checkpoint's step; default: the newest.")
OUTPUT = flags.DEFINE_string("output", None, "Folder to make and to write to.")
WHAT = flags.DEFINE_list(
    "what",
    [SAVED_MODEL, BUNDLE],
    "What to export: saved_model, bundle and, of a KerasModel, keras or, of a "
    "LanguageModel, safetensors.",
)
FAMILY = flags.DEFINE_string(
    "family",
    None,
    "Whose names and config.json safetensors get: llama, qwen2, qwen3, gemma2 or "
    "gemma3_text.",
)
MAPPING = flags.DEFINE_string(
    "mapping",
    None,
    "In place of --family: a file that says which tensor is which weight, see "
    "InitializeFrom.mapping. There is no config.json then.",
)
DTYPE = flags.DEFINE_string(
    "dtype", "float32", "Of safetensors: float32, bfloat16 or float16."
)
PLATFORMS = flags.DEFINE_list(
    "platforms",
    ["cpu", "cuda", "tpu"],
    "Platforms that the bundle's programs are lowered for.",
)
FILE_MEGABYTES = flags.DEFINE_integer(
    "file_megabytes",
    2000,
    "Largest file of a SavedModel's variables, which are split where they take more, "
    "and of safetensors, which are not.",
    lower_bound=1,
)
CALLS = flags.DEFINE_integer(
    "calls", 2, "How many calls of the main program the bundle has batches for."
)
EXPECTED = flags.DEFINE_bool(
    "expected",
    True,
    "Train on the bundle's batches here, for the runner's --check to compare with.",
)


def wanted() -> list[str]:
    """The names of what to export.

    Raises:
      ValueError: a name is unknown, a SavedModel lacks weights, or safetensors their
        family or mapping, of which they have one.
    """
    wanted, known = WHAT.value, (SAVED_MODEL, BUNDLE, KERAS, SAFETENSORS)
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ValueError(
            f"--what={','.join(wanted)} must be some of {', '.join(known)}"
        )
    if MODEL_DIR.value == "":
        raise ValueError(
            "--model_dir is empty: name the training's folder, or leave it out"
        )
    if MODEL_DIR.value is None and {SAVED_MODEL, KERAS, SAFETENSORS} & set(wanted):
        raise ValueError(
            "a SavedModel or Keras model has weights: give the training's --model_dir, "
            f"or --what={BUNDLE}, which can initialise them where it runs"
        )
    if SAFETENSORS in wanted and (FAMILY.value is None) == (MAPPING.value is None):
        raise ValueError(
            "safetensors have the names of a family of models, or of a mapping: give "
            "one of these, such as --family=llama or --mapping=my.map"
        )
    return wanted
