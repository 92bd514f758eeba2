"""The parity checks pass what agrees, and name what does not."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.lowering.errors import LoweringError
from meshwright.framework.compiler.weight_update_sharding.decide import (
    WeightUpdateSharding,
)
from meshwright.framework.compiler.weight_update_sharding.shard import UpdateSharding
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.initializers import Constant, FanIn
from meshwright.framework.modeling.layer import Layer, WeightSpec
from meshwright.framework.modeling.optimizers.adafactor import Adafactor
from meshwright.framework.modeling.optimizers.lars import LARS
from meshwright.framework.modeling.optimizers.muon import Muon
from meshwright.framework.modeling.optimizers.optimizer import SGD, Adam
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.testing import assert_layer_parity, assert_optimizer_parity

PLAN = ShardingPlan(
    mesh_shape=(2, 4),
    weights={"model": "X", "hidden": "Y"},
    activations={"batch": "X", "hidden": "Y"},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(Layer):
    """x W, times a number for each row, and its mean; wrong on a mesh if told so."""

    wrong_output: float = 0.0
    wrong_gradient: float = 0.0
    wrong_small_output: float = 0.0
    hidden: str = "hidden"
    model: str = "model"

    def weights(self):
        w = WeightSpec(shape=(6, 7), dims=(self.model, "hidden"), initializer=FanIn())
        return NestedMap(w=w)

    def fprop(self, ctx, theta, x, *, row):
        h = ctx.split(tf.matmul(x, theta.w), ("batch", self.hidden), name="h")
        small = 1e-5 * tf.reduce_mean(h * h)
        if ctx.plan.mesh.size > 1:
            h *= 1 + self.wrong_output
            small *= 1 + self.wrong_small_output
            h += self.wrong_gradient * (h - tf.stop_gradient(h))
        return [h * row[:, None], tf.reduce_mean(h), small]


def check(layer, **how):
    rng = np.random.default_rng(0)
    x = rng.standard_normal([4, 6], np.float32)
    row = rng.standard_normal(4, np.float32)
    assert_layer_parity(layer, x, **{"plan": PLAN, "row": row, **how})


def test_a_layer_that_agrees_passes():
    check(Scaled())


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"wrong_output": 1e-4}, "output 0"),
        ({"wrong_gradient": 1e-4}, "gradient of"),
        ({"wrong_small_output": 0.1}, "output 2"),
    ],
)
def test_a_layer_that_differs_on_the_mesh_is_told_where(wrong, name):
    with pytest.raises(AssertionError, match=f"\n{name}"):
        check(Scaled(**wrong))


@pytest.mark.parametrize(
    ("wrong", "tensor", "table"),
    [
        ({"hidden": "hiden"}, "Scaled.h", "activations"),
        ({"model": "modell"}, "w", "weights"),
    ],
)
def test_a_misspelt_dim_is_told(wrong, tensor, table):
    ((dim, name),) = wrong.items()
    message = (
        f"Scaled: dim '{name}' of '{tensor}' is in no table of the plan, so that "
        f"nothing splits it; the plan has '{dim}': give both the same name, or give "
        f"ShardingPlan.{table} the entry '{name}': None"
    )
    with pytest.raises(AssertionError, match=message):
        check(Scaled(**wrong))


def test_a_misspelt_dim_of_the_plan_is_told():
    """Of a dim that is in the other table, so that its own name says nothing."""
    weights = {"model": "X", "hiddn": "Y"}
    message = (
        r"Scaled: ShardingPlan\.weights splits dim 'hiddn', which no weight has; do "
        r"you mean hidden\?"
    )
    with pytest.raises(AssertionError, match=message):
        check(Scaled(), plan=dataclasses.replace(PLAN, weights=weights))


def test_a_dim_of_other_layers_in_the_plan_is_warned_of(caplog):
    weights = {**PLAN.weights, "vocabulary": "Y"}
    check(Scaled(), plan=dataclasses.replace(PLAN, weights=weights))
    (record,) = caplog.records
    assert "splits dim 'vocabulary', which no weight has" in record.getMessage()


def test_other_names_of_dims_are_free():
    check(Scaled(hidden="elsewhere", model="in_model"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doing(Layer):
    """What `does` makes of x and a weight."""

    does: Callable
    made: Callable = NestedMap

    def weights(self):
        w = WeightSpec(shape=(6,), dims=("model",), initializer=Constant(1.0))
        return self.made(w=w)

    def fprop(self, ctx, theta, x):
        return self.does(x * theta.w)


class Splitting(Layer):
    """Names too few dims."""

    def fprop(self, ctx, theta, x):
        return ctx.split(x, ("batch",), name="h")


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (
            Doing(does=lambda x: x + tf.random.normal(x.shape)),
            AssertionError,
            r"Doing: op 'random_normal/RandomStandardNormal' \(random_normal, modeling/"
            r"test_testing\.py:\d+\) draws other random numbers in each call.* from "
            r"ctx.random_key\(\)",
        ),
        (
            Doing(does=lambda x: tf.map_fn(lambda row: row + tf.random.uniform([]), x)),
            AssertionError,
            r"RandomUniform.* draws other random numbers",
        ),
        (
            Doing(does=lambda x: tf.boolean_mask(x, x[:, 0] > 0)),
            LoweringError,
            r"Doing: .* has a size that depends on values.*tf.where\(mask, x, 0\)",
        ),
        (
            Splitting(),
            ValueError,
            r"Splitting.h: split names 1 of the dims of a tensor of shape \(4, 6\)",
        ),
        (
            Doing(does=tf.identity, made=dict),
            TypeError,
            r"Doing.weights\(\) returned a dict; return a NestedMap of Weight",
        ),
        (
            Doing(does=tf.identity, made=lambda w: NestedMap(w=w.shape)),
            TypeError,
            r"Doing.weights\(\) has a tuple at 'w'; describe the weight by a",
        ),
        (
            Doing(does=lambda x: None),
            TypeError,
            r"Doing\.fprop returned None; return the layer's tensors",
        ),
        (
            Doing(does=lambda x: [x, None]),
            TypeError,
            r"Doing\.fprop returned a list with None in it; return the layer's",
        ),
    ],
)
def test_a_layer_that_cannot_agree_is_told_why(layer, error, message):
    x = np.random.default_rng(0).standard_normal([4, 6], np.float32)
    with pytest.raises(error, match=message):
        assert_layer_parity(layer, x, plan=PLAN)


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (
            lambda x: x + np.random.standard_normal(x.shape).astype(np.float32),
            r"output 0(.|\n)*Two calls on one device differ too, as by random numbers "
            r"of NumPy .*: draw them from ctx.random_key\(\)",
        ),
        (
            lambda x: x + tf.random.stateless_normal(x.shape, [1, 2]) * rounded(x),
            r"output 0(.|\n)*op '.*StatelessRandomNormalV2' .* by TF's own generator, "
            r".*: draw them from ctx.random_key\(\)",
        ),
    ],
)
def test_random_numbers_that_may_differ_are_hinted_at(does, message):
    x = np.random.default_rng(0).standard_normal([4, 6], np.float32)
    with pytest.raises(AssertionError, match=message):
        assert_layer_parity(Doing(does=does), x, plan=PLAN)


def rounded(x):
    """1 in eager TF and 2 in a program, so that it fails whatever is drawn."""
    return 1.0 if tf.executing_eagerly() else 2.0


def test_random_numbers_of_an_optimizer_are_told():
    message = r"Drawing: op .*RandomUniform.* no two calls agree: draw them from random"
    with pytest.raises(AssertionError, match=message):
        assert_optimizer_parity(Drawing(learning_rate=0.1), SPECS, plan=PLAN)


class Drawing(SGD):
    """SGD whose gradients have noise of TF's own."""

    def rule(self, step, rate):
        right = super().rule(step, rate)
        return lambda grad, *others: right(
            grad * tf.random.uniform(grad.shape), *others
        )


def test_the_tolerance_holds_whatever_the_activation_dtype():
    with pytest.raises(AssertionError, match="\noutput 2"):
        check(Scaled(wrong_small_output=10.0), activation_dtype=tf.bfloat16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drifting(SGD):
    """SGD with momentum; wrong in a program if told so."""

    wrong: float = 0.0

    def rule(self, step, rate):
        right = super().rule(step, rate)

        def update(grad, weight, slots, spec):
            new = right(grad, weight, slots, spec)
            off = 0.0 if tf.executing_eagerly() else self.wrong
            return dataclasses.replace(new, slots=new.slots.map(lambda s: s + off))

        return update


SPECS = NestedMap(
    w=WeightSpec(shape=(16, 24), dims=("model", "hidden"), initializer=FanIn()),
    b=WeightSpec(shape=(24,), dims=("hidden",), initializer=Constant(0.0)),
    seen=WeightSpec(
        shape=(24,), dims=("hidden",), initializer=Constant(1.0), statistic_decay=0.9
    ),
)
UPDATE = UpdateSharding(mode=WeightUpdateSharding.ALL, data_axes=("X",))


@pytest.mark.parametrize("update_sharding", [None, UPDATE], ids=["plain", "sharded"])
@pytest.mark.parametrize("partitioner", Partitioner, ids=lambda p: p.value)
@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(learning_rate=0.1),
        Adam(learning_rate=0.1, weight_decay=0.1, clip_global_norm=1.0),
        Adafactor(learning_rate=0.1, min_dim_size_to_factor=8),
        LARS(learning_rate=0.1),
        Muon(learning_rate=0.1, others=Adam(learning_rate=0.1)),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_optimizers_agree(optimizer, partitioner, update_sharding):
    assert_optimizer_parity(
        optimizer,
        SPECS,
        plan=PLAN,
        partitioner=partitioner,
        update_sharding=update_sharding,
    )


def test_an_optimizer_that_differs_on_the_mesh_is_told_where():
    wrong = Drifting(learning_rate=0.1, momentum=0.9, wrong=1e-3)
    with pytest.raises(AssertionError, match="\nslots.b.m"):
        assert_optimizer_parity(wrong, SPECS, plan=PLAN)


class Random(SGD):
    """Its slot is its weight's own spec, with random first values."""

    def slots_of(self, spec):
        return NestedMap(m=spec)


def test_a_slot_that_would_begin_with_random_numbers_is_refused():
    message = "Random.slots_of returned for 'b' .* slot 'm'.*: return mw.slot_spec"
    with pytest.raises(ValueError, match=message):
        assert_optimizer_parity(Random(learning_rate=0.1), SPECS, plan=PLAN)
