"""Tests of layers: they compute the same numbers on one device and on a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling import random
from meshwright.framework.modeling.layer import (
    Context,
    Layer,
    Mode,
    added_up,
    annotate_weights,
    initialize,
)
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import NotingPlan, ShardingPlan


def assert_layer_parity(
    layer: Layer,
    x: Any,
    *,
    plan: ShardingPlan,
    partitioner: Partitioner = Partitioner.SHARDY,
    mode: Mode = Mode.TRAIN,
    activation_dtype: tf.DType = tf.float32,
    tolerance: float = 1e-5,
    reference: Layer | None = None,
    **inputs: Any,
) -> None:
    """Asserts that a layer computes on `plan`'s mesh what it does on one device.

    It compares the layer's outputs and the gradients, by weights and floating-point
    inputs, of the outputs' product with random numbers. One device means TF alone,
    eagerly: no mesh, no compiler. As many devices as the mesh has are needed, see
    `set_platform`.

    Args:
      layer: the layer, with its first weights from a fixed key.
      x: its input, a nest of arrays.
      plan: where weights and activations are split.
      partitioner: Shardy or GSPMD.
      mode: in `Mode.TRAIN`, dropout is active, with the same random numbers.
      activation_dtype: of activations; a 16-bit dtype needs a larger tolerance.
      tolerance: of an element, in units of the largest element of its tensor. An
        element may also differ by a rounding error (the machine epsilon of
        `activation_dtype`, or a tenth of the tolerance if that is less) of the largest
        element of all tensors: the gradient of attention's key bias is zero, and the
        computed one is left over from sums of larger numbers.
      reference: the layer on one device, of the same weights; None: `layer` itself.
      **inputs: further inputs of `fprop`, nests of arrays.

    Raises:
      AssertionError: a tensor differs; the message names it. Or a dim has a name that
        is in no table of the plan and resembles one of `plan.activations`.
    """
    single_plan = dataclasses.replace(
        plan, mesh_shape=(1,) * len(plan.mesh_shape), device_ids=None
    )
    key = random.key_from_seed(0)
    theta = initialize(layer.weights(), key)
    args = tf.nest.map_structure(tf.convert_to_tensor, (theta, x, inputs, key))

    def results_under(plan, layer=layer):
        def results(theta, x, inputs, key):
            ctx = Context(
                plan=plan, mode=mode, key=key, activation_dtype=activation_dtype
            )
            return _outputs_and_gradients(layer, ctx, theta, x, inputs)

        return results

    want = results_under(single_plan, reference or layer)(*args)
    weights = layer.weights().map_with_path(lambda path, s: s.sharding(plan, path))
    noting = NotingPlan.of(plan)
    program = compile_program(
        results_under(noting),
        tf.nest.map_structure(tf.TensorSpec.from_tensor, args),
        plan.mesh,
        in_shardings=[weights, None, None, None],
        partitioner=partitioner,
        name=type(layer).__name__,
    )
    named = {dim for spec in layer.weights().leaves() for dim in spec.dims}
    if misspelt := noting.misspelt(named):
        raise AssertionError(f"{type(layer).__name__}: {misspelt[0]}")
    got = program.unshard(program(*tf.nest.map_structure(lambda t: t.numpy(), args)))
    want = {name: np.float64(value) for name, value in want.items()}
    largest = {name: np.abs(value).max(initial=0) for name, value in want.items()}
    epsilon = float(jnp.finfo(activation_dtype.as_numpy_dtype).eps)
    rounding = min(epsilon, tolerance / 10) * max(largest.values())
    for name, expected in want.items():
        atol = max(tolerance * largest[name], rounding)
        actual = np.float64(got[name])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=name)


def _outputs_and_gradients(
    layer: Layer, ctx: Context, theta: NestedMap, x: Any, inputs: Any
) -> dict[str, tf.Tensor]:
    """Tensors by names for readers of a failure."""
    sources = {f"gradient of weight {p}": w for p, w in theta.items_by_path()}
    for i, leaf in enumerate(tf.nest.flatten((x, inputs))):
        if leaf.dtype.is_floating:
            sources[f"gradient of input {i}"] = leaf
    with tf.GradientTape() as tape:
        tape.watch(sources)
        annotated = annotate_weights(ctx.plan, layer.weights(), theta)
        outputs = tf.nest.flatten(layer.fprop(ctx, annotated, x, **inputs))
        products = [
            tf.reduce_sum(tf.cast(y, tf.float32) * _like(y, i))
            for i, y in enumerate(outputs)
        ]
        loss = tf.add_n(products)
    gradients = tape.gradient(
        loss, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    by_weight = theta.map_with_path(lambda p, _: gradients[f"gradient of weight {p}"])
    reduced = added_up(ctx.plan, layer.weights(), by_weight)
    gradients |= {f"gradient of weight {p}": g for p, g in reduced.items_by_path()}
    return {f"output {i}": y for i, y in enumerate(outputs)} | gradients


def _like(output: tf.Tensor, i: int) -> tf.Tensor:
    """Random numbers, for a gradient that depends on every element of the output."""
    return random.normal(random.key_from_seed(i + 1), output.shape)
