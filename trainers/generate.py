r"""meshwright-generate: continues or translates text by a model that was trained.

Example:

  meshwright-generate --gin_file=lm/stdlib_tiny.gin --model_dir=logs/stdlib_tiny \
    --prompt='def main(' --temperature=0.8 --top_p=0.95

A single prompt's continuation is shown as it is made; those of several are JSON
objects, one a line. Without --prompt and --prompts_file each line of standard input is
a prompt. If the model is a Translation, prompts are sources, which it translates.
"""

from __future__ import annotations

from meshwright.trainers import cli
from meshwright.trainers.startup import generate_flags

NAME = "meshwright-generate"
REQUIRED = {"gin_file": "lm/stdlib_tiny.gin", "model_dir": "logs/stdlib_tiny"}


def main(argv: list[str]) -> int | None:
    """Parses flags and calls; returns the exit status."""
    return cli.call(NAME, argv, _load, check=generate_flags.check)


def _load() -> cli.Command:
    from meshwright.trainers.serving import generate_main

    return generate_main.COMMAND


def run() -> None:
    """The console script."""
    cli.run(NAME, main, required=REQUIRED)


if __name__ == "__main__":
    run()
