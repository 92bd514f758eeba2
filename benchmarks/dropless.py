"""Experts that are never full against slots, at equal FLOPs of experts, over seeds.

    python -m benchmarks.dropless [--steps=300] [--seeds=1,2,3] [--model_dir=DIR]

Trains `lm/stdlib_experts.gin` on one device, as it is and with as many slots as there
are choices (a capacity factor of k), in turns; each seed has its own weights and order
of text, the same for both. Prints of held-out text the loss in nats per byte, the share
of tokens that no expert took and the overload factor, and the seconds of a step. Runs
that are complete are read again. A run of 300 steps takes a minute on 2 cores.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping, Sequence

from absl import app, flags

from benchmarks.experts import completed, curves

GIN_FILE = "lm/stdlib_experts.gin"
MODELS = {
    "dropless": (),
    "slots": (
        "MoE.dropless = None",
        "TopK.capacity = @Capacity()",
        "Capacity.factor = %EXPERTS_PER_TOKEN",
    ),
}
METRICS = ("loss", "metrics/stack/dropped", "metrics/stack/busiest_expert")
HEADER = f"""\
{"seed":>4}  {"model":10}{"held-out loss":>14}{"dropped":>9}{"overload":>10}\
{"s/step":>8}
{"-" * 57}"""


def define_flags() -> None:
    """Called only by this program."""
    flags.DEFINE_integer("steps", 300, "Steps of each run.", lower_bound=60)
    flags.DEFINE_list("seeds", ["1", "2", "3"], "One run of each model per seed.")
    flags.DEFINE_string("model_dir", "logs/dropless", "Folder of the runs.")


def bindings_of(model: str, seed: int, steps: int) -> list[str]:
    """What a run has on top of `GIN_FILE`."""
    return [
        *MODELS[model],
        "MESH_SHAPE = (1,)",
        f"Experiment.seed = {seed}",
        f"TextInput.seed = {seed}",
        f"Experiment.num_steps = {steps}",
        f"Experiment.eval_interval = {steps}",
        f"CosineSchedule.end_step = {steps}",
    ]


def read(folder: pathlib.Path, steps: int) -> dict[str, float] | None:
    """The metrics of held-out text after `steps` steps, and `step_s`; None: not yet."""
    held_out = curves(folder / "eval")
    if any(steps not in held_out.get(name, {}) for name in METRICS):
        return None
    seconds = curves(folder / "train")["speed/step_time_s"].values()
    metrics = {name: held_out[name][steps] for name in METRICS}
    return metrics | {"step_s": statistics.median(seconds)}


def table_row(seed: int, model: str, result: Mapping[str, float]) -> str:
    """The run's line below `HEADER`."""
    loss, dropped, overload = (result[name] for name in METRICS)
    return (
        f"{seed:4}  {model:10}{loss:14.4f}{dropped:9.4f}{overload:10.3f}"
        f"{result['step_s']:8.3f}"
    )


def summary(runs: Mapping[tuple[int, str], Mapping[str, float]]) -> str:
    """The line below the table: the difference by seed."""
    seeds = sorted({seed for seed, _ in runs})
    gaps = [runs[s, "dropless"]["loss"] - runs[s, "slots"]["loss"] for s in seeds]
    by_seed = ", ".join(f"{gap:+.4f}" for gap in gaps)
    mean = statistics.mean(gaps)
    return f"held-out loss, dropless less slots: {mean:+.4f} ({by_seed})"


def main(argv: Sequence[str]) -> None:
    """Trains what is missing and prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    steps, root = flags.FLAGS.steps, pathlib.Path(flags.FLAGS.model_dir)
    root.mkdir(parents=True, exist_ok=True)
    runs = {}
    print(HEADER)
    for seed in map(int, flags.FLAGS.seeds):
        for model in MODELS:
            folder, bindings = root / f"{model}_{seed}", bindings_of(model, seed, steps)
            result = completed(folder, steps, read, GIN_FILE, bindings)
            runs[seed, model] = result
            print(table_row(seed, model, result), flush=True)
    print(summary(runs))


if __name__ == "__main__":
    define_flags()
    app.run(main)
