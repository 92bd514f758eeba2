"""What tests of partial sums share: programs on four devices against one."""

import random
import re
from collections.abc import Callable, Sequence

import hypothesis
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from meshwright import framework as mw
from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.program import trace_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.recompute import computed_once

MESH = mw.DeviceMesh(("dp", "tp"), (2, 2))
_DTYPES = {"": tf.float32, "s32": tf.int32, "pred": tf.bool}
_TEXT = re.compile(r"(?P<dtype>\w*)\[(?P<dims>[^\]]*)\]")
# Of a tensor's largest element: float32 sums of a few numbers in another order.
TOLERANCE = 2e-6


def split(x, *dims, mesh=MESH, **types):
    return mw.mesh_split(x, mesh, dims, **types)


def to(x, *dims, mesh=MESH, **types):
    return mw.reshard(x, mesh, dims, **types)


def partial(x, y):
    """The product of [m, k] and [k, n] with k split by tp; its sum is unreduced."""
    return split(x @ y, None, None, unreduced=["tp"])


PARTIAL = ("[4,8@tp]", "[8@tp,6]")
"""What `partial` takes."""
REDUCED = "all-reduce tp [4,6]"
"""What is sent to add it up; see `sent`."""


def sum_of_two_axes(x, y):
    """Of [b, k] and [k, n]."""
    y = tf.einsum("bk,kn->bn", x, y)
    return split(y, None, None, unreduced=["dp", "tp"])


LINEAR = {
    "negate": lambda p, w: -p,
    "barrier": lambda p, w: computed_once(p)[0],
    "scale": lambda p, w: 2.0 * p / 3.0,
    "multiply": lambda p, w: p * w[:4],
    "divide": lambda p, w: p / (3.0 + tf.abs(w[0])),
    "scalar": lambda p, w: p * w[0, 0],
    "add": lambda p, w: p + 3.0 * p,
    "subtract": lambda p, w: p[1:] - p[:3],
    "transpose": lambda p, w: tf.transpose(p),
    "reshape": lambda p, w: tf.reshape(p, [2, 2, 3, 2]),
    "flatten": lambda p, w: tf.reshape(p, [-1]),
    "broadcast": lambda p, w: tf.broadcast_to(p[:, None], [4, 3, 6]),
    "slice": lambda p, w: p[1:4, ::2],
    "dynamic_slice": lambda p, w: p[tf.cast(tf.abs(w[0, 0]), tf.int32) + 1],
    "pad": lambda p, w: tf.pad(p, [[1, 0], [0, 2]]),
    "concatenate": lambda p, w: tf.concat([p, 2.0 * p, tf.zeros([4, 1])], 1),
    "stack": lambda p, w: tf.stack([p, 2.0 * p]),
    "sum": lambda p, w: tf.reduce_sum(p, 0),
    "sum_of_all": lambda p, w: tf.reduce_sum(p),
    "mean": lambda p, w: tf.reduce_mean(p, 1),
    "matmul": lambda p, w: p @ w,
    "matmul_left": lambda p, w: w[:, :4] @ p,
    "einsum": lambda p, w: tf.einsum("mn,no->nmo", p, w),
    "where": lambda p, w: tf.where(w[:4] > 0.0, p, 0.0),
    "where_both": lambda p, w: tf.where(w[:4] > 0.0, p, -p),
    "bfloat16": lambda p, w: tf.cast(tf.cast(p, tf.bfloat16) * 2.0, tf.float32),
    "update_slice": lambda p, w: tf.raw_ops.TensorStridedSliceUpdate(
        input=tf.zeros([5, 6]), begin=[2, 0], end=[3, 6], strides=[1, 1], value=p[:1]
    ),
    "reverse": lambda p, w: p[::-1],
    "gather": lambda p, w: tf.gather(p, [2, 0, 2]),
    "gather_columns": lambda p, w: tf.gather(p, tf.cast(w[0] > 0.0, tf.int32), axis=1),
    "gather_from_each": lambda p, w: tf.gather(p, [[0, 3], [5, 5]] * 2, batch_dims=1),
    "scatter": lambda p, w: tf.tensor_scatter_nd_add(
        2.0 * tf.pad(p, [[1, 0], [0, 0]]), [[0], [2], [2], [4]], p
    ),
    "segments": lambda p, w: tf.math.unsorted_segment_sum(p, [0, 2, 0, 1], 3),
    "image": lambda p, w: tf.nn.conv2d(
        tf.reshape(p, [2, 2, 3, 2]), tf.reshape(w, [3, 3, 2, 2]), 1, "SAME"
    ),
    "kernel": lambda p, w: tf.nn.conv2d(
        tf.reshape(w, [2, 3, 2, 3]), tf.reshape(p, [2, 2, 3, 2]), 1, "SAME"
    ),
    "complex": lambda p, w: tf.math.real(
        tf.complex(p, 2.0 * p) * tf.complex(w[:4], w[2:])
    ),
    "imaginary": lambda p, w: tf.math.imag(tf.complex(tf.zeros([4, 6]), p)),
}
"""Of a unreduced [4, 6] and of whole numbers [6, 6]."""


def argument(text, mesh=MESH):
    """The spec and the sharding that `s32[4,8@dp.tp]` writes."""
    match = _TEXT.fullmatch(text)
    dims = [dim.partition("@") for dim in match["dims"].split(",") if dim]
    spec = tf.TensorSpec([int(size) for size, _, _ in dims], _DTYPES[match["dtype"]])
    written = ",".join(axes or "_" for _, _, axes in dims)
    return spec, mw.Sharding.parse(mesh, f"[{written}]")


def numbers(spec, rng, integers):
    """For an argument."""
    if spec.dtype == tf.bool:
        return rng.integers(0, 2, spec.shape).astype(bool)
    if spec.dtype == tf.int32:
        return rng.integers(0, 5, spec.shape).astype(np.int32)
    made = rng.integers(-2, 3, spec.shape) if integers else rng.normal(size=spec.shape)
    return made.astype(np.float32)


def traced(fn, *types, mesh=MESH, **how):
    given = [argument(text, mesh) for text in types]
    return trace_program(
        fn,
        [spec for spec, _ in given],
        mesh,
        in_shardings=[sharding for _, sharding in given],
        **how,
    )


def compiled(fn, *types, mesh=MESH, partitioners=Partitioner, integers=False, **how):
    """`fn` compiled by each partitioner, with one device's numbers; program by program.

    Args:
      fn: the function. On one device it is run eagerly, where annotations are nothing.
      types: of its arguments.
      mesh: the mesh.
      partitioners: who splits it.
      integers: whether its numbers are small integers, which bfloat16 does not round.
      **how: see `trace_program`.
    """
    rng = np.random.default_rng(0)
    args = [numbers(argument(text)[0], rng, integers) for text in types]
    want = tf.nest.map_structure(np.asarray, fn(*map(tf.constant, args)))
    for partitioner in partitioners:
        how["partitioner"] = partitioner
        program = traced(fn, *types, mesh=mesh, **how).compile()
        got = program.unshard(program(*args))
        assert_same(got, want, partitioner.value)
        yield program


def assert_same(got, want, name):
    pairs = zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True)
    for number, (a, b) in enumerate(pairs):
        assert np.abs(b).max(initial=0) > 0, f"result {number} is zero"
        atol = TOLERANCE * np.abs(b).max()
        message = f"{name}: result {number}"
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=message)


def sent(program):
    """`all-reduce tp [4,6]` for each array of each collective that is sent, sorted."""
    return sorted(
        f"{collective.kind} {','.join(collective.axes)} [{','.join(map(str, shape))}]"
        for collective in program.collectives()
        for shape in collective.shapes
    )


def sent_in_loops(program):
    module = HloModule(program.hlo_text())
    inside = [module.by_name[c.name].computation for c in program.collectives()]
    return [name for name in inside if module.loops_around(name)]


def check(fn, *types, sends, **how):
    """Asserts that each partitioner gets one device's numbers, and sends just this."""
    for program in compiled(fn, *types, **how):
        name, sent_ops = program.partitioner.value, sent(program)
        assert sent_ops == sorted(sends), f"{name} sends {sent_ops}"
        assert not sent_in_loops(program), f"{name} sends in a loop"


def gradients(loss, *args):
    with tf.GradientTape() as tape:
        tape.watch(args)
        value = loss(*args)
    return [tf.convert_to_tensor(g) for g in tape.gradient(value, args)]


# Of hypothesis only the seed, which says more than what it would find by small changes.
_RANDOM = st.randoms(use_true_random=True)


def check_random(check: Callable, count: int, seed: str) -> None:
    """Calls `check(random, partitioner)` so often; a seed draws others, "" the same."""
    test = hypothesis.given(_RANDOM, st.sampled_from(Partitioner))(check)
    test = hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=not seed,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
        report_multiple_bugs=False,
    )(test)
    (hypothesis.seed(seed)(test) if seed else test)()


class RandomSteps:
    """Steps that read values and make one more; the base of random programs.

    Args:
      random: what chooses them.
    """

    def __init__(self, random: random.Random):
        self.random = random
        self.arguments: list[str] = []
        self.steps: list[Callable] = []
        self.text: list[str] = []

    def __repr__(self):
        return f"arguments {', '.join(self.arguments)}\n" + "\n".join(self.text)

    def choose(self, *options):
        return self.random.choice(options)

    def dims(self, rank: int, but: Sequence[str] = ()) -> list[list[str]]:
        """Random axes for each dim, none of them among `but`."""
        dims: list[list[str]] = [[] for _ in range(rank)]
        left = [axis for axis in MESH.axis_names if axis not in but]
        for axis in self.random.sample(left, len(left)):
            dim = self.choose(*range(rank), None)
            if dim is not None:
                dims[dim].append(axis)
        return dims

    def add_argument(self, shape: Sequence[int], dims: Sequence[Sequence[str]]) -> int:
        """One more argument, split so; its number."""
        sizes = [
            f"{size}@{'.'.join(axes)}" if axes else str(size)
            for size, axes in zip(shape, dims, strict=True)
        ]
        self.arguments.append(f"[{','.join(sizes)}]")
        return len(self.arguments) - 1
