"""Language models whose speed MaxText published, on newer TPUs than the papers'.

Nothing of the estimate was fitted to them. Sources, in
github.com/AI-Hypercomputer/maxtext unless said otherwise:

- v5e: README.md of 2023-10-27 (commit 9bc243c), a pod of 256 chips, with the
  configurations in MaxText/configs/largest_job/ and MaxText/configs/base.yml.
- v5p: MaxText/configs/v5p/README.md of 2023-12-15 (commit 76bd53b), with the scripts
  beside it. A v5p-128 has 64 chips; the topology is assumed to be a cube.
- v6e: the README of training/trillium/Llama2-70B-MaxText in
  github.com/AI-Hypercomputer/tpu-recipes (commit c8cfe2f). The log that it prints has
  9.052 s a step and 2097152 tokens, which are 2 rows a chip; its listing has 3.

The first two publish utilization, from which seconds follow: they divide FLOPs as
MaxText counted them by the seconds of a step and by 197 or 459 TFLOP/s.
"""

from __future__ import annotations

import dataclasses

from paper_rows import Row

TABLE = "maxtext"
_PEAK_TFLOPS = {"v5e": 197, "v5p": 459}  # As MaxText has them.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Model:
    """A model of `MaxText/configs/base.yml` at these commits.

    Args:
      model_dims: M.
      num_layers: L.
      rows: rows of 2048 tokens of a chip.
    """

    model_dims: int
    num_layers: int
    rows: int
    hidden_dims: int = 32768
    heads: int = 32 * 256
    vocab_size: int = 32768
    length: int = 2048

    def teraflops(self, *, causal: bool) -> float:
        """Of a chip's step: 6 a weight and token, and attention's.

        Args:
          causal: whether half of the pairs of tokens count, not all.
        """
        layer = self.model_dims * (4 * self.heads + 2 * self.hidden_dims)
        weights = self.num_layers * layer + self.vocab_size * self.model_dims
        pairs = self.length**2 * (0.5 if causal else 1)
        attention = 12 * self.num_layers * self.heads * pairs
        return self.rows * (6 * weights * self.length + attention) / 1e12


def _row(name: str, topology: str, model: _Model, utilization: float) -> Row:
    kind = topology.partition(":")[0]
    # MaxText halved its count of attention's FLOPs between the two tables.
    teraflops = model.teraflops(causal=kind == "v5p")
    return Row(
        table=TABLE,
        name=name,
        topology=topology,
        gin_file=f"paper/maxtext_{name}.gin",
        step_s=teraflops / (utilization * _PEAK_TFLOPS[kind]),
        util=utilization,
    )


ROWS = (
    _row(
        "16b_v5e", "v5e:16x16", _Model(model_dims=5120, num_layers=32, rows=6), 0.6110
    ),
    _row(
        "32b_v5e", "v5e:16x16", _Model(model_dims=10240, num_layers=32, rows=4), 0.6686
    ),
    _row(
        "32b_v5p", "v5p:4x4x4", _Model(model_dims=10240, num_layers=32, rows=8), 0.7147
    ),
    Row(
        table=TABLE,
        name="llama2_70b_v6e",
        topology="v6e:16x16",
        gin_file="paper/maxtext_llama2_70b_v6e.gin",
        step_s=9.052,
        util=402.274 / 918,  # Causal attention counts in full there.
    ),
)
