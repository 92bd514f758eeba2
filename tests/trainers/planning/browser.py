"""Pages as a browser shows them: headless Chromium, at the widths given."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow as tf

BINARY = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    BINARY is None, reason="chromium is not installed (Debian: apt install chromium)"
)

# Each view is the page in a frame of its width; what is seen there is left in the
# outer document, which Chromium prints when everything has loaded.
_VIEW = """<!DOCTYPE html>
<html><body style="margin: 0; background: #fff">
{frames}
<script>
addEventListener("load", () => {{
  const seen = [...document.querySelectorAll("iframe")].map((frame) => {{
    const page = frame.contentDocument, root = page.documentElement;
    const at = frame.getBoundingClientRect();
    const drawn = [...page.querySelectorAll("figure svg, figure img")];
    const pictures = drawn.map((one) => {{
      const box = one.getBoundingClientRect();
      return {{
        box: [at.left + box.left, at.top + box.top, box.width, box.height],
        label: (one.getAttribute("aria-labelledby") || "").split(" ")
          .map((id) => page.getElementById(id)?.textContent || "").join(" ").trim(),
        smallest_text: Math.min(...[...one.querySelectorAll("text")].map(
          (text) => text.getBoundingClientRect().height)),
      }};
    }});
    return {{
      width: root.clientWidth,
      content_width: root.scrollWidth,
      height: root.scrollHeight,
      cut_off: [...page.querySelectorAll(".wide")].filter(
        (table) => table.scrollWidth > table.clientWidth).length,
      headings: [...page.querySelectorAll("h1, h2")].map((h) => h.textContent),
      loaded: frame.contentWindow.performance.getEntriesByType("resource")
        .map((one) => one.name),
      pictures,
    }};
  }});
  const out = document.createElement("pre");
  out.id = "seen";
  out.textContent = JSON.stringify(seen);
  document.body.append(out);
}});
</script>
</body></html>
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """What a page is like at one width.

    Args:
      width: of the window, in pixels.
      content_width: what the page takes; more means that it scrolls sideways.
      height: of the whole page.
      cut_off: how many tables scroll sideways.
      headings: their texts.
      loaded: addresses of what was fetched for it.
      pictures: their `box` [left, top, width, height], `label` and the height of
        their `smallest_text`.
      pixels: [height, width, 3] of each picture, uint8.
    """

    width: int
    content_width: int
    height: int
    cut_off: int
    headings: list[str]
    loaded: list[str]
    pictures: list[dict]
    pixels: list[np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """The views, and what the browser's console said of all of them."""

    views: list[View]
    console: list[str]


def look_at(page: str, folder: pathlib.Path, *, widths: tuple[int, ...]) -> Look:
    """Opens a page in frames of such widths, and leaves `screen.png` in `folder`."""
    height = 12_000
    frames = "\n".join(
        f'<iframe style="border: 0; float: left" width="{width}" height="{height}" '
        f'srcdoc="{html.escape(page)}"></iframe>'
        for width in widths
    )
    (folder / "view.html").write_text(_VIEW.format(frames=frames))
    command = [
        BINARY,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={sum(widths)},{height}",
        f"--screenshot={folder / 'screen.png'}",
        "--dump-dom",
        (folder / "view.html").as_uri(),
    ]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "HOME": str(folder)},
    )
    (text,) = re.findall(r'<pre id="seen">(.*?)</pre>', ran.stdout, re.DOTALL)
    png = (folder / "screen.png").read_bytes()
    screen = tf.io.decode_png(png, channels=3).numpy()
    return Look(
        views=[
            View(**seen, pixels=[_cut(screen, p["box"]) for p in seen["pictures"]])
            for seen in json.loads(html.unescape(text))
        ],
        console=re.findall(r"CONSOLE.*?\] (.*)", ran.stderr),
    )


def _cut(screen: np.ndarray, box: list[float]) -> np.ndarray:
    left, top, width, height = map(round, box)
    return screen[top : top + height, left : left + width]
