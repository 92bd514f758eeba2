"""A plan as a page: what it says, and what a browser shows of it."""

import functools
import html
import json
import pathlib
import re
import subprocess
import sys
import types

import numpy as np
import pytest

from meshwright.framework.compiler.hlo.step_errors import (
    ALL_STEPS,
    STEP_ERRORS,
    ModelKind,
)
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.stacks import model_kind
from meshwright.trainers.planning import plan_html, plan_plots
from meshwright.trainers.planning.plan_sections import sections
from meshwright.trainers.planning.plan_text import plan_text
from meshwright.trainers.planning.planning import plan
from tests import needs
from tests.trainers import small_run
from tests.trainers.planning.browser import look_at, needs_chromium
from tests.trainers.planning.test_plan_main import call_main

ROOT = pathlib.Path(__file__).parents[3]
TOPOLOGIES = [
    "cpu",
    pytest.param("v3:2x2", marks=needs.libtpu),
    pytest.param("h100:8", marks=needs.cuda_plugin),
]
PHONE, DESK = 390, 1200
PICTURES = ["timeline", "breakdown", "collectives", "weights"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Maps a topology to the `document`, `page` and `log_dir` that are written."""

    @functools.cache
    def run(topology):
        folder = tmp_path_factory.mktemp("plan")
        written = {
            "json_out": folder / "a/plan.json",
            "html_out": folder / "b/plan.html",
        }
        flags = {name: str(path) for name, path in written.items()}
        call_main(
            "NUM_LAYERS = 3", topology=topology, log_dir=str(folder / "logs"), **flags
        )
        return types.SimpleNamespace(
            document=json.loads(written["json_out"].read_text()),
            page=written["html_out"].read_text(),
            log_dir=folder / "logs",
        )

    return run


def drawn_colors(pixels):
    """How many of a picture's pixels have each colour that is no shade of grey."""
    colorful = pixels[np.ptp(pixels.astype(int), axis=-1) > 40]
    colors, counts = np.unique(colorful.reshape(-1, 3), axis=0, return_counts=True)
    return dict(zip(map(tuple, colors.tolist()), counts.tolist(), strict=True))


def check_view(view):
    assert view.content_width == view.width
    assert view.loaded == []
    for picture, pixels in zip(view.pictures, view.pixels, strict=True):
        left, top, width, height = picture["box"]
        assert width >= 0.8 * min(view.width, 500) and height > 60, picture["label"]
        assert top + height <= view.height
        assert picture["smallest_text"] >= 9, picture["label"]
        # Each has a bar, a curve or cells: an area in some colour, under words.
        assert max(drawn_colors(pixels).values(), default=0) > 100, picture["label"]
        assert (pixels.max(axis=-1) < 80).sum() > 100, picture["label"]
        assert len(picture["label"]) > 40


@needs_chromium
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_in_a_browser(planned, tmp_path, topology):
    page, document = planned(topology).page, planned(topology).document
    look = look_at(page, tmp_path, widths=(PHONE, DESK))
    assert look.console == []
    assert [view.width for view in look.views] == [PHONE, DESK]
    for view in look.views:
        check_view(view)
        assert len(view.pictures) == 4 + (topology != "cpu")
        assert view.headings[0] == (
            f"Plan of small_lm + finalized + small_adam on {topology} as X=2, Y=4"
        )
    labels = " ".join(picture["label"] for picture in look.views[0].pictures)
    for weight in document["weights"]:
        assert f"{weight['path']} {weight['sharding']}" in labels
    for part in document["parts"] or {}:
        assert not document["parts"][part] or part in labels
    # Beside each other where there is room, one under the other on a phone.
    phone, desk = ([p["box"] for p in view.pictures[:2]] for view in look.views)
    assert desk[0][0] + desk[0][2] <= desk[1][0]
    assert phone[0][1] + phone[0][3] <= phone[1][1]


@needs_chromium
@needs.libtpu
def test_a_long_name_is_not_cut_off(planned, tmp_path):
    document = json.loads(json.dumps(planned("v3:2x2").document))
    document["buffers"][0]["name"] = "stateless_random_uniform/" * 12
    (view,) = look_at(plan_html.page(document), tmp_path, widths=(1280,)).views
    assert view.cut_off == 0


@needs_chromium
def test_faults_of_a_page_are_seen(planned, tmp_path):
    page = planned("cpu").page
    wide = '<div style="width: 500px">wide</div></main>'
    look = look_at(page.replace("</main>", wide), tmp_path, widths=(PHONE, DESK))
    with pytest.raises(AssertionError, match="width"):
        check_view(look.views[0])
    check_view(look.views[1])
    # Nothing may be fetched: the page itself forbids it.
    fetch = '<img src="http://127.0.0.1:9/a.png"></main>'
    look = look_at(page.replace("</main>", fetch), tmp_path, widths=(DESK,))
    assert any("Content Security Policy" in line for line in look.console)
    blank = re.sub(r"<path .*?/>", "", page, flags=re.DOTALL)
    look = look_at(blank, tmp_path, widths=(DESK,))
    with pytest.raises(AssertionError, match="Memory in use"):
        check_view(look.views[0])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_is_one_file_without_scripts(planned, topology):
    page = planned(topology).page
    assert "<script" not in page and "@import" not in page
    assert set(re.findall(r'(?:src|href)="([^"#]+)', page)) == {"data:,"}
    assert not re.findall(r"url\((?!#)", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:href="#|url\(#)([^")]+)', page)
    assert set(used) <= set(ids)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_says_what_the_document_says(planned, topology):
    document, page = planned(topology).document, planned(topology).page
    for buffer in document["buffers"]:
        assert f'<td class="long">{buffer["name"]}</td><td>{buffer["source"]}' in page
    for weight in document["weights"]:
        assert f"<td>{weight['path']}</td><td>{weight['type']}</td>" in page
        cells = f"<td>{weight['sharding']}</td><td>{weight['shard_shape']}</td>"
        assert cells in page
    updates = document["weight_updates"]["lines"]
    for line in updates:
        assert f'<td>{line["shape"]}</td><td class="long">{line["why"]}</td>' in page
    assert len(updates) == 3  # Of norms: the plan splits all other weights.
    # Each kind of buffer has a row, and their sum at the peak; for GPUs that with gaps.
    breakdown = len(document["breakdown"]) + 1
    breakdown += document["allocated_bytes"] is not None
    tables = ("buffers", "collectives", "weights", "replicated")
    rows = sum(len(document[name]) for name in tables) + len(updates) + breakdown
    heads = len(tables) + 2
    if document["parts"]:
        rows += sum(map(bool, document["parts"].values())) + len(document["of_which"])
        heads += 1
    if document["device_order"]:
        rows += len(document["device_order"]["axes"])
        heads += 1
    assert page.count("<tr>") == rows + heads
    assert "Experiment.global_batch" in page


def plots(document):
    return {plot.name: plot for part in sections(document) for plot in part.plots}


def axes_of(plot):
    return plan_plots.figure(plot).axes[0]


def words(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_pictures_are_of_the_documents_figures(planned, topology):
    document = planned(topology).document
    drawn = {name: axes_of(plot) for name, plot in plots(document).items()}
    curve, _ = drawn["timeline"].lines[:2]
    assert curve.get_ydata().tolist() == document["timeline"]
    bars = sorted(bar.get_width() for bar in drawn["breakdown"].patches)
    assert bars == sorted(b["bytes"] for b in document["breakdown"] if b["bytes"])
    assert sum(bar.get_width() for bar in drawn["collectives"].patches) == (
        pytest.approx(sum(row["bytes"] for row in document["collectives"]))
    )
    if topology != "cpu":
        # A bar in three colours for the whole step, and one for each of its parts.
        widths = [bar.get_width() for bar in drawn["time"].patches]
        bars = np.reshape(widths, (3, -1)).sum(axis=0)
        assert bars[0] == document["step_seconds"] == pytest.approx(sum(bars[1:]))
    weights = document["weights"]
    shown = words(drawn["weights"])
    assert len(drawn["weights"].patches) == 2 * len(weights)  # Axes X and Y.
    at = shown.index("stack.feed_forward.w_in")
    assert shown[at + 1 : at + 3] == ["model", "hidden"]
    at = shown.index("final_norm.scale")
    assert shown[at + 1] in ("32 B", "64 B")  # No axis splits it.


def test_a_dim_that_several_axes_split(planned):
    (first, *_) = planned("cpu").document["weights"]
    weight = first | {"dims": ["a", "b"], "axes": [["X", "Y"], []]}
    document = planned("cpu").document | {"weights": [weight]}
    assert words(axes_of(plots(document)["weights"]))[1:3] == ["a", "a"]


def test_what_does_not_fit_has_no_curves(planned):
    document = planned("cpu").document | {
        "fits": False,
        "over_bytes": 2_000_000,
        "timeline": None,
        "collectives": [],
    }
    assert list(plots(document)) == ["breakdown", "weights"]
    page = plan_html.page(document)
    assert "does not fit: 1.91 MiB more than the" in page
    assert "the program does not fit" in page
    assert "Not known if refused." in page
    assert "To make it fit: " in page


def test_names_are_escaped(planned):
    weight = planned("cpu").document["weights"][0] | {"path": "<b>&"}
    page = plan_html.page(planned("cpu").document | {"weights": [weight]})
    assert "<b>&" not in page
    assert page.count("&lt;b&gt;&amp;") >= 3  # Picture, its text, and the table.


def test_collectives_that_send_nothing_have_no_picture(planned):
    document = planned("cpu").document
    empty = [row | {"bytes": 0} for row in document["collectives"]]
    assert empty
    names = list(plots(document | {"collectives": empty}))
    assert names == [name for name in PICTURES if name != "collectives"]
    assert "collectives" in plan_html.page(document | {"collectives": empty})


def test_of_very_many_weights_the_largest_are_drawn(planned):
    (first, *_) = planned("cpu").document["weights"]
    many = [first | {"path": f"w{n}.", "bytes": 1000 + n} for n in range(70)]
    document = planned("cpu").document | {"weights": many}
    plot = plots(document)["weights"]
    assert plot.title.endswith("; without the 10 smallest")
    assert "w10. " in plot.text and "w9. " not in plot.text
    assert "<td>w0.</td>" in plan_html.page(document)


TIMES = {
    "parts": {"matrix": 0.6, "all-gather": 0.4},
    "of_which": {"recomputed": 0.25},
    "step_seconds": 1.0,
    "model_flops": 5e11,
    "flops_utilization": 0.5,
    "peak_flops": 1e12,
}


def error_of(kind):
    """The document's `step_error` for a kind of model."""
    error = STEP_ERRORS.get(kind, ALL_STEPS)
    return {
        "kind": kind and kind.value,
        "steps": error.steps,
        "mean": error.mean,
        "worst": error.worst,
        "worst_of_all": ALL_STEPS.worst,
    }


def test_flops_that_a_task_does_not_count_are_unknown(planned):
    times = TIMES | {"step_error": error_of(None)}
    document = planned("cpu").document | times
    page = html.unescape(plan_html.page(document))
    assert "use 50.0% of the devices' peak, 1 TFLOP/s" in page
    document |= {"model_flops": None, "flops_utilization": None}
    texts = [" ".join(show(document).split()) for show in (plan_html.page, plan_text)]
    for text in map(html.unescape, texts):
        assert "unknown, as the task has no train_flops, and so is" in text
        assert re.search(r"FLOPS utilization\s*(<[^>]*>)*unknown", text)
        assert "0.0% of the devices' peak" not in text


@pytest.mark.parametrize("kind", [*ModelKind, None])
def test_the_error_bar_of_the_step_time(planned, kind):
    error = error_of(kind)
    document = planned("cpu").document | TIMES | {"step_error": error}
    page = plan_html.page(document)
    share = f"({error['worst']:.1%} at worst, {error['mean']:.1%} on average)"
    if kind is None:
        text = (
            f"no further off than all 39 published TPU v3 steps {share}, none of which "
            "is of such a model"
        )
    else:
        text = (
            f"no further off than the {error['steps']} published TPU v3 steps of "
            f"{kind.value} {share}; of those of all kinds the worst is off by "
            f"{ALL_STEPS.worst:.0%}"
        )
    assert f"{text}." in page
    assert page.count(f"1.00 s ± {error['worst']:.1%}") == 3  # Head, plot, its text.
    assert text in " ".join(plan_text(document).split())


def test_the_ends_of_the_error_bar(planned):
    error = error_of(ModelKind.DENSE) | {"worst": 0.08}
    document = planned("cpu").document | TIMES | {"step_error": error}
    assert "1.00 s by estimate: 920 ms to 1.08 s, if no" in plan_html.page(document)
    unknown = document | {"step_error": None}
    text = "error unknown, as no measured step of such devices was compared"
    assert text in plan_html.page(unknown) and "±" not in plan_html.page(unknown)
    assert text in " ".join(plan_text(unknown).split())


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (
            1,
            "the only published TPU v5p step that was compared, of dense Transformers,",
        ),
        (
            2,
            "the worst of the 2 published TPU v5p steps that were compared, all of",
        ),
    ],
)
def test_what_was_seen_on_other_tpus_is_no_error_bar(planned, steps, text):
    seen = {"tpu": "v5p", "kind": "dense Transformers", "steps": steps, "worst": 0.194}
    document = planned("cpu").document | TIMES
    document |= {"step_error": None, "seen_error": seen}
    assert f"error unknown; {text}" in plan_html.page(document)
    assert "is off by 19.4%" in plan_html.page(document)
    assert "±" not in plan_html.page(document)
    assert text in " ".join(plan_text(document).split())


@needs.libtpu
@pytest.mark.parametrize(("topology", "known"), [("v3:2x2", True), ("v5e:2x4", False)])
def test_the_error_is_known_where_steps_were_measured(planned, topology, known):
    dense = error_of(ModelKind.DENSE)
    assert planned(topology).document["step_error"] == (dense if known else None)


@pytest.mark.parametrize(
    ("gin_file", "kind"),
    [
        ("lm/stdlib_tiny.gin", ModelKind.DENSE),
        ("paper/gshard.gin", ModelKind.EXPERTS),
        ("paper/wus_resnet_32.gin", None),
        ("paper/wus_ncf_32.gin", None),
    ],
)
def test_models_are_of_the_kind_of_their_layers(gin_file, kind):
    """Those of the papers' tables are asked for in `test_paper_tables.py`."""
    experiment, _ = build_experiment([gin_file], [])
    assert model_kind(experiment.task) is kind


def test_the_docs_tell_of_the_same_errors():
    words = (ROOT / "docs/reference/planning/step_times.md").read_text().split()
    for kind, error in STEP_ERRORS.items():
        share = f"{error.worst:.1%} and {error.mean:.1%} ({error.steps} steps)"
        assert f"{kind.value} {share}" in " ".join(words)
    assert f"all {ALL_STEPS.steps}, {ALL_STEPS.worst:.0%}" in " ".join(words)


def test_a_notebook_shows_the_page_of_a_report():
    experiment, _ = build_experiment(
        list(small_run.GIN_FILES),
        [*small_run.GIN_PARAMS, small_run.MESH, "NUM_LAYERS = 1"],
    )
    shown = plan(experiment, topology="cpu")._repr_html_()
    (page,) = re.findall(r'<iframe srcdoc="([^"]*)"', shown)
    assert "<h2>Memory" in html.unescape(page)


@pytest.mark.parametrize("flag", ["html_out", "log_dir"])
def test_flags_that_need_a_topology(flag, tmp_path):
    given = {flag: str(tmp_path / "out")}
    with pytest.raises(SystemExit, match=f"--{flag} needs --topology, such as"):
        call_main(**given)
    with pytest.raises(SystemExit, match=f"--{flag} shows one plan: give it with the"):
        call_main(search="true", topology="v3:2x2", **given)
    assert not (tmp_path / "out").exists()


WITHOUT_MATPLOTLIB = """
import sys
sys.modules["matplotlib"] = None  # As if it were not installed.
import tests.conftest
from tests.trainers.planning.test_plan_main import call_main
call_main(topology="cpu", {flag}={path!r})
"""


def test_without_matplotlib_it_says_how_to_install_it(tmp_path):
    code = WITHOUT_MATPLOTLIB.format(flag="html_out", path=str(tmp_path / "p.html"))
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 1 and ran.stdout == ""
    assert "are drawn by matplotlib: pip install 'meshwright[plan]'" in ran.stderr


def update(number, **changes):
    return {
        "names": [f"theta.stack.w_{number}", f"slots.stack.w_{number}.m"],
        "shape": [6, 1000 + number, 16],
        "ops": 27,
        "format": f"[6.{1000 + number}:X.Y,16]",
        "why": "",
        "state_saved_bytes": 2**21 - number,
        "traffic_saved_bytes": 2**22,
        "gathered_bytes": 2**20,
        "gain_seconds": 2e-4,
        **changes,
    }


def with_updates(document, *lines):
    summary = f"weight updates (all): some of {len(lines)} sharded over X, Y, " + (
        "1.23 GiB less state on each device"
    )
    updates = {"summary": summary, "mode": "all", "data_axes": ["X", "Y"]}
    return document | {"weight_updates": updates | {"lines": list(lines)}}


def left_alone(number):
    return update(number, format="", why=f"it would cost {number} us a step")


UPDATES = """\
Sharded weight updates
  weight updates (all): some of 11 sharded over X, Y, 1.23 GiB less state on
  each device.
  state saved  gathered  est. gain  weight  shape  format
     2.00 MiB  1.00 MiB     200 us  theta.stack.w_0  [6, 1000, 16]
                                    [6.1000:X.Y,16]
     2.00 MiB  1.00 MiB   -19.8 us  theta.stack.w_1  [6, 1001, 16]
                                    [6.1001:X.Y,16]
     2.00 MiB  1.00 MiB     200 us  theta.stack.w_2  [6, 1002, 16]
                                    [6.1002:X.Y,16]
     2.00 MiB  1.00 MiB     200 us  theta.stack.w_3  [6, 1003, 16]
                                    [6.1003:X.Y,16]
     2.00 MiB  1.00 MiB     200 us  theta.stack.w_4_of_a_very_long_name
                                    [6, 1004, 16]  [6.1004:X.Y,16]
     4.00 MiB  2.00 MiB     400 us  in 2 more rows

Weight updates left unsharded
  weight             shape          why
  theta.stack.w_903  [6, 1903, 16]  it would cost 903 us a step
  theta.stack.w_902  [6, 1902, 16]  it would cost 902 us a step
  theta.stack.w_901  [6, 1901, 16]  it would cost 901 us a step
  1 more row
"""


def test_weight_updates(planned):
    """The largest are told in the text, all on the page."""
    sharded = [update(number) for number in range(7)]
    sharded[1]["gain_seconds"] = -19.8e-6
    sharded[4]["names"][0] += "_of_a_very_long_name"
    left = [left_alone(number) for number in (900, 901, 902, 903)]
    document = with_updates(planned("cpu").document, *sharded, *left)
    assert f"\n\n{UPDATES}\n" in plan_text(document)
    page = plan_html.page(document)
    assert f"<p>{document['weight_updates']['summary']}.</p>" in page
    for line in sharded:
        cells = (line["names"][0], line["shape"], line["format"])
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    assert '<td class="number">-19.8 us</td>' in page
    for line in left:
        assert f'<td>{line["shape"]}</td><td class="long">{line["why"]}</td>' in page
    nothing = document | {"weight_updates": None}
    assert 'id="updates"' not in plan_html.page(nothing)
    assert "weight updates" not in plan_text(nothing)


def test_what_a_device_has_between_steps(planned):
    document = planned("cpu").document
    note = "Between steps a device holds less of weights that are updated on shards: "
    assert note not in plan_html.page(document)
    less = document | {"weights_bytes": document["weights_bytes"] - 512}
    assert f"{note}5.00 KiB in total." in plan_html.page(less)
