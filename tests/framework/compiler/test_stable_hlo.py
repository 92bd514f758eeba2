"""Placeholders that the compiler makes itself are as TF programs carry them."""

import json

import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    INTO_MANUAL,
    border_config,
)
from meshwright.framework.sharding.manual import auto_to_manual
from meshwright.framework.sharding.placeholders import PREFIX
from tests.framework.compiler.programs import PERMUTED


def test_a_border_of_a_region_is_as_in_a_tf_program():
    lowered = lower(
        lambda x: auto_to_manual(x, PERMUTED, ["Y", None], manual_axes=["Y"]),
        [tf.TensorSpec([8, 8])],
    )
    (config,) = (
        json.loads(op.backend_config)
        for computation in hlo_pb2.HloModuleProto.FromString(lowered.hlo).computations
        for op in computation.instructions
        if op.custom_call_target == PREFIX + INTO_MANUAL
    )
    assert config == border_config(PERMUTED, ("Y",), [("Y",), ()])
