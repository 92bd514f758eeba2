"""Tests of layers and optimizers: the same numbers on one device and on a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorflow as tf

from meshwright.framework.compiler.lowering.sources import Sources
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.weight_update_sharding.shard import UpdateSharding
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling import random
from meshwright.framework.modeling.layer import (
    Context,
    Layer,
    Mode,
    added_up,
    annotate_weights,
    check_returns,
    initialize,
    weight_specs,
)
from meshwright.framework.modeling.optimizers.optimizer import Optimizer
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import NotingPlan, ShardingPlan

log = logging.getLogger("absl")

_DRAWING = frozenset(
    {
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "TruncatedNormal",
    }
)
"""Types of TF's ops that draw other numbers in each call."""
_STATELESS = tuple(
    f"Stateless{kind}"
    for kind in ("Multinomial", "Parameterized", "Random", "Shuffle", "Truncated")
)
"""How types of ops begin that draw by a seed, by another algorithm in each compiler."""
_FUNCTIONS = "by the functions of meshwright.framework.modeling.random"
_BY_LAYERS = f"draw them from ctx.random_key(), {_FUNCTIONS}"
_BY_OPTIMIZERS = (
    "draw them from random.fold_in(random.key_from_seed(seed), step), and another key "
    f"for each weight, {_FUNCTIONS}"
)


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
        is in no table of the plan and resembles one of the table that it would be in,
        or an entry of a table is for a dim that the layer does not have and resembles
        one that the table leaves out; of other such entries it warns. Or `fprop` draws
        random numbers that are others in each call.
      TypeError: `weights()` is no nested map of weight specs, or `fprop` returned
        None.
      NotImplementedError: the layer has no `fprop`.
      LoweringError: the layer cannot become a program, for instance because the size
        of a tensor depends on values.
    """
    specs = weight_specs(layer)
    single_plan = dataclasses.replace(
        plan, mesh_shape=(1,) * len(plan.mesh_shape), device_ids=None
    )
    name = type(layer).__name__
    key = random.key_from_seed(0)
    theta = initialize(specs, key)
    args = tf.nest.map_structure(tf.convert_to_tensor, (theta, x, inputs, key))

    def results_under(plan, layer=layer):
        def results(theta, x, inputs, key):
            ctx = Context(
                plan=plan,
                mode=mode,
                key=key,
                activation_dtype=activation_dtype,
                path=name,
            )
            return _outputs_and_gradients(layer, ctx, theta, x, inputs)

        return results

    def alone():
        return results_under(single_plan, reference or layer)(*args)

    want = alone()
    weights = specs.map_with_path(lambda path, s: s.sharding(plan, path))
    noting = NotingPlan.of(plan)
    program = compile_program(
        results_under(noting),
        tf.nest.map_structure(tf.TensorSpec.from_tensor, args),
        plan.mesh,
        in_shardings=[weights, None, None, None],
        partitioner=partitioner,
        name=name,
    )
    named = {path: spec.dims for path, spec in specs.items_by_path()}
    unused = noting.unused(named)
    if wrong := [*noting.misspelt(named), *(u for u in unused if u.is_misspelt)]:
        raise AssertionError(f"{name}: {wrong[0]}")
    for entry in unused:  # A model's whole plan has dims of other layers.
        log.warning("%s: %s", name, entry)
    _refuse_other_draws(name, program.sources, _BY_LAYERS)
    got = program.unshard(program(*tf.nest.map_structure(lambda t: t.numpy(), args)))
    with _hinting_at_draws(program.sources, want, alone, _BY_LAYERS):
        _assert_alike(got, want, tolerance, activation_dtype)


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
        returned = layer.fprop(ctx, annotated, x, **inputs)
        check_returns(layer, returned)
        outputs = tf.nest.flatten(returned)
        if not all(y.shape.is_fully_defined() for y in outputs):
            return {str(i): y for i, y in enumerate(outputs)}  # Compiling refuses it.
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


def assert_optimizer_parity(
    optimizer: Optimizer,
    specs: NestedMap,
    *,
    plan: ShardingPlan,
    partitioner: Partitioner = Partitioner.SHARDY,
    update_sharding: UpdateSharding | None = None,
    steps: int = 3,
    tolerance: float = 1e-5,
) -> None:
    """Asserts that an optimizer updates weights on `plan`'s mesh as on one device.

    It compares weights and slots after some updates. Gradients are sums of random
    numbers over as many examples as the mesh has devices; the data axes split them, so
    that weight-update sharding applies. One device means TF alone, as in
    `assert_layer_parity`.

    Args:
      optimizer: the optimizer.
      specs: nested map of the weights' specs; first weights are from a fixed key.
      plan: where weights and slots are split.
      partitioner: Shardy or GSPMD.
      update_sharding: whether updates are sharded, and the data axes, with the default
        argument and result; None: they are not.
      steps: how many updates.
      tolerance: of an element, as in `assert_layer_parity`.

    Raises:
      AssertionError: a weight or slot differs; the message names it. Or the rule draws
        random numbers that are others in each call.
      TypeError, ValueError: as `Optimizer.update`.
    """
    key = random.key_from_seed(0)
    slots = optimizer.slots(specs)
    state_specs = NestedMap(theta=specs, slots=slots)
    state = initialize(state_specs, key)

    def update(state, step, examples):
        grads = examples.map(lambda x: tf.reduce_sum(x, 0))
        new = optimizer.update(step, grads, state.theta, state.slots, specs)
        return {"state": NestedMap(theta=new.theta, slots=new.slots)}

    data_axes = update_sharding.data_axes if update_sharding else ()
    shardings = state_specs.map_with_path(lambda path, s: s.sharding(plan, path))
    args = state, tf.constant(0), _examples(specs, plan.mesh.size, 0)
    program = compile_program(
        update,
        tf.nest.map_structure(tf.TensorSpec.from_tensor, args),
        plan.mesh,
        in_shardings=[
            shardings,
            None,
            specs.map(lambda s: [data_axes, *[None] * len(s.shape)]),
        ],
        out_shardings={"state": shardings},
        partitioner=partitioner,
        update_sharding=update_sharding,
        name=type(optimizer).__name__,
    )
    _refuse_other_draws(type(optimizer).__name__, program.sources, _BY_OPTIMIZERS)
    examples = [_examples(specs, plan.mesh.size, step) for step in range(steps)]

    def alone():
        new = state
        for step, given in enumerate(examples):
            new = update(new, tf.constant(step), given)["state"]
        return dict(new.items_by_path())

    got = state.map(lambda value: value.numpy())
    for step, given in enumerate(examples):
        given = given.map(lambda value: value.numpy())
        got = program(got, np.int32(step), given)["state"]
    got = dict(program.unshard({"state": got})["state"].items_by_path())
    want = alone()
    with _hinting_at_draws(program.sources, want, alone, _BY_OPTIMIZERS):
        _assert_alike(got, want, tolerance, tf.float32)


def _examples(specs: NestedMap, count: int, step: int) -> NestedMap:
    """Random numbers of `count` examples for each weight, [count, *its shape]."""
    key = random.key_from_seed(step + 1)
    return specs.map_with_path(
        lambda path, spec: random.normal(
            random.fold_in(key, path), [count, *spec.shape]
        )
    )


def _refuse_other_draws(name: str, sources: Sources, remedy: str) -> None:
    """Refuses a program `name` whose random numbers are others in each call."""
    for op_name in sources.order:
        if sources.find(op_name).op_type in _DRAWING:
            raise AssertionError(
                f"{name}: {sources.text(op_name)} draws other random numbers in each "
                f"call, so that no two calls agree: {remedy}"
            )


@contextlib.contextmanager
def _hinting_at_draws(
    sources: Sources,
    want: Mapping[str, Any],
    alone: Callable[[], Mapping[str, Any]],
    remedy: str,
) -> Iterator[None]:
    """Adds to an AssertionError what random numbers may have to do with it.

    Args:
      sources: of the program.
      want: what one device computed.
      alone: computes it again.
      remedy: how random numbers are to be drawn.
    """
    try:
        yield
    except AssertionError as error:
        hint = _hint(sources, want, alone())
        if not hint:
            raise
        raise AssertionError(f"{error}\n{hint}: {remedy}") from None


def _hint(sources: Sources, want: Mapping[str, Any], again: Mapping[str, Any]) -> str:
    """What random numbers may have to do with a difference; "" if nothing."""
    if any(not np.array_equal(want[n], again[n], equal_nan=True) for n in want):
        return (
            "Two calls on one device differ too, as by random numbers of NumPy or "
            "Python, which are drawn anew each time that TF traces the function"
        )
    for op_name in sources.order:
        kind = sources.find(op_name).op_type
        if kind.startswith(_STATELESS) and "Get" not in kind:  # Which make its key.
            return (
                f"{sources.text(op_name)} draws by TF's own generator, of which a "
                "compiled program, and each layout over devices, may have other "
                "numbers by the same seed"
            )
    return ""


def _assert_alike(
    got: Mapping[str, Any],
    want: Mapping[str, Any],
    tolerance: float,
    dtype: tf.DType,
) -> None:
    """Compares tensors by name as `assert_layer_parity` describes."""
    want = {name: np.float64(value) for name, value in want.items()}
    largest = {name: np.abs(value).max(initial=0) for name, value in want.items()}
    epsilon = float(jnp.finfo(dtype.as_numpy_dtype).eps)
    rounding = min(epsilon, tolerance / 10) * max(largest.values())
    for name, expected in want.items():
        atol = max(tolerance * largest[name], rounding)
        actual = np.float64(got[name])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=name)
