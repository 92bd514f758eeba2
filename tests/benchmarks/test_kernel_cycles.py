"""The benchmark of the kernel's cycles: how it reads libtpu's dumps."""

import pytest

from benchmarks import kernel_cycles

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
