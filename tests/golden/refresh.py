"""Writes the golden sharding text of every shipped experiment: `make golden`."""

import pathlib

from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.config import PARAMS
from meshwright.trainers.experiment.sharding_text import sharding_text

GOLDEN = pathlib.Path(__file__).parent


def experiment_files() -> list[str]:
    """The shipped gin files that are whole experiments, by their path under params/."""
    files = sorted(f.relative_to(PARAMS).as_posix() for f in PARAMS.rglob("*.gin"))
    return [f for f in files if "# Must be set: nothing" in (PARAMS / f).read_text()]


def golden_path(gin_file: str) -> pathlib.Path:
    """Where the golden text of a gin file lies."""
    return GOLDEN / gin_file.replace("/", "_").replace(".gin", ".txt")


if __name__ == "__main__":
    for stale in GOLDEN.glob("*.txt"):
        stale.unlink()
    for gin_file in experiment_files():
        experiment, _ = build_experiment([gin_file], [])
        golden_path(gin_file).write_text(sharding_text(experiment))
        print(golden_path(gin_file))
