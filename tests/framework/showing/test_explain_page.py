"""The page of a program, as a browser shows it and people use it."""

import copy
import json
import pathlib
import re
import runpy

import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.compiler.explaining.texts.explain_text import cause_lines
from meshwright.framework.compiler.program import trace_program
from meshwright.framework.modeling import random
from meshwright.framework.showing.page import filled, page_text
from tests.framework.hlo.why.why_programs import kept, lies, traced
from tests.framework.showing import chromium

ROOT = pathlib.Path(__file__).parents[3]
EXAMPLE = runpy.run_path(str(ROOT / "docs" / "examples" / "wrong_line.py"))
WRONG = 'hidden = mw.mesh_split(hidden, MESH, ["data", None, None])'
DESK, PHONE = (1280, 900), (390, 844)
MEMORY = 2**40
"""Bytes of one device that no device has."""


def example():
    specs, shardings = EXAMPLE["arguments"]()
    mesh = EXAMPLE["MESH"]
    return trace_program(EXAMPLE["model"], specs, mesh, in_shardings=shardings)


def uneven():
    """A tensor of rows that do not divide, over devices in an order of their own."""
    mesh = mw.DeviceMesh(("X", "Y"), (2, 4), (0, 2, 4, 6, 1, 3, 5, 7))

    def fn(x):
        return tf.reduce_sum(tf.tanh(mw.mesh_split(x, mesh, ["Y", "X"])) ** 2)

    return trace_program(fn, [tf.TensorSpec([5, 8])], mesh, name="uneven")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The addresses of pages by name, and the folder that they are in."""
    folder = tmp_path_factory.mktemp("pages")
    program = example()
    mw.explain_page(program.compile(), folder / "wrong.html")
    mw.explain_page(program, folder / "traced.html")
    before, after = kept("looped"), traced("looped", w_lies=lies("X", None))
    mw.explain_page(before, folder / "two.html", other=after)
    mw.explain_page(uneven(), folder / "uneven.html")
    (folder / "shared.html").write_text(filled(shared(values(page_text(program)))))
    (folder / "many.html").write_text(filled(many(values(page_text(program)), 10_000)))
    return folder


def values(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def shared(data):
    """The values of a program of whose collectives no op's part is known."""
    (program,) = data["programs"]
    text = "of 145 KiB shared by 13 ops"
    sent = [
        {**each, "name": "all-reduce", "bytes": 148528, "own": None, "shared": text}
        for each in program["collectives"]
    ]
    return {**data, "programs": [{**program, "collectives": sent}]}


def many(data, count):
    """The values of a program whose tensors are those of `data`, over and over."""
    (program,) = data["programs"]
    tensors = []
    while len(tensors) < count:
        block = f"block_{len(tensors)}"
        for tensor in program["tensors"]:
            named = copy.copy(tensor)
            is_inside = tensor["kind"] == "inside"
            named["key"] = f"{tensor['key']} of {block}"
            named["name"] = tensor["name"] if is_inside else f"{block}.{tensor['name']}"
            named["layer"] = f"{block}.{tensor['layer']}" if is_inside else ""
            tensors.append(named)
    return {**data, "programs": [{**program, "tensors": tensors[:count]}]}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium.page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def opened(browser, pages):
    """Opens a page of `pages`; at the end nothing may be loaded nor complained of."""

    def opened(name, size=DESK, *, dark=False):
        browser.console.clear()
        browser.dark(dark)
        browser.open((pages / f"{name}.html").as_uri(), width=size[0], height=size[1])
        return browser

    yield opened
    assert browser.console == []
    assert all(url.startswith(("file:", "data:")) for url in browser.loaded)
    assert len([url for url in browser.loaded if url.startswith("file:")]) == 1


ROW = "document.querySelector('.row.{kind}')"


@chromium.needs_chromium
@pytest.mark.parametrize("name", ["wrong", "traced"])
def test_a_newcomer_finds_the_wrong_line(opened, name):
    """The steps of why.md in the docs."""
    page = opened(name)
    first = page.text("ul.top li")  # Of the largest collectives.
    assert "all-gather" in first and "64.0 MiB" in first
    page.press("/")
    page.type("all-gather 64.0 MiB")
    row = page.wait(f"{ROW.format(kind='sent')}.innerText")
    assert re.search(r"all-gather\s*model.*64.0 MiB", row, re.DOTALL)
    page.click(ROW.format(kind="sent"))
    page.wait("document.querySelector('#details .at')")
    shown = page.text("#details")
    assert "after: annotation layer_2.feed_forward [data,_,_] at" in shown
    assert "examples/wrong_line.py:" in shown
    assert WRONG in page.text("#details .at")


@chromium.needs_chromium
def test_a_part_that_is_not_known_has_no_number(opened):
    page = opened("shared")
    assert page.run("TREE.bytes[0]") == 0 and page.run("TREE.hasOpen[0]")
    assert "part of 145 KiB" in page.text("ul.top li")
    facts = page.text("dl.facts")
    assert re.search(r"sent in one call\s+145 KiB", facts)  # Of all its ops, once.
    assert "≥ 0 B" in page.run("document.querySelector('#rows').innerText")
    page.click("document.querySelector('ul.top button')")
    page.wait("document.querySelector('#details .card')")
    assert "of 145 KiB shared by 13 ops" in page.text("#details")


@chromium.needs_chromium
def test_by_keys_alone(opened):
    page = opened("traced")
    page.press("/")
    page.type("softmax")
    page.wait("state.rows.length && state.rows.length < 20")
    page.press("Enter")
    page.wait("document.querySelector('#details h2').innerText === 'Softmax'")
    assert "model splits dim 1, from" in page.text("#details")
    page.press("Escape")
    page.wait("document.querySelector('#details h2').innerText === 'The whole program'")
    page.press("/", "Escape", "Home")
    page.wait("state.query === '' && state.cursor === 0")
    assert page.run("state.rows[0].isOpen") is False
    page.press("ArrowRight")
    assert page.run("state.rows[0].isOpen") is True
    page.press("ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft", "ArrowLeft")
    assert page.run("[state.cursor, state.rows[0].isOpen]") == [0, False]
    page.press("End")
    assert page.run("state.cursor === state.rows.length - 1")
    last = page.run("document.querySelector('.cursor').getBoundingClientRect().bottom")
    assert last < DESK[1] + 1


@chromium.needs_chromium
def test_what_is_not_there_has_the_nearest_names(opened):
    page = opened("traced")
    page.press("/")
    page.type("feed_forwrd")
    page.wait("document.querySelector('.empty')")
    assert "No matches for “feed_forwrd”" in page.text(".empty")
    page.click("document.querySelector('.empty .link')")
    page.wait("state.rows.length")
    assert "feed_forward" in page.run("state.query")


@chromium.needs_chromium
def test_a_second_program_beside_it(opened):
    page = opened("two")
    assert page.text("#details h2") == "What differs"
    page.click("document.querySelector('[data-name=differs]')")
    page.wait("state.only.has('differs')")
    shown = page.run(
        "state.rows.filter((r) => r.entry && !r.sent).map((r) => r.entry.key)"
    )
    after = traced("looped", w_lies=lies("X", None))
    differing = {t.name for t in mw.explain_difference(kept("looped"), after).tensors}
    assert "argument 0" in differing and differing <= set(shown)
    page.run("choose(BY_KEY.get('argument 0'))")
    page.wait("document.querySelector('#details .flow')")
    flow = page.text("#details .flow")
    assert "[_,Y]" in flow and "[X,_]" in flow
    everything = page.text("#details").lower()
    assert "in the first program" in everything and "in the second" in everything


@chromium.needs_chromium
def test_ten_thousand_tensors(opened):
    page = opened("many")
    assert page.run("ENTRIES.length") == 10_000
    page.run("for (const n of TREE.parts.values()) n.open = true; refresh()")
    assert page.run("document.querySelectorAll('*').length") < 1500
    page.run("search('softmax')")
    count = page.run("state.rows.filter((r) => r.entry && !r.sent).length")
    assert count == page.run(
        "ENTRIES.filter((e) => e.key.toLowerCase().includes('softmax')).length"
    )


@chromium.needs_chromium
def test_on_a_phone(opened):
    page = opened("wrong", PHONE)
    width = page.run("document.documentElement.scrollWidth")
    assert width == PHONE[0]
    assert page.run("getComputedStyle(DETAILS).display") == "none"
    page.run("search('all-gather 64.0')")
    page.click(ROW.format(kind="sent"))
    page.wait("getComputedStyle(DETAILS).display !== 'none'")
    assert WRONG in page.text("#details .at")
    assert page.run("document.documentElement.scrollWidth") == PHONE[0]
    page.click("document.querySelector('.back')")
    page.wait("getComputedStyle(DETAILS).display === 'none'")


@chromium.needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(opened, dark):
    page = opened("wrong", dark=dark)
    channels = page.run(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (max(channels) < 60) if dark else (min(channels) > 240)


@chromium.needs_chromium
def test_shards_are_those_of_the_sharding(opened):
    """Of each tensor, the offsets in the browser and those by `shard_offsets`."""
    page = opened("two")
    reasons = kept("looped").reasons
    for tensor in reasons.tensors:
        kind = "" if tensor.kind.value == "inside" else f"{tensor.kind.value} "
        key = json.dumps(kind + tensor.name)
        shards = page.run(
            f"(() => {{ const t = BY_KEY.get({key}).sides[0]; "
            "return shardsOf(t, shardingOf(0, t), FIRST.mesh); })()"
        )
        offsets = tensor.sharding.shard_offsets(tensor.shape)
        begins = [[begin for begin, _ in shard["slices"]] for shard in shards]
        assert begins == offsets.reshape(len(shards), -1).tolist()


@chromium.needs_chromium
def test_a_device_that_holds_only_padding_has_a_cell_of_its_own(opened):
    page = opened("uneven")
    page.run("choose(ENTRIES.find((e) => e.tensor.name === 'Tanh'))")
    page.wait("document.querySelector('.shards title')")
    cells = page.run(
        "[...document.querySelectorAll('.shards title')].map((t) => t.textContent)"
    )
    # Rows go over Y, whose devices are two apart, and columns over X.
    assert cells == [f"devices {n}" for n in range(8)]
    page.run("DETAILS.querySelectorAll('details').forEach((d) => d.open = true)")
    assert "X=1 Y=3\t[5:5, 4:8]" in page.text("#details")


def test_sizes_and_names_that_would_end_the_script_do_not():
    data = values(page_text(kept("looped")))
    data["programs"][0]["name"] = "</script><b>$data"
    page = filled(data)
    assert page.count("</script>") == 2 and "<b>" not in page
    assert values(page) == data


def test_every_tensor_and_collective_of_the_program_is_on_it():
    program = kept("looped")
    data = values(page_text(program))["programs"][0]
    assert len(data["tensors"]) == len(program.reasons.tensors)
    kinds = {one["kind"] for one in data["collectives"]}
    assert kinds == {"all-gather", "all-reduce", "all-to-all"} & kinds and kinds
    explanation = mw.explain(program.compile(), reasons=True)
    compiled = values(page_text(explanation))["programs"][0]
    assert [t["sharding"] for t in compiled["tensors"]] == [
        [s["text"] for s in compiled["shardings"]].index(str(t.sharding))
        for t in explanation.tensors
    ]
    causes = {tuple(one["cause"]) for one in compiled["collectives"]}
    at_tensors = [c for t in explanation.tensors for c in t.collectives]
    every = [*at_tensors, *explanation.elsewhere]
    assert causes == {tuple(cause_lines(one)) for one in every} and len(causes) > 1
    shown = {n for t in compiled["tensors"] for n in t["sent"]}
    assert shown | set(compiled["elsewhere"]) == set(
        range(len(compiled["collectives"]))
    )


@pytest.mark.parametrize("is_compiled", [False, True])
def test_random_bits_of_a_line_are_one_tensor(is_compiled):
    mesh = mw.DeviceMesh(("X",), (2,))

    def fn(x, key):
        x = mw.mesh_split(x, mesh, ["X", None])
        for layer in ("lower", "upper"):
            with tf.name_scope(layer):
                kept = random.bernoulli(random.fold_in(key, layer), 0.5, [8, 16])
                x *= tf.cast(kept, tf.float32)
        return x

    specs = tf.TensorSpec([8, 16]), tf.TensorSpec([2], tf.uint32)
    program = trace_program(fn, specs, mesh, name="masked")
    if is_compiled:
        program = program.compile()
    (folded,) = values(page_text(program))["programs"]
    with_both = values(page_text(program, other=program))["programs"]
    bits, all_bits = (
        [t for t in each["tensors"] if t["dtype"] == "u32" and t["kind"] == "inside"]
        for each in (folded, with_both[0])
    )
    assert len(bits) < 20 < len(all_bits)
    assert {t["layer"] for t in bits} == {t["layer"] for t in all_bits}
    notes = " ".join(note for tensor in bits for note in tensor["notes"])
    counts = map(int, re.findall(r"and (\d+) more u32 tensors? of this line", notes))
    assert sum(counts) + len(bits) == len(all_bits)


def test_a_program_too_large_to_compile_has_a_page():
    size = 2**22
    mesh = mw.DeviceMesh(("X",), (8,))
    program = trace_program(
        lambda x: tf.tanh(mw.mesh_split(x, mesh, ["X", None])),
        [tf.TensorSpec([size, size])],
        mesh,
        name="large",
    )
    (data,) = values(page_text(program))["programs"]
    assert max(tensor["held"] for tensor in data["tensors"]) > MEMORY
    assert data["how"] == "what propagation says, before XLA compiles"
    assert "A plan counts what is left, for one step." in data["note"]


def test_what_cannot_be_shown_is_refused(tmp_path):
    program = kept("looped")
    explanation = mw.explain(program.compile())
    with pytest.raises(
        ValueError, match=r"make it by explain\(program, reasons=True\)"
    ):
        page_text(explanation)
    with pytest.raises(ValueError, match="an explanation is of a compiled program"):
        page_text(program, other=explanation)
    with pytest.raises(
        OSError, match="give the path of a file in a folder that exists"
    ):
        mw.explain_page(program, tmp_path / "no" / "page.html")


def test_a_sum_over_a_part_of_an_axis_is_on_it():
    """As where a batch of 30 rows is split along an axis of four."""
    mesh = mw.DeviceMesh(("X",), (8,))

    def product(x, w):
        x = mw.mesh_split(x, mesh, [None, "X:(1)2"])
        w = mw.mesh_split(w, mesh, ["X:(1)2", None])
        return mw.mesh_split(x @ w, mesh, [None, None])

    specs = [tf.TensorSpec([64, 32]), tf.TensorSpec([32, 64])]
    data = values(page_text(trace_program(product, specs, mesh)))["programs"][0]
    assert "X:(1)2" in json.dumps(data) and "all-reduce" in json.dumps(data)
