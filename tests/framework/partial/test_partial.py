"""Partial sums: carried through programs, and added up where the program says so."""

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
    check,
    compiled,
    gradients,
    partial,
    sent,
    split,
    sum_of_two_axes,
    to,
    traced,
)


def mlp(x, w1, w3, w2):
    """The gated MLP of "Replicate forwards, partial backwards"."""
    x = split(x, None, "dp", None, reduced=["tp"])
    w1, w3 = (split(w, None, "tp", reduced=["dp"]) for w in (w1, w3))
    w2 = split(w2, "tp", None, reduced=["dp"])
    h1, h3 = (tf.einsum("sbh,hi->sbi", x, w) for w in (w1, w3))
    out = tf.einsum("sbi,ih->sbh", tf.nn.silu(h1) * h3, w2)
    return split(out, None, "dp", None, unreduced=["tp"])


def test_gated_mlp_reduces_activations_over_tp_and_weights_over_dp():
    batch, into, out = (None, "dp", None), (None, "tp"), ("tp", None)

    def step(x, w1, w3, w2, g):
        args = (x, w1, w3, w2)
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = mlp(*args)
        gradients = tape.gradient(y, args, output_gradients=split(g, *batch))
        dims = (batch, into, into, out)
        return to(y, *batch), [to(g, *d) for g, d in zip(gradients, dims, strict=True)]

    types = ["[3,4@dp,6]", "[6,8@tp]", "[6,8@tp]", "[8@tp,6]", "[3,4@dp,6]"]
    activation = ["all-reduce tp [3,2,6]"] * 2
    weights = ["all-reduce dp [6,4]"] * 2 + ["all-reduce dp [4,6]"]
    for program in compiled(step, *types):
        assert sent(program) == sorted(activation + weights)
        # One collective for both activations, one for all weights.
        assert len(program.collectives()) == 2


BOTH = ("[4,8@dp.tp]", "[8@dp.tp,6]")


def twice(value, first, second):
    """Resharded to one type and then to another."""
    return to(to(value, *first[0], **first[1]), *second[0], **second[1])


def type_(*dims, **types):
    return dims, types


WHOLE = type_(None, None)
UNREDUCED = type_(None, None, unreduced=["tp"])
CONVERSIONS = [
    pytest.param(
        lambda x, y: to(partial(x, y), None, None), PARTIAL, [REDUCED], id="all_reduce"
    ),
    pytest.param(
        lambda x, y: to(partial(x, y), None, "tp"),
        PARTIAL,
        ["reduce-scatter tp [4,3]"],
        id="reduce_scatter",
    ),
    pytest.param(
        lambda x, y: to(split(x @ y, "dp", None, unreduced=["tp"]), "dp", "tp"),
        ("[4@dp,8@tp]", "[8@tp,6]"),
        ["reduce-scatter tp [2,3]"],
        id="scatter_with_another_dim_split",
    ),
    pytest.param(
        lambda x, y: twice(
            partial(x, y), type_(None, "tp", unreduced=["dp"]), type_(None, "tp")
        ),
        PARTIAL,
        ["reduce-scatter tp [4,3]", "all-reduce dp [4,3]"],
        id="scattered_where_another_begins",
    ),
    pytest.param(
        lambda x, y: to(sum_of_two_axes(x, y), None, None),
        BOTH,
        ["all-reduce dp,tp [4,6]"],
        id="two_axes_at_once",
    ),
    pytest.param(
        lambda x, y: to(sum_of_two_axes(x, y), ("tp", "dp"), None),
        BOTH,
        ["reduce-scatter dp [1,6]", "reduce-scatter tp [2,6]"],
        id="two_axes_scattered",
    ),
    pytest.param(
        lambda x, y: twice(2.0 * sum_of_two_axes(x, y), UNREDUCED, WHOLE),
        BOTH,
        ["all-reduce dp [1,4,6]", REDUCED],
        id="one_axis_after_the_other",
    ),
    pytest.param(
        lambda x, y: twice(
            sum_of_two_axes(x, y),
            type_("dp", None, unreduced=["tp"]),
            type_("dp", None),
        ),
        BOTH,
        ["reduce-scatter dp [2,6]", "all-reduce tp [2,6]"],
        id="one_axis_scattered_after_the_other",
    ),
    pytest.param(
        lambda x, y: twice(partial(x, y), UNREDUCED, WHOLE),
        PARTIAL,
        [REDUCED],
        id="same_type",
    ),
    pytest.param(
        lambda x, y: twice(
            partial(x, y),
            type_("dp", None, unreduced=["tp"]),
            type_("dp", None),
        ),
        PARTIAL,
        ["all-reduce tp [2,6]"],
        id="pending_splits_another_dim",
    ),
    pytest.param(
        lambda x, y, z: to(
            partial(x, y) + to(z, *UNREDUCED[0], **UNREDUCED[1]), None, "tp"
        ),
        (*PARTIAL, "[4,6]"),
        ["reduce-scatter tp [4,3]"],
        id="whole_and_pending",
    ),
    pytest.param(
        lambda x: twice(tf.exp(x), UNREDUCED, WHOLE),
        ("[4,6]",),
        [REDUCED],
        id="whole_to_pending_and_back",
    ),
    pytest.param(
        lambda x, y: to(
            twice(partial(x, y), type_(None, None, unreduced=["dp", "tp"]), UNREDUCED),
            *WHOLE[0],
        ),
        PARTIAL,
        ["all-reduce dp [1,4,6]", REDUCED],
        id="a_second_axis_begins",
    ),
]


@pytest.mark.parametrize("fn,types,sends", CONVERSIONS)
def test_conversions(fn, types, sends):
    check(fn, *types, sends=sends)


def test_an_uneven_dim_is_reduced_and_cut():
    def fn(x, y):
        return to(partial(x, y), "tp", None)

    out = argument("[5@tp,6]")[1]
    check(
        fn,
        "[5,8@tp]",
        "[8@tp,6]",
        sends=["all-reduce tp [5,6]"],
        out_shardings=out,
    )


def weighed(y, like):
    """A loss of which all elements of `y` have gradients of their own."""
    return tf.reduce_sum(y * like)


BACKWARD = [
    pytest.param(lambda y: to(y, None, None), [], id="to_whole"),
    pytest.param(lambda y: to(y, None, "tp"), ["all-gather tp [4,6]"], id="to_split"),
    pytest.param(
        lambda y: twice(y, UNREDUCED, WHOLE), [], id="from_unreduced_to_unreduced"
    ),
    pytest.param(
        lambda y: to(
            y + to(tf.ones([4, 6]), *UNREDUCED[0], **UNREDUCED[1]), None, None
        ),
        [],
        id="whole_to_pending",
    ),
]


@pytest.mark.parametrize("end,sends", BACKWARD)
def test_gradients_of_conversions(end, sends):
    """What is unreduced has a gradient that is reduced, which costs nothing."""

    def fn(x, y, like):
        return gradients(lambda x, y: weighed(end(partial(x, y)), like), x, y)

    check(fn, *PARTIAL, "[4,6]", sends=sends)


@pytest.mark.parametrize(
    "read,reductions",
    [
        pytest.param(lambda w: w, 1, id="reduced"),
        # What is whole has a gradient that is; it is made unreduced to be added up.
        pytest.param(lambda w: to(w, None, None), 2, id="reduced_to_whole"),
    ],
)
def test_the_gradient_of_a_reduced_tensor_is_pending(read, reductions):
    def fn(x, w):
        def loss(w):
            return tf.reduce_sum(
                tf.tanh(x @ read(split(w, None, None, reduced=["dp"])))
            )

        (g,) = gradients(loss, w)
        return to(g, None, None)

    check(fn, "[8@dp,6]", "[6,4]", sends=["all-reduce dp [6,4]"] * reductions)


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_op_is_computed_part_by_part(name):
    """Whole numbers: even a conversion to bfloat16 does not round them."""
    op = LINEAR[name]
    shape = op(tf.zeros([4, 6]), tf.zeros([6, 6])).shape
    rng = np.random.default_rng(1)
    like = rng.integers(1, 4, shape).astype(np.float32)

    def fn(x, y, w):
        def end(x, y):
            return to(op(partial(x, y), split(w, None, None)), *[None] * len(shape))

        return end(x, y), gradients(lambda x, y: weighed(end(x, y), like), x, y)

    sends = [f"all-reduce tp [{','.join(map(str, shape))}]"]
    check(fn, *PARTIAL, "[6,6]", sends=sends, integers=True)


@pytest.mark.parametrize("unreduced,other", [("dp", "tp"), ("tp", "dp")])
def test_a_dim_split_by_two_axes_of_which_one_is_pending(unreduced, other):
    def fn(x, y):
        p = split(tf.einsum("bm,bn->mn", x, y), None, None, unreduced=[unreduced])
        return to(3.0 * p, None, None)

    sends = [f"all-reduce {unreduced} [6,4]", f"all-reduce {other} [1,6,4]"]
    check(fn, "[8@dp.tp,6]", "[8@dp.tp,4]", sends=sends)


def test_sums_of_complex_numbers():
    def fn(x, y):
        p = partial(tf.cast(x, tf.complex64), tf.cast(y, tf.complex64))
        total = p - 3 * p + tf.zeros([4, 6], tf.complex64)
        return tf.math.real(to(total, None, None))

    check(fn, *PARTIAL, sends=[REDUCED], integers=True)


@pytest.mark.parametrize("dtype", [tf.int32, tf.uint32, tf.int16, tf.uint8])
def test_sums_of_whole_numbers_wrap_around(dtype):
    """As they do on one device: modulo 2^n parts are exact, of fewer bits too."""

    def fn(x, y):
        p = partial(tf.cast(x, tf.int32) * (2**30 + 77), tf.cast(y, tf.int32))
        total = to(tf.cast(p - 3 * p, dtype), None, None)
        return tf.math.floormod(total, tf.constant(251, dtype))

    check(fn, *PARTIAL, sends=[REDUCED], integers=True)


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_a_sum_that_is_cast_to_fewer_bits_is_rounded_part_by_part(partitioner):
    def fn(x, y):
        p = partial(x, y)
        parts = to(tf.cast(p, tf.bfloat16), None, None)
        return tf.cast(parts, tf.float32), tf.cast(to(p, None, None), tf.bfloat16)

    program = traced(fn, "[1,2@tp]", "[2@tp,1]", partitioner=partitioner).compile()
    x, y = np.array([[256.75, 0.75]], np.float32), np.ones([2, 1], np.float32)
    parts, total = program.unshard(program(x, y))
    assert (parts[0, 0], total[0, 0]) == (256.0, 258.0)


def test_a_sum_of_elements_may_be_pending():
    def fn(x):
        p = split(tf.reduce_sum(tf.exp(x), [0, 2]), None, unreduced=["dp"])
        return to(p / 8.0, None)

    check(fn, "[8@dp,6,3]", sends=["all-reduce dp [6]"])


_GATHERED = pytest.mark.xfail(
    strict=True, reason="in the region along dp GSPMD forgets that tp splits the rows"
)


@pytest.mark.parametrize(
    "partitioner",
    [mw.Partitioner.SHARDY, pytest.param(mw.Partitioner.GSPMD, marks=_GATHERED)],
)
def test_an_embedding_that_another_axis_splits(partitioner):
    def fn(table, ids):
        def loss(table):
            rows = tf.gather(split(table, None, "tp", reduced=["dp"]), ids)
            return tf.reduce_sum(tf.sin(rows))

        return to(*gradients(loss, table), None, "tp")

    sends = ["all-reduce dp [5,2]"]
    check(fn, "[5,4@tp]", "s32[8@dp]", sends=sends, partitioners=[partitioner])


def test_devices_in_another_order():
    mesh = mw.DeviceMesh(("dp", "tp"), (2, 2), (3, 1, 0, 2))

    def fn(x, y, z):
        p = split(x @ y, None, None, mesh=mesh, unreduced=["tp"])
        summed = to(tf.exp(z), None, None, mesh=mesh, unreduced=["dp"])
        return to(p, "tp", None, mesh=mesh), to(summed, None, "dp", mesh=mesh)

    sends = ["reduce-scatter tp [2,6]", "reduce-scatter dp [4,3]"]
    check(fn, *PARTIAL, "[4,6]", mesh=mesh, sends=sends)


def convolved(mesh, *dims, stride=1):
    """The gradient by a kernel, added up once it is unreduced."""

    def fn(x, w):
        def loss(w):
            w = split(w, *dims, mesh=mesh, reduced=["dp"])
            return tf.reduce_sum(tf.nn.conv2d(x, w, stride, "SAME") ** 2)

        (g,) = gradients(loss, w)
        return to(g, *dims, mesh=mesh)

    return fn


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("mesh", [mw.DeviceMesh(("dp",), (4,)), MESH], ids=str)
def test_the_gradient_of_a_convolution_by_its_weights(mesh, stride):
    """On a mesh with another axis too, where that does not split it."""
    fn = convolved(mesh, *[None] * 4, stride=stride)
    sends = ["all-reduce dp [3,3,3,2]"]
    check(fn, "[4@dp,5,5,3]", "[3,3,3,2]", mesh=mesh, sends=sends)


def test_a_convolution_that_another_axis_splits_is_reduced_at_once():
    fn = convolved(MESH, None, None, None, "tp")
    with pytest.raises(mw.LoweringError, match="convolution's that other axes split"):
        traced(fn, "[4@dp,5,5,3]", "[3,3,3,2@tp]")


def test_a_partial_sum_that_is_read_twice():
    def fn(x, y):
        p = partial(x, y)
        return to(tf.reduce_sum(p, 0), None), to(p, None, "tp")

    check(fn, *PARTIAL, sends=["all-reduce tp [6]", "reduce-scatter tp [4,3]"])


def test_others_may_read_whole_what_one_annotation_calls_unreduced():
    def fn(x, y):
        z = x @ y
        return tf.nn.relu(z), to(
            tf.reduce_sum(split(z, None, None, unreduced=["tp"]), 0), None
        )

    check(fn, *PARTIAL, sends=[REDUCED, "all-reduce tp [6]"])


def test_a_manual_region_takes_a_sum_that_may_be_reduced():
    def fn(x, y):
        sharding = mw.Sharding.parse(MESH, "[_,_]{U:tp}")
        p = annotate(x @ y, sharding, on_conflict=OnConflict.REDUCE)
        if tf.executing_eagerly():
            return 2.0 * p
        border = {"dims_mapping": ["dp", None], "manual_axes": ["dp"]}
        local = mw.auto_to_manual(p, MESH, **border)
        return mw.manual_to_auto(2.0 * local, MESH, **border)

    check(fn, *PARTIAL, sends=[REDUCED])


def test_axes_of_one_device_have_nothing_pending():
    mesh = mw.DeviceMesh(("dp", "tp"), (4, 1))

    def fn(x, y):
        p = split(x @ y, "dp", None, mesh=mesh, unreduced=["tp"])
        return tf.nn.relu(p), to(p, "dp", None, mesh=mesh)

    check(fn, "[4@dp,8]", "[8,6]", mesh=mesh, sends=[])


def test_what_a_reshard_splits_is_summed_in_parts():
    """As by a second tensor-parallel layer."""

    def two_layers(x, w, v):
        h = to(split(x @ w, "dp", None, unreduced=["tp"]), "dp", "tp")
        return to(split(h @ v, "dp", None, unreduced=["tp"]), "dp", None)

    check(
        two_layers,
        "[4@dp,8@tp]",
        "[8@tp,6]",
        "[6@tp,2]",
        sends=["reduce-scatter tp [2,3]", "all-reduce tp [2,2]"],
    )
