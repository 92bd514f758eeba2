"""A program's arguments on their way from the host to the devices of its mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tensorflow as tf
from tensorflow.python.util import nest

from meshwright.framework.compiler.boundary.conversion import converted
from meshwright.framework.compiler.boundary.wide_elements import (
    is_wide,
    put,
    wide_elements,
)
from meshwright.framework.sharding.stored_form import StoredForm

_CUT = (
    "JAX's own functions cut 64-bit elements to 32 unless they are called within "
    "jax.enable_x64(True): pass a host array, or a program's result as it is"
)


def check_structure(name: str, what: str, want: Any, given: Any) -> None:
    """Checks that a nest has the structure that a program was compiled for.

    Raises:
      ValueError: it does not; `name` is the program's, `what` the nest's.
    """
    try:
        tf.nest.assert_same_structure(want, given)
    except (TypeError, ValueError):
        wanted, got = (
            [path for path, _ in nest.flatten_with_joined_string_paths(structure)]
            for structure in (want, given)
        )
        missing = [path for path in wanted if path not in got]
        unknown = [path for path in got if path not in wanted]
        if isinstance(want, tuple) and len(want) != len(given):
            difference = f"{len(given)} of them, compiled for {len(want)}"
        elif missing or unknown:
            difference = f"missing {missing[:3]}, unknown {unknown[:3]}"
        else:
            difference = f"of type {type(given)}, compiled for {type(want)}"
        raise ValueError(
            f"{name}: {what} have another structure than it was compiled for: "
            f"{difference}"
        ) from None


class Arguments:
    """The arguments of a compiled program, and their way to its devices.

    Args:
      name: the program's, for messages.
      inputs: a tuple of nests of `tf.TensorSpec`, in stored form.
      forms: for each leaf its stored form; None: left to completion.
      shardings: for each leaf, over the program's devices.
      can_run: whether these devices are here, not a topology's.
      donated: numbers of the leaves whose buffers the results may take over.
    """

    def __init__(
        self,
        name: str,
        inputs: Any,
        *,
        forms: Sequence[StoredForm | None],
        shardings: Sequence[jax.sharding.Sharding],
        can_run: bool,
        donated: Sequence[int] = (),
    ):
        self._name = name
        self._inputs = inputs
        self._specs: list[tf.TensorSpec] = tf.nest.flatten(inputs)
        self._wide = {i for i, s in enumerate(self._specs) if is_wide(s.dtype)}
        self.forms = forms
        self.shardings = shardings
        self._can_run = can_run
        self._donated = frozenset(donated)

    def take(self, args: tuple[Any, ...]) -> list[jax.Array]:
        """The leaves of a call's arguments as device arrays; see `Program.__call__`."""
        check_structure(self._name, "its arguments", self._inputs, args)
        given = tf.nest.flatten(args)
        flat = [self._take(i, leaf) for i, leaf in enumerate(given)]
        if self._donated:
            self._check_donated_once(given)
        return flat

    def _check_donated_once(self, given: Sequence[Any]) -> None:
        """Refuses a donated buffer that is an argument twice: PJRT ends the process.

        Device arrays may share a buffer, as those of `jax.device_put` do; buffers of
        host arrays are not taken over. The pointers of 200 leaves take 0.2 ms.
        """
        first: dict[int, int] = {}
        for index, leaf in enumerate(given):
            if not isinstance(leaf, jax.Array) or not leaf.size:
                continue
            pointer = leaf.addressable_data(0).unsafe_buffer_pointer()
            earlier = first.setdefault(pointer, index)
            if earlier != index and self._donated & {earlier, index}:
                donated = earlier if earlier in self._donated else index
                raise ValueError(
                    f"{self._named(index)} has the buffer of {self._leaf(earlier)} "
                    f"too, and {self._leaf(donated)} is donated: pass a copy, such as "
                    "array.copy(), or do not donate it"
                )

    def check_shardings(self, flat: Sequence[jax.Array]) -> None:
        """Names the leaf that JAX refused, as JAX calls all leaves `flat`.

        Raises:
          ValueError: a device array has another sharding than the program takes.
        """
        for index, (leaf, sharding) in enumerate(
            zip(flat, self.shardings, strict=True)
        ):
            alike = leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            if alike or not leaf.committed:
                continue
            raise ValueError(
                f"{self._named(index)} is a device array with the sharding "
                f"{leaf.sharding}; the program takes {sharding}: pass jax.device_put("
                f"array, program.arguments.shardings[{index}]), or the host array"
            ) from None

    def shard(self, *args: Any) -> Any:
        """See `Program.shard`."""
        first = self._inputs[: len(args)]
        check_structure(self._name, "its arguments", first, args)
        leaves = [self.put(i, x) for i, x in enumerate(tf.nest.flatten(args))]
        placed = tf.nest.pack_sequence_as(args, leaves)
        return placed[0] if len(args) == 1 else placed

    def local_rows(self, argument: int, *, dim: int) -> range:
        """The rows of an argument that the devices of this process take.

        Args:
          argument: its number.
          dim: of the logical tensors; all leaves of the argument have the same size.
        """
        starts, stops = [], []
        for index in self._leaves_of(argument):
            shape = tuple(self._specs[index].shape)
            rows = self._logical_shape(index)[dim]
            sharding = self.shardings[index]
            for part in sharding.addressable_devices_indices_map(shape).values():
                start, stop, _ = part[dim].indices(shape[dim])
                # A device that has only padding reads a row all the same.
                starts.append(min(start, rows - 1))
                stops.append(max(min(stop, rows), starts[-1] + 1))
        return range(min(starts), max(stops))

    def shard_rows(self, argument: int, value: Any, rows: range, *, dim: int) -> Any:
        """Puts an argument onto the mesh, of which this process has some rows.

        All processes call it, each with its own rows.

        Args:
          argument: its number.
          value: nest of host arrays, of logical shape except in `dim`.
          rows: the rows in them; `local_rows` are among them.
          dim: of the logical tensors.

        Returns:
          The nest of device arrays, as the program takes them.

        Raises:
          ValueError: the nest is not the program's argument, in structure and shape.
        """
        check_structure(self._name, "its argument", self._inputs[argument], value)
        pairs = zip(self._leaves_of(argument), tf.nest.flatten(value), strict=True)
        leaves = [self._put_rows(index, leaf, rows, dim) for index, leaf in pairs]
        return tf.nest.pack_sequence_as(value, leaves)

    def _take(self, index: int, leaf: Any) -> jax.Array:
        if not isinstance(leaf, jax.Array):
            return self.put(index, leaf)
        if leaf.is_deleted():  # A run with it would end the process.
            raise ValueError(
                f"{self._named(index)} was donated to an earlier call, which took "
                "over its buffer: pass that call's result"
            )
        spec = self._specs[index]
        if leaf.shape != tuple(spec.shape) or leaf.dtype != spec.dtype.as_numpy_dtype:
            raise ValueError(
                f"{self._named(index)} is a device array {leaf.dtype}{leaf.shape}, "
                f"the program takes {spec.dtype.name}{tuple(spec.shape)} in stored "
                "form; host arrays have the logical shape"
                f"{f'. {_CUT}' if index in self._wide else ''}"
            )
        # A run with elements that JAX cut and still calls wide would end it too.
        if index in self._wide and leaf.addressable_data(0).dtype != leaf.dtype:
            raise ValueError(
                f"{self._named(index)} is called {leaf.dtype}, but its elements are "
                f"{leaf.addressable_data(0).dtype}. {_CUT}"
            )
        return leaf

    def put(self, index: int, value: Any) -> jax.Array:
        """Puts the host array of a leaf onto the mesh, as the program takes it."""
        form, shape = self.forms[index], self._logical_shape(index)
        if value is None:
            raise ValueError(f"{self._named(index)} is None; pass an array")
        given = np.asarray(value)
        if given.shape != shape:
            raise ValueError(
                f"{self._named(index)} has shape {given.shape}, the program was "
                f"compiled for {shape}"
            )
        value = self._converted(index, given)
        if form is not None:
            value = form.pad(value)
        # On CPUs JAX uses an aligned host array's memory as the device's, even if told
        # not to alias: the program would compute with what the caller writes there
        # before it has run.
        if np.may_share_memory(value, given):
            value = value.copy()
        sharding = self.shardings[index]
        if sharding.is_fully_addressable:
            return put(value, sharding)
        # All processes have the full array: device_put would compare their values.
        with wide_elements():
            return jax.make_array_from_callback(
                value.shape, sharding, lambda part: value[part]
            )

    def _put_rows(self, index: int, value: Any, rows: range, dim: int) -> jax.Array:
        logical, value = self._logical_shape(index), np.asarray(value)
        if rows == range(logical[dim]):
            return self.put(index, value)
        here = (*logical[:dim], len(rows), *logical[dim + 1 :])
        if value.shape != here:
            raise ValueError(
                f"{self._named(index)} has shape {value.shape}, must have {here}: "
                f"rows {rows.start} to {rows.stop - 1} of dim {dim}"
            )
        value, stored = self._converted(index, value), self._specs[index].shape

        def part(slices: tuple[slice, ...]) -> np.ndarray:
            """The shard of a device, with zeros where there is padding."""
            cut, padding = [], []
            for d, slice_ in enumerate(slices):
                start, stop, _ = slice_.indices(stored[d])
                end = max(start, min(stop, logical[d]))
                first = rows.start if d == dim else 0
                cut.append(slice(start - first, end - first))
                padding.append((0, stop - end))
            return np.pad(value[tuple(cut)], padding)

        sharding = self.shardings[index]
        with wide_elements():
            return jax.make_array_from_callback(tuple(stored), sharding, part)

    def _converted(self, index: int, value: np.ndarray) -> np.ndarray:
        """`value` in the program's dtype, if this can hold it."""
        if not self._can_run:
            raise ValueError(
                f"{self._name} was compiled for a topology, whose devices are "
                "not here: look at it, or compile it without devices= to run it"
            )
        try:
            return converted(value, self._specs[index].dtype)
        except ValueError as error:
            raise ValueError(f"{self._named(index)} {error}") from None

    def _named(self, index: int) -> str:
        return f"{self._name}: {self._leaf(index)}"

    def _leaf(self, index: int) -> str:
        paths = nest.flatten_with_joined_string_paths(self._inputs)
        return f"argument {paths[index][0]}"

    def _leaves_of(self, argument: int) -> range:
        """The numbers of an argument's leaves among all leaves."""
        counts = [len(tf.nest.flatten(argument)) for argument in self._inputs]
        first = sum(counts[:argument])
        return range(first, first + counts[argument])

    def _logical_shape(self, index: int) -> tuple[int, ...]:
        form = self.forms[index]
        return tuple(self._specs[index].shape) if form is None else form.shape
