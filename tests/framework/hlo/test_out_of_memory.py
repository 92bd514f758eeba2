"""Programs that do not fit: what compilers say of them, and what is told."""

import math
import pathlib
import pickle
import types

import jax
import pytest
import tensorflow as tf

from meshwright.framework.compiler.hlo.out_of_memory import (
    OutOfMemoryError,
    Refusal,
    check_arguments_fit,
    parse_refusal,
)
from meshwright.framework.compiler.lowering.lower import LoweringError, lower
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.mesh_program import MeshProgram
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.devices.topology import topology_devices
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from tests import needs
from tests.framework.compiler.programs import MESH, split
from tests.framework.hlo.test_memory import GIB, KIB, STRAIGHT, compiled, two_layers

MESSAGE = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (16.80G) exceeds available HBM (15.48G)."
)


@pytest.mark.parametrize(
    "message,needed,available",
    [
        (MESSAGE, 16.80, 15.48),
        (MESSAGE.replace("16.80G", "6.00T"), 6 * 1024, 15.48),
        (MESSAGE.replace("15.48G", "512.00M"), 16.80, 0.5),
        (
            "Ran out of memory in memory space hbm. Used 17.50G of 15.48G hbm. "
            "Exceeded hbm capacity by 2.02G.",
            17.5,
            15.48,
        ),
        (
            "RESOURCE_EXHAUSTED: Allocation (size=34359738368) would exceed memory "
            "(size=17179869184) :: %s0 = inlined_call_operand.hbm",
            32,
            16,
        ),
    ],
)
def test_reads_what_a_tpu_compiler_says(message, needed, available):
    refusal = parse_refusal(message)
    assert refusal.needed == round(needed * GIB)
    assert refusal.available == round(available * GIB)
    assert refusal.over == refusal.needed - refusal.available


def test_other_errors_are_no_refusals():
    assert (
        parse_refusal("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes.") is None
    )
    assert parse_refusal("INVALID_ARGUMENT: No such compile option: 'x'") is None


class Refused:
    """As JAX lowers a program that its compiler refuses."""

    def __init__(self, message, text):
        self.message, self.text = message, text

    def compile(self, compiler_options):
        if folder := (compiler_options or {}).get("xla_dump_to"):
            assert compiler_options["mine"] == 1
            name = "module_0000.jit_f.oom_intermediate_module.txt"
            pathlib.Path(folder, name).write_text(self.text)
        raise jax.errors.JaxRuntimeError(self.message)


def refused(message):
    function = lower(
        two_layers,
        [tf.TensorSpec([256, 256], name="w"), tf.TensorSpec([256, 256])],
        name="train",
    )
    text = STRAIGHT.lstrip().replace("wide", "jit(train)/tf_program/first/MatMul")
    lowered = Refused(message, text)
    by = Partitioner.GSPMD
    return MeshProgram(function.signature, MESH, lowered, by)


def test_what_does_not_fit_says_by_how_much_and_what_takes_it():
    with pytest.raises(OutOfMemoryError) as raised:
        refused(MESSAGE).compile({"mine": 1})
    error = raised.value
    assert error.refusal.over == round(16.80 * GIB) - round(15.48 * GIB)
    assert error.timeline.peak == 5 * KIB
    first = error.allocations[0]
    assert (first.bytes, first.type, first.layer) == (2 * KIB, "f32[512]", "first")
    assert first.source.startswith("hlo/test_memory.py:")
    argument = error.allocations[2]
    assert (argument.what, argument.name) == ("argument", "0")
    text = str(error)
    assert text.startswith("train: 1.32 GiB more than fit: a device has 15.5 GiB and")
    assert "would need 16.8 GiB. Most takes: 2.00 KiB temporary f32[512] of fi" in text
    assert f"first ({first.source}); " in text and "argument f32[256] of 0" in text
    assert text.endswith("take a smaller batch or more devices")


def test_what_does_not_fit_goes_between_processes():
    with pytest.raises(OutOfMemoryError) as raised:
        refused(MESSAGE).compile({"mine": 1})
    error, again = raised.value, pickle.loads(pickle.dumps(raised.value))
    assert type(again) is OutOfMemoryError and str(again) == str(error)
    assert again.refusal == error.refusal
    assert again.allocations == error.allocations
    assert again.timeline.peak == error.timeline.peak


def test_a_compiler_that_fails_otherwise_is_not_taken_for_one_that_refuses():
    with pytest.raises(LoweringError, match="train: XLA cannot .* bad luck") as raised:
        refused("INTERNAL: bad luck").compile()
    assert not isinstance(raised.value, OutOfMemoryError)
    assert "INTERNAL" in str(raised.value.__cause__)


V3 = types.SimpleNamespace(device_kind="TPU v3")


def arguments(*shapes):
    def first(state):
        return state["w"][0]

    specs = {"w": tf.TensorSpec(shapes[0]), "v": tf.TensorSpec(shapes[1], tf.bfloat16)}
    return lower(first, [specs], name="train").signature


def test_arguments_that_cannot_fit_are_refused_before_compiling():
    # 8 GiB of w on each device if X splits it in two; v has two bytes for each number.
    signature = arguments([4, 2**30], [2**32])
    w, v = split("X", None), split(None)
    with pytest.raises(OutOfMemoryError) as raised:
        check_arguments_fit(signature, MESH, [v, w], V3)
    error = raised.value
    assert error.timeline is None
    assert [allocation.bytes for allocation in error.allocations] == [8 * GIB, 8 * GIB]
    assert error.refusal == Refusal(needed=16 * GIB, available=int(15.48 * GIB))
    text = str(error)
    assert "train: 532 MiB more than fit" in text
    assert "would need 16.0 GiB for its arguments alone. Most takes: " in text
    assert "8.00 GiB argument float32[2, 1073741824] of 0.w" in text


def test_arguments_that_may_fit_are_left_to_the_compiler():
    signature = arguments([4, 2**30], [2**32])
    split_more = [split("Y"), split("X", None)]
    check_arguments_fit(signature, MESH, split_more, V3)
    # What completion decides may be split over all devices.
    check_arguments_fit(signature, MESH, [None, split("X", None)], V3)
    # Memory of other devices is not known here.
    replicated = [split(None), split(None, None)]
    check_arguments_fit(signature, MESH, replicated, jax.devices()[0])


@needs.libtpu
def test_the_tpu_compiler_says_what_does_not_fit():
    with pytest.raises(OutOfMemoryError) as raised:
        compiled(topology_devices("v3:2x2"), size=16 * 1024)
    error = raised.value
    assert error.timeline.peak == pytest.approx(error.refusal.needed, rel=0.01)
    made = [a for a in error.allocations if a.what == "temporary"]
    assert made[0].layer in ("first", "second") and made[0].bytes == 4 * GIB
    assert "(hlo/test_memory.py:" in str(error)


@needs.libtpu
def test_what_the_tpu_compiler_needs_includes_arguments():
    """It says so of "HLO temporaries"; here arguments take two thirds of it."""
    mesh = DeviceMesh(("X",), (8,))
    replicated = Sharding.from_dims_mapping(mesh, [-1, -1])

    def first(w, x):
        y = tf.tanh(tf.matmul(x, w))
        return tf.matmul(x, y, transpose_a=True), tf.matmul(y, y, transpose_a=True)

    specs = [tf.TensorSpec([4096, 4096]), tf.TensorSpec([6 * 2**17, 4096])]
    with pytest.raises(OutOfMemoryError) as raised:
        compile_program(
            first,
            specs,
            mesh,
            in_shardings=[replicated, replicated],
            devices=topology_devices("v3:2x2"),
        )
    error = raised.value
    arguments = sum(math.prod(spec.shape) * 4 for spec in specs)
    assert 12 * GIB < arguments < error.refusal.available < error.refusal.needed
    total = sum(a.bytes for a in error.allocations if a.what == "argument")
    assert total == arguments
    assert error.refusal.needed == pytest.approx(error.timeline.peak, abs=0.01 * GIB)
