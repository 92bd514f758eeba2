"""Values that stay on the mesh when a program takes them in another stored form."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import tensorflow as tf

from meshwright.framework.compiler.boundary.wide_elements import wide_elements
from meshwright.framework.compiler.program import Program, compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.functions.mesh_variable import MeshValue, stored_as
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.stored_form import StoredForm


def change_forms(values: Sequence[MeshValue], program: Program) -> None:
    """Converts values that another program left on the mesh to the forms of this one.

    A program of its own does that for all of them, so that none goes via the host. What
    differs in its sharding alone is left to `MeshValue.take`.

    Args:
      values: of the program's first arguments.
      program: what takes them.
    """
    forms = program.arguments.forms[: len(values)]
    moved, before, after = [], [], []
    for value, form in zip(values, forms, strict=True):
        if value.stays_on_mesh and stored_as(value.form) != stored_as(form):
            source = value.form or _whole(form)
            target = form or StoredForm(source.shape, source.dtype, source.sharding)
            if source.border.mesh == target.border.mesh == program.mesh:
                moved.append(value)
                before.append(source)
                after.append(target)
    if not moved:
        return
    convert = _conversion(
        tuple(before), tuple(after), program.mesh, program.partitioner
    )
    arrays = [
        _resharded(v.array, sharding)
        for v, sharding in zip(moved, convert.arguments.shardings, strict=True)
    ]
    for value, array, form in zip(moved, convert(arrays), after, strict=True):
        value.array, value.form = array, form


def _whole(form: StoredForm) -> StoredForm:
    """The form of the same tensor on each device."""
    whole = Sharding.replicated(form.border.mesh, len(form.shape))
    return StoredForm(form.shape, form.dtype, whole)


def _resharded(array: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    with wide_elements():
        return jax.device_put(array, sharding)


@functools.lru_cache(maxsize=64)
def _conversion(
    before: tuple[StoredForm, ...],
    after: tuple[StoredForm, ...],
    mesh: DeviceMesh,
    partitioner: Partitioner,
) -> Program:
    return compile_program(
        lambda tensors: [tf.identity(tensor) for tensor in tensors],
        [[tf.TensorSpec(form.shape, form.dtype) for form in before]],
        mesh,
        in_shardings=[list(before)],
        out_shardings=list(after),
        partitioner=partitioner,
        name="change_forms",
    )
