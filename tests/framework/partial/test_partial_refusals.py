"""Programs that are refused, as no device could compute them on its parts of a sum."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.compiler.xla import xla_data_pb2

from meshwright import framework as mw
from tests.framework.partial.partial_programs import (
    MESH,
    PARTIAL,
    argument,
    partial,
    split,
    sum_of_two_axes,
    to,
    traced,
)
from tests.framework.types.typed import refused


def refusal(fn, *types, **how):
    with pytest.raises(mw.LoweringError) as caught:
        traced(fn, *types, name="step", **how)
    return str(caught.value)


def no_sum(x, y):
    return x[:, :6] + y[:4]


def whole_too(x, y):
    return partial(x, y) + split(y[:4], None, None)


def decides(x, y):
    return tf.while_loop(
        lambda p: tf.reduce_sum(p) < 9.0, lambda p: [2.0 * p], [partial(x, y)]
    )[0]


def comes_to_decide(x, y):
    """What it starts with is zeros, unreduced only after the first round."""
    p = partial(x, y)
    return tf.while_loop(
        lambda a, i: (tf.reduce_sum(a) < 9.0) & (i < 3),
        lambda a, i: [2.0 * p, i + 1],
        [tf.zeros([4, 6]), 0],
    )[0]


def whole_numbers(x, y):
    return partial(tf.cast(x, tf.int32), tf.cast(y, tf.int32))


def whole_number_division(x, y):
    return tf.truncatediv(whole_numbers(x, y), 3)


def other_axes(x, y):
    return split(2.0 * sum_of_two_axes(x, y), None, None, unreduced=["tp"])


def out_of_a_branch(x, y):
    p = partial(x, y)
    return tf.cond(tf.reduce_sum(x) > 0.0, lambda: 2.0 * p, lambda: -p)


def of_two_axes(read):
    """What `read` makes of a tensor, unreduced along other axes than the tensor."""

    def fn(x, y):
        a = read(x, y)
        part = split(a, None, None, unreduced=["tp"])
        other = split(2.0 * a, None, None, unreduced=["dp", "tp"])
        return to(part, None, None), to(other, None, None)

    return fn


def in_a_loop(x, y):
    return tf.while_loop(
        lambda i, a: i < 3,
        lambda i, a: [i + 1, a + x @ y],
        [0, tf.zeros([4, 6])],
        maximum_iterations=3,
    )[1]


def in_a_branch(x, y):
    return tf.cond(x[0, 0] > 0.0, lambda: x @ y, lambda: tf.zeros([4, 6]))


def counted_in_batches(rows, ids):
    """Of each batch the sums of rows of the same id."""
    numbers = xla_data_pb2.ScatterDimensionNumbers(
        update_window_dims=[2],
        inserted_window_dims=[1],
        scatter_dims_to_operand_dims=[1],
        index_vector_dim=2,
        input_batching_dims=[0],
        scatter_indices_batching_dims=[0],
    )
    scalar = tf.TensorSpec([])
    add = tf.function(tf.add).get_concrete_function(scalar, scalar)
    sums = xla.scatter(tf.zeros([4, 5, 3]), ids, rows, add, numbers, False)
    return split(sums, None, None, None, unreduced=["tp"])


_NOT_LINEAR = "it is not linear in a sum unreduced along tp; reshard it to"
REFUSALS = {
    "nonlinear": (
        lambda x, y: tf.nn.relu(partial(x, y)),
        "op 'Relu' (partial/test_partial_refusals.py:{}) computes maximum of "
        "f32[4, 6]{{U:tp}} and f32[4, 6]: it is not linear in a sum unreduced along "
        "tp; reshard it to [_,_] before",
    ),
    "maximum": (lambda x, y: tf.reduce_max(partial(x, y)), _NOT_LINEAR),
    "to_integers": (lambda x, y: tf.cast(partial(x, y), tf.int32), _NOT_LINEAR),
    "whole_numbers_to_floats": (
        lambda x, y: tf.cast(whole_numbers(x, y), tf.float32),
        "it is not linear in a sum unreduced along tp, as a part may wrap around, or "
        "be rounded, where their sum is not; reshard it to [_,_] before",
    ),
    "whole_numbers_to_more_bits": (
        lambda x, y: tf.cast(whole_numbers(x, y), tf.int64),
        "as a part may wrap around",
    ),
    "product_of_two": (
        lambda x, y: partial(x, y) * partial(x, y),
        "op 'mul' (partial/test_partial_refusals.py:{}) multiplies f32[4, 6]{{U:tp}} "
        "and f32[4, 6]{{U:tp}}: a product of sums unreduced along tp is not the sum of "
        "products; reshard it to [_,_] before",
    ),
    "matrix_product_of_two": (
        lambda x, y: tf.matmul(partial(x, y), partial(x, y), transpose_b=True),
        "a product of sums unreduced along tp is not the sum of products",
    ),
    "product_along_other_axes": (
        lambda x, y: partial(x, y) * to(y[:4], None, None, unreduced=["dp"]),
        "of a product one factor may be unreduced",
    ),
    "divisor": (lambda x, y: 1.0 / partial(x, y), _NOT_LINEAR),
    "added_to_whole": (
        whole_too,
        "op 'add' (partial/test_partial_refusals.py:{}) adds f32[4, 6]{{U:tp}} and "
        "f32[4, 6]: a partial sum along tp and a replicated tensor; reshard the first "
        "to [_,_], or the second to [_,_]{{U:tp}}",
    ),
    "a_number_is_added": (
        lambda x, y: partial(x, y) + 1.0,
        "a partial sum along tp and a constant other than zero; reshard the first",
    ),
    "padded_with_ones": (
        lambda x, y: tf.pad(partial(x, y), [[1, 0], [0, 0]], constant_values=1.0),
        _NOT_LINEAR,
    ),
    "joined_with_whole": (
        lambda x, y: tf.concat([partial(x, y), y], 0),
        "a partial sum along tp and a split tensor; reshard the first to [_,_]",
    ),
    "annotated_plainly": (
        lambda x, y: split(2.0 * partial(x, y), None, None),
        "it would drop the sum unreduced along tp; reshard says where it is added up: "
        "reshard it to [_,_]",
    ),
    "annotated_as_reduced": (
        lambda x, y: split(2.0 * partial(x, y), None, None, reduced=["tp"]),
        "it would drop the sum unreduced along tp",
    ),
    "leaves_the_program": (
        lambda x, y: 2.0 * partial(x, y),
        "op 'mul' (partial/test_partial_refusals.py:{}) gives f32[4, 6]{{U:tp}} as a "
        "result of the program: its sum is unreduced along tp, and a program's results "
        "are complete; reshard it to [_,_]",
    ),
    "leaves_a_branch": (lambda x, y: tf.nn.relu(out_of_a_branch(x, y)), _NOT_LINEAR),
    "whole_in_a_branch": (
        lambda x, y: tf.cond(x[0, 0] > 0, lambda: partial(x, y), lambda: y[:4]),
        "op 'cond' (partial/test_partial_refusals.py:{}) gives f32[4, 6]{{U:tp}} or "
        "f32[4@tp, 6], its result 0: branches of a conditional give one type",
    ),
    "decides_a_branch": (
        lambda x, y: tf.switch_case(
            whole_numbers(x, y)[0, 0],
            [lambda: x, lambda: -x],
        ),
        "is decided by s32[]{{U:tp}}: devices would not agree; reshard it to [] before",
    ),
    "decides_a_loop": (decides, _NOT_LINEAR),
    "comes_to_decide_a_loop": (comes_to_decide, _NOT_LINEAR),
    "whole_number_division": (whole_number_division, "it is not linear in a sum"),
    "nothing_pending": (
        lambda x, y: split(no_sum(x, y), None, None, unreduced=["tp"]),
        "takes f32[4, 6]: no sum is unreduced along tp, so it is not unreduced; "
        "reshard converts a replicated tensor to an unreduced one, [_,_] to "
        "[_,_]{{U:tp}}",
    ),
    "other_axis": (
        lambda x, y: split(x @ y, None, None, unreduced=["dp"]),
        "no sum is unreduced along dp, so it is not unreduced",
    ),
    "uneven": (
        lambda x, y: to(partial(x, y), None, None),
        "it is not a sum over dims that tp splits evenly",
        "[4,7@tp]",
        "[7@tp,6]",
    ),
    "an_argument": (
        lambda x, y: split(y, None, None, unreduced=["tp"]),
        "takes f32[8@tp, 6]: no sum is unreduced along tp",
    ),
    "a_batch_is_not_summed": (
        counted_in_batches,
        "takes f32[4, 5, 3]: no sum is unreduced along tp",
        "[4@tp,2,3]",
        "s32[4@tp,2,1]",
    ),
    "a_loop_along_two_sets_of_axes": (
        of_two_axes(in_a_loop),
        "takes f32[4, 6]{{sum?:dp,tp}} unreduced along dp, tp, which op 'while' "
        "(partial/test_partial_refusals.py:{}) has unreduced along tp for another op: "
        "a loop or a conditional has a tensor in parts along the same axes for all "
        "that read it; annotate these alike and reshard them",
        "[4,8@dp.tp]",
        "[8@dp.tp,6]",
    ),
    "a_branch_along_two_sets_of_axes": (
        of_two_axes(in_a_branch),
        "has unreduced along tp for another",
        "[4,8@dp.tp]",
        "[8@dp.tp,6]",
    ),
    "fewer_axes": (
        other_axes,
        "takes f32[4, 6]{{U:dp,tp}}: it would drop the sum unreduced along dp",
        "[4,8@dp.tp]",
        "[8@dp.tp,6]",
    ),
}
OTHERWISE = {
    "joined_with_whole": "it needs dim 0 of f32[8@tp, 6] unsharded",
    "whole_in_a_branch": "it needs dim 1 of f32[4, 8@tp] unsharded",
    "nothing_pending": "it needs dim 1 of f32[4, 8@tp] unsharded",
    "a_batch_is_not_summed": "takes f32[4@tp, 5, 3]: no sum is unreduced along tp",
    "a_loop_along_two_sets_of_axes": "",
    "a_branch_along_two_sets_of_axes": "it needs dim 1 of f32[4, 8@dp.tp] unsharded",
}
"""What the check of types says before, as it takes no communication that a program does
not write; nothing, of a program that only cannot be written as it asks.
"""


LINES = {
    "added_to_whole": whole_too.__code__.co_firstlineno + 1,
    "a_loop_along_two_sets_of_axes": in_a_loop.__code__.co_firstlineno + 1,
}
"""Of what is refused, where that is not the function's first."""


@pytest.mark.parametrize("name", REFUSALS)
def test_what_no_device_could_compute_on_its_part_is_refused(name):
    """By the compiler and by the check of types, with the same words."""
    fn, message, *types = REFUSALS[name]
    types = types or PARTIAL
    line = LINES.get(name, fn.__code__.co_firstlineno)
    text = refusal(fn, *types)
    assert text.startswith("step: op '") and message.format(line) in text, text
    given = [argument(of) for of in types]
    specs, shardings = zip(*given, strict=True)
    program = mw.explain_types(fn, specs, MESH, in_shardings=shardings, name="step")
    errors = [str(error) for error in program.errors]
    if name in OTHERWISE:
        assert text not in errors and OTHERWISE[name] in "".join(errors[:1])
    else:
        assert text in errors


def test_what_is_unreduced_is_so_over_the_programs_mesh():
    other = mw.DeviceMesh(("dp", "tp"), (1, 4))

    def fn(x, y):
        p = split(x @ y, None, None, mesh=other, unreduced=["tp"])
        return to(p, None, None, mesh=other)

    assert refusal(fn, *PARTIAL).endswith(
        "is annotated over the mesh (dp=1, tp=4), the program is compiled for (dp=2, "
        "tp=2): tensors are unreduced or reduced over the program's own mesh"
    )


def converted(x, axis, *dims):
    """Made unreduced along an axis, and added up again."""
    return to(2.0 * to(x, None, None, unreduced=[axis]), *dims)


def reduced_weight(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(split(x, None, None, reduced=["tp"]) ** 2)
    return tape.gradient(loss, x)


IN_REGIONS = {
    "a_sum": lambda x: split(x @ tf.ones([6, 6]), None, None, unreduced=["tp"]),
    "a_gradient": reduced_weight,
    "converted_to_whole": lambda x: converted(x, "tp", None, None),
    "converted_to_split": lambda x: converted(x, "tp", None, "tp"),
    "along_the_manual_axis": lambda x: converted(x, "dp", None, None),
    "in_a_loop": lambda x: tf.while_loop(
        lambda i, x: i < 3,
        lambda i, x: [i + 1, converted(x, "tp", None, None)],
        [0, x],
        maximum_iterations=3,
    )[1],
}


@pytest.mark.parametrize("name", IN_REGIONS)
def test_no_sum_is_pending_in_a_manual_region(name):
    def fn(x):
        local = mw.auto_to_manual(x, MESH, ["dp", None], manual_axes=["dp"])
        local = IN_REGIONS[name](local)
        return mw.manual_to_auto(local, MESH, ["dp", None], manual_axes=["dp"])

    text = (
        "no sum is unreduced in a manual region, which types do not reach into; along "
        "the region's own axes add it up by all_reduce or reduce_scatter, along others "
        "leave that to the partitioner"
    )
    assert text in refusal(fn, "[4@dp,6]")
    assert text in refused(fn, "f32[4@dp, 6]")


@pytest.mark.parametrize("border", ["in_shardings", "out_shardings"])
def test_no_sum_is_pending_at_the_border_of_a_program(border):
    unreduced = mw.Sharding.parse(MESH, "[_,_]{U:tp}")
    shardings = {border: [unreduced] if border == "in_shardings" else unreduced}
    message = (
        r"sharding \[_,_\]\{U:tp\} of an argument or result is unreduced along tp: a "
        "sum may be unreduced inside a program only; reshard it there"
    )
    with pytest.raises(ValueError, match=message):
        mw.compile_program(lambda x: x, [tf.TensorSpec([4, 6])], MESH, **shardings)


@pytest.mark.parametrize("write", [split, to])
def test_annotations_that_no_tensor_can_have_are_refused(write):
    x = tf.zeros([4, 6])
    name = "mesh_split" if write is split else "reshard"
    for dims, types, message in [
        ((None, "tp"), {"unreduced": ["tp"]}, "'tp' is used twice in one tensor"),
        ((None, None), {"unreduced": ["dp"], "reduced": ["dp"]}, "'dp' is used twice"),
        ((None, None), {"reduced": ["pp"]}, "unknown mesh axis 'pp'"),
        ((None,), {"unreduced": ["tp"]}, "is of rank 1, and the tensor of rank 2"),
    ]:
        with pytest.raises(ValueError, match=f"{name}: tensor has shape .*{message}"):
            write(x, *dims, **types)


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_a_program_may_be_checked_before_it_is_compiled(partitioner):
    rows = mw.Sharding.parse(MESH, "[dp,tp]"), mw.Sharding.parse(MESH, "[tp,_]")
    specs = [tf.TensorSpec([4, 8]), tf.TensorSpec([8, 6])]
    how = {"in_shardings": rows, "partitioner": partitioner, "check_types": True}

    def left_to_the_partitioner(x, w):
        return tf.nn.relu(x @ w)

    with pytest.raises(
        mw.ShardingTypeError, match="computes maximum of .*sum.:tp"
    ) as e:
        mw.compile_program(left_to_the_partitioner, specs, MESH, **how)
    with pytest.raises(mw.ShardingTypeError) as same:
        mw.check_types(left_to_the_partitioner, specs, MESH, in_shardings=rows)
    assert str(e.value) == str(same.value)
    program = mw.compile_program(
        lambda x, w: tf.nn.relu(split(x @ w, "dp", None)), specs, MESH, **how
    )
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=spec.shape).astype(np.float32) for spec in specs)
    np.testing.assert_allclose(
        program(x, w), np.maximum(x @ w, 0), rtol=1e-5, atol=1e-5
    )
