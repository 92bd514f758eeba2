r"""meshwright-export: a SavedModel, and a bundle for machines with jax alone.

The SavedModel has canonical weights and takes batches of any size. The bundle holds the
training's own programs, sharded for the experiment's mesh, and a runner for them that
needs jax and numpy alone. A language model's weights can also be had as safetensors.

Example:

  meshwright-export --gin_file=lm/stdlib_tiny.gin --model_dir=logs/stdlib_tiny \
    --output=exported
"""

from __future__ import annotations

from meshwright.trainers import cli
from meshwright.trainers.startup import export_flags

NAME = "meshwright-export"
REQUIRED = {"gin_file": "lm/stdlib_tiny.gin", "output": "exported"}


def main(argv: list[str]) -> int | None:
    """Parses flags and calls; returns the exit status."""
    return cli.call(NAME, argv, _load, check=export_flags.wanted)


def _load() -> cli.Command:
    from meshwright.trainers.serving import export_main

    return export_main.COMMAND


def run() -> None:
    """The console script."""
    cli.run(NAME, main, required=REQUIRED)


if __name__ == "__main__":
    run()
