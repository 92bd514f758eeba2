"""Variables on a mesh that other programs, threads and handles use too."""

import signal
import threading

import numpy as np
import pytest
import tensorflow as tf

import meshwright.framework as mw
from meshwright.framework.compiler.program import Program

MESH = mw.DeviceMesh(("data", "model"), (2, 4))


def adder(variable, layout=None):
    """A program that adds 1."""
    return mw.function(
        lambda: variable.assign_add(tf.ones_like(variable)), MESH, layout=layout
    )


@pytest.mark.parametrize(
    "start",
    [np.float64(1 / 3), np.int64(2**40), np.uint64(2**63), np.complex128(1j / 3)],
)
def test_wide_elements_keep_their_bits_from_layout_to_layout(start):
    variable = tf.Variable(np.full([8], start), name="wide")
    for axis in ("data", "model", "data"):
        adder(variable, {"wide": [axis]})()
    one = start.dtype.type(1)
    np.testing.assert_array_equal(variable.numpy(), [start + one + one + one] * 8)


def test_threads_read_while_programs_run():
    variable = tf.Variable(tf.zeros([100]), name="read")
    add, bad, done = adder(variable), [], threading.Event()
    add()

    def read():
        while not done.is_set():
            for value in (variable.numpy(), (variable + 0).numpy()):
                if value.shape != (100,) or len(set(value)) != 1:
                    bad.append(value)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(100):
        add()
    done.set()
    reader.join()
    assert not bad and set(variable.numpy()) == {101}


def test_a_write_through_a_handle_of_before_a_call_is_told():
    variable = tf.Variable(tf.zeros([4]), name="held")
    add, handle = adder(variable), variable.handle
    add()
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.fill([4], 100.0))
    add()
    with pytest.raises(RuntimeError, match="'held' was written through a handle"):
        variable.numpy()
    np.testing.assert_array_equal(variable.numpy(), np.full(4, 2))


def test_threads_write_while_programs_run():
    variable = tf.Variable(tf.zeros([100]), name="written")
    add, one = adder(variable), tf.ones([100])
    add()
    writer = threading.Thread(
        target=lambda: [variable.assign_add(one) for _ in range(100)]
    )
    writer.start()
    for _ in range(100):
        add()
    writer.join()
    assert set(variable.numpy()) == {201}


def test_what_an_assignment_returns_is_the_variable():
    variable = tf.Variable(tf.zeros([4]), name="assigned")
    add = adder(variable)
    add()
    returned = variable.assign_add(tf.ones([4]))
    add()
    np.testing.assert_array_equal(returned.numpy(), np.full(4, 3))


def test_an_interrupt_in_a_call_loses_no_value(monkeypatch):
    variable = tf.Variable(tf.zeros([4]), name="interrupted")
    add = adder(variable)
    add()
    run = Program.__call__

    def interrupted(*args):
        out = run(*args)
        signal.raise_signal(signal.SIGINT)
        return out

    monkeypatch.setattr(Program, "__call__", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            add()
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    add()
    np.testing.assert_array_equal(variable.numpy(), np.full(4, 3))


def test_a_value_that_a_failed_program_took_is_told_and_can_be_restored(
    monkeypatch, tmp_path
):
    variable = tf.Variable(tf.ones([4]), name="lost")
    checkpoint = tf.train.Checkpoint(variable=variable)
    path = checkpoint.write(tmp_path / "saved")
    add = adder(variable)
    run = Program.__call__

    def fails(*args):
        run(*args)
        raise RuntimeError("a collective stood still")

    for restore in (
        lambda: variable.assign(tf.ones([4])),
        lambda: checkpoint.restore(path),
    ):
        add()  # Now the value is on the mesh alone.
        monkeypatch.setattr(Program, "__call__", fails)
        with pytest.raises(RuntimeError, match="stood still"):
            add()
        monkeypatch.undo()
        for use in (variable.numpy, add):
            with pytest.raises(RuntimeError, match="'lost' was lost .* assign it"):
                use()
        restore()
        add()
        np.testing.assert_array_equal(variable.numpy(), np.full(4, 2))


def test_a_thread_that_traces_a_function_does_not_stop_a_program_that_calls_it():
    variable = tf.Variable(tf.ones([4]), name="shared")
    add, tracing, compiling = adder(variable), threading.Event(), threading.Event()
    add()

    @tf.function(autograph=False)
    def twice():
        if threading.current_thread() is not threading.main_thread():
            tracing.set()  # The thread holds the lock of this function.
            compiling.wait(10)
        return 2 * variable

    def calls():
        compiling.set()
        return twice()

    results = []
    thread = threading.Thread(target=lambda: results.append(twice()))
    thread.start()
    tracing.wait()
    np.testing.assert_array_equal(mw.function(calls, MESH)(), np.full(4, 4))
    thread.join()
    np.testing.assert_array_equal(results[0], np.full(4, 4))
