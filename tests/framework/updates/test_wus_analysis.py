"""Weight-update sharding's analysis: what is redundant, and what is updated together.

Small functions, lowered and analysed; nothing is compiled.
"""

import functools

import pytest
import tensorflow as tf

from meshwright.framework.compiler.stablehlo.stable_hlo import walk
from meshwright.framework.sharding.annotations import annotate
from meshwright.framework.sharding.collectives import all_reduce
from meshwright.framework.sharding.manual import auto_to_manual, manual_to_auto
from meshwright.framework.sharding.sharding import Sharding
from tests.framework.updates.updates import (
    BOTH,
    DATA,
    DENSE,
    B,
    H,
    L,
    M,
    X,
    analysed,
    gradients,
    mean_square,
    momentum,
)


def gathered(x):
    """Gathered: on all devices, but none of them computed it alike."""
    return annotate(x, Sharding.replicated(DATA, x.shape.rank))


IMAGES = {"x": ("data", None, None, None)}


@pytest.mark.parametrize(
    "loss,w,x,split,reduction",
    [
        (lambda w, x: x @ w, [M, H], [B, M], X, "dot_general"),
        (
            lambda w, x: tf.nn.conv2d(x, w, 1, "SAME"),
            [3, 3, 4, 8],
            [B, 6, 6, 4],
            IMAGES,
            "convolution",
        ),
        (lambda w, x: x + w, [M], [B, M], X, "reduce"),
        (
            lambda w, x: tf.gather(w, x),
            [64, M],
            tf.TensorSpec([B, 4], tf.int32),
            X,
            "scatter",
        ),
    ],
    ids=["dot", "convolution", "reduce", "scatter"],
)
def test_what_sums_over_the_batch_is_a_reduction(loss, w, x, split, reduction):
    def fn(w, x):
        return {
            "g": gradients(lambda w: mean_square(loss(w, x)), w)[0],
            "y": loss(w, x),
        }

    with analysed(fn, {"w": w, "x": x}, split) as analysis:
        assert analysis.reductions() == {f"stablehlo.{reduction}"}
        assert analysis.alike("g") == {"data"}
        assert analysis.results["g"] in analysis.redundancy.updates
        assert analysis.alike("y") == set()
        assert analysis.results["y"] not in analysis.redundancy.updates


def test_what_is_gathered_but_not_summed_is_not_redundant():
    def fn(x):
        return {"all": gathered(x), "sum": tf.reduce_sum(gathered(x), 0)}

    with analysed(fn, {"x": [B, M]}, X) as analysis:
        assert analysis.alike("all") == analysis.alike("sum") == set()
        assert analysis.reductions() == set()


def test_random_numbers_are_not_redundant():
    def fn(x):
        known = tf.random.stateless_uniform([M], [1, 2])
        return {"known": known, "any": tf.random.uniform([M]), "on": x[0] * 0 + known}

    with analysed(fn, {"x": [B, M]}, {}) as analysis:
        names = {op.name for op in walk(analysis.completed.main)}
        assert {"stablehlo.rng_bit_generator", "stablehlo.rng"} <= names
        for name in ("known", "any", "on"):
            assert analysis.alike(name) == set(), name


@pytest.mark.parametrize("axes,alike", [("data", {"data"}), ("model", set())])
def test_an_all_reduce_of_a_manual_region_is_a_reduction_along_its_axes(axes, alike):
    def fn(w, x):
        mine = auto_to_manual(x, BOTH, [("data", "model"), None])
        partial_sum = tf.matmul(mine, mine, transpose_a=True)
        total = all_reduce(partial_sum, BOTH, axes)
        to_whole = functools.partial(manual_to_auto, mesh=BOTH, dims_mapping=[None] * 2)
        return {"w": w - to_whole(total), "own": to_whole(partial_sum)}

    shapes = {"w": [M, M], "x": [B, M]}
    with analysed(fn, shapes, X, mesh=BOTH) as analysis:
        assert analysis.alike("own") == set()
        assert analysis.alike("w") == alike
        assert analysis.updated() == ([["w"]] if alike else [])


def test_a_loop_to_a_fixed_point():
    """That `b` is gathered shows in `a` in the second round, in `late` in the third."""

    def fn(x):
        zeros = tf.zeros([B, M])
        _, late, a, b, counter = tf.while_loop(
            lambda i, *_: i < L,
            lambda i, late, a, b, counter: (i + 1, a, b, gathered(x), counter + 1.0),
            (0, zeros, zeros, zeros, zeros),
        )
        return {"late": late, "a": a, "b": b, "own": counter}

    with analysed(fn, {"x": [B, M]}, X) as analysis:
        assert analysis.alike("own") == {"data"}
        for name in ("late", "a", "b"):
            assert analysis.alike(name) == set(), name


def test_what_only_the_first_pass_takes_for_a_reduction_is_none():
    def fn(x, v):
        def body(i, v, a):
            return i + 1, gathered(x), tf.matmul(x, v, transpose_a=True)

        _, v, a = tf.while_loop(lambda i, *_: i < L, body, (0, v, tf.zeros([M, M])))
        return {"a": a}

    with analysed(fn, {"x": [B, M], "v": [B, M]}, X) as analysis:
        assert analysis.alike("a") == set()
        assert analysis.reductions() == set()
        assert analysis.results["a"] not in analysis.redundancy.updates


def test_how_often_a_loop_runs_must_be_redundant():
    def fn(x):
        def up_to(limit):
            return tf.while_loop(
                lambda i, c: tf.cast(i, tf.float32) < limit,
                lambda i, c: (i + 1, c + 1.0),
                (0, tf.zeros([M])),
            )[1]

        return {"gathered": up_to(gathered(x)[0, 0]), "summed": up_to(tf.reduce_sum(x))}

    with analysed(fn, {"x": [B, M]}, X) as analysis:
        assert analysis.alike("gathered") == set()
        assert analysis.alike("summed") == {"data"}


def test_predicate_and_branches_must_be_redundant():
    def fn(x, s):
        ours, cases = (
            tf.zeros([B, M]) + s,
            (lambda: gathered(x), lambda: tf.zeros([B, M])),
        )
        return {
            "predicate": tf.cond(gathered(x)[0, 0] > 0, lambda: ours, lambda: ours * 2),
            "branch": tf.cond(s > 0, *cases),
            "other": tf.cond(s > 0, *reversed(cases)),
            "neither": tf.cond(tf.reduce_sum(x) > 0, lambda: ours, lambda: ours * 2),
        }

    with analysed(fn, {"x": [B, M], "s": []}, X) as analysis:
        alike = {name: analysis.alike(name) for name in analysis.results}
        assert alike.pop("neither") == {"data"}
        assert set().union(*alike.values()) == set(), alike


def test_the_cluster_around_a_reduction():
    with analysed(momentum, DENSE, X) as analysis:
        (cluster,) = analysis.clusters
        assert analysis.state(cluster) == ["m", "w"]
        names = sorted(op.name.removeprefix("stablehlo.") for op in cluster.ops)
        assert names == ["add", "broadcast_in_dim", "multiply", "subtract"]
        (gradient,) = cluster.entries()
        assert gradient.owner.name == "stablehlo.dot_general"
        # Only forward and backward read of it, and only the weight.
        assert list(cluster.exits()) == [analysis.arguments["w"]]


def two_layers(w, v, m, n, x):
    """Clipped together by their global norm."""
    g, h = gradients(lambda w, v: mean_square(tf.tanh(x @ w) @ v), w, v)
    norm = tf.sqrt(tf.reduce_sum(g * g) + tf.reduce_sum(h * h))
    factor = 1.0 / tf.maximum(norm, 1.0)
    m, n = 0.9 * m + g * factor, 0.9 * n + h * factor
    return {"w": w - m, "v": v - n, "m": m, "n": n, "norm": norm}


def test_weights_that_scalars_join_are_updated_apart():
    shapes = {"w": [M, H], "m": [M, H], "v": [H, M], "n": [H, M], "x": [B, M]}
    with analysed(two_layers, shapes, X) as analysis:
        assert sorted(analysis.updated()) == [["m", "w"], ["n", "v"]]
        # What norms sum is on shards, so that only scalars cross.
        for cluster in analysis.clusters:
            assert "stablehlo.reduce" in {op.name for op in cluster.ops}
            assert len(cluster.entries()) == 1


def test_a_tied_weight_is_updated_once():
    def fn(e, m, x, ids):
        (g,) = gradients(lambda e: mean_square(tf.gather(e, ids) @ tf.transpose(e)), e)
        m = 0.9 * m + g
        return {"e": e - m, "m": m}

    shapes = {"e": [64, M], "m": [64, M], "x": [B, M]}
    shapes["ids"] = tf.TensorSpec([B], tf.int32)
    with analysed(fn, shapes, {"ids": ("data",), **X}) as analysis:
        assert analysis.updated() == [["e", "m"]]
        (cluster,) = analysis.clusters
        (entry,) = cluster.entries()
        assert entry.owner.name == "stablehlo.add", "a sum of sums is reduced once"


def test_weights_that_pull_at_each_other_are_updated_together():
    def fn(w, v, x):
        g, h = gradients(lambda w, v: mean_square(tf.tanh(x @ w) + x @ v), w, v)
        return {"w": w - g - 0.1 * (w - v), "v": v - h - 0.1 * (v - w)}

    with analysed(fn, {"w": [M, H], "v": [M, H], "x": [B, M]}, X) as analysis:
        assert analysis.updated() == [["v", "w"]]


def test_stacked_gradients_of_a_backward_loop():
    """The forward loop reads a layer of the stack, the backward one adds to a stack."""

    def fn(w, m, x):
        def loss(w):
            layer = lambda i, h: (i + 1, tf.tanh(h @ w[i]))  # noqa: E731
            loop = functools.partial(tf.while_loop, maximum_iterations=L)
            return mean_square(loop(lambda i, h: i < L, layer, (0, x))[1])

        (g,) = gradients(loss, w)
        m = 0.9 * m + g
        return {"w": w - m, "m": m}

    shape = [L, M, M]
    with analysed(fn, {"w": shape, "m": shape, "x": [B, M]}, X) as analysis:
        assert analysis.updated() == [["m", "w"]]
        (cluster,) = analysis.clusters
        assert "stablehlo.dynamic_update_slice" in {op.name for op in cluster.ops}
        assert any(link.argument is None for link in cluster.links), "the loop's stack"
        (decision,) = analysis.decide().values()
        weight = analysis.arguments["w"]
        assert decision.layout.first(weight) != 0, "the stack is sliced by layers"
        # A layer's gradient is reduced in each round of the loop.
        assert decision.reduced_bytes == decision.gathered_bytes == L * M * M * 4


def test_steps_in_a_loop():
    def fn(w, m, x):
        def body(i, w, m):
            new = momentum(w, m, x[i])
            return i + 1, new["w"], new["m"]

        _, w, m = tf.while_loop(lambda i, *_: i < L, body, (0, w, m))
        return {"w": w, "m": m}

    shapes = {**DENSE, "x": [L, B, M]}
    with analysed(fn, shapes, {"x": (None, "data", None)}) as analysis:
        assert analysis.updated() == [["m", "w"]]
        (decision,) = analysis.decide().values()
        # The slot is in shards from step to step, the weight is gathered in each.
        assert decision.state_saved_bytes == M * H * 4 * 7 // 8
        assert decision.gathered_bytes == M * H * 4


def test_what_a_loop_carries_over_is_an_update_too():
    """Weights move along the momentum of the step before."""

    def fn(w, m, x):
        def body(i, w, m):
            return i + 1, w - m, momentum(w, m, x)["m"]

        _, w, m = tf.while_loop(lambda i, *_: i < L, body, (0, w, m))
        return {"w": w, "m": m}

    with analysed(fn, DENSE, X) as analysis:
        assert analysis.updated() == [["m", "w"]]


def test_what_state_carries_over_is_an_update_too():
    """The same, with one step a call."""

    def fn(w, m, x):
        return {"w": w - m, "m": momentum(w, m, x)["m"]}

    with analysed(fn, DENSE, X) as analysis:
        assert analysis.updated() == [["m", "w"]]


def test_what_data_axes_split_already_is_no_update_to_shard():
    split = {**X, "w": ("data", None), "m": ("data", None)}
    with analysed(momentum, DENSE, split) as analysis:
        assert analysis.clusters == []
