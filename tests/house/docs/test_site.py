"""`make docs` builds a site whose links lead somewhere and which loads nothing."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]
pytest.importorskip("material", reason="pip install -c constraints.txt '.[docs]'")
# What a browser fetches by itself, unlike what a link leads to.
LOADED = re.compile(
    r"""<(?!a\b)\w+\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]*)"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    # With `--quiet`, warnings would not count for `strict` of mkdocs.yml.
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", f"--site-dir={folder}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_each_page_is_on_the_site(site):
    """That links and anchors lead somewhere is what `strict` of mkdocs.yml checks."""
    pages = [page.relative_to(ROOT / "docs") for page in ROOT.glob("docs/**/*.md")]
    assert len(pages) > 40
    for page in pages:
        name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
        assert (site / page.parent / name).is_file()


def test_nothing_is_loaded_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not LOADED.findall(text), page
        assert 'class="mermaid"' not in text, "it would load a script"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", sheet.read_text())
    for picture in site.rglob("*.svg"):
        assert not re.search(r"""\b(href|src)=["']https?:""", picture.read_text())


def test_what_would_be_loaded_is_seen():
    assert LOADED.findall('<script async src="https://a.b/c.js"></script>')
    assert LOADED.findall('<link rel="stylesheet" href="//a.b/c.css">')
    assert not LOADED.findall('<a href="https://a.b">a</a> <img src="c.svg">')
