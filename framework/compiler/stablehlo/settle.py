"""State that a program takes and returns, in the same form both times."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.stored_form import StoredForm


def settle_state(module: Module, carried: int) -> None:
    """Gives state the same form as an argument and as a result.

    A program whose result is its next argument could otherwise not be called twice.
    Where neither form is given, both get the sharding that completion gives the
    argument. A dim that its axes do not divide is then not split: arrays between
    programs are split evenly, and the function is traced with the padded shapes.

    Args:
      module: the program; its forms and notes are changed in place.
      carried: how many leaves are state: the first of the arguments, and in their place
        the first of the result.

    Raises:
      ValueError: the two forms of a leaf differ; or only one is given, and is padded.
    """
    arguments, results = module.in_forms, module.out_forms
    module.notes = dataclasses.replace(module.notes, carried=carried)
    left = []
    for number in range(carried):
        _check_given(module, number)
        form = arguments[number] or results[number]
        if form is None:
            left.append(number)
        elif arguments[number] != results[number]:
            arguments[number] = results[number] = form
            module.write()
    if left:
        specs = tf.nest.flatten(module.signature.inputs)
        completed = module.completed().arguments
        for number in left:
            spec = specs[number]
            sharding = even(completed[number], module.mesh, spec.shape)
            form = StoredForm.of(spec, sharding)
            arguments[number] = results[number] = form
        module.notes = dataclasses.replace(module.notes, completed=frozenset(left))
        module.write()


def _check_given(module: Module, number: int) -> None:
    argument, result = module.in_forms[number], module.out_forms[number]
    if argument == result:
        return
    if argument is not None and result is not None:
        raise ValueError(
            f"{module.signature.name}: leaf {number} of the state is {argument.border} "
            f"in in_shardings and {result.border} in out_shardings: give both the same"
        )
    given, missing = "in_shardings", "out_shardings"
    if argument is None:
        given, missing = missing, given
    form = argument or result
    if not form.is_logical:
        raise ValueError(
            f"{module.signature.name}: {given} stores leaf {number} of the state, of "
            f"shape {form.shape}, padded to {form.stored_shape}: give it in {missing} "
            "too"
        )


def even(sharding: Sharding | None, mesh: DeviceMesh, shape: Sequence[int]) -> Sharding:
    """`sharding` without dims that are split unevenly, or by parts of axes."""
    if sharding is None:
        return Sharding.replicated(mesh, len(shape))
    dims = tuple(
        axes if padded == size and set(axes) <= set(mesh.axis_names) else ()
        for axes, padded, size in zip(
            sharding.dims, sharding.padded_shape(shape), shape, strict=True
        )
    )
    return dataclasses.replace(sharding, dims=dims)
