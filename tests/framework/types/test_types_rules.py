"""Sharding types op by op: what each rule gives, and what it refuses with which words.

Nothing is compiled.
"""

import pytest
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright import framework as mw
from tests.framework.partial.partial_programs import LINEAR
from tests.framework.types.typed import MESH, inferred, refused, split


def contract(equation):
    return lambda *operands: tf.einsum(equation, *operands)


def convolve(x, k):
    return tf.nn.conv2d(x, k, 1, "SAME")


def pooled(x):
    return tf.nn.max_pool2d(x, 2, 2, "VALID")


def updated(stack, part):
    return tf.tensor_scatter_nd_add(stack, [[0], [2]], part)


def counted(rows, ids):
    return tf.math.unsorted_segment_sum(rows, ids, 6)


PLAIN, U, R = "f32[4, 8@dp]", "f32[4, 8@dp]{U:tp}", "f32[4, 8@dp]{R:tp}"
IMAGE, KERNEL = "f32[4@dp, 8, 8, 6]", "f32[3, 3, 6, 4]"

LEGAL = {
    "a split dim cuts a whole one": (tf.add, [PLAIN, "f32[4, 8]"], PLAIN),
    "different dims split": (tf.add, [PLAIN, "f32[4@tp, 8]"], "f32[4@tp, 8@dp]"),
    "further split": (tf.add, ["f32[4@dp]", "f32[4@dp.tp]"], "f32[4@dp.tp]"),
    "sums add up": (tf.subtract, [U, "f32[4, 8]{U:tp}"], U),
    "a sum and zero": (lambda x: x + tf.zeros([4, 8]), [U], U),
    "negated": (tf.negative, [U], U),
    "a sum in half precision": (
        lambda x: tf.cast(x, tf.bfloat16),
        [U],
        "bf16[4, 8@dp]{U:tp}",
    ),
    "a sum of whole numbers in fewer bits": (
        lambda x: tf.cast(x, tf.int16),
        ["s32[4, 8]{U:tp}"],
        "s16[4, 8]{U:tp}",
    ),
    "a sum times a tensor": (tf.multiply, [U, "f32[4, 8]"], U),
    "a sum times a number": (lambda x: 3 * x / 7, [U], U),
    "a sum by a tensor": (tf.divide, [U, PLAIN], U),
    "of a sum what a mask leaves": (
        lambda x, m: tf.where(m, x, 0.0),
        [U, "pred[4, 8]"],
        U,
    ),
    "reduced and reduced": (tf.multiply, [R, "f32[4, 8]{R:tp}"], R),
    "reduced and a number": (lambda x: tf.tanh(2 * x), [R], R),
    "reduced and split": (tf.multiply, [R, "f32[4@tp, 8]"], "f32[4@tp, 8@dp]"),
    "reduced and unreduced": (tf.multiply, [R, "f32[4, 8]{U:tp}"], U),
    "no gradient, not reduced": (tf.greater, [R, R], "pred[4, 8@dp]"),
    "rows by columns": (
        contract("mk,kn->mn"),
        ["f32[4@dp, 8]", "f32[8, 6@tp]"],
        "f32[4@dp, 6@tp]",
    ),
    "a split contraction": (
        contract("mk,kn->mn"),
        ["f32[4, 8@tp]", "f32[8@tp, 6@dp]"],
        "f32[4, 6@dp]{sum?:tp}",
    ),
    "one side split": (
        contract("mk,kn->mn"),
        ["f32[4, 8@tp]", "f32[8, 6]"],
        "f32[4, 6]{sum?:tp}",
    ),
    "a batch of products": (
        contract("bmk,bkn->bmn"),
        ["f32[4@dp, 3, 8]", "f32[4@dp, 8, 6@tp]"],
        "f32[4@dp, 3, 6@tp]",
    ),
    "a product with a sum": (
        contract("mk,kn->mn"),
        ["f32[4, 8@dp]{U:tp}", "f32[8@dp, 6]"],
        "f32[4, 6]{sum?:dp}{U:tp}",
    ),
    "reduced weights": (
        contract("mk,kn->mn"),
        ["f32[4@dp, 8]{R:tp}", "f32[8, 6@tp]{R:dp}"],
        "f32[4@dp, 6@tp]",
    ),
    "a sum over a split dim": (
        lambda x: tf.reduce_sum(x, 1),
        ["f32[4@tp, 8@dp]"],
        "f32[4@tp]{sum?:dp}",
    ),
    "a mean": (tf.reduce_mean, ["f32[4@tp, 8@dp]"], "f32[]{sum?:dp,tp}"),
    "a sum of a sum": (lambda x: tf.reduce_sum(x, 0), [U], "f32[8@dp]{U:tp}"),
    "a maximum": (
        lambda x: tf.reduce_max(x, 1),
        ["f32[4@tp, 8@dp]"],
        "f32[4@tp]{max?:dp}",
    ),
    "transposed": (tf.transpose, [U], "f32[8@dp, 4]{U:tp}"),
    "flattened": (lambda x: tf.reshape(x, [-1]), ["f32[4@dp, 8]"], "f32[32@dp]"),
    "taken apart": (
        lambda x: tf.reshape(x, [2, 2, 8]),
        ["f32[4@dp.tp, 8]"],
        "f32[2@dp, 2@tp, 8]",
    ),
    "grouped anew": (
        lambda x: tf.reshape(x, [8, 6]),
        ["f32[4@dp, 12]{U:tp}"],
        "f32[8@dp, 6]{U:tp}",
    ),
    "sliced": (lambda x: x[1:3], [U], "f32[2, 8@dp]{U:tp}"),
    "padded": (lambda x: tf.pad(x, [[1, 0], [0, 0]]), [U], "f32[5, 8@dp]{U:tp}"),
    "joined": (
        lambda x, y: tf.concat([x, y, tf.zeros([1, 8])], 0),
        [U, "f32[2, 8]{U:tp}"],
        "f32[7, 8@dp]{U:tp}",
    ),
    "broadcast": (lambda x: tf.tile(x[None], [3, 1, 1]), [R], "f32[3, 4, 8@dp]{R:tp}"),
    "reversed": (lambda x: tf.reverse(x, [0]), [U], U),
    "looked up": (
        tf.gather,
        ["f32[16, 8@tp]", "s32[4@dp, 3]"],
        "f32[4@dp, 3, 8@tp]",
    ),
    "looked up in a reduced table": (
        tf.gather,
        ["f32[16, 8]{R:dp}", "s32[4@dp]"],
        "f32[4@dp, 8]",
    ),
    "rows by segment": (
        counted,
        ["f32[8@dp, 4@tp]", "s32[8@dp]"],
        "f32[6, 4@tp]{sum?:dp}",
    ),
    "rows added": (updated, ["f32[4, 8]{U:tp}", "f32[2, 8@dp]{U:tp}"], U),
    "a batch of images": (convolve, [IMAGE, KERNEL], "f32[4@dp, 8, 8, 4]"),
    "channels": (
        convolve,
        ["f32[4@dp, 8, 8, 6@tp]", "f32[3, 3, 6@tp, 4]"],
        "f32[4@dp, 8, 8, 4]{sum?:tp}",
    ),
    "rows of images": (
        convolve,
        ["f32[4@dp, 8@tp, 8, 6]", KERNEL],
        "f32[4@dp, 8, 8, 4]{halo?:tp}",
    ),
    "rows of images through a narrow kernel": (
        convolve,
        ["f32[4@dp, 8@tp, 8, 6]", "f32[1, 1, 6, 4]"],
        "f32[4@dp, 8@tp, 8, 4]",
    ),
    "pooled rows": (pooled, ["f32[4@dp, 8@tp, 8, 6]"], "f32[4@dp, 4, 4, 6]{halo?:tp}"),
    "sorted": (lambda x: tf.sort(x, 0), [PLAIN], PLAIN),
    "the largest": (lambda x: tf.argmax(x, 0, tf.int32), [PLAIN], "s32[8@dp]"),
    "cumulated": (lambda x: tf.cumsum(x, 0), [PLAIN], PLAIN),
    "transformed": (tf.signal.rfft, ["f32[4@dp, 8]"], "c64[4@dp, 5]"),
    "constants": (
        lambda x: x * tf.range(8.0) + tf.ones([4, 1]),
        ["f32[4@tp, 8@dp]"],
        "f32[4@tp, 8@dp]",
    ),
}

ILLEGAL = {
    "a sum and a tensor": (
        tf.add,
        [U, "f32[4, 8]"],
        "adds f32[4, 8@dp]{U:tp} and f32[4, 8]: a partial sum along tp and a "
        "replicated tensor; reshard the first to [_,dp], or the second to "
        "[_,_]{U:tp}",
    ),
    "a sum and a number": (
        lambda x: 1 + x,
        [U],
        "a partial sum along tp and a constant other than zero; reshard the second to "
        "[_,dp]",
    ),
    "a sum and a split tensor": (
        tf.subtract,
        [U, "f32[4@tp, 8]"],
        "a partial sum along tp and a split tensor; reshard the first to [_,dp]",
    ),
    "sums along other axes": (
        tf.add,
        ["f32[4, 8]{U:dp}", "f32[4, 8]{U:tp}"],
        "a partial sum along dp and a replicated tensor; reshard the first to [_,_], "
        "or the second to [_,_]{U:dp,tp}",
    ),
    "a sum of nobody's and a tensor": (
        lambda x, w, b: tf.matmul(x, w) + b,
        ["f32[4, 8@tp]", "f32[8@tp, 6]", "f32[6]"],
        "mesh_split the first to [_,_], or the second to [_,_]{U:tp}. The sum along tp "
        "is of op 'MatMul' (types/test_types_rules.py:",
    ),
    "a product of sums": (
        tf.multiply,
        [U, "f32[4, 8]{U:tp}"],
        "a product of sums unreduced along tp is not the sum of products; reshard it "
        "to [_,_] before",
    ),
    "a sum times a split tensor": (
        tf.multiply,
        [U, "f32[4@tp, 8]"],
        "its result would be split by tp in dim 0 and a partial sum along tp",
    ),
    "by a sum": (
        tf.divide,
        [PLAIN, U],
        "divides f32[4, 8@dp] and f32[4, 8@dp]{U:tp}: it is not linear in a sum "
        "unreduced along tp; reshard it to [_,dp] before",
    ),
    "not linear": (tf.tanh, [U], "computes tanh of f32[4, 8@dp]{U:tp}: it is not"),
    "not linear in nobody's sum": (
        lambda x: tf.tanh(tf.reduce_sum(x, 0)),
        ["f32[4@tp, 8]"],
        "computes tanh of f32[8]{sum?:tp}: it is not linear in a sum unreduced along "
        "tp; mesh_split it to [_] before. The sum along tp is of op 'Sum'",
    ),
    "rounded": (lambda x: tf.cast(x, tf.int32), [U], "is not linear in a sum"),
    "whole numbers that may wrap around": (
        lambda x: tf.cast(x, tf.float32),
        ["s32[4, 8]{U:tp}"],
        "it is not linear in a sum unreduced along tp, as a part may wrap around, or "
        "be rounded, where their sum is not; reshard it to [_,_] before",
    ),
    "compared": (lambda x: x > 0, [U], "computes compare of f32[4, 8@dp]{U:tp}"),
    "a mask over other than zero": (
        lambda x, m: tf.where(m, x, 1.0),
        [U, "pred[4, 8]"],
        "a constant other than zero",
    ),
    "two ways to split a dim": (
        tf.add,
        ["f32[4@dp]", "f32[4@tp]"],
        "they are split by dp and tp in one dim; mesh_split one like the other: "
        "[dp] or [tp]",
    ),
    "split further, not evenly": (
        tf.add,
        ["f32[6@dp]", "f32[6@dp.tp]"],
        "they are split by dp and dp.tp in one dim",
    ),
    "one axis for two dims": (
        tf.add,
        ["f32[4@dp, 8]", "f32[4, 8@dp]"],
        "its result would be split by dp in dim 0 and split by dp in dim 1",
    ),
    "rows by columns of one axis": (
        contract("mk,kn->mn"),
        ["f32[4@tp, 8]", "f32[8, 6@tp]"],
        "contracts f32[4@tp, 8] and f32[8, 6@tp]: its result would be split by tp in",
    ),
    "a contraction split in two ways": (
        contract("mk,kn->mn"),
        ["f32[4, 8@tp]", "f32[8@dp, 6]"],
        "they are split by tp and dp in one dim",
    ),
    "a contraction of a sum": (
        contract("mk,kn->mn"),
        ["f32[4, 8]{U:tp}", "f32[8@tp, 6]"],
        "its result would be a partial sum along tp and a partial sum along tp",
    ),
    "reduced and replicated": (
        tf.multiply,
        [R, "f32[4, 8]"],
        "one is reduced along tp and the other, f32[4, 8], replicated: its gradient "
        "would be unreduced, its type says replicated; reshard it to [_,_]{R:tp} "
        "(mesh_split an argument so), or reshard the reduced one to [_,dp]",
    ),
    "reduced and a sum added": (
        tf.add,
        [R, "f32[4, 8]{U:tp}"],
        "a partial sum along tp and a replicated tensor",
    ),
    "reduced, and its dim split": (
        contract("mk,kn->mn"),
        ["f32[4, 8]{R:tp}", "f32[8@tp, 6]"],
        "its gradient would be split, not unreduced",
    ),
    "the largest of sums": (lambda x: tf.reduce_max(x, 0), [U], "is not linear"),
    "the place of the largest": (
        lambda x: tf.argmax(x, 1, tf.int32),
        [PLAIN],
        "it needs dim 1 of f32[4, 8@dp] unsharded, which dp splits; mesh_split it to "
        "[_,_] before",
    ),
    "a softmax over a split dim": (
        tf.nn.softmax,
        [PLAIN],
        "it is not linear in partial values along dp (max); mesh_split it to "
        "[_,_] before",
    ),
    "flattened behind": (
        lambda x: tf.reshape(x, [-1]),
        [PLAIN],
        "reshapes f32[4, 8@dp]: dim 1 is not split where the result could be: its "
        "shards are no shards of the result; mesh_split it to [_,_] before",
    ),
    "part of a split dim": (
        lambda x: x[:, 2:6],
        [PLAIN],
        "slices f32[4, 8@dp]: it needs dim 1 of f32[4, 8@dp] unsharded",
    ),
    "padded with ones": (
        lambda x: tf.pad(x, [[1, 0], [0, 0]], constant_values=1),
        [U],
        "it is not linear in a sum unreduced along tp",
    ),
    "an uneven sum": (
        lambda x: split(tf.reduce_sum(x, 0), -1, unreduced=["tp"]),
        ["f32[7@tp, 8]"],
        "takes f32[8]{sum?:tp}: it is not a sum over dims that tp splits evenly, or "
        "it is a convolution's that other axes split too; mesh_split it to [_]",
    ),
    "one of two terms is uneven": (
        lambda x, y: split(
            tf.reduce_sum(x, 0) + tf.reduce_sum(y, 0), -1, unreduced=["tp"]
        ),
        ["f32[4@tp, 8]", "f32[7@tp, 8]"],
        "it is not a sum over dims that tp splits evenly",
    ),
    "a sum of partial sums": (
        lambda x: split(tf.reduce_sum(x, 1), -1, unreduced=["dp", "tp"]),
        [U],
        "the sum along dp is one of sums unreduced along tp; mesh_split it to "
        "[_]{U:tp}, which adds it up along dp",
    ),
    "a sum after a sum": (
        lambda x, w: split(tf.reduce_sum(x @ w, 0), -1, unreduced=["dp", "tp"]),
        ["f32[4@dp, 8@tp]", "f32[8@tp, 6]"],
        "it is not a sum over dims that dp, tp splits evenly",
    ),
    "a barrier": (
        lambda x: xla.optimization_barrier(x, 2.0 * x)[0],
        [U],
        "a barrier takes several tensors only without a partial sum",
    ),
    "joined along a split dim": (
        lambda x: tf.concat([x, x], 1),
        [PLAIN],
        "joins f32[4, 8@dp] and f32[4, 8@dp]: it needs dim 1",
    ),
    "a sum joined to a tensor": (
        lambda x, y: tf.concat([x, y], 0),
        [U, PLAIN],
        "a partial sum along tp and a replicated tensor",
    ),
    "looked up in split rows": (
        tf.gather,
        ["f32[16@tp, 8]", "s32[4]"],
        "gathers f32[16@tp, 8] and s32[4]: it needs dim 0 of f32[16@tp, 8] unsharded",
    ),
    "split rows added to a tensor": (
        updated,
        ["f32[4, 8]", "f32[2@dp, 8]"],
        "scatters f32[4, 8] and s32[2, 1] and f32[2@dp, 8]: a partial sum along dp and "
        "a replicated tensor",
    ),
    "rows of images, used": (
        lambda x, k: tf.nn.relu(convolve(x, k)),
        ["f32[4@dp, 8@tp, 8, 6]", KERNEL],
        "partial values along tp (halo); mesh_split it to [dp,_,_,_] before. "
        "The halo along tp is of op 'Conv2D'",
    ),
    "sorted along a split dim": (lambda x: tf.sort(x, 1), [PLAIN], "it needs dim 1"),
    "transformed along a split dim": (tf.signal.rfft, [PLAIN], "it needs dim 1"),
    "factorized along a split dim": (
        tf.linalg.cholesky,
        ["f32[4, 8@dp, 8]"],
        "computes cholesky of f32[4, 8@dp, 8]: it needs dim 1",
    ),
    "an op that Shardy has no rule for": (
        lambda x: tf.raw_ops.FusedBatchNormV3(
            x=x, scale=tf.ones([8]), offset=x[0, 0, 0], mean=[], variance=[]
        )[0],
        ["f32[4@dp, 2, 2, 8]"],
        "it needs dim 0",
    ),
}

ANNOTATED = {
    "decides a sum": (
        lambda x: split(tf.reduce_sum(x, 1), "dp"),
        ["f32[4, 8@tp]"],
        "f32[4@dp]",
    ),
    "says that it is unreduced": (
        lambda x: split(tf.reduce_sum(x, 1), "dp", unreduced=["tp"]),
        ["f32[4, 8@tp]"],
        "f32[4@dp]{U:tp}",
    ),
    "adds up along one of two axes": (
        lambda x: split(tf.reduce_sum(x), unreduced=["tp"]),
        ["f32[4@dp, 8@tp]"],
        "f32[]{U:tp}",
    ),
    "decides a halo": (
        lambda x, k: split(convolve(x, k), "dp", "tp", None, None),
        ["f32[4@dp, 8@tp, 8, 6]", KERNEL],
        "f32[4@dp, 8@tp, 8, 4]",
    ),
    "leaves dims open": (
        lambda x: split(x, None, "tp", unspecified_dims=[0]),
        ["f32[4@dp, 8]"],
        "f32[4@dp, 8@tp]",
    ),
    "says what zeros are": (
        lambda x: x + split(tf.zeros([4, 8]), None, None, unreduced=["tp"]),
        [U],
        U,
    ),
    "says that it is reduced": (
        lambda x: split(x, None, "dp", reduced=["tp"]),
        [PLAIN],
        R,
    ),
    "converts": (
        lambda x: mw.reshard(split(x, None, "dp"), MESH, ["tp", None]),
        [PLAIN],
        "f32[4@tp, 8]",
    ),
    "converts to a sum": (
        lambda x: mw.reshard(split(x, None, "dp"), MESH, [None] * 2, unreduced=["tp"]),
        [PLAIN],
        "f32[4, 8]{U:tp}",
    ),
}

NOT_ANNOTATED = {
    "drops a sum": (
        lambda x: split(x, None, "dp"),
        [U],
        "takes f32[4, 8@dp]{U:tp}: it would drop the sum unreduced along tp; reshard "
        "says where it is added up: reshard it to [_,dp]",
    ),
    "drops a sum for another": (
        lambda x: split(tf.reduce_sum(x, 0), None, unreduced=["dp"]),
        ["f32[4@dp, 8]{U:tp}"],
        "it would drop the sum unreduced along tp",
    ),
    "drops what is reduced": (
        lambda x: split(x, None, "dp"),
        [R],
        "it would drop that its gradient is unreduced along tp; reshard says",
    ),
    "finds no sum": (
        lambda x: split(x, None, "dp", unreduced=["tp"]),
        [PLAIN],
        "no sum is unreduced along tp, so it is not unreduced; reshard converts a "
        "replicated tensor to an unreduced one, [_,dp] to [_,dp]{U:tp}",
    ),
    "finds a maximum": (
        lambda x: split(tf.reduce_max(x, 0), None, unreduced=["dp"]),
        ["f32[4@dp, 8]"],
        "no sum is unreduced along dp",
    ),
    "finds it split": (
        lambda x: split(x, None, None, reduced=["dp"]),
        [PLAIN],
        "dp splits it, so it is not reduced along dp",
    ),
    "is over another order of the devices": (
        lambda x: mw.mesh_split(
            x, mw.DeviceMesh(("dp", "tp"), (2, 2), (3, 1, 2, 0)), ["dp", None]
        ),
        [PLAIN],
        "is over the mesh's devices in another order",
    ),
}


def cases(table):
    return pytest.mark.parametrize("fn,types,want", table.values(), ids=table.keys())


@cases(LEGAL | ANNOTATED)
def test_what_an_op_makes_of_types(fn, types, want):
    assert inferred(fn, *types) == want


@cases(ILLEGAL | NOT_ANNOTATED)
def test_what_an_op_refuses(fn, types, want):
    assert want in refused(fn, *types)


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_compiled_part_by_part_is_linear_here_too(name):
    result = inferred(LINEAR[name], "f32[4, 6]{U:tp}", "f32[6, 6]")
    assert result.endswith("]{U:tp}"), result
