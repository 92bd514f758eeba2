"""Writes a language model's weights as others publish them."""

from __future__ import annotations

import json
import math
import pathlib

import jax.numpy as jnp
import numpy as np

from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.task import Task
from meshwright.trainers.checkpoints.checkpoint_digests import CheckpointError
from meshwright.trainers.checkpoints.checkpoint_manifest import bullet_list
from meshwright.trainers.checkpoints.published.mapping_files import read_mapping
from meshwright.trainers.checkpoints.published.published_facts import Model
from meshwright.trainers.checkpoints.published.published_families import (
    FAMILIES,
    Family,
)
from meshwright.trainers.checkpoints.published.published_weights import tensors_of
from meshwright.trainers.checkpoints.published.safetensors_files import (
    CONFIG,
    write_safetensors,
)

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(jnp.bfloat16),
    "float16": np.dtype(np.float16),
}


def export_published(
    task: Task,
    weights: NestedMap,
    folder: pathlib.Path,
    *,
    family: str | None = None,
    mapping: str | None = None,
    dtype: str,
    file_bytes: int,
) -> None:
    """Writes safetensors, one file or several with an index; a family's config.json.

    Args:
      task: the language model.
      weights: nested map of its weights, host arrays in logical shapes.
      folder: where to; it is there, and empty.
      family: a name in `FAMILIES`; None if there is a mapping.
      mapping: a file that says which tensors there are, see `mapping_files.py`; None
        for a family's.
      dtype: a name in `DTYPES`, of all tensors.
      file_bytes: the most of a file, unless one tensor has more.

    Raises:
      CheckpointError: no such family or dtype; the family has no such model, the
        message lists why; a weight is beyond float16; safetensors is not installed.
      ValueError: the mapping cannot be read.
    """
    wanted, config = _known("dtype", dtype, DTYPES), None
    if mapping is not None:
        table, model = read_mapping(mapping), Model.of(task, any_parts=True)
    else:
        kind, model = _known("family", family, FAMILIES), Model.of(task)
        table, config = kind.mapping, _config(kind, model)
    arrays, sizes = {}, {}
    for tensor in tensors_of(table, model):
        weight = weights.get_path(tensor.place.path)
        arrays[tensor.name] = lambda t=tensor, w=weight: _cast(t.name, t.of(w), wanted)
        sizes[tensor.name] = math.prod(tensor.shape) * wanted.itemsize
    write_safetensors(folder, arrays, sizes, file_bytes=file_bytes)
    if config is None:
        return
    text = json.dumps({**config, "torch_dtype": dtype}, indent=2)
    (folder / CONFIG).write_text(text + "\n")


def _config(family: Family, model: Model) -> dict:
    """The config of a model; read again, it says the same."""
    config = json.loads(json.dumps(family.config(model)))
    if problems := family.problems(model, config):
        raise CheckpointError(
            f"no {family.name} model is like this one:{bullet_list(problems)}\nexport "
            f"it as another --family, of {', '.join(FAMILIES)}, or as a saved_model"
        )
    return config


def _cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if dtype == np.float16 and not np.isfinite(cast).all():
        raise CheckpointError(
            f"{name} has values that float16 has not: export it with --dtype=bfloat16"
        )
    return cast


def _known(flag: str, name: str, known: dict):
    if name not in known:
        raise CheckpointError(f"--{flag}={name} must be one of {', '.join(known)}")
    return known[name]
