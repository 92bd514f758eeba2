"""Devices that wait for each other: enough threads for all, and an end where not."""

import os
import re
import subprocess
import sys
import textwrap
import threading

import jax
import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla import platforms, standstill
from tests.framework.compiler.programs import MESH, split

# More calls than may be in flight, which the devices cannot keep up with.
_MANY_CALLS = """
    import threading
    import numpy as np
    import tensorflow as tf
    from meshwright import framework as mw

    mw.set_platform("cpu", {devices}, standstill_seconds=3)
    mesh = mw.DeviceMesh(("X",), ({devices},))
    rows = mw.Sharding.from_dims_mapping(mesh, ["X"])

    def add_all(x):
        return tf.sin(x) + 1e-3 * tf.reduce_sum(x)

    size = 8 * {devices}
    program = mw.compile_program(
        add_all,
        [tf.TensorSpec([size])],
        mesh,
        in_shardings=[rows],
        out_shardings=rows,
    )

    def call(done):
        x = program.shard(np.ones(size, np.float32))
        for _ in range(1000):
            x = program(x)
        done.append(np.asarray(x)[0])

    done = []
    callers = [threading.Thread(target=call, args=(done,)) for _ in range({callers})]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(set(done)) == 1 and len(done) == {callers}
    print("done")
"""


def _run(code, **environment):
    kept = {k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "XLA_FLAGS")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )


def test_devices_that_stand_still_end_the_process_which_says_where():
    ran = _run(_MANY_CALLS.format(devices=4, callers=1), PJRT_NPROC="4")
    assert ran.returncode == standstill.STATUS, ran.stderr
    assert "add_all: a call stands still: for 3 s none of XLA's threads" in ran.stderr
    told = ran.stderr.replace("\n    ", " ")  # As it is folded.
    assert "Devices 0, 1, 2, 3 of mesh (X=4) wait for each other in" in told
    assert "  all-reduce all-reduce along X: jit(add_all)/tf_program/Sum" in told
    assert "XLA has PJRT_NPROC = 4 in each pool. Raise it" in told
    # Where each of Python's threads is.
    assert re.search(r'File "<string>", line \d+ in call\n', ran.stderr)


@pytest.mark.parametrize("callers", [1, 12])
def test_many_calls_in_flight_have_the_threads_that_they_need(callers):
    ran = _run(_MANY_CALLS.format(devices=4, callers=callers))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "done\n"


def test_devices_that_xla_is_told_of_get_threads_too():
    code = """
        import os
        from meshwright import framework as mw
        mw.set_platform("cpu")
        print(os.environ["PJRT_NPROC"])
    """
    ran = _run(code, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert int(ran.stdout) >= 4 * 4, ran.stderr


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_a_limit_is_above_zero(seconds):
    with pytest.raises(
        ValueError, match=f"standstill_seconds={seconds}: it is above 0"
    ):
        platforms.set_platform("cpu", 8, standstill_seconds=seconds)


def _thread(folder, number, state, user, system):
    folder = folder / str(number)
    folder.mkdir(exist_ok=True)
    before = "0 " * 10
    text = f"{number} (a name) of S) {state} {before}{user} {system} 0 0 20 0"
    (folder / "stat").write_text(text)


def test_only_threads_that_neither_run_nor_want_to_stand_still(tmp_path, monkeypatch):
    monkeypatch.setattr(standstill, "_THREADS", tmp_path)
    _thread(tmp_path, 1, "S", 30, 4)
    _thread(tmp_path, 2, "S", 500, 60)
    assert standstill._ticks(set()) == 594
    # On a loaded machine a thread that is ready may wait for a core for long.
    _thread(tmp_path, 2, "R", 500, 60)
    assert standstill._ticks(set()) is None
    # A thread of Python's may load data, unless it is the one that makes a call.
    here = threading.main_thread()
    _thread(tmp_path, here.native_id, "R", 7, 0)
    _thread(tmp_path, 2, "S", 500, 60)
    assert standstill._ticks(set()) == 594
    assert standstill._ticks({here.ident}) is None


def test_a_call_is_under_way_until_its_result_is_there_or_taken_over():
    rows = split("X")
    program = compile_program(
        lambda x: x + tf.reduce_sum(x),
        [tf.TensorSpec([8])],
        MESH,
        in_shardings=[rows],
        out_shardings=rows,
        donate=[0],
    )
    calls = program._calls
    assert not calls.under_way()
    first = program(np.ones(8, np.float32))
    jax.block_until_ready(first)
    assert not calls.under_way()
    second = program(first)
    calls._last = lambda: first
    assert not calls.under_way()
    calls.inside.add(threading.get_ident())
    assert calls.under_way()
    calls.inside.clear()
    assert jax.block_until_ready(second).shape == (8,)


# Two recurrent loops, forwards and backwards in time, and their gradients; loops and
# branches beside them, each with collectives of its own.
_INDEPENDENT = """
    import numpy as np
    import tensorflow as tf
    from meshwright import framework as mw

    mw.set_platform("cpu", {devices}, standstill_seconds=20)
    mesh = mw.DeviceMesh(("X",), ({devices},))
    size = 2 * {devices}
    split = mw.Sharding.from_dims_mapping(mesh, ["X", -1])

    def recurrent(xs, w):
        def step(t, h, kept):
            h = tf.tanh(xs[t] + h @ w)
            return t + 1, h, tf.tensor_scatter_nd_update(kept, [[t]], [h])

        start = (0, tf.zeros_like(xs[0]), tf.zeros_like(xs))
        return tf.while_loop(
            lambda t, *_: t < 6, step, start, maximum_iterations=6
        )[2]

    def bidirectional(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            xs = tf.stack([x * (0.1 * t) for t in range(6)])
            both = recurrent(xs, w), recurrent(xs[::-1], tf.transpose(w))
            loss = tf.reduce_sum(both[0] * both[1][::-1])
        return [loss, *tape.gradient(loss, [x, w])]

    def beside(x, w, k):
        step = lambda t, a: (t + 1, tf.tanh(a @ w) + 0.1 * tf.reduce_mean(a * k))
        looped = tf.while_loop(lambda t, a: t < 5, step, (0, x))[1]
        chosen = tf.cond(
            tf.reduce_sum(x) > k, lambda: tf.sin(x @ w), lambda: tf.cos(w @ x)
        )
        return [looped, chosen]

    def all_of_them(x, w):
        return bidirectional(x, w) + [beside(x, w, float(k)) for k in range({count})]

    program = mw.compile_program(
        all_of_them, [tf.TensorSpec([size, size])] * 2, mesh, in_shardings=[split] * 2
    )
    assert len(program.collectives()) >= {count}
    rng = np.random.default_rng(0)
    args = [rng.normal(0, size**-0.5, [size, size]).astype("f") for _ in range(2)]
    expected = tf.nest.flatten(all_of_them(*map(tf.constant, args)))
    for _ in range({calls}):
        for one, other in zip(tf.nest.flatten(program(*args)), expected, strict=True):
            # Sums of the devices' parts come in another order.
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
    print("done")
"""


@pytest.mark.parametrize(
    "devices,count,calls",
    [
        (8, 10, 5),
        pytest.param(8, 50, 20, marks=pytest.mark.slow),
        pytest.param(16, 25, 10, marks=pytest.mark.slow),
        pytest.param(32, 25, 5, marks=pytest.mark.slow),
    ],
)
def test_independent_loops_and_branches_with_collectives_end(devices, count, calls):
    ran = _run(_INDEPENDENT.format(devices=devices, count=count, calls=calls))
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout == "done\n"
