"""The flags of meshwright-generate."""

from __future__ import annotations

import math

from absl import flags

from meshwright.trainers.startup import process_flags

# The least normal float32: XLA takes a smaller one for 0.
_LEAST_TEMPERATURE = 2.0**-126

MODEL_DIR = flags.DEFINE_string(
    "model_dir",
    None,
    "Folder of the training whose checkpoint continues the prompts.",
    allow_override=True,  # The other binaries have these too.
)
STEP = flags.DEFINE_integer(
    "step", None, "Checkpoint's step; default: the newest.", allow_override=True
)
PLATFORM = flags.DEFINE_enum(
    "platform",
    "cpu",
    ["cpu", "cuda", "tpu"],
    "Which devices to run on.",
    allow_override=True,
)
PROMPT = flags.DEFINE_multi_string(
    "prompt", [], "Text to continue; may repeat. Without any: lines of standard input."
)
PROMPTS_FILE = flags.DEFINE_string(
    "prompts_file",
    None,
    "File of prompts, one a line; of JSON objects with a text or with ids, if its name "
    "ends in .jsonl.",
)
OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "File for results, a JSON object a line. Default: standard output, where a single "
    "prompt's text comes as it is made.",
    allow_override=True,
)
MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", None, "Most new tokens; default: as many as the cache has place for."
)
CACHE_LENGTH = flags.DEFINE_integer(
    "cache_length",
    None,
    "Most tokens of a prompt and its continuation; default: as many as the rows that "
    "the model was trained on.",
)
TARGET_LANGUAGE = flags.DEFINE_string(
    "target_language",
    None,
    "Language that a Translation translates prompts to, such as de; default: the only "
    "one that it was trained for.",
)
TEMPERATURE = flags.DEFINE_float(
    "temperature",
    None,
    "Of the distribution to draw from; default 0, always the likeliest, but 1 with "
    "--top_k or --top_p.",
)
TOP_K = flags.DEFINE_integer(
    "top_k", None, "Draw among so many tokens, the likeliest; default: among all."
)
TOP_P = flags.DEFINE_float(
    "top_p", None, "Draw among the likeliest tokens that have this share; default 1."
)
BEAMS = flags.DEFINE_integer(
    "beams", None, "Search for the likeliest continuations with so many beams instead."
)
FLAT_BEAMS = flags.DEFINE_bool(
    "flat_beams", False, "Beams of a prompt share a cache, as by BeamCaches.FLAT."
)
SEED = flags.DEFINE_integer("seed", 0, "Of draws: the same seed, the same text.")
ROWS = flags.DEFINE_integer(
    "rows", 16, "Most prompts that are continued at the same time."
)


def check() -> None:
    """Refuses flags that are wrong, before anything is imported.

    Raises:
      ValueError: a number is out of range; flags do not go together; a prompt is empty.
    """
    process_flags.check(PLATFORM.value)
    for flag in (MAX_TOKENS, CACHE_LENGTH, TOP_K, BEAMS, ROWS):
        if flag.value is not None and flag.value < 1:
            raise ValueError(f"--{flag.name} is {flag.value}; it must be 1 or more")
    if STEP.value is not None and STEP.value < 0:
        raise ValueError(f"--step is {STEP.value}; it must be 0 or more")
    if not 0 <= SEED.value < 2**63 - 1:
        raise ValueError(
            f"--seed is {SEED.value}; it must be 0 or more and below {2**63 - 1}"
        )
    temperature, top_p = TEMPERATURE.value, TOP_P.value
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ValueError(
            f"--temperature is {temperature}; it must be a number of at least 0: 0 is "
            "greedy, 1 the model's own distribution"
        )
    if temperature and temperature < _LEAST_TEMPERATURE:
        raise ValueError(
            f"--temperature is {temperature}; it must be 0, which is greedy, or at "
            f"least {_LEAST_TEMPERATURE}"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(
            f"--top_p is {top_p}; it must be above 0 and at most 1: a share of the "
            "probability, 1 for all tokens"
        )
    drawn = [f"--{f.name}" for f in (TEMPERATURE, TOP_K, TOP_P) if f.value is not None]
    if BEAMS.value is not None and drawn:
        raise ValueError(
            f"--beams and {' and '.join(drawn)}: beams draw nothing, so leave out one "
            "or the other"
        )
    if FLAT_BEAMS.value and BEAMS.value is None:
        raise ValueError("--flat_beams without --beams: give their number")
    if temperature == 0 and len(drawn) > 1:
        raise ValueError(
            f"{drawn[-1]} with --temperature=0: nothing is drawn, so leave out one or "
            "the other"
        )
    if PROMPT.value and PROMPTS_FILE.value is not None:
        raise ValueError("--prompt and --prompts_file: give one of them")
    for prompt in PROMPT.value:
        if not prompt:
            raise ValueError("--prompt is empty: give text to continue")
