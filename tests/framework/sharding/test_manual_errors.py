"""What manual regions refuse, and how they say it."""

import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding import collectives, manual
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh

MESH = DeviceMesh(("X", "Y"), (2, 4))
X = tf.TensorSpec([8, 16])
over_partitioners = pytest.mark.parametrize("partitioner", list(Partitioner))


def into(x, dims=("X", None), **kwargs):
    return manual.auto_to_manual(x, MESH, dims, **kwargs)


def out(x, dims=("X", None), **kwargs):
    return manual.manual_to_auto(x, MESH, dims, **kwargs)


def mixed(x):
    with tf.name_scope("moe/dispatch"):
        return out(into(x) * tf.reduce_sum(x))


def of_two_regions(x):
    return out(into(x) + into(x, manual_axes=["X"]))


def manual_twice(x):
    return out(into(into(x)))


def never_left(x):
    return into(x)


def never_entered(x):
    return out(x)


def collective_outside(x):
    return collectives.all_reduce(x, MESH, "X")


def collective_along_an_automatic_axis(x):
    y = collectives.all_reduce(into(x, manual_axes=["X"]), MESH, "Y")
    return out(y, manual_axes=["X"])


def place_outside(x):
    return x + tf.cast(collectives.axis_index(MESH, "X"), x.dtype)


def annotated_by_a_manual_axis(x):
    y = mesh_split(into(x, manual_axes=["X"]), MESH, [None, "X"])
    return out(y, manual_axes=["X"])


def constant_summed_along_an_automatic_axis(x):
    summed = collectives.all_reduce(tf.ones([4, 16]), MESH, "Y")
    return out(into(x, manual_axes=["X"]) * summed, manual_axes=["X"])


def kept_by_an_automatic_branch(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.cond(x[0, 0] > 0, lambda: out(tf.sin(into(x))), lambda: x)
        loss = tf.reduce_sum(y)
    return tape.gradient(loss, x)


def kept_by_an_automatic_loop(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.while_loop(
            lambda i, x: i < 3,
            lambda i, x: (i + 1, out(tf.sin(into(x)))),
            (tf.constant(0), x),
            maximum_iterations=3,
        )[1]
        loss = tf.reduce_sum(y)
    return tape.gradient(loss, x)


def vectorized(x):
    return tf.vectorized_map(lambda rows: out(tf.sin(into(rows))), tf.stack([x, x]))


@over_partitioners
@pytest.mark.parametrize(
    "fn,message",
    [
        (mixed, "moe/dispatch/mul.* uses a manual tensor together with an automatic"),
        (of_two_regions, "mixes tensors of manual axes"),
        (manual_twice, "is manual already; regions do not nest: .* Kernel.NONE"),
        (never_left, "is in a manual region, and goes out as a result of the program"),
        (never_entered, "takes a tensor that is not manual along X, Y"),
        (collective_outside, "takes a tensor that is not manual along X"),
        (collective_along_an_automatic_axis, "is not manual along Y"),
        (constant_summed_along_an_automatic_axis, "collective along Y in a region man"),
        (
            kept_by_an_automatic_branch,
            "for the gradient of a loop or branch, recompute",
        ),
        (vectorized, "vectorized_map and tape.jacobian cannot hold a manual region"),
        (place_outside, "uses a manual tensor together with an automatic one"),
        (annotated_by_a_manual_axis, "by mesh axis 'X', which is manual there"),
        (
            kept_by_an_automatic_loop,
            "keeps it for the gradient of a loop .*recompute_grad",
        ),
    ],
)
def test_a_tensor_on_the_wrong_side_is_named(fn, message, partitioner):
    with pytest.raises(LoweringError, match=message) as raised:
        compile_program(fn, [X], MESH, partitioner=partitioner)
    # The op, its layer or scopes, and the line above that made it.
    assert re.match(
        rf"{fn.__name__}: op '[^']+' \(.*sharding/test_manual_errors.py:\d+\) ",
        str(raised.value),
    )


def test_a_region_over_another_mesh_is_refused():
    for other in (
        DeviceMesh(("X", "Y"), (4, 2)),
        DeviceMesh(("X", "Y"), (2, 4), (7, 6, 5, 4, 3, 2, 1, 0)),
    ):
        with pytest.raises(LoweringError, match="needs the program's own mesh"):
            compile_program(lambda x: out(into(x)), [X], other)


@pytest.mark.parametrize(
    "wrong,message",
    [
        (lambda x: into(x, ["X"]), "is of rank 1, and the tensor of rank 2"),
        (lambda x: into(x, ["Z", None]), "unknown mesh axis 'Z'"),
        (lambda x: into(x, ["X", None], manual_axes=["Z"]), "unknown mesh axis 'Z'"),
        (lambda x: into(x, ["X", None], manual_axes="X"), "must be a sequence of axes"),
        (
            lambda x: into(x, ["X", "Y"], manual_axes=["X"]),
            "names mesh axis 'Y', which is not among the manual axes ('X',)",
        ),
        (
            lambda x: into(x[:7], ["Y", None]),
            "auto_to_manual: tensor has shape (7, 16), whose dim 0 does not divide by "
            "[Y,_] over the mesh (X=2, Y=4); pad it first",
        ),
        (
            lambda x: collectives.reduce_scatter(x, MESH, "Y", dim=2),
            "reduce_scatter: tensor has shape (8, 16), which has no dim 2",
        ),
        (
            lambda x: collectives.reduce_scatter(x[:6], MESH, "Y"),
            "reduce_scatter: tensor has shape (6, 16), whose dim 0 does not divide",
        ),
        (
            lambda x: collectives.all_to_all(
                x[:6], MESH, "Y", split_dim=0, concat_dim=1
            ),
            "all_to_all: tensor has shape (6, 16), whose dim 0 does not divide among",
        ),
        (
            lambda x: collectives.collective_permute(x, MESH, "X", [(0, 2)]),
            "target 2 must be a place along ['X'], 0..1, and target once",
        ),
        (
            lambda x: collectives.collective_permute(x, MESH, "X", [(0, 1), (0, 0)]),
            "source 0 must be a place along ['X'], 0..1, and source once",
        ),
        (
            lambda x: collectives.all_reduce(x, MESH, "Y:(1)2"),
            "along full mesh axes, each once, not 'Y:(1)2'",
        ),
        (
            lambda x: collectives.all_reduce(x, MESH, ("X", "X")),
            "along full mesh axes, each once, not 'X'",
        ),
        (
            lambda x: into(x, ["Y:(1)2", None]),
            "along full mesh axes, each once, not 'Y:(1)2'",
        ),
        (into, "auto_to_manual over the mesh (X=2, Y=4) was called eagerly"),
        (
            manual.manual_partition(
                lambda x: x, mesh=MESH, in_dims=[["X", None], ["X"]], out_dims=["X"]
            ),
            "manual_partition of lambda: dims (['X', None], ['X']) do not have a",
        ),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        wrong(tf.constant(np.zeros([8, 16], np.float32)))
