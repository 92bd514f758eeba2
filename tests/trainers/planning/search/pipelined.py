"""A small language model whose layers are a pipeline, for planning."""

from tests.trainers.parity import DATA

GIN_FILES = (
    str(DATA / "small_lm.gin"),
    "lm/pipeline.gin",
    "plans/pipeline.gin",
    str(DATA / "small_adam.gin"),
)
PARAMS = (
    "MESH_SHAPE = (2, 2, 2)",
    "NUM_LAYERS = 4",
    "NUM_STAGES = 2",
    "NUM_MICROBATCHES = 4",
)
