"""What planning keeps between runs."""

import pytest

from meshwright.trainers.planning.search import plan_cache
from meshwright.trainers.planning.search.plan_cache import PlanCache


def test_the_cache_keeps_what_was_stored(tmp_path, caplog):
    cache = PlanCache(folder=tmp_path / "made" / "when needed")
    key = plan_cache.key_parts("A.b = 1", "v3:2x2")
    assert cache.cached(key) is None
    cache.store(key, {"seconds": 1.5, "refusal": None})
    assert cache.cached(key) == {"seconds": 1.5, "refusal": None}
    for other in (("A.b = 2", "v3:2x2"), ("A.b = 1", "v3:2x4")):
        assert cache.cached(plan_cache.key_parts(*other)) is None
    for name in ("jax", "libtpu", "tensorflow", "meshwright"):
        assert cache.cached(key | {name: "another"}) is None
    assert [path.suffix for path in cache.folder.iterdir()] == [".json"]
    assert not caplog.records


@pytest.mark.parametrize(
    "text",
    ["", '{"key": {}', "[]", '{"key": {"config": "x"}, "result": {}}', "\x00"],
)
def test_a_damaged_file_is_told_of_and_not_used(tmp_path, caplog, text):
    cache = PlanCache(folder=tmp_path)
    key = plan_cache.key_parts("A.b = 1", "v3:2x2")
    cache.store(key, {"seconds": 1.5})
    cache.path(key).write_text(text)
    assert cache.cached(key) is None
    assert str(cache.path(key)) in caplog.text and "is not used" in caplog.text
    cache.store(key, {"seconds": 2.5})
    assert cache.cached(key) == {"seconds": 2.5}


def test_the_cache_is_under_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plan_cache.default_folder() == tmp_path / "meshwright" / "plans"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert plan_cache.default_folder() == tmp_path / ".cache/meshwright/plans"
