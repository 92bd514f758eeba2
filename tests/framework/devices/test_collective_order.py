"""Whether data alone orders the collectives of a program."""

import jax
import numpy as np
import pytest
import tensorflow as tf
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from meshwright.framework import DeviceMesh, compile_program, mesh_split
from meshwright.framework.compiler.hlo.collective_order import is_ordered
from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.xla import jax_bridge

SUM = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""
TWICE = """
%twice (t: f32[8]) -> f32[8] {
  %t = f32[8]{0} parameter(0)
  ROOT %u = f32[8]{0} all-reduce(%t), to_apply=%sum
}
"""
HEAD = "HloModule m, is_scheduled=true\n"
ENTRY = """
ENTRY %main (x: f32[8], y: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[8]{0} parameter(1)
"""


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["ROOT %p = f32[8]{0} add(%x, %y)"], True),
        (["%p = f32[8]{0} all-reduce(%x)", "ROOT %q = f32[8]{0} add(%p, %y)"], True),
        (["%p = f32[8]{0} all-reduce(%x)", "ROOT %q = f32[8]{0} all-reduce(%p)"], True),
        (
            [
                "%p = f32[8]{0} all-reduce(%x)",
                "%q = f32[8]{0} add(%p, %y)",
                "ROOT %r = f32[8]{0} all-reduce(%q)",
            ],
            True,
        ),
        (
            [
                "%p = f32[8]{0} all-reduce(%x)",
                "%q = f32[8]{0} all-reduce(%y)",
                "ROOT %r = f32[8]{0} add(%p, %q)",
            ],
            False,
        ),
        (
            [
                "%p = f32[8]{0} call(%x), to_apply=%twice",
                "%q = f32[8]{0} all-reduce(%y)",
                "ROOT %r = f32[8]{0} add(%p, %q)",
            ],
            False,
        ),
        (
            [
                "%p = f32[8]{0} call(%x), to_apply=%twice",
                "ROOT %q = f32[8]{0} call(%p), to_apply=%twice",
            ],
            True,
        ),
    ],
)
def test_collectives_are_ordered_by_data(lines, expected):
    text = HEAD + SUM + TWICE + ENTRY + "\n".join(f"  {line}" for line in lines) + "\n}"
    assert is_ordered(HloModule(text)) == expected


MESH = DeviceMesh(("X", "Y"), (4, 2))
ROWS = [tf.TensorSpec([8, 8]), tf.TensorSpec([8, 8])]


def apart(x, y):
    """Two sums that need nothing of each other, along two axes."""
    return [
        mesh_split(tf.reduce_sum(mesh_split(t, MESH, [axis, None]), 0), MESH, [None])
        for t, axis in ((x, "X"), (y, "Y"))
    ]


def one(x, y):
    """A single sum, of which the second argument is no part."""
    x = mesh_split(x, MESH, ["X", None])
    return tf.reduce_sum(x, 0), y


@pytest.mark.parametrize("how", ["cache", "child"])
@pytest.mark.parametrize("fn", [apart, one])
def test_what_was_serialized_is_compiled_anew(fn, how, tmp_path, monkeypatch):
    """Else devices may begin different collectives, and wait for each other."""
    anew, compile_here = [], jax_bridge.compile_here
    monkeypatch.setattr(
        jax_bridge, "compile_here", lambda *a: anew.append(a) or compile_here(*a)
    )
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        jax_cache.reset_cache()
        x = np.arange(64, dtype=np.float32).reshape(8, 8)
        for _ in range(2 if how == "cache" else 1):
            assert not anew
            program = compile_program(fn, ROWS, MESH, in_child=how == "child")
            results = program.unshard(program(x, 2 * x))
            jax.clear_caches()
        np.testing.assert_array_equal(results[0], x.sum(0))
        assert len(anew) == (fn is apart)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax_cache.reset_cache()
