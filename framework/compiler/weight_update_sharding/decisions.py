"""The decisions on weight updates, as a report to read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from meshwright.framework.compiler.stablehlo.shardy.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    shape_of,
)
from meshwright.framework.compiler.weight_update_sharding.decide import Decision
from meshwright.framework.sizes import bytes_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateLine:
    """The line of a weight update.

    Args:
      names: paths of the state that it updates; the weight first.
      shape: the shape of the weight.
      ops: how many ops are computed on shards.
      format: how the weight is divided, such as `[3.3.64:data,64]`; "" if it is not.
      why: the reason if it is left alone, else "".
      state_saved_bytes: the bytes of state that a device need not hold.
      traffic_saved_bytes: the bytes a step that a device need not read or write.
      gathered_bytes: the bytes a step that are gathered.
      gain: estimated seconds a step.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ops: int
    format: str
    why: str
    state_saved_bytes: int
    traffic_saved_bytes: int
    gathered_bytes: int
    gain: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """The report on all weight updates of a program.

    Args:
      mode: the requested mode: auto, off or all.
      data_axes: the mesh axes that split the batch.
      lines: a line for each update, those that save most memory first.
      batch_bytes: the bytes up to which results are gathered in one batch; 0 for none.
      failed: why nothing was sharded, where the pass itself failed; else "".
    """

    mode: str
    data_axes: tuple[str, ...]
    lines: tuple[UpdateLine, ...] = ()
    batch_bytes: int = 0
    failed: str = ""

    @property
    def sharded(self) -> list[UpdateLine]:
        """The lines of the updates that are sharded."""
        return [line for line in self.lines if not line.why]

    def updates_in_shards(self, path: str) -> bool:
        """Whether the update of the state at a path is sharded."""
        return any(path in line.names for line in self.sharded)

    def may_gather(self, shape: tuple[int, ...]) -> bool:
        """Whether a sharded update is of a weight of this shape."""
        return any(tuple(line.shape) == shape for line in self.sharded)

    @property
    def xla_options(self) -> dict[str, int]:
        """Those by which XLA for TPUs batches gathers, as it does all-reduces."""
        if not self.batch_bytes:
            return {}
        return {"xla_all_gather_latency_bound_threshold_in_bytes": self.batch_bytes}

    def summary(self) -> str:
        """The report in short, in a line or two."""
        axes = ", ".join(self.data_axes)
        kept = bytes_text(sum(line.state_saved_bytes for line in self.sharded))
        what = f"weight-update sharding ({self.mode}):"
        if self.failed:
            return f"{what} none, as that failed: {self.failed}"
        if not self.lines:
            return f"{what} no update is repeated along {axes}"
        count = len(self.lines)
        if not self.sharded:
            largest = max(self.lines, key=lambda line: math.prod(line.shape))
            return (
                f"{what} not used; each device along {axes} makes all {count} updates\n"
                f"  (for the largest, {largest.names[0]}: {largest.why})"
            )
        return (
            f"{what} {len(self.sharded)} of {count} updates repeated along {axes}, "
            f"{kept} less state on each device"
        )

    def text(self) -> str:
        """All lines as Markdown."""
        head = [
            "| weight | shape | format | ops | state saved | not read or written | "
            "gathered | gain |",
            "|---|---|---|---|---|---|---|---|",
        ]
        return "\n".join([*head, *map(_row, self.lines)])


def _row(line: UpdateLine) -> str:
    weights = [name for name in line.names if name.startswith("theta")]
    cells = [", ".join(weights or line.names), str(list(line.shape))]
    if line.why:
        cells += [f"left alone: {line.why}", "", "", "", "", ""]
    else:
        sizes = map(
            bytes_text,
            (line.state_saved_bytes, line.traffic_saved_bytes, line.gathered_bytes),
        )
        gain = f"{line.gain * 1e6:.1f} us"
        cells += [line.format, str(line.ops), *sizes, gain]
    return f"| {' | '.join(cells)} |"


def update_report(
    decisions: Sequence[Decision],
    names: Mapping[int, str],
    completed: CompletedModule,
    requested,
    batch_bytes: int,
) -> UpdateReport:
    """The report on decisions, made before the module is changed."""
    lines = [_line(decision, names, completed) for decision in decisions]
    return UpdateReport(
        mode=requested.mode.value,
        data_axes=tuple(requested.data_axes),
        lines=tuple(
            sorted(lines, key=lambda line: (-line.state_saved_bytes, line.names))
        ),
        batch_bytes=batch_bytes,
    )


def _line(
    decision: Decision, names: Mapping[int, str], completed: CompletedModule
) -> UpdateLine:
    arguments = completed.main.regions[0].blocks[0].arguments
    state = decision.cluster.state
    weight_first = sorted(state, key=lambda i: (not names[i].startswith("theta"), i))
    return UpdateLine(
        names=tuple(names[i] for i in weight_first),
        shape=shape_of(arguments[weight_first[0]]),
        ops=len(decision.cluster.ops),
        format=_format_text(decision, arguments[weight_first[0]]),
        why=decision.why,
        state_saved_bytes=decision.state_saved_bytes,
        traffic_saved_bytes=decision.traffic_saved_bytes,
        gathered_bytes=decision.gathered_bytes,
        gain=decision.gain,
    )


def _format_text(decision: Decision, value) -> str:
    layout = decision.layout
    if layout is None or layout.first(value) is None:
        return ""
    first, sizes = layout.first(value), list(map(str, shape_of(value)))
    last = first + layout.count
    split = ".".join(sizes[first:last]) + ":" + ".".join(layout.axes)
    return f"[{','.join([*sizes[:first], split, *sizes[last:]])}]"
