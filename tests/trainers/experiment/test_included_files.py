"""Where a file that another includes is looked for."""

import pytest

from meshwright.trainers.experiment import config
from meshwright.trainers.experiment.bindings.gin_messages import bindings


def test_an_included_file_may_lie_beside_the_one_that_includes_it(
    tmp_path, monkeypatch
):
    job, cwd = tmp_path / "job", tmp_path / "cwd"
    job.mkdir()
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    (job / "mine.gin").write_text("include 'part'\n")
    (job / "part.gin").write_text("DEPTH = 3\n")
    (cwd / "part.gin").write_text("DEPTH = 4\n")
    for name in (job / "mine", "../job/mine.gin"):
        config.load([name])
        assert "DEPTH = 3" in map(str, bindings())
    (job / "part.gin").unlink()
    config.load([job / "mine"])
    assert "DEPTH = 4" in map(str, bindings())
    (job / "parts.gin").write_text("")
    (cwd / "part.gin").unlink()
    message = (
        f"no gin file 'part', neither from {job} nor .*\\n  Did you mean parts.gin"
    )
    with pytest.raises(config.ConfigError, match=message):
        config.load([job / "mine"])
