"""Layouts of Keras models: tensor parallelism, and plans."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from meshwright.framework.functions.keras_files import is_built
from meshwright.framework.functions.layout import (
    FullySharded,
    Layout,
    LayoutTable,
    Replicated,
    path_of,
    rows_of,
)
from meshwright.framework.sharding.mesh import DeviceMesh, did_you_mean
from meshwright.framework.sharding.plan import ShardingPlan, as_axes
from meshwright.framework.sharding.sharding import Sharding

_LAYOUTS = ("data", "fsdp", "tensor")


def layout_of(
    model: Any,
    mesh: DeviceMesh,
    layout: str | Mapping[str, Any] | ShardingPlan,
    axes: Sequence[str],
) -> Layout:
    """The layout that `distribute` is asked for.

    Args:
      model: the Keras model.
      mesh: the device mesh.
      layout: as of `distribute`.
      axes: the mesh axes that split a batch.

    Raises:
      ValueError: an unknown layout, a plan of another mesh, or "fsdp" without axes.
    """
    if isinstance(layout, ShardingPlan):
        if layout.mesh != mesh:
            raise ValueError(
                f"{model.name}: the layout is a plan of {layout.mesh}, but the mesh is "
                f"{mesh}: pass the plan's own, plan.mesh"
            )
        return Planned(model, layout)
    if layout == "data":
        return Replicated()
    if layout == "fsdp":
        if not axes:
            raise ValueError(
                f"{model.name}: the layout 'fsdp' splits weights along data_axes, "
                "which are (): name the mesh axes"
            )
        return FullySharded(axes)
    if layout == "tensor":
        return TensorParallel(model, mesh.axis_names[-1])
    if isinstance(layout, Mapping):
        rows = {key: getattr(row, "axes", row) for key, row in layout.items()}
        return LayoutTable(rows, model.name)
    hint = did_you_mean(layout, _LAYOUTS) if isinstance(layout, str) else ""
    raise ValueError(
        f"{model.name}: the layout is {layout!r}{hint + ' Pass' if hint else '; pass'} "
        "'data', 'fsdp', 'tensor', a ShardingPlan, or a table from regular expressions "
        "to the mesh axes of each dim, such as {'dense.*kernel': [None, 'model']}"
    )


def table_of(
    model: Any, mesh: DeviceMesh, layout: Any, axes: Any
) -> dict[str, list[Any]]:
    """The rows of a layout; see `mw.keras.rows`."""
    if not is_built(model):
        raise ValueError(
            f"{model.name} has no weights yet, or not all: call it once before "
            "mw.keras.rows, as model(x[:1])"
        )
    made = layout_of(model, mesh, layout, data_axes_of(model, mesh, layout, axes))
    return rows_of(model.weights, made, mesh, model.name)


def data_axes_of(
    model: Any, mesh: DeviceMesh, layout: Any, axes: Any
) -> tuple[str, ...]:
    """The mesh axes that split a batch; see `distribute`."""
    if axes is None:
        return tuple(batch_axes(layout, mesh))
    is_iterable = isinstance(axes, Iterable)
    given = as_axes(axes) if is_iterable else ()
    are_of_mesh = all(axis in mesh.axis_names for axis in given)
    if is_iterable and are_of_mesh and len({*given}) == len(given):
        return given
    raise (ValueError if is_iterable else TypeError)(
        f"{model.name}: data_axes is {axes!r}; pass some of the mesh's axes "
        f"{mesh.axis_names}, such as {mesh.axis_names[:1]}"
    )


def batch_axes(
    layout: str | Mapping[str, Any] | ShardingPlan, mesh: DeviceMesh
) -> Sequence[str]:
    """The mesh axes that split a batch where the user does not say."""
    if isinstance(layout, ShardingPlan):
        return as_axes(layout.activations.get("batch"))
    if layout in ("data", "fsdp"):
        return mesh.axis_names
    return mesh.axis_names[:-1] if layout == "tensor" else mesh.axis_names[:1]


class SplitRule(enum.Enum):
    """By what tensor parallelism splits a weight."""

    HEADS = "heads"
    UNITS = "units"
    INPUTS = "inputs"
    WORDS = "words"

    @property
    def text(self) -> str:
        """For reports."""
        return {
            SplitRule.HEADS: "attention by heads",
            SplitRule.UNITS: "feed-forward layers by units",
            SplitRule.INPUTS: "by inputs a layer that follows one split by units",
            SplitRule.WORDS: "embeddings by words",
        }[self]


@dataclasses.dataclass(frozen=True, eq=False)
class TensorParallel(Layout):
    """Splits attention by heads, feed-forward layers by units, embeddings by words.

    It knows weights by the layers that they belong to, and splits them as Megatron-LM
    does (Shoeybi et al. 2019), see `split_weights`. Other weights, and dims that the
    axis does not divide, are left to completion.

    Args:
      model: the Keras model.
      axis: the mesh axis that splits them.
    """

    model: Any
    axis: str

    def sharding_of(self, variable: tf.Variable, mesh: DeviceMesh) -> Sharding | None:
        """The sharding of a variable; None where completion decides.

        Raises:
          ValueError: the model has no layer that could be split.
        """
        if not self._splits:
            raise ValueError(
                f"{self.model.name}: the layout 'tensor' splits none of its weights, "
                "as no layer is attention, an Embedding, or one of a pair of Dense: "
                "pass a table or 'fsdp' in place of 'tensor'"
            )
        dim = self._split_dim(variable)
        if dim is None or self._is_uneven(variable, dim, mesh):
            return None
        dims = [None] * variable.shape.rank
        dims[dim] = self.axis
        return Sharding.from_dims_mapping(mesh, dims, variable.shape.rank)

    def reason(self, variable: tf.Variable, mesh: DeviceMesh) -> str:
        """By what it is split, or why it is not."""
        split = self._splits.get(id(variable))
        if split is not None:
            by = f'the layout "tensor", which splits {split.rule.text}'
            return self.missed(variable, mesh) or by
        nothing, product = '"tensor" splits no dim of it', self._left.get(id(variable))
        if product is None:
            return '"tensor" splits only embeddings, Dense and EinsumDense kernels'
        if product.narrows:
            return (
                f"{nothing}, as its layer has fewer units than inputs, and follows "
                "none that is split by units"
            )
        if product.units and product.units == product.inputs:
            return (
                f"{nothing}, as its layer has as many units as inputs, and is not the "
                "next in its parent after one that is split by units: a table with a "
                "row for it can split it"
            )
        if 0 < product.inputs < product.units:
            return (
                f"{nothing}, as its layer has more units than inputs, and no later one "
                "takes them as its inputs: they would be gathered at once"
            )
        return f"{nothing}, as its layer is neither attention nor feed-forward"

    def missed(self, variable: tf.Variable, mesh: DeviceMesh) -> str:
        """That the axis does not divide the dim."""
        dim = self._split_dim(variable)
        if dim is None or not self._is_uneven(variable, dim, mesh):
            return ""
        size, count = variable.shape[dim], mesh.axis_size(self.axis)
        return (
            f'"tensor" would split dim {dim} by {self.axis}, but {count} does not '
            f"divide {size}; change the size, or give a row, which pads it"
        )

    def summary(self, variables: Sequence[tf.Variable], mesh: DeviceMesh) -> str:
        """How many weights are split by what."""
        counts = collections.Counter(
            self._splits[id(v)].rule
            for v in variables
            if self.sharding_of(v, mesh) is not None
        )
        listed = ", ".join(f"{counts[r]} by {r.value}" for r in SplitRule if counts[r])
        left = len(variables) - counts.total()
        return (
            f'"tensor" splits along {self.axis} {listed or "none"}, and leaves {left} '
            "to completion"
        )

    def _is_uneven(self, variable: tf.Variable, dim: int, mesh: DeviceMesh) -> bool:
        return bool(variable.shape[dim] % mesh.axis_size(self.axis))

    def _split_dim(self, variable: tf.Variable) -> int | None:
        split = self._splits.get(id(variable))
        return None if split is None else split.dim

    @functools.cached_property
    def _splits(self) -> dict[int, SplitWeight]:
        """The weights that are split, by `id` of the variable."""
        return {id(split.weight._value): split for split in split_weights(self.model)}

    @functools.cached_property
    def _left(self) -> dict[int, _Product]:
        """The products whose kernels are not split, by `id` of the variable."""
        products = [_product_of(layer) for _, layer in _inner_layers(self.model)]
        by_id = {id(p.kernel._value): p for p in products if p}
        return {key: p for key, p in by_id.items() if key not in self._splits}


@dataclasses.dataclass(frozen=True, eq=False)
class Planned(Layout):
    """Splits the dims of weights as a plan says for their names, see `names_of_dims`.

    Optimizer slots are left to completion, which splits them as their weights.

    Args:
      model: the Keras model.
      plan: names of dims to mesh axes; of activations the batch alone.

    Raises:
      ValueError: the plan splits a dim by a name that Keras's layers do not give.
    """

    model: Any
    plan: ShardingPlan

    def __post_init__(self):
        tables = {"weights": NAMES, "activations": ("batch",)}
        for table, known in tables.items():
            for name in getattr(self.plan, table):
                if name not in known:
                    raise ValueError(
                        f"{self.model.name}: {table}[{name!r}] of the plan is for no "
                        f"dim of a Keras model, whose names there are {known}: leave "
                        "it out, or pass a table from regular expressions"
                    )

    def sharding_of(self, variable: tf.Variable, mesh: DeviceMesh) -> Sharding | None:
        """The sharding of a variable; None where completion decides."""
        del mesh  # The plan's.
        dims = self._dims.get(id(variable))
        if dims is None:
            return None
        return self.plan.weight_sharding(dims, path_of(variable))

    def reason(self, variable: tf.Variable, mesh: DeviceMesh) -> str:
        """The names of its dims, by which the plan splits it."""
        del mesh
        dims = self._dims.get(id(variable))
        names = ", ".join(dims or ())
        return f"the plan, for which its dims are [{names}]" if dims is not None else ""

    @functools.cached_property
    def _dims(self) -> dict[int, tuple[str, ...]]:
        """By `id` of a variable: the names of its dims."""
        split = split_dims(self.model)
        return {
            id(weight._value): names_of_dims(tuple(weight.shape), split.get(id(weight)))
            for weight in self.model.variables
        }


NAMES = ("tensor", "fsdp", "other")


def names_of_dims(shape: tuple[int, ...], split: int | None) -> tuple[str, ...]:
    """The names of a weight's dims for a sharding plan.

    Args:
      shape: of the weight.
      split: the dim that tensor parallelism splits, if any.

    Returns:
      "tensor" for that dim, "fsdp" for the largest other one of a weight of two dims or
      more, and "other" for the rest.
    """
    names = ["other"] * len(shape)
    if split is not None:
        names[split] = "tensor"
    rest = [i for i in range(len(shape)) if i != split]
    if len(shape) > 1:
        names[max(rest, key=lambda i: shape[i])] = "fsdp"
    return tuple(names)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SplitWeight:
    """A weight that tensor parallelism splits.

    Args:
      weight: the Keras variable.
      dim: the dim that is split.
      rule: by what.
    """

    weight: Any
    dim: int
    rule: SplitRule


def split_weights(model: Any) -> list[SplitWeight]:
    """The weights of a Keras model that tensor parallelism splits.

    - `EinsumDense` to two dims of its own, as queries, keys and values are made: the
      first of the two, the heads. From two dims, as a result of attention: the first.
    - `Dense`, and `EinsumDense` likewise, to more units than it has inputs: its units,
      if a later one of these layers takes them, or if it is the last, as of logits.
      What others make would be gathered at once.
    - To fewer, as the second of a pair: its inputs, so that each device adds up a part.
      The layer whose units it takes is split by units.
    - To as many, as the second of a pair: its inputs, if it comes next in the parent.
    - To fewer, as the first of a pair: its units. The next of these layers in the same
      parent takes them as its inputs, and does not have more units.
    - `Embedding`: its rows.

    Layers are in the order in which their parents hold them. One takes the units of the
    last before it that makes as many as it has inputs, or twice as many, as for a gate
    and its input together; and of those right beside that one which make as many.
    """
    layers = list(_inner_layers(model))
    weights = [
        SplitWeight(weight=words, dim=0, rule=SplitRule.WORDS)
        for _, layer in layers
        if "Embedding" in _kinds(layer)
        and (words := getattr(layer, "_embeddings", None)) is not None
    ]
    products = [(parent, p) for parent, layer in layers if (p := _product_of(layer))]
    splits: list[SplitWeight | None] = []
    taken = {len(products) - 1}  # Those whose units are taken, and the last.
    for number, (_, product) in enumerate(products):
        wanted = (product.inputs, 2 * product.inputs)
        makers = [i for i in range(number) if products[i][1].units in wanted]
        split_makers = itertools.takewhile(lambda i: _by_units(splits[i]), makers[::-1])
        # A gate has another layer right beside it.
        by_units = [m for i, m in enumerate(split_makers) if m == makers[-1] - i]
        split = product.split(
            takes_units=bool(by_units),
            is_second=number - 1 in by_units
            and _are_a_pair(products[number - 1], products[number]),
            is_first=number + 1 < len(products)
            and _are_a_pair(products[number], products[number + 1]),
        )
        taken.update(by_units)
        splits.append(split)
    for number, split in enumerate(splits):
        if split and (split.rule is not SplitRule.UNITS or number in taken):
            weights.append(split)
    return weights


def _by_units(split: SplitWeight | None) -> bool:
    return split is not None and split.rule is SplitRule.UNITS


def split_dims(model: Any) -> dict[int, int]:
    """The dim of each weight that tensor parallelism splits, by the weight's `id`."""
    return {id(split.weight): split.dim for split in split_weights(model)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
    """A `Dense` or `EinsumDense` layer.

    Args:
      kernel: its weight.
      made: the kernel's dims that are dims of the result.
      summed: those that are dims of the input.
    """

    kernel: Any
    made: Sequence[int]
    summed: Sequence[int]

    @property
    def units(self) -> int:
        """The size of the result's dim; 0 if it makes several."""
        return self.kernel.shape[self.made[0]] if len(self.made) == 1 else 0

    @property
    def inputs(self) -> int:
        """The size of the input's dim; 0 if it sums over several."""
        return self.kernel.shape[self.summed[0]] if len(self.summed) == 1 else 0

    @property
    def narrows(self) -> bool:
        """Whether it has fewer units than inputs."""
        return 0 < self.units < self.inputs

    def split(
        self, *, takes_units: bool, is_first: bool, is_second: bool
    ) -> SplitWeight | None:
        """How it is split; see `split_weights`.

        Args:
          takes_units: whether the last layer before it that makes its inputs is split
            by units.
          is_first: whether it is the first of a pair.
          is_second: whether it is the second of a pair that is split.
        """
        counts = len(self.made), len(self.summed)
        if counts in ((2, 1), (1, 2)):
            dims = self.made if counts == (2, 1) else self.summed
            return SplitWeight(weight=self.kernel, dim=dims[0], rule=SplitRule.HEADS)
        if counts != (1, 1):
            return None
        if is_second or (self.narrows and takes_units):
            dim, rule = self.summed[0], SplitRule.INPUTS
        elif self.units > self.inputs or (self.narrows and is_first):
            dim, rule = self.made[0], SplitRule.UNITS
        else:
            return None
        return SplitWeight(weight=self.kernel, dim=dim, rule=rule)


def _are_a_pair(here: tuple[Any, _Product], after: tuple[Any, _Product]) -> bool:
    """Whether of layers with their parents one takes the other's units, not widening.

    They have the same parent.
    """
    (parent, first), (other, second) = here, after
    takes_units = first.units == second.inputs
    return parent is other and takes_units and 0 < second.units <= second.inputs


def _inner_layers(model: Any) -> Iterator[tuple[Any, Any]]:
    """Each layer without layers of its own, after the layer that holds it, once."""
    seen: set[int] = set()

    def walk(parent, layer):
        if id(layer) in seen:
            return
        seen.add(id(layer))
        if not layer._layers:
            yield parent, layer
        for inner in layer._layers:
            yield from walk(layer, inner)

    return walk(None, model)


def _kinds(layer: Any) -> set[str]:
    return {kind.__name__ for kind in type(layer).__mro__}


def _product_of(layer: Any) -> _Product | None:
    """The product that a layer is; None if it is another layer, or is not built."""
    weight = getattr(layer, "_kernel", None)
    if not _kinds(layer) & {"Dense", "EinsumDense"} or weight is None:
        return None
    equation = getattr(layer, "equation", "ab,bc->ac")
    inputs, rest = equation.replace("...", "").split(",")
    kernel, outputs = rest.split("->")
    return _Product(
        kernel=weight,
        made=[i for i, d in enumerate(kernel) if d in outputs and d not in inputs],
        summed=[i for i, d in enumerate(kernel) if d in inputs and d not in outputs],
    )
