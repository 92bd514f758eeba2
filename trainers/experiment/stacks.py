"""The stacks of a task: where equal layers are repeated, in a loop or in a pipeline.

And what kind of model it is, by its layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from meshwright.framework.compiler.hlo.step_errors import ModelKind
from meshwright.layers.conformer import ConformerLayer
from meshwright.layers.convolutions.unet3d import UNet3D
from meshwright.layers.experts.moe import MoE
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.transformer import TransformerLayer

Stack = Repeat | Pipeline

# The first that a task has among its layers.
_KINDS = {
    UNet3D: ModelKind.UNET,
    ConformerLayer: ModelKind.CONFORMER,
    MoE: ModelKind.EXPERTS,
    TransformerLayer: ModelKind.DENSE,
}


def stacks(task: Any) -> dict[str, Stack]:
    """The outermost stacks of a task or layer, by the dotted path of its fields."""
    by_path: dict[str, Stack] = {}

    def note(path: str, stack: Stack) -> Stack:
        by_path[path] = stack
        return stack

    map_stacks(task, note)
    return by_path


def pipelines(task: Any) -> dict[str, Pipeline]:
    """The pipelines among the stacks."""
    items = stacks(task).items()
    return {path: stack for path, stack in items if isinstance(stack, Pipeline)}


def repeats(task: Any) -> list[Repeat]:
    """The layers of each stack, in a pipeline or not."""
    outermost = stacks(task).values()
    return [s.stack if isinstance(s, Pipeline) else s for s in outermost]


def map_stacks(task: Any, fn: Callable[[str, Stack], Any], path: str = "") -> Any:
    """A copy of a task or layer with `fn(path, stack)` in place of its stacks."""

    def inside(name: Any, value: Any) -> Any:
        return map_stacks(value, fn, f"{path}.{name}" if path else str(name))

    if isinstance(task, Stack):
        return fn(path, task)
    if isinstance(task, (list, tuple)):
        return type(task)(inside(i, item) for i, item in enumerate(task))
    if not dataclasses.is_dataclass(task) or isinstance(task, type):
        return task
    changed = {}
    for field in dataclasses.fields(task):
        value = getattr(task, field.name)
        new = inside(field.name, value)
        if new is not value and new != value:
            changed[field.name] = new
    return dataclasses.replace(task, **changed) if changed else task


def model_kind(task: Any) -> ModelKind | None:
    """The kind of a task's model; None if the GSPMD paper measured none like it."""
    found = {type(part) for part in _parts(task)}
    kind = next((kind for layer, kind in _KINDS.items() if layer in found), None)
    if kind is ModelKind.DENSE and Pipeline in found:
        return ModelKind.PIPELINED
    return kind


def has_experts(task: Any) -> bool:
    """Whether a task has a mixture of experts."""
    return any(isinstance(part, MoE) for part in _parts(task))


def _parts(task: Any) -> Iterator[Any]:
    """A task or layer, and all inside it."""
    if isinstance(task, (list, tuple)):
        inside = list(task)
    elif dataclasses.is_dataclass(task) and not isinstance(task, type):
        yield task
        inside = [getattr(task, field.name) for field in dataclasses.fields(task)]
    else:
        return
    for value in inside:
        yield from _parts(value)
