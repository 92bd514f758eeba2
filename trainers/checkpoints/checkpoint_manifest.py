"""What a checkpoint holds, leaf by leaf, and how it differs from a given state."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from meshwright.framework.modeling.layer_order import LayerOrder
from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.checkpoints.checkpoint_digests import (
    CheckpointError,
    are_as_saved,
)
from meshwright.trainers.startup.gin_text import changed, rounds_of_pipelines

_MAX_SHOWN = 5
_BESIDE_WEIGHTS = {"slots": "optimizer", "ema": "moving average"}
"""What follows from the weights, by part of the state."""
_FROM_WEIGHTS = "another directory with these weights, by InitializeFrom.checkpoint"


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype name of one leaf, and in which order it stacks layers, if so."""

    shape: tuple[int, ...]
    dtype: str
    order: LayerOrder | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def of(cls, leaf: Any) -> ArraySpec:
        """The shape and dtype of anything that has both."""
        return cls(tuple(leaf.shape), str(leaf.dtype))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def forms(
    state: NestedMap, orders: Mapping[str, LayerOrder] | None = None
) -> dict[str, ArraySpec]:
    """The form of each leaf by its dotted path, with the order of layers by path."""
    orders = orders or {}
    return {
        path: dataclasses.replace(ArraySpec.of(leaf), order=orders.get(path))
        for path, leaf in state.items_by_path()
    }


def to_json(forms: Mapping[str, ArraySpec]) -> dict[str, Any]:
    """The contents of the manifest file."""
    return {path: dataclasses.asdict(form) for path, form in forms.items()}


def from_json(saved: Any) -> dict[str, ArraySpec]:
    """The inverse of `to_json`.

    Raises:
      ValueError: `saved` is no result of `to_json`.
    """
    try:
        return {
            path: ArraySpec(
                tuple(int(dim) for dim in form["shape"]),
                str(form["dtype"]),
                _order_from_json(form.get("order"), form["shape"]),
            )
            for path, form in saved.items()
        }
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(
            "a manifest maps paths to shapes and dtypes, but this one does not "
            f"({error})"
        ) from error


def _order_from_json(saved: Any, shape: Sequence[int]) -> LayerOrder | None:
    if saved is None:
        return None
    layers, stages, rounds = (int(saved[n]) for n in ("layers", "stages", "rounds"))
    order = LayerOrder(layers=layers, stages=stages, rounds=rounds)
    places = math.prod(shape[:2])
    if min(layers, stages, rounds) < 1 or max(layers, stages * rounds) > places:
        raise ValueError(f"{order} are not in the shape {shape}")
    return order


def is_as_saved(folder: epath.Path) -> bool:
    """Whether what `read` reads matches its digests, for this process."""
    return are_as_saved(folder, map(_json_file, ("manifest", "metadata")))


def _json_file(item: str) -> str:
    """The path of an item that is JSON, in the folder of its checkpoint."""
    return f"{item}/metadata"


def read_json(folder: epath.Path, item: str) -> Any:
    """The values of the item `item` of the checkpoint in `folder`."""
    return json.loads((folder / _json_file(item)).read_text())


def read(folder: epath.Path) -> dict[str, ArraySpec]:
    """The forms of all leaves of the checkpoint in `folder`, by path.

    Raises:
      ValueError: its manifest is none.
      OSError: it cannot be read.
    """
    manifest = read_json(folder, "manifest")
    forms = from_json(manifest)
    if any("order" in form for form in manifest.values()):
        return forms
    # Manifests of old do not say in which order layers are.
    rounds = rounds_of_pipelines(read_json(folder, "metadata"))
    return _with_rounds(forms, rounds) if rounds else forms


def _with_rounds(saved: Mapping[str, ArraySpec], rounds: int) -> dict[str, ArraySpec]:
    """Forms of a manifest without orders: all pipelines had so many rounds.

    Leaves that stack nothing get an order too, which nothing reads.
    """

    def with_order(form: ArraySpec) -> ArraySpec:
        stages = form.shape[0] if form.shape else 0
        if not 0 < stages * rounds <= math.prod(form.shape[:2]):
            return form
        order = LayerOrder(layers=None, stages=stages, rounds=rounds)
        return dataclasses.replace(form, order=order)

    return {path: with_order(form) for path, form in saved.items()}


def restacked(form: ArraySpec, shape: Sequence[int]) -> ArraySpec:
    """`form` with an order, if it has none and other stacks are made of its stack.

    Its layers are in a row then, as other programs stack them.
    """
    if form.order is not None or form.shape[:2] == tuple(shape[:2]):
        return form
    order = LayerOrder(layers=None, stages=1, rounds=1)
    return dataclasses.replace(form, order=order)


def check_orders(
    name: str,
    pairs: Mapping[str, tuple[ArraySpec, LayerOrder | None]],
) -> None:
    """Refuses stacks whose layers are in another order: shapes may be the same.

    Args:
      name: the checkpoint's, for messages.
      pairs: by the path of what is read: its saved form, and the order wanted.

    Raises:
      CheckpointError: the orders differ; the message has both, and says what to set.
    """
    clashes: dict[tuple[LayerOrder, LayerOrder], list[str]] = {}
    for path, (form, wanted) in pairs.items():
        saved = form.order
        if saved and wanted and not saved.is_same(wanted):
            clashes.setdefault((saved, wanted), []).append(path)
    if clashes:
        lines = [
            f"{paths[0]}{f' and {len(paths) - 1} more' if paths[1:] else ''}: {saved} "
            f"in the checkpoint, {wanted} in this model"
            for (saved, wanted), paths in clashes.items()
        ]
        raise CheckpointError(
            f"{name} has its layers in another order:{bullet_list(lines)}\nset "
            "Pipeline.num_repeats, which says the rounds, and Pipeline.num_stages as "
            "in the configuration that it was saved with"
        )


def differences(
    saved: Mapping[str, ArraySpec], wanted: Mapping[str, ArraySpec]
) -> list[str]:
    """One line for each leaf that is missing, extra, or of another form.

    Weights come first: differences in their optimizer slots follow from them.
    """
    lines = []
    paths = saved.keys() | wanted.keys()
    for path in sorted(paths, key=lambda p: (not p.startswith("theta."), p)):
        if path not in saved:
            lines.append(f"{path} {wanted[path]} is not in the checkpoint")
        elif path not in wanted:
            lines.append(f"{path} {saved[path]} is only in the checkpoint")
        elif saved[path] != wanted[path]:
            lines.append(
                f"{path} is {saved[path]} in the checkpoint, {wanted[path]} in this "
                "model"
            )
    return lines


def config_changes(folder: epath.Path, config: str) -> list[str]:
    """How `config` differs from that of the checkpoint in `folder`, a line for each.

    Empty if one of the two is unknown.
    """
    try:
        saved = read_json(folder, "metadata")["config"]
    except (OSError, ValueError, KeyError, TypeError):  # It may be damaged.
        return []
    return changed(saved, config) if isinstance(saved, str) and saved and config else []


def check_model(
    name: str,
    saved: Mapping[str, ArraySpec],
    wanted: NestedMap,
    of_config: Callable[[], Sequence[str]] = list,
) -> None:
    """Refuses what was saved of another model.

    Args:
      name: the checkpoint's, for messages.
      saved: the forms of what it has.
      wanted: nested map of what it should have.
      of_config: the differences of both configurations, a line for each.

    Raises:
      CheckpointError: they differ; the message lists the first differences.
    """
    model = forms(wanted)
    if lines := differences(saved, model):
        kind, remedy = _kind_and_remedy(saved, model)
        text = f"{name} is of another {kind}:{bullet_list(lines)}"
        if lines := of_config():
            text += f"\nconfigured when it was saved -> now:{bullet_list(lines)}"
        raise CheckpointError(
            f"{text}\nuse the configuration that it was saved with, or {remedy}"
        )


def _kind_and_remedy(
    saved: Mapping[str, ArraySpec], model: Mapping[str, ArraySpec]
) -> tuple[str, str]:
    """What differs, and what to do beside going back to the saved configuration."""
    paths = saved.keys() | model.keys()
    differing = {path for path in paths if saved.get(path) != model.get(path)}
    parts = {path.partition(".")[0] for path in differing}
    if parts <= _BESIDE_WEIGHTS.keys():
        of = " or ".join(_BESIDE_WEIGHTS[part] for part in sorted(parts, reverse=True))
        return f"{of}, with the same weights", f"start {_FROM_WEIGHTS}"
    # Slots follow from weights.
    weights = [path for path in differing if path.startswith("theta.")]
    if weights and all(
        path in saved and path in model and _is_restaged(saved[path], model[path])
        for path in weights
    ):
        stacks = sorted({path.split(".")[1] for path in weights})
        rules = ", ".join(rf'r"{of}\.(.*) -> {of}.\1 reshape"' for of in stacks)
        return "model, the same layers in other stages", (
            f"start {_FROM_WEIGHTS} and InitializeFrom.rules = [{rules}], if pipelines "
            "have one round"
        )
    return "model", "another directory"


def _is_restaged(old: ArraySpec, new: ArraySpec) -> bool:
    """Whether they stack as many layers, by stage and number or by number alone."""
    short, long = sorted((old.shape, new.shape), key=len)
    is_staged_alike = len(short) == len(long) >= 2
    counts, rest = (short[:2], short[2:]) if is_staged_alike else (short[:1], short[1:])
    return (
        old.dtype == new.dtype
        and len(long) - len(short) in (0, 1)
        and (math.prod(counts), rest) == (math.prod(long[:2]), long[2:])
    )


def bullet_list(lines: Sequence[str], most: int = _MAX_SHOWN) -> str:
    """The first lines, indented and below each other, and the number of the rest."""
    shown = list(lines[:most])
    if len(lines) > len(shown):
        shown[-1] = f"... and {len(lines) - len(shown) + 1} more"
    return "".join(f"\n  {line}" for line in shown)
