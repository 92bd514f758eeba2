"""The tab Meshwright of TensorBoard, in a browser, on the logs of a small training."""

import functools
import importlib
import json
import logging
import shutil
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
from tensorboard import default, program

from meshwright.framework.compiler.lowering.errors import LoweringError
from meshwright.trainers.planning.search import plan_cache
from meshwright.trainers.planning.tensorboard import program_files
from meshwright.trainers.planning.tensorboard.plugin import (
    NO_FILES,
    NO_FOLDER,
    MeshwrightPlugin,
)
from meshwright.trainers.planning.tensorboard.summaries import Summaries
from meshwright.trainers.training import loop
from meshwright.trainers.training.program_report import ProgramWriter, digest_of
from meshwright.trainers.training.stop_signals import StopRequest
from tests.framework.showing import chromium
from tests.house.test_package import setup_argument
from tests.trainers.planning.test_plan_pipelines import pipeline
from tests.trainers.small_run import at, small_programs

STEPS = 4


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A training `lm`, a plan of the same with a pipeline, and loads of experts."""
    folder = tmp_path_factory.mktemp("logs")
    programs = at(small_programs(), num_steps=STEPS, summary_interval=1)
    run = loop.Run(
        model_dir=str(folder / "lm"), config="", evaluate=False, write_program=True
    )
    loop.train_and_evaluate(programs, run)
    files = folder / "lm" / "meshwright"
    plan = json.loads((files / "plan.json").read_text())
    plan["pipelines"] = [pipeline(2, 4)]
    (folder / "pipelined" / "plan").mkdir(parents=True)
    shutil.copytree(files, folder / "pipelined" / "plan" / "meshwright")
    (folder / "pipelined/plan/meshwright/plan.json").write_text(json.dumps(plan))
    experts = Summaries(str(folder), "experts")
    for step in (1, 2):
        load = np.arange(16.0).reshape(2, 8) * step
        experts.heat_maps(step, {"stack/load_per_expert": load})
        experts.scalars(step, {"stack/dropped": 0.25 * step})
    experts.close()
    return folder


def serve(folder):
    """The address of a TensorBoard of a folder, which lives as long as the process."""
    return serve_by("--logdir", str(folder))


def serve_by(*flags):
    """The same by flags."""
    # Not those of entry points, ours among them once the package is installed anew.
    plugins = [*default.get_static_plugins(), MeshwrightPlugin]
    server = program.TensorBoard(plugins=plugins)
    arguments = [*flags, "--port", "0", "--load_fast=false"]
    server.configure(argv=["tensorboard", *arguments])
    return server.launch()


@pytest.fixture(scope="module")
def served(logs):
    return serve(logs)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium.page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


def asked(url, path):
    with urllib.request.urlopen(f"{url}data/plugin/meshwright/{path}") as answer:
        return json.load(answer)


def opened(page, url, size=(1280, 900)):
    page.console.clear()
    page.open(f"{url}data/plugin_entry.html?name=meshwright", width=size[0])
    page.wait("document.querySelector('nav button')")
    return page


def show(page, name, run=None):
    if run is not None:
        page.run(
            "(() => { const choice = document.querySelector('select'); "
            f"choice.value = {run!r}; choice.dispatchEvent(new Event('change')); }})()"
        )
    page.run(f"document.querySelector('[data-view={name}]').click()")
    page.wait(
        f"document.querySelector('[data-view={name}]').ariaSelected === 'true' && "
        "document.querySelector('main').childElementCount"
    )


@chromium.needs_chromium
def test_every_view(browser, served, logs):
    page = opened(browser, served)
    plan = json.loads((logs / "lm" / "meshwright" / "plan.json").read_text())
    page.wait("document.querySelector('iframe')?.contentDocument.querySelector('.row')")
    inside = "document.querySelector('iframe').contentDocument"
    assert "stack" in page.run(f"{inside}.querySelector('#rows').innerText")

    show(page, "Memory")
    page.wait("document.querySelector('main h2')?.innerText.includes('at the peak')")
    assert page.run("document.querySelectorAll('main svg path').length") == 2
    assert "ops in the order in which they run" in page.text("main")
    for part in plan["breakdown"]:
        assert not part["bytes"] or part["part"] in page.text("main")
    assert plan["buffers"][0]["name"] in page.text("main")

    show(page, "Weights")
    page.wait("document.querySelector('main h2')?.innerText.includes('of weights')")
    assert page.run("document.querySelectorAll('tbody tr').length") == len(
        plan["weights"]
    )
    table = page.text("tbody")
    for weight in plan["weights"]:
        assert weight["path"] in table and weight["sharding"] in table

    show(page, "Pipeline")
    page.wait("document.querySelector('main').innerText.includes('no pipeline')")
    show(page, "Pipeline", "pipelined/plan")
    page.wait("document.querySelector('.cells')")
    assert "2 stages, 4 microbatches, 1 round, 5 iterations" in page.text("main")
    rows = page.run(
        "[...document.querySelectorAll('.cells')].map((row) => "
        "[...row.querySelectorAll('i')].map((cell) => cell.innerText))"
    )
    assert rows == [["0", "1", "2", "3", ""], ["", "0", "1", "2", "3"]]

    show(page, "Experts")
    page.wait("document.querySelector('.load')?.complete")
    assert page.run("document.querySelector('.load').naturalWidth") == 128
    assert "stack/dropped" in page.text("main") and "50.0%" in page.text("main")

    show(page, "Health")
    page.wait("document.querySelector('main h2')?.innerText.includes('Health')")
    for tag in ("loss", "run/goodput", "optimizer/grad_norm", "speed/step_time_s"):
        assert tag in page.text("main")
    assert "speed/step_time_s (seconds)" in page.text("main")
    labels = page.run(
        "[...document.querySelectorAll('svg text')].map((t) => t.textContent)"
    )
    assert labels.count("step") == page.run(
        "document.querySelectorAll('figure').length"
    )
    assert page.console == []
    assert all(url.startswith((served, "data:")) for url in browser.loaded)


@chromium.needs_chromium
def test_the_page_of_the_run_can_be_used_within_tensorboard(browser, served):
    browser.console.clear()
    page = browser
    page.open(f"{served}data/plugin/meshwright/page?run=lm")
    page.wait("typeof state === 'object' && state.rows.length")
    page.run("search('feed_forward all-gather')")
    page.click("document.querySelector('.row.sent')")
    page.wait("document.querySelector('#details .at')")
    assert "all-gather" in page.text("#details")
    # The names that layers gave to dims are on it.
    page.run("search('0.theta.stack.feed_forward.w_in')")
    assert "hidden" in page.text(".row.tensor .type")
    assert page.console == []


@chromium.needs_chromium
def test_logs_of_an_older_version_say_what_to_run(browser, logs, tmp_path):
    shutil.copytree(logs / "lm" / "train", tmp_path / "train")
    page = opened(browser, serve(tmp_path))
    page.wait("document.querySelector('.message')")
    text = page.text(".message")
    assert "These logs have no program of Meshwright: they are of an older" in text
    assert "meshwright-train --gin_file=FILE --model_dir=FOLDER" in text
    show(page, "Health")  # What they have is shown.
    page.wait("document.querySelector('main h2')?.innerText.includes('Health')")
    assert page.console == []


@chromium.needs_chromium
def test_on_a_phone(browser, served):
    page = opened(browser, served, size=(390, 844))
    for name in ("Memory", "Weights", "Health"):
        show(page, name)
        page.wait("document.querySelector('main h2')")
        assert page.run("document.documentElement.scrollWidth") == 390, name


def test_what_it_serves(served, logs):
    assert asked(served, "runs") == {"runs": ["lm", "pipelined/plan"], "message": ""}
    curves = asked(served, "curves")
    steps = [step for step, _ in curves["health"]["lm/train"]["loss"]]
    assert steps == list(range(1, STEPS + 1))
    assert curves["experts"] == {"experts": {"stack/dropped": [[1, 0.25], [2, 0.5]]}}
    plan = json.loads((logs / "lm" / "meshwright" / "plan.json").read_text())
    assert asked(served, "plan?run=lm") == plan
    for run in ("", "../lm", "none", "lm/../lm"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            asked(served, f"plan?run={run}")


@chromium.needs_chromium
def test_what_is_not_finite_is_a_gap(browser, tmp_path):
    """Bare NaN, as Python writes it, no browser would read."""
    curve = Summaries(str(tmp_path), "train")
    for step, norm in enumerate([1.0, float("nan"), 2.0, float("inf")], 1):
        curve.scalars(step, {"optimizer/grad_norm": norm})
    curve.close()
    page = opened(browser, serve(tmp_path))
    show(page, "Health")
    page.wait("document.querySelector('main h2')?.innerText.includes('Health')")
    assert "not finite" in page.text("main")
    path = page.run("document.querySelector('main svg path').getAttribute('d')")
    assert path.count("M") == 2 and "NaN" not in path


def test_runs_of_a_logdir_spec_say_what_to_run():
    assert asked(serve_by("--logdir_spec", "a:/nowhere"), "runs") == {
        "runs": [],
        "message": NO_FOLDER,
    }


def test_without_files_there_is_a_message(tmp_path):
    assert asked(serve(tmp_path), "runs") == {"runs": [], "message": NO_FILES}


def test_the_flag_leaves_the_files_out(tmp_path):
    programs = at(small_programs(), num_steps=1)
    loop.train_and_evaluate(
        programs, loop.Run(model_dir=str(tmp_path), evaluate=False, write_program=False)
    )
    assert not (tmp_path / "meshwright").exists()


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "meshwright").write_text("a file")
    with pytest.raises(OSError, match="cannot write to .*plan/meshwright"):
        program_files.write(str(tmp_path / "plan"), {}, small_programs().traced_main)


def test_no_page_of_an_earlier_program_stays(tmp_path, monkeypatch):
    traced = small_programs().traced_main
    program_files.write(str(tmp_path), {"number": 1}, traced)
    page = tmp_path / "meshwright" / "program.html"
    assert page.exists()

    def refuses(program):
        raise LoweringError("nothing can be told")

    monkeypatch.setattr(program_files, "page_text", refuses)
    program_files.write(str(tmp_path), {"number": 2}, traced)
    assert not page.exists()
    assert json.loads((tmp_path / "meshwright" / "plan.json").read_text()) == {
        "number": 2
    }


def test_a_write_that_is_broken_off_leaves_the_earlier_files(tmp_path, monkeypatch):
    def breaks_off(self, text):
        raise SystemExit

    traced = small_programs().traced_main
    program_files.write(str(tmp_path), {"number": 1}, traced)
    before = [path.read_text() for path in sorted(tmp_path.glob("meshwright/*"))]
    monkeypatch.setattr(program_files.tf.io.gfile.GFile, "write", breaks_off)
    with pytest.raises(SystemExit):
        program_files.write(str(tmp_path), {"number": 2}, traced)
    kept = [tmp_path / "meshwright" / name for name in ("plan.json", "program.html")]
    assert [path.read_text() for path in kept] == before


def test_a_start_with_the_same_program_writes_no_page(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="absl")
    programs, folder = small_programs(), tmp_path / "meshwright"
    traced = programs.traced_main
    config = "Experiment.num_steps = 2\nExperiment.seed = 0"
    digest = digest_of(programs, config)
    document = {"digest": digest, "config": config}
    program_files.write(str(tmp_path), document, traced)
    page = (folder / "program.html").stat().st_mtime_ns
    again, longer = small_programs(), config.replace("2", "3")
    for text in (config, longer):
        writer = ProgramWriter(str(tmp_path), text, StopRequest())
        writer.start(again, 0.0)
        writer.close()
        assert caplog.messages[-1].endswith("page for TensorBoard are there already")
        plan = json.loads((folder / "plan.json").read_text())
        assert plan == {"digest": digest, "config": text}
    assert (folder / "program.html").stat().st_mtime_ns == page
    assert digest_of(again, config.replace("seed = 0", "seed = 1")) != digest
    kept_plan = functools.partial(program_files.kept_plan, str(tmp_path))
    assert kept_plan("another", traced) is None
    (folder / "program.html").rename(folder / "another.html")
    assert kept_plan(digest, traced) is None
    (folder / "another.html").rename(folder / "program.html")
    assert kept_plan(digest, traced)["config"] == longer
    (folder / "plan.json").write_text("[")
    assert kept_plan(digest, traced) is None
    changed = plan_cache.versions() | {"jax": "another"}
    monkeypatch.setattr(plan_cache, "versions", lambda: changed)
    assert digest_of(again, config) != digest


def test_training_goes_on_without_its_page(tmp_path, caplog):
    (tmp_path / "meshwright").write_text("a file")
    programs = at(small_programs(), num_steps=1)
    run = loop.Run(model_dir=str(tmp_path), evaluate=False, write_program=True)
    assert loop.train_and_evaluate(programs, run).step == 1
    assert "TensorBoard will not show this program" in caplog.text
    assert "cannot write to" in caplog.text


def test_setup_declares_the_plugin():
    (text,) = setup_argument("entry_points")["tensorboard_plugins"]
    name, _, place = text.partition("=")
    module, _, attribute = place.partition(":")
    assert name == MeshwrightPlugin.plugin_name
    assert getattr(importlib.import_module(module), attribute) is MeshwrightPlugin


def test_tensorboard_starts_without_tensorflow_and_jax():
    code = (
        "import sys, meshwright.trainers.planning.tensorboard.plugin\n"
        "print({'tensorflow', 'jax'} & set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "set()"
