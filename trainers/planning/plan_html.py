"""A plan as a web page: no scripts, nothing from the network, readable on a phone."""

from __future__ import annotations

import html
import string
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.trainers.planning.plan_parts import Column, Section
from meshwright.trainers.planning.plan_plots import svg
from meshwright.trainers.planning.plan_sections import sections

_LONG = ("why", "name")
"""Columns whose text goes on in the next line."""
_PAGE = string.Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
:root { color-scheme: light; }
body { margin: 0 auto; padding: 1rem; max-width: 80rem; background: #fff;
  color: #1a1a1a; font: 1rem/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; padding-bottom: .2rem;
  border-bottom: 1px solid #ccc; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .4rem 0; max-width: 46rem; }
.verdict { display: inline-block; padding: .35rem .7rem; border-radius: .3rem;
  font-weight: 600; }
.fits { background: #d9f2e6; color: #00432d; }
.too-large { background: #fbe0d1; color: #6b2500; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr));
  gap: .6rem; margin: 1rem 0; }
dl div { border: 1px solid #ddd; border-radius: .3rem; padding: .5rem .7rem; }
dt { color: #555; font-size: .85rem; }
dd { margin: 0; font-size: 1.15rem; font-weight: 600; overflow-wrap: anywhere; }
.beside { display: flex; flex-wrap: wrap; gap: 0 1.5rem; align-items: flex-start; }
figure { margin: .5rem 0; flex: 1 1 26rem; max-width: 38rem; }
figcaption { font-weight: 600; font-size: .95rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
.wide { overflow-x: auto; flex: 1 1 auto; min-width: 0; max-width: 100%; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { padding: .25rem .9rem .25rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid #eee; white-space: nowrap; }
th { color: #555; font-weight: 600; }
td.long { white-space: normal; min-width: 16rem; overflow-wrap: anywhere; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { font-family: ui-monospace, monospace; font-size: .85rem; }
pre { overflow-x: auto; background: #f6f6f6; padding: .7rem; }
summary { cursor: pointer; }
</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
""")


def page(document: Mapping[str, Any]) -> str:
    """The page, as the text of an HTML file.

    Args:
      document: the result of `plan_document.document`.
    """
    summary, *rest = sections(document)
    body = [*_summary(summary, document["fits"])]
    for section in rest:
        body += _section(section)
    title = html.escape(summary.title)
    return _PAGE.substitute(title=title, body="\n".join(body))


def _summary(section: Section, fits: bool) -> Iterator[str]:
    yield f"<h1>{html.escape(section.title)}</h1>"
    style = "fits" if fits else "too-large"
    for note in section.notes:
        yield f'<p class="verdict {style}">{html.escape(note)}</p>'
    yield "<dl>"
    for name, value in section.facts.items():
        yield f"<div><dt>{name}</dt><dd>{html.escape(value)}</dd></div>"
    yield "</dl>"


def _section(section: Section) -> Iterator[str]:
    yield f'<section id="{section.name}"><h2>{html.escape(section.title)}</h2>'
    for note in section.notes:
        yield f"<p>{html.escape(note)}</p>"
    # A table stands beside the pictures if there is room for it, else below them.
    yield '<div class="beside">'
    for plot in section.plots:
        caption = f"<figcaption>{html.escape(plot.title)}</figcaption>"
        yield f"<figure>{caption}{svg(plot)}</figure>"
    if section.rows:
        yield from _table(section)
    yield "</div>"
    if section.details:
        heading, text = map(html.escape, section.details)
        yield f"<details><summary>{heading}</summary><pre>{text}</pre></details>"
    yield "</section>"


def _table(section: Section) -> Iterator[str]:
    # The table scrolls by itself where it is too wide, by keys as well.
    yield '<div class="wide" tabindex="0" role="group" aria-label="table"><table>'
    columns = section.columns
    heads = (_cell("th", column, column.head) for column in columns)
    yield f"<thead><tr>{''.join(heads)}</tr></thead><tbody>"
    for row in section.rows:
        cells = (
            _cell("td", column, column.text(row[column.field])) for column in columns
        )
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def _cell(tag: str, column: Column, text: str) -> str:
    style = "number" if column.is_number else "long" if column.head in _LONG else ""
    attributes = f' class="{style}"' if style else ""
    attributes += ' scope="col"' if tag == "th" else ""
    return f"<{tag}{attributes}>{html.escape(text)}</{tag}>"
