"""A bundle trains and evaluates as the trainer does, where there is only jax."""

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.export
import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import trace_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.serving import bundle, run_bundle
from meshwright.trainers.serving.bundle import (
    BundleBatches,
    BundleOptions,
    export_bundle,
)
from tests.trainers.runs.test_parity import STATE_TOLERANCE
from tests.trainers.small_run import at, small_programs

CALLS = 3
# The same program, compiled once more: with the same bits, unless XLA reorders.
EXACT = {"rtol": 0, "atol": 0}


def run(folder, *flags):
    """The runner, in a process of its own: status and both outputs."""
    client = pathlib.Path(__file__).with_name("bundle_client.py")
    command = [sys.executable, str(client), str(folder / "run_bundle.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    return done.returncode, done.stdout, done.stderr


def trained(programs: StepPrograms, state: TrainState) -> list[float]:
    """The losses of as many calls as the bundle has batches for."""
    batches = BundleBatches.read(programs.experiment, CALLS).train
    losses = []
    for batch in batches:
        out = programs.main(state.stored(), batch)
        state.update(out["state"])
        losses += np.asarray(out["metrics"].loss).tolist()
    return losses


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A bundle of the small language model on a (2, 4) mesh, initialised by itself."""
    folder = tmp_path_factory.mktemp("bundle")
    options = BundleOptions(calls=CALLS, config="Experiment.num_steps = 20")
    export_bundle(at(small_programs()), None, folder, options)
    return folder


@pytest.fixture
def copied(exported, tmp_path):
    """A copy to damage: its folder, and a function that changes its manifest."""
    folder = tmp_path / "copy"
    shutil.copytree(exported, folder)

    def change(edit):
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        edit(manifest)
        path.write_text(json.dumps(manifest))

    return folder, change


def in_process(folder, *flags):
    """The runner's message, run in this process, whose eight devices are in use."""
    options = run_bundle.parse([f"--bundle={folder}", "--steps=1", *flags])
    with pytest.raises(run_bundle.BundleError) as error:
        run_bundle.run(options)
    return str(error.value)


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("XLA_FLAGS", "PJRT_NPROC"):  # The runner adds to them.
        monkeypatch.setenv(name, os.environ.get(name, ""))


def test_without_tensorflow_it_trains_as_the_trainer(exported, tmp_path):
    status, out, errors = run(
        exported,
        f"--steps={CALLS}",
        "--platform=cpu",
        "--check",
        f"--output={tmp_path / 'state'}",
        "--peak_flops=1e10",
    )
    assert status == 0, errors
    assert "X=2, Y=4 of cpu devices" in out and "check: evaluation and 3 losses" in out
    assert re.search(r"step time: [\d.]+ s .*FLOPs utilisation [\d.]+% of 8 x 1e", out)
    programs = at(small_programs())
    state = TrainState.initial(programs)
    losses = trained(programs, state)
    printed = [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", out)]
    np.testing.assert_allclose(printed, losses, rtol=1e-6)  # As printed.
    for path, value in state.logical().items_by_path():
        got = np.load(tmp_path / "state" / f"state.{path}.npy", allow_pickle=False)
        np.testing.assert_allclose(got, np.asarray(value), **EXACT, err_msg=path)
    # What was written is read again, and trained on.
    status, out, errors = run(
        exported, "--steps=1", "--platform=cpu", f"--weights={tmp_path / 'state'}"
    )
    assert status == 0, errors
    again = float(re.search(r"step 1: loss ([\d.]+)", out)[1])
    (batch,) = BundleBatches.read(programs.experiment, 1).train
    out = programs.main(state.stored(), batch)
    np.testing.assert_allclose(again, float(out["metrics"].loss[0]), rtol=1e-6)


@pytest.mark.slow  # All programs once more.
@pytest.mark.parametrize(
    "params",
    [
        ("Experiment.partitioner = %Partitioner.GSPMD",),
        # Stored in other forms: dims that the mesh does not divide, updates in shards.
        ("HIDDEN_DIMS = 30", "Experiment.ema = @ExponentialMovingAverage()"),
        ("Experiment.steps_per_loop = 5", "Experiment.activation_dtype = %bfloat16"),
    ],
    ids=["gspmd", "uneven_ema", "loop_bfloat16"],
)
def test_a_checkpoint_goes_on_as_in_the_trainer(params, tmp_path):
    programs = small_programs(*params)
    state = TrainState.initial(programs)
    trained(programs, state)
    logical = state.logical().map(np.asarray)
    folder = tmp_path / "bundle"
    folder.mkdir()
    export_bundle(programs, logical, folder, BundleOptions(calls=CALLS))
    steps = CALLS * programs.experiment.steps_per_loop
    status, out, errors = run(
        folder,
        f"--steps={steps}",
        "--platform=cpu",
        "--check",
        f"--output={tmp_path / 'state'}",
    )
    assert status == 0, errors
    assert f"check: evaluation and {steps} losses" in out
    state = TrainState(programs, logical)
    trained(programs, state)
    # Where the trainer takes GSPMD, the runner's jax takes Shardy, which may add in
    # another order; Adam's first updates show it.
    exact = programs.experiment.partitioner is Partitioner.SHARDY
    for path, value in state.logical().items_by_path():
        got = np.load(tmp_path / "state" / f"state.{path}.npy", allow_pickle=False)
        value = np.asarray(value)
        atol = 0 if exact else STATE_TOLERANCE * (np.abs(value).max() or 1.0)
        np.testing.assert_allclose(got, value, rtol=0, atol=atol, err_msg=path)


def test_the_manifest_says_what_crosses_borders(exported):
    manifest = json.loads((exported / "manifest.json").read_text())
    assert manifest["mesh"]["shape"] == [2, 4] and manifest["mesh"]["devices"] == 8
    main = manifest["programs"]["main"]
    table = next(
        x for x in main["inputs"] if x["name"] == "state.theta.embedding.table"
    )
    assert table["shape"] == table["logical_shape"] == [264, 16]
    assert table["dims"] == [["Y"], ["X"]] and "Y" in table["sharding"]
    state = [x["name"] for x in main["inputs"] if x["name"].startswith("state.")]
    assert main["donated"] == list(range(len(state)))
    assert {x["name"] for x in main["outputs"]} >= {*state, "metrics.loss"}
    assert manifest["step"]["config"] == "Experiment.num_steps = 20"
    assert manifest["versions"]["jax"] == jax.__version__


def test_programs_are_for_every_platform_and_call_nothing_of_a_backends(exported):
    for file in (exported / "programs").iterdir():
        artifact = jax.export.deserialize(bytearray(file.read_bytes()))
        assert artifact.platforms == ("cpu", "cuda", "tpu")
        assert artifact.nr_devices == 8
        module = artifact.mlir_module()
        assert "stablehlo" in module or "vhlo" in module
        assert not re.findall(r"custom_call @(?!Sharding|xla\.sdy|sdy)\w+", module)


def test_truncated(copied):
    folder, _ = copied
    path = folder / "programs/shard.jax_export"
    path.write_bytes(path.read_bytes()[:-100])
    message = in_process(folder)
    assert re.search(
        r"shard\.jax_export is not as it was written \(\d+ bytes of", message
    )
    assert message.endswith("copy or export it again")


def test_altered(copied):
    folder, _ = copied
    arrays = dict(np.load(folder / "batches.npz"))
    arrays["batches.ids"] += 1
    np.savez(folder / "batches.npz", **arrays)
    assert "batches.npz is not as it was written" in in_process(folder)


@pytest.mark.parametrize("file", ["manifest.json", "programs/init.jax_export"])
def test_missing(copied, file):
    folder, _ = copied
    (folder / file).unlink()
    assert re.search(
        rf"{file} cannot be read \(No such file.*: copy the whole", in_process(folder)
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda m: m.update(format=99),
            "is of format 99, this runner reads 1: use the run_bundle.py beside it",
        ),
        (
            lambda m: m["mesh"].update(shape=[4, 4], devices=16),
            "mesh needs 16 devices but 8 cpu devices are here: run it where there are",
        ),
        (
            lambda m: m["mesh"].update(shape=[1, 2], devices=2),
            rf"jax {jax.__version__} reads programs for 2 devices as for 8: install a",
        ),
        (
            lambda m: m.update(platforms=["cuda", "tpu"]),
            "the bundle is for cuda, tpu, not for cpu: choose one by --platform, or",
        ),
        (
            lambda m: m.update(calling_convention=99),
            rf"jax {jax.__version__} cannot call \(it knows \d+ to \d+\): install jax",
        ),
        (
            lambda m: m["expected"].update(losses=[1.0]),
            r"--check: results are not as on cpu.*\n  loss of step 1 is \d\.\d+, not 1",
        ),
        (lambda m: m.update(expected=None), "--check: the bundle holds no expected"),
    ],
    ids=[
        "format",
        "devices",
        "artifact",
        "platform",
        "version",
        "losses",
        "nothing_expected",
    ],
)
def test_what_does_not_fit(copied, edit, message):
    folder, change = copied
    change(edit)
    assert re.search(message, in_process(folder, "--check"))


def test_fewer_steps_than_were_exported_are_checked(exported, capsys):
    """As in docs/reference/training/export.md, with 10 of 20 steps."""
    run_bundle.run(run_bundle.parse([f"--bundle={exported}", "--steps=1", "--check"]))
    out = capsys.readouterr().out
    assert "check: evaluation at the start and 1 losses as on cpu, within 1e-05" in out


def test_no_jax_or_no_such_devices(exported, monkeypatch):
    status, _, errors = run(exported, "--platform=cuda")
    assert status == 1 and "no cuda devices can be used here (" in errors
    manifest = json.loads((exported / "manifest.json").read_text())
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(run_bundle.BundleError, match="install jax, such as 0.1"):
        run_bundle.start_jax(manifest, "cpu")


def test_state_of_another_shape(exported, tmp_path):
    spec = small_programs().state_specs
    arrays = spec.map(lambda s: np.zeros(s.shape, s.dtype.as_numpy_dtype))
    run_bundle.save(tmp_path, {f"state.{p}": x for p, x in arrays.items_by_path()})
    path = tmp_path / "state.theta.embedding.table.npy"
    np.save(path, np.zeros([264, 8], np.float32))
    message = in_process(exported, f"--weights={tmp_path}")
    assert "embedding.table is float32[264, 8], but the bundle's programs" in message
    assert "take float32[264, 16]: give that, or export" in message
    path.unlink()
    message = in_process(exported, f"--weights={tmp_path}")
    assert re.search("table.npy cannot be read .*: it must be an array as", message)
    np.save(path, np.array([{}]), allow_pickle=True)
    assert "table.npy cannot be read" in in_process(exported, f"--weights={tmp_path}")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04half", b"text", b"[1]"])
def test_files_that_are_others(exported, copied, tmp_path, content):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(run_bundle.BundleError, match="a.npz cannot be read .*savez"):
        run_bundle.load_arrays(tmp_path / "a.npz")
    with pytest.raises(run_bundle.BundleError, match="a.npz cannot be read .*numpy.sa"):
        run_bundle.load_array(tmp_path / "a.npz", "float32")
    folder, _ = copied
    (folder / "manifest.json").write_bytes(content)
    assert "manifest.json is not as it was written" in in_process(folder)


def test_an_array_is_no_archive(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(2))
    np.savez(tmp_path / "b.npz", a=np.zeros(2))
    with pytest.raises(run_bundle.BundleError, match="a.npy .*it has a ndarray.*savez"):
        run_bundle.load_arrays(tmp_path / "a.npy")
    with pytest.raises(run_bundle.BundleError, match="b.npz .*it has a dict.*numpy.sa"):
        run_bundle.load_array(tmp_path / "b.npz", "float32")


def test_batches_that_lack_a_part(exported, tmp_path):
    np.savez(tmp_path / "batches.npz", **{"batches.ids": np.zeros([1, 1, 8, 8])})
    message = in_process(exported, f"--batches={tmp_path / 'batches.npz'}")
    assert "the batches have no batches.labels: give each of batches.ids" in message


def test_types_that_numpy_has_not_are_read_by_their_bits(tmp_path):
    value = np.array([1.5, -2.0], tf.bfloat16.as_numpy_dtype)
    run_bundle.save(tmp_path, {"x": value})
    got = run_bundle.load_array(tmp_path / "x.npy", "bfloat16")
    assert got.dtype == value.dtype and got.tolist() == [1.5, -2.0]


def test_64_bits_are_kept():
    x = np.arange(13) + 2**40
    mesh = DeviceMesh(("X",), (8,))
    rows = Sharding.from_dims_mapping(mesh, ["X"])
    traced = trace_program(
        lambda x: {"x": x * 3, "half": tf.cast(x, tf.float64) / 2},
        [tf.TensorSpec([13], tf.int64)],
        mesh,
        in_shardings=[rows],
        out_shardings={"x": rows, "half": None},
    )
    given = traced.written
    entry = {
        "donated": [],
        "inputs": bundle._leaves(["x"], given.signature.inputs, given.in_forms),
        "outputs": bundle._leaves([""], (given.signature.outputs,), given.out_forms),
    }
    artifact = traced.export(["cpu"])
    program = run_bundle.Program(jax, jax.make_mesh((8,), ("X",)), entry, artifact)
    jax.device_put(np.pad(x, (0, 3)), program.put("x", x).sharding)  # JAX has seen it.
    out = program({"x": x})
    np.testing.assert_array_equal(np.asarray(out["x"])[:13], 3 * x)
    np.testing.assert_array_equal(out["half"], x / 2)


def test_the_runner_names_nothing_but_jax_and_numpy():
    text = pathlib.Path(run_bundle.__file__).read_text()
    modules = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    assert modules <= {"jax", "numpy", *sys.stdlib_module_names}


def test_files_are_told_by_their_digests(exported):
    manifest = json.loads((exported / "manifest.json").read_text())
    listed = [*manifest["programs"].values(), manifest["batches"], manifest["held_out"]]
    for entry in listed:
        content = (exported / entry["file"]).read_bytes()
        assert entry["bytes"] == len(content)
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"platforms": ["gpu"]}, r"platforms \['gpu'\]: some of cpu, cuda, tpu"),
        ({"calls": 0}, "calls is 0; it must be a whole number of at least 1"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        BundleOptions(**options)


def test_what_is_named_is_what_there_is():
    names = bundle._leaves(
        ["seed"], [tf.TensorSpec([2], tf.uint32, name="seed")], [None]
    )
    assert names[0]["name"] == "seed" and names[0]["dims"] is None
    nested = NestedMap(a=NestedMap(b=tf.TensorSpec([1])))
    (leaf,) = bundle._leaves(["state"], [nested], [None])
    assert leaf["name"] == "state.a.b"
    assert leaf["sharding"] == "left to the compiler"
