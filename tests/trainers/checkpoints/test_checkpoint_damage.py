"""Whatever happens to a checkpoint's files: the right state, or an earlier one."""

import logging
import os
import pathlib
import re
import shutil
import subprocess
import time

import pytest
from etils import epath

from meshwright.framework.compiler.xla.processes import gather_from_processes
from meshwright.trainers.checkpoints import checkpoint_digests as digests
from meshwright.trainers.checkpoints.checkpoint_manifest import config_changes
from meshwright.trainers.checkpoints.checkpoints import (
    Access,
    CheckpointError,
    Checkpoints,
)
from tests.house import snippets
from tests.trainers.checkpoints.checkpoint_states import (
    assert_same,
    files_of,
    flip_a_bit,
    make_abstract,
    make_state,
    save_steps,
    write_digests,
)

# After a failure, TensorStore still calls an event loop that Orbax has closed.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

# Orbax writes these after all others; they say nothing that is needed.
WITHOUT_DIGEST = ("_CHECKPOINT_METADATA", "commit_success.txt")
DAMAGES = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file: file.write_bytes(b""),
    "a bit flipped": flip_a_bit,
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "deleted": lambda file: file.unlink(),
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A directory with steps 1 and 2, to be copied."""
    folder = tmp_path_factory.mktemp("pristine")
    save_steps(folder, 1, 2)
    return folder


@pytest.fixture
def saved(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "saved")


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_file_in_turn(pristine, tmp_path, caplog, damage):
    paths = files_of(pristine / "2")
    assert len(paths) > 10 and "SHA256SUMS" in paths
    for i, path in enumerate(paths):
        folder = shutil.copytree(pristine, tmp_path / str(i))
        DAMAGES[damage](folder / "2" / path)
        damaged = files_of(folder / "2")
        caplog.clear()
        with Checkpoints(folder) as reader:
            restored = reader.restore(None, make_abstract())
            steps = reader.steps()
        if path in WITHOUT_DIGEST:
            assert_same(restored, make_state(seed=2))
            assert (steps, caplog.messages) == ([1, 2], []), path
        else:
            assert_same(restored, make_state(seed=1))
            assert steps == [1], path
            assert path in caplog.messages[0]
            assert re.search(r"/2 is damaged: ", caplog.messages[0])
            # Nothing is thrown away.
            assert files_of(folder / "2.damaged") == damaged


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda step: (step / "state/new").write_text(""), "state/new is not in SHA"),
        (lambda step: (step / "SHA256SUMS").unlink(), "SHA256SUMS is missing, nothing"),
        (
            lambda step: shutil.rmtree(step / "state"),
            r"state/_METADATA is missing; .*; \d+ more",
        ),
        (
            lambda step: (step / "SHA256SUMS").write_bytes(b"\xff\0\n"),
            "line 1 of SHA256SUMS is no digest of a file",
        ),
        (
            lambda step: (step / "SHA256SUMS").write_text(f"{'0' * 64}  ../1/x\n"),
            r"\.\./1/x is missing; .* is not in SHA256SUMS",
        ),
        (lambda step: flip_a_bit(step / "manifest/metadata"), r"metadata \(.* bytes\)"),
        (lambda step: [shutil.rmtree(step), step.mkdir()], "SHA256SUMS is missing"),
    ],
)
def test_a_damaged_step_that_is_asked_for_is_an_error(saved, damage, problem):
    damage(saved / "2")
    with Checkpoints(saved) as reader:
        message = rf"(?s)/2 is damaged: .*{problem}.*; take step 1"
        with pytest.raises(CheckpointError, match=message):
            reader.restore(2, make_abstract())
        assert reader.steps() == [1, 2]
        shutil.rmtree(saved / "1")
        with pytest.raises(CheckpointError, match="; there is no other"):
            reader.restore(2, make_abstract())


def test_who_only_reads_renames_nothing(saved, caplog):
    flip_a_bit(saved / "2" / "state" / "_METADATA")
    with Checkpoints(saved, access=Access.READ) as reader:
        assert_same(reader.restore(None, make_abstract()), make_state(seed=1))
        assert reader.steps() == [1, 2]
    assert caplog.messages[1] == "going on from step 1 instead of step 2"


def test_all_damaged_is_an_error_that_names_all_and_moves_none(saved):
    flip_a_bit(saved / "2" / "state" / "_METADATA")
    (saved / "1" / "manifest" / "metadata").unlink()
    message = (
        r"(?s)all checkpoints in .* are damaged:\n.*/2 is damaged: state/_METADATA"
        r".*\n.*/1 is damaged: manifest/metadata is missing\n.*from a copy"
    )
    # Else the next run would find nothing, and begin anew.
    for _ in range(2):
        with (
            Checkpoints(saved) as reader,
            pytest.raises(CheckpointError, match=message),
        ):
            reader.restore(None, make_abstract())


def test_a_damaged_step_can_be_saved_again_and_is_not_retained(saved, caplog):
    for name in ("2.damaged", "2.damaged.2"):
        flip_a_bit(saved / "2" / "state" / "_METADATA")
        with Checkpoints(saved, max_to_keep=2) as saver:
            assert int(saver.restore(None, make_abstract()).step) == 1
            assert (saved / name).is_dir()
            saver.save(2, make_state(seed=2))
            assert saver.steps() == [1, 2]
            assert_same(saver.restore(None, make_abstract()), make_state(seed=2))
    with Checkpoints(saved, max_to_keep=2) as saver:
        saver.save(3, make_state(seed=3))
        assert saver.steps() == [2, 3]
    assert (saved / "2.damaged").is_dir()
    assert "kept the damaged checkpoint as" in caplog.text


def test_processes_go_back_together(saved, caplog):
    answers = iter([[2, 2], [0, 1], [1, 1], [0, 0], [0, 0], [0, 0], [0, 0]])
    with Checkpoints(saved, gather=lambda value: next(answers)) as reader:
        assert_same(reader.restore(None, make_abstract()), make_state(seed=1))
    assert "another process found this" in caplog.text


def test_processes_take_the_step_that_the_first_sees(saved):
    answers = iter([[1, 2], [0, 0], [0, 0], [0, 0]])
    with Checkpoints(saved, gather=lambda value: next(answers)) as reader:
        assert_same(reader.restore(None, make_abstract()), make_state(seed=1))


def test_a_failure_of_another_process_is_one_of_all(saved):
    answers = iter([[2, 2], [0, 0], [0, 0], [0, 1]])
    message = "cannot be read, though its files are as they .*in another process"
    with (
        Checkpoints(saved, gather=lambda value: next(answers)) as reader,
        pytest.raises(CheckpointError, match=message),
    ):
        reader.restore(None, make_abstract())


@pytest.mark.parametrize(
    "remove",
    [
        lambda step: shutil.rmtree(step),
        lambda step: (step / "state" / "manifest.ocdbt").unlink(),
        lambda step: shutil.rmtree(step / "state" / "d"),
        lambda step: shutil.rmtree(step / "state" / "ocdbt.process_0"),
    ],
)
def test_a_step_removed_while_it_is_read(saved, caplog, remove):
    """As a trainer's retention does to an evaluation that takes its time."""
    read = []

    def choose(step, forms):
        read.append(step)
        if len(read) == 1:
            remove(saved / "2")
        return make_abstract()

    with Checkpoints(saved, access=Access.READ) as reader:
        assert_same(reader.restore_part(None, choose), make_state(seed=1))
    assert read == [2, 1]
    assert re.search(r"/2 (is damaged: .* changed while|was removed)", caplog.text)


def test_a_step_removed_before_it_is_verified(saved, caplog):
    def gather(value):
        shutil.rmtree(saved / "2", ignore_errors=True)
        return [value]

    with Checkpoints(saved, access=Access.READ, gather=gather) as reader:
        assert_same(reader.restore(None, make_abstract()), make_state(seed=1))
    assert caplog.messages[0].endswith("/2 was removed while it was read")


def test_the_clock_decides_nothing(saved, monkeypatch):
    """Neither times of files nor those that are noted, far ahead or long ago."""
    real = time.time
    for step, years in (("1", 20), ("2", -20)):
        for path in (saved / step, *(saved / step).rglob("*")):
            os.utime(path, times=(real() + years * 3e7,) * 2)
    with Checkpoints(saved, max_to_keep=2) as saver:
        monkeypatch.setattr(time, "time", lambda: real() - 9e8)
        saver.save(3, make_state(seed=3))
        saver.wait()
        monkeypatch.setattr(time, "time", lambda: real() + 9e8)
        saver.save(4, make_state(seed=4))
        assert saver.steps() == [3, 4]
    with Checkpoints(saved) as reader:
        assert_same(reader.restore(None, make_abstract()), make_state(seed=4))


def test_digests_are_those_of_sha256sum(saved):
    command = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(command, cwd=saved / "2").returncode == 0
    flip_a_bit(saved / "2" / "state" / "_METADATA")
    assert subprocess.run(command, cwd=saved / "2").returncode == 1


def test_digests_of_each_process_are_taken_over(tmp_path):
    folder = epath.Path(tmp_path)
    for path in ("all/own/x", "all/own/y", "all/z"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    digests.write(folder / "all" / "own")
    flip_a_bit(tmp_path / "all/own/x")  # So late that only these digests can tell.
    digests.write(folder)
    message = (
        r"is damaged: all/own/x \(9 bytes\) does not match its digest in SHA256SUMS$"
    )
    with pytest.raises(CheckpointError, match=message):
        digests.verify(folder, gather_from_processes)
    assert files_of(tmp_path) == ["SHA256SUMS", "all/own/x", "all/own/y", "all/z"]


def test_digests_made_by_hand_as_documented(saved):
    (saved / "2" / "SHA256SUMS").unlink()
    page = pathlib.Path(__file__).parents[3] / "docs/reference/training/checkpoints.md"
    command = re.search(r"    (find .*? > SHA256SUMS)\n", page.read_text(), re.DOTALL)
    subprocess.run(command[1], shell=True, cwd=saved / "2", check=True)
    with Checkpoints(saved) as reader:
        assert_same(reader.restore(2, make_abstract()), make_state(seed=2))


def test_a_save_whose_digests_cannot_be_written_is_none(saved, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(digests, "write", full)
    message = r"step 3 .* failed \(OSError: .*No space left.*step 2 is kept"
    with Checkpoints(saved) as saver:
        saver.save(3, make_state(seed=3))
        with pytest.raises(CheckpointError, match=message):
            saver.wait()
        assert saver.steps() == [1, 2]
        monkeypatch.undo()
        saver.save(3, make_state(seed=3))
        assert_same(saver.restore(None, make_abstract()), make_state(seed=3))


HOSTILE = {
    "pickle": b"cposix\nsystem\n(S'touch {}'\ntR.",
    "deep": b"[" * 100_000,
    "deep map": b'{"a":' * 100_000,
    "list": b"[1, 2]",
    "number": b"7",
    "null": b"null",
    "text": b'"../../etc/passwd"',
    "of lists": b'{"theta.b": [7], "tree_metadata": [1], "array_metadatas": {}}',
    "huge": b'{"theta.b": {"shape": [1e400, -1], "dtype": 3}, "tree_metadata": 1e400}',
    "giant": b'{"theta.b": {"shape": [9999999999999999], "dtype": "float32"}}',
    "path": b'{"../x": {"shape": [], "dtype": "int32"}, "use_ocdbt": "../../x"}',
    "not utf-8": b"\xff\xfe\0",
}


@pytest.mark.parametrize("content", HOSTILE)
def test_hostile_files_with_right_digests(pristine, tmp_path, content):
    """Either they do not matter or the message is ours: no crash, nothing run."""
    proof = tmp_path / "proof"
    described = [path for path in files_of(pristine / "2") if "/d/" not in path]
    refused = []
    for i, path in enumerate(described):
        folder = shutil.copytree(pristine, tmp_path / str(i))
        data = HOSTILE[content].replace(b"{}", str(proof).encode())
        (folder / "2" / path).write_bytes(data)
        if path != "SHA256SUMS":
            write_digests(folder / "2")
        with Checkpoints(folder) as reader:
            try:
                restored = reader.restore(2, make_abstract())
                assert_same(restored, make_state(seed=2))
            except CheckpointError:
                refused.append(path)
            try:
                reader.metadata(2)
            except CheckpointError:
                refused.append(f"metadata() of {path}")
        assert not proof.exists(), path
    assert {"manifest/metadata", "state/manifest.ocdbt", "SHA256SUMS"} <= set(refused)


def test_metadata_that_is_none(saved):
    (saved / "2" / "metadata" / "metadata").write_text("[]")
    message = r"the metadata of checkpoint .*/2 cannot be read .*it is a list, no dict"
    with Checkpoints(saved) as reader, pytest.raises(CheckpointError, match=message):
        reader.metadata(2)
    for text in ("[]", "{", "{}", '{"config": [1]}'):
        (saved / "2" / "metadata" / "metadata").write_text(text)
        assert config_changes(epath.Path(saved / "2"), "A.b = 1") == []


def test_descriptions_of_many_bytes_are_not_read(saved, monkeypatch):
    monkeypatch.setattr(digests, "_MAX_JSON", 1000)
    (saved / "2" / "metadata" / "metadata").write_text("[" + "0," * 1000 + "0]")
    write_digests(saved / "2")
    message = "metadata/metadata has 2,003 bytes, too many to describe"
    with Checkpoints(saved) as reader, pytest.raises(CheckpointError, match=message):
        reader.restore(None, make_abstract())


RESTORE = """
import sys
from meshwright.framework import set_platform
set_platform("cpu", 8)
from tests.trainers.checkpoints.checkpoint_states import *
make_state()
seen = []
sys.addaudithook(lambda name, args: seen.append(name))
with Checkpoints("{folder}") as reader:
    print(int(reader.restore(None, make_abstract()).step))
assert "open" in seen
print([name for name in seen if "pickle" in name or name in ("exec", "compile")])
"""


def test_restoring_unpickles_nothing(saved, tmp_path):
    status, out, errors = snippets.run(RESTORE.format(folder=saved), tmp_path)
    assert (status, out.split("\n")[:2]) == (0, ["2", "[]"]), errors


def test_slow_transfers_say_how_far_they_are(saved, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    with Checkpoints(saved) as saver:
        saver.save(3, make_state(seed=3))
        saver.restore(None, make_abstract())
    # What other tests left behind may be logged meanwhile, by other loggers.
    assert not [record for record in caplog.records if record.name == "absl"]
    end = digests.Transfer.end

    def end_late(transfer):
        time.sleep(0.1)
        end(transfer)

    monkeypatch.setattr(digests.Transfer, "interval", 1e-2)
    monkeypatch.setattr(digests.Transfer, "end", end_late)
    with Checkpoints(saved) as saver:
        saver.save(4, make_state(seed=4))
        saver.restore(None, make_abstract())
    size = r"\d+(\.\d+)? ([KMG]i)?B"
    rate = f": {size} of (?!0 ){size}, {size}/s"
    for what in (
        "saving step 4",
        "digests of .*",
        "verifying .*/4",
        "restoring step 4",
    ):
        assert any(re.fullmatch(what + rate, line) for line in caplog.messages), what
