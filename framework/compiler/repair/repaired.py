"""Layouts that differ from what propagation chose, for users to read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from meshwright.framework.compiler.lowering.sources import (
    Source,
    Sources,
    program_name,
    shown_name,
)
from meshwright.framework.compiler.repair.convolutions.conv_layout import Layout, joined
from meshwright.framework.compiler.repair.halos.halos import Halos
from meshwright.framework.compiler.repair.op_layout import FactorKind, OpLayout, Tensor
from meshwright.framework.compiler.repair.table.fault import Chosen, Fault
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    dtype_of,
    op_name,
    shape_of,
)
from meshwright.framework.sharding.sharding import Sharding


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Repair:
    """An operation that XLA's partitioner would get wrong, laid out differently.

    Args:
      fault: the row of the table of faults.
      op_name: the name of the TF op, as texts print it.
      source: where the op was made, None if unknown.
      before: the completed shardings of its operands and results, None where mesh axes
        cannot express one.
      after: the shardings that they have now.
      types: the types of the same tensors, such as "f32[8,4]".
      operands: how many of the tensors are operands.
      bytes: an estimate of what each device receives because of the repair, each time
        the operation runs: the parts of its new shards of operands that it did not
        hold, the parts of its completed shards of results that it no longer computes,
        results that other devices now add to, and halos.
      halos: how many of these bytes are other devices' rows that windows along split
        dims read, which devices would also receive if XLA got the operation right.
      is_last: whether all is replicated, as the layout that the fault chose was not
        kept, or meets a fault too.
    """

    fault: Fault
    op_name: str
    source: Source | None
    before: tuple[Sharding | None, ...]
    after: tuple[Sharding, ...]
    types: tuple[str, ...]
    operands: int
    bytes: int
    halos: int = 0
    is_last: bool = False

    @property
    def is_costly(self) -> bool:
        """Whether devices receive more than halos because of the repair."""
        return self.bytes > self.halos and not self.fault.is_slow

    @property
    def uneven(self) -> set[int]:
        """Sizes of dims that the completed shardings split into unequal shards."""
        shapes = [map(int, re.findall(r"\d+", t.split("[")[1])) for t in self.types]
        return {
            size
            for shape, sharding in zip(shapes, self.before, strict=True)
            if sharding is not None
            for size, shards in zip(shape, sharding.splits(), strict=True)
            if size % shards
        }

    def changes(self) -> Iterator[tuple[str, Sharding | None, Sharding]]:
        """("operand 0 f32[8,4]", before, after) of each tensor that is resharded."""
        names = [f"operand {i}" for i in range(self.operands)]
        names += [f"result {i}" for i in range(len(self.after) - self.operands)]
        names = [
            f"{name} {type_}" for name, type_ in zip(names, self.types, strict=True)
        ]
        for name, old, new in zip(names, self.before, self.after, strict=True):
            if old != new:
                yield name, old, new

    def __str__(self) -> str:
        made = (self.source.layer, str(self.source)) if self.source else ()
        where = f" ({', '.join(filter(None, made))})" if any(made) else ""
        listed = ", ".join(
            f"{name} {old or 'unknown'} -> {new}" for name, old, new in self.changes()
        )
        gets = "is slow at" if self.fault.is_slow else "gets wrong"
        done = f"it is laid out otherwise: {listed}" if listed else self.fault.repair
        if not self.fault.is_slow:
            done = f"so that the result is right, {done}"
        return (
            f"op {self.op_name!r}{where} {self.fault.what}, which XLA {gets}; {done} "
            f"({self.bytes} bytes to each device in each run)"
        )

    def __repr__(self) -> str:
        return f"<Repair: {self}>"


def repair_of(
    op_layout: OpLayout, fault: Fault, chosen: Chosen, sources: Sources
) -> Repair:
    """The repair of an operation.

    Args:
      op_layout: the operation as completed.
      fault: the fault that it would meet.
      chosen: the layout that it gets instead.
      sources: where the program's ops come from.
    """
    after = _shardings(op_layout, chosen)
    name = program_name(op_name(op_layout.op))
    count = len(op_layout.operands)
    moved = sum(
        tensor.bytes_received(tensor.sharding, new)
        for tensor, new in zip(op_layout.operands, after[:count], strict=True)
    ) + sum(
        tensor.bytes_received(new, tensor.sharding)
        for tensor, new in zip(op_layout.results, after[count:], strict=True)
    )
    moved += _summed(op_layout, after)
    halos = chosen.bytes(op_layout) if isinstance(chosen, Halos) else 0
    return Repair(
        fault=fault,
        op_name=shown_name(name),
        source=sources.find(name),
        before=tuple(tensor.sharding for tensor in op_layout.tensors),
        after=after,
        types=tuple(
            f"{dtype_of(value)}[{','.join(map(str, shape_of(value)))}]"
            for value in (*op_layout.op.operands, *op_layout.op.results)
        ),
        operands=count,
        bytes=moved + halos,
        halos=halos,
    )


def _summed(op_layout: OpLayout, after: tuple[Sharding, ...]) -> int:
    """Bytes of results that are now sums over devices, or over other devices."""
    new = dataclasses.replace(
        op_layout,
        operands=_with(op_layout.operands, after[: len(op_layout.operands)]),
        results=_with(op_layout.results, after[len(op_layout.operands) :]),
    )
    is_new = any(
        kind is FactorKind.REDUCED
        and any(new.groups(factor))
        and new.groups(factor) != op_layout.groups(factor)
        for factor, kind in enumerate(op_layout.kinds)
    )
    return is_new * sum(tensor.shard_bytes() for tensor in new.results)


def _with(tensors: tuple[Tensor, ...], shardings) -> tuple[Tensor, ...]:
    return tuple(
        dataclasses.replace(tensor, sharding=sharding)
        for tensor, sharding in zip(tensors, shardings, strict=True)
    )


def _shardings(op_layout: OpLayout, chosen: Chosen) -> tuple[Sharding, ...]:
    if not isinstance(chosen, Layout):
        return chosen.shardings
    mesh = op_layout.mesh
    tensors = (
        (chosen.manual_lhs, chosen.lhs),
        (chosen.manual_rhs, chosen.rhs),
        (chosen.manual_out, chosen.out or ((),) * len(chosen.manual_out)),
    )
    return tuple(Sharding(mesh, joined(*parts)) for parts in tensors)
