"""Attention in blocks beside attention of all pairs at once, by sequence length.

    python benchmarks/attention_length.py [--lengths=1024,4096] [--sizes=0,512,splash]
        [--timed_to=8192] [--rounds=5] [--topology=v5e:2x2]
        [--split_over=8 --ways=gather,ring,all_to_all] [--positions=sinusoids]

Compiles, for one CPU device, a causal attention layer with rotary or other positions
and its gradients by weights and input, in float32. Memory is the program's by XLA's
account: arguments, results and temporaries. Seconds are CPU seconds of all threads and
seconds by the clock, for a step of the layer: medians of rounds in which the forms take
turns in one process. A size of 0 is all pairs at once, "splash" the kernel for TPUs,
which a CPU interprets.

With `--split_over` each row is split over so many CPU devices, and attention computed
in these ways (`ShardingPlan.sequence_attention`), "gather" without blocks; memory is
that of a device.

With a topology it compiles for that TPU in bfloat16, `--batch` rows to a device, and
estimates seconds from the compiler's own cycles, as `meshwright-plan` does. That wants
libtpu, and no TPU.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tensorflow as tf
from absl import app, flags

from meshwright import framework as mw
from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.step_time import step_time
from meshwright.framework.compiler.program import Program
from meshwright.framework.devices import topology as topologies
from meshwright.framework.devices.device_order import order_of
from meshwright.framework.sharding.plan import SequenceAttention, ShardingPlan
from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.attention.blocks import Blocks
from meshwright.layers.attention.fused import Kernel
from meshwright.layers.attention.positions import PositionKind
from meshwright.layers.attention.relative.relative_positions import (
    RelativeSinusoids,
    RelativeVectors,
)

POSITIONS = {
    "rotary": PositionKind.ROTARY,
    "vectors": RelativeVectors(),
    "sinusoids": RelativeSinusoids(),
}


def define_flags() -> None:
    """Called only by this program."""
    flags.DEFINE_list("lengths", ["1024", "2048", "4096", "8192"], "Tokens of a row.")
    flags.DEFINE_list("sizes", ["0", "256", "512"], "Tokens of a block, 0 or splash.")
    flags.DEFINE_integer("head_dim", 64, "Features of a head.", lower_bound=1)
    flags.DEFINE_integer("batch", 1, "Rows.", lower_bound=1)
    flags.DEFINE_integer("heads", 8, "Heads.", lower_bound=1)
    flags.DEFINE_integer("timed_to", 8192, "Longer rows are compiled, but not run.")
    flags.DEFINE_integer("plain_to", 8192, "Longer rows have blocks.")
    flags.DEFINE_string("topology", None, "A TPU topology, such as v5e:2x2.")
    flags.DEFINE_integer("split_over", 1, "CPU devices of a row.", lower_bound=1)
    flags.DEFINE_list("ways", ["ring"], "Of attention, if rows are split.")
    flags.DEFINE_enum("positions", "rotary", POSITIONS, "How positions enter.")
    flags.DEFINE_integer("rounds", 5, "Turns of each form.", lower_bound=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The layer, and what it reads.

    Args:
      batch: B.
      length: S.
      heads: N.
      block: the most tokens of a block; 0: no blocks.
      head_dim: D.
      kernel: whether a fused kernel computes attention.
      split_over: the devices that a row is split over.
      way: how attention is computed then.
      positions: how positions enter, a key of `POSITIONS`.
    """

    batch: int
    length: int
    heads: int
    block: int
    head_dim: int = 64
    kernel: Kernel = Kernel.NONE
    split_over: int = 1
    way: SequenceAttention = SequenceAttention.GATHER
    positions: str = "rotary"


def _size(text: str) -> tuple[int, Kernel]:
    """The tokens of a block and the kernel that an entry of `--sizes` names."""
    return (int(text), Kernel.NONE) if text.isdecimal() else (0, Kernel(text))


def step_program(sizes: Sizes, devices: Sequence[jax.Device] | None) -> Program:
    """The program of a layer and its gradients, for these devices or a CPU."""
    layer = MultiHeadAttention(
        model_dims=sizes.head_dim * sizes.heads,
        num_heads=sizes.heads,
        head_dim=sizes.head_dim,
        positions=POSITIONS[sizes.positions],
        block_size=sizes.block or Blocks.NONE,
        kernel=sizes.kernel,
    )
    count = len(devices or [None])
    plan = ShardingPlan(
        mesh_axes=("X", "Y"),
        mesh_shape=(count, sizes.split_over),
        activations={"batch": "X", "sequence": "Y"},
        sequence_attention=sizes.way,
    )
    dtype = tf.bfloat16 if devices else tf.float32
    ctx = mw.Context(plan=plan, mode=mw.Mode.TRAIN, activation_dtype=dtype)

    def step(theta, x):
        with tf.GradientTape() as tape:
            tape.watch((theta, x))
            y = layer.fprop(ctx, theta, x)
        return tape.gradient(y, (theta, x), output_gradients=y)

    shape = [count * sizes.batch, sizes.length, layer.model_dims]
    stream = plan.activation_sharding(("batch", "sequence", "model"))
    return mw.compile_program(
        step,
        [
            layer.weights().map(lambda s: tf.TensorSpec(s.shape)),
            tf.TensorSpec(shape, dtype),
        ],
        plan.mesh,
        in_shardings=[None, stream],
        out_shardings=(None, stream),
        devices=devices,
    )


def arguments(program: Program) -> Any:
    """Random arguments of a program, on its device."""
    rng = np.random.default_rng(0)
    return program.shard(
        *tf.nest.map_structure(
            lambda s: 0.05 * rng.standard_normal(s.shape, np.float32), program.inputs
        )
    )


def estimated(program: Program, topology: str) -> float:
    """Seconds of a step on a TPU."""
    order = order_of(program.mesh, topologies.topology(topology))
    times = step_time(HloModule(program.hlo_text()), program.mesh, order)
    return times.seconds


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
 tokens  block        way  memory MiB   CPU s  wall s
-----------------------------------------------------"""
ESTIMATED = """\
 tokens  block        way  memory MiB  estimated s
--------------------------------------------------"""


def table_row(sizes: Sizes, memory: int, turns: Sequence[Seconds]) -> str:
    """The line below `HEADER`: memory in bytes, medians of seconds."""
    times = ""
    if turns:
        cpu, wall = (
            statistics.median(getattr(turn, field) for turn in turns)
            for field in ("cpu", "wall")
        )
        times = f"{cpu:8.3f}{wall:8.3f}"
    return f"{_start(sizes, memory)}{times}"


def estimated_row(sizes: Sizes, memory: int, seconds: float) -> str:
    """The line below `ESTIMATED`."""
    return f"{_start(sizes, memory)}{seconds:13.6f}"


def _start(sizes: Sizes, memory: int) -> str:
    is_fused = sizes.kernel is not Kernel.NONE
    block = sizes.kernel.value if is_fused else sizes.block or "none"
    way = sizes.way.value if sizes.split_over > 1 else "-"
    return f"{sizes.length:7}{block:>7}{way:>11}{memory / 2**20:12.1f}"


def in_turns(programs: Sequence[Program], rounds: int) -> list[list[Seconds]]:
    """The seconds of each program in each round."""
    arguments_of = [arguments(program) for program in programs]
    for pair in zip(programs, arguments_of, strict=True):
        timed(*pair)  # The first call of a program costs more.
    turns = [[] for _ in programs]
    for _ in range(rounds):
        for i, pair in enumerate(zip(programs, arguments_of, strict=True)):
            turns[i].append(timed(*pair))
    return turns


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    given = flags.FLAGS
    mw.set_platform("cpu", given.split_over)
    ways = [SequenceAttention(way) for way in given.ways]
    is_split = given.split_over > 1
    if not is_split:
        ways = [SequenceAttention.GATHER]
    topology = given.topology
    devices = topologies.topology_devices(topology) if topology else None
    print(ESTIMATED if topology else HEADER)
    for length in map(int, given.lengths):
        forms = [
            Sizes(
                batch=given.batch,
                length=length,
                heads=given.heads,
                head_dim=given.head_dim,
                block=block,
                kernel=kernel,
                split_over=given.split_over,
                way=way,
                positions=given.positions,
            )
            for way in ways
            for block, kernel in map(_size, given.sizes)
            if block or kernel is not Kernel.NONE or length <= given.plain_to
            if not (block and is_split and way is SequenceAttention.GATHER)
        ]
        programs = [step_program(sizes, devices) for sizes in forms]
        memory = [program.memory().peak for program in programs]
        if topology:
            seconds = [estimated(program, topology) for program in programs]
            rows = map(estimated_row, forms, memory, seconds)
        else:
            runs = length <= given.timed_to
            turns = in_turns(programs, given.rounds) if runs else [()] * len(forms)
            rows = map(table_row, forms, memory, turns)
        print(*rows, sep="\n", flush=True)


if __name__ == "__main__":
    define_flags()
    app.run(main)
