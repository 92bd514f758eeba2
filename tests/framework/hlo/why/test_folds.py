"""What is told with another tensor's line."""

import dataclasses

import pytest

from meshwright.framework.compiler.explaining.explain import TensorReport
from meshwright.framework.compiler.explaining.texts.folds import folded, other_lines
from meshwright.framework.compiler.lowering.sources import Kind, Source
from tests.framework.hlo.why.why_programs import lies


def argument(name, *dims):
    return TensorReport(
        kind=Kind.ARGUMENT,
        layer="",
        op_name=f"0.{name}",
        op_type="",
        source=None,
        shape=(8, 8),
        dtype="f32",
        sharding=lies(*dims),
        annotated=False,
        why_replicated=None,
        bytes=256,
        bytes_per_device=64,
    )


@pytest.mark.parametrize(
    ("weight", "slots", "others"),
    [
        (
            "block/up/kernel",
            ["adam/block_up_kernel_momentum", "adam/block_up_kernel_velocity"],
            [
                "adam/up_kernel_momentum",
                "block/up/kernel_momentum",
                "m/x/block_up_kernel_m",
            ],
        ),
        (
            "theta.block.w",
            ["slots.block.w.m", "slots.block.w.v"],
            ["ema.block.w", "theta.block.w_out", "slots.other.w.m"],
        ),
    ],
)
def test_a_weight_stands_for_the_slots_that_lie_as_it_does(weight, slots, others):
    given = [argument(name, "X", None) for name in (*slots, *others, weight)]
    split = argument(f"{slots[0]}_too", None, "X")
    groups = {g[0].op_name: g[1:] for g in folded([*given, split])}
    (alike,) = (group for group in groups.values() if group)
    assert groups[f"0.{weight}"] == alike == given[: len(slots)]
    assert [*other_lines(alike)] == ["      and its 2 slots alike"]


def test_random_bits_of_layers_without_a_line_are_told_at_each_layer():
    def bits(layer, number):
        made = Source(
            op_name="",
            op_type="",
            layer=layer,
            file="",
            line=0,
            is_gradient=False,
            shapes=(),
        )
        bits = dataclasses.replace(argument(f"{number}", None, None), kind=Kind.INSIDE)
        return dataclasses.replace(bits, layer=layer, dtype="u32", source=made)

    groups = folded([bits(layer, n) for layer in ("a", "b") for n in range(3)])
    assert [{t.layer for t in group} for group in groups] == [{"a"}, {"b"}]
    assert [*other_lines(groups[0][1:])] == [
        "      and 2 more u32 tensors of this layer"
    ]
