"""State that a program takes and returns, in the same form both times."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.stored_form import StoredForm


def settle_state(module: Module, carried: int) -> None:
    """Gives state that is left to completion the sharding that its argument gets.

    A program whose result is its next argument could otherwise not be called twice.
    A dim that its axes do not divide is not split: arrays between programs are split
    evenly, and whether one is padded has to be known while the function is traced.

    Args:
      module: the program; its forms are changed in place.
      carried: how many leaves are state: the first of the arguments, and in their place
        the first of the result.
    """
    left = [i for i in range(carried) if module.in_forms[i] is None]
    if not left:
        return
    specs = tf.nest.flatten(module.signature.inputs)
    completed = module.completed().arguments
    for number in left:
        spec = specs[number]
        form = StoredForm.of(spec, _even(completed[number], module, spec))
        module.in_forms[number] = module.out_forms[number] = form
    module.write()


def _even(sharding: Sharding | None, module: Module, spec: tf.TensorSpec) -> Sharding:
    """`sharding` without dims that are split unevenly, or by parts of axes."""
    if sharding is None:
        return Sharding.replicated(module.mesh, spec.shape.rank)
    names = module.mesh.axis_names
    dims = tuple(
        axes if padded == size and set(axes) <= set(names) else ()
        for axes, padded, size in zip(
            sharding.dims, sharding.padded_shape(spec.shape), spec.shape, strict=True
        )
    )
    return dataclasses.replace(sharding, dims=dims)
