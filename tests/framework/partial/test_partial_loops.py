"""Partial sums in loops and branches, and under sharded weight updates."""

import numpy as np
import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.sharding.annotations import OnConflict, annotate
from tests.framework.partial.partial_programs import (
    LINEAR,
    MESH,
    PARTIAL,
    REDUCED,
    argument,
    assert_same,
    check,
    compiled,
    gradients,
    partial,
    sent,
    sent_in_loops,
    split,
    to,
)


def read_dp(*weights):
    """Weights whose gradients are unreduced along dp."""
    return [split(w, *[None] * w.shape.rank, reduced=["dp"]) for w in weights]


def accumulated(loss, weights, batch, *, steps=3):
    """Gradients by `weights` of the sum of `loss` over microbatches."""

    def body(i, totals):
        grads = gradients(lambda *w: loss(*read_dp(*w), batch[i]), *weights)
        return i + 1, [total + g for total, g in zip(totals, grads, strict=True)]

    start = [tf.zeros(w.shape) for w in weights]
    _, totals = tf.while_loop(
        lambda i, _: i < steps, body, (tf.constant(0), start), maximum_iterations=steps
    )
    return totals


def layers(w, x):
    """One layer after the other, in a loop over the stack of their weights."""
    return tf.while_loop(
        lambda i, _: i < w.shape[0],
        lambda i, x: (i + 1, tf.tanh(x @ w[i])),
        (tf.constant(0), x),
        maximum_iterations=w.shape[0],
    )[1]


def in_bfloat16(w, x):
    product = tf.cast(x, tf.bfloat16) @ tf.cast(w, tf.bfloat16)
    return tf.reduce_sum(tf.cast(product, tf.float32))


LOSSES = {
    "plain": (lambda w, x: tf.reduce_sum(tf.tanh(x @ w)), "[3,8@dp,6]", ["[6,4]"]),
    "bfloat16": (in_bfloat16, "[3,8@dp,6]", ["[6,4]"]),
    "embedding": (
        lambda w, ids: tf.reduce_sum(tf.gather(w, ids) ** 3),
        "s32[3,8@dp]",
        ["[5,4]"],
    ),
    "bias": (
        lambda w, b, x: tf.reduce_sum(tf.tanh(x @ w + b)),
        "[3,8@dp,6]",
        ["[6,4]", "[4]"],
    ),
    "stack": (
        lambda w, x: tf.reduce_sum(layers(w, x) ** 2),
        "[3,8@dp,6]",
        ["[2,6,6]"],
    ),
    "two_stacks": (
        lambda w, v, x: tf.reduce_sum(layers(v, tf.tanh(layers(w, x) @ v[0]))),
        "[3,8@dp,6]",
        ["[2,6,6]", "[2,6,6]"],
    ),
}


@pytest.mark.parametrize("scatter", [False, True], ids=["whole", "scattered"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_microbatches_are_reduced_once(name, scatter):
    loss, batch, weights = LOSSES[name]
    specs = [argument(text)[0] for text in weights]
    wide = [next(i for i, n in enumerate(s.shape) if n % 2 == 0) for s in specs]

    def end(g, dim):
        return to(
            g, *["dp" if scatter and i == dim else None for i in range(g.shape.rank)]
        )

    def fn(x, *weights):
        grads = accumulated(loss, weights, x)
        return [end(g, dim) for g, dim in zip(grads, wide, strict=True)]

    sends = []
    for spec, dim in zip(specs, wide, strict=True):
        shape = [
            n // 2 if scatter and i == dim else n for i, n in enumerate(spec.shape)
        ]
        kind = "reduce-scatter" if scatter else "all-reduce"
        sends.append(f"{kind} dp [{','.join(map(str, shape))}]")
    check(fn, batch, *weights, sends=sends, integers=name == "bfloat16")


def test_two_loops_of_microbatches():
    def fn(x, w):
        def outer(i, total):
            (grad,) = accumulated(lambda w, x: tf.reduce_sum(tf.tanh(x @ w)), [w], x[i])
            return i + 1, total + grad

        _, total = tf.while_loop(
            lambda i, _: i < 2,
            outer,
            (tf.constant(0), tf.zeros(w.shape)),
            maximum_iterations=2,
        )
        return to(total, None, None)

    check(fn, "[2,3,8@dp,6]", "[6,4]", sends=["all-reduce dp [6,4]"])


def test_what_is_asked_after_a_loop_is_carried_through_it():
    """Nothing in the loop says that its sum is to be unreduced."""

    def fn(x, y):
        _, total = tf.while_loop(
            lambda i, _: i < 3,
            lambda i, total: (i + 1, 0.5 * total + x[i] @ y),
            (tf.constant(0), tf.zeros([4, 6])),
            maximum_iterations=3,
        )
        return to(split(total, None, None, unreduced=["tp"]), None, None)

    check(fn, "[3,4,8@tp]", "[8@tp,6]", sends=[REDUCED])


def test_a_loop_may_begin_with_a_partial_sum():
    def fn(x, y, w):
        _, total = tf.while_loop(
            lambda i, _: i < 3,
            lambda i, total: (i + 1, total @ w + total),
            (tf.constant(0), partial(x, y)),
            maximum_iterations=3,
        )
        return to(total, None, None)

    check(fn, *PARTIAL, "[6,6]", sends=[REDUCED])


def test_a_loop_may_only_read_a_partial_sum():
    def fn(x, y):
        p = partial(x, y)
        _, total = tf.while_loop(
            lambda i, _: i < 3,
            lambda i, total: (i + 1, total + p),
            (tf.constant(0), tf.zeros([4, 6])),
            maximum_iterations=3,
        )
        return to(total, None, None)

    check(fn, *PARTIAL, sends=[REDUCED])


def test_linear_ops_on_what_a_loop_carries():
    """All of them in one body, each with a factor of its own."""
    ops = [op for name, op in LINEAR.items() if name != "bfloat16"]

    def body(i, p, w):
        sums = [tf.reduce_sum(op(p, w)) / (9.0 + n) for n, op in enumerate(ops)]
        return i + 1, 0.5 * p + tf.add_n(sums) / 99.0, w

    def fn(x, y, w):
        _, total, _ = tf.while_loop(
            lambda i, *_: i < 3,
            body,
            (tf.constant(0), partial(x, y), split(w, None, None)),
            maximum_iterations=3,
        )
        return to(total, None, None)

    check(fn, *PARTIAL, "[6,6]", sends=[REDUCED])


def test_a_loop_may_exchange_what_it_carries():
    """The second begins as zeros, and is found unreduced in the second round."""

    def fn(x, y):
        _, a, b = tf.while_loop(
            lambda i, *_: i < 3,
            lambda i, a, b: (i + 1, b, a + b),
            (tf.constant(0), partial(x, y), tf.zeros([4, 6])),
            maximum_iterations=3,
        )
        return to(a, None, None), to(b, None, "tp")

    check(fn, *PARTIAL, sends=[REDUCED, "reduce-scatter tp [4,3]"])


def test_weights_that_a_loop_reads_whole():
    """The gradient is added up in the loop of the backward pass."""

    def fn(x, w):
        def loss(w):
            (w,) = read_dp(w)
            _, h = tf.while_loop(
                lambda i, _: i < 3,
                lambda i, h: (i + 1, tf.tanh(h @ w + x[i])),
                (tf.constant(0), tf.zeros([8, 6])),
                maximum_iterations=3,
            )
            return tf.reduce_sum(h)

        return to(*gradients(loss, w), None, None)

    check(fn, "[3,8@dp,6]", "[6,6]", sends=["all-reduce dp [6,6]"])


def test_gradients_of_microbatches_that_are_stacked_first():
    def fn(x, w):
        def body(i, stack):
            grads = gradients(lambda w: tf.reduce_sum(tf.tanh(x[i] @ read_dp(w)[0])), w)
            return i + 1, stack.write(i, grads[0])

        stack = tf.TensorArray(tf.float32, 3, element_shape=[6, 4])
        _, stack = tf.while_loop(
            lambda i, _: i < 3, body, (tf.constant(0), stack), maximum_iterations=3
        )
        return to(tf.reduce_sum(stack.stack(), 0), None, None)

    check(fn, "[3,8@dp,6]", "[6,4]", sends=["all-reduce dp [6,4]"])


def loop(body, *start):
    """Three rounds of `body`, which reads the round and gives what is carried."""
    final = tf.while_loop(
        lambda i, *_: i < 3,
        lambda i, *carried: [i + 1, *body(i, *carried)],
        [tf.constant(0), *start],
        maximum_iterations=3,
    )
    return final[1:]


def unreduced(x):
    return split(x, *[None] * x.shape.rank, unreduced=["tp"])


def unsharded(x):
    return to(x, *[None] * x.shape.rank)


STACKED = ("[3,4,8@tp]", "[8@tp,6]")


def one_by_another(x, y):
    """`b` is a sum for what `a` makes of it, when `c` has been looked at already."""

    def body(i, a, b, c):
        return a + x[i] @ y, b + a, c + tf.reduce_sum(b, 0)

    a, b, c = loop(body, *[tf.zeros([4, 6])] * 2, tf.zeros([6]))
    return unsharded(unreduced(c)), tf.nn.relu(a), b


def twice_first(x, y):
    (a,) = loop(lambda i, a: [a + x[i] @ y], tf.zeros([4, 6]))
    double = unreduced(2.0 * a)
    return unsharded(unreduced(a)), unsharded(double)


def twice_last(x, y):
    (a,) = loop(lambda i, a: [a + x[i] @ y], tf.zeros([4, 6]))
    return unsharded(unreduced(a)), unsharded(unreduced(2.0 * a))


def ended_in_a_later_round(x, y):
    """`b` is unreduced from the second round on; each round adds it up."""

    def body(i, a, b, c):
        return unreduced(x[i] @ y), a, c + tf.nn.relu(unsharded(b))

    return loop(body, *[tf.zeros([4, 6])] * 3)[2]


def read_whole_inside(x, y):
    """Nothing calls `a` unreduced inside of the loop."""

    def body(i, a, b):
        return a + x[i] @ y, b + tf.nn.relu(a)

    a, b = loop(body, *[tf.zeros([4, 6])] * 2)
    return unsharded(tf.reduce_sum(unreduced(a), 0)), b


def of_a_branch_in_a_loop(x, y):
    def body(i, a):
        grown = tf.cond(i > 0, lambda: a + x[i] @ y, lambda: 2.0 * (x[0] @ y))
        return [grown]

    return unsharded(unreduced(loop(body, tf.zeros([4, 6]))[0]))


def of_a_loop_in_a_loop(x, y):
    def body(i, a, b):
        (inner,) = loop(lambda j, c: [c + b + x[j] @ y], a)
        return inner, a

    a, b = loop(body, *[tf.zeros([4, 6])] * 2)
    return unsharded(unreduced(a)), tf.nn.relu(b)


@pytest.mark.parametrize(
    "fn",
    [
        one_by_another,
        twice_first,
        twice_last,
        ended_in_a_later_round,
        read_whole_inside,
        of_a_branch_in_a_loop,
        of_a_loop_in_a_loop,
    ],
)
def test_sums_that_loops_carry_for_each_other(fn):
    for _ in compiled(fn, *STACKED):
        pass


def test_branches_may_give_a_partial_sum():
    def fn(x, y, yes):
        p = partial(x, y)
        first = tf.cond(yes, lambda: 2.0 * p, lambda: x @ y + p)
        either = tf.cond(yes, lambda: tf.zeros([4, 6]), lambda: first)
        return unsharded(tf.reduce_sum(either, 0))

    check(fn, *PARTIAL, "pred[]", sends=["all-reduce tp [6]"])


def test_others_may_read_a_loops_sum_whole():
    def fn(x, y):
        _, total = tf.while_loop(
            lambda i, _: i < 3,
            lambda i, total: (i + 1, total + x[i] @ y),
            (tf.constant(0), tf.zeros([4, 6])),
            maximum_iterations=3,
        )
        p = split(total, None, None, unreduced=["tp"])
        return tf.exp(total / 9.0), to(tf.reduce_sum(p, 0), None)

    check(fn, "[3,4,8@tp]", "[8@tp,6]", sends=[REDUCED, "all-reduce tp [6]"])


def test_a_branch_may_make_and_end_a_partial_sum():
    def fn(x, y, yes):
        return tf.cond(
            yes, lambda: to(2.0 * partial(x, y), None, None), lambda: tf.ones([4, 6])
        )

    check(fn, *PARTIAL, "pred[]", sends=[REDUCED])


def test_a_branch_may_end_a_partial_sum_from_outside():
    def fn(x, y, yes):
        p = partial(x, y)
        return tf.cond(yes, lambda: to(2.0 * p, None, None), lambda: tf.ones([4, 6]))

    check(fn, *PARTIAL, "pred[]", sends=[REDUCED])


def decayed(w, x):
    """A loss with a term that no axis splits, so its gradient is no sum over dp."""
    return tf.reduce_sum(tf.tanh(x @ w)) + tf.reduce_sum(w**2)


READ = mw.Sharding.parse(MESH, "[_,_]{R:dp}")


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_gradient_that_is_no_sum_is_reduced_at_once_where_that_is_allowed(factor):
    def fn(x, w):
        def loss(w):
            return decayed(annotate(w, READ, on_conflict=OnConflict.REDUCE), x)

        (g,) = gradients(loss, w)
        return to(factor * g if factor < 1.0 else g, None, None)

    check(fn, "[8@dp,6]", "[6,4]", sends=["all-reduce dp [6,4]"])


def test_such_a_gradient_is_reduced_in_the_loop_and_others_after_it():
    def fn(x, w, v):
        def body(i, totals):
            def loss(w, v):
                w, v = (
                    annotate(weight, READ, on_conflict=OnConflict.REDUCE)
                    for weight in (w, v)
                )
                return decayed(w, x[i]) + tf.reduce_sum(tf.tanh(x[i] @ v))

            grads = gradients(loss, w, v)
            return i + 1, [total + g for total, g in zip(totals, grads, strict=True)]

        start = (tf.constant(0), [tf.zeros([6, 4]), tf.zeros([6, 4])])
        _, totals = tf.while_loop(lambda i, _: i < 3, body, start, maximum_iterations=3)
        return [to(total / 3.0, None, None) for total in totals]

    for program in compiled(fn, "[3,8@dp,6]", "[6,4]", "[6,4]"):
        assert sent(program) == ["all-reduce dp [6,4]"] * 2
        assert len(sent_in_loops(program)) == 1


def test_such_a_gradient_is_reduced_where_something_not_linear_reads_it():
    """As clipping does, in the loop; another weight's is reduced after it."""

    def fn(x, w, v):
        def body(i, totals):
            def loss(w, v):
                w, v = (
                    annotate(weight, READ, on_conflict=OnConflict.REDUCE)
                    for weight in (w, v)
                )
                return tf.reduce_sum(tf.tanh(x[i] @ w)) + tf.reduce_sum(x[i] @ v)

            first, other = gradients(loss, w, v)
            return i + 1, [totals[0] + tf.tanh(2.0 * first), totals[1] + other]

        start = (tf.constant(0), [tf.zeros([6, 4]), tf.zeros([6, 4])])
        _, totals = tf.while_loop(lambda i, _: i < 3, body, start, maximum_iterations=3)
        return [to(total, None, None) for total in totals]

    for program in compiled(fn, "[3,8@dp,6]", "[6,4]", "[6,4]"):
        assert sent(program) == ["all-reduce dp [6,4]"] * 2
        assert len(sent_in_loops(program)) == 1


def test_what_else_is_pending_is_reduced_by_such_an_annotation():
    """Along an axis that splits a dim after it, so right onto its shards."""

    def fn(x, y):
        sharding = mw.Sharding.parse(MESH, "[tp,_]{U:dp}")
        return to(
            annotate(partial(x, y), sharding, on_conflict=OnConflict.REDUCE), "tp", None
        )

    check(fn, *PARTIAL, sends=["reduce-scatter tp [2,6]"])


def momentum(state, x):
    """A step of SGD, of microbatches."""
    (g,) = accumulated(
        lambda w, x: tf.reduce_sum(tf.tanh(x @ w)) / 24.0, [state["w"]], x
    )
    m = 0.9 * state["m"] + to(g, None, None)
    return {"state": {"w": state["w"] - m, "m": m}}


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_sharded_updates_reduce_what_is_pending_onto_their_shards(partitioner):
    replicated = mw.Sharding.replicated(MESH, 2)
    state, (batch, sharding) = tf.TensorSpec([6, 4]), argument("[3,8@dp,6]")
    rng = np.random.default_rng(0)
    value = {name: rng.normal(size=[6, 4]).astype(np.float32) for name in ("w", "m")}
    x = rng.normal(size=[3, 8, 6]).astype(np.float32)
    program = mw.compile_program(
        momentum,
        [{"w": state, "m": state}, batch],
        MESH,
        in_shardings=[{"w": replicated, "m": replicated}, sharding],
        out_shardings={"state": {"w": replicated, "m": replicated}},
        partitioner=partitioner,
        update_sharding=mw.UpdateSharding(
            mode=mw.WeightUpdateSharding.ALL, data_axes=("dp",)
        ),
    )
    (line,) = program.updates.sharded
    assert line.names == ("m", "w")
    want = tf.nest.map_structure(
        np.asarray, momentum(tf.nest.map_structure(tf.constant, value), x)
    )
    assert_same(program.unshard(program(value, x)), want, partitioner.value)
    sends = sent(program)
    (scattered,) = [send for send in sends if "all-gather" not in send]
    assert scattered in ("reduce-scatter dp [3,4]", "reduce-scatter dp [6,2]"), sends
    assert not sent_in_loops(program)
