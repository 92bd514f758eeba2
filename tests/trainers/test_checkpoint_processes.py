"""Checkpoints of several processes, and of processes that are killed."""

import concurrent.futures
import shutil
import signal
import socket

import numpy as np
import pytest

from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.checkpoints import Access, Checkpoints
from tests import snippets
from tests.trainers.checkpoint_states import (
    abstract_of,
    assert_same,
    files_of,
    make_abstract,
    make_state,
    mesh_sharding,
    save_steps,
)

TWO_PROCESSES = """
import logging, pathlib
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize("localhost:{port}", 2, {process})
from jax.experimental import multihost_utils
from tests.trainers.checkpoint_states import *

def state(seed):
    # Half of `w` lies in each process.
    weight = np.random.default_rng(seed).standard_normal((256, 64)).astype(np.float32)
    sharding = mesh_sharding(2, 4)
    make = lambda array, sharding: jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index])
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return NestedMap(
        theta=NestedMap(w=make(weight, sharding)), step=make(np.int32(seed), whole))

folder = pathlib.Path("{folder}")
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


def test_two_processes_save_verify_and_go_back_together(tmp_path):
    folder, port = tmp_path / "saved", free_port()

    def run(process):
        own = tmp_path / str(process)
        own.mkdir()
        code = TWO_PROCESSES.format(port=port, process=process, folder=folder)
        return snippets.run(code, own)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        first, second = pool.map(run, range(2))
    for status, out, errors in (first, second):
        assert status == 0, errors
        assert out.endswith("\n[2, 3] 2\n")
    assert "/3 is damaged: state/ocdbt.process_" in first[2]
    assert "/3 is damaged: another process found so" in second[2]
    assert (folder / "3.damaged").is_dir()
    # One process with another mesh reads what two wrote.
    whole = abstract_of(make_state(), mesh_sharding(4, 2))
    abstract = NestedMap(theta={"w": whole.theta.layer.w}, step=whole.step)
    with Checkpoints(folder, access=Access.READ) as reader:
        restored = reader.restore(None, abstract)
    expected = np.random.default_rng(30).standard_normal((256, 64)).astype(np.float32)
    np.testing.assert_array_equal(restored.theta.w, expected)


KILLED = """
import os, signal, sys
from meshwright.framework import set_platform
set_platform("cpu", 8)
from tests.trainers.checkpoint_states import *

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
