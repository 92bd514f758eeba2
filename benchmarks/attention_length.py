"""Attention in blocks beside attention of all pairs at once, by sequence length.

    python benchmarks/attention_length.py [--lengths=1024,4096] [--sizes=0,512]
        [--timed_to=8192] [--rounds=5]

Compiles, for one CPU device, a causal attention layer with rotary positions and its
gradients by weights and input, in float32. Memory is the program's by XLA's account:
arguments, results and temporaries. Seconds are CPU seconds of all threads and seconds
by the clock, for a step of the layer: medians of rounds in which the forms take turns
in one process. A size of 0 is all pairs at once.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import tensorflow as tf
from absl import app, flags

from meshwright import framework as mw
from meshwright.framework.compiler.program import Program
from meshwright.framework.modeling.layer import initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.layers.attention.attention import Blocks, MultiHeadAttention
from meshwright.layers.attention.positions import PositionKind


def define_flags() -> None:
    """Called only by this program."""
    flags.DEFINE_list("lengths", ["1024", "2048", "4096", "8192"], "Tokens of a row.")
    flags.DEFINE_list("sizes", ["0", "256", "512"], "Tokens of a block, 0: no blocks.")
    flags.DEFINE_integer("batch", 1, "Rows.", lower_bound=1)
    flags.DEFINE_integer("heads", 8, "Heads of 64 features.", lower_bound=1)
    flags.DEFINE_integer("timed_to", 8192, "Longer rows are compiled, but not run.")
    flags.DEFINE_integer("plain_to", 8192, "Longer rows have blocks.")
    flags.DEFINE_integer("rounds", 5, "Turns of each form.", lower_bound=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The layer, and what it reads.

    Args:
      batch: B.
      length: S.
      heads: N, of 64 features each.
      block: the most tokens of a block; 0: no blocks.
    """

    batch: int
    length: int
    heads: int
    block: int


def step_program(sizes: Sizes) -> tuple[Program, Any]:
    """The program of a layer and its gradients, and its arguments on the device."""
    layer = MultiHeadAttention(
        model_dims=64 * sizes.heads,
        num_heads=sizes.heads,
        head_dim=64,
        positions=PositionKind.ROTARY,
        block_size=sizes.block or Blocks.NONE,
    )
    plan = ShardingPlan(mesh_axes=("X",), mesh_shape=(1,))
    ctx = mw.Context(plan=plan, mode=mw.Mode.TRAIN)
    theta = initialize(layer.weights(), key_from_seed(0))
    x = tf.random.stateless_normal(
        [sizes.batch, sizes.length, layer.model_dims], [0, 0]
    )

    def step(theta, x):
        with tf.GradientTape() as tape:
            tape.watch((theta, x))
            y = layer.fprop(ctx, theta, x)
        return tape.gradient(y, (theta, x), output_gradients=y)

    args = (theta, x)
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, args)
    program = mw.compile_program(step, specs, plan.mesh)
    return program, program.shard(*tf.nest.map_structure(lambda t: t.numpy(), args))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of a step: of all threads, and by the clock."""

    cpu: float
    wall: float


def timed(program: Program, args: Any) -> Seconds:
    """One step."""
    cpu, wall = time.process_time(), time.perf_counter()
    jax.block_until_ready(tf.nest.flatten(program(*args)))
    return Seconds(cpu=time.process_time() - cpu, wall=time.perf_counter() - wall)


HEADER = """\
 tokens  block  memory MiB   CPU s  wall s
------------------------------------------"""


def table_row(sizes: Sizes, memory: int, turns: Sequence[Seconds]) -> str:
    """The line below `HEADER`: memory in bytes, medians of seconds."""
    times = ""
    if turns:
        cpu, wall = (
            statistics.median(getattr(turn, field) for turn in turns)
            for field in ("cpu", "wall")
        )
        times = f"{cpu:8.3f}{wall:8.3f}"
    block = sizes.block or "none"
    return f"{sizes.length:7}{block:>7}{memory / 2**20:12.1f}{times}"


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    given = flags.FLAGS
    mw.set_platform("cpu", 1)
    print(HEADER)
    for length in map(int, given.lengths):
        forms = {}
        for block in map(int, given.sizes):
            if block or length <= given.plain_to:
                sizes = Sizes(
                    batch=given.batch, length=length, heads=given.heads, block=block
                )
                forms[sizes] = step_program(sizes)
        turns = {sizes: [] for sizes in forms}
        if length <= given.timed_to:
            for args in forms.values():
                timed(*args)  # The first call of a program costs more.
            for _ in range(given.rounds):
                for sizes, args in forms.items():
                    turns[sizes].append(timed(*args))
        for sizes, (program, _) in forms.items():
            memory = program.memory().peak
            print(table_row(sizes, memory, turns[sizes]), flush=True)


if __name__ == "__main__":
    define_flags()
    app.run(main)
