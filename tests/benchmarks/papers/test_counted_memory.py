"""libtpu's cycles beside those of memory: read from a text like its own."""

from benchmarks.papers import counted_memory
from meshwright.framework.compiler.hlo.hlo_text import HloModule
from meshwright.framework.devices.hardware import TPU_KINDS

HLO = """
HloModule program

ENTRY %main (x: bf16[16,100]) -> bf16[16,100] {
  %x = bf16[16,100]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %neg = bf16[16,100]{1,0:T(8,128)(2,1)} negate(%x), \
backend_config={"window_config":{"estimated_cycles":"261"}}
}
"""


def test_an_op_with_cycles_is_beside_its_padded_bytes():
    kind = TPU_KINDS["v3"]
    moved = 2 * 16 * 128 * 2
    assert list(counted_memory.ops_of(HloModule(HLO), kind)) == [
        (261, moved / kind.memory_bandwidth * kind.clock)
    ]
