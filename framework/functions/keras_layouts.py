"""Layouts of Keras models: tensor parallelism, and plans."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from meshwright.framework.functions.keras_files import is_built
from meshwright.framework.functions.layouts.layout import (
    FullySharded,
    Layout,
    LayoutTable,
    Replicated,
    path_of,
    rows_of,
)
from meshwright.framework.functions.layouts.split_weights import (
    Product,
    SplitRule,
    SplitWeight,
    inner_layers,
    is_known,
    product_of,
    split_dims,
    split_weights,
)
from meshwright.framework.sharding.mesh import DeviceMesh, did_you_mean
from meshwright.framework.sharding.plan import ShardingPlan, as_axes
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.stored_form import StoredForm
from meshwright.framework.sizes import bytes_text

_LAYOUTS = ("data", "fsdp", "tensor")
_MUCH = 0.2
"""The share of a model's bytes that "tensor" may leave whole without a warning."""


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
            only = '"tensor" splits only embeddings, Dense and EinsumDense kernels'
            holder = self._holders.get(id(variable))
            if holder is None or is_known(holder):
                return only
            return f"{only}, and its layer is of the class {type(holder).__name__}"
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

    def lacking(
        self,
        variables: Sequence[tf.Variable],
        forms: Sequence[StoredForm | None],
        mesh: DeviceMesh,
    ) -> str:
        """That it left much whole, of layers that it does not know, and the remedy."""
        total, whole = 0, []
        for variable, form in zip(variables, forms, strict=False):
            holder = self._holders.get(id(variable))
            if holder is None:
                continue
            size = variable.shape.num_elements() * variable.dtype.size
            total += size
            axes = [axis for dim in form.border.dims for axis in dim] if form else []
            is_split = self.axis in mesh.entire(axes)
            if variable.shape.rank > 1 and not is_known(holder) and not is_split:
                whole.append((size, variable, type(holder).__name__))
        left = sum(size for size, *_ in whole)
        if mesh.axis_size(self.axis) == 1 or left < _MUCH * total or not whole:
            return ""
        whole.sort(key=lambda one: -one[0])
        listed = ", ".join(
            f"{path_of(v)} {tuple(v.shape)} {bytes_text(size)}"
            for size, v, _ in whole[:3]
        )
        kinds = ", ".join(dict.fromkeys(kind for *_, kind in whole[:3]))
        return (
            f'"tensor" knows no layers such as {kinds}: {left / total:.0%} of the '
            f"bytes of the weights stay whole on each device along {self.axis}, the "
            f"largest {listed}. Give such weights rows, with {self.axis!r} for the dim "
            f"of heads, units or words: {self._remedy(whole[0][1], mesh)}"
        )

    def _remedy(self, variable: tf.Variable, mesh: DeviceMesh) -> str:
        """The call that splits a weight besides."""
        shape, count = variable.shape, mesh.axis_size(self.axis)
        dim = max(range(shape.rank), key=lambda i: (shape[i] % count == 0, shape[i]))
        row = [self.axis if i == dim else None for i in range(shape.rank)]
        rows = f'mw.keras.rows(model, mesh, "tensor") | {{"{path_of(variable)}$": {row}'
        others = mesh.axis_names[:-1]
        axes = "" if len(others) == 1 else f", data_axes={others}"
        return f"mw.keras.distribute(model, mesh, {rows}}}{axes})"

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
    def _holders(self) -> dict[int, Any]:
        """The layer that made each weight, by `id` of the variable."""
        return {
            id(weight._value): layer
            for layer in self.model._flatten_layers()
            for weight in (*layer._trainable_variables, *layer._non_trainable_variables)
        }

    @functools.cached_property
    def _left(self) -> dict[int, Product]:
        """The products whose kernels are not split, by `id` of the variable."""
        products = [product_of(layer) for _, layer in inner_layers(self.model)]
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


NAMED = Replicated, FullySharded, TensorParallel
"""What `distribute` makes of a layout's name."""
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
