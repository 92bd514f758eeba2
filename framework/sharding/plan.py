"""The sharding plan: a small table from logical dim names to mesh axes."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import gin
import tensorflow as tf

from meshwright.framework.markup import axes_html, code_html, table_html
from meshwright.framework.sharding.annotations import annotate
from meshwright.framework.sharding.mesh import DeviceMesh, did_you_mean
from meshwright.framework.sharding.origins import note_dims
from meshwright.framework.sharding.sharding import Sharding

Axes = str | Sequence[str] | None
_ALIKE = 0.78
"""Names at least so similar are taken for a name and its misspelling: `modle`."""
_OF_T5X = {
    "embed": "model",
    "mlp": "hidden",
    "kv": "head_dim",
    "joined_kv": "heads",
    "length": "sequence",
    "relpos_buckets": "relative_buckets",
    "expert": "experts",
    "expert_mlp": "hidden",
}
"""Names of dims in the rules of T5X and Flax's examples, and what our layers call them.

"batch", "heads", "layers" and "vocab" are called so in both.
"""


@gin.constants_from_enum
class SequenceAttention(enum.Enum):
    """How attention is computed where a plan splits the sequence.

    GATHER: all pairs of tokens at once, for which the compiler gathers keys and values.
    RING: keys and values pass round the devices (Liu et al. 2023). ALL_TO_ALL: tensors
    that are split along the sequence become split along heads, and back (Jacobs et al.
    2023); the devices must divide the heads.
    """

    GATHER = "gather"
    RING = "ring"
    ALL_TO_ALL = "all_to_all"


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """Maps the names that layers give to dims onto the axes of a device mesh.

    Weights and activations have separate tables, so that Table 1 of GSPMD can split
    dim `model` of the weights by X and that of the activations by Y. A name that a
    table does not mention is unsharded, except "stream", the sequence dim of tensors
    between a model's layers: without an entry it is split like "sequence".

    Args:
      mesh_axes: names of the mesh axes.
      mesh_shape: devices along each axis.
      weights: dim name -> axis, or axes, or None, for weights.
      activations: the same for activations.
      device_ids: optional device order, row-major in the mesh.
      unreduced_gradient_axes: mesh axes along which the inputs of layers, weights or
        the stream, are replicated forwards and have an unreduced (partial) gradient,
        the default of the post of that name. It holds where these axes do not split
        the input and it is possible; other gradients are replicated, as XlaSharding's.
      pipeline_axes: for the layers of a pipeline (`inside_pipeline`) the axes that
        split its stages, and may split nothing else.
      sequence_attention: how attention is computed if "sequence" is split.

    Raises:
      ValueError: a table names an axis that the mesh does not have, or an entry is no
        axis, axes or None.
    """

    mesh_axes: Sequence[str] = ("X", "Y")
    mesh_shape: Sequence[int] = (1, 1)
    weights: Mapping[str, Axes] = dataclasses.field(default_factory=dict)
    activations: Mapping[str, Axes] = dataclasses.field(default_factory=dict)
    device_ids: Sequence[int] | None = None
    pipeline_axes: Sequence[str] | None = None
    unreduced_gradient_axes: Sequence[str] = ()
    sequence_attention: SequenceAttention = SequenceAttention.GATHER

    def __post_init__(self):
        for name in ("mesh_axes", "mesh_shape"):
            if isinstance(getattr(self, name), (str, int)):
                raise ValueError(
                    f"ShardingPlan.{name} is {getattr(self, name)!r}; it must be a "
                    "sequence with an entry for each mesh axis, such as (2, 4)"
                )
        # All at once: both tables are often made for the same other mesh.
        if wrong := [*self._faults("weights"), *self._faults("activations")]:
            raise ValueError("\n".join(wrong))
        if not isinstance(self.sequence_attention, SequenceAttention):
            names = ", ".join(map(str, SequenceAttention))
            raise ValueError(
                f"ShardingPlan.sequence_attention is {self.sequence_attention!r}; it "
                f"must be one of {names}"
            )
        for axis in self.unreduced_gradient_axes:
            if axis not in self.mesh_axes:
                raise ValueError(
                    "sharding plan: unreduced_gradient_axes names mesh axis "
                    f"{axis!r}, but the mesh has {tuple(self.mesh_axes)}"
                )

    def _faults(self, table_name: str) -> Iterator[str]:
        """What is wrong with the entries of a table."""
        for dim, axes in getattr(self, table_name).items():
            try:
                _check_entry(f"ShardingPlan.{table_name}[{dim!r}]", axes)
            except ValueError as error:
                yield str(error)
                continue
            for axis in as_axes(axes):
                if axis not in self.mesh_axes:
                    hint = did_you_mean(axis, self.mesh_axes)
                    yield (
                        f"sharding plan: {table_name}[{dim!r}] names mesh axis "
                        f"{axis!r}, but the mesh has {tuple(self.mesh_axes)}{hint}"
                    )

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh.

        Raises:
          ValueError: the plan's axes and shape do not fit each other.
        """
        axes, shape = tuple(self.mesh_axes), tuple(self.mesh_shape)
        if len(axes) != len(shape):
            raise ValueError(
                f"ShardingPlan.mesh_shape is {shape}; it must be {len(axes)} numbers, "
                f"one for each axis of ShardingPlan.mesh_axes = {axes}"
            )
        ids = None if self.device_ids is None else tuple(self.device_ids)
        if ids is not None and len(ids) != math.prod(shape):
            raise ValueError(
                f"ShardingPlan.device_ids has {len(ids)} devices, but "
                f"ShardingPlan.mesh_shape = {shape} has {math.prod(shape)}: bind "
                "ShardingPlan.device_ids = None, as the order was found for another "
                "mesh, or list as many"
            )
        return DeviceMesh(axes, shape, ids)

    def _repr_html_(self) -> str:
        """For notebooks: by dim the axes that split it in weights and activations."""
        dims = dict.fromkeys([*self.weights, *self.activations])

        def cell(table: Mapping[str, Axes], dim: str) -> str:
            if dim not in table:
                return ""
            return axes_html(as_axes(table[dim]), list(self.mesh_axes))

        rows = [
            [code_html(dim), cell(self.weights, dim), cell(self.activations, dim)]
            for dim in dims
        ]
        table = table_html(["dim", "weights", "activations"], rows)
        return f"<div>ShardingPlan over {self.mesh}{table}</div>"

    def weight_sharding(self, dims: Sequence[str], name: str = "weight") -> Sharding:
        """The sharding of a weight with the logical dims `dims`."""
        return self._sharding(self.weights, dims, name)

    def read_sharding(self, dims: Sequence[str], name: str = "weight") -> Sharding:
        """The sharding of a weight where it is read.

        It is reduced along those of the plan's `unreduced_gradient_axes` that split the
        tokens over which its gradient sums.
        """
        tokens = self._table_names(("batch", "stream"))
        axes = {axis for dim in tokens for axis in as_axes(self.activations.get(dim))}
        partial = [axis for axis in self.unreduced_gradient_axes if axis in axes]
        return _reduced(self.weight_sharding(dims, name), partial)

    def activation_sharding(
        self, dims: Sequence[str], name: str = "activation"
    ) -> Sharding:
        """The sharding of an activation with the logical dims `dims`."""
        return self._sharding(self.activations, self._table_names(dims), name)

    def gathered_sharding(
        self, dims: Sequence[str], name: str = "activation"
    ) -> Sharding:
        """The sharding of an activation that products read.

        It is reduced along the plan's `unreduced_gradient_axes`.
        """
        return _reduced(
            self.activation_sharding(dims, name), self.unreduced_gradient_axes
        )

    def annotate_activation(
        self, tensor: tf.Tensor, dims: Sequence[str], name: str = "activation"
    ) -> tf.Tensor:
        """`tensor`, annotated as the activation table says for `dims`.

        Raises:
          ValueError: it has another rank.
        """
        tensor = tf.convert_to_tensor(tensor)
        if tensor.shape.rank != len(dims):
            raise ValueError(
                f"{name}: split names {len(dims)} of the dims of a tensor of shape "
                f"{tensor.shape}: ({', '.join(map(str, dims))}); name each"
            )
        annotated = annotate(tensor, self.activation_sharding(dims, name))
        return note_dims(annotated, dims)

    def with_split_heads(self) -> ShardingPlan:
        """The plan by which attention computes whole sequences of fewer heads.

        What splits "sequence" splits heads there, after the axes that do so already;
        heads of keys and values as those of queries.
        """
        heads = (
            *as_axes(self.activations.get("heads")),
            *as_axes(self.activations.get("sequence")),
        )
        inside = {"sequence": None, "heads": heads, "kv_heads": heads}
        return dataclasses.replace(self, activations={**self.activations, **inside})

    def inside_pipeline(self, stage_axes: Sequence[str]) -> ShardingPlan:
        """The plan for the layers of a pipeline whose stages `stage_axes` split.

        There the activations' "batch" is "microbatch", if their table has an entry for
        that, and no gradients are unreduced.
        """
        return dataclasses.replace(
            self, pipeline_axes=tuple(stage_axes), unreduced_gradient_axes=()
        )

    def _table_names(self, dims: Sequence[str]) -> list[str]:
        """The names of dims in the activation table."""
        others = {}
        if self.pipeline_axes is not None and "microbatch" in self.activations:
            others["batch"] = "microbatch"
        if "stream" not in self.activations:
            others["stream"] = "sequence"
        return [others.get(dim, dim) for dim in dims]

    def _sharding(self, table: Mapping, dims: Sequence[str], name: str) -> Sharding:
        split = [as_axes(table.get(dim)) for dim in dims]
        for dim, axes in zip(dims, split, strict=True):
            if taken := set(axes) & set(self.pipeline_axes or ()):
                raise ValueError(
                    f"sharding plan for {name!r}: dim {dim!r} is split by mesh axis "
                    f"{', '.join(sorted(taken))}, which has the stages of the pipeline "
                    "around it: split it by another axis; if it is the batch, add "
                    "activations['microbatch'] with the batch's other axes"
                )
        try:
            return Sharding(self.mesh, tuple(split))
        except ValueError as e:
            named = ", ".join(
                f"{d}->{'.'.join(a) or '_'}" for d, a in zip(dims, split, strict=True)
            )
            raise ValueError(f"sharding plan for {name!r} ({named}): {e}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnusedEntry:
    """An entry of a plan's table for a dim that no tensor has; its `str` is a sentence.

    Args:
      table: "weights" or "activations".
      dim: the name of the dim.
      axes: what splits it.
      near: the names of dims that it may be meant for.
      is_misspelt: whether it is like the name of a dim that the table leaves out, or
        T5X's name of one.
    """

    table: str
    dim: str
    axes: Axes
    near: tuple[str, ...]
    is_misspelt: bool

    def __str__(self) -> str:
        hint = f"; do you mean {' or '.join(self.near)}?" if self.near else ""
        does = "splits dim" if as_axes(self.axes) else "has an entry for dim"
        return (
            f"ShardingPlan.{self.table} {does} {self.dim!r}, which no "
            f"{self.table.removesuffix('s')} has{hint}"
        )

    def remedy(self, near: str, tensor: str) -> str:
        """What to write if `near` is meant, a dim of `tensor`, and if it is not."""
        return (
            f"Write {near!r}: {self.axes!r} in place of {self.dim!r}: {self.axes!r}, "
            f"for {tensor!r}. Or keep the entry and add {near!r}: None, by which "
            f"{near} is not split"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotingPlan(ShardingPlan):
    """A plan that notes which names the dims of activations have.

    Args:
      noted: by name of a dim the first tensor that has it; filled while tracing.
    """

    noted: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, plan: ShardingPlan) -> NotingPlan:
        """`plan`, with nothing noted yet."""
        fields = dataclasses.fields(ShardingPlan)
        return cls(**{field.name: getattr(plan, field.name) for field in fields})

    def _sharding(self, table: Mapping, dims: Sequence[str], name: str) -> Sharding:
        if table is self.activations:
            for dim in filter(None, dims):
                self.noted.setdefault(dim, name)
        return super()._sharding(table, dims, name)

    def warnings(self, weights: Mapping[str, Sequence[str]]) -> list[str]:
        """Sentences on entries for dims that nothing has, and on dims like an entry's.

        Args:
          weights: the names of each weight's dims, by its path.

        Raises:
          ValueError: see `check`.
        """
        self.check(weights)
        return [*map(str, self.unused(weights)), *self.misspelt(weights)]

    def check(self, weights: Mapping[str, Sequence[str]]) -> None:
        """Compares the plan with the dims of weights, and with what is noted.

        Args:
          weights: the names of each weight's dims, by its path.

        Raises:
          ValueError: the name of an entry is like that of a dim which has no entry, or
            T5X's name of it.
        """
        unused = self.unused(weights)
        of_weights = {dim: path for path, dims in weights.items() for dim in dims}
        having = {"weights": of_weights, "activations": self.noted}
        wrong = [
            f"{entry} {entry.remedy(near, having[entry.table][near])}"
            for entry in unused
            if entry.is_misspelt
            for near in entry.near
        ]
        if wrong:
            raise ValueError("\n".join(wrong))

    def misspelt(self, weights: Mapping[str, Sequence[str]]) -> list[str]:
        """For each dim that looks like a misspelt name of its table a sentence.

        Args:
          weights: the names of each weight's dims, by its path.
        """
        known = {*self.weights, *self.activations, "stream"}
        tensors: dict[str, str] = {}
        for path, dims in weights.items():
            for dim in dims:
                tensors.setdefault(dim, path)
        wrong = _misspelt(tensors, "weights", self.weights, known)
        known |= tensors.keys() - wrong.keys()
        noted = {d: name for d, name in self.noted.items() if d not in wrong}
        wrong |= _misspelt(noted, "activations", self.activations, known)
        return list(wrong.values())

    def unused(self, weights: Mapping[str, Sequence[str]]) -> list[UnusedEntry]:
        """The entries of both tables that decide nothing, as no tensor has their dim.

        Args:
          weights: the names of each weight's dims, by its path.
        """
        of_weights = {dim for dims in weights.values() for dim in dims}
        return [
            *_unused("weights", self.weights, of_weights),
            *_unused("activations", self.activations, set(self.noted)),
        ]


def _unused(name: str, table: Mapping, dims: Collection[str]) -> list[UnusedEntry]:
    left_out = set(dims) - set(table)
    unused = []
    for dim in sorted(set(table) - set(dims)):
        ours = [_OF_T5X[dim]] if _OF_T5X.get(dim) in dims else []
        meant = [name for name in ours if name in left_out] or _like(dim, left_out)
        near = meant or difflib.get_close_matches(dim, dims, n=1) or sorted(dims)
        if ours and not meant:  # Our name has its entry.
            near = []
        unused.append(
            UnusedEntry(
                table=name,
                dim=dim,
                axes=table[dim],
                near=tuple(near),
                is_misspelt=bool(meant),
            )
        )
    return unused


def _misspelt(
    tensors: Mapping[str, str], name: str, table: Mapping, known: Collection[str]
) -> dict[str, str]:
    """A sentence for each dim of `tensors` that is like a name of the table `name`."""
    lines = {}
    for dim, tensor in tensors.items():
        if not dim or dim in known:
            continue
        if near := _like(dim, table):
            lines[dim] = (
                f"dim {dim!r} of {tensor!r} is in no table of the plan, so that "
                f"nothing splits it; the plan has {near[0]!r}: give both the same "
                f"name, or give ShardingPlan.{name} the entry {dim!r}: None"
            )
    return lines


def _like(name: str, known: Collection[str]) -> list[str]:
    """The name that one is a misspelling of, [] if of none."""
    others = [other for other in known if _differ_by_spelling(name, other)]
    return difflib.get_close_matches(name, others, 1, cutoff=_ALIKE)


def _differ_by_spelling(name: str, other: str) -> bool:
    """Whether what two names do not share is alike.

    It is not of `in_channels` and `out_channels`, `in_channels` and `channels`, or
    `hidden1` and `hidden2`, which are names of different dims.
    """
    words, others = (re.findall(r"\d+|[^\d_]+", text) for text in (name, other))
    own, theirs = (
        "_".join(word for word in of if word not in shared)
        for of, shared in ((words, others), (others, words))
    )
    return difflib.SequenceMatcher(None, own, theirs).ratio() >= _ALIKE


def _reduced(sharding: Sharding, axes: Sequence[str]) -> Sharding:
    """`sharding`, reduced along those of `axes` that do not split it."""
    used = {axis for split in sharding.dims for axis in split}
    reduced = tuple(axis for axis in axes if axis not in used)
    return dataclasses.replace(sharding, reduced=reduced)


def _check_entry(name: str, axes: object) -> None:
    is_many = isinstance(axes, Sequence) and all(isinstance(axis, str) for axis in axes)
    if not (axes is None or isinstance(axes, str) or is_many):
        raise ValueError(
            f"{name} is {axes!r}; it must be a mesh axis, such as 'X', several, such "
            "as ('X', 'Y'), or None"
        )


def as_axes(axes: Axes) -> tuple[str, ...]:
    """An entry of a plan's table as a tuple of axes."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)
