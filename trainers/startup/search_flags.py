"""The flags of a search by meshwright-plan."""

from __future__ import annotations

from absl import flags

SEARCH = flags.DEFINE_bool(
    "search",
    False,
    "Search for the plan, mesh shape, recomputation, and pipeline's stages and "
    "microbatches that train fastest on --topology, and write them as a gin file.",
)
PLANS = flags.DEFINE_list(
    "search_plans",
    [],
    "Gin files of plans to begin with; default: the configured plan and those under "
    "params/plans that have its mesh axes.",
)
BATCH = flags.DEFINE_list(
    "search_batch", [], "Global batches to choose from; default: the configured batch."
)
MICROBATCHES = flags.DEFINE_list(
    "search_microbatches",
    [],
    "Counts of microbatches for pipelines to choose from; default: the configured "
    "count and powers of two, 1 to 16 a stage.",
)
STAGES = flags.DEFINE_list(
    "search_stages",
    [],
    "Numbers of stages for pipelines to choose from, beside the configured; 1: no "
    "pipeline. Default: 1 and powers of two that divide the layers, up to the number "
    "of devices.",
)
REPEATS = flags.DEFINE_list(
    "search_repeats",
    [],
    "How often a microbatch may pass each stage of a pipeline; default: 1, 2, 4 and as "
    "configured.",
)
GROUP_SIZES = flags.DEFINE_list(
    "search_group_sizes",
    [],
    "Numbers of tokens of experts' groups to choose from, beside the configured. Only "
    "tokens of a group compete for slots, so another number trains another model.",
)
PROPAGATED = flags.DEFINE_integer(
    "search_propagated",
    1000,
    "Plans that no file has to complete with Shardy and to price at most; 0: the plans "
    "of files alone.",
    lower_bound=0,
)
BUDGET = flags.DEFINE_integer(
    "search_budget",
    15,
    "Candidates to compile at most, before the fastest is compiled with or without "
    "weight-update sharding, as is not configured.",
    lower_bound=1,
)
JOBS = flags.DEFINE_integer(
    "search_jobs", 2, "Compilers at once; each takes some 2 GB.", lower_bound=1
)
OUTPUT = flags.DEFINE_string(
    "search_output", "winner.gin", "Where to write the best candidate."
)
OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "Write --search_output even if it exists."
)
CACHE_DIR = flags.DEFINE_string(
    "cache_dir",
    None,
    "Folder of compiled results; default: meshwright/plans in the user's cache.",
)

OF_PIPELINES = (MICROBATCHES, STAGES, REPEATS)
"""Flags for models with pipelines."""

OPTIONS = (
    PLANS,
    BATCH,
    *OF_PIPELINES,
    GROUP_SIZES,
    PROPAGATED,
    BUDGET,
    JOBS,
    OUTPUT,
    OVERWRITE,
    CACHE_DIR,
)
"""Flags that say how to search."""
