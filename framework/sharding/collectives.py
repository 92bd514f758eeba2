"""Collectives for the body of a manual region, with their gradients (GSPMD 3.4).

Each device calls them with its own tensor. Gradients are those of all devices' bodies
taken together as a single function: the gradient of what a device receives is sent back
to the device that sent it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import tensorflow as tf

from meshwright.framework.sharding.annotations import describe
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.placeholders import placeholder

Axes = str | Sequence[str]


class Reduction(enum.Enum):
    """How `all_reduce` combines the tensors of several devices."""

    SUM = "add"
    MAX = "maximum"
    MIN = "minimum"


@tf.autograph.experimental.do_not_convert
def all_reduce(
    tensor: tf.Tensor,
    mesh: DeviceMesh,
    axes: Axes,
    *,
    reduction: Reduction = Reduction.SUM,
) -> tf.Tensor:
    """The sum, maximum or minimum over the devices along `axes`, on each of them.

    Args:
      tensor: numbers of any shape.
      mesh: the program's mesh.
      axes: one or several manual axes.
      reduction: where several devices hold the maximum or minimum, they share its
        gradient evenly.

    Raises:
      ValueError: an unknown axis, or eager execution.
    """
    axes, count = _axes(mesh, axes)
    tensor = tf.convert_to_tensor(tensor)
    if count == 1:
        return tensor

    @tf.custom_gradient
    def op(x):
        config = {"axes": axes, "reduction": reduction.value}
        y = placeholder("all_reduce", mesh, [x], x.shape, x.dtype, config)

        def grad(dy):
            total = all_reduce(dy, mesh, axes)
            if reduction is Reduction.SUM:
                return total
            holds = tf.cast(tf.equal(x, y), x.dtype)
            return total * holds / all_reduce(holds, mesh, axes)

        return y, grad

    return op(tensor)


@tf.autograph.experimental.do_not_convert
def all_gather(
    tensor: tf.Tensor, mesh: DeviceMesh, axes: Axes, *, dim: int = 0
) -> tf.Tensor:
    """The tensors of the devices along `axes`, concatenated along `dim`.

    Args:
      tensor: rank 1 or more.
      mesh: the program's mesh.
      axes: one or several manual axes, major first.
      dim: tensor dim, which becomes as many times longer as there are devices.

    Raises:
      ValueError: an unknown axis or dim, or eager execution.
    """
    return _along_dim("all_gather", reduce_scatter, tensor, mesh, axes, dim)


@tf.autograph.experimental.do_not_convert
def reduce_scatter(
    tensor: tf.Tensor, mesh: DeviceMesh, axes: Axes, *, dim: int = 0
) -> tf.Tensor:
    """The sum over the devices along `axes`, of which each keeps its slice of `dim`.

    Args:
      tensor: rank 1 or more; the devices must divide `dim`.
      mesh: the program's mesh.
      axes: one or several manual axes, major first.
      dim: tensor dim that is scattered.

    Raises:
      ValueError: an unknown axis or dim, a dim that is not divided, eager execution.
    """
    return _along_dim("reduce_scatter", all_gather, tensor, mesh, axes, dim)


def _along_dim(
    kind: str, back: Callable, tensor: tf.Tensor, mesh: DeviceMesh, axes: Axes, dim: int
) -> tf.Tensor:
    """An all-gather or reduce-scatter, each of which is the other's gradient."""
    axes, count = _axes(mesh, axes)
    times, over = (count, 1) if kind == "all_gather" else (1, count)
    tensor = tf.convert_to_tensor(tensor)
    dim = _dim(tensor, dim, kind, over)
    if count == 1:
        return tensor

    @tf.custom_gradient
    def op(x):
        shape = _scaled(x.shape, {dim: (times, over)})
        y = placeholder(kind, mesh, [x], shape, x.dtype, {"axes": axes, "dim": dim})
        return y, lambda dy: back(dy, mesh, axes, dim=dim)

    return op(tensor)


@tf.autograph.experimental.do_not_convert
def all_to_all(
    tensor: tf.Tensor, mesh: DeviceMesh, axes: Axes, *, split_dim: int, concat_dim: int
) -> tf.Tensor:
    """Splits `split_dim` among the devices along `axes`, and joins along `concat_dim`.

    Args:
      tensor: rank 1 or more; the devices must divide `split_dim`.
      mesh: the program's mesh.
      axes: one or several manual axes, major first.
      split_dim: tensor dim that gets shorter.
      concat_dim: tensor dim that gets longer.

    Raises:
      ValueError: an unknown axis or dim, a dim that is not divided, eager execution.
    """
    axes, count = _axes(mesh, axes)
    tensor = tf.convert_to_tensor(tensor)
    split = _dim(tensor, split_dim, "all_to_all", count)
    concat = _dim(tensor, concat_dim, "all_to_all")
    if count == 1:
        return tensor

    @tf.custom_gradient
    def op(x):
        scales = {} if split == concat else {split: (1, count), concat: (count, 1)}
        shape = _scaled(x.shape, scales)
        config = {"axes": axes, "split_dim": split, "concat_dim": concat}
        y = placeholder("all_to_all", mesh, [x], shape, x.dtype, config)
        return y, lambda dy: all_to_all(
            dy, mesh, axes, split_dim=concat, concat_dim=split
        )

    return op(tensor)


@tf.autograph.experimental.do_not_convert
def collective_permute(
    tensor: tf.Tensor, mesh: DeviceMesh, axes: Axes, pairs: Sequence[tuple[int, int]]
) -> tf.Tensor:
    """Sends each device's tensor along `axes`; a device that receives none has zeros.

    Args:
      tensor: numbers of any shape.
      mesh: the program's mesh.
      axes: one or several manual axes, major first.
      pairs: (source, target), indices along `axes` from 0.

    Raises:
      ValueError: an unknown axis, an index that does not exist, or is source or target
        twice, or eager execution.
    """
    axes, count = _axes(mesh, axes)
    tensor = tf.convert_to_tensor(tensor)
    pairs = [(int(source), int(target)) for source, target in pairs]
    for role, number in (("source", 0), ("target", 1)):
        places = [pair[number] for pair in pairs]
        wrong = [p for p in places if not 0 <= p < count or places.count(p) > 1]
        if wrong:
            raise ValueError(
                f"collective_permute pairs {pairs}: {role} {wrong[0]} must be a place "
                f"along {axes}, 0..{count - 1}, and {role} once"
            )

    if count == 1:
        return tensor if pairs else tf.zeros_like(tensor)

    @tf.custom_gradient
    def op(x):
        config = {"axes": axes, "pairs": pairs}
        y = placeholder("collective_permute", mesh, [x], x.shape, x.dtype, config)
        back = [(target, source) for source, target in pairs]
        return y, lambda dy: collective_permute(dy, mesh, axes, back)

    return op(tensor)


@tf.autograph.experimental.do_not_convert
def axis_index(mesh: DeviceMesh, axes: Axes) -> tf.Tensor:
    """The device's index along `axes`: int32 scalar, from 0.

    Raises:
      ValueError: an unknown axis, or eager execution.
    """
    axes, count = _axes(mesh, axes)
    if count == 1:
        return tf.constant(0)
    return placeholder("axis_index", mesh, [], [], tf.int32, {"axes": axes})


def _axes(mesh: DeviceMesh, axes: Axes) -> tuple[list[str], int]:
    axes = [axes] if isinstance(axes, str) else list(axes)
    return axes, mesh.axes_size(full_axes(mesh, axes))


def full_axes(mesh: DeviceMesh, axes: Sequence[str]) -> Sequence[str]:
    """`axes`, none of which may be a sub-axis or be repeated.

    Raises:
      ValueError: an axis is a sub-axis, is repeated, or is unknown.
    """
    for axis in axes:
        if mesh.part(axis).axis != axis or list(axes).count(axis) > 1:
            raise ValueError(
                "manual regions and collectives are along full mesh axes, each once, "
                f"not {axis!r} of {list(axes)}: give the mesh a further axis for a part"
            )
    return axes


def _dim(tensor: tf.Tensor, dim: int, what: str, count: int = 1) -> int:
    rank = tensor.shape.rank
    if not -rank <= dim < rank:
        raise ValueError(f"{what}: {describe(tensor)}, which has no dim {dim}")
    if tensor.shape[dim] % count:
        raise ValueError(
            f"{what}: {describe(tensor)}, whose dim {dim} does not divide among "
            f"{count} devices; pad it first"
        )
    return dim % rank


def _scaled(shape: tf.TensorShape, scales: dict[int, tuple[int, int]]) -> list[int]:
    """`shape` with dims multiplied and divided."""
    sizes = shape.as_list()
    for dim, (times, over) in scales.items():
        sizes[dim] = sizes[dim] * times // over
    return sizes
