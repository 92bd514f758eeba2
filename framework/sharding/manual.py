"""Manual regions: a part of a program written for one device's shards (GSPMD 3.4)."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.util import nest

from meshwright.framework.sharding.annotations import describe
from meshwright.framework.sharding.collectives import all_reduce, full_axes
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.placeholders import placeholder
from meshwright.framework.sharding.sharding import Sharding

_IN_PARTITION = contextvars.ContextVar("in_partition", default=False)


@tf.autograph.experimental.do_not_convert
def auto_to_manual(
    tensor: tf.Tensor,
    mesh: DeviceMesh,
    dims_mapping: Sequence,
    *,
    manual_axes: Sequence[str] | None = None,
) -> tf.Tensor:
    """Each device's own shard of `tensor` (GShard 3.2).

    Args:
      tensor: a tensor of the program, split by the compiler.
      mesh: the program's mesh.
      dims_mapping: for each dim the manual axes that split it; see `mesh_split`. The
        tensor is replicated along manual axes that it does not name.
      manual_axes: the axes that become manual, all by default. Along the others the
        compiler goes on splitting: manual subgroups.

    Returns:
      A tensor of the shard's shape, to be used only with tensors of the same manual
      axes.

    Raises:
      ValueError: a dim that its axes do not divide, an axis that is not manual, an
        unknown axis, a mapping of the wrong length, or eager execution.
    """
    tensor = tf.convert_to_tensor(tensor)
    axes = _manual(mesh, manual_axes)
    sharding = _sharding(tensor, mesh, dims_mapping, axes)
    shape = tuple(tensor.shape)
    if sharding.padded_shape(shape) != shape:
        dim = [a != b for a, b in zip(sharding.padded_shape(shape), shape, strict=True)]
        raise ValueError(
            f"auto_to_manual: {describe(tensor)}, whose dim {dim.index(True)} does not "
            f"divide by {sharding} over the mesh ({mesh}); pad it first"
        )
    if mesh.axes_size(axes) == 1:
        return tensor

    @tf.custom_gradient
    def op(x):
        config = {"axes": axes, "dims": [list(d) for d in sharding.dims]}
        local = sharding.shard_shape(shape)
        y = placeholder("auto_to_manual", mesh, [x], local, x.dtype, config)

        def grad(dy):
            # Devices that got the same shard each add to its gradient.
            total = all_reduce(dy, mesh, _unnamed(sharding, axes))
            return manual_to_auto(total, mesh, sharding.dims, manual_axes=axes)

        return y, grad

    return op(tensor)


@tf.autograph.experimental.do_not_convert
def manual_to_auto(
    tensor: tf.Tensor,
    mesh: DeviceMesh,
    dims_mapping: Sequence,
    *,
    manual_axes: Sequence[str] | None = None,
) -> tf.Tensor:
    """The tensor of which each device holds the shard `tensor`; reverses the above.

    Args:
      tensor: a device's shard, from a manual region.
      mesh: the program's mesh.
      dims_mapping: for each dim the manual axes that split it. Along manual axes that
        it does not name devices must hold the same, which is not checked.
      manual_axes: the region's manual axes, all by default.

    Returns:
      A tensor of the program, whose split dims are that much longer.

    Raises:
      ValueError: as `auto_to_manual`.
    """
    tensor = tf.convert_to_tensor(tensor)
    axes = _manual(mesh, manual_axes)
    sharding = _sharding(tensor, mesh, dims_mapping, axes)
    if mesh.axes_size(axes) == 1:
        return tensor

    @tf.custom_gradient
    def op(x):
        config = {"axes": axes, "dims": [list(d) for d in sharding.dims]}
        pairs = zip(x.shape, sharding.splits(), strict=True)
        y = placeholder(
            "manual_to_auto", mesh, [x], [s * n for s, n in pairs], x.dtype, config
        )

        def grad(dy):
            local = auto_to_manual(dy, mesh, sharding.dims, manual_axes=axes)
            # Devices that hold the same shard share its gradient evenly.
            count = mesh.axes_size(_unnamed(sharding, axes))
            return local / tf.cast(count, local.dtype)

        return y, grad

    return op(tensor)


@tf.autograph.experimental.do_not_convert
def manual_partition(
    fn: Callable[..., Any],
    *,
    mesh: DeviceMesh,
    in_dims: Sequence,
    out_dims: Any,
    manual_axes: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """A function of global tensors whose body `fn` sees a device's shards of them.

    Args:
      fn: the body: a TF function of shards, free to call `all_reduce`, `all_gather`,
        `reduce_scatter`, `all_to_all`, `collective_permute` and `axis_index`. Besides
        its arguments it may only use constants.
      mesh: the program's mesh.
      in_dims: for each argument the dims_mapping of its tensor, or a nest of the
        argument's structure with a mapping for each; see `auto_to_manual`.
      out_dims: the same for the result; see `manual_to_auto`.
      manual_axes: the axes that the body handles, all by default; along the others the
        compiler goes on splitting, and the body may annotate with them.

    Raises:
      ValueError: when called: structures that do not agree, or as `auto_to_manual`.
    """
    name = getattr(fn, "__name__", "manual").strip("<>_") or "manual"

    def over(convert, structure, dims):
        try:
            mappings = nest.flatten_up_to(structure, dims, check_types=False)
        except (TypeError, ValueError) as e:
            raise ValueError(
                f"manual_partition of {name}: dims {dims} do not have a dims_mapping "
                f"for each tensor: {e}"
            ) from None
        converted = [
            convert(leaf, mesh, mapping, manual_axes=manual_axes)
            for leaf, mapping in zip(nest.flatten(structure), mappings, strict=True)
        ]
        return nest.pack_sequence_as(structure, converted)

    @functools.wraps(fn)
    def partitioned(*args):
        with tf.name_scope(name):
            shards = over(auto_to_manual, args, tuple(in_dims))
            with _noted(mesh.axes_size(_manual(mesh, manual_axes)) > 1):
                out = fn(*shards)
            return over(manual_to_auto, out, out_dims)

    return partitioned


def in_manual_partition() -> bool:
    """Whether the body of a `manual_partition` over several devices is traced."""
    return _IN_PARTITION.get()


@contextlib.contextmanager
def _noted(is_region: bool) -> Iterator[None]:
    token = _IN_PARTITION.set(is_region or _IN_PARTITION.get())
    try:
        yield
    finally:
        _IN_PARTITION.reset(token)


def _manual(mesh: DeviceMesh, manual_axes: Sequence[str] | None) -> list[str]:
    if isinstance(manual_axes, str):
        raise ValueError(f"manual_axes={manual_axes!r} must be a sequence of axes")
    axes = list(mesh.axis_names if manual_axes is None else manual_axes)
    return full_axes(mesh, axes)


def _sharding(
    tensor: tf.Tensor, mesh: DeviceMesh, dims_mapping: Sequence, manual: Sequence[str]
) -> Sharding:
    if not tensor.shape.is_fully_defined():
        raise ValueError(f"manual region: {describe(tensor)}, which must be static")
    try:
        sharding = Sharding.from_dims_mapping(
            mesh, dims_mapping, rank=tensor.shape.rank
        )
    except ValueError as e:
        raise ValueError(f"manual region: {describe(tensor)}: {e}") from None
    named = [axis for axes in sharding.dims for axis in axes]
    for axis in full_axes(mesh, named):
        if axis not in manual:
            raise ValueError(
                f"dims_mapping {list(dims_mapping)} names mesh axis {axis!r}, which is "
                f"not among the manual axes {tuple(manual)}; leave it out here and "
                "annotate with it in the body"
            )
    return sharding


def _unnamed(sharding: Sharding, manual_axes: Sequence[str]) -> list[str]:
    """The manual axes along which every device holds the same."""
    named = [axis for axes in sharding.dims for axis in axes]
    return [axis for axis in manual_axes if axis not in named]
