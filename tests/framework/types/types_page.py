"""The examples of docs/explanations/types_rules.md, with what they print.

Run, it rewrites them.
"""

import dataclasses
import pathlib
import re
import textwrap
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf

from meshwright import framework as mw
from tests.framework.types.typed import MESH, argument

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "explanations" / "types_rules.md"
_PARTS = re.compile(
    r"## (?P<name>.+?)\n\n```py\n(?P<code>.*?)```\n\n```text\n(?P<text>.*?)```",
    re.DOTALL,
)
_SENT = re.compile(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(")
_WIDTH = 96
_GLUE = "\0"


@dataclasses.dataclass(frozen=True)
class Example:
    """A program for a row of the table of rules.

    Args:
      name: the situation.
      code: of `ours` and `theirs`.
      text: what is said to be printed.
    """

    name: str
    code: str
    text: str

    def functions(self) -> dict:
        """The namespace of the code; messages name a line of the example."""
        names: dict = {}
        exec(compile(_shared(), "shared.py", "exec"), names)
        exec(compile(self.code, "example.py", "exec"), names)
        return names

    def printed(self) -> str:
        names = self.functions()
        lines = [f"ours: {run_ours(names['ours'])}", f"JAX: {run_jax(names['theirs'])}"]
        return "".join(f"{_wrapped(line)}\n" for line in lines)


def _wrapped(line: str) -> str:
    """At the page's width, but not inside of types."""
    line = re.sub(r"\[[^\]]*\]", lambda match: match[0].replace(" ", _GLUE), line)
    how = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(line, _WIDTH, **how).replace(_GLUE, " ")


def _shared() -> str:
    return re.search(
        r"share this code:\n\n```py\n(.*?)```", PAGE.read_text(), re.DOTALL
    )[1]


def examples() -> list[Example]:
    return [Example(**match.groupdict()) for match in _PARTS.finditer(PAGE.read_text())]


def _given(fn: Callable) -> list:
    return [argument(text) for text in fn.__annotations__.values()]


def run_ours(fn: Callable) -> str:
    """The error of the checker, or the type and what is sent, numbers checked."""
    given = _given(fn)
    specs, shardings = [spec for spec, _ in given], [sharding for _, sharding in given]
    try:
        typed = mw.check_types(fn, specs, MESH, in_shardings=shardings)
    except mw.ShardingTypeError as error:
        return f"error: {str(error).removeprefix('ours: ')}"
    program = mw.compile_program(fn, specs, MESH, in_shardings=shardings)
    rng = np.random.default_rng(0)
    args = [rng.normal(size=spec.shape).astype(np.float32) for spec in specs]
    want = fn(*map(tf.constant, args))
    np.testing.assert_allclose(
        program.unshard(program(*args)), want, rtol=2e-5, atol=1e-5
    )
    return _told(typed.tensors[-1].type, [c.kind for c in program.collectives()])


def run_jax(fn: Callable) -> str:
    """The error, or the type of the result and what is sent."""
    args = [
        jax.device_put(
            jnp.ones(spec.shape, jnp.float32),
            jax.P(*[axes[0] if axes else None for axes in sharding.dims]),
        )
        for spec, sharding in _given(fn)
    ]
    types = []

    def noted(*args):
        out = fn(*args)
        types.append(str(jax.typeof(out)))
        return out

    try:
        lowered = jax.jit(noted).lower(*args)
    except Exception as error:
        # JAX does not export the first.
        if type(error).__name__ not in ("ShardingTypeError", "NotImplementedError"):
            raise
        return f"error: {str(error).splitlines()[0]}"
    return _told(types[0], _SENT.findall(lowered.compile().as_text()))


def _told(type_, kinds: list[str]) -> str:
    return f"{type_}, sends {', '.join(sorted(kinds)) or 'nothing'}"


def explicit_mesh():
    """JAX's mesh of the examples, to be set."""
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    devices = jax.devices()[:4]
    return jax.make_mesh((2, 2), ("dp", "tp"), axis_types=kinds, devices=devices)


def rewritten() -> str:
    """The page with what is printed now."""

    def fill(match: re.Match) -> str:
        example = Example(**match.groupdict())
        start, end = (place - match.start() for place in match.span("text"))
        return match[0][:start] + example.printed() + match[0][end:]

    return _PARTS.sub(fill, PAGE.read_text())


if __name__ == "__main__":
    mw.set_platform("cpu", device_count=8)
    with jax.set_mesh(explicit_mesh()):
        PAGE.write_text(rewritten())
