"""Checkpoints of several processes, and of processes that are killed."""

import concurrent.futures
import contextlib
import os
import re
import shutil
import signal
import socket

import numpy as np
import pytest

from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.checkpoints.checkpoints import Access, Checkpoints
from tests.house import snippets
from tests.trainers.checkpoints.checkpoint_states import (
    abstract_of,
    assert_same,
    files_of,
    make_abstract,
    make_state,
    make_wide_state,
    mesh_sharding,
    save_steps,
)

TWO_PROCESSES = """
import contextlib, faulthandler, functools, os, pathlib, resource
from unittest import mock
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize("localhost:{port}", 2, {process})
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from meshwright.trainers.checkpoints import checkpoint_digests as digests
from meshwright.trainers.checkpoints.checkpoints import CheckpointError
from tests.trainers.checkpoints.checkpoint_states import *

faulthandler.dump_traceback_later(120, exit=True)  # A hang is not to last.
sharding = mesh_sharding(2, 4)
whole = NamedSharding(sharding.mesh, PartitionSpec())
make = lambda array, sharding: jax.make_array_from_callback(
    array.shape, sharding, lambda index: array[index])

def state(seed):
    # Half of `w` lies in each process.
    weight = np.random.default_rng(seed).standard_normal((256, 64)).astype(np.float32)
    return NestedMap(
        theta=NestedMap(w=make(weight, sharding)), step=make(np.int32(seed), whole))

folder = pathlib.Path("{folder}")
# Gloo's threads write into the lines of standard output.
print = functools.partial(print, file=open("{said}", "w", buffering=1))
"""

GO_BACK = """
with Checkpoints(folder, max_to_keep=2) as checkpoints:
    for step in (1, 2, 3):
        checkpoints.save(step, state(step))
    checkpoints.wait()
    if {process} == 1:
        # They take turns to verify from the largest on: the other one finds this.
        files = (folder / "3" / "state").glob("ocdbt.process_*/d/*")
        flip_a_bit(max(files, key=lambda file: file.stat().st_size))
    multihost_utils.sync_global_devices("damaged")
    restored = checkpoints.restore(None, abstract_of(state(0)))
    for one, other in zip(restored.leaves(), state(2).leaves(), strict=True):
        for here, there in zip(one.addressable_shards, other.addressable_shards):
            np.testing.assert_array_equal(np.asarray(here.data), np.asarray(there.data))
    checkpoints.save(3, state(30))
    print(checkpoints.steps(), int(restored.step))
"""


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


@contextlib.contextmanager
def two_processes(tmp_path, code, **fields):
    """Starts two processes that run `code`.

    Yields futures of exit status, lines on standard output, and standard error.
    """
    port = free_port()

    def run(process):
        folder = tmp_path / str(process)
        folder.mkdir()
        output = folder / "said"
        script = (TWO_PROCESSES + code).format(
            port=port, process=process, folder=tmp_path / "saved", said=output, **fields
        )
        status, _, errors = snippets.run(script, folder)
        return status, output.read_text().splitlines(), errors

    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield [pool.submit(run, process) for process in range(2)]


def test_two_processes_save_verify_and_go_back_together(tmp_path):
    folder = tmp_path / "saved"
    with two_processes(tmp_path, GO_BACK) as futures:
        first, second = (future.result() for future in futures)
    for status, out, errors in (first, second):
        assert status == 0, errors
        assert out == ["[2, 3] 2"]
    assert "/3 is damaged: state/ocdbt.process_" in first[2]
    assert "/3 is damaged: another process found this" in second[2]
    assert (folder / "3.damaged").is_dir()
    # One process with another mesh reads what two wrote.
    target = abstract_of(make_state(), mesh_sharding(4, 2))
    abstract = NestedMap(theta={"w": target.theta.layer.w}, step=target.step)
    with Checkpoints(folder, access=Access.READ) as reader:
        restored = reader.restore(None, abstract)
    expected = np.random.default_rng(30).standard_normal((256, 64)).astype(np.float32)
    np.testing.assert_array_equal(restored.theta.w, expected)


COUNT_ON = """
import tensorflow as tf
from meshwright.framework import DeviceMesh, Partitioner, Sharding, compile_program
from meshwright.framework.compiler.xla.processes import to_host

mesh = DeviceMesh(("X", "Y"), (2, 4))
rows = Sharding.from_dims_mapping(mesh, ["X", "Y"])
ids = np.arange(13 * 8).reshape(13, 8) + 2**40  # 13 rows are stored as 14.

def step(state, x):
    seen = state.seen + x
    return NestedMap(seen=seen, step=state.step + 1), tf.reduce_max(seen, axis=0)

for partitioner in Partitioner:
    x, count = (tf.TensorSpec(shape, tf.int64) for shape in (ids.shape, []))
    program = compile_program(
        step, [NestedMap(seen=x, step=count), x], mesh, partitioner=partitioner,
        in_shardings=[NestedMap(seen=rows, step=None), rows],
        out_shardings=(NestedMap(seen=rows, step=None), None), donate=[0])
    stored = program.shard(NestedMap(seen=ids, step=np.int64(2**40)))
    own = program.arguments.local_rows(1, dim=0)
    for _ in range(2):
        x = program.arguments.shard_rows(1, ids[own.start:own.stop], own, dim=0)
        stored, most = program(stored, x)
    with Checkpoints(folder / partitioner.value) as checkpoints:
        checkpoints.save(1, stored)
        stored = checkpoints.restore(1, abstract_of(stored))
    stored, most = program.unshard(program(stored, ids))
    np.testing.assert_array_equal(stored.seen, 4 * ids)
    np.testing.assert_array_equal(most, 4 * ids[-1])
    wide = make_wide_state(sharding, make)
    total = sum(int(to_host(one).real.astype(np.uint64).sum()) for one in wide.leaves())
    print(partitioner.value, int(stored.step) - 2**40, stored.seen.dtype, total)
"""


def test_state_of_64_bits_goes_round_in_two_processes(tmp_path):
    wide = make_wide_state(mesh_sharding(2, 4)).map(lambda leaf: np.asarray(leaf).real)
    total = sum(int(leaf.astype(np.uint64).sum()) for leaf in wide.leaves())
    with two_processes(tmp_path, COUNT_ON) as futures:
        for status, out, errors in (future.result() for future in futures):
            assert status == 0, errors
            assert out == [f"{name} 3 int64 {total}" for name in ("shardy", "gspmd")]


UNREADABLE = """
# Of odd size and replicated: the first process writes all there is.
state = NestedMap(theta=NestedMap(b=make(np.arange(3, dtype=np.float32), whole)))

def attempt(call, *args):
    try:
        print(call(*args))
    except CheckpointError as error:
        print(type(error).__name__, error)

with Checkpoints(folder) as checkpoints:
    for step in (1, 2):
        checkpoints.save(step, state, metadata=dict(seed=step))
    checkpoints.wait()
    failure = OSError(5, "Input/output error")
    for owner, name in (
        (digests, "_sizes"), (digests, "_digest"), (os, "stat"),
        (ocp.StandardCheckpointHandler, "restore")
    ):
        broken = mock.patch.object(owner, name, side_effect=failure)
        with broken if {process} == 1 else contextlib.nullcontext():
            attempt(checkpoints.restore, None, abstract_of(state))
    # What others have written shows late on some file systems, or not to all.
    for seen in ([], [1, 2, 3]):
        other = mock.patch.object(checkpoints, "_steps_on_disk", lambda: seen)
        with other if {process} == 1 else contextlib.nullcontext():
            attempt(checkpoints.latest_step)
            attempt(checkpoints.metadata)
            attempt(lambda: checkpoints.restore(2, abstract_of(state)).theta.b)
            attempt(lambda: checkpoints.save(2, state))
    print(sorted(os.listdir(folder)))
"""


def test_a_process_that_cannot_read_or_sees_other_steps(tmp_path):
    with two_processes(tmp_path, UNREADABLE) as futures:
        results = [future.result() for future in futures]
    for process, (status, lines, errors) in enumerate(results):
        assert status == 0, errors
        *attempts, files = lines
        why = r"\[Errno 5\] Input.*error" if process else "another process says why"
        for line in attempts[:3]:
            assert re.match(r"CheckpointError checkpoint .*/2 cannot be read ", line)
            assert re.search(rf"\({why}\), which is no damage: .* Check disk, ", line)
        why = "OSError: .*error" if process else "in another process"
        assert re.search(rf"files are as they were saved \({why}\)$", attempts[3])
        for start in (4, 8):
            assert attempts[start : start + 3] == ["2", "{'seed': 2}", "[0. 1. 2.]"]
            assert "step 2 is not after step 2, the newest" in attempts[start + 3]
        assert (len(attempts), files) == (12, "['1', '2']")


FAILED_SAVE = """
full = OSError(28, "No space left on device")
write = digests.write

def small_files_only():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, resource.RLIM_INFINITY))

def no_digests():
    digests.write = mock.Mock(side_effect=full)

def no_digests_of_all():
    def fail(folder):
        if not folder.name.startswith("ocdbt."):
            raise full
        write(folder)
    digests.write = fail

pathlib.Path("{folder}.{process}").write_text(str(os.getpid()))
checkpoints = Checkpoints(folder)
checkpoints.save(1, state(1))
checkpoints.wait()
if {process} == {failing}:
    {failure}()
checkpoints.save(2, state(2))
try:
    print(checkpoints.latest_step())
except CheckpointError as error:
    print(error)
    checkpoints.close()
    print("closed", flush=True)
    os._exit(3)
"""


@pytest.mark.parametrize(
    ("failing", "failure"),
    [
        (1, "small_files_only"),
        pytest.param(1, "no_digests", marks=pytest.mark.slow),
        (0, "no_digests_of_all"),
    ],
)
def test_a_save_that_fails_in_one_process_is_said_there(tmp_path, failing, failure):
    fields = {"failing": failing, "failure": failure}
    with two_processes(tmp_path, FAILED_SAVE, **fields) as futures:
        status, lines, errors = futures[failing].result()
        # The other one waits. This is what its supervisor does then.
        other = int((tmp_path / f"saved.{1 - failing}").read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(other, signal.SIGKILL)
    assert status == 3, errors
    why = "File too large" if failure == "small_files_only" else "No space left"
    assert re.match(rf"saving .* step 2 .* failed .*{why}.*step 1 is kept$", lines[0])
    assert lines[1:] == ["closed"]
    status, lines, errors = futures[1 - failing].result()
    assert (status < 0, lines) == (True, []), errors
    with Checkpoints(tmp_path / "saved") as reader:
        assert reader.steps() == [1]


KILLED = """
import os, signal, sys
from meshwright.framework import set_platform
set_platform("cpu", 8)
from tests.trainers.checkpoints.checkpoint_states import *

changes = {{"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.utime"}}
count = 0

def kill_at_the_moment(name, args):
    global count
    writes = name == "open" and isinstance(args[2], int) and args[2] & 3
    # What is removed with all that is in a folder is named relative to that.
    here = "{folder}" in str(args[:1]) or name in ("os.remove", "os.rmdir")
    if (writes or name in changes) and here:
        count += 1
        if count == {moment}:
            os.kill(os.getpid(), signal.SIGKILL)

with Checkpoints("{folder}", max_to_keep=2) as saver:
    state = make_state(seed=3)
    sys.addaudithook(kill_at_the_moment)
    saver.save(3, state, metadata={{"seed": 3}})
    saver.wait()
print(count)
"""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A directory with steps 1 and 2, to be copied."""
    folder = tmp_path_factory.mktemp("pristine")
    save_steps(folder, 1, 2)
    return folder


# Of some 57 changes that Python makes to files: folders, descriptions, digests, names,
# and then the removal of step 1. TensorStore writes arrays in between.
@pytest.mark.parametrize("moment", [
    pytest.param(moment, marks=() if moment % 16 == 15 else pytest.mark.slow)
    for moment in range(1, 52, 2)
])  # fmt: skip
def test_killed_while_saving(pristine, tmp_path, moment):
    folder = shutil.copytree(pristine, tmp_path / "saved")
    code = KILLED.format(folder=folder, moment=moment)
    status, out, errors = snippets.run(code, tmp_path)
    assert status == -signal.SIGKILL, (out, errors)
    with Checkpoints(folder, max_to_keep=2) as saver:
        restored = saver.restore(None, make_abstract())
        assert int(restored.step) in (2, 3)
        assert_same(restored, make_state(seed=int(restored.step)))
        assert saver.metadata(int(restored.step)) == {"seed": int(restored.step)}
        assert not [file for file in files_of(folder) if "damaged" in file]
        saver.save(4, make_state(seed=4))
        assert_same(saver.restore(None, make_abstract()), make_state(seed=4))
        assert saver.steps() in ([2, 4], [3, 4])
    assert sorted(file.name for file in folder.iterdir()) == list(
        map(str, saver.steps())
    )
