"""The stacks of a task: where equal layers are repeated, in a loop or in a pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from meshwright.layers.stacks.pipeline import Pipeline
from meshwright.layers.stacks.repeat import Repeat

Stack = Repeat | Pipeline


def stacks(task: Any) -> dict[str, Stack]:
    """The outermost stacks of a task or layer, by the dotted path of its fields."""
    found: dict[str, Stack] = {}

    def note(path: str, one: Stack) -> Stack:
        found[path] = one
        return one

    map_stacks(task, note)
    return found


def pipelines(task: Any) -> dict[str, Pipeline]:
    """The pipelines among them."""
    found = stacks(task).items()
    return {path: one for path, one in found if isinstance(one, Pipeline)}


def repeats(task: Any) -> list[Repeat]:
    """The layers of each stack, in a pipeline or not."""
    every = stacks(task).values()
    return [one.stack if isinstance(one, Pipeline) else one for one in every]


def map_stacks(task: Any, fn: Callable[[str, Stack], Any], path: str = "") -> Any:
    """A copy of a task or layer with `fn(path, stack)` in place of its stacks."""

    def inside(name: Any, value: Any) -> Any:
        return map_stacks(value, fn, f"{path}.{name}" if path else str(name))

    if isinstance(task, Stack):
        return fn(path, task)
    if isinstance(task, (list, tuple)):
        return type(task)(inside(i, one) for i, one in enumerate(task))
    if not dataclasses.is_dataclass(task) or isinstance(task, type):
        return task
    changed = {}
    for field in dataclasses.fields(task):
        value = getattr(task, field.name)
        new = inside(field.name, value)
        if new is not value and new != value:
            changed[field.name] = new
    return dataclasses.replace(task, **changed) if changed else task
