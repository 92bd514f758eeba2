"""How the plots of `paper_tables.py`'s rows are made, from JSON to files."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from absl import app, flags
from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
# Okabe and Ito's colours.
ORANGE, BLUE = "#E69F00", "#0072B2"
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
}


def define_flags() -> None:
    """Called only by a plot's program: the flags are required."""
    flags.DEFINE_string("rows", None, "JSON of paper_tables.py.", required=True)
    flags.DEFINE_string("plot_out", None, "File, .svg or .png.", required=True)


def draw(script: str, figure: Callable[[Rows], Figure], argv: Sequence[str]) -> None:
    """Draws a figure of `--rows` into `--plot_out`; twice the same if the rows are.

    Args:
      script: the program's file.
      figure: makes the figure; ValueError if the rows are not there.
      argv: what is left of the command line.
    """
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    name = pathlib.Path(script).name
    try:
        rows = json.loads(pathlib.Path(flags.FLAGS.rows).read_text())
        out = pathlib.Path(flags.FLAGS.plot_out)
        with matplotlib.rc_context(_STYLE | {"svg.hashsalt": out.stem}):
            metadata = {"Date": None} if out.suffix == ".svg" else None
            figure(rows).savefig(out, metadata=metadata)
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")
