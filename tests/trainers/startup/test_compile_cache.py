"""Compiled programs are kept for the next start."""

import os

import jax
import numpy as np
import pytest
import tensorflow as tf
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from meshwright.framework import DeviceMesh, compile_program
from meshwright.framework.user_cache import user_cache
from meshwright.trainers.startup import compile_cache

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_compilation_cache_include_metadata_in_key",
)
MESH = DeviceMesh(("X",), (8,))


@pytest.fixture(autouse=True)
def settings():
    """JAX's settings as they were, and no cache that it had begun with."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


@pytest.fixture
def hits(monkeypatch):
    monkeypatch.setattr(compile_cache, "_LEAST_SECONDS", 0.0)
    entries = []
    jax.monitoring.register_event_listener(lambda name, **_: entries.append(name))
    yield lambda: entries.count("/jax/compilation_cache/cache_hits")
    jax.monitoring.clear_event_listeners()


def run(in_child=False):
    x = np.arange(8, dtype=np.float32)
    spec = [tf.TensorSpec([8])]
    program = compile_program(
        lambda x: tf.cumsum(x), spec, MESH, in_child=in_child, name="kept"
    )
    np.testing.assert_array_equal(program.unshard(program(x)), np.cumsum(x))
    jax.clear_caches()


def test_what_was_compiled_is_read_by_the_next_start(tmp_path, hits):
    compile_cache.use(str(tmp_path))
    entries = []
    for _ in range(2):  # From the same line, which is a part of the key.
        run()
        entries.append(hits())
    assert list(tmp_path.glob("*/jit_kept*-cache"))
    assert entries[0] == 0 < entries[1]


def test_what_a_child_compiled_is_not_kept(tmp_path):
    compile_cache.use(str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    run(in_child=True)
    assert not list(tmp_path.glob("*/jit_kept*"))


def test_off_keeps_nothing():
    compile_cache.use("off")
    assert not jax.config.jax_enable_compilation_cache


@pytest.mark.parametrize("is_alone", [True, False])
def test_the_default_is_the_users_cache_of_one_process(is_alone, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", True)
    compile_cache.use(None, is_alone=is_alone)
    folder = jax.config.jax_compilation_cache_dir
    inside = folder is not None and folder.startswith(f"{tmp_path}/meshwright/compiled")
    assert inside == is_alone


def test_jaxs_own_settings_come_before_the_default(tmp_path):
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compile_cache.use(None)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    compile_cache.use(None)
    assert jax.config.jax_compilation_cache_dir is None


def test_a_folder_that_cannot_be_written_is_told(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    jax.config.update("jax_compilation_cache_dir", None)
    compile_cache.use(str(tmp_path / "file"))
    assert "name another folder with --compile_cache" in caplog.text
    assert jax.config.jax_compilation_cache_dir is None


def test_what_was_not_used_for_longest_goes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "_MOST_BYTES", 250)
    compile_cache.use(str(tmp_path))
    folder = next(tmp_path.iterdir())
    for age in range(4):
        path = folder / f"{age}-cache"
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    compile_cache.use(str(tmp_path))
    assert sorted(p.name for p in folder.iterdir()) == ["0-cache", "1-cache"]


def test_without_a_home_folder_a_run_still_starts(monkeypatch, tmp_path):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # No entry either.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert user_cache("compiled") == tmp_path / "meshwright/compiled"
