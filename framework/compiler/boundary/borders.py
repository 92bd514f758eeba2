"""The stored forms of a program's arguments and results, between programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.util import nest

from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.stored_form import StoredForm


def check_kinds(name: str, args: Iterable[Any], mesh: DeviceMesh) -> None:
    """Checks that `args` is a list of arguments, and `mesh` a device mesh.

    Raises:
      TypeError: one of them is not.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{name}: the mesh is {mesh!r}, of type {type(mesh).__name__}; pass a "
            'DeviceMesh, such as DeviceMesh(("X", "Y"), (2, 4))'
        )
    single = isinstance(args, (str, Mapping)) or hasattr(args, "dtype")
    if single or not isinstance(args, Iterable):
        raise TypeError(
            f"{name}: args is of type {type(args).__name__}; pass a list with a nest "
            "of tf.TensorSpec for each argument"
        )


def no_program(asker: str, given: Any) -> TypeError:
    """The error of a function that was given something else than a program.

    Args:
      asker: the function's name.
      given: what it was given; of a Keras model the error says how to get its program.
    """
    keras = sys.modules.get("keras")
    is_model = keras is not None and isinstance(given, keras.Model)
    maker = "compile_program(fn, specs, mesh)"
    maker = "mw.keras.program(model, x, y)" if is_model else maker
    return TypeError(
        f"{asker} takes a Program, as {maker} returns it; this is of type "
        f"{type(given).__name__}"
    )


def check_results(name: str, out: Any) -> None:
    """Refuses a function's result that is None or has None in it.

    Raises:
      LoweringError: it has.
    """
    if out is None:
        raise LoweringError(f"{name}: the function returns None; return its results")
    leaves = nest.flatten_with_joined_string_paths(out)
    missing = [path for path, leaf in leaves if leaf is None]
    if missing:
        raise LoweringError(
            f"{name}: the function returns None as result {missing[0]}. A gradient is "
            "None if the loss does not depend on the tensor: "
            'tape.gradient(..., unconnected_gradients="zero") gives zeros'
        )


def stored_forms(
    leaves, structure, requested, mesh, *, what: str
) -> list[StoredForm | None]:
    """For each leaf its stored form, or None where completion decides.

    Args:
      leaves: of the structure, with shapes and dtypes.
      structure: a nest.
      requested: a nest like it with a `Sharding`, a dims mapping or a `StoredForm` for
        each leaf, None for a leaf or a branch that is left to completion.
      mesh: the program's.
      what: what the shardings are of, for messages.

    Raises:
      ValueError: the structures or ranks differ, a shape is not static, or a sharding
        is over another mesh or not allowed at a border.
    """
    if requested is None:
        return [None] * len(leaves)
    try:
        flat = requested_leaves(structure, requested, mesh)
        paths = nest.flatten_with_joined_string_paths(structure)
        return [
            None
            if sharding is None
            else _form(tf.TensorSpec(leaf.shape, leaf.dtype, path), sharding, mesh)
            for leaf, sharding, (path, _) in zip(leaves, flat, paths, strict=True)
        ]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{what}: {error}") from None


def _form(
    spec: tf.TensorSpec, sharding: Sharding | StoredForm, mesh: DeviceMesh
) -> StoredForm:
    if not spec.shape.is_fully_defined():
        raise ValueError(
            f"result {spec.name or 0} has shape {spec.shape}, and its sharding takes "
            "sizes that are known while the function is traced: state them by "
            "tf.ensure_shape"
        )
    if not isinstance(sharding, (Sharding, StoredForm)):
        raise TypeError(
            f"the sharding {sharding!r} is of type {type(sharding).__name__}; pass a "
            'Sharding, or an axis for each dim, such as ["X", None]'
        )
    form = (
        sharding if isinstance(sharding, StoredForm) else StoredForm.of(spec, sharding)
    )
    if form.border.mesh != mesh:
        raise ValueError(
            f"sharding {form.border} is over another device mesh ({form.border.mesh}) "
            f"than the program ({mesh}), or over its devices in another order"
        )
    _check_border(form.border)
    return form


def _check_border(sharding: Sharding) -> None:
    axes = [axis for axes in sharding.dims for axis in axes]
    parts = [axis for axis in axes if sharding.mesh.part(axis).axis != axis]
    if sharding.unreduced:
        raise ValueError(
            f"sharding {sharding} of an argument or result is unreduced along "
            f"{', '.join(sharding.unreduced)}: a sum may be unreduced inside a program "
            "only; reshard it there"
        )
    if sharding.unspecified or sharding.manual or parts:
        raise ValueError(
            f"sharding {sharding} of an argument or result: at the border of a program "
            "every dim is split by full axes or unsharded; annotate inside by "
            "mesh_split, which can leave dims unspecified or use parts of axes"
        )


def requested_leaves(structure: Any, requested: Any, mesh: DeviceMesh) -> list:
    """For each leaf of `structure` what is requested; a dims mapping as a `Sharding`.

    Raises:
      ValueError: the structures differ, or a dims mapping is none of the mesh's.
    """
    return [
        Sharding.from_dims_mapping(mesh, leaf)
        if isinstance(leaf, (list, tuple))
        else leaf
        for leaf in nest.flatten_up_to(
            structure, filled(structure, requested), check_types=False
        )
    ]


def filled(structure, shardings):
    """`shardings` with a None for a branch replaced by a None for each leaf."""
    if shardings is None:
        return tf.nest.map_structure(lambda _: None, structure)
    if isinstance(structure, Mapping):
        if not isinstance(shardings, Mapping) or set(structure) != set(shardings):
            given = shardings if isinstance(shardings, Mapping) else {}
            raise ValueError(
                f"shardings of a mapping have {sorted(set(given) - set(structure))}, "
                f"and lack {sorted(set(structure) - set(given))}"
            )
        return type(structure)(
            {key: filled(structure[key], shardings[key]) for key in structure}
        )
    if isinstance(structure, (tuple, list)):
        is_sequence = isinstance(shardings, Sequence) and not isinstance(shardings, str)
        if not is_sequence or len(structure) != len(shardings):
            count = f"{len(shardings)} entries" if is_sequence else repr(shardings)
            raise ValueError(
                f"shardings for a sequence of {len(structure)} have {count}: give a "
                "Sharding, or None, for each"
            )
        pairs = zip(structure, shardings, strict=True)
        return type(structure)(filled(branch, s) for branch, s in pairs)
    return shardings


def stored_spec(spec: tf.TensorSpec, form: StoredForm | None) -> tf.TensorSpec:
    """The spec of a tensor in this form, as a program takes it."""
    shape = spec.shape if form is None else form.stored_shape
    return tf.TensorSpec(shape, spec.dtype, spec.name)


def flat_numbers(args: tuple, chosen: Sequence[int]) -> list[int]:
    """The flat leaf numbers of the arguments numbered in `chosen`."""
    if not set(chosen) <= set(range(len(args))):
        raise ValueError(
            f"donate={list(chosen)} for a program of {len(args)} arguments"
        )
    numbers, start = [], 0
    for i, arg in enumerate(args):
        count = len(tf.nest.flatten(arg))
        if i in chosen:
            numbers.extend(range(start, start + count))
        start += count
    return numbers
