"""The figure of weight-update sharding's Figure 12, from kept rows."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

# Where a script finds its neighbours.
sys.path.append(str(pathlib.Path(__file__).parents[3] / "benchmarks" / "papers"))

from benchmarks.papers import memory_plot  # noqa: E402

ROOT = pathlib.Path(memory_plot.__file__).parents[2]
KEPT = ROOT / "tests" / "data" / "paper_rows.json"


def models():
    """The kept rows of the paper's Table 1."""
    rows = [row for row in json.loads(KEPT.read_text()) if row["table"] == "wus"]
    return [row for row in rows if row["row"] not in ("loop", "short", "short_loop")]


def test_the_bars_are_the_kept_peaks():
    drawn = memory_plot.figure(json.loads(KEPT.read_text()))
    (axes,) = drawn.axes
    for bars, mode in zip(axes.containers, ("off", "on"), strict=True):
        peaks = {row["ours"][mode]["peak_gb"] for row in models()}
        assert {bar.get_height() for bar in bars} == peaks
    shares = {f"-{memory_plot.saved(row['ours']):.0%}" for row in models()}
    assert {text.get_text() for text in axes.texts} == shares


def test_the_figure_of_the_docs_is_of_the_kept_rows(tmp_path):
    out = tmp_path / "figure12.svg"
    command = [sys.executable, memory_plot.__file__, f"--rows={KEPT}"]
    subprocess.run([*command, f"--plot_out={out}"], check=True)
    texts = [
        re.findall(r"<text [^>]*>([^<]*)</text>", file.read_text())
        for file in (out, ROOT / "docs" / "images" / "figure12.svg")
    ]
    assert texts[0] == texts[1] and "sharded" in texts[0]


def test_no_rows_no_figure():
    with pytest.raises(ValueError, match="no model of Table 1"):
        memory_plot.figure([])


def test_the_table_of_the_docs_has_the_kept_peaks():
    text = (ROOT / "docs" / "explanations" / "weight_updates.md").read_text()
    table = text.partition("| | peak GB off | on | less |\n")[2].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ")[1:] for line in table.splitlines()[1:]]
    assert cells[: len(models())] == [
        [
            *(f"{row['ours'][mode]['peak_gb']:.2f}" for mode in ("off", "on")),
            f"{memory_plot.saved(row['ours']):.0%}",
        ]
        for row in models()
    ]
