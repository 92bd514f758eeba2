"""meshwright-plan as a user meets it."""

import pathlib
import re
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from meshwright.trainers import plan as main_module
from meshwright.trainers.experiment.sharding_text import sharding_text
from tests.trainers import small_run
from tests.trainers.small_run import GIN_FILES, GIN_PARAMS, MESH, ROOT, small_programs


def call_main(*params, **more_flags):
    if "topology" not in more_flags and "search" not in more_flags:
        more_flags["device_count"] = "8"
    return small_run.call_main(main_module, *params, **more_flags)


def test_says_where_the_plan_puts_state_and_batch(capsys):
    assert call_main() is None
    out = capsys.readouterr().out
    assert out.startswith(sharding_text(small_programs().experiment))
    assert re.search(r"replicated on each of 8 devices: \d+ tensors of state and", out)
    assert "completed by" not in out


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"explain": "true"}, "collectives of the compiled program"),
        ({"topology": "cpu"}, "what propagation says, before XLA compiles"),
    ],
)
def test_writes_a_page_of_the_program(how, says, tmp_path, capsys):
    page = tmp_path / "new" / "page.html"
    call_main("NUM_LAYERS = 1", explain_html=str(page), **how)
    assert capsys.readouterr().out
    text = page.read_text()
    assert says in text and '"layer":"stack.feed_forward' in text


def test_a_page_of_the_program_needs_a_program(tmp_path):
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit, match="--explain_html needs --explain, or --topol"):
        call_main(explain_html=str(page))
    with pytest.raises(SystemExit, match="--explain_html.* cannot be written"):
        call_main(explain="true", explain_html=str(tmp_path))
    assert not page.exists()


@pytest.mark.parametrize("how", [{}, {"topology": "cpu"}])
def test_refuses_a_misspelt_dim_of_the_plan(how):
    with pytest.raises(SystemExit, match="'hiden', which no .* do you mean hidden?"):
        call_main("ShardingPlan.weights = {'hiden': 'Y'}", "NUM_LAYERS = 1", **how)


def test_warns_of_dims_that_decide_nothing(capsys, caplog):
    call_main("ShardingPlan.weights = {'channels': 'Y'}", "NUM_LAYERS = 1")
    assert "splits dim 'channels', which no weight has" in caplog.text


def test_needs_no_flag_for_as_many_devices_as_the_mesh_has():
    """In a process of its own: this one has its devices already."""
    command = [sys.executable, "-m", "meshwright.trainers.plan"]
    command += [f"--gin_file={name}" for name in GIN_FILES]
    command += [f"--gin_param={param}" for param in (*GIN_PARAMS, MESH)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.startswith(sharding_text(small_programs().experiment))
    assert "replicated on each of 8 devices" in out


@pytest.mark.parametrize("partitioner", ["SHARDY", "GSPMD"])
def test_explains_the_training_program(partitioner, capsys):
    call_main(f"Experiment.partitioner = %Partitioner.{partitioner}", explain="true")
    out = capsys.readouterr().out
    assert f"train over X=2, Y=4, completed by {partitioner.lower()}: " in out
    lines = out.splitlines()
    at = lines.index("stack.feed_forward")
    part = "\n".join(lines[at : lines.index("", at)])
    assert re.search(
        r"  matmul_1 +f32\[64,16\] +\[X,Y\] +inferred\n"
        r"      layers/basic/linear.py:\d+\n"
        r"      all-gather along X, .*\n"
        r"      all-reduce along Y, ",
        part,
    )
    assert re.search(
        r"\[X,_,Y\] +annotated\n +layers/basic/feed_forward.py:\d+\n", part
    )
    assert "gradient of layers/basic/linear.py:" in part
    assert "No tensor is gathered in full on every device without an annotation." in out


def test_explains_a_part_of_the_program(capsys):
    call_main(explain="true", explain_match=r"^stack\.feed_forward$")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("train over X=2, Y=4, completed by shardy: ")
    headings = [line for line in lines[1:] if re.match(r"\w[\w.]+$", line)]
    assert headings == ["stack.feed_forward"]


def the_docs_excerpts():
    """Of the summary, and then of tensors, what the pages have."""
    parts = []
    for page in ("reference/sharding/explain.md", "explanations/a_step.md"):
        text = (ROOT / "docs" / page).read_text()
        blocks = re.findall(r"```\n((?:train over|  )[^`]*?)```", text)
        parts += [p for block in blocks for p in block.rstrip().split("\n...\n")]
    return parts


def test_the_docs_name_the_lines_of_products_and_annotations():
    """Of the default job's explanation all that needs no compilation."""
    written = {"matmul": " @ ", "XlaSharding": "ctx.split(", "Softmax": "softmax("}
    named = [
        re.search(rf" ({'|'.join(written)}).*\n.* (\S+\.py):(\d+)", text)
        for text in the_docs_excerpts()[1:]
    ]
    assert len(named) >= 8
    for op, path, line in (match.groups() for match in named):
        code = (ROOT / path).read_text().splitlines()[int(line) - 1]
        assert written[op] in code


@pytest.mark.slow  # Compiles the default job.
def test_the_docs_have_what_is_printed_of_the_default_job(capsys):
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["meshwright-plan"])
    match = r"^stack\.(feed_forward|attention)$"
    with flagsaver.as_parsed(
        gin_file=["lm/stdlib_tiny.gin"],
        device_count="8",
        explain="true",
        explain_match=match,
    ):
        main_module.main(["meshwright-plan"])
    out, excerpts = capsys.readouterr().out, the_docs_excerpts()
    assert len(excerpts) >= 2
    assert all(f"{excerpt}\n" in out for excerpt in excerpts), out


@pytest.mark.parametrize(
    ("params", "more_flags", "message"),
    [
        ([], {"explain_match": "a"}, "--explain_match needs --explain"),
        ([], {"explain_at_least": "1"}, "--explain_at_least needs --explain"),
        ([], {"explain_axis": "X"}, "--explain_axis needs --explain"),
        ([], {"explain_why": "true"}, "--explain_why needs --explain"),
        ([], {"explain": "true", "explain_axis": "Z"}, "unknown mesh axis 'Z'"),
        (
            [],
            {"explain": "true", "explain_match": "(a"},
            r"--explain_match=\(a is no regular expression \(missing \), unterm",
        ),
        (["Experimnt.seed = 1"], {}, "Did you mean Exper"),
        ([], {"gin_files": ["lm/stdlib_tny"]}, "mean lm/stdlib_tiny"),
        (
            ["MESH_SHAPE = (4, 4)"],
            {"explain": "true"},
            "needs 16 devices but 8 cpu devices",
        ),
        (
            ["MESH_SHAPE = (1, 1)"],
            {"explain": "true"},
            "train: the mesh .* has one dev",
        ),
    ],
)
def test_errors_are_told_by_their_message(params, more_flags, message):
    with pytest.raises(SystemExit) as info:
        call_main(*params, **more_flags)
    assert str(info.value.code).startswith("meshwright-plan: ")
    assert re.search(message, info.value.code)


def test_traceback_on_demand():
    with pytest.raises(ValueError, match="Did you mean"):
        call_main("Experimnt.seed = 1", traceback="true")


@pytest.mark.parametrize(
    "command,flag",
    [
        ("meshwright-plan", "--topology"),
        pytest.param("meshwright-train", "--mode", marks=pytest.mark.slow),
    ],
)
def test_help_tells_what_it_does_and_its_flags(command, flag):
    path = pathlib.Path(sys.executable).with_name(command)
    out = subprocess.run([path, "--help"], capture_output=True, text=True).stdout
    assert out.startswith(f"{command}: ")
    assert f"  {flag}: " in out and "  --gin_param: " in out
    assert all(len(line) <= 80 for line in out.splitlines())
