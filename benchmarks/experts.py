"""Experts against a dense model of equal FLOPs per step, on real text, over seeds.

    python benchmarks/experts.py [--steps=600] [--seeds=1,2,3] [--model_dir=DIR]

Trains `mt/gettext_moe.gin` and `mt/gettext_dense.gin` in turns, each seed with its own
weights and order of text, the same for both models. Prints the training loss (nats per
token, without label smoothing or the experts' losses, mean of the batches shown in the
last tenth), the loss of held-out text, BLEU and chrF, means over languages, then BLEU
by language. All runs are in one folder for TensorBoard; complete runs are read again,
others go on where they stopped.

It needs iso-codes (docs/jobs/translation.md). A run of 600 steps takes 5 minutes on
2 cores.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import app, flags
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

MODELS = {"experts": "mt/gettext_moe.gin", "dense": "mt/gettext_dense.gin"}


def define_flags() -> None:
    """Called only by this program."""
    flags.DEFINE_integer("steps", 600, "Steps of each run.", lower_bound=20)
    flags.DEFINE_list("seeds", ["1", "2", "3"], "One run of each model per seed.")
    flags.DEFINE_string("model_dir", "logs/experts", "Folder of the runs.")
    flags.DEFINE_multi_string("gin_param", [], "Bindings for both models.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The results of one run.

    Args:
      train_loss: nats per token, mean of the batches shown in the last tenth.
      metrics: metrics of held-out text: loss, bleu, chrf, bleu/en-de, ...
      step_s: median seconds of a step.
    """

    train_loss: float
    metrics: Mapping[str, float]
    step_s: float


def completed(
    folder: pathlib.Path,
    steps: int,
    read: Callable[[pathlib.Path, int], Any],
    gin_file: str,
    bindings: Sequence[str],
) -> Any:
    """What `read` (folder, steps) finds of a run, trained first if that is None.

    Raises:
      SystemExit: training failed, or there is no evaluation after the last step.
    """
    result = read(folder, steps)
    if result is None:
        try:
            trained(folder, gin_file, bindings)
        except subprocess.CalledProcessError:
            sys.exit(f"a run failed, see {folder}.log")
        result = read(folder, steps)
    if result is None:
        sys.exit(
            f"{folder} has no evaluation at step {steps}: it was stopped, or trained "
            "further before; name another --model_dir"
        )
    return result


def trained(folder: pathlib.Path, gin_file: str, bindings: Sequence[str]) -> None:
    """Trains in a separate process, from the state in `folder`.

    Raises:
      subprocess.CalledProcessError: training failed; its log says why.
    """
    command = [sys.executable, "-m", "meshwright.trainers.train"]
    command += [f"--gin_file={gin_file}", f"--model_dir={folder}"]
    command += [f"--gin_param={binding}" for binding in bindings]
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log)


def read(folder: pathlib.Path, steps: int) -> Found | None:
    """The results of a run after `steps` steps; None if it has not got there."""
    by_part = {part: curves(folder / part) for part in ("train", "eval")}
    held_out = {
        tag.removeprefix("metrics/"): curve[steps]
        for tag, curve in by_part["eval"].items()
        if steps in curve
    }
    if "bleu" not in held_out:
        return None
    losses = by_part["train"]["loss"]
    last = [loss for step, loss in losses.items() if step > 0.9 * steps]
    return Found(
        train_loss=statistics.mean(last),
        metrics=held_out,
        step_s=statistics.median(by_part["train"]["speed/step_time_s"].values()),
    )


def curves(folder: pathlib.Path) -> dict[str, dict[int, float]]:
    """Values by step of each scalar below a folder."""
    if not folder.is_dir():
        return {}
    events = EventAccumulator(str(folder), {"tensors": 0}).Reload()  # All.
    return {
        tag: {event.step: _value(event) for event in events.Tensors(tag)}
        for tag in events.Tags()["tensors"]
        if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"
    }


def _value(event) -> float:
    return float(tensor_util.make_ndarray(event.tensor_proto))


HEADER = f"""\
{"seed":>4}  {"model":8}{"training loss":>14}{"held-out loss":>14}{"BLEU":>7}\
{"chrF":>7}{"s/step":>8}
{"-" * 62}"""


def table_row(seed: int, model: str, result: Found) -> str:
    """The run's line below `HEADER`."""
    metrics = result.metrics
    return (
        f"{seed:4}  {model:8}{result.train_loss:14.4f}{metrics['loss']:14.4f}"
        f"{metrics['bleu']:7.2f}{metrics['chrf']:7.2f}{result.step_s:8.3f}"
    )


def summary(runs: Mapping[tuple[int, str], Found]) -> list[str]:
    """The lines below the table: differences by seed, and BLEU by language."""
    seeds = sorted({seed for seed, _ in runs})
    lines = []
    kinds = {
        "training loss": lambda result: result.train_loss,
        "held-out loss": lambda result: result.metrics["loss"],
        "BLEU": lambda result: result.metrics["bleu"],
    }
    for name, of in kinds.items():
        gaps = [of(runs[seed, "experts"]) - of(runs[seed, "dense"]) for seed in seeds]
        by_seed = ", ".join(f"{gap:+.3f}" for gap in gaps)
        mean = statistics.mean(gaps)
        lines.append(f"{name}, experts less dense: {mean:+.3f} ({by_seed})")
    directions = sorted(
        name for name in runs[seeds[0], "dense"].metrics if name.startswith("bleu/")
    )
    lines += ["", "BLEU, mean over seeds"]
    lines.append(f"{'':12}" + "".join(f"{model:>9}" for model in MODELS))
    for name in directions:
        scores = [
            statistics.mean(runs[seed, model].metrics[name] for seed in seeds)
            for model in MODELS
        ]
        direction = name.removeprefix("bleu/")
        lines.append(f"{direction:12}" + "".join(f"{score:9.1f}" for score in scores))
    return lines


def main(argv: Sequence[str]) -> None:
    """Trains what is missing and prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    steps, root = flags.FLAGS.steps, pathlib.Path(flags.FLAGS.model_dir)
    params = [
        *flags.FLAGS.gin_param,
        f"Experiment.num_steps = {steps}",
        f"Experiment.eval_interval = {steps}",
    ]
    root.mkdir(parents=True, exist_ok=True)
    runs = {}
    print(HEADER)
    for seed in map(int, flags.FLAGS.seeds):
        seeds = [f"Experiment.seed = {seed}", f"TranslationInput.seed = {seed}"]
        for model, gin_file in MODELS.items():
            folder = root / f"{model}_{seed}"
            result = completed(folder, steps, read, gin_file, [*seeds, *params])
            runs[seed, model] = result
            print(table_row(seed, model, result), flush=True)
    print(*summary(runs), sep="\n")


if __name__ == "__main__":
    define_flags()
    app.run(main)
