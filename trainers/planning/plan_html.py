"""A plan as one page: no scripts, nothing from the network, readable on a phone."""

from __future__ import annotations

import html
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.framework.compiler.hlo.out_of_memory import REMEDY
from meshwright.framework.sizes import bytes_text
from meshwright.trainers.planning.plan_plots import Picture, pictures
from meshwright.trainers.planning.plan_text import (
    box_text,
    bubbles_text,
    count_text,
    error_text,
    flops_text,
    mesh_text,
    schedule_text,
    seconds_text,
    share_text,
    torus_text,
    update_sizes,
    verdict,
)

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
body { margin: 0 auto; padding: 1rem; max-width: 66rem; background: #fff;
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
dd { margin: 0; font-size: 1.15rem; font-weight: 600; }
.pictures { display: flex; flex-wrap: wrap; gap: 1.5rem; }
figure { margin: .5rem 0; flex: 1 1 20rem; max-width: 31rem; }
figcaption { font-weight: 600; font-size: .95rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .25rem .9rem .25rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid #eee; white-space: nowrap; }
th { color: #555; font-weight: 600; }
td.long { white-space: normal; min-width: 16rem; }
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
      document: of `plan_document.document`.
    """
    drawn = {one.name: one for one in pictures(document)}
    sections = (
        _head(document),
        _memory(document, drawn),
        _time(document, drawn),
        _pipelines(document, drawn),
        _collectives(document, drawn),
        _device_order(document["device_order"]),
        _weight_updates(document["weight_updates"]),
        _weights(document, drawn),
        _replicated(document),
        _configuration(document),
    )
    body = "\n".join(line for section in sections for line in section)
    return _PAGE.substitute(title=html.escape(_title(document)), body=body)


def _title(document: Mapping[str, Any]) -> str:
    return f"Plan for {document['topology']} as {mesh_text(document)}"


def _head(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h1>{html.escape(_title(document))}</h1>"
    style = "fits" if document["fits"] else "too-large"
    yield f'<p class="verdict {style}">{html.escape(verdict(document))}</p>'
    yield "<dl>"
    for name, value in _facts(document):
        yield f"<div><dt>{name}</dt><dd>{html.escape(value)}</dd></div>"
    yield "</dl>"


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "devices", str(document["devices"])
    yield "partitioner", document["partitioner"]
    share = share_text(document["peak_bytes"], document["memory_limit"])
    yield "peak of a device", f"{bytes_text(document['peak_bytes'])} ({share})"
    yield "weights of a device", bytes_text(document["weights_bytes"])
    yield "slots of a device", bytes_text(document["slots_bytes"])
    yield "model, a step", flops_text(document["model_flops"])
    if document["step_seconds"] is not None:
        yield "step, estimated", _estimate(document)
        yield "FLOPS utilization", share_text(document["flops_utilization"], 1)
    yield "compiling", f"{document['compile_seconds']:.1f} s"


def _estimate(document: Mapping[str, Any]) -> str:
    error = document["step_error"]
    bar = f" \u00b1 {share_text(error['worst'], 1)}" if error else ""
    return seconds_text(document["step_seconds"]) + bar


def _memory(document: Mapping[str, Any], drawn: Mapping[str, Picture]) -> Iterator[str]:
    yield '<section id="memory"><h2>Memory of a device</h2>'
    yield from _figures(drawn, "timeline", "breakdown")
    if document["buffers"]:
        yield "<h3>What takes most at the peak</h3>"
        yield from _buffer_table(document["buffers"])
    if not document["fits"]:
        yield f"<p>To make it fit: {html.escape(REMEDY)}.</p>"
    yield "</section>"


def _buffer_table(buffers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from _table(
        ("bytes", "count", "for", "type", "what", "made at"),
        (
            (
                bytes_text(one["bytes"]),
                str(one["count"]),
                one["kind"],
                one["type"],
                one["name"],
                one["source"],
            )
            for one in buffers
        ),
        numbers=2,
    )


def _time(document: Mapping[str, Any], drawn: Mapping[str, Picture]) -> Iterator[str]:
    yield '<section id="time"><h2>Time of a step</h2>'
    if document["parts"] is None:
        yield "<p>There is no estimate: " + (
            "what does not fit has no time.</p>"
            if not document["fits"]
            else "it is made for TPU topologies.</p>"
        )
    else:
        yield (
            f"<p>{seconds_text(document['step_seconds'])} in all, of which the model's "
            f"{flops_text(document['model_flops'])} use "
            f"{share_text(document['flops_utilization'], 1)} of what the devices can "
            f"do. Error bar: {html.escape(error_text(document))}.</p>"
        )
        step = document["step_seconds"]
        for what, took in document["of_which"].items():
            share = f"{seconds_text(took)}, {share_text(took, step)}"
            yield f"<p>Of all this {what}: {share}.</p>"
        yield from _figures(drawn, "time")
    yield "</section>"


def _pipelines(
    document: Mapping[str, Any], drawn: Mapping[str, Picture]
) -> Iterator[str]:
    if not document["pipelines"]:
        return
    yield '<section id="pipelines"><h2>Pipelines</h2>'
    yield from _figures(drawn, *(name for name in drawn if name.startswith("pipeline")))
    yield from _table(
        ("iterations", "bubbles", "of a step", "pipeline", "schedule"),
        (
            (
                str(one["iterations"]),
                bubbles_text(one),
                "-" if took is None else seconds_text(took),
                one["path"],
                schedule_text(one),
            )
            for one in document["pipelines"]
            for took in [one["seconds_in_bubbles"]]
        ),
        numbers=3,
    )
    yield "</section>"


def _collectives(
    document: Mapping[str, Any], drawn: Mapping[str, Picture]
) -> Iterator[str]:
    found = document["collectives"]
    yield '<section id="collectives"><h2>Collectives of a step</h2>'
    if not found:
        none = (
            "There are none." if document["fits"] else "Not known of what is refused."
        )
        yield f"<p>{none}</p></section>"
        return
    yield from _figures(drawn, "collectives")
    yield from _table(
        ("count", "bytes", "time", "kind", "axis", "layer"),
        (
            (
                count_text(one["count"]),
                bytes_text(one["bytes"]),
                "-" if one["seconds"] is None else seconds_text(one["seconds"]),
                one["kind"],
                one["axis"],
                one["layer"],
            )
            for one in found
        ),
        numbers=3,
    )
    yield "</section>"


def _device_order(order: Mapping[str, Any] | None) -> Iterator[str]:
    if order is None:
        return
    yield '<section id="order"><h2>Where the mesh lies on the torus</h2>'
    yield f"<p>{html.escape(torus_text(order))}.</p>"
    yield from _table(
        ("load of a link", "axis", "devices", "where they are"),
        (
            (str(one["load"]), one["axis"], str(one["size"]), box_text(one))
            for one in order["axes"]
        ),
        numbers=1,
    )
    yield "</section>"


def _weight_updates(updates: Mapping[str, Any] | None) -> Iterator[str]:
    if updates is None:
        return
    yield '<section id="updates"><h2>Weight updates on shards</h2>'
    yield f"<p>{html.escape(updates['summary'])}.</p>"
    yield from _table(
        ("state saved", "gathered", "gain", "weight", "shape", "format, or why not"),
        (
            (
                *(("-", "-", "-") if one["why"] else update_sizes([one])),
                one["names"][0],
                str(one["shape"]),
                one["why"] or one["format"],
            )
            for one in updates["lines"]
        ),
        numbers=3,
    )
    yield "</section>"


def _weights(
    document: Mapping[str, Any], drawn: Mapping[str, Picture]
) -> Iterator[str]:
    yield '<section id="weights"><h2>Weights and what a device has of them</h2>'
    yield from _figures(drawn, "weights")
    if document["weights_bytes"] < sum(one["bytes"] for one in document["weights"]):
        yield (
            "<p>This is the plan's part, which a step computes with. Between steps a "
            "device has less of weights that are updated on shards: "
            f"{bytes_text(document['weights_bytes'])} in all.</p>"
        )
    yield from _table(
        ("bytes", "weight", "type", "dims", "sharding", "shard"),
        (
            (
                bytes_text(one["bytes"]),
                one["path"],
                one["type"],
                ", ".join(one["dims"]),
                one["sharding"],
                str(one["shard_shape"]),
            )
            for one in document["weights"]
        ),
        numbers=1,
    )
    yield "</section>"


def _replicated(document: Mapping[str, Any]) -> Iterator[str]:
    yield '<section id="replicated"><h2>What every device has in full</h2>'
    if not document["replicated"]:
        yield "<p>Nothing of state and batch is.</p></section>"
        return
    yield from _table(
        ("bytes", "tensor", "type", "why"),
        (
            (bytes_text(one["bytes"]), one["name"], one["type"], one["why"])
            for one in document["replicated"]
        ),
        numbers=1,
    )
    yield "</section>"


def _configuration(document: Mapping[str, Any]) -> Iterator[str]:
    yield '<section id="configuration"><h2>Configuration</h2>'
    versions = document["versions"].items()
    yield f"<p>{', '.join(f'{name} {version}' for name, version in versions)}</p>"
    if document["config"]:
        yield "<details><summary>Everything in effect, as a gin file</summary>"
        yield f"<pre>{html.escape(document['config'])}</pre></details>"
    yield "</section>"


def _figures(drawn: Mapping[str, Picture], *names: str) -> Iterator[str]:
    yield '<div class="pictures">'
    for one in (drawn[name] for name in names if name in drawn):
        caption = f"<figcaption>{html.escape(one.title)}</figcaption>"
        yield f"<figure>{caption}{one.svg()}</figure>"
    yield "</div>"


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int
) -> Iterator[str]:
    """The first `numbers` columns are aligned right; a last one on `why` may wrap."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            _cell(tag, text, i, heads, numbers) for i, text in enumerate(row)
        )

    # Scrolls by itself where it is too wide, by keys as well.
    yield '<div class="wide" tabindex="0" role="group" aria-label="table"><table>'
    yield f"<thead><tr>{cells('th', heads)}</tr></thead><tbody>"
    for row in rows:
        yield f"<tr>{cells('td', row)}</tr>"
    yield "</tbody></table></div>"


def _cell(tag: str, text: str, column: int, heads: Sequence[str], numbers: int) -> str:
    is_long = "why" in heads[column].split()
    style = "number" if column < numbers else "long" if is_long else ""
    attributes = f' class="{style}"' if style else ""
    attributes += ' scope="col"' if tag == "th" else ""
    return f"<{tag}{attributes}>{html.escape(text)}</{tag}>"
