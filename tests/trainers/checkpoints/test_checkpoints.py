"""Checkpoints come back bit for bit, on any mesh, and bad ones are explained."""

import collections
import contextlib
import json
import logging
import os
import re
import resource
import shutil

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.checkpoints import checkpoints
from meshwright.trainers.checkpoints.checkpoint_manifest import ArraySpec, check_model
from meshwright.trainers.checkpoints.checkpoints import (
    Access,
    CheckpointError,
    Checkpoints,
)
from tests.trainers.checkpoints.checkpoint_states import (
    abstract_of,
    assert_same,
    make_abstract,
    make_state,
    make_wide_state,
    mesh_sharding,
    one_device,
    save_steps,
)

# After a failure, TensorStore still calls an event loop that Orbax has closed.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def saved(tmp_path):
    """A directory with steps 1 and 2."""
    save_steps(tmp_path, 1, 2)
    return tmp_path


@contextlib.contextmanager
def small_files_only():
    """Writing a file beyond 4 kB fails, as on a disk that fills up.

    Below the 8 kB of each shard: how many of them share a file is a matter of timing.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 4), (2, 4)), ((2, 4), (4, 2)), ((2, 4), None), (None, (2, 4))],
)
def test_restored_onto_another_mesh(tmp_path, before, after):
    shardings = [mesh_sharding(*shape) if shape else one_device()
                 for shape in (before, after)]  # fmt: skip
    state = make_state(shardings[0])
    with Checkpoints(tmp_path) as saver:
        saver.save(3, state, metadata={"text": "a = 1"})
    with Checkpoints(tmp_path, access=Access.READ) as reader:
        restored = reader.restore(None, abstract_of(state, shardings[1]))
        assert reader.latest_step() == 3
        assert reader.metadata() == {"text": "a = 1"}
    assert_same(restored, state)
    assert restored.theta.layer.w.sharding == shardings[1]
    assert restored.slots == NestedMap()


def test_64_bits_are_kept(tmp_path):
    state = make_wide_state(mesh_sharding(2, 4))
    target = abstract_of(state, mesh_sharding(4, 2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state)
        restored = checkpoints.restore(3, target)
        part = checkpoints.restore_part(3, lambda *_: NestedMap(counts=target.counts))
    assert_same(restored, state)
    assert restored.counts.sharding == mesh_sharding(4, 2)
    assert_same(part, NestedMap(counts=state.counts))
    # One replica saves all of a small array, for which JAX compiles no program.
    [file] = (tmp_path / "3" / "state" / "array_metadatas").iterdir()
    entries = json.loads(file.read_text())["array_metadatas"]
    arrays = [entry["array_metadata"] for entry in entries]
    shapes = {array["param_name"]: array["write_shape"] for array in arrays}
    assert shapes["phase"] == [16, 8]


@pytest.mark.parametrize("where", [one_device, lambda: mesh_sharding(2, 4)])
def test_state_may_be_donated_right_after_save(tmp_path, where):
    step = jax.jit(lambda tree: jax.tree.map(lambda x: -2 * x, tree), donate_argnums=0)
    array = make_state(where(), rows=16384).theta.layer.w
    expected = np.array(array)
    with Checkpoints(tmp_path) as saver:
        saver.save(1, NestedMap(w=array))
        for _ in range(5):
            array = step(array)
        jax.block_until_ready(array)
        address = array.addressable_shards[0].data.unsafe_buffer_pointer()
        saver.wait()
        # Nothing holds the array now, and donation overwrites it: so it could above.
        array = step(array)
        assert array.addressable_shards[0].data.unsafe_buffer_pointer() == address
        restored = saver.restore(1, NestedMap(w=abstract_of(NestedMap(w=array)).w))
    np.testing.assert_array_equal(np.asarray(restored.w), expected)


@pytest.mark.parametrize(("max_to_keep", "kept"), [(2, [5, 7]), (None, [1, 5, 7])])
def test_old_steps_are_removed(tmp_path, max_to_keep, kept):
    with Checkpoints(tmp_path, max_to_keep=max_to_keep) as saver:
        for step in (1, 5, 7):
            saver.save(step, make_state(seed=step))
        assert saver.steps() == kept
        assert_same(saver.restore(5, abstract_of(make_state())), make_state(seed=5))


@pytest.mark.parametrize("step", [1, 2])
def test_step_must_be_new(saved, step):
    with (
        Checkpoints(saved) as saver,
        pytest.raises(CheckpointError, match=f"step {step} is not after step 2"),
    ):
        saver.save(step, make_state())


def test_reader_changes_nothing(saved):
    (saved / "3.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(saved, access=Access.READ) as reader:
        with Checkpoints(saved / "none", access=Access.READ) as other:
            assert other.latest_step() is None
        assert reader.latest_step() == 2
        with pytest.raises(ValueError, match="Access.READ"):
            reader.save(3, make_state())
    assert sorted(os.listdir(saved)) == ["1", "2", "3.orbax-checkpoint-tmp"]


def test_reader_sees_new_steps(saved):
    with Checkpoints(saved, access=Access.READ) as reader, Checkpoints(saved) as saver:
        assert reader.latest_step() == 2
        saver.save(3, make_state())
        saver.wait()
        assert reader.latest_step() == 3


@pytest.mark.parametrize(
    ("step", "folder", "message"),
    [(None, "none", "no checkpoint in .*none"), (9, "", "of step 9 in .*only of 1, 2")],
)
def test_no_such_checkpoint(saved, step, folder, message):
    with Checkpoints(saved / folder, access=Access.READ) as reader:
        for call in (lambda: reader.restore(step, make_abstract()),
                     lambda: reader.metadata(step)):  # fmt: skip
            with pytest.raises(CheckpointError, match=message):
                call()


def test_checkpoint_of_another_model_lists_the_differences(saved):
    abstract = make_abstract()
    del abstract.theta["b"]
    abstract.theta.layer.w = jax.ShapeDtypeStruct(
        (8, 64), jnp.float32, sharding=one_device()
    )
    abstract.step = jax.ShapeDtypeStruct((), jnp.uint32, sharding=one_device())
    abstract.slots.m = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=one_device())
    with Checkpoints(saved) as reader:
        reader.check_newest(make_abstract())
        with pytest.raises(CheckpointError, match="step 2 .* of another model") as info:
            reader.restore(None, abstract)
        with pytest.raises(CheckpointError, match=re.escape(str(info.value))):
            reader.check_newest(abstract)
        manifest = saved / "2" / "manifest" / "metadata"
        manifest.write_text(manifest.read_text().replace("256", "512"))
        reader.check_newest(abstract)  # `restore` goes on from an earlier step.
    assert str(info.value).splitlines()[1:-1] == [
        "  theta.b bfloat16[7] is only in the checkpoint",
        "  theta.layer.w is float32[256, 64] in the checkpoint, "
        "float32[8, 64] in this model",
        "  slots.m float32[3] is not in the checkpoint",
        "  step is int32[] in the checkpoint, uint32[] in this model",
    ]


def test_long_lists_of_differences_are_cut(saved):
    abstract = make_abstract()
    for i in range(20):
        abstract.slots[f"m{i:02}"] = abstract.step
    with Checkpoints(saved) as reader, pytest.raises(CheckpointError) as info:
        reader.restore(None, abstract)
    lines = str(info.value).splitlines()[1:-1]
    assert len(lines) == 5
    assert lines[-1] == "  ... and 16 more"


def test_target_shardings_are_required(saved):
    abstract = make_abstract()
    abstract.step = jax.ShapeDtypeStruct((), jnp.int32)
    with Checkpoints(saved) as reader, pytest.raises(ValueError, match="step needs a"):
        reader.restore(None, abstract)


@pytest.mark.parametrize(
    "folder", ["{tmp}/file", "{tmp}/file/below", "/proc/x", "/proc"]
)
def test_unwritable_directory(tmp_path, folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write checkpoints to .*writable"):
        Checkpoints(folder.format(tmp=tmp_path))


def test_directory_that_went_away_in_between(saved):
    with Checkpoints(saved) as saver:
        saver.save(3, make_state())
        saver.wait()
        shutil.rmtree(saved)
        assert saver.latest_step() is None
        saver.save(4, make_state())
        assert saver.latest_step() == 4
        saver.wait()
        shutil.rmtree(saved)
        saved.write_text("a file")
        with pytest.raises(CheckpointError, match="cannot write checkpoints"):
            saver.save(5, make_state())


def test_full_disk_is_noticed_before_writing(saved, monkeypatch):
    usage = collections.namedtuple("Usage", "free")(free=4000)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: usage)
    with Checkpoints(saved) as saver:
        message = r"3 needs 65,554 bytes but only 4,000 are free in .*step 2 is kept"
        with pytest.raises(CheckpointError, match=message):
            saver.save(3, make_state())
        assert saver.steps() == [1, 2]


def test_disk_that_fills_up_keeps_the_previous_step(tmp_path):
    with Checkpoints(tmp_path, max_to_keep=1) as saver:
        saver.save(1, make_state(seed=1))
        saver.wait()
        message = r"saving .* step 2 in .* failed .*too large.*step 1 is kept"
        with small_files_only():
            saver.save(2, make_state(seed=2))
            with pytest.raises(CheckpointError, match=message):
                saver.wait()
        saver.wait()
        assert saver.latest_step() == 1
        assert_same(saver.restore(1, make_abstract()), make_state(seed=1))
        # The next save works and takes the place of the first.
        saver.save(3, make_state(seed=3))
        assert saver.steps() == [3]


def test_failed_save_surfaces_at_close(saved):
    with (
        small_files_only(),
        pytest.raises(CheckpointError, match="step 3 .*step 2 is kept"),
        Checkpoints(saved) as saver,
    ):
        saver.save(3, make_state(seed=3))
    with Checkpoints(saved) as reader:
        assert reader.steps() == [1, 2]


def test_what_a_killed_save_left_is_removed(saved):
    (saved / "3.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    with Checkpoints(saved) as saver:
        assert saver.latest_step() == 2
        saver.save(4, make_state())
    assert sorted(os.listdir(saved)) == ["1", "2", "4"]


def test_metadata_must_be_json(tmp_path):
    with Checkpoints(tmp_path) as saver, pytest.raises(TypeError, match="JSON"):
        saver.save(1, make_state(), metadata={"plan": object()})


def test_what_orbax_writes_is_plain(saved):
    manifest = json.loads((saved / "2" / "manifest" / "metadata").read_text())
    form = {"shape": [256, 64], "dtype": "float32", "order": None}
    assert manifest["theta.layer.w"] == form


def test_orbax_is_quiet_at_info(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    with Checkpoints(tmp_path) as saver:
        absl.logging.info("ours")
        saver.save(1, make_state())
        saver.restore(1, make_abstract())
    messages = [r.getMessage() for r in caplog.records if r.name == "absl"]
    assert messages == ["ours"]


IN_STAGES = "of another model, the same layers in other stages:"
OTHERWISE = "of another model:(?s:.*) that it was saved with, or another directory"


@pytest.mark.parametrize(
    ("was", "shape", "message"),
    [
        (
            [4, 8],
            [4, 8],
            "another optimizer, with the same weights(?s:.*)Initialize",
        ),
        ([4, 8], [2, 2, 8], f"{IN_STAGES}(?s:.*)encoder.* -> encoder.* reshape"),
        ([2, 2, 8], [4, 8], IN_STAGES),
        ([2, 6, 8], [4, 3, 8], IN_STAGES),
        ([4, 8], [4, 9], OTHERWISE),
        ([4, 8], [2, 4, 8], OTHERWISE),
        ([2, 6, 8], [4, 6, 8], OTHERWISE),
    ],
)
def test_what_can_start_from_the_weights_is_said(was, shape, message):
    form = ArraySpec(tuple(was), "float32")
    saved = {"theta.encoder.w": form, "slots.encoder.w.m": form}
    weights = NestedMap(encoder=NestedMap(w=np.zeros(shape, np.float32)))
    with pytest.raises(CheckpointError, match=message):
        check_model("step 1", saved, NestedMap(theta=weights))


def test_a_moving_average_follows_from_the_weights():
    saved = {"theta.w": ArraySpec((4,), "float32")}
    weights = NestedMap(w=np.zeros([4], np.float32))
    with pytest.raises(CheckpointError, match="another moving average, with the same"):
        check_model("step 1", saved, NestedMap(theta=weights, ema=weights))
