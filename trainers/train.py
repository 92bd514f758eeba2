"""meshwright-train: trains and evaluates what a gin file describes.

Example:

  meshwright-train --gin_file=lm/stdlib_tiny.gin --model_dir=logs/stdlib_tiny

The same command goes on from the newest checkpoint in --model_dir, if any.
--gin_param='Experiment.num_steps = 100' overrides a value of the file.
"""

from __future__ import annotations

from meshwright.trainers import cli
from meshwright.trainers.startup import huge_pages, train_flags

NAME = "meshwright-train"
REQUIRED = {"gin_file": "lm/stdlib_tiny.gin"}


def main(argv: list[str]) -> int | None:
    """Parses flags and calls; returns the exit status."""
    return cli.call(NAME, argv, _load, check=train_flags.check)


def _load() -> cli.Command:
    from meshwright.trainers.training import training_main

    return training_main.COMMAND


def run() -> None:
    """The console script."""
    huge_pages.use_huge_pages()
    cli.run(NAME, main, required=REQUIRED)


if __name__ == "__main__":
    run()
