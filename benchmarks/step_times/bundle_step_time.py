"""Step times of a bundle, and of hand-written JAX of the same maths, in turns.

    python benchmarks/step_times/bundle_step_time.py BUNDLE [--platform=cuda]
      [--peak_flops=989e12] [--rounds=6] [--steps=5] [--beside=scan,unrolled]

The bundle is the output of meshwright-export for a language model of
`lm/transformer.gin` with Adam, with a warmup and then a cosine, such as
`lm/transformer_1b.gin`. Like the bundle's own runner this needs only numpy and jax.

`reference_jax.py` is the other program, twice: with its layers in a `lax.scan` and one
after another. Each program is in a process of its own, with weights from the bundle's
init program, and they take turns; so states and temporaries of all have to fit in a
device's memory at once: `--beside=scan` leaves one program out. Programs that do not
train alike are not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import re
import statistics
import sys

import interleave

CHECKED_STEPS = 3
# Relative tolerance of losses, for bfloat16's rounding in another order.
LOSS_TOLERANCE = 2e-3
OURS = "bundle"
LABELS = {OURS: "Bundle", "scan": "JAX, scan", "unrolled": "JAX, unrolled"}


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("bundle", type=pathlib.Path, help="its folder")
    parser.add_argument("--platform", choices=["cpu", "cuda", "tpu"], default="cuda")
    parser.add_argument("--peak_flops", type=float, help="FLOP/s of one device")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each program")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--beside", default="scan,unrolled", help="which JAX programs")
    parser.add_argument("--worker", choices=[*LABELS], help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def worker(options: argparse.Namespace) -> interleave.Served:
    """One of the programs, after its first steps."""
    sys.path.insert(0, str(options.bundle))
    import run_bundle

    runner = run_bundle.Runner(run_bundle.Bundle(options.bundle), options.platform)
    batches = runner.bundle.arrays(runner.manifest["batches"])
    if options.worker == OURS:
        call = _bundle(runner, batches)
    else:
        call = _reference(runner, batches, options.worker)
    steps = runner.manifest["step"]["steps_per_loop"]
    losses: list[float] = []
    while len(losses) < CHECKED_STEPS:
        losses += call()
    device = runner.jax.devices()[0]
    facts = {
        "losses": losses[:CHECKED_STEPS],
        "jax": runner.jax.__version__,
        "device": f"{runner.mesh.size} x {device.device_kind}",
        "flops": runner.manifest["step"]["model_flops"] / runner.mesh.size,
    }
    return interleave.Served(facts=facts, call=call, steps=steps)


def _bundle(runner, batches):
    """A function that trains one call's steps and returns their losses."""
    main = runner.program("main")
    state = runner.program("shard")(runner.initial())
    given = {name: main.put(name, value[0]) for name, value in batches.items()}

    def call() -> list[float]:
        nonlocal state
        out = main({**state, **given})
        state = {name: x for name, x in out.items() if name.startswith("state.")}
        return out["metrics.loss"].tolist()

    return call


def _reference(runner, batches, layers: str):
    """As `_bundle`, for the hand-written program."""
    import jax
    import reference_jax

    config = runner.manifest["step"]["config"]
    program = reference_jax.Reference(
        mesh=runner.mesh,
        layers=reference_jax.Layers(layers),
        warmup_steps=int(_bound(config, "LinearWarmup.steps")),
        peak_rate=float(_bound(config, "CosineSchedule.start_value")),
        end_step=int(_bound(config, "CosineSchedule.end_step")),
        end_rate=float(_bound(config, "CosineSchedule.end_value")),
        clip=float(_bound(config, "Adam.clip_global_norm")),
        activation_dtype=runner.manifest["step"]["activation_dtype"],
    )
    state = _nested(runner.initial(), "state.")
    given = _nested({name: value[0] for name, value in batches.items()}, "batches.")
    compiled = program.compile(state, given)
    state_shardings, batch_shardings = compiled.input_shardings[0]
    state, given = (
        jax.device_put(state, state_shardings),
        jax.device_put(given, batch_shardings),
    )

    def call() -> list[float]:
        nonlocal state
        state, metrics = compiled(state, given)
        return metrics["loss"].tolist()

    return call


def _bound(config: str, name: str) -> str:
    """The value of a name in an operative gin configuration, with macros followed.

    Raises:
      ValueError: the configuration does not bind the name.
    """
    match = re.search(rf"^{re.escape(name)} = (\S+)$", config, re.MULTILINE)
    if match is None:
        raise ValueError(
            f"the bundle's configuration has no {name}: export a model of "
            "lm/transformer.gin with Adam, LinearWarmup and CosineSchedule"
        )
    value = match[1]
    return _bound(config, value[1:]) if value.startswith("%") else value


def _nested(arrays, prefix: str):
    out: dict = {}
    for name, value in arrays.items():
        *path, last = name.removeprefix(prefix).split(".")
        node = out
        for key in path:
            node = node.setdefault(key, {})
        node[last] = value
    return out


def main(argv: list[str]) -> int:
    """Measures and prints; returns the exit status."""
    options = parse(argv)
    if options.worker:
        interleave.serve(lambda: worker(options))
        return 0
    # By default the first process takes most of a GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        labels = {name: LABELS[name] for name in (OURS, *options.beside.split(","))}
    except KeyError as error:
        print(f"bundle_step_time.py: --beside has {error}", file=sys.stderr)
        return 2
    script, *flags = [__file__, str(options.bundle), f"--platform={options.platform}"]
    try:
        with contextlib.ExitStack() as stack:
            workers = [
                stack.enter_context(
                    interleave.Worker(
                        label, [sys.executable, script, *flags, f"--worker={name}"]
                    )
                )
                for name, label in labels.items()
            ]
            facts = [w.facts() for w in workers]
            losses = [fact["losses"] for fact in facts]
            difference = interleave.loss_difference(
                dict(zip(labels.values(), losses, strict=True)), LOSS_TOLERANCE
            )
            turns = interleave.take_turns(
                workers, rounds=options.rounds, steps=options.steps
            )
    except (RuntimeError, ValueError) as error:
        print(f"bundle_step_time.py: {error}", file=sys.stderr)
        return 1
    by_label = dict(zip(labels.values(), turns, strict=True))
    _print_table(facts[0], by_label, options.peak_flops)
    print(f"Losses of the first {CHECKED_STEPS} steps agree within {difference:.0e}.")
    return 0


def _print_table(
    facts: dict, turns: dict[str, list[interleave.Turn]], peak_flops: float | None
) -> None:
    ours = turns[LABELS[OURS]]
    print(f"{facts['device']}, jax {facts['jax']}, {len(ours)} rounds\n")
    print("| program | seconds a step | FLOPs utilisation | bundle / program |")
    print("|---|---|---|---|")
    for label, theirs in turns.items():
        seconds = statistics.median(turn.wall for turn in theirs)
        used = f"{facts['flops'] / seconds / peak_flops:.1%}" if peak_flops else ""
        pairs = zip(ours, theirs, strict=True)
        ratio = statistics.median(a.wall / b.wall for a, b in pairs)
        print(f"| {label} | {seconds:.4f} | {used} | {ratio:.2f} |")
    print()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
