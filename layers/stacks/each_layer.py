"""The layers of a stack, whatever it is made of."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.framework.modeling.layer import Layer
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.stacks.sequential import Sequential


def each_layer(layer: Layer, path: str) -> Iterator[tuple[str, Layer]]:
    """The layers of a stack and the fields that lead to them; `path` leads to it.

    What is around a stack, such as a `Pipeline`, has it in a field `stack`.
    """
    if isinstance(getattr(layer, "stack", None), Layer):
        yield from each_layer(layer.stack, f"{path}.stack")
    elif isinstance(layer, Repeat):
        yield from each_layer(layer.body, f"{path}.body")
    elif isinstance(layer, Sequential):
        for i, each in enumerate(layer.layers):
            yield from each_layer(each, f"{path}.layers[{i}]")
    else:
        yield path, layer
