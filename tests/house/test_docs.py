"""Every Python snippet of the docs runs, and every command names flags that exist."""

import pathlib
import re
import shlex
import socket
from concurrent import futures

import pytest

from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment import config
from meshwright.trainers.experiment.bindings.outside_names import import_modules
from tests.house import snippets

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


# A snippet, and what it prints if that follows as text, after a sentence or none.
SNIPPET = r"```python\n(.*?)```\n(?:\n[^`#|\n]+\n)?(?:\n```text\n(.*?)```)?"


def blocks():
    for page in PAGES:
        matches = re.findall(SNIPPET, page.read_text(), re.DOTALL)
        for i, (block, printed) in enumerate(matches):
            yield pytest.param(block, printed, id=f"{page.relative_to(ROOT)}-{i}")


def commands(pattern):
    """Indented command lines, continuation lines joined."""
    for page in PAGES:
        joined = re.sub(r"\\\n\s*", "", page.read_text())
        for line in re.findall(r"^ {4}(\S.*)$", joined, re.MULTILINE):
            if re.match(pattern, line):
                yield pytest.param(line.split("  #")[0].strip(), id=line[:60])


def processes_of(code):
    """The code of each process that a snippet is for: two if it is for several."""
    if "jax.distributed.initialize" not in code:
        return [code]
    with socket.create_server(("localhost", 0)) as free:
        code = code.replace("localhost:9876", f"localhost:{free.getsockname()[1]}")
    code += "jax.distributed.shutdown()"  # As at exit, which these processes skip.
    return [f"import sys; sys.argv[1:] = ['{n}']\n{code}" for n in range(2)]


@pytest.mark.parametrize(("code", "printed"), list(blocks()))
def test_python_snippet_runs(code, printed, tmp_path):
    # A process of its own: snippets choose their platform first thing.
    codes = processes_of(code)
    folders = [tmp_path / str(number) for number in range(len(codes))]
    for folder in folders:
        folder.mkdir()
    with futures.ThreadPoolExecutor() as pool:
        for status, out, errors in pool.map(snippets.run, codes, folders):
            assert status == 0, errors
            assert out.strip(), "a snippet should show something"
            assert printed in ("", out)


def test_a_snippet_that_fails_or_says_nothing_is_seen(tmp_path):
    assert snippets.run("x = 1", tmp_path)[:2] == (0, "")
    status, _, errors = snippets.run("raise KeyError('here')", tmp_path)
    assert status and "KeyError: 'here'" in errors


@pytest.mark.parametrize("command", list(commands(r"(\.venv/bin/)?meshwright-\w+")))
def test_command_builds(command, monkeypatch):
    words = re.findall(r"--(\w+)(?:=('[^']*'|\S+))?", command)
    flags = {"gin_file", "gin_param", "device_count", "strict", "compile_in_child"}
    flags |= {"import"}
    if "meshwright-plan" in command:
        flags |= {
            "explain",
            "explain_match",
            "explain_at_least",
            "explain_axis",
            "explain_why",
            "explain_html",
            "topology",
            "json_out",
            "html_out",
            "log_dir",
        }
    elif "meshwright-export" in command:
        flags |= {"model_dir", "output", "step", "what", "platforms", "noexpected"}
        flags |= {"family", "dtype", "mapping"}
    elif "meshwright-generate" in command:
        flags |= {"model_dir", "prompt", "temperature", "top_p"}
        flags |= {"prompts_file", "target_language", "output"}
    else:
        flags |= {"model_dir", "mode", "platform"}
        flags |= {"coordinator", "num_processes", "process_id"}
    unknown = {name for name, _ in words} - flags
    assert not unknown, f"no such flags, {sorted(unknown)}, in: {command}"
    values = [(name, value.strip("'")) for name, value in words]
    gin_files = [value for name, value in values if name == "gin_file"]
    modules = [value for name, value in values if name == "import"]
    examples = ROOT / "docs" / "examples"
    if modules or any((examples / file).is_file() for file in gin_files):
        monkeypatch.chdir(examples)
        monkeypatch.syspath_prepend(examples)
        import_modules(modules)
    build_experiment(
        gin_files,
        [value for name, value in values if name == "gin_param"],
    )


@pytest.mark.parametrize("command", list(commands(r"make ")))
def test_make_target_exists(command):
    makefile = (ROOT / "Makefile").read_text()
    for word in shlex.split(command)[1:]:
        name, is_variable, _ = word.partition("=")
        written = rf"^{name} \?=" if is_variable else f"^{name}:"
        assert re.search(written, makefile, re.MULTILINE), word


def test_files_that_the_docs_link_to_exist():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if not link.startswith("http"):
                path, _, anchor = link.partition("#")
                target = page.parent / path if path else page
                assert target.exists(), (page.name, link)
                assert not anchor or anchor in anchors(target), (page.name, link)


def test_the_first_page_leads_to_every_page():
    def linked(page):
        links = re.findall(r"\]\(([^)#]+\.md)", page.read_text())
        return {(page.parent / link).resolve() for link in links}

    home = ROOT / "docs" / "README.md"
    indexes = [page for page in linked(home) if page.name == "README.md"]
    found = set().union(linked(home), *map(linked, indexes))
    assert {page for page in PAGES if page.is_relative_to(home.parent)} <= {
        home,
        *found,
    }


def anchors(page):
    """What links to headings of a page end in."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_configurations_that_the_guide_lists_exist():
    text = "".join(page.read_text() for page in PAGES)
    for name in re.findall(r"`((?:asr|lm|mt|layers|plans|paper)/[\w.]+\.gin)`", text):
        assert config.find_gin_file(name).is_file()
