"""Costs of operators on D devices: GShard's table, from compiled programs.

    python benchmarks/operator_costs.py [--devices=2,4,8]

As in the paper (5.3), the dims named under "O(D)" grow with the devices and the others
stay; a * follows the dim that is split. Only arguments and results are annotated. The
table has, for each D, the arithmetic of one device and the bytes that it gets from
collectives, and how they grow from the first D to the last, beside the paper's claim.
Bytes are those of results: how far they travel depends on the network.

Legend: G groups, S tokens of a group, E experts, C capacity, M model; B batch, X and Y
sides of an image, x and y of the window, I and O channels in and out. In a product or
a reduction A, B and C are any dims.
"""

from __future__ import annotations

import collections
import dataclasses
import platform
from collections.abc import Callable, Mapping, Sequence

import jax
import tensorflow as tf
from absl import app, flags

from meshwright import framework as mw

_DEVICES = flags.DEFINE_list("devices", ["2", "4", "8"], "Numbers of CPU devices, D.")
MOST_DEVICES = 64

KINDS = {
    "all-gather": "AG",
    "all-reduce": "AR",
    "all-to-all": "AA",
    "collective-permute": "CP",
    "reduce-scatter": "RS",
}
"""The paper's short names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operator:
    """A row of the table.

    Args:
      name: the computation, with split dims marked.
      grows: the dims that are O(D).
      compute: the paper's claim on a device's arithmetic.
      communication: the paper's claim on its communication, and the collectives.
      shapes: shapes of the arguments, for D devices.
      splits: a dims mapping of each argument, then of the result.
      fn: computes the result.
    """

    name: str
    grows: str
    compute: str
    communication: str
    shapes: Callable[[int], Sequence[Sequence[int]]]
    splits: Sequence[Sequence[str | int]]
    fn: Callable[..., tf.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost on one device.

    Args:
      kinds: number of collectives of each kind.
      bytes: bytes of their results.
      flops: arithmetic, by XLA's count.
    """

    kinds: Mapping[str, int]
    bytes: int
    flops: int


N = 16  # The size of a dim that stays, or of one device's part of a dim that grows.
OPERATORS = (
    Operator(
        name="Add(A*,A*->A*)",
        grows="A",
        compute="O(1)",
        communication="0",
        shapes=lambda D: [[N * D], [N * D]],
        splits=[["d"], ["d"], ["d"]],
        fn=tf.add,
    ),
    Operator(
        name="Matmul(AB*,B*C->AC)",
        grows="B",
        compute="O(1)",
        communication="O(1) AR",
        shapes=lambda D: [[N, N * D], [N * D, N]],
        splits=[[-1, "d"], ["d", -1], [-1, -1]],
        fn=tf.matmul,
    ),
    Operator(
        name="Matmul(A*B,BC->A*C)",
        grows="A",
        compute="O(1)",
        communication="0",
        shapes=lambda D: [[N * D, N], [N, N]],
        splits=[["d", -1], [-1, -1], ["d", -1]],
        fn=tf.matmul,
    ),
    Operator(
        name="Matmul(A*B,B*C->A*C)",
        grows="A, B",
        compute="O(D)",
        communication="O(D) AG or CP",
        shapes=lambda D: [[N * D, N * D], [N * D, N]],
        splits=[["d", -1], ["d", -1], ["d", -1]],
        fn=tf.matmul,
    ),
    Operator(
        name="Matmul(A*B,BC*->A*C)",
        grows="A, C",
        compute="O(D)",
        communication="O(D) AG or CP",
        shapes=lambda D: [[N * D, N], [N, N * D]],
        splits=[["d", -1], [-1, "d"], ["d", -1]],
        fn=tf.matmul,
    ),
    Operator(
        name="Reduce(A*B->A*)",
        grows="A",
        compute="O(1)",
        communication="0",
        shapes=lambda D: [[N * D, N]],
        splits=[["d", -1], ["d"]],
        fn=lambda a: tf.reduce_sum(a, 1),
    ),
    Operator(
        name="Reduce(A*B->B)",
        grows="A",
        compute="O(1)",
        communication="O(1) AR",
        shapes=lambda D: [[N * D, N]],
        splits=[["d", -1], [-1]],
        fn=lambda a: tf.reduce_sum(a, 0),
    ),
    # Tokens to their experts, and back. More experts take fewer tokens each from a
    # group: C is O(1/D).
    Operator(
        name="Einsum(G*SEC,G*SM->E*GCM)",
        grows="G, E",
        compute="O(1)",
        communication="O(1) AA",
        shapes=lambda D: [[D, N, D, 4 * N // D], [D, N, N]],
        splits=[["d", -1, -1, -1], ["d", -1, -1], ["d", -1, -1, -1]],
        fn=lambda mask, x: tf.einsum("GSEC,GSM->EGCM", mask, x),
    ),
    Operator(
        name="Einsum(G*SEC,E*GCM->G*SM)",
        grows="G, E",
        compute="O(1)",
        communication="O(1) AA",
        shapes=lambda D: [[D, N, D, 4 * N // D], [D, D, 4 * N // D, N]],
        splits=[["d", -1, -1, -1], ["d", -1, -1, -1], ["d", -1, -1]],
        fn=lambda weights, x: tf.einsum("GSEC,EGCM->GSM", weights, x),
    ),
    Operator(
        name="Convolution(BX*YI,xyIO->BX*YO)",
        grows="X",
        compute="O(1)",
        communication="O(1) CP",
        shapes=lambda D: [[2, N * D, N, 4], [3, 3, 4, 4]],
        splits=[[-1, "d", -1, -1], [-1, -1, -1, -1], [-1, "d", -1, -1]],
        fn=lambda x, window: tf.nn.conv2d(x, window, strides=1, padding="SAME"),
    ),
)


def cost(operator: Operator, device_count: int, partitioner: mw.Partitioner) -> Cost:
    """Compiles an operator for D devices and reads the cost on one of them."""
    mesh = mw.DeviceMesh(("d",), (device_count,))
    shardings = [mw.Sharding.from_dims_mapping(mesh, s) for s in operator.splits]
    program = mw.compile_program(
        operator.fn,
        [tf.TensorSpec(shape) for shape in operator.shapes(device_count)],
        mesh,
        in_shardings=shardings[:-1],
        out_shardings=shardings[-1],
        partitioner=partitioner,
        name="operator",
    )
    collectives = program.collectives()
    return Cost(
        kinds=collections.Counter(c.kind for c in collectives),
        bytes=sum(c.bytes for c in collectives),
        flops=int(program.cost()["flops"]),
    )


def growth(counts: Sequence[int], values: Sequence[int]) -> str:
    """How values grow over numbers of devices: "0", "O(1)", "O(D)", or their ratio."""
    if not any(values):
        return "0"
    if len(set(values)) == 1:
        return "O(1)"
    if all(v * counts[0] == values[0] * n for n, v in zip(counts, values, strict=True)):
        return "O(D)"
    return f"{values[-1]}/{values[0]}"


def table(costs: Mapping[str, Mapping[int, Cost]]) -> list[str]:
    """The lines of the table, from the cost of each operator for each D."""
    counts = [*costs[OPERATORS[0].name]]
    columns = [f"D={n}" for n in counts]
    width = 7 * len(counts)
    lines = [
        f"{'':38}{'compute':14}{'bytes a device':{width}}  communication",
        _line("operator", "O(D)", "found", "paper", columns, "by", "found", "paper"),
        "-" * (79 + width),
    ]
    for operator in OPERATORS:
        of_operator = [costs[operator.name][n] for n in counts]
        sizes = [cost.bytes for cost in of_operator]
        lines.append(
            _line(
                operator.name,
                operator.grows,
                growth(counts, [cost.flops for cost in of_operator]),
                operator.compute,
                sizes,
                " or ".join(sorted({_collectives(cost) for cost in of_operator})),
                growth(counts, sizes),
                operator.communication,
            )
        )
    return lines


def _line(name, grows, compute, claim, sizes, by, communication, claimed) -> str:
    columns = "".join(f"{size:>7}" for size in sizes)
    return (
        f"{name:31}{grows:7}{compute:7}{claim:5}{columns}  {by:6}{communication:7}"
        f"{claimed}"
    )


def _collectives(cost: Cost) -> str:
    return ", ".join(f"{n} {KINDS[kind]}" for kind, n in sorted(cost.kinds.items()))


def device_counts(texts: Sequence[str]) -> list[int]:
    """The numbers in `--devices`.

    Raises:
      ValueError: there are fewer than two, or one is no power of 2 up to
        `MOST_DEVICES`.
    """
    powers = [2**i for i in range(1, MOST_DEVICES.bit_length())]
    unknown = [text for text in texts if text not in map(str, powers)]
    if unknown or len(set(texts)) < 2:
        raise ValueError(
            f"--devices={','.join(texts)}: give two or more numbers of {powers}, to "
            "see what grows between them"
        )
    return sorted({int(text) for text in texts})


def main(argv: Sequence[str]) -> None:
    """Compiles and prints."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    try:
        counts = device_counts(_DEVICES.value)
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    mw.set_platform("cpu", counts[-1])
    tables = [
        table({o.name: {n: cost(o, n, partitioner) for n in counts} for o in OPERATORS})
        for partitioner in mw.Partitioner
    ]
    print(
        f"Python {platform.python_version()}, tensorflow {tf.__version__}, "
        f"jax {jax.__version__}; virtual CPU devices; float32"
    )
    print(*tables[0], sep="\n")
    if tables[0] == tables[1]:
        print("Shardy and GSPMD give the same table.")
    else:
        print("GSPMD gives another:", *tables[1], sep="\n")


if __name__ == "__main__":
    app.run(main)
