"""Programs that XLA compiles in a child process, which it may end."""

import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time
import types
from multiprocessing.connection import Connection

import jax
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright.framework.compiler.explaining.explain import explain
from meshwright.framework.compiler.lowering.lower import LoweringError, lower
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.repair import check
from meshwright.framework.compiler.xla import child as child_module
from meshwright.framework.compiler.xla import jax_bridge
from meshwright.framework.compiler.xla.child import Child, ChildEnded, child
from meshwright.framework.compiler.xla.mesh_program import MeshProgram
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import mesh_split
from tests.framework.compiler.programs import MESH, over_partitioners, split

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
X, W = tf.TensorSpec([8, 16]), tf.TensorSpec([16, 32])
IMAGE, KERNEL = tf.TensorSpec([4, 2, 2, 8]), tf.TensorSpec([2, 2, 8, 1])


def depthwise(image, kernel):
    """Over this kernel, which covers the image, GSPMD ends the process."""
    image, kernel = (mesh_split(x, MESH, [None] * 3 + ["Y"]) for x in (image, kernel))
    y = tf.nn.depthwise_conv2d(image, kernel, [1, 1, 1, 1], "VALID")
    return mesh_split(y, MESH, [None] * 3 + ["Y"])


def step(x, w):
    """A step that donates w, has collectives, and a call of LAPACK's."""
    with tf.GradientTape() as tape:
        tape.watch(w)
        q, r = tf.linalg.qr(x @ mesh_split(w, MESH, [None, "Y"]))
        loss = tf.reduce_sum(r**2) + tf.reduce_sum(tf.tanh(x @ w))
    return w - 0.1 * tape.gradient(loss, w), q


def compiled_step(partitioner, **how):
    return compile_program(
        step,
        [X, W],
        MESH,
        in_shardings=[split("X", None), split(None, "Y")],
        out_shardings=(split(None, "Y"), None),
        donate=[1],
        partitioner=partitioner,
        **how,
    )


def without_frames(text):
    """An HLO module's text without the lines of Python that it came from."""
    return [line for line in text.splitlines() if "end_column=" not in line]


@over_partitioners
def test_what_a_child_compiled_is_what_this_process_would_have(partitioner):
    here, there = (
        compiled_step(partitioner, in_child=child) for child in (False, True)
    )
    assert without_frames(there.hlo_text()) == without_frames(here.hlo_text())
    assert there.memory() == here.memory() and there.memory().aliased
    assert there.cost() == here.cost()
    assert there.collectives() == here.collectives() != []
    assert str(explain(there)) == str(explain(here))
    rng = np.random.RandomState(0)
    args = [rng.randn(*spec.shape).astype(np.float32) for spec in (X, W)]
    for program in (here, there):
        placed = program.shard(*args)
        results = program(*placed)
        assert placed[1].is_deleted()  # Donated.
        assert [result.sharding.spec for result in results] == [
            output.sharding.spec for output in here(*here.shard(*args))
        ]
        for got, want in zip(results, here(*args), strict=True):
            np.testing.assert_array_equal(got, want)


def test_where_xla_ends_the_child_this_process_lives_on(monkeypatch):
    with monkeypatch.context() as unrepaired:
        unrepaired.setattr(check, "PRESENT", [])
        with pytest.raises(
            LoweringError,
            match=r"^conv: the child process in which XLA compiled it with GSPMD "
            r"ended by SIG(ABRT|SEGV): .+\. Try Partitioner\.SHARDY, or annotate .* "
            r"JAX_DUMP_IR",
        ):
            compile_program(
                depthwise,
                [IMAGE, KERNEL],
                MESH,
                partitioner=Partitioner.GSPMD,
                name="conv",
                in_child=True,
            )
    program = compile_program(
        depthwise,
        [IMAGE, KERNEL],
        MESH,
        partitioner=Partitioner.GSPMD,
        in_child=True,
    )
    ones = [np.ones(spec.shape, np.float32) for spec in (IMAGE, KERNEL)]
    np.testing.assert_array_equal(program(*ones), np.full([4, 1, 1, 8], 4.0))


@pytest.mark.parametrize("partitioner", Partitioner)
def test_what_xla_refuses_is_told_as_in_this_process(partitioner):
    def fn(x):
        return xla.custom_call_v2("unheard_of", [x], [X])

    messages = []
    for in_child in (False, True):
        with pytest.raises(LoweringError, match="to unheard_of .* Leave the") as error:
            compile_program(fn, [X], MESH, partitioner=partitioner, in_child=in_child)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


# In place of the child: says what is asked for, until it is asked to end.
_STUB = """
    import os, sys
    from multiprocessing.connection import Connection
    connection = Connection(int(sys.argv[1]))
    while True:
        devices, by, module = [connection.recv_bytes() for _ in range(3)]
        print(module.decode(), file=sys.stderr, flush=True)
        if by:
            os.kill(os.getpid(), int(by)) if int(by) else os._exit(3)
        for part in (b"compiled", b"executable"):
            connection.send_bytes(part)
"""
_FATAL = """\
some warning
F0000 00:00:1 7 spmd.cc:12] Check failed: a == b (1 vs. 2)
*** Check failure stack trace: ***
    @     0x7f  xla::spmd::Partition()
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A child that is none."""
    path = tmp_path / "stub.py"
    path.write_text(textwrap.dedent(_STUB))
    monkeypatch.setattr(child_module, "__file__", str(path))
    return Child(1)


def test_what_a_child_writes_is_written_here(stub, capsys):
    for text in ("a warning", "another"):
        assert stub.compile(text.encode(), b"", [0]) == b"executable"
        assert capsys.readouterr().err == f"{text}\n"


@pytest.mark.parametrize(
    ("text", "by", "message"),
    [
        (_FATAL, signal.SIGABRT, "by SIGABRT: F0000 00:00:1 7 spmd.cc:12] Check"),
        ("1\n2\n3\n4\n  @ 0x7f f()", signal.SIGSEGV, "by SIGSEGV: 2 / 3 / 4"),
        ("W1123 1 x.cc:1] Old.\nfree()", signal.SIGABRT, "by SIGABRT: free()"),
        ("", signal.SIGKILL, "by SIGKILL: it printed nothing"),
        ("bye", 0, "with status 3: bye"),
    ],
)
def test_how_a_child_ended_is_told(stub, text, by, message):
    assert stub.compile(b"before", b"", [0]) == b"executable"
    with pytest.raises(ChildEnded) as ended:
        stub.compile(text.encode(), b"%d" % by, [0])
    assert str(ended.value).startswith(message)
    assert "before" not in str(ended.value) and "xla::" not in str(ended.value)
    assert stub.compile(b"", b"", [0]) == b"executable"  # Another one.


def test_an_interrupted_compile_ends_the_child(monkeypatch):
    def interrupt(connection):
        raise KeyboardInterrupt

    compile_program(tf.sin, [X], MESH, in_child=True)
    before = child(8)._process
    with monkeypatch.context() as interrupted:
        interrupted.setattr(Connection, "recv_bytes", interrupt)
        with pytest.raises(KeyboardInterrupt):
            compile_program(tf.cos, [X], MESH, in_child=True)
    assert before.poll() is not None
    program = compile_program(tf.exp, [X], MESH, in_child=True)
    np.testing.assert_array_equal(program(np.zeros([8, 16], np.float32)), 1)


@on_linux
def test_a_child_needs_no_tensorflow():
    compile_program(tf.sin, [X], MESH, in_child=True)
    libraries = pathlib.Path(f"/proc/{child(8)._process.pid}/maps").read_text()
    assert "libjax" in libraries and "tensorflow" not in libraries


@on_linux
def test_a_child_ends_with_the_process_that_started_it():
    code = """
        import os, sys
        from importlib import util
        spec = util.spec_from_file_location("child", sys.argv[1])
        child = util.module_from_spec(spec)
        spec.loader.exec_module(child)
        one = child.Child(1)
        one._start()
        print(one._process.pid, flush=True)
        os._exit(1)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), child_module.__file__],
        capture_output=True,
        text=True,
        check=False,
    )
    stat = pathlib.Path(f"/proc/{int(run.stdout)}/stat")
    for _ in range(300):
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return  # Nobody asks for its status, where no init is running.
        except FileNotFoundError:
            return
        time.sleep(0.1)
    pytest.fail("the child goes on")


def test_what_a_child_compiles_takes_too_short_for_jaxs_cache(monkeypatch):
    """So JAX does not keep it, of which it would lack functions: see below."""
    original, shortest = jax_bridge.child, []

    def watched(count):
        compiler = original(count)

        def compiled(*args):
            shortest.append(jax.config.jax_persistent_cache_min_compile_time_secs)
            return compiler.compile(*args)

        return types.SimpleNamespace(compile=compiled)

    monkeypatch.setattr(jax_bridge, "child", watched)
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    compile_program(lambda x: x + 3.0, [X], MESH, in_child=True)
    assert shortest == [float("inf")] and before < 1e9
    assert jax.config.jax_persistent_cache_min_compile_time_secs == before


@pytest.mark.slow
def test_an_executable_that_is_serialized_twice_lacks_functions(tmp_path):
    """If this fails with a new jaxlib, cache from then on what a child compiled.

    JAX's cache keeps what the child sent, and another process reads it there.
    """
    code = """
        import contextlib, sys
        import jax
        import numpy as np
        import tensorflow as tf
        from meshwright.framework import set_platform
        from meshwright.framework.compiler.program import compile_program
        from meshwright.framework.compiler.xla import jax_bridge
        from tests.framework.compiler.programs import MESH

        def fn(x):
            return tf.while_loop(
                lambda i, _: i < 3, lambda i, y: (i + 1, tf.cumsum(y @ x)), (0, x)
            )[1]

        set_platform("cpu", 8)
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_compilation_cache_dir", sys.argv[1])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        jax_bridge.not_cached = contextlib.nullcontext
        program = compile_program(fn, [tf.TensorSpec([16, 16])], MESH, in_child=True)
        print(np.asarray(program(np.ones([16, 16], np.float32))).shape)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=False)
        for _ in range(2)
    )
    assert first.stdout == "(16, 16)\n", first.stderr
    assert re.search(r"NOT_FOUND: Function \w+ not found", second.stderr)


@pytest.mark.parametrize(
    ("patched", "value", "reason"),
    [
        ("process_count", 2, "of one process, and its devices belong to 2 processes"),
        ("default_backend", "tpu", "and its tpu devices are this process's alone"),
    ],
)
def test_devices_of_which_a_child_has_no_like(patched, value, reason, monkeypatch):
    monkeypatch.setattr(jax, patched, lambda: value)
    with pytest.raises(
        ValueError, match=rf"^sin: a child .*{reason}: do not set in_child"
    ):
        compile_program(tf.sin, [X], MESH, in_child=True)


def test_a_topology_is_refused():
    with pytest.raises(ValueError, match="^sin: .* and it is compiled for a topology"):
        compile_program(tf.sin, [X], MESH, devices=jax.devices(), in_child=True)


def test_calls_back_into_python_are_refused():
    def fn(x):
        return jax.pure_callback(np.sin, x, x)

    lowered = jax.jit(fn).lower(jax.ShapeDtypeStruct([8], np.float32))
    signature = lower(tf.sin, [X]).signature
    program = MeshProgram(signature, MESH, lowered, Partitioner.SHARDY, in_child=True)
    with pytest.raises(LoweringError, match="calls back into Python .* do not set"):
        program.compile()
