"""Attention by a fused kernel in programs for TPUs, of which none is here."""

import dataclasses
import functools
import re

import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.compiler.hlo.step_time import step_time
from meshwright.framework.compiler.lowering.errors import LoweringError
from meshwright.framework.compiler.program import trace_program
from meshwright.framework.devices.device_order import order_of
from meshwright.framework.devices.topology import topology, topology_devices
from meshwright.framework.modeling.recompute import Recompute
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.attention.fused import Kernel
from meshwright.layers.attention.mask_rules import NearMask
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.transformer import transformer_layer
from tests import needs
from tests.layers.attention.on_devices import gradients_of

pytestmark = needs.libtpu
HEADS = {"heads": "tensor", "kv_heads": "tensor"}
PLAN = ShardingPlan(
    mesh_axes=("data", "tensor"),
    mesh_shape=(2, 2),
    weights=HEADS,
    activations={"batch": "data", **HEADS},
)
LAYER = MultiHeadAttention(
    model_dims=32,
    num_heads=4,
    head_dim=32,
    num_kv_heads=2,
    block_size=128,
    kernel=Kernel.SPLASH,
)


@functools.cache
def compiled(name, length, layer=LAYER, partitioner=mw.Partitioner.SHARDY):
    """The program of a layer's gradients, for a topology."""
    devices = topology_devices(name)
    return gradients_of(layer, PLAN, [4, length, 32], partitioner, devices)


def kernels(program):
    """The instructions that call kernels."""
    module = HloModule(program.hlo_text())
    return [
        op for op in module.instructions if '"custom_call_config"' in op.backend_config
    ]


@pytest.mark.parametrize(
    "name,partitioner",
    [
        ("v5e:2x2", mw.Partitioner.SHARDY),
        pytest.param("v5e:2x2", mw.Partitioner.GSPMD, marks=pytest.mark.slow),
        pytest.param("v6e:2x2", mw.Partitioner.SHARDY, marks=pytest.mark.slow),
    ],
)
def test_each_device_calls_it_for_its_rows_and_heads(name, partitioner):
    program = compiled(name, 256, partitioner=partitioner)
    calls = kernels(program)
    assert len(calls) == 3
    # Rows of a device, its heads of queries or of keys, tokens.
    assert all(re.search(r"\[2,[12],256,32\]", call.type) for call in calls)
    if partitioner is mw.Partitioner.SHARDY:  # GSPMD gathers weights there.
        assert {c.kind for c in program.collectives()} <= {"all-reduce"}


@pytest.mark.parametrize(
    "name", ["v5e:2x2", pytest.param("v6e:2x2", marks=pytest.mark.slow)]
)
def test_memory_grows_with_the_length(name):
    """Eight times the length, not 64 times the memory."""
    short, long = (compiled(name, length).memory() for length in (256, 2048))
    assert long.peak < 9 * short.peak


def test_a_stack_that_saves_the_context_does_not_compute_it_again():
    def calls(recompute):
        stack = Repeat(
            body=transformer_layer(
                model_dims=32,
                num_heads=4,
                head_dim=32,
                hidden_dims=64,
                kernel=Kernel.SPLASH,
            ),
            num_layers=2,
            recompute=recompute,
            saved_names=("context",) if recompute is Recompute.ALL_BUT_NAMED else (),
        )
        return len(kernels(compiled("v5e:2x2", 256, stack)))

    assert calls(Recompute.ALL_BUT_NAMED) == 3
    assert calls(Recompute.EVERYTHING) == 4


def test_its_cycles_and_flops_grow_with_the_tiles_that_the_mask_leaves():
    window = dataclasses.replace(LAYER, mask=NearMask(left=127, right=0))
    # Two heads of two rows; products of a call's tiles of 128 tokens.
    for layer, tiles in (LAYER, 3), (window, 3):
        calls = kernels(compiled("v5e:2x2", 256, layer))
        logits = 4 * tiles * 128**2
        assert sorted(op.cycles for op in calls) == [
            pytest.approx(c * logits / 1024, abs=1) for c in (8.2, 8.6, 9.8)
        ]
    programs = [compiled("v5e:2x2", 512, layer) for layer in (LAYER, window)]
    cycles = [sum(op.cycles for op in kernels(program)) for program in programs]
    assert cycles[0] / cycles[1] == pytest.approx(10 / 7, rel=1e-3)
    flops = [program.cost()["flops"] for program in programs]
    products = (2 + 3 + 4) * 2 * 32 * 4 * 128**2
    assert flops[0] - flops[1] == pytest.approx(3 * products, rel=0.01)


@pytest.mark.parametrize(
    "name,cycles",
    [
        ("v4:2x2x1", (11.8, 9.9, 12.6)),
        pytest.param("v5p:2x2x1", (9.2, 8.8, 11.3), marks=pytest.mark.slow),
    ],
)
def test_two_cores_divide_rows_or_else_the_heads_of_the_forward_pass(name, cycles):
    """As the loops of libtpu's instructions do: the backward pass has each on one."""
    devices, logits = topology_devices(name), 2 * 3 * 128**2
    for rows, shares in (2, (0.5, 0.5, 0.5)), (1, (0.5, 1, 1)):
        shape = [2 * rows, 256, 32]  # Of two devices along "data"; two heads each.
        program = gradients_of(LAYER, PLAN, shape, mw.Partitioner.SHARDY, devices)
        wants = [
            rows * share * each * logits / 1024
            for share, each in zip(shares, cycles, strict=True)
        ]
        calls = {op.cycles for op in kernels(program)}
        assert sorted(calls) == pytest.approx(sorted(wants), abs=1)


def test_estimates_of_a_step_have_its_time():
    program = compiled("v5e:2x2", 256)
    order = order_of(program.mesh, topology("v5e:2x2"))
    times = step_time(HloModule(program.hlo_text()), program.mesh, order)
    cycles = sum(op.cycles for op in kernels(program))
    priced = [
        op for op in times.ops if "splash" in op.op_name and op.part.value == "matrix"
    ]
    assert sum(op.seconds for op in priced) == pytest.approx(cycles / 1.5e9)


def test_it_is_not_exported_for_other_platforms():
    traced = trace_program(
        lambda theta, x: LAYER.fprop(mw.Context(plan=PLAN), theta, x),
        [
            LAYER.weights().map(lambda s: tf.TensorSpec(s.shape)),
            tf.TensorSpec([4, 256, 32]),
        ],
        PLAN.mesh,
        name="layer",
        devices=topology_devices("v5e:2x2"),
    )
    with pytest.raises(LoweringError, match="layer has .* only a tpu can .* for cpu: "):
        traced.export(["tpu", "cpu"])
