"""Where the results of weight updates are gathered (weight-update sharding 4.2)."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from meshwright.framework.compiler.stablehlo.dataflow.carried import Use
from meshwright.framework.compiler.weight_update_sharding.carried_state import joined
from meshwright.framework.compiler.weight_update_sharding.clusters import (
    Cluster,
    Dims,
    bytes_of,
    gathered_bytes,
    uses_of,
)
from meshwright.framework.compiler.weight_update_sharding.redundancy import Redundancy
from meshwright.framework.compiler.weight_update_sharding.shardable import dim_map


def place_gathers(cluster: Cluster, dims: Dims, redundancy: Redundancy) -> None:
    """Keeps weights unsharded between steps where that gathers no more.

    Elsewhere ops that read them, such as a conversion to bfloat16, compute on shards as
    long as that makes tensors smaller, and the results are gathered.

    Args:
      cluster: a weight update, which loses the weights that stay unsharded, or gains
        the ops that read them.
      dims: the dims of all clusters.
      redundancy: what replicas compute alike.
    """
    for links in joined(cluster.links):
        values = [value for link in links for value in link.values]
        reads = {v: uses for v, uses in cluster.exits().items() if v in values}
        if not reads:
            continue
        costs = [_reads(cluster, redundancy, *read) for read in reads.items()]
        unsharded = max(gathered_bytes(cluster, *read) for read in reads.items())
        if sum(size for size, _ in costs) < unsharded:
            for op in (op for _, ops in costs for op in ops):
                dims.add(op)
                cluster.grow(op)
        else:
            cluster.links = [link for link in cluster.links if link not in links]


def _reads(
    cluster: Cluster, redundancy: Redundancy, value: ir.Value, uses: Sequence[Use]
) -> tuple[float, Sequence[ir.Operation]]:
    """The fewest bytes to gather for some uses of a value, and ops that join it."""
    total, ops = 0.0, []
    direct = gathered_bytes(cluster, value, uses)
    for op, _ in uses:
        if not _narrows(op, redundancy):
            return direct, []
        result = op.results[0]
        size, after = _reads(cluster, redundancy, result, uses_of(result))
        total += size
        ops += [op, *after]
    return (total, ops) if total < direct else (direct, [])


def _narrows(op, redundancy: Redundancy) -> bool:
    """Whether an op makes a tensor of no more bytes than its operand, on shards."""
    if len(op.operands) != 1 or len(op.results) != 1:
        return False
    if dim_map(op, redundancy.rules) is None:
        return False
    smaller = bytes_of(op.results[0]) <= bytes_of(op.operands[0])
    return bool(redundancy.alike.get(op.results[0])) and smaller
