"""Experts against dense: what is read from a run's events, and the table of it."""

import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

from benchmarks import experts
from benchmarks.experts import Found
from meshwright.trainers.planning.tensorboard.summaries import metric_tags

DIRECTIONS = ("bleu/en-de", "bleu/en-fr")


def write(folder, part, curves):
    with tf.summary.create_file_writer(str(folder / part)).as_default():
        for name, points in curves.items():
            for step, value in points:
                tf.summary.scalar(name, value, step=step)
        tf.summary.text("config", "a = 1", step=0)


def test_a_run_is_read_once_it_is_complete(tmp_path):
    steps = range(20, 401, 20)
    losses = [(step, 10.0 - step / 100) for step in steps]
    seconds = [(20, 9.0), (40, 0.5)]
    write(tmp_path, "train", {"loss": losses, "speed/step_time_s": seconds})
    write(tmp_path, "eval", metric_tags({"loss": [(200, 5.0)], "bleu": [(200, 1.0)]}))
    assert experts.read(tmp_path, 400) is None
    assert experts.read(tmp_path / "nowhere", 400) is None
    write(tmp_path, "eval", metric_tags({"loss": [(400, 4.0)], "bleu": [(400, 7.0)]}))
    result = experts.read(tmp_path, 400)
    # The last tenth: steps 380 and 400.
    assert result.train_loss == pytest.approx((6.2 + 6.0) / 2)
    assert result.metrics == {"loss": 4.0, "bleu": 7.0}
    assert result.step_s == pytest.approx(4.75)


def scores_of(train, held_out, de, fr):
    scores = dict(zip(DIRECTIONS, (de, fr), strict=True))
    metrics = {"loss": held_out, "bleu": (de + fr) / 2, "chrf": 9.0, **scores}
    return Found(train_loss=train, metrics=metrics, step_s=0.25)


def test_the_table_tells_differences_by_seed_and_scores_by_language():
    runs = {
        (1, "experts"): scores_of(1.0, 2.0, 10.0, 20.0),
        (1, "dense"): scores_of(1.5, 2.25, 8.0, 16.0),
        (2, "experts"): scores_of(1.25, 2.5, 12.0, 20.0),
        (2, "dense"): scores_of(1.5, 2.25, 10.0, 18.0),
    }
    text = experts.summary(runs)
    assert text[0] == "training loss, experts less dense: -0.375 (-0.500, -0.250)"
    assert text[1] == "held-out loss, experts less dense: +0.000 (-0.250, +0.250)"
    assert text[2] == "BLEU, experts less dense: +2.500 (+3.000, +2.000)"
    assert text[-2].split() == ["en-de", "11.0", "9.0"]
    assert text[-1].split() == ["en-fr", "20.0", "17.0"]
    row = experts.table_row(1, "dense", runs[1, "dense"])
    assert row.split() == ["1", "dense", "1.5000", "2.2500", "12.00", "9.00", "0.250"]
    assert len(row) == len(experts.HEADER.splitlines()[0]) <= 80


def program(monkeypatch, folder, script):
    """Runs `script` in place of training."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(experts.sys, "executable", str(python))


def test_the_log_of_a_run_says_why_it_failed(tmp_path, monkeypatch):
    program(monkeypatch, tmp_path, "echo no data for $4 >&2; exit 3")
    folder = tmp_path / "dense_7"
    with pytest.raises(SystemExit, match=f"a run failed, see {folder}.log"):
        experts.completed(folder, 60, experts.read, "a.gin", [])
    log = (tmp_path / "dense_7.log").read_text()
    assert log == f"no data for --model_dir={folder}\n"


def test_a_run_is_trained_only_if_it_is_not_complete(tmp_path, monkeypatch):
    program(monkeypatch, tmp_path, f"echo $3 $5 >> {tmp_path}/ran")
    results = iter([7, None, 8, None, None])

    def completed():
        return experts.completed(
            tmp_path / "run", 60, lambda *_: next(results), "a.gin", ["B = 1"]
        )

    assert completed() == 7 and not (tmp_path / "ran").exists()
    assert completed() == 8
    assert (tmp_path / "ran").read_text() == "--gin_file=a.gin --gin_param=B = 1\n"
    with pytest.raises(SystemExit, match=r"run has no evaluation at step 60: .*--mod"):
        completed()


@pytest.mark.slow  # A process that builds the task.
def test_a_run_that_fails_points_to_its_log(tmp_path):
    command = [sys.executable, experts.__file__, f"--model_dir={tmp_path}"]
    command += ["--seeds=7", "--gin_param=GettextCatalogues.root = '/nowhere'"]
    ran = subprocess.run(command, capture_output=True, text=True)
    log = pathlib.Path(tmp_path / "experts_7.log")
    assert ran.returncode and f"a run failed, see {log}" in ran.stderr
    assert "no .mo or .po files under '/nowhere'" in log.read_text()
