"""The benchmarks of attention's length and of its kernel's cycles."""

import dataclasses

import numpy as np
import pytest

from benchmarks import attention_length, kernel_cycles
from benchmarks.attention_length import Seconds, Sizes
from meshwright.framework.sharding.plan import SequenceAttention
from meshwright.layers.attention.fused import Kernel


def test_rows_have_memory_and_medians():
    sizes = Sizes(batch=1, length=64, heads=2, block=16)
    turns = [Seconds(cpu=cpu, wall=10 * cpu) for cpu in (0.5, 4.0, 1.0)]
    row = attention_length.table_row(sizes, 3 * 2**20, turns).split()
    assert row == ["64", "16", "-", "3.0", "1.000", "10.000"]
    sizes = dataclasses.replace(sizes, split_over=4, way=SequenceAttention.RING)
    row = attention_length.table_row(sizes, 2**19, ()).split()
    assert row == ["64", "16", "ring", "0.5"]
    fused = dataclasses.replace(sizes, block=0, kernel=Kernel.SPLASH)
    row = attention_length.table_row(fused, 2**19, ()).split()
    assert row == ["64", "splash", "ring", "0.5"]
    row = attention_length.estimated_row(sizes, 2**20, 0.25).split()
    assert row == ["64", "16", "ring", "1.0", "0.250000"]


SPLIT = {"split_over": 2, "way": SequenceAttention.RING}


@pytest.mark.parametrize(
    "length,forms,more",
    [
        (40, [(16, {}), (8, SPLIT)], {}),
        (40, [(16, {}), (8, SPLIT)], {"positions": "sinusoids"}),
        (128, [(0, {"kernel": Kernel.SPLASH})], {}),
    ],
)
def test_all_forms_compute_the_same_gradients(length, forms, more):
    results = []
    for block, settings in [*forms, (0, {})]:
        settings = {**more, **settings}
        sizes = Sizes(batch=1, length=length, heads=2, block=block, **settings)
        program = attention_length.step_program(sizes, None)
        out = program(*attention_length.arguments(program))
        results.append(program.unshard(out))
        turns = attention_length.in_turns([program], 2)
        assert all(turn.cpu > 0 and turn.wall > 0 for turn in turns[0])
    *others, (want, want_x) = results
    for got, got_x in others:
        np.testing.assert_allclose(got_x, want_x, rtol=1e-4, atol=1e-5)
        for path, value in want.items_by_path():
            np.testing.assert_allclose(got.get_path(path), value, rtol=1e-4, atol=1e-4)


DUMP = """Schedule analysis:
\ttotal scheduled bundles:    {}
\tempty scheduled bundles:    10
"""


def test_cycles_are_those_of_1024_logits(tmp_path):
    for name, bundles in ("fwd_residuals", 6000), ("dq_no", 2048), ("dkv_no", 8192):
        for number, schedule in (1, 99), (2, bundles):
            kind = "final_bundles" if number == 2 else "packed-bundles-pre-ra"
            file = f"7-splash_mha_{name}.1-{number}-schedule-analysis_{kind}.txt"
            (tmp_path / file).write_text(DUMP.format(schedule))
    cycles = kernel_cycles.cycles_of(tmp_path, logits=1024 * 1024)
    assert cycles == pytest.approx([6000 / 1024, 2, 8])
