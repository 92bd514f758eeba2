"""Runs a bundle of compiled programs that meshwright-export wrote.

    python BUNDLE/run_bundle.py --steps=10 --check

It needs Python's standard library, numpy and jax, and nothing else: no TensorFlow, no
Meshwright. It makes or loads the weights, shards them, trains on the batches in the
bundle or on others, evaluates, and prints losses and the time of a step.
BUNDLE/manifest.json lists the programs' inputs and outputs by name.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import pathlib
import statistics
import sys
import time
import zipfile

import numpy as np

FORMAT = 1
# A folder beside this file, with the package that jax reads programs with and does not
# bring.
LIBRARY = "library"
# Relative tolerances: the kernels of another platform round differently.
SAME_PLATFORM, OTHER_PLATFORM = 1e-5, 2e-2


class BundleError(Exception):
    """What is wrong with a bundle or with how it is run, and what to do about it."""


class Bundle:
    """The files of a bundle, checked against its manifest as they are read.

    Args:
      folder: the bundle's.

    Raises:
      BundleError: the manifest is missing, damaged, or of another format.
    """

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        path, content = self.folder / "manifest.json", self._read("manifest.json")
        try:
            self.manifest = dict(json.loads(content))
        except (ValueError, TypeError, RecursionError) as error:
            raise BundleError(
                f"{path} is not as it was written ({error}): copy or export it again"
            ) from None
        if self.manifest.get("format") != FORMAT:
            raise BundleError(
                f"{path} is of format {self.manifest.get('format')}, this runner reads "
                f"{FORMAT}: use the run_bundle.py beside it"
            )

    def read(self, entry):
        """The bytes of a file that the manifest lists.

        Raises:
          BundleError: the file is missing, or not as it was written.
        """
        content = self._read(entry["file"])
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise BundleError(
                f"{self.folder / entry['file']} is not as it was written ("
                f"{len(content)} bytes of {entry['bytes']}): copy or export it again"
            )
        return content

    def arrays(self, entry):
        """The arrays of an .npz file that the manifest lists, by name."""
        self.read(entry)
        return load_arrays(self.folder / entry["file"])

    def _read(self, name):
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise BundleError(
                f"{self.folder / name} cannot be read ({error.strerror}): copy the "
                "whole folder, or export it again"
            ) from None


class Program:
    """One program of a bundle, compiled: arrays by name to arrays by name.

    Args:
      jax: the module.
      mesh: the devices.
      entry: the program's part of the manifest.
      artifact: the program, serialized by `jax.export`.
    """

    def __init__(self, jax, mesh, entry, artifact):
        import jax.export

        self.jax, self.mesh, self.entry = jax, mesh, entry
        self.inputs = {spec["name"]: spec for spec in entry["inputs"]}
        exported = jax.export.deserialize(bytearray(artifact))
        if exported.nr_devices != mesh.size:
            raise BundleError(
                f"jax {jax.__version__} reads programs for {mesh.size} devices as for "
                f"{exported.nr_devices}: install a later jax"
            )
        jitted = jax.jit(
            exported.call,
            donate_argnums=tuple(entry["donated"]),
            # The artifact has them too, but jax 0.8 does not read them there.
            out_shardings=tuple(
                None if spec["dims"] is None else self._sharding(spec)
                for spec in entry["outputs"]
            ),
        )
        arguments = [
            jax.ShapeDtypeStruct(x["shape"], x["dtype"], sharding=self._sharding(x))
            for x in entry["inputs"]
        ]
        with jax.set_mesh(mesh), jax.enable_x64(True):
            self.compiled = jitted.lower(*arguments).compile()

    def __call__(self, arrays):
        """The results by name; `arrays` may be host arrays, and have more names."""
        out = self.compiled(*(self.put(name, arrays[name]) for name in self.inputs))
        names = [spec["name"] for spec in self.entry["outputs"]]
        return dict(zip(names, out, strict=True))

    def put(self, name, value):
        """An array on the devices, as the program takes it.

        Raises:
          BundleError: the array is of another shape or type.
        """
        if isinstance(value, self.jax.Array):
            return value
        spec = self.inputs[name]
        if list(value.shape) != spec["logical_shape"] or value.dtype != spec["dtype"]:
            raise BundleError(
                f"{name} is {value.dtype}{list(value.shape)}, but the bundle's "
                f"programs take {spec['dtype']}{spec['logical_shape']}: give that, "
                "or export for these shapes"
            )
        if list(value.shape) != spec["shape"]:  # Stored padded.
            pairs = zip(spec["shape"], value.shape, strict=True)
            value = np.pad(value, [(0, stored - size) for stored, size in pairs])
        # Otherwise jax makes 32 bits of 64, and keeps doing so for an array it has
        # seen. A copy: on CPUs jax computes with the caller's own memory.
        with self.jax.enable_x64(True):
            return self.jax.device_put(value.copy(), self._sharding(spec))

    def _sharding(self, tensor):
        dims = tensor["dims"] or ()
        spec = self.jax.sharding.PartitionSpec(*(tuple(d) or None for d in dims))
        return self.jax.sharding.NamedSharding(self.mesh, spec)


class Runner:
    """The training that a bundle holds, on the devices here.

    Args:
      bundle: the bundle.
      platform: "cpu", "cuda", "tpu", or None for the best that is available.

    Raises:
      BundleError: this jax, these devices or this platform cannot run it.
    """

    def __init__(self, bundle, platform):
        self.bundle, self.manifest = bundle, bundle.manifest
        self.jax = start_jax(self.manifest, platform)
        backend = self.jax.default_backend()
        self.platform = "cuda" if backend == "gpu" else backend
        self._check_platform()
        self.mesh = self._mesh()
        self._programs = {}

    def program(self, name):
        """A program of the bundle; compiled at the first request."""
        if name not in self._programs:
            entry = self.manifest["programs"][name]
            artifact = self.bundle.read(entry)
            self._programs[name] = Program(self.jax, self.mesh, entry, artifact)
        return self._programs[name]

    def initial(self):
        """The state before the first step, in logical form."""
        seed = np.array(self.manifest["step"]["seed"], np.uint32)
        return self.program("init")({"seed": seed})

    def saved(self, folder=None):
        """The state that the bundle, or another folder, holds, in logical form.

        Raises:
          BundleError: there is no state, or an array is missing or of another shape.
        """
        shard, state = self.program("shard"), {}
        for name in shard.inputs:
            if folder is None:
                entry = self.manifest["state"]["files"][name]
                self.bundle.read(entry)
                path = self.bundle.folder / entry["file"]
            else:
                path = pathlib.Path(folder) / f"{name}.npy"
            state[name] = shard.put(name, load_array(path, shard.inputs[name]["dtype"]))
        return state

    def evaluate(self, stored):
        """The sums over the held-out batches, by name; float64 arrays."""
        weights, totals = self.program("gather")(stored), {}
        held_out = self.bundle.arrays(self.manifest["held_out"])
        for i in range(self.manifest["held_out"]["batches"]):
            batch = {name: rows[i] for name, rows in held_out.items()}
            for name, value in self.program("eval")({**weights, **batch}).items():
                totals[name] = totals.get(name, 0.0) + np.asarray(value, np.float64)
        return totals

    def _check_platform(self):
        exported = self.manifest["platforms"]
        if self.platform not in exported:
            raise BundleError(
                f"the bundle is for {', '.join(exported)}, not for {self.platform}: "
                "choose one by --platform, or export with --platforms="
                f"{','.join([*exported, self.platform])}"
            )

    def _mesh(self):
        given, jax = self.manifest["mesh"], self.jax
        wanted, devices = given["devices"], jax.devices()
        if len(devices) < wanted:
            raise BundleError(
                f"the bundle's mesh needs {wanted} devices but {len(devices)} "
                f"{self.platform} devices are here: run it where there are more, or "
                "export for a smaller mesh (--gin_param='MESH_SHAPE = ...')"
            )
        types = (jax.sharding.AxisType.Auto,) * len(given["shape"])
        if given["device_ids"] is None:
            shape, axes = tuple(given["shape"]), tuple(given["axes"])
            return jax.make_mesh(
                shape, axes, axis_types=types, devices=devices[:wanted]
            )
        grid = np.empty(wanted, object)
        grid[:] = [devices[i] for i in given["device_ids"]]
        grid = grid.reshape(given["shape"])
        return jax.sharding.Mesh(grid, given["axes"], axis_types=types)


def start_jax(manifest, platform):
    """jax, set up for the bundle's devices.

    Raises:
      BundleError: jax is missing, too old or too new; or there are no such devices.
    """
    made, devices = manifest["versions"]["jax"], manifest["mesh"]["devices"]
    try:
        sys.path.append(str(pathlib.Path(__file__).with_name(LIBRARY)))
        import jax
        import jax.export
    except ImportError as error:
        raise BundleError(f"{error}: install jax, such as {made}") from None
    same = importlib.metadata.version("jaxlib") == manifest["versions"]["jaxlib"]
    if devices > 1 and platform in (None, "cpu") and same:  # Else flags may be unknown.
        # Virtual devices on few cores wait for each other: that is no deadlock.
        flags = os.environ.get("XLA_FLAGS", "")
        for flag in ("call_terminate_timeout", "call_warn_stuck_timeout", "timeout"):
            flags += f" --xla_cpu_collective_{flag}_seconds=1200"
        os.environ["XLA_FLAGS"] = flags.strip()
        os.environ.setdefault("PJRT_NPROC", str(devices + (os.cpu_count() or 1)))
    version = manifest["calling_convention"]
    least = jax.export.minimum_supported_calling_convention_version
    most = jax.export.maximum_supported_calling_convention_version
    if not least <= version <= most:
        raise BundleError(
            f"the bundle was made by jax {made}, whose programs (calling convention "
            f"{version}) jax {jax.__version__} cannot call (it knows {least} to "
            f"{most}): install jax {made}, or export by a jax nearer to this version"
        )
    try:
        if platform:
            jax.config.update("jax_platforms", platform)
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        pass  # jax's devices are in use already; what counts is whether they fit.
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:
        raise BundleError(
            f"no {platform or ''} devices can be used here ({str(error)[:200]}): "
            "install jax for them (such as jax[cuda12]), or choose another --platform"
        ) from None
    return jax


def load_array(path, dtype):
    """The array of an .npy file; types that numpy lacks, such as bfloat16, by bits.

    Raises:
      BundleError: the file is missing, or holds no array.
    """
    array = _loaded(path, np.ndarray, "an array as numpy.save writes it")
    return array.view(dtype) if array.dtype.kind == "V" else array


def load_arrays(path):
    """The arrays of an .npz file by name; raises as `load_array`."""
    return _loaded(path, dict, "arrays as numpy.savez writes them")


def _loaded(path, kind, wanted):
    try:
        content = np.load(path, allow_pickle=False)
        if not isinstance(content, np.ndarray):
            with content:
                content = {name: content[name] for name in content.files}
        if isinstance(content, kind):
            return content
        error = f"it has a {type(content).__name__}"
    # numpy raises these for half a file, and for an empty file.
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as caught:
        error = caught
    raise BundleError(
        f"{path} cannot be read ({error}): it must be {wanted}; copy or export it again"
    )


def differences(what, got, want, tolerance):
    """A line for each value that is not as expected."""
    lines = []
    for name, expected in want.items():
        value, expected = np.asarray(got[name]), np.asarray(expected)
        scale = np.maximum(np.abs(expected), 1e-6)
        if value.shape != expected.shape:
            lines.append(f"{what} {name} has shape {value.shape}, not {expected.shape}")
        elif not np.all(np.abs(value - expected) <= tolerance * scale):
            lines.append(f"{what} {name} is {value}, not {expected}")
    return lines


def train(runner, stored, batches, calls):
    """Runs the main program `calls` times.

    Returns:
      The state, in stored form; the loss of each step; seconds per step of each call.
    """
    main = runner.program("main")
    steps = runner.manifest["step"]["steps_per_loop"]
    names = [name for name in main.inputs if name.startswith("batches.")]
    missing = [name for name in names if name not in batches]
    if missing:
        raise BundleError(
            f"the batches have no {missing[0]}: give each of {', '.join(names)}, of "
            "shape [calls, ...]"
        )
    count = min(len(batches[name]) for name in names)
    if calls and not count:
        raise BundleError("the batches are for no call: give batches for at least one")
    losses, seconds = [], []
    for call in range(calls):
        given = {name: main.put(name, batches[name][call % count]) for name in names}
        start = time.perf_counter()
        out = main({**stored, **given})
        call_losses = np.asarray(out["metrics.loss"], np.float64)  # Waits for the call.
        seconds.append((time.perf_counter() - start) / steps)
        stored = {name: x for name, x in out.items() if name.startswith("state.")}
        losses += call_losses.tolist()
        for step, loss in enumerate(call_losses, start=1 + call * steps):
            print(f"step {step}: loss {loss:.6f}", flush=True)
    return stored, losses, seconds


def report_time(runner, seconds, peak_flops):
    """Prints the time of a step, and utilisation if the devices' peak is given."""
    # The first call finds caches cold.
    median = statistics.median(seconds[1:] or seconds)
    flops, devices = runner.manifest["step"]["model_flops"], runner.mesh.size
    line = f"step time: {median:.4f} s (median of {len(seconds[1:] or seconds)} calls)"
    if peak_flops:
        share = f"{flops / median / (peak_flops * devices):.1%}"
        line += f"; FLOPs utilisation {share} of {devices} x {peak_flops:.3g} FLOP/s"
    print(f"{line}; model FLOPs a step: {flops:.4g}")


def check(runner, start, losses, end, tolerance):
    """Compares with the results of the exporting machine.

    These are the losses of its first steps, and evaluations before and after all steps.

    Raises:
      BundleError: something differs.
    """
    want = runner.manifest["expected"]
    if tolerance is None:
        same = runner.platform == want["platform"]
        tolerance = SAME_PLATFORM if same else OTHER_PLATFORM
    expected = dict(enumerate(want["losses"][: len(losses)], start=1))
    made = dict(enumerate(losses[: len(expected)], start=1))
    problems = differences("evaluation at the start:", start, want["start"], tolerance)
    problems += differences("loss of step", made, expected, tolerance)
    compared = f"evaluation at the start and {len(made)} losses"
    if len(losses) == len(want["losses"]):
        compared = f"evaluation and {len(made)} losses"
        problems += differences("evaluation at the end:", end, want["end"], tolerance)
    if problems:
        raise BundleError(
            f"--check: results are not as on {want['platform']}, where it was exported "
            f"(relative tolerance {tolerance}):\n  " + "\n  ".join(problems[:10])
        )
    print(f"check: {compared} as on {want['platform']}, within {tolerance}")


def save(folder, arrays):
    """Writes arrays by name as .npy files, for --weights."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in arrays.items():
        np.save(folder / f"{name}.npy", np.asarray(value))
    print(f"state: {folder}")


def run(options):
    """Runs the bundle as the flags say."""
    bundle = Bundle(options.bundle)
    if options.check and bundle.manifest["expected"] is None:
        raise BundleError(
            "--check: the bundle holds no expected results: it was exported with "
            "--noexpected"
        )
    runner = Runner(bundle, options.platform)
    manifest, steps = bundle.manifest, bundle.manifest["step"]["steps_per_loop"]
    mesh = ", ".join(f"{k}={v}" for k, v in runner.mesh.shape.items())
    kind = runner.jax.devices()[0].device_kind
    print(f"{mesh} of {runner.platform} devices ({kind}); jax {runner.jax.__version__}")
    if options.weights:
        logical = runner.saved(options.weights)
    elif manifest["state"] is not None and not options.fresh:
        logical = runner.saved()
    else:
        logical = runner.initial()
    stored = runner.program("shard")(logical)
    del logical
    evaluates = options.check or options.evaluate
    start = runner.evaluate(stored) if evaluates else {}
    if options.batches:
        batches = load_arrays(options.batches)
    else:
        batches = bundle.arrays(manifest["batches"])
    calls = -(-options.steps // steps)
    stored, losses, seconds = train(runner, stored, batches, calls)
    if seconds:
        report_time(runner, seconds, options.peak_flops)
    end = runner.evaluate(stored) if evaluates else {}
    for name, value in end.items():
        if value.ndim == 0:
            print(f"held-out {name}: {value:.6f}")
    if options.check:
        check(runner, start, losses, end, options.tolerance)
    if options.output:
        save(options.output, runner.program("unshard")(stored))


def parse(argv):
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bundle", default=pathlib.Path(__file__).parent)
    parser.add_argument("--steps", type=int, default=10, help="made up to whole calls")
    parser.add_argument("--platform", choices=["cpu", "cuda", "tpu"])
    parser.add_argument("--batches", help=".npz of batches.NAME, [calls, ...] each")
    parser.add_argument("--weights", help="folder of state.NAME.npy, see --output")
    parser.add_argument("--fresh", action="store_true", help="initialise, load nothing")
    parser.add_argument("--output", help="folder to write the state to, as .npy files")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--check", action="store_true", help="with what is expected")
    parser.add_argument("--tolerance", type=float, help="of --check, relative")
    parser.add_argument("--peak_flops", type=float, help="FLOP/s of one device")
    return parser.parse_args(argv)


def main(argv=None):
    """The command; returns its exit status."""
    try:
        run(parse(argv))
    except BundleError as error:
        print(f"run_bundle.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
