"""libtpu's estimates beside what it schedules: read from texts like its own."""

import pathlib
import sys

import pytest

# Where a script finds its neighbours.
sys.path.append(str(pathlib.Path(__file__).parents[3] / "benchmarks" / "papers"))

from benchmarks.papers import scheduled_ops  # noqa: E402
from meshwright.framework.compiler.hlo.hlo_text import HloModule  # noqa: E402
from meshwright.framework.compiler.hlo.step_time import (  # noqa: E402
    OpTime,
    TimePart,
)

WINDOWS = 'backend_config={"window_config":{"iteration_bounds":["4","2"]}}'
HLO = f"""
HloModule program

ENTRY %main (x: bf16[16,100]) -> bf16[16,100] {{
  %x = bf16[16,100]{{1,0:T(8,128)(2,1)}} parameter(0)
  %copy = bf16[16,100]{{1,0:T(8,128)(2,1)}} copy(%x), {WINDOWS}
  ROOT %add = bf16[16,100]{{1,0:T(8,128)(2,1)}} add(%copy, %copy)
}}
"""


def timed(name, part=TimePart.VECTOR, count=3):
    return OpTime(name=name, op_name="", part=part, loops=(), count=count, seconds=7.0)


def test_columns():
    module = HloModule(HLO)
    ops = [timed("copy"), timed("add"), timed("no code of its own")]
    product, others = scheduled_ops.columns(
        ops, module, {"copy": 5, "add": 2000}, clock=10.0, bandwidth=1000.0
    )
    assert product == ("with a product", 0, 0, 0, 0, 0)
    # Both arrays of a copy are padded to 16 by 128; what is read twice is loaded once.
    moved = 3 * 2 * 16 * 128 * 2 / 1000
    copied, added = 3 * 5 * 8 / 10, 3 * 2000 / 10
    assert others == (
        "others",
        2,
        14.0,
        pytest.approx(copied + added),
        pytest.approx(2 * moved),
        pytest.approx(moved + added),
    )


def test_bundles_are_those_of_the_op_that_has_all_of_them(tmp_path):
    text = """Schedule analysis:
\ttotal scheduled bundles:    5428
\t5428.00 scheduled bundles (100.00%): %copy.3 = bf16[4,16]{1,0} copy(%x)
"""
    (tmp_path / "1-copy.3-65-schedule-analysis_final_bundles.txt").write_text(text)
    (tmp_path / "1-TLP-71-schedule-analysis_final_bundles.txt").write_text(
        "Schedule analysis:\n\ttotal scheduled bundles:    99\n"
    )
    (tmp_path / "1-copy.3-66-final_bundles.txt").write_text("0x1 : { %s1 = smov 0 }")
    assert scheduled_ops.scheduled_bundles(tmp_path) == {"copy.3": 5428}
