"""XlaSharding annotations, which users put on tensors (GSPMD 3.1)."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.compiler.xla import xla_data_pb2

from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.placeholders import placeholder, traced_mesh
from meshwright.framework.sharding.sharding import Sharding

TYPED = "typed"
"""The placeholder of an annotation with unreduced or reduced axes."""
_NOTED = "_meshwright_shardings"
_UNREDUCED_GRADIENTS = contextvars.ContextVar("unreduced_gradients", default=())
_SIZES_OF = contextvars.ContextVar[DeviceMesh | None]("sizes_of", default=None)
_ONE = DeviceMesh(("one",), (1,))
# Lets a program for more devices detect an annotation for one.
_ONE_DEVICE = xla_data_pb2.OpSharding(
    type=xla_data_pb2.OpSharding.MAXIMAL,
    tile_assignment_dimensions=[1],
    tile_assignment_devices=[0],
)


class OnConflict(enum.Enum):
    """What to do where a sum cannot be unreduced as an annotation says.

    ERROR: the program is not compiled. REDUCE: the sum is reduced there, along the
    axes for which it must be.
    """

    ERROR = "error"
    REDUCE = "reduce"


def annotate(
    tensor: tf.Tensor, sharding: Sharding, *, on_conflict: OnConflict = OnConflict.ERROR
) -> tf.Tensor:
    """The identity of `tensor`, annotated with `sharding`.

    The gradient is annotated by a copy of the same op (GSPMD 3.6, TF's own gradient of
    XlaSharding), so the backward computation is sharded like the forward computation;
    by the sharding's dual if it is unreduced or reduced along an axis.
    Eager execution has no mesh; there the tensor is returned as is.
    """
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank != sharding.rank:
        raise ValueError(
            f"sharding {sharding} is of rank {sharding.rank}, and {describe(tensor)}"
        )
    if sharding.manual:
        raise ValueError(
            f"sharding {sharding} of {describe(tensor)} is manual, which an annotation "
            "cannot make it: use auto_to_manual or manual_partition"
        )
    sharding = sharding.without_trivial_types()
    if sharding.is_typed:
        return record_annotation(
            _typed(tensor, sharding, on_conflict), sharding, on_conflict
        )
    proto = _ONE_DEVICE if sharding.mesh.size == 1 else sharding.to_op_sharding()
    serialized = proto.SerializeToString()
    annotated = annotate_serialized(tensor, serialized, sharding.unspecified)
    return record_annotation(annotated, sharding)


def _typed(tensor: tf.Tensor, sharding: Sharding, on_conflict: OnConflict) -> tf.Tensor:
    """An annotation that XlaSharding cannot express."""
    if tf.executing_eagerly():
        return tensor

    @tf.custom_gradient
    def op(x):
        config = {"sharding": str(sharding), "on_conflict": on_conflict.value}
        y = placeholder(TYPED, sharding.mesh, [x], x.shape, x.dtype, config)
        return y, lambda dy: annotate(dy, sharding.dual(), on_conflict=on_conflict)

    return op(tensor)


@dataclasses.dataclass(frozen=True)
class Annotation:
    """The sharding that a tensor is annotated with, and what to do on a conflict."""

    sharding: Sharding
    on_conflict: OnConflict

    def dual(self) -> Annotation:
        """The annotation of its gradient."""
        return Annotation(self.sharding.dual(), self.on_conflict)


def record_annotation(
    tensor: tf.Tensor, sharding: Sharding, on_conflict: OnConflict = OnConflict.ERROR
) -> tf.Tensor:
    """Records a tensor's annotation for `annotation_of`; returns the tensor."""
    if not tf.executing_eagerly():
        noted = getattr(tensor.graph, _NOTED, {})
        noted[tensor.name] = Annotation(sharding, on_conflict)
        setattr(tensor.graph, _NOTED, noted)
    return tensor


def annotation_of(tensor: tf.Tensor) -> Annotation | None:
    """The annotation of a tensor of a graph, None if it has none itself."""
    if tf.executing_eagerly():
        return None
    return getattr(tensor.graph, _NOTED, {}).get(tensor.name)


@tf.autograph.experimental.do_not_convert
def mesh_split(
    tensor: tf.Tensor,
    device_mesh: DeviceMesh | None,
    dims_mapping: Sequence,
    *,
    unspecified_dims: Sequence[int] = (),
    unreduced: Sequence[str] = (),
    reduced: Sequence[str] = (),
) -> tf.Tensor:
    """Splits `tensor` over mesh axes, and says along which its sum is unreduced.

    Args:
      tensor: any tensor of static rank.
      device_mesh: the mesh; None: that of the program that is traced. Outside of any
        the tensor stays as it is, in a function that no program may call later.
      dims_mapping: for each tensor dim the mesh axis that splits it, by index or name;
        -1 or None for none; a sequence of axes for a dim split by several. A dim that
        its axes do not divide is padded inside the program.
      unspecified_dims: numbers of the dims that propagation decides (GSPMD 3.5); it may
        split further those that the mapping splits.
      unreduced: mesh axes along which `tensor`, a sum over a dim that they split, is
        not added up yet; `reshard` does that. Its gradient is reduced.
      reduced: mesh axes along which `tensor` is replicated, and its gradient unreduced:
        to be reduced where the program says so.

    Returns:
      `tensor`, annotated; so is its gradient. In eager execution just `tensor`.

    Within `unreduced_gradients` a tensor of floats without either is reduced along the
    axes given there that do not split it.

    Raises:
      ValueError: the mapping's length is not the rank, an axis is unknown or used
        twice; or, in a Keras model, its mesh has the axis in another size.
    """
    tensor = tf.convert_to_tensor(tensor)
    if device_mesh is None:
        device_mesh = traced_mesh()
        if device_mesh is None:
            # Of what names axes only the number of dims is known to be right.
            checked_sharding("mesh_split", tensor, _ONE, [None] * len(dims_mapping))
            return annotate_serialized(tensor, _ONE_DEVICE.SerializeToString())
    sharding = checked_sharding(
        "mesh_split",
        tensor,
        device_mesh,
        dims_mapping,
        unspecified_dims=unspecified_dims,
        unreduced=unreduced,
        reduced=reduced,
    )
    _check_sizes(tensor, device_mesh)
    is_open = sharding.is_typed or sharding.unspecified or not tensor.dtype.is_floating
    axes = () if is_open else _not_splitting(sharding, _UNREDUCED_GRADIENTS.get())
    if not axes:
        return annotate(tensor, sharding)
    sharding = dataclasses.replace(sharding, reduced=axes)
    return annotate(tensor, sharding, on_conflict=OnConflict.REDUCE)


@contextlib.contextmanager
def sizes_of(mesh: DeviceMesh) -> Iterator[None]:
    """Within it `mesh_split` refuses an axis that `mesh` has in another size.

    Other meshes of the same devices are allowed, but whoever writes an axis of the same
    name means that one.
    """
    token = _SIZES_OF.set(mesh)
    try:
        yield
    finally:
        _SIZES_OF.reset(token)


def _check_sizes(tensor: tf.Tensor, mesh: DeviceMesh) -> None:
    own = _SIZES_OF.get()
    for axis in mesh.axis_names if own is not None else ():
        if axis in own.axis_names and own.axis_size(axis) != mesh.axis_size(axis):
            raise ValueError(
                f"mesh_split: {describe(tensor)}, and the mesh of this annotation is "
                f"({mesh}), but the model is on ({own}): pass None in its place, "
                "which is the model's mesh, or distribute the model on that one"
            )


def _not_splitting(sharding: Sharding, axes: Sequence[str]) -> tuple[str, ...]:
    """Those of the axes that are the mesh's, and split no dim."""
    mesh = sharding.mesh
    used = {mesh.part(axis).axis for split in sharding.dims for axis in split}
    return tuple(a for a in mesh.axis_names if a in axes and a not in used)


@contextlib.contextmanager
def unreduced_gradients(*axes: str) -> Iterator[None]:
    """Within it `mesh_split` replicates forwards, and leaves gradients partial.

    What it says is replicated along `axes` is reduced along them, so the gradient is
    unreduced: it is added up where `reshard` or another annotation says how it is
    split, by a reduce-scatter where that splits a dim, and at once where an op that
    reads it is not linear in it. ("Replicate forwards, partial backwards".)

    Args:
      *axes: names of mesh axes; those that a mesh does not have are ignored.

    Raises:
      TypeError: an axis is no name.
    """
    for axis in axes:
        if not isinstance(axis, str):
            raise TypeError(
                "unreduced_gradients takes names of mesh axes, such as 'data'; this "
                f"is {axis!r}"
            )
    token = _UNREDUCED_GRADIENTS.set((*_UNREDUCED_GRADIENTS.get(), *axes))
    try:
        yield
    finally:
        _UNREDUCED_GRADIENTS.reset(token)


def checked_sharding(
    caller: str,
    tensor: tf.Tensor,
    device_mesh: DeviceMesh,
    dims_mapping: Sequence,
    **more: Sequence,
) -> Sharding:
    """The sharding that a user requests; see `Sharding.from_dims_mapping`.

    Raises:
      TypeError: the mesh is none.
      ValueError: it does not fit the tensor, which the message names.
    """
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(
            f"{caller}: the second argument is the mesh, the third the dims, as in "
            f'{caller}(x, mesh, ["X", None]); this mesh is {device_mesh!r}'
        )
    rank = tensor.shape.rank
    try:
        return Sharding.from_dims_mapping(device_mesh, dims_mapping, rank, **more)
    except ValueError as e:
        raise ValueError(f"{caller}: {describe(tensor)}: {e}") from None


def describe(tensor: tf.Tensor) -> str:
    """A tensor's name and shape, for messages; in a program the layer is named too."""
    if tf.executing_eagerly():
        return f"tensor has shape {tensor.shape}"
    scope, name = tf.get_current_name_scope(), repr(tensor.name)
    if not tensor.name.startswith(
        scope
    ):  # It comes from another layer, or is an input.
        name += f", used in {scope!r},"
    return f"tensor {name} has shape {tensor.shape}"


@tf.autograph.experimental.do_not_convert
def split(tensor: tf.Tensor, split_dimension: int, num_partitions: int) -> tf.Tensor:
    """Splits one dim of `tensor` over devices 0, 1, 2, ... (GShard 3.2).

    Args:
      tensor: any tensor of static rank.
      split_dimension: number of the dim.
      num_partitions: the number of shards, that of the program's devices; over fewer
        use `mesh_split`.

    Raises:
      ValueError: no such dim. Any other number of partitions is refused when the
        program is compiled.
    """
    tensor = tf.convert_to_tensor(tensor)
    rank = tensor.shape.rank
    if not -rank <= split_dimension < rank:
        raise ValueError(
            f"split: {describe(tensor)}, which has no dim {split_dimension}"
        )
    assignment = np.arange(num_partitions).reshape(
        [num_partitions if d == split_dimension % rank else 1 for d in range(rank)]
    )
    return shard(tensor, assignment)


@tf.autograph.experimental.do_not_convert
def shard(tensor: tf.Tensor, device_assignment: np.ndarray) -> tf.Tensor:
    """Gives each device the shard at its index in `device_assignment` (GShard 3.2).

    Args:
      tensor: any tensor of static rank.
      device_assignment: int array of the tensor's rank: ids of all devices of the
        program, each once; its shape is the number of shards along each dim.

    Raises:
      ValueError: another rank, or ids that are not distinct. Devices other than the
        program's are refused when it is compiled.
    """
    tensor = tf.convert_to_tensor(tensor)
    ids = np.asarray(device_assignment)
    if ids.ndim != tensor.shape.rank or len(set(ids.flat)) != ids.size:
        raise ValueError(
            f"shard: {describe(tensor)}, device_assignment {ids.shape} with "
            f"{len(set(ids.flat))} distinct ids: it needs the tensor's rank, and each "
            "device once"
        )
    proto = xla_data_pb2.OpSharding(
        type=xla_data_pb2.OpSharding.OTHER,
        tile_assignment_dimensions=ids.shape,
        tile_assignment_devices=[int(i) for i in ids.flat],
    )
    return annotate_serialized(tensor, proto.SerializeToString())


@tf.autograph.experimental.do_not_convert
def replicate(tensor: tf.Tensor) -> tf.Tensor:
    """Every device holds all of `tensor` (GShard 3.2), and all of its gradient."""
    proto = xla_data_pb2.OpSharding(type=xla_data_pb2.OpSharding.REPLICATED)
    return annotate_serialized(tf.convert_to_tensor(tensor), proto.SerializeToString())


def stacked(op_sharding: bytes) -> bytes:
    """The serialized OpSharding of a stack of such tensors, its new dim unsharded."""
    proto = xla_data_pb2.OpSharding.FromString(op_sharding)
    if proto.type == xla_data_pb2.OpSharding.OTHER:
        proto.tile_assignment_dimensions.insert(0, 1)
    return proto.SerializeToString()


def annotate_serialized(
    tensor: tf.Tensor, op_sharding: bytes, unspecified_dims: Sequence[int] = ()
) -> tf.Tensor:
    """`tensor`, annotated with a serialized OpSharding, unchecked."""
    if tf.executing_eagerly():
        return tensor
    return gen_xla_ops.xla_sharding(
        input=tensor, sharding=op_sharding, unspecified_dims=list(unspecified_dims)
    )
