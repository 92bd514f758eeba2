"""Memory against spatial partitions, from compiled programs; the figure of Table 8."""

import json
import pathlib
import subprocess
import sys

import pytest

# Where a script finds its neighbours.
sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks" / "papers"))

from benchmarks.papers import spatial_plot  # noqa: E402

FOLDER = pathlib.Path(spatial_plot.__file__).parent
KEPT = FOLDER.parents[1] / "tests" / "data" / "paper_rows.json"


def run(script: str, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(FOLDER / script), *flags]
    return subprocess.run(command, capture_output=True, text=True)


def test_memory_falls_with_the_partitions():
    done = run("spatial_partitions.py", "--size=32", "--partitions=1,4")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    (single, four) = (list(map(float, line.split())) for line in lines[-2:])
    assert (single[0], four[0]) == (1, 4) and single[3] == 1.0
    assert single[1] < single[2] and four[2] < 0.36 * single[2]
    assert four[3] == pytest.approx(4 * four[2] / single[2], abs=0.01)


def test_what_is_no_number_of_partitions_is_told():
    done = run("spatial_partitions.py", "--partitions=1,many")
    assert done.returncode == 1
    assert "--partitions: 'many' is no number of 1 or more" in done.stderr


def test_the_figure_has_the_kept_rows(tmp_path):
    rows = [row for row in json.loads(KEPT.read_text()) if row["table"] == "8"]
    drawn = spatial_plot.figure(rows)
    for axes, what in zip(drawn.axes, ("step_s", "peak_gb"), strict=True):
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert set(lines) == {
            f"{size}$^3$, {whose}" for size in (128, 256) for whose in ("paper", "ours")
        }
        for size in ("128", "256"):
            for whose in ("paper", "ours"):
                want = [
                    row[whose][what]
                    for row in rows
                    if row["row"].startswith(size) and row["paper"]
                ]
                shown = lines[f"{size}$^3$, {whose}"].get_ydata()
                assert sorted(shown) == sorted(want)
    out = tmp_path / "table8.svg"
    done = run("spatial_plot.py", f"--rows={KEPT}", f"--plot_out={out}")
    assert done.returncode == 0, done.stderr
    assert "spatial partitions" in out.read_text()


def test_no_rows_no_figure(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("[]")
    done = run("spatial_plot.py", f"--rows={path}", "--plot_out=x.svg")
    assert done.returncode == 1 and "no row of Table 8 that fits" in done.stderr
