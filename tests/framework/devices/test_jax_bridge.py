"""Where programs meet JAX: the platform, its devices, described arrays, errors."""

import os
import re
import subprocess
import sys
import textwrap

import jax
import pytest
import tensorflow as tf

from meshwright.framework.compiler.lowering.lower import LoweringError, lower
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.jax_mesh import abstract_array
from meshwright.framework.compiler.xla.mesh_program import MeshProgram
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.framework.sharding.mesh import DeviceMesh
from tests.framework.compiler.programs import MESH, split


def test_the_platform_is_chosen_first_thing_in_the_process():
    code = """
        import os
        from meshwright.framework import set_platform
        set_platform("cpu", 2)
        assert "terminate_timeout_seconds=1200" in os.environ["XLA_FLAGS"]
        import jax
        assert len(jax.devices()) == 2
        set_platform("cpu", 2)
        set_platform("cpu")
        for platform, count in [("cpu", 4), ("cuda", None)]:
            try:
                set_platform(platform, count)
            except ValueError as e:
                print(e)
    """
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment.pop("JAX_PLATFORMS", None)
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"JAX has already started with 2 cpu devices, not {wish}: call "
        "mw.set_platform before jax.devices() and whatever else starts it"
        for wish in ("4 of cpu", "some of cuda")
    ]


@pytest.mark.parametrize("begins", ["a program", "a function"])
def test_where_no_tpu_is_libtpu_says_nothing_of_it(begins):
    """JAX, of no platform, would have it look for one, at four lines of errors."""
    code = """
        import sys
        import tensorflow as tf
        import meshwright.framework as mw

        mesh = mw.DeviceMesh(("x",), (1,))
        if sys.argv[1] == "a program":
            mw.compile_program(tf.sin, [tf.TensorSpec([8])], mesh)
        else:
            mw.function(tf.sin, mesh)(tf.zeros([8]))
    """
    own = ("TPU_", "JAX_", "XLA_", "ALLOW_MULTIPLE_LIBTPU")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), begins],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "TPU" not in result.stderr


def test_an_unknown_platform_is_refused():
    with pytest.raises(ValueError, match='no platform .gpu.: .*did you mean "cuda"'):
        set_platform("gpu")
    with pytest.raises(ValueError, match="no platform 'cpus': it is .* or \"tpu\"$"):
        set_platform("cpus", 8)
    with pytest.raises(TypeError, match="device_count is '8'; pass the number of virt"):
        set_platform("cpu", "8")


@pytest.mark.parametrize(
    "mesh,message",
    [
        (
            DeviceMesh(("X", "Y"), (4, 4)),
            "device mesh (X=4, Y=4) needs 16 devices but 8 cpu devices exist (no "
            "device 8); use a smaller mesh, in gin files by ShardingPlan.mesh_shape "
            "and .device_ids, or, on CPU, more virtual devices: "
            'mw.set_platform("cpu", device_count=16) in Python',
        ),
        (DeviceMesh(("X",), (2,), (0, 9)), "8 cpu devices exist (no device 9)"),
    ],
)
def test_a_mesh_of_devices_that_do_not_exist_is_refused(mesh, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        compile_program(lambda x: x, [tf.TensorSpec([8])], mesh)


def test_describes_arrays_for_a_checkpoint():
    array = abstract_array([8, 8], tf.bfloat16, split(("X", "Y"), None))
    assert array.shape == (8, 8) and array.dtype == jax.numpy.bfloat16
    assert array.sharding.shard_shape(array.shape) == (1, 8)


@pytest.mark.parametrize("error", [KeyError, ValueError, AssertionError])
def test_what_else_fails_in_the_compiler_is_not_taken_for_a_sharding(error):
    class Lowered:
        def compile(self, compiler_options):
            raise error("out of luck")

    signature = lower(tf.sin, [tf.TensorSpec([8])]).signature
    program = MeshProgram(signature, MESH, Lowered(), Partitioner.GSPMD)
    with pytest.raises(error, match="out of luck") as raised:
        program.compile()
    assert not isinstance(raised.value, LoweringError)
